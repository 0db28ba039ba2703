"""Which plan an optimizer gets: measured, given, or saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_offload import shards
from fsdp_offload.config import Lane
from fsdp_offload.errors import ConfigError, DeviceError
from fsdp_offload.pipeline import inventory
from fsdp_offload.pipeline.inventory import Inventory
from fsdp_offload.plan import Plan, planner
from tests.plan.known import ONE_GPU, config, trust_predictions


@pytest.fixture(autouse=True)
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    trust_predictions(monkeypatch)


CPU = torch.device("cpu")
# So slow that a few thousand elements take as long as a model.
RATES = replace(
    ONE_GPU,
    both_ways_gbps=1e-4,
    host_numel_per_s=4e3,
    host_latency_ms=1e-3,
    host_dram_gbps=1.0,
    beside_gbps=8.5e-5,
    beside_numel_per_s=5e3,
)
AdamW = torch.optim.AdamW


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)]).to(dtype)


def planned(
    net: nn.Module,
    make: Callable[..., Any] = AdamW,
    *,
    saved: Plan | None = None,
    update_on: Any = "auto",
    **given: Any,
) -> Inventory:
    made = Inventory(make(net.parameters()), [net], config(update_on, **given), CPU, saved)
    records, natives = made.plan(made.trainable(), first=True)
    assert made.made == Plan((), ())  # only what is committed counts
    made.commit(records, natives)
    lanes = {record.fqn: record.lane for record in records}
    assert lanes == {
        c.fqn: lane for c, lane in zip(made.made.candidates, made.made.lanes, strict=True)
    }
    return made


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """As on an accelerator whose rates are known; counts who asked for them."""
    asked: Counter[str] = Counter()

    def rates(self: Inventory, ordered: Any) -> Any:
        asked["rates"] += 1
        return RATES

    monkeypatch.setattr(Inventory, "_rates", rates)
    monkeypatch.setattr(planner, "MIN_BYTES", 1)
    return asked


def test_cpu_tensors_are_streamed_and_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MIN_BYTES", 1)
    monkeypatch.delattr(inventory, "measure_rates")
    plan = planned(model()).made
    assert set(plan.lanes) == {"streamed"}
    assert plan.rates is None


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_auto_uses_both_lanes_by_the_rates(measured: Counter[str], overlap: str) -> None:
    plan = planned(model(), overlap=overlap).made
    assert plan.rates == RATES
    assert plan.lanes[0] == "streamed"
    assert plan.lanes[-1] == "host"
    predicted = plan.predict()
    assert predicted is not None
    assert predicted.limit == "link"
    assert 0 < predicted.host_ms < predicted.step_ms


@pytest.mark.parametrize("update_on", ["device", "host", ["resident", "host", "streamed"] * 4])
def test_nothing_is_measured_where_lanes_are_given(measured: Counter[str], update_on: Any) -> None:
    plan = planned(model(), update_on=update_on).made
    assert not measured
    assert plan.rates is None
    if update_on == "device":
        assert set(plan.lanes) == {"streamed"}


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
    plan = planned(model(dtype), make).made
    assert set(plan.lanes) == {"streamed"}
    assert not measured


def test_candidates_know_their_bytes_in_each_lane() -> None:
    candidate = planned(model()).made.candidates[0]
    assert candidate.fqn == "0.weight"
    assert candidate.max_local_numel == 256
    assert candidate.max_local_bytes == 256 * 10  # two moments and the remainder
    assert candidate.host_state_bytes == 256 * 12  # two moments and the master
    assert candidate.gradient_bytes == 256 * 4


def test_a_list_of_lanes_is_in_the_order_of_the_groups() -> None:
    net = model()
    lanes: list[Lane] = ["host", "resident"] * 6
    reverse = list(net.parameters())[::-1]
    made = Inventory(AdamW(reverse), [net], config(lanes), CPU)
    records, natives = made.plan(made.trainable(), first=True)
    made.commit(records, natives)
    names = shards.parameter_names([net])
    assert [made.made.lane(names[p]) for p in reverse] == lanes
    assert [c.fqn for c in made.made.candidates] == list(names.values())


# --------------------------------------------------------------------------- saved plans


def test_a_saved_plan_is_followed_without_measuring(measured: Counter[str]) -> None:
    plan = planned(model()).made
    measured.clear()
    again = planned(model(), saved=Plan.from_dict(plan.to_dict())).made
    assert again == plan
    assert not measured


def test_a_saved_plan_of_another_model_is_refused(measured: Counter[str]) -> None:
    plan = planned(model()).made
    with pytest.raises(ConfigError, match=r"bytes of state.*Remedy"):
        planned(model(torch.float32), saved=plan)


def test_added_parameters_are_planned_and_join_the_plan(measured: Counter[str]) -> None:
    net = model()
    first = planned(net)
    saved = first.made
    made = Inventory(AdamW(net.parameters()), [net], config(), CPU, saved)
    made.commit(*made.plan(made.trainable(), first=True))
    measured.clear()
    late = nn.Parameter(torch.zeros(64))
    made._optimizer.add_param_group({"params": [late]})
    made.commit(*made.plan([(late, 1)], first=False))
    assert made.made.lanes[:-1] == saved.lanes
    assert made.made.candidates[-1].fqn == "group1.0"
    assert measured["rates"] == 1


def test_after_a_list_of_lanes_added_parameters_are_streamed(measured: Counter[str]) -> None:
    made = planned(model(), update_on=["host"] * 12)
    late = nn.Parameter(torch.zeros(64))
    made._optimizer.add_param_group({"params": [late]})
    made.commit(*made.plan([(late, 1)], first=False))
    assert made.made.lanes[-1] == "streamed"
    assert not measured


def test_where_measuring_fails_all_is_streamed_and_said_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise DeviceError("rates of cuda:0", reason="no such luck", remedy="none")

    monkeypatch.setattr(inventory, "measure_rates", fail)
    monkeypatch.setattr(planner, "MIN_BYTES", 1)
    net = model()
    made = Inventory(AdamW(net.parameters()), [net], config(), CPU)
    drafts = [made._draft(*member) for member in made.trainable()]
    made._device = torch.device("meta")  # any that is not the CPU
    monkeypatch.setattr(inventory, "gateway_for", lambda device: None)
    assert set(made._choose(drafts, drafts, first=True).lanes) == {"streamed"}
    assert "no such luck" in caplog.text
