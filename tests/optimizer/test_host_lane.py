"""The host lane beside the caller: what is waited for, its thread, failures, lifetimes."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Future
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import HybridDeviceOptimizer, LaneError, TransferConfig
from fsdp_offload.core.backend import PendingEvent
from fsdp_offload.core.devices import CpuBackend
from fsdp_offload.optimizer import host
from fsdp_offload.optimizer.host import HostBucket, HostLane
from fsdp_offload.update.params import Snapshot, Work
from tests.helpers.lanes import in_lanes
from tests.helpers.simulator import WaitingExecutor

CPU = torch.device("cpu")
NUMELS = (700, 64, 500, 130, 1000, 1300)


class Job:
    """An optimizer whose host lane is driven by hand, and the plain one over copies."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(n).to(dtype)) for n in NUMELS]
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in self.parameters]
        self.plain = torch.optim.AdamW(self.masters, lr=0.05, fused=True)
        self.optimizer = HybridDeviceOptimizer(
            torch.optim.AdamW(self.parameters, lr=0.05),
            update_on="host",
            transfer=TransferConfig(bucket_bytes="4KiB", host_threads=2),
        )
        lane = self.optimizer._updates.reserved.engine.host
        assert lane is not None
        self.lane: HostLane = lane

    def work(self, step: int, absent: frozenset[int] = frozenset()) -> Work:
        """An iteration of which no gradient is known to be complete yet."""
        gradients: list[Tensor | None] = []
        for index, (parameter, master) in enumerate(
            zip(self.parameters, self.masters, strict=True)
        ):
            gradient = parameter.detach() * 0.5 + (step + 1) / 8
            gradients.append(None if index in absent else gradient)
            master.grad = None if index in absent else gradient.float().clone()
        groups = self.optimizer.param_groups
        snapshot = Snapshot.take(self.optimizer._inner, groups, host=True)
        return Work(gradients, snapshot, [None] * len(NUMELS))

    def offer_all(self, work: Work) -> list[PendingEvent]:
        work.ready = [CpuBackend(CPU).current_stream().record()] * len(NUMELS)
        self.lane.offer(work, complete=True)
        return [b.written for b in self.lane.buckets if b.written is not None]

    def check(self) -> None:
        for mine, master in zip(self.parameters, self.masters, strict=True):
            assert torch.equal(mine.detach(), master.detach().to(mine.dtype))


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.optimizer.close()


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The host thread waits for it before each update; set at the end of the test."""
    held, step = threading.Event(), HostBucket.step

    def late(bucket: HostBucket, *args: Any) -> None:
        held.wait()
        step(bucket, *args)

    monkeypatch.setattr(HostBucket, "step", late)
    yield held
    held.set()


def test_buckets_are_offered_once_as_their_gradients_arrive(job: Job) -> None:
    now = CpuBackend(CPU).current_stream().record()
    for step in range(3):
        work, seen = job.work(step), []
        for index in reversed(range(len(NUMELS))):  # as in backward
            work.ready[index] = now
            job.lane.offer(work, complete=False)
            seen.append(len(job.lane.buckets) - len(job.lane._left))
        job.lane.offer(work, complete=True)
        assert seen == sorted(seen)
        assert seen[-1] == len(job.lane.buckets)
        assert seen[0] < seen[-1]
        job.lane.synchronize()
        job.plain.step()
        job.check()


def test_gradients_may_be_of_more_bits_than_weights_but_not_than_updates() -> None:
    """FSDP2 and Megatron-FSDP can reduce in fp32 what is kept in bf16."""
    job = Job(torch.bfloat16)
    work = job.work(0)
    work.gradients = [g if g is None else g.float() + 2**-20 for g in work.gradients]
    for gradient, master in zip(work.gradients, job.masters, strict=True):
        assert gradient is not None
        master.grad = gradient.clone()
    job.offer_all(work)
    job.lane.synchronize()
    job.plain.step()
    job.check()

    work = job.work(1)
    work.gradients = [g if g is None else g.double() for g in work.gradients]
    job.offer_all(work)
    with pytest.raises(LaneError, match=r"a gradient of torch\.float64"):
        job.lane.synchronize()
    job.optimizer.close()


# --------------------------------------------------------------------------- who waits


def test_offering_never_blocks_and_waiting_does(job: Job, hold: threading.Event) -> None:
    assert len(job.lane.buckets) > host.HOST_SLOTS  # the thread itself has to wait
    written = job.offer_all(job.work(0))

    assert not any(event.query() for event in written)
    hold.set()
    written[0].synchronize()
    assert written[0].query()
    for event in reversed(written):
        event.synchronize()
    job.plain.step()
    job.check()


def test_copies_of_the_next_buckets_are_enqueued_before_an_update(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("outgoing", "step"):
        method = getattr(HostBucket, name)

        def noted(bucket: HostBucket, *args: Any, _name: str = name, _method: Any = method) -> Any:
            calls.append(_name)
            return _method(bucket, *args)

        monkeypatch.setattr(HostBucket, name, noted)
    job.lane._thread = WaitingExecutor()
    job.offer_all(job.work(0))
    job.lane.synchronize()
    first = calls.index("step")
    assert calls[:first] == ["outgoing"] * host.HOST_SLOTS
    assert calls[first:][:4] == ["step", "outgoing"] * 2


# --------------------------------------------------------------------------- failures


def explode(*_: Any) -> None:
    raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize("where", ["outgoing", "step", "incoming"])
def test_a_failure_surfaces_in_every_wait_until_the_lane_is_aborted(
    job: Job, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, incoming = job.work(0), HostBucket.incoming

    def fail(bucket: HostBucket, *args: Any) -> Any:
        if where == "incoming" and threading.current_thread() is threading.main_thread():
            return incoming(bucket, *args)  # its bytes are counted there
        return explode()

    with monkeypatch.context() as patch:
        patch.setattr(HostBucket, where, fail)
        written = job.offer_all(work)
        for event in written:
            with pytest.raises(LaneError, match="on purpose") as caught:
                event.synchronize()
            cause = caught.value.__cause__
            assert isinstance(cause, ZeroDivisionError)
            assert "explode" in "".join(traceback.format_tb(cause.__traceback__))
            assert event.query()
    with pytest.raises(LaneError):
        job.lane.synchronize()
    late = job.offer_all(job.work(1))  # also though nothing would fail any more
    with pytest.raises(LaneError):
        late[0].recorded()
    with pytest.raises(LaneError):
        job.lane.synchronize()
    job.lane.abort()
    job.lane.synchronize()


def test_work_goes_on_after_an_abort_once_everything_was_written_anew(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {k: v for k, v in job.optimizer.state_dict().items()}
    weights = [p.detach().clone() for p in job.parameters]
    with monkeypatch.context() as patch:
        patch.setattr(HostBucket, "step", explode)
        job.offer_all(job.work(0))
        with pytest.raises(LaneError, match="on purpose"):
            job.optimizer.synchronize()
    for parameter, weight in zip(job.parameters, weights, strict=True):
        parameter.data.copy_(weight)
    job.optimizer.load_state_dict(saved)
    for step in range(2):
        job.offer_all(job.work(step))
        job.lane.synchronize()
        job.plain.step()
        job.check()


def test_a_thread_that_is_gone_is_an_error_and_no_hang(job: Job) -> None:
    job.lane.stop()
    with pytest.raises(RuntimeError, match="after shutdown"):
        job.offer_all(job.work(0))


def test_stopping_joins_nothing(job: Job, hold: threading.Event) -> None:
    """Finalizers stop lanes, in any thread, under any lock."""
    written = job.offer_all(job.work(0))
    job.lane.stop()
    assert not written[-1].query()
    hold.set()
    written[-1].synchronize()


def test_a_finalizer_on_the_thread_does_not_wait_for_the_thread(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = HostBucket.step

    def finalizing(bucket: HostBucket, *args: Any) -> None:
        job.lane.synchronize()
        step(bucket, *args)

    monkeypatch.setattr(HostBucket, "step", finalizing)
    job.offer_all(job.work(0))
    job.lane.synchronize()
    job.plain.step()
    job.check()


def test_a_thread_that_cannot_set_up_is_an_error_of_the_constructor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(torch, "set_num_threads", refuse)
    monkeypatch.setattr(logging.getLogger("concurrent.futures"), "disabled", True)
    with pytest.raises(BrokenExecutor):
        Job()


@pytest.mark.parametrize("fails", [False, True], ids=["usual", "failed"])
def test_a_dropped_optimizer_frees_its_lane_without_the_cyclic_collector(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    if fails:
        monkeypatch.setattr(HostBucket, "step", explode)
    job.offer_all(job.work(0))
    lane = weakref.ref(job.lane)
    tensors = [
        weakref.ref(t) for r in job.optimizer._updates.reserved.params for t in r.tensors.values()
    ]
    gc.collect()
    gc.disable()
    try:
        job.optimizer.close()
        del job
        assert [t() for t in tensors if t() is not None] == []
        assert fails or lane() is None  # a traceback holds whatever it passed through
    finally:
        gc.enable()


# --------------------------------------------------------------------------- the thread


def test_the_thread_alone_is_bound_to_cores_near_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = os.sched_getaffinity(0)
    one, found = frozenset({min(before)}), list[tuple[str, set[int]]]()
    monkeypatch.setattr(host, "cores_near", lambda device: one)
    step = HostBucket.step

    def noted(bucket: HostBucket, *args: Any) -> None:
        found.append((threading.current_thread().name, os.sched_getaffinity(0)))
        step(bucket, *args)

    monkeypatch.setattr(HostBucket, "step", noted)
    job = Job()
    job.offer_all(job.work(0))
    job.lane.synchronize()
    job.optimizer.close()

    assert found == [("fsdp_offload-host_0", set(one))] * len(job.lane.buckets)
    assert os.sched_getaffinity(0) == before


def test_a_system_that_forbids_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(pid: int, mask: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", forbid)
    job = Job()
    job.offer_all(job.work(0))
    job.lane.synchronize()
    job.optimizer.close()


def test_a_process_and_its_forks_end_while_there_is_a_thread() -> None:
    source = """
