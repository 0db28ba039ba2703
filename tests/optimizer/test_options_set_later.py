"""Options that need more state than was reserved: set by a scheduler, or by hand."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from fsdp_offload import HybridDeviceOptimizer, checkpoint
from tests.helpers.side_by_side import SHAPES, Apart, SideBySide

LANES = ("resident", "streamed", "host")
PRESENT = [True] * len(SHAPES)


def sgd(groups: Any) -> Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def fused_sgd(groups: Any) -> Optimizer:
    return torch.optim.SGD(groups, lr=0.1, fused=True)


@pytest.mark.parametrize(
    ("lane", "is_stepped"), [("resident", False), ("streamed", True), ("host", True)]
)
def test_a_master_alone_is_loaded_where_momentum_is_needed_now(
    lane: str, is_stepped: bool, tmp_path: Path
) -> None:
    """As the plain optimizer, which makes the momentum at its next step."""
    built = [nn.Linear(20, 30).bfloat16() for _ in range(3)]
    mine = HybridDeviceOptimizer(sgd(built[0].parameters()), built[0], update_on=[lane] * 2)
    if is_stepped:
        for parameter in built[0].parameters():
            parameter.grad = torch.randn_like(parameter)
        mine.step()
    mine.param_groups[0]["momentum"] = 0.9
    assert all(len(state) == 1 for state in mine.state.values())
    checkpoint.save(tmp_path / "saved", built[0], mine)
    saved = copy.deepcopy((built[0].state_dict(), mine.state_dict()))
    others = []
    for model in built[1:]:
        inner = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.3)
        others.append(HybridDeviceOptimizer(inner, model, update_on=[lane] * 2))
    built[1].load_state_dict(saved[0])
    others[0].load_state_dict(saved[1])
    checkpoint.load(tmp_path / "saved", built[2], others[1])
    for _ in range(2):
        gradients = [torch.randn_like(p) for p in built[0].parameters()]
        for model, optimizer in zip(built, (mine, *others), strict=True):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
    for model in built[1:]:
        for parameter, expected in zip(model.parameters(), built[0].parameters(), strict=True):
            assert torch.equal(parameter, expected)


def test_amsgrad_switched_on_before_the_first_step_is_reserved_then() -> None:
    twins = SideBySide(lambda groups: torch.optim.AdamW(groups, lr=0.1))
    twins.change(amsgrad=True)
    twins.run(4)
    assert "max_exp_avg_sq" in twins.wrapped.state[twins.mine[0]]


def sharded(overlap: str) -> list[float]:
    """Losses of an FSDP2 model with momentum from a scheduler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer: Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if overlap:
        optimizer = HybridDeviceOptimizer(optimizer, model=model, overlap=overlap)
    scheduler = OneCycleLR(optimizer, max_lr=0.2, total_steps=8)
    losses = []
    for step in range(5):
        loss = model(torch.full((4, 8), 0.1 * step)).square().sum()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def test_momentum_set_by_a_scheduler_with_every_overlap(ranks: Any) -> None:
    pool = ranks(2)
    expected = pool.run(sharded, "")
    for overlap in ("step", "forward", "backward"):
        assert pool.run(sharded, overlap) == expected, overlap


@pytest.mark.parametrize("lane", LANES)
def test_a_parameter_that_is_frozen_meanwhile_keeps_its_place(lane: str) -> None:
    plain = {"plain_build": partial(Apart, fused_sgd)} if lane == "host" else {}
    lanes = [lane] * len(SHAPES)
    half = {"dtypes": [torch.float16], "plain_dtypes": [torch.float32]}
    twins = SideBySide(sgd, update_on=lanes, **half, **plain)
    twins.step(PRESENT)
    twins.mine[0].requires_grad_(False)
    twins.change(momentum=0.9)
    twins.step([False, *PRESENT[1:]])
    twins.mine[0].requires_grad_(True)
    twins.step(PRESENT)
    twins.compare()
