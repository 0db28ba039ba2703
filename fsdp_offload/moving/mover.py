"""Copies blocks out to their places and back, with the host beside it freeing and allocating.

[Note: order]
Copies run in order on one stream per direction (``move_out``, ``move_in``), each behind what the
caller's stream had when they were asked for. A piece's device memory is released when its own copy
has completed, and restored just before its copy back is enqueued, so both overlap with the copies
of other pieces.

[Note: packing]
A small copy costs more than its bytes. Blocks below ``PACK_BELOW_BYTES`` travel through a staging
buffer on the device, gathered or scattered by one foreach kernel, one copy for up to
``PACK_BYTES`` of them; their places lie side by side.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import Tensor

from ..device import Event, Gateway, Stream, TimedEvent, copy_all
from .blocks import Block
from .places import Places, aligned

PACK_BELOW_BYTES: Final = 1 << 20
PACK_BYTES: Final = 32 << 20


@dataclass(frozen=True)
class _Leg:
    """What one event stands for: pieces that were copied, and are released after it."""

    event: Event
    release: Callable[[], None]


class Trip:
    """Blocks under way. ``n_bytes`` of them, one direction."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.seconds = 0.0
        """From the call to the end of :meth:`wait`, as the host saw it."""
        self.copy_seconds = 0.0
        """From the first copy's start to the last one's end, as the device saw it."""
        self._began = time.perf_counter()
        self._legs: deque[_Leg] = deque()
        self._first: TimedEvent | None = None
        self._last: TimedEvent | None = None

    def advance(self) -> bool:
        """Release what has left so far; whether everything is done. Does not block."""
        while self._legs and self._legs[0].event.query():
            self._legs.popleft().release()
        return not self._legs and (self._last is None or self._last.query())

    def release_next(self) -> bool:
        """Wait for the next pieces that leave and release them; False if none are left."""
        if not self._legs:
            return False
        self._legs[0].event.synchronize()
        self._legs.popleft().release()
        return True

    def follow(self, stream: Stream) -> None:
        """Let later work of ``stream`` start after all copies; the host does not wait."""
        last = self._last  # another thread may be waiting
        if last is not None:
            stream.wait(last)

    def wait(self) -> None:
        """Block until all has arrived and what left has been released. Idempotent."""
        while self.release_next():
            pass
        if self._last is not None:
            self._last.synchronize()
            self.seconds = time.perf_counter() - self._began
            if self._first is not None:
                self.copy_seconds = self._first.elapsed_time(self._last) / 1e3
            self._first = self._last = None

    def _starts(self, stream: Stream) -> None:
        self._first = stream.record_timed()

    def _passed(self, event: TimedEvent, release: Callable[[], None] | None = None) -> None:
        self._last = event
        if release is not None:
            self._legs.append(_Leg(event, release))


