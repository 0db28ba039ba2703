"""The host lane beside the caller: its driver, what is waited for, failures, lifetimes."""

from __future__ import annotations

import gc
import os
import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import HybridDeviceOptimizer, LaneError, TransferConfig
from fsdp_offload.core import backend
from fsdp_offload.core.backend import CpuBackend, Event, PendingEvent
from fsdp_offload.pipeline import host
from fsdp_offload.pipeline.host_lane import HostLane
from fsdp_offload.pipeline.worker import ThreadPool
from fsdp_offload.update.params import Snapshot, Work
from tests.helpers.lanes import in_lanes

pytestmark = pytest.mark.usefixtures("small_host_buckets")
CPU = torch.device("cpu")
NUMELS = (700, 64, 500, 130, 1000, 1300)


class Job:
    """An optimizer whose host lane is driven by hand, and the plain one over copies."""

    def __init__(self, threads: int = 3, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(n).to(dtype)) for n in NUMELS]
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in self.parameters]
        self.plain = torch.optim.AdamW(self.masters, lr=0.05, fused=True)
        self.optimizer = HybridDeviceOptimizer(
            torch.optim.AdamW(self.parameters, lr=0.05),
            update_on="host",
            transfer=TransferConfig(bucket_bytes="4KiB", host_threads=threads),
        )
        lane = self.optimizer._reserved.engines[0].host
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
    """Host threads wait for it before each update; set at the end of the test."""
    held, update = threading.Event(), host.HostUnit.update

    def late(unit: host.HostUnit, work: Work) -> None:
        held.wait()
        update(unit, work)

    monkeypatch.setattr(host.HostUnit, "update", late)
    yield held
    held.set()


def drivers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("fsdp_offload-host-driver")]


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


# --------------------------------------------------------------------------- who waits


def test_offering_never_blocks_and_waiting_does(job: Job, hold: threading.Event) -> None:
    assert len(job.lane.buckets) > job.lane.staging.depth  # the driver itself has to wait
    written = job.offer_all(job.work(0))

    assert not any(event.is_recorded() or event.query() for event in written)
    hold.set()
    written[0].synchronize()
    assert written[0].query()
    for event in reversed(written):
        event.synchronize()
    job.plain.step()
    job.check()


def test_the_driver_is_one_thread_made_at_the_first_offer() -> None:
    before = len(drivers())
    job = Job()
    for p in job.parameters:
        p.grad = torch.ones_like(p)
    job.optimizer.step()
    assert len(drivers()) == before  # overlap="step" does without
    for step in range(2):
        job.offer_all(job.work(step))
    assert len(drivers()) == before + 1
    job.optimizer.close()
    assert len(drivers()) == before


def test_each_thread_enters_the_device_before_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []
    monkeypatch.setattr(
        CpuBackend, "enter_thread", lambda self: entered.append(threading.current_thread().name)
    )
    job = Job(threads=2)
    job.offer_all(job.work(0))
    job.lane.synchronize()
    job.optimizer.close()

    assert sorted(name.rstrip("0123456789") for name in entered) == [
        "fsdp_offload-host-",
        "fsdp_offload-host-",
        "fsdp_offload-host-driver-",
    ]


def test_buffers_hold_enough_units_for_all_threads() -> None:
    for threads in (1, 2, 4, 16, 64):
        for units in (1, 3, 6):
            numel = units * host.UNIT_NUMEL
            depth = host.ring_depth(threads, bucket_numel=numel, buckets=500, least=6)
            assert (depth - 1) * units >= 1.5 * threads
            assert depth == 6 or (depth - 2) * units < 1.5 * threads


# --------------------------------------------------------------------------- failures


def explode(*_: Any) -> None:
    raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize("where", ["update", "send_gradients", "write_shards"])
def test_a_failure_surfaces_in_every_wait_until_the_lane_is_aborted(
    job: Job, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = job.work(0)
    with monkeypatch.context() as patch:
        patch.setattr(host.HostBucket, where, explode)
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
    with monkeypatch.context() as patch:
        patch.setattr(host.HostUnit, "update", explode)
        job.offer_all(job.work(0))
        with pytest.raises(LaneError, match="on purpose"):
            job.optimizer.synchronize()
    job.optimizer.load_state_dict(saved)
    for step in range(2):
        job.offer_all(job.work(step))
        job.lane.synchronize()
        job.plain.step()
        job.check()


def test_a_driver_that_is_gone_is_an_error_and_no_hang(
    job: Job, hold: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "POLL_SECONDS", 0.01)
    written = job.offer_all(job.work(0))
    monkeypatch.setattr(ThreadPool, "alive", lambda self: False)

    with pytest.raises(LaneError, match="ended before"):
        written[0].recorded()


@pytest.mark.parametrize("fails", [False, True], ids=["usual", "failed"])
def test_a_dropped_optimizer_frees_its_lane_without_the_cyclic_collector(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    if fails:
        monkeypatch.setattr(host.HostUnit, "update", explode)
    job.offer_all(job.work(0))
    lane = weakref.ref(job.lane)
    tensors = [weakref.ref(t) for r in job.optimizer._reserved.params for t in r.tensors.values()]
    gc.collect()
    gc.disable()
    try:
        job.optimizer.close()
        del job
        assert [t() for t in tensors if t() is not None] == []
        assert fails or lane() is None  # a traceback holds whatever it passed through
    finally:
        gc.enable()


def test_a_pending_event_runs_what_is_left_on_the_waiting_thread() -> None:
    done: Event = CpuBackend(CPU).current_stream().record()
    pending = PendingEvent(lambda event: event.complete(done))

    assert not pending.is_recorded()
    assert not pending.query()
    assert pending.recorded() is done
    assert pending.query()


# --------------------------------------------------------------------------- beside a streamed lane


def beside(lanes: list[str], monkeypatch: pytest.MonkeyPatch) -> HybridDeviceOptimizer:
    """After two steps, on a machine of six cores; parameters of the streamed lane are larger."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    parameters = [nn.Parameter(torch.randn(1000 if lane == "host" else 2000)) for lane in lanes]
    optimizer = in_lanes(
        torch.optim.AdamW(parameters, lr=0.1, fused=True),
        update_on=lanes,
        transfer=TransferConfig(bucket_bytes="4KiB"),
    )
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("lanes", "driving"),
    [
        (["host"] * 3, 0),  # the caller waits for nothing else
        (["streamed", "host", "streamed"], 1),
    ],
    ids=["alone", "both"],
)
def test_beside_a_streamed_lane_a_thread_drives_the_host_lane(
    monkeypatch: pytest.MonkeyPatch, lanes: list[str], driving: int
) -> None:
    before = set(threading.enumerate())
    optimizer = beside(lanes, monkeypatch)
    ours = [t.name for t in set(threading.enumerate()) - before]
    optimizer.close()
    names = [name.removeprefix("fsdp_offload-host-") for name in ours]
    assert sum(name.isdecimal() for name in names) == 6
    assert sum(name.startswith("driver") for name in names) == driving


def test_closing_after_a_failure_waits_for_the_streamed_lanes_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its slots would be freed under them."""
    optimizer = beside(["streamed", "host"], monkeypatch)
    segment = optimizer._reserved.engines[0]
    lane, streamed = segment.host, segment.streamed
    assert lane is not None
    assert streamed is not None
    lane._failure = LaneError("an update", reason="failed in a test")
    waited: list[bool] = []
    monkeypatch.setattr(streamed, "finish_transfers", lambda: waited.append(True))
    optimizer.close()
    assert waited
