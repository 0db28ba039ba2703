"""Copies blocks out to their places and back, with the host beside it freeing and allocating.

[Note: order]
Bulk runs in order on one stream per direction (``move_out``, ``move_in``), behind what the caller's
stream had when it was asked for. A piece's device memory is released when its own copy has
completed, and restored just before its copy back is enqueued, so both overlap with the copies of
other pieces. Releases are the host's work: each later call of the mover, and each call of a trip,
makes those that are due.

Blocks are known by their keys. Two trips of the same block in a row need no wait between them:

* out, then back: what was not released yet stays, and the way back ends after the copy out, so
  that nobody writes to memory that is still being read;
* back, then out: the copy out starts after the copy back;
* out, then out (or back, then back): the second trip ends with the first.

[Note: packing]
A small copy costs more than its bytes. Blocks below ``PACK_BELOW_BYTES`` travel through two staging
buffers on the device, gathered (``move_gather``) or scattered (``move_scatter``) by foreach kernels
while the other buffer is under way: one copy for up to ``PACK_BYTES`` of them. Their places lie
side by side. Where the device has no room for staging, or the places do not lie so, each block
travels alone.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import torch
from torch import Tensor

from .. import storages
from ..device import Event, Gateway, Stream, TimedEvent, copy_all
from ..interrupts import held_back
from .blocks import Block
from .places import Places, aligned
from .rooms import Rooms

PACK_BELOW_BYTES: Final = 2 << 20
PACK_BYTES: Final = 32 << 20
AHEAD_BYTES: Final = 256 << 20
"""Of memory that is restored before the first copy back is enqueued. Mapping a chunk waits for the
copy that runs; with others behind that one, the link does not."""

_Part = tuple[Block, int]  # a block's piece, by its index
_AnyBlock = TypeVar("_AnyBlock", bound=Block)


class _Leg:
    """Pieces that leave with one event; they are released, once, after it."""

    def __init__(self, event: Event, parts: Sequence[_Part], used: object = None) -> None:
        self.event, self.parts = event, list(parts)
        self._used = used  # what the copies use, kept until this has landed

    def land(self) -> None:
        """Release the pieces. The event has been reached."""
        while self.parts:
            block, index = self.parts[-1]
            if block.is_present(index):
                block.release(index)
            self.parts.pop()  # only now: a refused release can be tried again

    def cancel(self, keys: set[str]) -> bool:
        """Let the pieces of these blocks stay; whether there were any."""
        kept = [part for part in self.parts if part[0].key not in keys]
        found = len(kept) < len(self.parts)
        self.parts = kept
        return found


class Trip:
    """Blocks under way: ``n_bytes`` of pieces that were copied, released or restored for it."""

    def __init__(self, n_bytes: int = 0) -> None:
        self.n_bytes = n_bytes
        self.seconds = 0.0
        """From the call to when the host saw that all was done; 0 before."""
        self.copy_seconds = 0.0
        """From the first copy's start to the last one's end, as the device saw it; 0 before."""
        self._began = time.perf_counter()
        self._legs: deque[_Leg] = deque()
        self._first: TimedEvent | None = None
        self._last: TimedEvent | None = None
        self._held: list[object] = []  # what copies use: kept until they have completed
        self._is_done = False

    def include(self, ahead: Trip) -> None:
        """Count what ``ahead``, of the same mover and direction, has begun before this one."""
        self.n_bytes += ahead.n_bytes
        self._began = ahead._began
        self._first = ahead._first or self._first
        self._last = self._last or ahead._last

    def advance(self) -> bool:
        """Release what has left so far; whether everything is done. Does not block."""
        with held_back():
            return self._advance()

    def _advance(self) -> bool:
        while self._legs and self._legs[0].event.query():
            self._legs[0].land()
            self._legs.popleft()
        if not self._legs and (self._last is None or self._last.query()):
            self._finish()
        return self._is_done

    def release_next(self) -> bool:
        """Wait for the next pieces that leave and release them; False if none are left."""
        if not self._legs:
            return False
        self._legs[0].event.synchronize()
        self._legs[0].land()
        self._legs.popleft()
        return True

    def follow(self, stream: Stream) -> None:
        """Let later work of ``stream`` start after all copies; the host does not wait."""
        last = self._last  # another thread may be waiting
        if last is not None:
            stream.wait(last)

    @held_back()
    def wait(self) -> None:
        """Block until all has arrived and what left has been released. Idempotent."""
        while self.release_next():
            pass
        if self._last is not None:
            self._last.synchronize()
        self._finish()

    def _finish(self) -> None:
        if self._is_done:
            return
        self._is_done = True
        self.seconds = time.perf_counter() - self._began
        if self._first is not None and self._last is not None:
            self.copy_seconds = self._first.elapsed_time(self._last) / 1e3
        self._first = self._last = None
        self._held.clear()


class _Staging:
    """Two buffers on the device that take turns."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = itertools.cycle(range(len(buffers)))
        self.buffers = list(buffers)
        self._free: list[Event | None] = [None for _ in buffers]

    def next(self, stream: Stream, group: Sequence[Block]) -> tuple[int, Tensor, list[Tensor]]:
        """A buffer's number, its part for ``group``, and each block's part of that.

        ``stream`` is the first to write there, and waits for the last to read.
        """
        index = next(self._buffers)
        free = self._free[index]
        if free is not None:
            stream.wait(free)
        starts = [0, *itertools.accumulate(aligned(block.n_bytes) for block in group)]
        whole = self.buffers[index][: starts.pop()]
        return index, whole, [whole[s : s + b.n_bytes] for s, b in zip(starts, group, strict=True)]

    def passed(self, index: int, event: Event) -> None:
        """After ``event`` the buffer is free again."""
        self._free[index] = event


