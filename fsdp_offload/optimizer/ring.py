"""The ring: stream state from host memory through device slots, update it there, and store it.

It has three streams, each in order: the link's two, and ``update``. An arrow is an event that the
right side waits for::

    fetch:   [state of b -> slot] --arrived--> update
    update:  [unpack, step, pack] --updated--> store
    store:   [slot -> arena]      --stored--> fetch, for the next bucket of the same slot

Fetches and stores overlap each other (the link is full duplex) and everything else. ``update``
waits for the gradients, and code that reads parameters waits for ``updated``.

Buckets pass in a fixed *order* through ``n`` slots in turn, except those that stay. The *head* is
the next position to be updated; state is fetched up to ``n`` positions ahead of it, even before the
gradients exist, and stored after it. Many slots decouple the two directions: between forward and
backward nothing can be updated, but the backward's first buckets are fetched while others are still
stored, so the link is never idle. Fetching continues past the end of an iteration into the first
positions of the next one (*prefetch*), if nothing can write the arena until then: see
:meth:`Ring.discard`.

Some buckets stay in their own device memory and do not move. Their arena is out of date, so readers
of the arena call :meth:`Ring.flush` first, and writers :meth:`Ring.discard`. Updates are the same,
so bits do not depend on which buckets stay. Buckets without a host copy stay for good: their
authoritative state is on the device.

Weights in host memory (``optimizer/weights.py``) move with the state of their bucket, after it in
the slot. They are stored after each update, even in buckets that stay, because gathers read host
memory. If other code writes a weight, it is fetched again before the update. Where a slot of a
gather has the weight, the update reads it there, and puts the new one into the next gather's.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Final

from torch import Tensor

from ..core.backend import TURN_BYTES, Backend, Event, TimedEvent
from ..core.storage import span
from ..link import Block, Link, Residence
from ..plan.residency import (
    AWAY_STEPS,
    SlotUse,
    choose,
    deadline_order,
    fetched_first,
    preferred_to_stay,
    slot_use,
)
from ..update.params import Work
from .gradient_slots import GradientSlots
from .ring_bucket import RingBucket
from .weight_slots import GatheredWeights

AHEAD: Final = 48
"""Buckets whose updates may wait in the device's queues. A queue holds about 1,000 commands. The
host blocks while it is full, and would enqueue no forward beside the updates."""
MARK_EVERY: Final = 8
"""Buckets between two timestamps."""
Mark = tuple[int, TimedEvent]
"""Bytes of an iteration stored so far, and the time."""


class Ring:
    """All buckets that are updated on the device, in order, through a ring of slots.

    Args:
        overlap: the phase that updates overlap. With ``"step"``, the ring uses the link alone; else
            other copies to the device have to get through.
    """

    def __init__(self, backend: Backend, overlap: str) -> None:
        self.buckets: list[RingBucket] = []
        self.slots: list[Tensor] = []  # uint8, each as large as the largest bucket
        self.staying: dict[int, Tensor] = {}  # uint8 memory of each bucket that stays, by index
        self.order: list[int] = []
        self._positions: list[int] = []  # position of each bucket in the order
        self.sizes: dict[int, int] = {}  # device bytes of each bucket with a host copy
        self._away_until: dict[int, int] = {}  # by bucket, the step before which it does not stay
        self._deadlines: Sequence[int] = []  # the buckets, in the order of service
        self._ranks: Sequence[int] = []  # rank of each in the forward
        self._backend, self.overlap = backend, overlap
        self._use = SlotUse((), (0,))
        self.gradients: GradientSlots | None = None  # if gradients come from host memory
        self.find_weights: Callable[[], GatheredWeights | None] = lambda: None
        """Finds slots of weights in host memory, which outlive the ring."""
        self.link = Link(backend, "state", turn_bytes=None if overlap == "step" else TURN_BYTES)
        self._free: list[Event | None] = []  # per slot: event after its last store
        self._work: Work | None = None  # of an iteration that may have buckets to enqueue
        self._start: Event | None = None  # see run()
        self._waited = set[Event]()  # events of gradients that updates of this iteration wait for
        self._waiting = deque[tuple[Event, RingBucket, int]]()  # updates in the device's queues
        self._iteration = 0
        self._unread: Counter[int] = Counter()  # per parameter, buckets that may read its gradient
        self.is_busy = False  # whether updates are being enqueued now
        self._head = 0  # next position to be updated
        self._travelled = 0  # stored buckets of this iteration
        self._fetched = 0  # first position that is not in a slot yet
        self.moved_bytes = 0  # stored in the last iteration
        self._moved_bytes = 0  # in this one
        self.fetched_bytes = 0  # fetched for the last iteration, prefetches included
        self._fetched_bytes = 0
        self.marks: list[Mark] = []  # of the last iteration
        self._marks: list[Mark] = []  # of this one

    def append(self, buckets: Sequence[RingBucket], allowed_bytes: int) -> None:
        """Add buckets at the end of the forward's order; a running iteration updates them last.
        ``allowed_bytes``: see :meth:`fit`.

        Raises:
            torch.OutOfMemoryError: not enough memory; :meth:`drop_from` removes them again.
        """
        self.complete()
        self._use_buckets([*self.buckets, *buckets])
        slots, staying = self._chosen(allowed_bytes)
        self._arrange(staying, slots)

    def drop_from(self, count: int) -> None:
        """Drop all but the first ``count`` buckets."""
        self._use_buckets(self.buckets[:count])
        self.staying = {i: memory for i, memory in self.staying.items() if i < count}
        self._arrange(self.staying, min(len(self.slots), count))

    def _use_buckets(self, buckets: list[RingBucket]) -> None:
        known, count = len(self.buckets), len(buckets)
        added = range(known, count)
        self.buckets = buckets
        self._deadlines = [*(index for index in self._deadlines if index < count), *added]
        self._ranks = [*self._ranks[:count], *added]
        self.sizes = {
            index: bucket.device_bytes
            for index, bucket in enumerate(buckets)
            if bucket.has_host_copy
        }

    def reorder(self, ready_ms: Sequence[float], ranks: Sequence[int], ms_per_byte: float) -> None:
        """Choose the order of the buckets, between two iterations.

        Args:
            ready_ms: per parameter, when its gradient is ready, counted from the first of the
                backward.
            ranks: per parameter, its position in the forward.
            ms_per_byte: speed of the link, each way with both busy.
        """
        self.complete()
        # Weights are read from the slots of gathers, which stay as they are for a short time: these
        # buckets pass as their gradients come.
        weighty = {i for i, bucket in enumerate(self.buckets) if bucket.weights.host}
        slow = self.sizes.keys() - self.staying.keys() - weighty
        ready = [max(ready_ms[i] for i in bucket.indices) for bucket in self.buckets]
        self._ranks = [min(ranks[i] for i in bucket.indices) for bucket in self.buckets]
        costs = [b.n_bytes * ms_per_byte if i in slow else 0 for i, b in enumerate(self.buckets)]
        # In backward, the next weights go into the slots of the group that came before: a bucket
        # with parameters of both passes first.
        keys = [
            rank * len(self.buckets) + (-i if self.overlap == "backward" else i)
            for i, rank in enumerate(self._ranks)
        ]
        self._deadlines = deadline_order(ready, keys, costs)
        self._arrange(self.staying, len(self.slots))

    def fit(self, allowed_bytes: int, step: int) -> None:
        """Use ``allowed_bytes`` for slots and buckets that stay, after that step.

        Raises:
            torch.OutOfMemoryError: not enough memory; nothing has changed.
        """
        slots, staying = self._chosen(allowed_bytes, step)
        left = self.staying.keys() - staying
        self._arrange(staying, slots)
        self._away_until.update(dict.fromkeys(left, step + AWAY_STEPS))

    def _chosen(self, allowed_bytes: int, step: int = 0) -> tuple[int, frozenset[int]]:
        order = sorted(self.sizes, key=self._ranks.__getitem__)
        weights = self.find_weights()
        first = 1.0 if weights is None else weights.ahead_share
        return choose(
            self.sizes,
            preferred_to_stay(order, first if self.overlap == "backward" else 0.0),
            allowed_bytes,
            staying=self.staying,
            away_until=self._away_until,
            step=step,
        )

    def _arrange(self, staying: Collection[int], slots: int) -> None:
        order = self._deadlines
        if self.overlap != "backward":
            home = self.sizes.keys() - staying
            order = fetched_first(order, [i for i in order if i not in home], slots)
        self.arrange(order, staying, slots)

    def arrange(
        self, order: Sequence[int], staying: Collection[int], slots: int | None = None
    ) -> None:
        """Set the order of buckets, those that stay, and the number of slots (None: as now). Waits
        for all transfers. Without enough memory, nothing changes.

        Raises:
            torch.OutOfMemoryError: not enough device memory.
        """
        self.complete()
        order, done = list(order), self._head
        assert order[:done] == self.order[:done], "what has passed keeps its place"
        wanted = frozenset(staying)
        count = len(self.slots) if slots is None else slots
        assert count or len(wanted) == len(self.sizes), "buckets that travel need a slot"
        is_same = (
            wanted == self.staying.keys()
            and count == len(self.slots)
            and all(slot.numel() >= self._slot_bytes for slot in self.slots)
        )
        if order == self.order and is_same:
            return
        if self.order:
            self.finish_transfers()
        if not is_same:
            self._take_memory(wanted, count)
        self.link.keep_order()  # prefetched state is fetched again
        self._fetched = done
        self.order = order
        stays = [index in wanted or index not in self.sizes for index in order]
        self._use = slot_use(stays, count)
        self._positions = [0] * len(order)
        for position, index in enumerate(order):
            self._positions[index] = position
        for index, bucket in enumerate(self.buckets):  # a parameter's slices are made in order
            slot = self._use.slots[self._positions[index]]
            if slot is not None:
                bucket.forget()
            bucket.move_to(self.staying.get(index) if slot is None else self.slots[slot])

    @property
    def _slot_bytes(self) -> int:
        return max(self.sizes.values(), default=0)

    def _take_memory(self, wanted: frozenset[int], count: int) -> None:
        kept = [slot for slot in self.slots[:count] if slot.numel() >= self._slot_bytes]
        own = {i: self._backend.allocate(self.sizes[i]) for i in wanted - self.staying.keys()}
        more = [self._backend.allocate(self._slot_bytes) for _ in range(count - len(kept))]
        # The caller's stream may still use the previous memory.
        self.link.follow(self._backend.current_stream().record(), stores=False)
        self._write_back([index for index in self.staying if index not in wanted])
        self.staying = {i: memory for i, memory in self.staying.items() if i in wanted} | own
        self.slots = [*kept, *more]
        self._free = [None] * count

    @property
    def staging_buffers(self) -> list[Tensor]:
        """Return the slots, and the memory of buckets that stay."""
        return [*self.slots, *self.staying.values()]

    @property
    def own_bytes(self) -> int:
        """Bytes of :attr:`staging_buffers`, even while offloaded."""
        return sum(tensor.numel() for tensor in self.staging_buffers)

    @property
    def has_begun(self) -> bool:
        """Whether this iteration has updated a bucket."""
        return self._head > 0

    def begin(self, work: Work) -> None:
        """Allocate what :meth:`run` needs; raises DeviceMemoryError before anything is updated."""
        if self.gradients is not None:
            buckets = (self.buckets[index].bucket for index in self.order)
            self.gradients.begin(buckets, work, self.link.update)

    def run(self, work: Work, start: Event | None = None) -> None:
        """Enqueue buckets in order, as :meth:`advance` does, up to the first without its gradients.
        With ``start``, all gradients are ready after it: enqueue the rest, without buckets that
        have none, and end the iteration."""
        self._work, self._start = work, start
        self._enqueue(0)

    @property
    def is_pending(self) -> bool:
        """Whether an iteration that has begun may have buckets that are not enqueued."""
        return self._work is not None

    def advance(self, least: int = 0) -> None:
        """Enqueue the buckets whose gradients are there: those before the position ``least``, and
        as many as :data:`AHEAD` allows. A failure ends the iteration."""
        if self._work is None:
            return
        self._enqueue(least)
        if not self.is_pending:
            self.prefetch()

    def _enqueue(self, least: int) -> None:
        assert self._work is not None
        assert not self.is_busy
        self.is_busy = True
        try:
            self._advance(self._work, least)
        except BaseException:
            self._work = None
            raise
        finally:
            self.is_busy = False

    def complete(self) -> None:
        """Enqueue every bucket whose gradients are there."""
        self.advance(len(self.order))

    def _advance(self, work: Work, least: int) -> None:
        if not self._head:
            self._unread = Counter(i for bucket in self.buckets for i in bucket.indices)
        self._release()
        while self._head < len(self.order):
            if self._head >= least and self.overlap != "step":  # else nothing else is enqueued
                self._release()
                if len(self._waiting) >= AHEAD:
                    return
            bucket = self.buckets[self.order[self._head]]
            self.prefetch()
            if self._start is None and any(work.ready[index] is None for index in bucket.indices):
                return
            gradients = work.of(bucket.bucket.slices)
            if all(gradient is None for gradient in gradients):
                bucket.updated = None
                if self._use.slots[self._head] is not None:
                    bucket.forget()
                self._head += 1
                continue
            for index in bucket.indices:
                event = work.ready[index]
                if event is not None and event not in self._waited:
                    self._waited.add(event)
                    self.link.update.wait(event)
            self._step(bucket, gradients, work)
        if self._start is not None:
            self._end()

    def wait_for_updates(self, most_bytes: int) -> None:
        """Block until gradients whose updates have not run take ``most_bytes`` at most."""
        n_bytes = 0
        for event, bucket, _ in reversed(self._waiting):
            n_bytes += bucket.gradient_bytes
            if n_bytes > most_bytes:
                event.synchronize()
                break
        self._release()

    def _release(self) -> None:
        """Forget updates that have run, and in backward their gradients."""
        while self._waiting and self._waiting[0][0].query():
            _, bucket, iteration = self._waiting.popleft()
            if self._work is None or iteration != self._iteration or self.overlap != "backward":
                continue
            self._unread.subtract(bucket.indices)
            self._work.release(*(i for i in bucket.indices if not self._unread[i]))

    def has_passed(self, buckets: Sequence[int]) -> bool:
        """Whether this iteration has nothing to enqueue of them."""
        return self._work is None or all(self._positions[i] < self._head for i in buckets)

    def updated(self, buckets: Sequence[int]) -> Event | None:
        """Return the event after which all of ``buckets`` are updated (one stream, so the last
        one's); None if the last :meth:`run` skipped all of them. Enqueue them first."""
        self.advance(1 + max(map(self._positions.__getitem__, buckets), default=-1))
        stepped = [index for index in buckets if self.buckets[index].updated is not None]
        # The order may have changed since they were updated.
        last = max(stepped, key=lambda index: self.buckets[index].passed_at, default=None)
        return None if last is None else self.buckets[last].updated

    def prefetch(self) -> None:
        """Fetch the next buckets while slots are free."""
        for position in range(self._fetched, self._use.reach[self._head]):
            self._fetch(position)
            self._fetched = position + 1

    def _fetch(self, position: int) -> None:
        index, slot = self.order[position], self._use.slots[position]
        blocks = self.buckets[index].blocks
        if slot is not None:
            after = [self._free[slot]]
            if self.buckets[index].is_gathered:
                blocks = blocks[:1]
                self.buckets[index].weights.forget()
        else:
            blocks = [block for block in blocks if block.residence is Residence.HOST]
            after = [block.stored for block in blocks]
        if blocks:
            self.link.fetch(*blocks, after=after)
            self._fetched_bytes += sum(block.n_bytes for block in blocks)

    def _step(self, bucket: RingBucket, gradients: list[Tensor | None], work: Work) -> None:
        slot, update, slots = self._use.slots[self._head], self.link.update, self.gradients
        weights = self.find_weights() if bucket.weights.host else None
        waited = None
        for block in bucket.blocks:
            if block is bucket.weights and weights is not None:
                bucket.is_gathered = weights.has(block)
                if bucket.is_gathered and block.residence is Residence.HOST:
                    weights.lend(block, update)
                    continue
            event = self._ready(block)
            if event is not None and event is not waited:
                update.wait(event)
                waited = event
        with (
            span("update"),
            contextlib.nullcontext(gradients)
            if slots is None
            else slots.lending(bucket.bucket, gradients, work, update) as lent,
        ):
            update.launch(bucket.update.run, lent, work.snapshot)
        filled = () if weights is None else weights.bring(bucket.weights, update)
        bucket.updated, bucket.passed_at = update.record(), self._head
        for each in filled:
            each.free = each.arrived = bucket.updated
        self._waiting.append((bucket.updated, bucket, self._iteration))
        for block in bucket.blocks:
            block.changed(bucket.updated)
        if leaving := bucket.blocks[slot is None :]:
            stored = self.link.store(*leaving)
            self._moved_bytes += sum(block.n_bytes for block in leaving)
        if slot is not None:
            self._free[slot] = stored
            if self._travelled % MARK_EVERY == 0:
                self._marks.append((self._moved_bytes, self.link.time_stores()))
            self._travelled += 1
        self._head += 1

    def _ready(self, block: Block) -> Event | None:
        if block.residence is Residence.HOST:  # written since its fetch, or in no slot of a gather
            self.link.fetch(block, after=(block.arrived,))
            self._fetched_bytes += block.n_bytes
        if block.residence is Residence.STORING:
            return block.stored
        return block.arrived if block.residence is Residence.FETCHING else None

    def _end(self) -> None:
        self.marks, self.moved_bytes = self._marks, self._moved_bytes
        self.fetched_bytes = self._fetched_bytes
        self._start_over()

    def _start_over(self) -> None:
        self._work, self._start, self._waited, self._marks = None, None, set(), []
        self._head = self._fetched = self._travelled = 0
        self._moved_bytes = self._fetched_bytes = 0
        self._iteration += 1

    def flush(self) -> None:
        """Store the state of buckets that stay to the arena, and wait for it."""
        self.complete()
        self._write_back(list(self.staying))

    def _write_back(self, indices: Sequence[int]) -> None:
        blocks = [self.buckets[index].block for index in indices]
        if ahead := [block for block in blocks if block.residence is Residence.DIRTY]:
            self.link.store(*ahead)
            self.link.finish_stores()
        for block in ahead:
            block.ended()

    def discard(self) -> None:
        """Discard device copies of the arena, which is about to be overwritten.

        A running transfer may read mixed bytes, so it is repeated.
        """
        self.flush()
        self._forget()
        self._fetched = self._head

    def _forget(self) -> None:
        for index in self.sizes:
            self.buckets[index].forget()
        self.link.keep_order()  # repeated turns have the same targets

    def abort(self) -> None:
        """Drop a running iteration, because all state and weights will be overwritten."""
        self._forget()
        self._start_over()

    def synchronize(self) -> None:
        """Block until updates have run, and moving state is back in the arena."""
        self.complete()
        self.link.finish_stores()

    def close(self) -> None:
        """Release all memory; no other call may follow."""
        self._work = None
        self._waiting.clear()
        for bucket in self.buckets:  # weights may outlive the ring
            bucket.weights.forget()
            bucket.weights.place(())
        self.buckets, self.slots, self.staying, self.order = [], [], {}, []

    def finish_transfers(self) -> None:
        """Block until nothing reads or writes the arena and the slots."""
        self.complete()
        self.link.synchronize()
