"""SIGINT while memory moves: it arrives when the move has ended, and what follows has the bits of
a job that was never interrupted."""

from __future__ import annotations

import copy
import signal
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_offload import FixedAddressRegion, HybridDeviceOptimizer, PhaseOffloader, swap
from fsdp_offload.memory.transfer import StorageBlock
from fsdp_offload.phases import pages
from fsdp_offload.update import state as state_io

pytestmark = pytest.mark.usefixtures("one_thread")


class Job:
    """A model and its optimizer, and a twin that never moves."""

    def __init__(self, *, wrapped: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 8))
        self.twin = copy.deepcopy(self.model)
        self.optimizer, self.other = (self.build(m, wrapped) for m in (self.model, self.twin))
        self.steps = 0
        self.step()

    @staticmethod
    def build(model: nn.Module, wrapped: bool) -> Any:
        plain = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        return HybridDeviceOptimizer(plain, model, offload_fraction=0.0) if wrapped else plain

    def step(self) -> None:
        self.steps += 1
        for model, optimizer in ((self.model, self.optimizer), (self.twin, self.other)):
            for index, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, (self.steps % 5 - 2) / (index + 1))
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        """It is all here, goes on, and has the twin's bits before and after."""
        for _ in range(2):
            for mine, other in ((self.model, self.twin), (self.optimizer, self.other)):
                torch.testing.assert_close(mine.state_dict(), other.state_dict(), rtol=0, atol=0)
            self.step()


def struck(patch: pytest.MonkeyPatch, owner: Any, name: str, *, at: int) -> list[int]:
    """Send SIGINT from within a call of a function, which then goes on; one entry per call."""
    original, calls = getattr(owner, name), list[int]()

    def call(*args: Any, **options: Any) -> Any:
        calls.append(len(calls) + 1)
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **options)

    patch.setattr(owner, name, call)
    return calls


PLACES = [(StorageBlock, "view", 2), (StorageBlock, "release", 2), (state_io, "expose", 8)]


@pytest.mark.parametrize(("owner", "name", "at"), PLACES)
@pytest.mark.parametrize("alone", [True, False])
def test_leaving(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, alone: bool
) -> None:
    job = Job()
    mover: Any = job.optimizer if alone else PhaseOffloader(job.model, job.optimizer)
    job.optimizer.state_dict()
    with monkeypatch.context() as patch:
        calls = struck(patch, owner, name, at=at)
        with pytest.raises(KeyboardInterrupt):
            mover.offload()
    assert len(calls) > at
    assert mover.is_away
    mover.reload()
    job.check()


@pytest.mark.parametrize("alone", [True, False])
def test_coming_back(monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    job = Job()
    mover: Any = job.optimizer if alone else PhaseOffloader(job.model, job.optimizer)
    mover.offload()
    with monkeypatch.context() as patch:
        calls = struck(patch, StorageBlock, "restore", at=2)
        with pytest.raises(KeyboardInterrupt):
            mover.reload()
    assert len(calls) > 2
    assert not mover.is_away
    job.check()


def test_a_handle_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(wrapped=False)
    phases = PhaseOffloader(job.model, job.optimizer)
    handle = phases.offload(wait=False)
    with monkeypatch.context() as patch:
        struck(patch, StorageBlock, "release", at=2)
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
    assert not any(p.untyped_storage().nbytes() for p in job.model.parameters())
    phases.reload()
    job.check()


def test_a_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [Job(wrapped=False) for _ in range(2)]
    here, away = (PhaseOffloader(job.model, job.optimizer) for job in jobs)
    away.offload()
    with monkeypatch.context() as patch:
        struck(patch, StorageBlock, "restore", at=2)
        with pytest.raises(KeyboardInterrupt):
            swap(out=here, in_=away)
    assert (here.is_away, away.is_away) == (True, False)
    here.reload()
    for job in jobs:
        job.check()


def test_a_region(monkeypatch: pytest.MonkeyPatch) -> None:
    region = FixedAddressRegion("kv", "cpu", chunk_bytes=4096)
    tensor = region.empty(4096, dtype=torch.float32).fill_(3)
    for name, call, paused in (("unmap", region.pause, True), ("map", region.resume, False)):
        with monkeypatch.context() as patch:
            struck(patch, pages.HostPages, name, at=2)
            with pytest.raises(KeyboardInterrupt):
                call()
        assert region.is_paused is paused
    assert bool((tensor == 3).all())
