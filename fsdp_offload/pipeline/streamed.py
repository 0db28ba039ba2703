"""The streamed lane: state comes from the arena, is updated on the device, and goes back.

The two of its link and ``update``, each in order; an arrow is an event that the right side waits
for::

    fetch:   [state of b -> slot] --arrived--> update
    update:  [unpack, step, pack] --updated--> store
    store:   [slot -> arena]      --stored--> fetch, for the next bucket of the same slot

Fetches and stores overlap each other (the link is full duplex) and everything else. ``update``
waits for the gradients, and code that reads parameters waits for ``updated``.

Buckets pass in a fixed *order*, through ``n`` slots in turn (those that stay excepted). The *head*
is the next position to be updated; state is fetched up to ``n`` positions before it, also when the
gradients are still to come, and written back after it. With many slots the two directions come
loose from each other: where the forward ends and the backward begins, nothing can be updated, but
the backward's first buckets are fetched while others are still stored, so the link is never
idle. Fetching goes on past the end of an iteration, into the first positions of the next one
(*prefetch*), if the arena cannot be written until then: see :meth:`StreamedLane.discard`.

Some buckets have device memory of their own, as large as they are. What an update leaves there is
what the next one needs, so they travel in neither direction. Their arena is out of date then, and
so code that reads it calls :meth:`StreamedLane.flush` first, and code that writes into it
:meth:`StreamedLane.discard`. Updates are the same, so bits do not depend on which buckets stay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.backend import TURN_BYTES, Backend, Event, Stream, TimedEvent
from ..core.config import align
from ..core.storage import span
from ..link import Block, HostRange, Link, Residence
from ..plan import Bucket, Kind, Layout, Slice
from ..plan.layout import kind_range
from ..plan.order import SlotUse, Visit, deadline_order, fetched_first, slot_use
from ..plan.residency import AWAY_STEPS, choose, spread
from ..update.bucket import BucketUpdate, Scratch
from ..update.params import REMAINDER_KIND, MasterForm, ParamState, Work

MARK_EVERY: Final = 8
"""Buckets between two readings of the clock."""
Mark = tuple[int, TimedEvent]
"""Bytes of an iteration that were written back, and when."""


def best_ms_per_byte(marks: Sequence[Mark]) -> float | None:
    """Of the link, each way, in the best stretch between two marks that have been reached."""
    spans = [(a[1].elapsed_time(b[1]), b[0] - a[0]) for a, b in pairwise(marks)]
    return min((ms / n_bytes for ms, n_bytes in spans if n_bytes), default=None) or None


def device_bytes_of(bucket: Bucket) -> int:
    """What a bucket takes on the device: something, also without state."""
    return align(max(bucket.slot_bytes, 1), 256)


class StreamedBucket:
    """A bucket with its place in the arena and its slot."""

    def __init__(
        self,
        optimizer: Optimizer,
        layout: Layout,
        bucket: Bucket,
        params: list[ParamState],
        arena: HostRange,
        slot: Tensor,  # uint8, 1-D
        scratch: Scratch,
    ) -> None:
        self.indices = sorted({s.spec.index for s in bucket.slices})
        self._layout, self.bucket = layout, bucket
        self._spans = [span for span in bucket.spans if span.n_bytes]
        self.block = Block(
            [arena.tensor(span.arena_start, span.n_bytes, torch.uint8) for span in self._spans]
        )
        self._has_remainder = params[bucket.slices[0].spec.index].form is MasterForm.REMAINDER
        self._by_kind = {span.kind: span for span in bucket.spans}
        self._use_slot(slot)
        self.update = BucketUpdate(
            optimizer, bucket, params, self._view, scratch, flat_remainder=self._remainder()
        )
        self.updated: Event | None = None
        """After it, the shards are as the last iteration leaves them."""

    def move_to(self, slot: Tensor) -> None:
        """Use another slot from now on; nothing of this bucket may be in flight."""
        if slot.data_ptr() == self._slot.data_ptr():
            return
        self._use_slot(slot)
        self.update.bind(self._view, self._remainder())

    def _use_slot(self, slot: Tensor) -> None:
        self._slot = slot
        self.block.place(
            [slot[span.slot_start : span.slot_start + span.n_bytes] for span in self._spans]
        )

    def _view(self, slice_: Slice, kind: Kind, numel: int) -> Tensor:
        span = self._by_kind[kind]
        start, stop = kind_range(slice_, kind, numel, self._layout.offsets)
        shift = span.slot_start - span.arena_start
        return self._slot[start + shift : stop + shift].view(kind.dtype)

    def _remainder(self) -> Tensor | None:
        if not self._has_remainder:
            return None
        span = self._by_kind[REMAINDER_KIND]
        flat = self._slot[span.slot_start : span.slot_start + span.n_bytes]
        return flat.view(span.kind.dtype)


def preferred(order: Sequence[int], overlap: str) -> Sequence[int]:
    """Buckets in the order of the forward, those first that shall stay."""
    return order if overlap == "backward" else spread(order)


class StreamedLane:
    """All streamed buckets, in order, over a ring of slots; :meth:`use` gives it its buckets.

    Args:
        update: the stream on which updates run, shared with the resident lane.
        slots: uint8 memory, each as large as the largest bucket.
        staying: uint8 memory of each bucket that stays, by its index.
        overlap: what updates run beside. With ``"step"`` the link is the lane's alone; else copies
            of others to the device have to get through.
    """

    def __init__(
        self,
        backend: Backend,
        update: Stream,
        slots: list[Tensor],
        staying: dict[int, Tensor],
        overlap: str,
    ) -> None:
        self.slots = slots
        self.buckets: list[StreamedBucket] = []
        self.order: list[int] = []
        self._positions: list[int] = []  # of each bucket in the order
        self.staying = staying
        self._away_until: dict[int, int] = {}  # steps before which buckets do not stay
        self._deadlines: Sequence[int] = []  # the buckets, in the order of service
        self._ranks: Sequence[int] = []  # of each, in the forward
        self._backend, self._overlap = backend, overlap
        self._use = SlotUse((), (0,))
        self._update = update
        self.link = Link(backend, "state", turn_bytes=None if overlap == "step" else TURN_BYTES)
        self._free: list[Event | None] = [None] * len(slots)  # when the last store has ended
        self._head = 0  # next position to be updated
        self._travelled = 0  # buckets of this iteration that were written back
        self._fetched = 0  # positions from here on are not in a slot yet
        self._last: Event | None = None  # after the last update
        self.moved_bytes = 0  # written back in the last iteration
        self._moved_bytes = 0  # in this one
        self.fetched_bytes = 0  # fetched between the end of the one before it and its own
        self._fetched_bytes = 0
        self.marks: list[Mark] = []  # of the last iteration
        self._marks: list[Mark] = []  # of this one

    def use(self, buckets: list[StreamedBucket]) -> None:
        """These are all buckets, in the order of the forward."""
        self.buckets = buckets
        self._deadlines = self._ranks = range(len(buckets))
        self._arrange(self.staying, len(self.slots))

    def reorder(self, ready_ms: Sequence[float], ranks: Sequence[int], ms_per_byte: float) -> None:
        """Choose the order of the buckets, between two iterations.

        Args:
            ready_ms: per parameter, when its gradient is there, since the backward's first.
            ranks: per parameter, when the forward needs it compared with others.
            ms_per_byte: of the link, in each direction while both are busy.
        """
        visits = [
            Visit(
                ready_ms=max(ready_ms[index] for index in bucket.indices),
                rank=min(ranks[index] for index in bucket.indices),
                cost_ms=0 if i in self.staying else bucket.bucket.state_bytes * ms_per_byte,
            )
            for i, bucket in enumerate(self.buckets)
        ]
        self._ranks = [visit.rank for visit in visits]
        self._deadlines = deadline_order(visits)
        self._arrange(self.staying, len(self.slots))

    def fit(self, allowed_bytes: int, step: int) -> None:
        """Use so much memory for slots and buckets that stay. After that step.

        Raises:
            torch.OutOfMemoryError: there is less; everything is as before.
        """
        slots, staying = choose(
            self.sizes,
            preferred(sorted(range(len(self.buckets)), key=self._ranks.__getitem__), self._overlap),
            allowed_bytes,
            staying=self.staying,
            away_until=self._away_until,
            step=step,
        )
        left = self.staying.keys() - staying
        self._arrange(staying, slots)
        self._away_until.update(dict.fromkeys(left, step + AWAY_STEPS))

    def _arrange(self, staying: Collection[int], slots: int) -> None:
        order = self._deadlines
        if self._overlap != "backward":
            order = fetched_first(order, staying, slots)
        self.arrange(order, staying, slots)

    def arrange(
        self, order: Sequence[int], staying: Collection[int], slots: int | None = None
    ) -> None:
        """From the next iteration on buckets pass in this order, these stay on the device, and the
        others have so many slots (None: as many as there are). Waits for all transfers. Where there
        is no memory, everything is as before.

        Raises:
            torch.OutOfMemoryError: of the device.
        """
        assert self._head == 0, "the order of an iteration that has begun is fixed"
        wanted = frozenset(staying)
        count = len(self.slots) if slots is None else slots
        assert count or len(wanted) == len(order), "buckets that travel need a slot"
        is_same = wanted == self.staying.keys() and count == len(self.slots)
        if list(order) == self.order and is_same:
            return
        if self.order:
            self.finish_transfers()
        if not is_same:
            self._take_memory(wanted, count)
        self.link.keep_order()  # what was prefetched is fetched again
        self._fetched = 0
        self.order = list(order)
        self._use = slot_use([index in wanted for index in self.order], count)
        self._positions = [0] * len(self.order)
        for position, index in enumerate(self.order):
            self._positions[index] = position
            slot = self._use.slots[position]
            if slot is not None:
                self.buckets[index].block.forget()
            self.buckets[index].move_to(self.staying[index] if slot is None else self.slots[slot])

    def _take_memory(self, wanted: frozenset[int], count: int) -> None:
        """Memory for the buckets that stay and for ``count`` slots; what is not wanted goes."""
        sizes = self.sizes
        own = {i: self._backend.allocate(sizes[i]) for i in wanted - self.staying.keys()}
        more = [self._backend.allocate(max(sizes)) for _ in range(count - len(self.slots))]
        # The caller's stream may still use what it was before.
        self.link.follow(self._backend.current_stream().record(), stores=False)
        self._write_back([index for index in self.staying if index not in wanted])
        self.staying = {i: memory for i, memory in self.staying.items() if i in wanted} | own
        self.slots = [*self.slots[:count], *more]
        self._free = [None] * count

    @property
    def staging_buffers(self) -> list[Tensor]:
        """Slots, and the memory of buckets that stay."""
        return [*self.slots, *self.staying.values()]

    @property
    def own_bytes(self) -> int:
        """Device memory of :attr:`staging_buffers`, whether it is there now or away."""
        return sum(tensor.numel() for tensor in self.staging_buffers)

    @property
    def sizes(self) -> list[int]:
        """Bytes that each bucket takes on the device."""
        return [device_bytes_of(bucket.bucket) for bucket in self.buckets]

    @property
    def has_begun(self) -> bool:
        """Whether a bucket of this iteration has been updated."""
        return self._head > 0

    def run(self, work: Work, *, complete: bool) -> None:
        """Enqueue every bucket, in order, whose gradients are there; waits for none of it. When all
        that will come are there (``complete``), the rest, without buckets that have none: the
        iteration ends."""
        waited: set[Event] = set()
        while self._head < len(self.order):
            bucket = self.buckets[self.order[self._head]]
            self.prefetch()
            if not complete and any(work.ready[index] is None for index in bucket.indices):
                return
            gradients = work.of(bucket.bucket.slices)
            if all(gradient is None for gradient in gradients):
                bucket.updated = self._last  # the arena and the shards are left as they are
                if self._use.slots[self._head] is not None:
                    bucket.block.forget()
                self._head += 1
                continue
            for index in bucket.indices:
                event = work.ready[index]
                if event is not None and event not in waited:
                    waited.add(event)
                    self._update.wait(event)
            self._step(bucket, gradients, work)
        if complete:
            self._end()

    def updated(self, buckets: Sequence[int]) -> Event | None:
        """The event after which all of ``buckets`` are updated: one stream, so the last one's."""
        return self.buckets[max(buckets, key=self._positions.__getitem__)].updated

    def prefetch(self) -> None:
        """Fetch what the next gradients will need, as far as there are slots."""
        for position in range(self._fetched, self._use.reach[self._head]):
            self._fetch(position)
            self._fetched = position + 1

    def _fetch(self, position: int) -> None:
        """Enqueue the transfer of a position of this iteration, unless its state is there."""
        index, slot = self.order[position], self._use.slots[position]
        bucket = self.buckets[index]
        if slot is None and bucket.block.residence is not Residence.HOST:
            return
        self.link.fetch(bucket.block, after=() if slot is None else (self._free[slot],))
        self._fetched_bytes += bucket.bucket.state_bytes

    def _step(self, bucket: StreamedBucket, gradients: list[Tensor | None], work: Work) -> None:
        block, slot = bucket.block, self._use.slots[self._head]
        if block.residence is Residence.FETCHING:
            assert block.arrived is not None
            self._update.wait(block.arrived)
        with span("update"):
            self._update.launch(bucket.update.run, gradients, work.snapshot)
        self._last = bucket.updated = self._update.record()
        block.changed(self._last)
        if slot is not None:
            self._free[slot] = self.link.store(block)
            self._moved_bytes += bucket.bucket.state_bytes
            if self._travelled % MARK_EVERY == 0:
                self._marks.append((self._moved_bytes, self.link.time_stores()))
            self._travelled += 1
        self._head += 1

    def _end(self) -> None:
        self.marks, self._marks = self._marks, []
        self.moved_bytes, self._moved_bytes = self._moved_bytes, 0
        self.fetched_bytes, self._fetched_bytes = self._fetched_bytes, 0
        self._travelled = 0
        self._head = self._fetched = 0

    def flush(self) -> None:
        """Bring the arena up to date where buckets stay; blocks until it is."""
        self._write_back(list(self.staying))

    def _write_back(self, indices: Sequence[int]) -> None:
        blocks = [self.buckets[index].block for index in indices]
        ahead = [block for block in blocks if block.residence is Residence.DIRTY]
        for block in ahead:
            self.link.store(block)
        if ahead:
            self.link.finish_stores()
        for block in ahead:
            block.ended()

    def discard(self) -> None:
        """Forget what is on the device, when the arena has it: it is about to be written into.

        A transfer that is still under way may read what is written; it is made again.
        """
        self.flush()
        self._forget()
        self._fetched = self._head

    def _forget(self) -> None:
        for bucket in self.buckets:
            bucket.block.forget()
        self.link.keep_order()  # turns that are made again have the same targets

    def abort(self) -> None:
        """Forget an iteration that has begun: all state and all weights are written anew."""
        self._forget()
        self._head = self._fetched = self._moved_bytes = self._fetched_bytes = 0
        self._marks, self._travelled = [], 0

    def synchronize(self) -> None:
        """Block until updates have run, and what travels is back in the arena."""
        self.link.finish_stores()

    def finish_transfers(self) -> None:
        """Block until nothing reads or writes the arena and the slots any more."""
        self.link.synchronize()
