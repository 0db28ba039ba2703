"""Which lanes an optimizer's parameters get: measured or given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_offload import HybridDeviceOptimizer
from fsdp_offload.core import dtensor
from fsdp_offload.core.config import Lane
from fsdp_offload.core.errors import DeviceError
from fsdp_offload.pipeline import inventory
from fsdp_offload.pipeline.inventory import Inventory
from fsdp_offload.plan import Rates, lanes
from tests.helpers.config import config

CPU = torch.device("cpu")
AdamW = torch.optim.AdamW


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)]).to(dtype)


def made_lanes(made: Inventory) -> dict[str, Lane]:
    records, _ = made.plan(made.trainable(), first=True)
    return {record.fqn: record.lane for record in records}


def inventory_of(net: nn.Module, make: Callable[..., Any] = AdamW, **given: Any) -> Inventory:
    return Inventory(make(net.parameters()), [net], config(**given), CPU)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """As on an accelerator with rates; counts how often they are asked for."""
    asked: Counter[str] = Counter()

    def rates(self: Inventory, ordered: Any) -> Any:
        asked["rates"] += 1
        return Rates(100.0, 85.0, 5e9)

    monkeypatch.setattr(Inventory, "_rates", rates)
    monkeypatch.setattr(lanes, "MIN_BYTES", 1)
    return asked


def test_cpu_tensors_are_streamed_and_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MIN_BYTES", 1)
    monkeypatch.delattr(inventory, "measure_rates")
    assert set(made_lanes(inventory_of(model())).values()) == {"streamed"}


def test_auto_is_measured_and_its_lanes_can_be_given_again(measured: Counter[str]) -> None:
    first = HybridDeviceOptimizer(AdamW(model().parameters()), update_on="auto")
    assert set(first.lanes) == {"streamed", "host"}
    assert first.lanes[-1] == "host"
    assert measured["rates"] == 1
    again = HybridDeviceOptimizer(AdamW(model().parameters()), update_on=first.lanes)
    assert again.lanes == first.lanes
    assert measured["rates"] == 1


@pytest.mark.parametrize("update_on", ["device", "host", ["resident", "host", "streamed"] * 4])
def test_nothing_is_measured_where_lanes_are_given(measured: Counter[str], update_on: Any) -> None:
    found = list(made_lanes(inventory_of(model(), update_on=update_on)).values())
    assert not measured
    wanted = {"device": ["streamed"] * 12, "host": ["host"] * 12}
    assert found == (wanted[update_on] if isinstance(update_on, str) else update_on)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (torch.optim.RMSprop, torch.float32),
        (lambda ps: AdamW(ps, foreach=True), torch.float32),
        (lambda ps: AdamW(ps, fused=False), torch.float32),
        (AdamW, torch.float64),
    ],
    ids=["no fused kernel", "foreach", "not fused", "float64"],
)
def test_what_the_rates_do_not_speak_of_is_streamed(
    measured: Counter[str], make: Callable[..., Any], dtype: torch.dtype
) -> None:
    assert set(made_lanes(inventory_of(model(dtype), make)).values()) == {"streamed"}
    assert not measured


def test_a_list_of_lanes_is_in_the_order_of_the_groups() -> None:
    net = model()
    given: list[Lane] = ["host", "resident"] * 6
    reverse = list(net.parameters())[::-1]
    found = made_lanes(Inventory(AdamW(reverse), [net], config(given), CPU))
    names = dtensor.parameter_names([net])
    assert [found[names[p]] for p in reverse] == given
    assert list(found) == list(names.values())
    optimizer = HybridDeviceOptimizer(AdamW(reverse), net, update_on=given)
    assert optimizer.lanes == given


def test_added_parameters_are_chosen_for_by_themselves(measured: Counter[str]) -> None:
    made = inventory_of(model(), update_on=["host"] * 12)
    made_lanes(made)
    late = nn.Parameter(torch.zeros(64))
    made._optimizer.add_param_group({"params": [late]})
    (record,), _ = made.plan([(late, 1)], first=False)
    assert (record.fqn, record.lane) == ("group1.0", "streamed")
    assert not measured


def test_where_measuring_fails_all_is_streamed_and_said_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise DeviceError("rates of cuda:0", reason="no such luck", remedy="none")

    monkeypatch.setattr(inventory, "measure_rates", fail)
    monkeypatch.setattr(lanes, "MIN_BYTES", 1)
    made = inventory_of(model())
    specs = {p: made._measured(p, group) for p, group in made.trainable()}
    made._device = torch.device("meta")  # any that is not the CPU
    monkeypatch.setattr(inventory, "backend_for", lambda device: None)
    assert set(made._choose(specs, list(specs), first=True).values()) == {"streamed"}
    assert "no such luck" in caplog.text
