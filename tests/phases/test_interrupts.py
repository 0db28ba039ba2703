"""SIGINT while memory moves: it arrives when the move has ended, and what follows has the bits of
a job that was never interrupted."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from fsdp_offload import FixedAddressRegion, PhaseOffloader, swap
from fsdp_offload.link.address_range import HostDriver
from fsdp_offload.link.block import StorageBlock
from fsdp_offload.update import state as state_io
from tests.phases.twins import Job


def check(job: Job) -> None:
    """It is all here, and goes on."""
    job.check()
    job.train()
    job.check()


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


PLACES = [
    (StorageBlock, "view", 2, "offload"),
    (StorageBlock, "release", 2, "offload"),
    (state_io, "expose", 8, "offload"),
    (StorageBlock, "restore", 2, "reload"),
]


@pytest.mark.parametrize(("owner", "name", "at", "call"), PLACES)
@pytest.mark.parametrize("alone", [True, False])
def test_a_move_goes_on_to_its_end(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, call: str, alone: bool
) -> None:
    job = Job(0.0)
    kept: Any = {"params": "keep", "grads": "keep"} if alone else {}
    mover = PhaseOffloader(job.model, job.optimizer, **kept)
    job.optimizer.state_dict()
    if call == "reload":
        mover.offload()
    with monkeypatch.context() as patch:
        calls = struck(patch, owner, name, at=at)
        with pytest.raises(KeyboardInterrupt):
            getattr(mover, call)()
    assert len(calls) > at
    assert mover.is_away is (call == "offload")
    mover.reload()
    check(job)


def test_a_handle_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    phases = PhaseOffloader(job.model, job.optimizer)
    handle = phases.offload(wait=False)
    with monkeypatch.context() as patch:
        struck(patch, StorageBlock, "release", at=2)
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
    assert not any(p.untyped_storage().nbytes() for p in job.model.parameters())
    phases.reload()
    check(job)


def test_a_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [Job() for _ in range(2)]
    here, away = (PhaseOffloader(job.model, job.optimizer) for job in jobs)
    away.offload()
    with monkeypatch.context() as patch:
        struck(patch, StorageBlock, "restore", at=2)
        with pytest.raises(KeyboardInterrupt):
            swap(out=here, in_=away)
    assert (here.is_away, away.is_away) == (True, False)
    here.reload()
    for job in jobs:
        check(job)


def test_a_region(monkeypatch: pytest.MonkeyPatch) -> None:
    region = FixedAddressRegion("kv", "cpu", chunk_bytes="4KiB")
    tensor = region.empty(4096, dtype=torch.float32).fill_(3)
    for name, call, paused in (("unmap", region.pause, True), ("map", region.resume, False)):
        with monkeypatch.context() as patch:
            struck(patch, HostDriver, name, at=2)
            with pytest.raises(KeyboardInterrupt):
                call()
        assert region.is_paused is paused
    assert bool((tensor == 3).all())
