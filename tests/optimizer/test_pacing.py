"""The host enqueues updates no further ahead than ``ring.AHEAD``: what ``step()`` leaves undone is
enqueued at gates, and by whatever reads or ends the optimizer."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp_offload.optimizer import overlap, ring
from tests.helpers.simulator import StreamSimulator, use_backend
from tests.optimizer.test_overlap import Job

GROUPS = 4
BEFORE = 2


@pytest.fixture(autouse=True)
def _nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU all events have passed, so any other number would never be reached. A new order
    of the buckets enqueues all."""
    monkeypatch.setattr(ring, "AHEAD", 0)
    monkeypatch.setattr(overlap, "REORDER_AFTER", frozenset[int]())


def stepped() -> tuple[Job, Job]:
    """Jobs just after ``step()``, the plain one's first."""
    plain, job = Job(None), Job("forward", device_memory=0)
    for each in (plain, job):
        each.train(BEFORE)
        each.backward(BEFORE)
        each.optimizer.step()
    return plain, job


def pending(job: Job) -> list[bool]:
    """Per gate, whether updates are not enqueued yet."""
    updates = job.optimizer._updates.overlap
    return [updates.is_pending(index) for index in range(GROUPS)]


def test_each_gate_enqueues_what_its_group_needs_and_nothing_beyond() -> None:
    plain, job = stepped()
    engine = job.optimizer._updates.reserved.engine
    assert pending(job) == [True] * GROUPS
    assert engine.ring._head == 0
    for index, group in enumerate(job.played.groups):
        group.tell("before_gather", job.played.gather)
        buckets = {bucket for gate in range(index + 1) for bucket in engine._gates[gate][1]}
        enqueued = 1 + max(engine.ring._positions[bucket] for bucket in buckets)
        assert engine.ring._head == enqueued % len(engine.ring.order)
        assert not any(pending(job)[: index + 1])
    for mine, theirs in zip(job.parameters, plain.parameters, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("index", range(GROUPS))
def test_a_use_of_a_shard_enqueues_its_updates(index: int) -> None:
    plain, job = stepped()
    job.optimizer._updates.overlap.before_use(index)
    assert not pending(job)[index]
    theirs = dict(zip(job.parameters, plain.parameters, strict=True))
    for mine in job.played.groups[index].parameters:
        assert torch.equal(mine, theirs[mine])


ENDS: dict[str, Callable[[Any], object]] = {
    "synchronize": lambda optimizer: optimizer.synchronize(),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "state": lambda optimizer: optimizer.state,
    "close": lambda optimizer: optimizer.close(),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_reads_or_ends_the_optimizer_enqueues_the_rest(name: str) -> None:
    plain, job = stepped()
    engine = job.optimizer._updates.reserved.engine
    assert engine.ring.is_pending
    ENDS[name](job.optimizer)
    assert not engine.ring.is_pending
    for mine, theirs in zip(job.parameters, plain.parameters, strict=True):
        assert type(mine.data) is torch.Tensor
        assert torch.equal(mine.data, theirs)


def test_an_optimizer_that_goes_enqueues_the_rest() -> None:
    plain, job = stepped()
    assert any(pending(job))
    job.optimizer = None
    gc.collect()
    for mine, theirs in zip(job.parameters, plain.parameters, strict=True):
        assert torch.equal(mine, theirs)


def test_a_step_enqueues_what_no_forward_has_reached() -> None:
    plain, job = stepped()
    for each in (plain, job):
        each.played.groups = each.played.groups[:1]
        each.backward(BEFORE + 1)
        each.optimizer.step()
        each.optimizer.zero_grad()
    job.optimizer.synchronize()
    job.assert_like(plain)


def test_as_many_updates_as_allowed_wait_in_the_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """On streams that run nothing before the host waits."""
    monkeypatch.setattr(ring, "AHEAD", 1)
    with use_backend(StreamSimulator("lazy")) as backend:
        job = Job("forward", backend, device_memory=0)
        job.train(BEFORE)
        job.optimizer.synchronize()
        job.backward(BEFORE)
        job.optimizer.step()
        engine = job.optimizer._updates.reserved.engine
        assert (engine.ring._head, len(engine.ring.order)) == (1, 5)
        job.optimizer.synchronize()
        assert not engine.ring.is_pending
        job.optimizer.close()


def test_gradients_go_in_backward_once_their_updates_have_run() -> None:
    """On the CPU an update has run when it was enqueued. Those of the groups that come first are
    over; buckets with parameters of later groups are not."""
    job = Job("backward", device_memory=0)
    job.backward(0)
    work = job.optimizer._updates.overlap.work
    held = [gradient.numel() for gradient in work.gradients if gradient is not None]
    assert len(held) == len(job.parameters)
    assert held.count(0) == 2
    job.optimizer.step()
    plain = Job(None)
    plain.train(1)
    job.optimizer.zero_grad()
    job.assert_like(plain)
