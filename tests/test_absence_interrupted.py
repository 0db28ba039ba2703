"""``offload()`` and ``reload()`` of an optimizer alone, interrupted at any line: its state is here,
or known to be away, and whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import HybridDeviceOptimizer
from tests.interrupting import at_each_line
from tests.test_phases_interrupted import PACKAGE, Net

pytestmark = pytest.mark.usefixtures("one_thread")
FILES = {str(PACKAGE / name) for name in ("absence.py", "leaving.py")}
LEAVE, COME_BACK = "OptimizerAbsence.leave", "OptimizerAbsence.come_back"
OPTIONS: dict[str, dict[str, Any]] = {
    "resident": {"offload_fraction": 0.0},
    "mixed": {"offload_fraction": 0.5},
    "host": {"update_on": "host"},
}


def state_of(optimizer: HybridDeviceOptimizer) -> dict[tuple[int, str], Tensor]:
    entries = optimizer.state_dict()["state"]
    return {(i, n): v.clone() for i, each in entries.items() for n, v in each.items()}


class Job:
    """An optimizer that goes away, and one that never does."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.models = [Net(), Net()]
        self.models[1].load_state_dict(self.models[0].state_dict())
        self.mine, self.other = (
            HybridDeviceOptimizer(
                torch.optim.AdamW(m.parameters(), lr=0.01, fused=True), model=m, **options
            )
            for m in self.models
        )
        self.steps = 0
        self.step()

    def step(self) -> None:
        self.steps += 1
        for model, optimizer in zip(self.models, (self.mine, self.other), strict=True):
            for index, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, (self.steps % 5 - 2) / (index + 1))
            optimizer.step()

    def check(self) -> None:
        """What is there is right, wherever it is, and it goes on from there."""
        self.compare()
        self.mine.reload()
        assert not self.mine.is_away
        self.compare()
        self.step()
        self.compare()

    def compare(self) -> None:
        found, expected = state_of(self.mine), state_of(self.other)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value), key
        for a, b in zip(*(m.parameters() for m in self.models), strict=True):
            assert torch.equal(a, b)


def sweep(job: Job, move: Callable[[], object], root: str, prepare: Callable[[], object]) -> None:
    at_each_line(move, root, FILES, prepare=prepare, settle=job.check, check=lambda _: job.check())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_leaving(options: dict[str, Any]) -> None:
    job = Job(options)
    sweep(job, job.mine.offload, LEAVE, lambda: None)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_coming_back(options: dict[str, Any]) -> None:
    job = Job(options)
    sweep(job, job.mine.reload, COME_BACK, job.mine.offload)


def test_what_was_loaded_while_away_survives_an_interrupted_reload() -> None:
    job = Job(OPTIONS["resident"])

    def prepare() -> None:
        job.mine.offload()
        changed = job.mine.state_dict()
        for entries in changed["state"].values():
            entries["exp_avg"] = entries["exp_avg"] + 1
        job.mine.load_state_dict(changed)
        job.other.load_state_dict(changed)

    sweep(job, job.mine.reload, COME_BACK, prepare)


def test_a_native_parameters_new_state_survives_an_interrupted_reload() -> None:
    """Complex parameters are updated by the class itself, whose state may be replaced."""
    model = nn.Linear(4, 4)
    model.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    optimizer = HybridDeviceOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01), model=model, offload_fraction=0.0
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    wanted: list[Tensor] = []

    def prepare() -> None:
        optimizer.offload()
        wanted[:] = [torch.randn(4, dtype=torch.complex64)]
        optimizer.state[model.phase]["exp_avg"] = wanted[0].clone()

    def check(_: int = 0) -> None:
        optimizer.reload()
        assert torch.equal(optimizer.state[model.phase]["exp_avg"], wanted[0])
        optimizer.step()

    at_each_line(optimizer.reload, COME_BACK, FILES, prepare=prepare, settle=check, check=check)