class Mover:
    """Moves blocks of one device. Calls come from one thread.

    Args:
        gateway: where streams and device memory come from.
        places: where blocks go.
    """

    def __init__(self, gateway: Gateway, places: Places) -> None:
        self.places = places
        self._gateway = gateway
        self._out, self._in = gateway.stream("move_out"), gateway.stream("move_in")
        self._leaving: deque[_Leg] = deque()  # in order of ``_out``
        self._arriving: deque[tuple[Trip, set[str]]] = deque()  # in order of ``_in``
        self._kernels_are_loaded = False  # those that pack

    # Streams that not every mover needs: torch has 32 in all, which then take turns.

    @functools.cached_property
    def _gather(self) -> Stream:
        return self._gateway.stream("move_gather")

    @functools.cached_property
    def _scatter(self) -> Stream:
        return self._gateway.stream("move_scatter")

    @functools.cached_property
    def _drop(self) -> Stream:
        return self._gateway.stream("move_drop")

    def reserve(self, blocks: Sequence[Block]) -> None:
        """Take host memory for blocks, such that those that are packed lie side by side."""
        ordered = in_order(blocks)
        self.places.reserve(ordered)
        if ordered and _is_small(ordered[-1]) and not self._kernels_are_loaded:
            self._load_kernels()

    def _load_kernels(self) -> None:
        """CUDA loads a kernel with its first launch, which then waits for all copies under way:
        40 ms of the first departure, of which the link stood still for 5, measured on an H200."""
        try:
            memory = self._gateway.allocate(6 * 8)
        except torch.OutOfMemoryError:
            return  # then nothing is packed either, see _packs()
        views = [memory[start : start + n] for n in (8, 7) for start in range(0, 6 * 8, 8)]
        for targets, sources in _by_width(views[::2], views[1::2]):
            self._gateway.current_stream().launch(copy_all, targets, sources)
        self._kernels_are_loaded = True

    def out(self, blocks: Sequence[Block]) -> Trip:
        """Copy blocks to their places and give up their device memory.

        Until :meth:`Trip.wait` nobody may write to them. Work on them that other streams than the
        caller's current one have under way has to be waited for before. Pieces that are away are
        left alone. If this raises, each piece is either whole on the device or whole in its place.

        Raises:
            HostMemoryError: there is no room for a place; nothing has moved.
            PinningError: likewise.
        """
        trip, blocks = Trip(), in_order(blocks)
        parts = self._staying(trip, blocks)
        blocks = [block for block in blocks if parts[block.key]]
        self.places.reserve(blocks)
        if blocks:
            self._after_caller_and_arrivals(blocks, self._out)
            trip._first = self._out.record_timed()
        try:
            self._send_all(trip, blocks, parts)
        except BaseException:
            trip.wait()
            raise
        if blocks:
            trip._last = self._out.record_timed()
        return trip

    def drop(self, blocks: Sequence[Block]) -> Trip:
        """Give up blocks without a copy, behind the caller's current stream.

        Otherwise as :meth:`out`.
        """
        trip = Trip()
        parts = self._staying(trip, blocks)
        everything = [(block, i) for block in blocks if block.n_bytes for i in parts[block.key]]
        if everything:
            self._after_caller_and_arrivals(blocks, self._drop)
            self._left(trip, self._drop.record(), everything)
        return trip

    def back(
        self,
        blocks: Sequence[Block],
        *,
        make_room: Callable[[], bool] | None = None,
        lasting: bool = True,
        held: list[Tensor] | None = None,
    ) -> Trip:
        """Bring blocks back from their places; places stay reserved and keep their content.

        Until :meth:`Trip.wait`, or :meth:`Trip.follow`, nobody may use them. Where device memory
        is short, this waits for what this mover has on its way out. If it raises, each piece is
        where it was before, and whole.

        Args:
            blocks: what comes back; what is there already stays.
            make_room: called where device memory is short after that, until it returns False:
                whether it gave some back.
            lasting: they are likely to leave together again, so storages get common rooms (see
                :mod:`.rooms`). What others came to lie in would keep a whole one from the driver.
            held: device memory that is kept for them; cleared when all else has been allocated.

        Raises:
            torch.OutOfMemoryError: there is no device memory.
        """
        trip = Trip()
        keys = {block.key for block in blocks}
        stayed = self._stay(keys)
        blocks, parts = _missing(blocks)
        if not blocks and stayed is None and not any(known & keys for _, known in self._arriving):
            return trip
        self._in.wait(self._gateway.current_stream().record())
        if stayed is not None:
            self._in.wait(stayed)
        trip._first = self._in.record_timed()
        rooms = Rooms(self._gateway, blocks if lasting else (), held)
        restored = _Restored(self, make_room, rooms)
        try:
            self._fetch_all(blocks, parts, restored)
            rooms.give_up()
            trip.n_bytes = restored.n_bytes
            trip._held += [*blocks, *restored.used]
            trip._last = self._in.record_timed()
            self._arriving.append((trip, keys))
        except BaseException:  # until somebody waits for the trip, its copies would be lost
            if "_scatter" in vars(self):
                self._in.wait(self._scatter.record())
            self._in.record().synchronize()
            restored.undo()
            raise
        return trip

    def renew(
        self, blocks: Sequence[_AnyBlock], *, make_room: Callable[[], bool] | None = None
    ) -> list[_AnyBlock]:
        """Memory of any content for blocks, in order of the caller's current stream.

        Otherwise as :meth:`back`.

        Returns:
            Those that had lost theirs.
        """
        stayed = self._stay({block.key for block in blocks})
        if stayed is not None:
            self._gateway.current_stream().wait(stayed)
        blocks, parts = _missing(blocks)
        rooms = Rooms(self._gateway, blocks)
        restored = _Restored(self, make_room, rooms)
        try:
            for block in blocks:
                for index in parts[block.key]:
                    restored.add(block, index)
            rooms.give_up()
        except BaseException:
            restored.undo()
            raise
        return blocks

    def wait(self) -> None:
        """Block until every trip so far is done."""
        while self._land_next():
            pass
        while self._arriving:
            self._arriving.popleft()[0].wait()

    # ---- out

    def _staying(self, trip: Trip, blocks: Sequence[Block]) -> dict[str, list[int]]:
        """Present pieces by key; those that are on their way out become legs of ``trip``."""
        self._advance()
        leaving = {(b.key, i): leg for leg in self._leaving for b, i in leg.parts}
        staying: dict[str, list[int]] = {}
        shared: dict[_Leg, None] = {}
        for block in blocks:
            present = [i for i in range(len(block.pieces)) if block.is_present(i)]
            shared |= dict.fromkeys(
                leaving[block.key, i] for i in present if (block.key, i) in leaving
            )
            staying[block.key] = [i for i in present if (block.key, i) not in leaving]
        trip._legs.extend(shared)
        return staying

    def _after_caller_and_arrivals(self, blocks: Sequence[Block], stream: Stream) -> None:
        """Let later work of ``stream`` start after the caller's, and after these blocks' way
        back."""
        keys = {block.key for block in blocks}
        starts: list[Event] = [self._gateway.current_stream().record()]
        starts += [t._last for t, k in self._arriving if t._last is not None and k & keys]
        for start in starts:
            stream.wait(start)

    def _send_all(self, trip: Trip, blocks: Sequence[Block], parts: dict[str, list[int]]) -> None:
        packs, staging = self._packs(blocks)
        if staging is not None and trip._first is not None:
            self._gather.wait(trip._first)
        for group, joined in packs:
            if joined is not None and staging is not None:
                self._pack(trip, group, staging, joined)
            else:
                for block in group:
                    self._send(trip, block, parts[block.key])

    def _send(self, trip: Trip, block: Block, indices: Sequence[int]) -> None:
        place, pieces = self.places.of(block), block.pieces
        for index in indices:
            start, stop = pieces[index]
            self._out.launch(copy_all, [place[start:stop]], [block.view(index)])
            self._left(trip, self._out.record(), [(block, index)])

    def _pack(self, trip: Trip, group: Sequence[Block], staging: _Staging, joined: Tensor) -> None:
        index, whole, parts = staging.next(self._gather, group)
        for targets, sources in _by_width(parts, [block.view(0) for block in group]):
            self._gather.launch(copy_all, targets, sources)
        self._out.wait(self._gather.record())
        self._out.launch(copy_all, [joined], [whole])
        left = self._out.record()
        staging.passed(index, left)
        self._left(trip, left, [(block, 0) for block in group], staging)

    def _left(self, trip: Trip, event: Event, parts: Sequence[_Part], used: object = None) -> None:
        trip.n_bytes += sum(_piece_bytes(*part) for part in parts)
        leg = _Leg(event, parts, used)
        trip._legs.append(leg)
        self._leaving.append(leg)
        self._advance()

    # ---- back

    def _stay(self, keys: set[str]) -> Event | None:
        """Keep what has not been released; the event after which nothing reads it any more."""
        self._advance()
        kept = [leg for leg in self._leaving if leg.cancel(keys)]
        return kept[-1].event if kept else None

    def _fetch_all(
        self, blocks: Sequence[Block], parts: dict[str, list[int]], restored: _Restored
    ) -> None:
        packs, staging = self._packs(blocks)  # before rooms, out of which it would be cut
        restored.used.append(staging)
        for block in blocks:
            for index in parts[block.key]:
                if restored.n_bytes < AHEAD_BYTES:
                    restored.add(block, index)
        for group, joined in packs:
            if joined is not None and staging is not None:
                self._unpack(group, staging, joined, restored)
            else:
                for block in group:
                    self._fetch(block, parts[block.key], restored)
        if staging is not None:
            self._in.wait(self._scatter.record())

    def _fetch(self, block: Block, indices: Sequence[int], restored: _Restored) -> None:
        place, pieces = self.places.of(block), block.pieces
        for index in indices:
            start, stop = pieces[index]
            restored.add(block, index)
            self._in.launch(copy_all, [block.view(index)], [place[start:stop]])

    def _unpack(
        self, group: Sequence[Block], staging: _Staging, joined: Tensor, restored: _Restored
    ) -> None:
        for block in group:
            restored.add(block, 0)
        index, whole, parts = staging.next(self._in, group)
        self._in.launch(copy_all, [whole], [joined])
        self._scatter.wait(self._in.record())
        for targets, sources in _by_width([block.view(0) for block in group], parts):
            self._scatter.launch(copy_all, targets, sources)
        staging.passed(index, self._scatter.record())

    # ---- both

    def _advance(self) -> None:
        """Release what has left, and forget trips that are done."""
        while self._leaving and self._leaving[0].event.query():
            self._leaving[0].land()
            self._leaving.popleft()
        while self._arriving and self._arriving[0][0]._advance():
            self._arriving.popleft()

    def _land_next(self) -> bool:
        """Wait for pieces that are on their way out, the oldest; False: there are none."""
        if not self._leaving:
            return False
        self._leaving[0].event.synchronize()
        self._leaving[0].land()
        self._leaving.popleft()
        return True

    def _packs(
        self, blocks: Sequence[Block]
    ) -> tuple[list[tuple[list[Block], Tensor | None]], _Staging | None]:
        """Blocks that travel together, each group with its joined place, and staging for them.

        Without staging (nothing to pack, or no device memory) all travel alone.
        """
        groups = list(_groups(blocks))
        packs = [(g, self.places.joined(g) if len(g) > 1 else None) for g in groups]
        sizes = [joined.numel() for _, joined in packs if joined is not None]
        if not sizes:
            return packs, None
        try:
            return packs, _Staging(
                [self._gateway.allocate(_staging_bytes(sizes)) for _ in sizes[:2]]
            )
        except torch.OutOfMemoryError:
            return packs, None


