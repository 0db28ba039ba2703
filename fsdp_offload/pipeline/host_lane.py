"""The host lane: how its buckets pass between device, host threads and device.

[Note: streams of the host lane]
Its own two streams::

    out:  [gradients -> compute dtype -> host memory; checksum of shards]
    host threads: wait for ``out``, step the arena in place (torch's CPU kernel)
    back: [master -> device -> round and scatter into the shards; new checksum]

Each has device memory of its own, which one bucket after the other passes through. Out and back
travel by kernels, not by copy engines (:mod:`.link`): those serve streams in an order that lets the
host lane wait for all that the streamed lane has enqueued. A host gradient buffer (of a ring) is
free when its update has ended.

[Note: who enqueues]
A bucket's way back can be enqueued only when host threads have updated it, so a thread has to wait
for them. :meth:`HostLane.run` does on the caller's thread: ``step()`` ends when all is enqueued.
:meth:`HostLane.offer` leaves it to one thread of the lane's own, the *driver*, and never blocks:
a host thread that ends an update tells the driver, which enqueues the way back. Who needs the
shards waits for a bucket's :class:`~..core.backend.PendingEvent`. Buckets are enqueued and
return in the order in which they were offered. Everything below :meth:`HostLane.offer` belongs to
one thread at a time: the driver's, or the caller's if there is none.

[Note: failures]
An exception on the driver or on a host thread fails every bucket that has not returned, and those
offered later: code that waits for one of them, or drains the lane, gets a LaneError that it is the
cause of. It stays until :meth:`HostLane.abort`, because weights and masters may be one step apart
by then.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..core.backend import Backend, Event, PendingEvent
from ..core.errors import LaneError
from ..update.params import Work
from .host import HostBucket, HostStaging
from .worker import InlineWorker, Outcome, ThreadPool, Worker


@dataclass(eq=False)
class _Update:
    """A bucket on its way through the lane."""

    bucket: HostBucket
    gradients: list[Tensor | None]
    work: Work
    ready: Sequence[Event]  # the gradients may be read after these, and those of earlier buckets
    written: PendingEvent | None = None
    outcome: Outcome | None = None


class HostLane:
    """All host buckets, in order; ``setup`` is what a thread of the lane does first."""

    def __init__(
        self,
        backend: Backend,
        staging: HostStaging,
        worker: Worker,
        setup: Callable[[], None],
    ) -> None:
        self.staging, self.worker = staging, worker
        self.buckets: list[HostBucket] = []
        self._backend, self._setup = backend, setup
        self._driver: Worker | None = None  # from the first offer on
        self._out = backend.stream("host_out")
        self._back = backend.stream("host_back")
        self._under_way: deque[_Update] = deque()
        self._waited: set[Event] = set()  # of one iteration: the stream out will be behind them
        self._failure: LaneError | None = None
        self._lock = threading.Lock()  # of what both the caller and the driver look at: _promised
        self._promised: set[PendingEvent] = set()
        self._work: weakref.ref[Work] | None = None  # the iteration that has begun
        self._left: list[HostBucket] = []  # buckets of it that were not offered yet
        self.moved_bytes = 0  # per direction, in the last iteration
        self.streams = (self._out, self._back)  # those that use staging buffers and shards
        self.staging_buffers = staging.on_device

    # ------------------------------------------------------------------ on the caller's thread

    def run(self, work: Work, start: Event, between: Callable[[], None]) -> Event | None:
        """Update every bucket that has a gradient, after ``start``; ends when all is enqueued.

        ``between`` is called once the first buckets are under way: the device lanes enqueue their
        work there instead of waiting behind the host threads.

        Returns:
            The event after which all shards are written, or None if there was nothing to do.
        """
        self._begin(work)
        active = [(b, work.of(b.bucket.slices)) for b in self.buckets]
        active = [(b, g) for b, g in active if any(x is not None for x in g)]
        if not active:
            between()
            return None
        first = max(1, min(self.staging.depth - 1, len(active)))
        for count, (bucket, gradients) in enumerate(active, start=1):
            self.moved_bytes += bucket.sent_bytes
            self._push(_Update(bucket, gradients, work, [start] if count == 1 else []))
            if count == first:
                between()
        self.flush()
        return self._back.record()

    def offer(self, work: Work, *, complete: bool) -> None:
        """Begin to update the buckets whose gradients are there, waiting for none of it. When all
        that will come are there (``complete``), the rest, without buckets that have none."""
        self._begin(work)
        left, self._left = self._left, []
        for bucket in left:
            if not complete and any(work.ready[index] is None for index in bucket.indices):
                self._left.append(bucket)
                continue
            gradients = work.of(bucket.bucket.slices)
            if all(gradient is None for gradient in gradients):
                bucket.written = None
                continue
            events = {work.ready[index]: None for index in bucket.indices}  # in this order, once
            ready = [e for e in events if e is not None and e not in self._waited]
            self._waited.update(ready)
            bucket.written = self._hand_over(_Update(bucket, gradients, work, ready))

    def _hand_over(self, update: _Update) -> PendingEvent:
        """Leave one bucket to the driver; returns the event after which its shards are written.

        Until then its gradients are not written, and the caller keeps them alive.
        """
        if self._driver is None:
            has_threads = self._backend.has_threads
            setup, name = self._setup, "host-driver"
            self._driver = ThreadPool(1, 1, setup, name) if has_threads else InlineWorker()
        self.moved_bytes += update.bucket.sent_bytes
        update.written = PendingEvent(self._advance)
        with self._lock:
            self._promised.add(update.written)
        self._driver.submit(self._drive, update)
        return update.written

    def _begin(self, work: Work) -> None:
        if self._work is None or self._work() is not work:
            self._work, self._left = weakref.ref(work), list(self.buckets)
            self._waited.clear()
            self.moved_bytes = 0

    def _advance(self, written: PendingEvent) -> None:
        """A thread waits for it: see :class:`PendingEvent`."""
        if not self._backend.has_threads:  # no other thread will
            self._guarded(lambda: self._return_until(written))
        elif self._driver is None or not (self._driver.alive() and self.worker.alive()):
            raise LaneError(
                "host lane threads",
                reason="they ended before their work did (interpreter shutdown or a fork)",
                remedy="build the optimizer in the process that steps it",
            )

    def synchronize(self) -> None:
        """Block until all shards are written and no update is under way, even after a failure.

        Raises:
            LaneError: something failed on the driver or on a host thread behind it: its cause.
        """
        try:
            if self._driver is not None:
                self._driver.submit(self._guarded, self.flush).join(self._driver.alive)
            for slot, user in enumerate(self.staging.host_user):
                if user is not None:
                    user.join(self.worker.alive)  # run() has raised its error
                    self.staging.host_user[slot] = None
        finally:
            self._under_way.clear()  # what failed in run()
            self._out.synchronize()
            self._back.synchronize()
        if self._failure is not None:
            raise self._failure

    @property
    def fetched_bytes(self) -> int:
        """In the last iteration: masters, as many bytes as gradients were sent."""
        return self.moved_bytes

    def abort(self) -> None:
        """Forget a failure and an iteration that has begun: everything is written anew.

        The lane has been synchronized, or is lost.
        """
        self._failure = self._work = None
        self._under_way.clear()

    def stop(self) -> None:
        """End the driver; the lane has been synchronized, or is lost."""
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.stop()

    # ------------------------------------------------------------------ on the driver

    def _drive(self, update: _Update) -> None:
        """Enqueue one bucket's way out."""
        if self._failure is not None:
            self._complete(update, None)
            return
        self._guarded(lambda: self._push(update))
        driver, outcome = self._driver, update.outcome
        if self._backend.has_threads and driver is not None and outcome is not None:
            outcome.when_done(partial(driver.submit, self._guarded, self._return_updated))

    def _guarded(self, do: Callable[[], None]) -> None:
        """An exception inside fails the lane and every bucket that has not returned."""
        try:
            with torch.no_grad():
                if self._failure is None:
                    do()
        except BaseException as error:
            failure = error if isinstance(error, LaneError) else _failed(error)
            self._failure = failure
            self._under_way.clear()
            with self._lock:
                promised, self._promised = self._promised, set()
            for written in promised:
                written.fail(failure)

    def _return_updated(self) -> None:
        """Enqueue the way back of the buckets, in order, that have been updated."""
        while self._under_way and (outcome := self._under_way[0].outcome) and outcome.is_done():
            self._return_oldest()

    def _return_until(self, written: PendingEvent) -> None:
        while self._under_way and not written.is_recorded():
            self._return_oldest()

    def _complete(self, update: _Update, event: Event | None) -> None:
        if update.written is None:
            return
        with self._lock:
            self._promised.discard(update.written)
        if event is not None:
            update.written.complete(event)
        elif self._failure is not None:
            update.written.fail(self._failure)

    # ------------------------------------------------------------------ on either

    def flush(self) -> None:
        """Wait for all updates under way and enqueue the way back."""
        while self._under_way:
            self._return_oldest()

    def _push(self, update: _Update) -> None:
        """Enqueue a bucket's way out, and the oldest one's way back where the ring is full: blocks
        until that has been updated."""
        self._fetch(update)
        self._under_way.append(update)
        if len(self._under_way) >= self.staging.depth:
            self._return_oldest()

    def _return_oldest(self) -> None:
        update = self._under_way[0]
        assert update.outcome is not None
        update.outcome.wait(self.worker.alive)
        self._under_way.popleft()
        self._back.launch(update.bucket.write_shards, update.gradients)
        self._complete(update, self._back.record())

    def _fetch(self, update: _Update) -> None:
        bucket = update.bucket
        slot = bucket.index % self.staging.depth
        if (user := self.staging.host_user[slot]) is not None:
            user.wait(self.worker.alive)
        for event in update.ready:
            self._out.wait(event)
        self._out.launch(bucket.send_gradients, update.gradients)
        arrived = self._out.record()
        update.outcome = self.worker.submit(bucket.update, arrived, update.work)
        self.staging.host_user[slot] = update.outcome


def _failed(error: BaseException) -> LaneError:
    made = LaneError(
        "an update in the host lane failed",
        reason=repr(error),
        remedy="load a checkpoint (model, then optimizer) or build both anew",
    )
    made.__cause__ = error
    return made
