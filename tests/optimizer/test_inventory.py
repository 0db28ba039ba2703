"""Which lanes an optimizer's parameters get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from fsdp_offload.core.config import Lane
from fsdp_offload.optimizer.inventory import Inventory
from tests.helpers.compare import assert_same
from tests.helpers.config import config

CPU = torch.device("cpu")
AdamW = torch.optim.AdamW


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)]).to(dtype)


def made_lanes(made: Inventory) -> dict[str, Lane]:
    records, _ = made.plan(made.trainable())
    return {record.fqn: record.lane for record in records}


def inventory_of(net: nn.Module, make: Callable[..., Any] = AdamW, **given: Any) -> Inventory:
    return Inventory(make(net.parameters()), [net], config(**given), CPU)


def test_state_is_streamed_unless_said_otherwise() -> None:
    for update_on, lane in (("device", "streamed"), ("host", "host")):
        assert set(made_lanes(inventory_of(model(), update_on=update_on)).values()) == {lane}


def test_added_parameters_are_chosen_for_by_themselves() -> None:
    made = inventory_of(model(), offload_fraction=0.5)
    assert set(made_lanes(made).values()) == {"resident", "streamed"}
    late = nn.Parameter(torch.zeros(64))
    made._optimizer.add_param_group({"params": [late]})
    (record,), _ = made.plan([(late, 1)])
    assert (record.fqn, record.lane) == ("group1.0", "streamed")


def over_one_memory(wraps: bool, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    """Three parameters overlap, two lie side by side."""
    torch.manual_seed(0)
    flat, other = torch.randn(3000).to(dtype), torch.randn(200)
    spans = [flat[:2000], other[:100], flat[1000:], other[100:], flat[:2000]]
    parameters = [nn.Parameter(span) for span in spans]
    optimizer: torch.optim.Optimizer = AdamW(parameters, lr=0.1, weight_decay=0.1, **options)
    if wraps:
        transfer = TransferConfig(bucket_bytes="4KiB")
        optimizer = made = HybridDeviceOptimizer(optimizer, transfer=transfer)
        assert made.statistics().parameters == {"streamed": 2, "native": 3}
    for step in range(4):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
        if step == 2:
            parameters[0].grad = None
        optimizer.step()
    return [flat, other, *(optimizer.state[p]["exp_avg"].clone() for p in parameters)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("foreach", [False, True])
def test_parameters_that_share_memory_are_updated_in_the_order_of_torch(
    foreach: bool, dtype: torch.dtype
) -> None:
    expected = over_one_memory(False, dtype, foreach=foreach)
    assert_same(over_one_memory(True, dtype, foreach=foreach), expected)