def _staging_bytes(sizes: Sequence[int]) -> int:
    """For the largest: a whole segment, whose rest would attract blocks that have a room."""
    n_bytes = max(sizes)
    return n_bytes if storages.is_small(n_bytes) else storages.segment_bytes(n_bytes)


class _Restored:
    """Pieces that got their memory for one way back."""

    def __init__(self, mover: Mover, make_room: Callable[[], bool] | None, rooms: Rooms) -> None:
        self.n_bytes = 0
        self.used: list[object] = []  # what copies use besides
        self._parts: list[_Part] = []
        self._mover, self._make_room, self._rooms = mover, make_room, rooms

    def add(self, block: Block, index: int) -> None:
        """Restore a piece that is not present, once there is room for it."""
        self._mover._advance()
        if block.is_present(index):
            return
        self._rooms.take_for(block)
        while True:
            try:
                block.restore(index)
                break
            except torch.OutOfMemoryError:
                if not (
                    self._rooms.give_up()
                    or self._mover._land_next()
                    or (self._make_room and self._make_room())
                ):
                    raise
        self._parts.append((block, index))
        self.n_bytes += _piece_bytes(block, index)

    def undo(self) -> None:
        """Release them: their places still hold them. No copy is under way."""
        give_up(self._parts)


def missing_parts(blocks: Iterable[Block]) -> list[_Part]:
    """Pieces that are not present: block and index."""
    pieces = ((b, i) for b in blocks if b.n_bytes for i in range(len(b.pieces)))
    return [(block, index) for block, index in pieces if not block.is_present(index)]


