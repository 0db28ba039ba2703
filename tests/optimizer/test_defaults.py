"""What the one line chooses, where nothing is said."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_offload import HybridDeviceOptimizer
from tests.fsdp import models
from tests.fsdp.models import Ranks, check
from tests.helpers.own_optimizers import Lion


def test_there_are_few_options() -> None:
    parameters = inspect.signature(HybridDeviceOptimizer).parameters
    assert list(parameters) == [
        "optimizer", "model", "elementwise", "device_memory", "host_memory", "overlap",
        "update_on", "moments", "master_weights", "offload_fraction", "transfer", "unknown",
    ]  # fmt: skip


def test_plain_modules_are_updated_in_the_step() -> None:
    model = nn.Linear(4, 4)
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW(model.parameters()), model)
    assert optimizer.statistics().overlap == "step"


def chosen(how: str) -> str:
    """``overlap`` of an FSDP2 model whose optimizer or model is special."""
    model: Any = models.toy(models.flat_mesh(dist.get_world_size()))
    parameters: list[Any] = [p for p in model.parameters() if p.requires_grad]
    cls: Any = torch.optim.AdamW
    given: Any = model
    options: dict[str, Any] = {}
    if how == "a parameter of no module":
        parameters.append(nn.Parameter(torch.ones(3)))
    elif how == "no model":
        given = None
    elif how == "a class of one's own":
        cls = Lion
    elif how == "and it is elementwise":
        cls, options = Lion, {"elementwise": True}
    elif how == "a part of the model":
        parameters = parameters[:2]
    elif how == "said":
        options = {"overlap": "step"}
    optimizer = HybridDeviceOptimizer(cls(parameters, lr=0.01), given, **options)
    found = str(optimizer.statistics().overlap)
    optimizer.close()
    return found


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("usual", "forward"),
        ("a part of the model", "forward"),
        ("a parameter of no module", "step"),
        ("no model", "step"),
        ("a class of one's own", "step"),
        ("and it is elementwise", "step"),
        ("said", "step"),
    ],
)
def test_fsdp2_modules_are_updated_beside_the_forward(
    ranks: Ranks, how: str, expected: str
) -> None:
    assert ranks(2).run(chosen, how) == [expected] * 2


def shard_after_wrapping() -> None:
    """As Accelerate does: the optimizer gets the DTensors in place of its parameters."""
    twin = models.toy(models.flat_mesh(dist.get_world_size()))
    torch.manual_seed(0)
    model: Any = models.Toy()
    inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    optimizer = HybridDeviceOptimizer(inner, model)
    check(optimizer.statistics().overlap == "step", "before")
    models.shard(model, models.flat_mesh(dist.get_world_size()))
    inner.param_groups[0]["params"][:] = [p for p in model.parameters() if p.requires_grad]
    reference = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=0.01)
    for step in range(3):
        for each, stepper in ((twin, reference), (model, optimizer)):
            models.backward(each, step)
            stepper.step()
            stepper.zero_grad()
    check(optimizer.statistics().overlap == "forward", "afterwards")
    optimizer.synchronize()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        check(torch.equal(models.local(mine), models.local(theirs)), "values")
    optimizer.close()


def test_where_the_model_is_sharded_later_the_choice_is_made_anew(ranks: Ranks) -> None:
    ranks(2).run(shard_after_wrapping)