class Mover:
    """Moves blocks of one device.

    Args:
        gateway: where streams and device memory come from.
        places: where blocks go.
    """

    def __init__(self, gateway: Gateway, places: Places) -> None:
        self.places = places
        self._gateway = gateway
        self._out, self._in = gateway.stream("move_out"), gateway.stream("move_in")

    def reserve(self, blocks: Sequence[Block]) -> None:
        """Take host memory for blocks, such that those that are packed lie side by side."""
        self.places.reserve(_in_order(blocks))

    def out(self, blocks: Sequence[Block]) -> Trip:
        """Copy blocks to their places and give up their device memory.

        Pieces that are away already are left alone. Until :meth:`Trip.wait` nobody may write to
        them. If this raises, each piece is either whole on the device or whole in its place.
        """
        blocks = [b for b in _in_order(blocks) if any(map(b.is_present, range(len(b.pieces))))]
        self.places.reserve(blocks)
        trip = Trip(sum(block.n_bytes for block in blocks))
        if not blocks:
            return trip
        self._out.wait(self._gateway.current_stream().record())
        trip._starts(self._out)
        try:
            for group in _groups(blocks):
                if len(group) > 1:
                    self._pack(trip, group)
                else:
                    self._send(trip, group[0])
        except BaseException:
            trip.wait()
            raise
        return trip

    def back(self, blocks: Sequence[Block], *, make_room: Callable[[], bool] | None = None) -> Trip:
        """Bring blocks back from their places; places stay reserved and keep their content.

        Until :meth:`Trip.wait`, or :meth:`Trip.follow`, nobody may use them. If this raises
        (no device memory), those of ``blocks`` that were away are away again and whole in their
        places.

        Args:
            blocks: those that are present are left alone.
            make_room: called where device memory is short, until it returns False: whether it
                gave some back.
        """
        blocks = [b for b in _in_order(blocks) if not all(map(b.is_present, range(len(b.pieces))))]
        trip = Trip(sum(block.n_bytes for block in blocks))
        if not blocks:
            return trip
        start = self._gateway.current_stream().record()
        self._in.wait(start)
        trip._starts(self._in)
        try:
            for group in _groups(blocks):
                if len(group) > 1:
                    self._unpack(trip, group, make_room)
                else:
                    self._fetch(trip, group[0], make_room)
        except BaseException:
            trip.wait()
            _release_all(blocks)
            raise
        return trip

    def drop(self, blocks: Sequence[Block]) -> Trip:
        """Give up blocks without a copy, when what the current stream has by now is done."""
        blocks = [block for block in blocks if block.n_bytes]
        trip = Trip(0)
        if blocks:
            event = self._gateway.current_stream().record_timed()
            trip._passed(event, functools.partial(give_up, blocks))
        return trip

    def renew(
        self, blocks: Sequence[Block], *, make_room: Callable[[], bool] | None = None
    ) -> None:
        """Memory of any content for blocks, on the current stream. If this raises (no device
        memory), those that were away are away again."""
        missing = [(b, i) for b in blocks for i in range(len(b.pieces)) if not b.is_present(i)]
        try:
            for block, index in missing:
                _with_room(functools.partial(block.restore, index), make_room)
        except BaseException:
            for block, index in missing:
                if block.is_present(index):
                    block.release(index)
            raise

    def _send(self, trip: Trip, block: Block) -> None:
        place = self.places.of(block)
        for index, (start, stop) in enumerate(block.pieces):
            if not block.is_present(index):
                continue
            self._out.launch(copy_all, [place[start:stop]], [block.view(index)])
            trip._passed(self._out.record_timed(), lambda i=index: block.release(i))  # type: ignore[misc]

    def _fetch(self, trip: Trip, block: Block, make_room: Callable[[], bool] | None) -> None:
        place = self.places.of(block)
        for index, (start, stop) in enumerate(block.pieces):
            if block.is_present(index):
                continue
            _with_room(functools.partial(block.restore, index), make_room)
            self._in.launch(copy_all, [block.view(index)], [place[start:stop]])
        trip._passed(self._in.record_timed())

    def _pack(self, trip: Trip, group: Sequence[Block]) -> None:
        staging, parts = self._staging(group)
        self._out.launch(copy_all, parts, [block.view(0) for block in group])
        self._out.launch(copy_all, *self._between(group, staging, parts)[::-1])
        # The staging buffer, too, is given up when the copy has been made.
        trip._passed(self._out.record_timed(), lambda: _release_all(group, staging))

    def _unpack(
        self, trip: Trip, group: Sequence[Block], make_room: Callable[[], bool] | None
    ) -> None:
        staging, parts = _with_room(functools.partial(self._staging, group), make_room)
        for block in group:
            _with_room(functools.partial(block.restore, 0), make_room)
        self._in.launch(copy_all, *self._between(group, staging, parts))
        self._in.launch(copy_all, [block.view(0) for block in group], parts)
        trip._passed(self._in.record_timed(), lambda: _release_all((), staging))

    def _staging(self, group: Sequence[Block]) -> tuple[Tensor, list[Tensor]]:
        """Device memory like the places of a group, and each block's part of it."""
        starts = [0, *itertools.accumulate(aligned(block.n_bytes) for block in group)]
        staging = self._gateway.allocate(starts[-1])
        starts.pop()
        return staging, [staging[s : s + b.n_bytes] for s, b in zip(starts, group, strict=True)]

    def _between(
        self, group: Sequence[Block], staging: Tensor, parts: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What to copy between staging and host: one tensor each, where places are joined."""
        joined = self.places.joined(group)
        if joined is not None:
            return [staging], [joined]
        return parts, [self.places.of(block) for block in group]


def give_up(blocks: Iterable[Block]) -> None:
    """Release what is present, without a copy: its places hold the same bytes, or nobody needs
    them. All work on it has completed."""
    _release_all(list(blocks))


_T = TypeVar("_T")


def _with_room(allocate: Callable[[], _T], make_room: Callable[[], bool] | None) -> _T:
    while True:
        try:
            return allocate()
        except torch.OutOfMemoryError:
            if make_room is None or not make_room():
                raise


def _release_all(blocks: Sequence[Block], *staging: Tensor) -> None:
    """Give up what is still there; the staging buffers end with this call's closure."""
    for block in blocks:
        for index in range(len(block.pieces)):
            if block.is_present(index):
                block.release(index)


def _is_small(block: Block) -> bool:
    return block.n_bytes < PACK_BELOW_BYTES and len(block.pieces) == 1


def _in_order(blocks: Sequence[Block]) -> list[Block]:
    """Blocks of some size, the small ones last, else in the order given."""
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
