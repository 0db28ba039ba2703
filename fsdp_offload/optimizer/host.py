"""The host lane: run the block update of :mod:`..update.bucket` on CPU cores.

State stays in the arena. A bucket's weights and gradients move to a slot of page-locked memory, and
its new weights move back, in the order in which buckets are offered::

    link out:     shards, gradients -> slot     after the gradients, and what the slot held before
    host thread:  waits for that; BucketUpdate over slot and arena, by torch's kernels for the CPU
    link in:      slot -> shards of parameters that had a gradient, then ``written``

The weight itself moves to the host each time, so the update sees weights that other code wrote. One
thread does everything below :meth:`HostLane.offer`, which never blocks; its kernels use
``host_threads`` cores.

An exception there fails its bucket and all that follow: code that waits for one of them, or drains
the lane, gets a LaneError with that cause. It persists until :meth:`HostLane.abort`, because some
weights may be one step ahead of others.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core import dtensor
from ..core.backend import TURN_BYTES, Backend, Event, PendingEvent
from ..core.config import OffloadConfig, align
from ..core.devices import cores_near
from ..core.errors import LaneError, UnsupportedParameterError
from ..core.progress import warn
from ..core.storage import as_bytes, span
from ..link import Block, HostRange, Link, Residence, cores_per_rank
from ..link.budget import local_ranks
from ..plan import Bucket, Layout
from ..update.bucket import BucketUpdate, Scratch
from ..update.one_kernel import StepPowers
from ..update.params import MasterForm, ParamState, Work
from .ring_bucket import state_of

HOST_SLOTS = 4
"""Most slots: one arriving, one being updated, one leaving, and one for a bucket out of turn."""


def _gradient_bytes(param: ParamState) -> int:
    """Return the most bytes of a gradient element: bf16 weights may have fp32 gradients."""
    return max(4, param.compute_dtype.itemsize)


def _shard_bytes(numel: int, param: ParamState) -> int:
    return align(numel * param.info.dtype.itemsize, 256)


class HostBucket:
    """A bucket, and the slot for its weights and gradients."""

    def __init__(
        self,
        optimizer: Optimizer,
        bucket: Bucket,
        params: list[ParamState],
        slot: Tensor,  # uint8, 1-D
        scratch: Scratch,
    ) -> None:
        first = params[bucket.slices[0].spec.index]
        self.bucket, self.slot = bucket, slot
        self.indices = sorted({s.spec.index for s in bucket.slices})
        self._width = _gradient_bytes(first)
        shards = slot[: _shard_bytes(bucket.scratch_numel, first)]
        self._gradients = slot[len(shards) :]
        copies = shards.view(first.info.dtype)
        on_host = [copies[s.scratch_start : s.scratch_start + s.numel] for s in bucket.slices]
        self._on_host = [as_bytes(copy) for copy in on_host]
        self._on_device = [
            as_bytes(dtensor.local(params[s.spec.index].parameter).view(-1)[s.start : s.stop])
            for s in bucket.slices
        ]
        self._dtype = first.compute_dtype
        self.update = BucketUpdate(
            optimizer,
            bucket,
            params,
            state_of(params),
            scratch,
            shards=on_host,
            on_host=True,
        )
        self.written: PendingEvent | None = None
        """After it, the last iteration has updated the shards; None: it skipped them."""

    def outgoing(self, gradients: list[Tensor | None]) -> tuple[Block, list[Tensor | None]]:
        """Return a block of all shards and these gradients, and the gradients' places in the slot.

        Raises:
            UnsupportedParameterError: a gradient has more bits than the update's dtype.
        """
        host, device = [*self._on_host], [*self._on_device]
        received: list[Tensor | None] = []
        for slice_, gradient in zip(self.bucket.slices, gradients, strict=True):
            if gradient is None:
                received.append(None)
                continue
            if gradient.itemsize > self._width:
                raise UnsupportedParameterError(
                    f"a gradient of {gradient.dtype} of {slice_.spec.fqn}",
                    reason=f"updates on the CPU run in {self._dtype}",
                    remedy="leave the gradient in the parameter's dtype",
                )
            start = slice_.scratch_start * self._width
            own = self._gradients[start : start + gradient.nbytes]
            host.append(own)
            device.append(as_bytes(gradient))
            received.append(own.view(gradient.dtype))
        return Block(host, device, Residence.DEVICE), received

    def incoming(self, gradients: list[Tensor | None]) -> Block:
        """Return a block of the shards that have a gradient."""
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        return Block([self._on_host[i] for i in present], [self._on_device[i] for i in present])

    def step(self, received: list[Tensor | None], work: Work) -> None:
        """Update slot and arena."""
        if self.update.slices[0].param.form is MasterForm.SHARD:
            received = [None if each is None else each.to(self._dtype) for each in received]
        self.update.run(received, work.snapshot)


def host_buckets(
    optimizer: Optimizer,
    params: list[ParamState],
    layouts: Sequence[Layout],
    take: Callable[[int], HostRange],
) -> list[HostBucket]:
    """Make all buckets of these layouts, whose state is in host memory.

    Args:
        optimizer: the wrapped optimizer.
        params: all parameters; slices name them by index.
        layouts: each for parameters that share every dtype.
        take: gives memory for slots (a bucket's shards, then gradients) and scratch.
    """
    slot_bytes = scratch_bytes = 0
    for layout in layouts:
        param, numel = params[layout.buckets[0].slices[0].spec.index], layout.scratch_numel
        n_bytes = _shard_bytes(numel, param) + align(numel * _gradient_bytes(param), 256)
        slot_bytes = max(slot_bytes, n_bytes)
        scratch_bytes = max(scratch_bytes, Scratch.bytes_of(param, numel))
    buckets = [bucket for layout in layouts for bucket in layout.buckets]
    count = min(HOST_SLOTS, len(buckets))
    memory = take(count * slot_bytes + scratch_bytes)
    slots = [memory.tensor(i * slot_bytes, slot_bytes, torch.uint8) for i in range(count)]
    behind = memory.tensor(count * slot_bytes, scratch_bytes, torch.uint8)
    scratch = Scratch(behind, StepPowers(0, behind.device))
    return [
        HostBucket(optimizer, bucket, params, slots[i % count], scratch)
        for i, bucket in enumerate(buckets)
    ]


@dataclass(eq=False)
class _Visit:
    """A bucket on its way through the lane."""

    bucket: HostBucket
    gradients: list[Tensor | None]
    work: Work
    ready: list[Event]  # events after which the gradients may be read
    received: list[Tensor | None]
    stored: Event | None = None  # after it, the slot is filled


class HostLane:
    """All host buckets, in order.

    Args:
        backend: of the device.
        threads: cores that an update uses.
        overlap: with ``"step"``, the lane uses the link alone.
    """

    def __init__(self, backend: Backend, threads: int, overlap: str) -> None:
        self.buckets: list[HostBucket] = []
        self.link = Link(backend, "host", turn_bytes=None if overlap == "step" else TURN_BYTES)
        self.last: PendingEvent | None = None  # after it, all offered buckets are written
        self.moved_bytes = self.fetched_bytes = 0  # to the host and back, in the last iteration
        set_up = functools.partial(_set_up, backend.device, threads, torch.get_num_threads())
        self._thread = backend.executor("fsdp_offload-host", set_up)
        self._thread.submit(int).result()  # so that it has set its number of kernel threads
        self._offered: deque[_Visit] = deque()
        self._sent: deque[_Visit] = deque()  # moving to the host, or already there
        self._free: dict[Tensor, Event] = {}  # by slot: event after which it is free
        self._failure: LaneError | None = None
        self._running = 0  # id of the thread in _run()
        self._work: weakref.ref[Work] | None = None  # the iteration that has begun
        self._left: list[HostBucket] = []  # its buckets that were not offered yet

    # ------------------------------------------------------------------ on the caller's thread

    def append(self, buckets: list[HostBucket]) -> None:
        """Add buckets; a running iteration updates them last."""
        self.buckets += buckets
        self._left += buckets  # offer() sets it when an iteration begins

    def drop_from(self, count: int) -> None:
        """Drop all but the first ``count`` buckets."""
        self._left = [bucket for bucket in self._left if bucket in self.buckets[:count]]
        del self.buckets[count:]

    def offer(self, work: Work, *, complete: bool) -> None:
        """Start updating the buckets whose gradients are ready, without waiting; with ``complete``,
        the rest, too, except buckets without gradients.

        Until a bucket is ``written``, the caller neither writes nor frees its gradients.
        """
        if self._work is None or self._work() is not work:
            self._work, self._left = weakref.ref(work), list(self.buckets)
            self.moved_bytes = self.fetched_bytes = 0
        left, self._left = self._left, []
        for bucket in left:
            ready = dict.fromkeys(work.ready[index] for index in bucket.indices)  # each once
            if not complete and None in ready:
                self._left.append(bucket)
                continue
            gradients, bucket.written = work.of(bucket.bucket.slices), None
            if all(gradient is None for gradient in gradients):
                continue
            events = [event for event in ready if event is not None]
            visit = _Visit(bucket, gradients, work, events, [])
            self._offered.append(visit)
            bucket.written = self.last = PendingEvent(self._thread.submit(self._run, visit))
            back = bucket.incoming(gradients).n_bytes
            self.fetched_bytes += back
            self.moved_bytes += back + sum(g.nbytes for g in gradients if g is not None)

    def synchronize(self) -> None:
        """Block until all shards are written and no copy is running, even after a failure.

        Does not wait for the host thread if a finalizer calls it there.

        Raises:
            LaneError: the host thread failed, with its error as cause.
        """
        try:
            if self.last is not None and self._running != threading.get_ident():
                self.last.recorded()
        finally:
            self.link.synchronize()

    def abort(self) -> None:
        """Drop a failure and a running iteration, because everything will be overwritten.

        The lane has been synchronized, or is lost.
        """
        self._failure = self._work = self.last = None
        self._offered.clear()
        self._sent.clear()
        for bucket in self.buckets:
            bucket.written = None

    def stop(self) -> None:
        """End the thread after its queue. Does not join it: a finalizer calls this in any thread,
        even inside ``Thread.start()``, whose lock the join would take."""
        self._thread.shutdown(wait=False)

    # ------------------------------------------------------------------ on the host thread

    def _run(self, visit: _Visit) -> Event:
        """Update the next offered bucket; returns the event after which its shards are written."""
        if self._failure is not None:
            raise self._failure
        self._running = threading.get_ident()
        try:
            with torch.no_grad():
                self._send()
                return self._update(self._sent[0])
        except BaseException as error:
            self._failure = LaneError(
                "an update on the CPU failed",
                reason=repr(error),
                remedy="load a checkpoint (model, then optimizer) or build both anew",
            )
            raise self._failure from error
        finally:
            self._running = 0
            visit.gradients.clear()  # nothing here may outlive the step

    def _send(self) -> None:
        while self._offered and all(
            visit.bucket.slot is not self._offered[0].bucket.slot for visit in self._sent
        ):
            visit = self._offered[0]
            block, visit.received = visit.bucket.outgoing(visit.gradients)
            free = self._free.get(visit.bucket.slot)
            visit.stored = self.link.store(block, after=(*visit.ready, free))
            self._sent.append(self._offered.popleft())

    def _update(self, visit: _Visit) -> Event:
        bucket = visit.bucket
        assert visit.stored is not None
        visit.stored.synchronize()
        with span("update"):
            bucket.step(visit.received, visit.work)
        arrived = self._free[bucket.slot] = self.link.fetch(bucket.incoming(visit.gradients))
        self._sent.popleft()
        return arrived


def _set_up(device: torch.device, kernel_threads: int, inherited: int) -> None:
    if device.type != "cpu":  # a new thread has device 0, where work would cost a context
        torch.get_device_module(device).set_device(device)
    with contextlib.suppress(OSError):  # a sandbox forbids it: slower, not wrong
        os.sched_setaffinity(0, cores_near(device))  # 0: this thread, and its kernels'
    torch.get_num_threads()  # else this thread's first kernel would restore the default
    torch.set_num_threads(kernel_threads)
    # set_num_threads also sets the default of later threads. A short-lived thread restores that
    # default and leaves this thread's own number alone.
    restore = threading.Thread(target=torch.set_num_threads, args=(inherited,))
    restore.start()
    restore.join()


def thread_count(config: OffloadConfig) -> int:
    """Return the cores for updates: ``host_threads``, else this process's cores / ranks on this
    host.

    Warns about a single core.
    """
    threads = config.transfer.host_threads or cores_per_rank()
    if threads == 1:
        warn(
            "updates on the CPU have 1 thread (%d cores, %d local ranks): expect "
            "a tenth of the speed of 16; set TransferConfig(host_threads=...)",
            len(os.sched_getaffinity(0)),
            local_ranks(),
        )
    return threads
