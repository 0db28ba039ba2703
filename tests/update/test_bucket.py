"""Buckets that call torch's kernels directly, or move to other memory, give the class's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_offload.update import fused_adam
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


class Spy:
    """Counts direct calls, and may forbid them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.forbidden = 0, False
        call, values = fused_adam._call, fused_adam.settings
        monkeypatch.setattr(fused_adam, "_call", lambda *a: self._counted(call, *a))
        monkeypatch.setattr(
            fused_adam, "settings", lambda *a: None if self.forbidden else values(*a)
        )

    def _counted(self, call: Callable[..., None], *args: Any) -> None:
        self.calls += 1
        call(*args)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def adam(params: list[Any]) -> Optimizer:
    return torch.optim.Adam(params, lr=0.01, weight_decay=0.1, fused=True)


def sgd(params: list[Any]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5)


def two_groups(params: list[Any]) -> Optimizer:
    groups = [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, fused=True, lr=0.01)


DIRECT: list[tuple[Build, torch.dtype, str, bool]] = [
    (adamw(), FP32, "resident", True),
    (adam, BF16, "streamed", True),
    (adamw(amsgrad=True), BF16, "resident", False),
    (adamw(maximize=True, betas=(0.8, 0.95), eps=1e-5), FP16, "streamed", False),
    (adamw(lr=torch.tensor(0.01)), FP32, "streamed", True),
    (two_groups, FP16, "resident", True),
]


@pytest.mark.parametrize(("build", "dtype", "lane", "missing"), DIRECT)
def test_direct_calls_give_the_bits_of_the_class(
    spy: Spy, build: Build, dtype: torch.dtype, lane: str, missing: bool
) -> None:
    direct, by_class = Run(build, dtype, lane), Run(build, dtype, lane)
    for step in range(4):
        spy.calls, spy.forbidden = 0, False
        direct.step(step, missing=missing)
        if lane == "resident":
            groups = len(direct.optimizer.param_groups)
            assert spy.calls == (groups if step else 0), "the first step is the class's"
        assert bool(spy.calls) == bool(step)
        spy.forbidden = True
        by_class.step(step, missing=missing)
    assert_same(direct.outcome(), by_class.outcome())


class Changed(torch.optim.AdamW):
    """A class of the user's own."""

    def _init_group(self, *args: Any) -> bool:
        return super()._init_group(*args)


UNUSUAL: dict[str, Build] = {
    "foreach": adamw(fused=False, foreach=True),
    "open": adamw(fused=None),
    "betas in tensors": adamw(betas=(torch.tensor(0.9), torch.tensor(0.999))),
    "another class": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "subclass": lambda params: Changed(params, fused=True),
}


@pytest.mark.parametrize("build", UNUSUAL.values(), ids=UNUSUAL)
def test_whatever_is_unusual_is_left_to_the_class(spy: Spy, build: Build) -> None:
    run = Run(build, FP32, "resident", elementwise=True)
    for step in range(2):
        run.step(step)
    assert not spy.calls


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