import os, sys, torch
from fsdp_offload import HybridDeviceOptimizer
model = torch.nn.Linear(64, 64)
optimizer = HybridDeviceOptimizer(torch.optim.AdamW(model.parameters()), model, update_on="host")
model(torch.ones(1, 64)).sum().backward()
optimizer.step()
if (child := os.fork()) == 0:
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    run = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=300
    )
    assert (run.returncode, run.stdout) == (0, "3\n"), run.stderr


# --------------------------------------------------------------------------- beside a streamed lane


def test_closing_after_a_failure_waits_for_the_streamed_lanes_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its slots would be freed under them."""
    parameters = [nn.Parameter(torch.randn(numel)) for numel in (2000, 1000)]
    optimizer = in_lanes(
        torch.optim.AdamW(parameters, lr=0.1, fused=True),
        update_on=["streamed", "host"],
        transfer=TransferConfig(bucket_bytes="4KiB"),
    )
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    engine = optimizer._updates.reserved.engine
    lane, streamed = engine.host, engine.ring
    assert lane is not None
    lane.last = PendingEvent(Future[Any]())
    lane.last._future.set_exception(LaneError("an update", reason="failed in a test"))
    waited: list[bool] = []
    monkeypatch.setattr(streamed, "finish_transfers", lambda: waited.append(True))
    optimizer.close()
    assert waited
