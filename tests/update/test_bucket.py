"""Buckets that move to other memory give the class's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.away import optimizer_alone
from tests.helpers.compare import assert_same
from tests.helpers.lanes import in_lanes
from tests.helpers.training import SMALL

NUMELS = (700, 5, 1920, 0, 33)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Build = Callable[[list[Any]], Optimizer]


def adamw(**options: Any) -> Build:
    options = {"lr": 0.01, "fused": True, **options}
    return lambda params: torch.optim.AdamW(params, **options)


class Run:
    """A wrapped optimizer: all its state in one bucket, or many that share slots."""

    def __init__(self, build: Build, dtype: torch.dtype, lane: str, **options: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        self.parameters = [
            nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in NUMELS
        ]
        lanes = [lane] * len(NUMELS)
        transfer = {"transfer": SMALL} if lane == "streamed" else {}
        self.optimizer = in_lanes(build(self.parameters), update_on=lanes, **transfer, **options)

    def step(self, step: int) -> None:
        generator = torch.Generator().manual_seed(10 + step)
        for parameter in self.parameters:
            drawn = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = drawn
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9

    def outcome(self) -> list[Tensor]:
        """Shards and state."""
        state = self.optimizer.state
        shown = [value for p in self.parameters for value in state[p].values()]
        return [*self.parameters, *shown]


def sgd(params: list[Any]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("build", [adamw(amsgrad=True), sgd])
def test_buckets_that_move_between_updates_give_the_same_bits(
    build: Build, dtype: torch.dtype
) -> None:
    """Also before the first one: SGD's first momentum is the gradient."""
    stays, moves = (Run(build, dtype, "streamed") for _ in "ab")
    phases = optimizer_alone(moves.optimizer)
    for step in range(4):
        with phases.away():
            pass
        for run in (stays, moves):
            run.step(step)
        assert_same(stays.outcome(), moves.outcome())
