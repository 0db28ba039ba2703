"""Weights that live in host memory, and are on the device while FSDP2 gathers them.

The shards of one FSDP2 group lie one behind the other in host memory, each as FSDP2 has it: the
local tensor, then padding. The device has a few *slots* (:mod:`.weight_slots`), each as large as
the largest group. A group is fetched into a slot before its gather reads it, and lent to FSDP2 for
the length of that one call. A forward that ends early leaves nothing behind.

The buckets of the ring (``optimizer/ring.py``) bring a trained weight to its update and back to
host memory: :attr:`Away.blocks`. What reads host memory waits until the last of them is *stored*.
So a slot has the weight as it is now if it was fetched after the stores that are the last ones now.
What writes host memory waits likewise, and the buckets fetch anew what they had fetched ahead.

What the caller does with such a parameter goes by a stand-in: see ``core/gated.py``. The
stand-ins keep everything alive that the weights need. So the model outlives its optimizer.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from ..core.backend import TURN_BYTES, Backend, Event, Stream, copy_all
from ..core.config import OffloadConfig, align
from ..core.errors import DeviceError, check_open
from ..core.fsdp import Group, GroupShard
from ..core.storage import as_bytes
from ..link import Block, HostPool, HostRange, Link, Residence, allocating
from ..update.params import ParamState
from .away import Away, age, stored
from .overlap import Overlap
from .ring_bucket import RingBucket
from .weight_slots import KEPT, STEP, Slot, WeightSlots, slot_count

_ALIGNMENT: Final = 256
"""Bytes, of each shard in host memory and in a slot."""
_WHAT: Final = "weights", "call fsdp_offload.shard(model, blocks) or fully_shard of smaller modules"


class Weights:
    """The weights of a model that live in host memory; a :class:`.Lender`.

    Args:
        groups: FSDP2's.
        backend: of the device.
        config: how host memory is obtained.
        chosen: per group, its shards that leave the device.

    Raises:
        HostMemoryError: they do not fit into host memory; nothing was moved.
        PinningError: the driver refused to page-lock it.
        DeviceMemoryError: no room for slots; nothing was moved.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        backend: Backend,
        config: OffloadConfig,
        chosen: Sequence[Sequence[GroupShard]],
    ) -> None:
        self.backend = backend
        self._pid, self._lock = os.getpid(), threading.RLock()
        self.staying_bytes = 0  # of weights that could have left
        self._link = Link(backend, "weights", turn_bytes=TURN_BYTES)
        self._pool = HostPool("HybridDeviceOptimizer: weights", backend, config.transfer)
        self._link.end_with(self, self._pool)
        sizes = [sum(map(padded_bytes, shards)) for shards in chosen]
        self._find_updates: Callable[[], Overlap | None] = lambda: None
        self._parts: dict[Block, list[tuple[Away, int, int]]] = {}  # elements of what is in a block
        arena = self._pool.take(sum(sizes))
        try:
            count = min(slot_count(config.overlap), sum(map(bool, sizes)))
            with allocating(count * max(sizes), *_WHAT):
                slots = [Slot(n, backend.allocate(max(sizes))) for n in range(count)]
        except BaseException:
            self._pool.close()
            raise
        self.slots = WeightSlots(slots, KEPT if config.overlap == "backward" else 0)
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self.away = [self._cut(i, chosen[i], arena, start) for i, start in enumerate(starts)]
        found = {each.held.parameter: each for group in self.away for each in group}
        self.trained = {p: each for p, each in found.items() if p.requires_grad}
        """What its optimizer updates."""
        self.moved_bytes = 0  # of parameters that CPUOffloadPolicy had on the CPU, on all ranks
        self._link.follow(backend.current_stream().record(), stores=False)  # the slots' last use
        for index, (group, away) in enumerate(zip(groups, self.away, strict=True)):
            if away:
                self.moved_bytes += group.leave_cpu()
                self._store([each.host for each in away], [each.held.padded for each in away])
                for each in away:
                    each.leave()
                weakref.finalize(self, group.lend(index, self, backend))

    def _cut(
        self, index: int, shards: Sequence[GroupShard], arena: HostRange, start: int
    ) -> list[Away]:
        """Host memory, and views of slots, for one group; later no torch operation is needed, which
        selective activation checkpointing would see in a forward alone."""
        away, at = list[Away](), 0
        for held in shards:
            padded = held.padded
            host = arena.tensor(start + at, padded.numel(), padded.dtype)
            views = [s.memory[at : at + padded.nbytes].view(padded.dtype) for s in self.slots.all]
            away.append(Away(self, index, held, host, views))
            at += padded_bytes(held)
        for slot in self.slots.all:
            slot.blocks.append(Block([arena.tensor(start, at, torch.uint8)], [slot.memory[:at]]))
            slot.blocks[index].turns(TURN_BYTES)
        return away

    @property
    def host_bytes(self) -> int:
        """Of weights that are in host memory."""
        return sum(each.host.nbytes for group in self.away for each in group)

    def attach(
        self,
        params: Sequence[ParamState],
        buckets: Sequence[RingBucket],
        updates: Overlap | None,
    ) -> None:
        """Know what updates them, whenever that has changed; ``updates`` may be late."""
        self._find_updates = (lambda: None) if updates is None else weakref.ref(updates)
        self._parts = {}
        for away in self.trained.values():
            away.past, away.blocks = age([away]), []
        for bucket in buckets:
            slices = ((params[s.spec.index].parameter, s) for s in bucket.bucket.slices)
            known = ((self.trained.get(parameter), s) for parameter, s in slices)
            if found := [(each, s.start, s.stop) for each, s in known if each is not None]:
                self._parts[bucket.weights] = found
            for away in dict.fromkeys(each for each, _, _ in found):
                away.blocks.append(bucket.weights)
                away.past -= bucket.weights.stores  # it is as old as before

    def exchange_written(self) -> None:
        """Before and after updates: exchange with host memory what the caller has written, and what
        code that holds a view of a copy is to see."""
        if kept := [away for away in self.trained.values() if away.kept is not None]:
            # A turn enqueues all updates.
            with self.turn():
                for away in kept:
                    away.flush()

    @property
    def slot_bytes(self) -> int:
        """Device memory of the slots."""
        return sum(slot.memory.nbytes for slot in self.slots.all)

    @property
    def ahead_bytes(self) -> int:
        """Bytes of gradients, of about two groups, by which backward may be ahead of updates."""
        return self.slot_bytes // 2

    @property
    def ahead_share(self) -> float:
        """The same as a share of all that could have left, from 0 to 1."""
        return min(1.0, self.ahead_bytes / (self.host_bytes + self.staying_bytes or 1))

    @contextlib.contextmanager
    def turn(self, reads: int | None = None) -> Iterator[None]:
        """Inside, no other thread moves weights, and all of their updates are under way. ``reads``:
        the group of which the caller reads a weight.

        Raises:
            ClosedError: in a forked process, which has not got their memory.
            DeviceError: in a CUDA graph capture.
        """
        if reads is not None and (updates := self._find_updates()) is not None:
            updates.note_read([updates.gates[reads]])
        with self._turn(None):
            yield

    @contextlib.contextmanager
    def _turn(self, index: int | None) -> Iterator[None]:
        """:meth:`turn`, for updates of one group."""
        check_open("a weight in host memory", self._pid, is_closed=False)
        if self.backend.is_capturing():
            raise DeviceError(
                "a weight in host memory, in a CUDA graph capture",
                reason="a replay would not fetch it",
                remedy='capture nothing, or use offload="state"',
            )
        if (updates := self._find_updates()) is not None:
            updates.enqueue(index)
        with self._lock:
            yield

    # ------------------------------------------------------------------ single shards

    def fetch(self, away: Away, host: Tensor, device: Tensor) -> Event | None:
        """Copy one shard to memory that the current stream has; returns when it is there."""
        block = Block([as_bytes(host)], [as_bytes(device)])
        after = [self.backend.current_stream().record(), *stored([away])]
        return self._link.fetch(block, after=after) if block.n_bytes else None

    def catch_up(self, away: Away) -> None:
        """Let host memory have its values of now, and be written into; blocks until it may."""
        self.slots.evict(away.index)
        self._link.synchronize()  # a fetch may read what is written now
        for event in stored([away]):
            if event is not None:
                event.synchronize()
        for block in away.blocks:
            block.forget()

    def replace(self, away: Away, device: Tensor) -> None:
        """Let one shard have other values, as the current stream leaves them."""
        self.catch_up(away)
        self._store([away.shard], [device])

    def _store(self, host: Sequence[Tensor], device: Sequence[Tensor]) -> None:
        """Blocks until host memory has the bytes."""
        block = Block([*map(as_bytes, host)], [*map(as_bytes, device)], Residence.DEVICE)
        if block.n_bytes:
            self._link.store(block, after=[self.backend.current_stream().record()])
            self._link.finish_stores()

    # ------------------------------------------------------------------ slots

    @contextlib.contextmanager
    def lending(self, index: int, stream: Stream) -> Iterator[None]:
        """See :class:`.Lender`."""
        away = self.away[index]
        if not away:  # they were given back
            yield
            return
        with self._turn(index):
            self.flush(index)
            slots = self.slots
            is_there = self._is_there(index)
            slot = slots.held[index] if is_there else self._fetch(index, slots.force(index))
            # Who uses the slot next waits for this gather alone, so it waits for those before it.
            stream.wait(slot.free or slot.arrived)
            try:
                slots.lent.add(index)
                for each in away:
                    each.lend(slot.number)
                self._lock.release()  # the gather may wait for a thread that waits for this lock
                try:
                    yield
                finally:
                    self._lock.acquire()
            finally:
                slots.lent.discard(index)
                for each in away:
                    each.lend(None)
                slot.free = stream.record()
            slots.passed(index)
            self._fetch_ahead()

    def _is_there(self, index: int) -> bool:
        """Whether a slot has the group as it is now; an older one is forgotten."""
        if not self._is_current(index):
            self.slots.evict(index)
        return index in self.slots.held

    def _fetch(self, index: int, slot: Slot) -> Slot:
        block, after = slot.blocks[index], stored(self.away[index])
        block.forget()
        slot.free = slot.arrived = self._link.fetch(block, after=[slot.free, *after])
        slot.age = age(self.away[index])
        return slot

    def begin_step(self) -> None:
        """Updates come next."""
        self.exchange_written()
        self.slots.passed(STEP)

    def passed_step(self) -> None:
        """Updates are under way: fetch what is gathered next, after them."""
        self.exchange_written()
        with self._lock:
            self._fetch_ahead()

    def _fetch_ahead(self) -> None:
        wanted, updates = self.slots.following(), self._find_updates()
        for each in wanted:
            if updates is not None and updates.is_pending(each):
                continue  # its updates bring it along
            if self.away[each] and not self._is_there(each):
                self.flush(each)
                if (slot := self.slots.take(each, wanted)) is not None:
                    self._fetch(each, slot)

    def _slices_of(self, block: Block) -> dict[int, list[tuple[Away, int, int, Tensor]]]:
        """By group, which elements of which shards a block has, and where on the device."""
        parts: dict[int, list[tuple[Away, int, int, Tensor]]] = {}
        for found, device in zip(self._parts.get(block, ()), block.device, strict=True):
            parts.setdefault(found[0].index, []).append((*found, device))
        return parts

    def has(self, block: Block) -> bool:
        """Whether slots have all weights of a block as they are now."""
        with self._lock:
            return all(self._is_current(away.index) for away, _, _ in self._parts[block])

    def _is_current(self, index: int) -> bool:
        slot = self.slots.held.get(index)
        return slot is not None and not slot.missing and slot.age == age(self.away[index])

    def lend(self, block: Block, update: Stream) -> None:
        """Copy these weights on ``update`` to the block's device memory; :meth:`bring` follows."""
        with self._lock:
            for index, parts in self._slices_of(block).items():
                slot = self.slots.held[index]
                update.wait(slot.arrived)
                views = [away.view(slot, start, stop) for away, start, stop, _ in parts]
                update.launch(copy_all, [device for *_, device in parts], views)

    def bring(self, block: Block, update: Stream) -> Sequence[Slot]:
        """An update has changed weights on the device, and a store is next: copy them on ``update``
        into slots that have the rest of their group, or get it likewise before its gather. Slots
        may be read after what ``update`` records next."""
        slots = list[Slot]()
        with self._lock:
            for index, parts in self._slices_of(block).items():
                if (slot := self._open_slot(index)) is None:
                    continue
                now, count = age(self.away[index]), len({id(away) for away, *_ in parts})
                if slot.age != now and not slot.missing:
                    continue
                slot.age = now + count
                slot.missing.discard(block)
                if slot.free is not None:  # else it is new: older than the gradients
                    update.wait(slot.free)
                views = [away.view(slot, start, stop) for away, start, stop, _ in parts]
                update.launch(copy_all, views, [device for *_, device in parts])
                slots.append(slot)
        return slots

    def _open_slot(self, index: int) -> Slot | None:
        """Where the group is, or is brought together."""
        slot, wanted = self.slots.held.get(index), self.slots.following()
        if slot is not None or index not in wanted:
            return slot
        blocks = [each.blocks for each in self.away[index]]
        if not all(blocks) or (slot := self.slots.take(index, wanted)) is None:
            return None
        slot.missing.update(*blocks)
        return slot

    def flush(self, index: int) -> None:
        """Let host memory have what was written into copies of a group's shards."""
        for each in self.away[index]:
            each.flush()

    def bring_back(self, shards: Sequence[Away]) -> None:
        """Give shards device memory for good.

        Raises:
            DeviceMemoryError: there is no room; all stay in host memory.
        """
        arrived: Event | None = None
        with self.turn(), allocating(sum(each.host.nbytes for each in shards), *_WHAT):
            memory = [self.backend.allocate(each.host.nbytes) for each in shards]
            for each, own in zip(shards, memory, strict=True):
                arrived = each.come_back(own) or arrived
            if arrived is not None:  # the last one; the others are before it
                self.backend.current_stream().wait(arrived)

    def close(self) -> None:
        """Give all weights back, as ordinary tensors, and host memory. Idempotent.

        Raises:
            DeviceMemoryError: see :meth:`bring_back`.
        """
        with self.turn():
            self.bring_back([each for group in self.away for each in group])
            self._link.synchronize()
            for event in filter(None, (slot.free for slot in self.slots.all)):
                self.backend.current_stream().wait(event)  # a gather may still read the slot
            self.slots.clear()
            self._pool.close()


def padded_bytes(shard: GroupShard) -> int:
    """What a shard takes in host memory, and in a slot."""
    return align(shard.padded.nbytes, _ALIGNMENT)
