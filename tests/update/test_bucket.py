"""Lists that are made once, and buckets that move to other memory, give the class's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_offload.update.one_kernel import FusedAdam
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

    def step(self, step: int, *, missing: bool = False) -> None:
        generator = torch.Generator().manual_seed(10 + step)
        for i, parameter in enumerate(self.parameters):
            drawn = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = None if missing and step and (step + i) % 3 == 0 else drawn
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9

    def outcome(self) -> list[Tensor]:
        """Shards and state."""
        state = self.optimizer.state
        shown = [value for p in self.parameters for value in state[p].values()]
        return [*self.parameters, *shown]


def two_groups(params: list[Any]) -> Optimizer:
    groups = [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, fused=True, lr=0.01)


@pytest.mark.parametrize(
    ("build", "dtype", "lane", "missing"),
    [
        (adamw(maximize=True, betas=(0.8, 0.95), eps=1e-5), FP16, "streamed", False),
        (two_groups, BF16, "resident", False),
        (adamw(), FP32, "resident", True),
    ],
)
def test_lists_that_are_made_once_give_the_bits_of_the_class(
    monkeypatch: pytest.MonkeyPatch, build: Build, dtype: torch.dtype, lane: str, missing: bool
) -> None:
    by_lists = Run(build, dtype, lane)
    taken: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(FusedAdam, "is_for", lambda *args: False)
        by_class = Run(build, dtype, lane)
    run = FusedAdam.run
    monkeypatch.setattr(FusedAdam, "run", lambda *a: taken.append(run(*a)) or taken[-1])
    for step in range(5):
        taken.clear()
        by_lists.step(step, missing=missing)
        assert any(taken) == (step > 0 and not missing)
        by_class.step(step, missing=missing)
    assert_same(by_lists.outcome(), by_class.outcome())


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