def give_up(parts: Iterable[_Part]) -> None:
    """Release those of the pieces that are present, without a copy: their places hold the same
    bytes, or nobody needs them. All work on them has completed."""
    for block, index in parts:
        if block.is_present(index):
            block.release(index)


def _missing(blocks: Sequence[_AnyBlock]) -> tuple[list[_AnyBlock], dict[str, list[int]]]:
    """Blocks that are away, in order, and which of their pieces, by key."""
    ordered = in_order(blocks)
    parts: dict[str, list[int]] = {block.key: [] for block in ordered}
    for block, index in missing_parts(ordered):
        parts[block.key].append(index)
    return [block for block in ordered if parts[block.key]], parts


def _piece_bytes(block: Block, index: int) -> int:
    start, stop = block.pieces[index]
    return stop - start


def _by_width(
    targets: Sequence[Tensor], sources: Sequence[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Pairs as 8-byte words where they have whole ones: a kernel moves elements, not bytes."""
    pairs = list(zip(targets, sources, strict=True))
    words = [pair for pair in pairs if pair[0].numel() % 8 == 0]
    others = [pair for pair in pairs if pair[0].numel() % 8]
    if words:
        yield [t.view(torch.int64) for t, _ in words], [s.view(torch.int64) for _, s in words]
    if others:
        yield [t for t, _ in others], [s for _, s in others]


def _is_small(block: Block) -> bool:
    return block.n_bytes < PACK_BELOW_BYTES and len(block.pieces) == 1


def in_order(blocks: Sequence[_AnyBlock]) -> list[_AnyBlock]:
    """Blocks of some size as they travel: the small ones last, else in the order given."""
    return sorted((block for block in blocks if block.n_bytes), key=_is_small)


def _groups(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Blocks that travel together: small ones up to ``PACK_BYTES``, others alone."""
    group: list[Block] = []
    group_bytes = 0
    for block in blocks:
        if not _is_small(block):
            yield [block]
            continue
        if group and group_bytes + aligned(block.n_bytes) > PACK_BYTES:
            yield group
            group, group_bytes = [], 0
        group.append(block)
        group_bytes += aligned(block.n_bytes)
    if group:
        yield group
