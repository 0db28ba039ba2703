"""Rooms: device memory that several storages are cut from, so that it returns as a whole.

[Note: rooms]
torch takes a *segment* from the driver for each large storage, and gives back segment by segment.
Measured on an H200: 0.1 ms each way for one of 29 MiB (1 ms to take one while copies run), 0.7 and
0.2 ms for one of 1 GiB. So before storages are resized from 0 to their sizes, their sum is
allocated, and dropped when the first of them is resized. The segment is cached then, and the
allocator cuts the storages out of it: it takes the smallest cached block that fits, and splits it
where more than 1 MiB remains.
Nothing is left over, as long as nothing else is allocated meanwhile on the same stream and no
smaller block is cached that fits, too: such a storage would lie there, and as much of a room would
stay cached, for anybody. So what is cached beside others' memory is in use meanwhile, if there is
driver's memory for rooms.

The allocator has a pool of its own for requests up to 1 MiB: those have no part in this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from .. import storages
from ..device import Gateway, free_bytes
from .blocks import Block, StorageBlock

ROOM_BYTES: Final = 1 << 30


@dataclass(frozen=True)
class Room:
    """What to allocate for storages that follow one another."""

    n_bytes: int
    """Their sum, as the allocator rounds each."""

    members: tuple[int, ...]
    """Indices of the storages, ascending; for :func:`lay_out` at least two."""


def lay_out(sizes: Sequence[int], room_bytes: int = ROOM_BYTES) -> list[Room]:
    """Divide storages into rooms of about equal size, in the order in which they are allocated.

    Where one room ends is chosen such that the allocator hands nothing of its segment to others,
    if there is such a place soon. Storages of ``room_bytes`` or more, and those that have no
    neighbour, have no room: they have a segment of their own anyway. Nor have storages that are
    less than 10 MiB in all: they share one anyway.

    Args:
        sizes: in bytes.
        room_bytes: about as much as a room has, rather less; more by up to an eighth and the room's
            last storage, and by half a room at the end of a row.
    """
    rooms: list[Room] = []
    row: list[tuple[int, int]] = []  # storages between two that have a segment of their own
    for index, size in enumerate(sizes):
        if size >= room_bytes:
            rooms += _divide(row, room_bytes)
            row = []
        elif not storages.is_small(size):
            row.append((index, storages.block_bytes(size)))
    return rooms + _divide(row, room_bytes)


def divide(sizes: Sequence[int], room_bytes: int) -> list[Room]:
    """The same for memory of one's own: all storages, in order, also a single one.

    Args:
        sizes: as the allocator rounds them, each below ``room_bytes``.
        room_bytes: as of :func:`lay_out`.
    """
    return _parts(list(enumerate(sizes)), room_bytes) if sizes else []


def _divide(row: Sequence[tuple[int, int]], room_bytes: int) -> list[Room]:
    found = _parts(row, room_bytes)
    return [r for r in found if len(r.members) > 1 and not storages.is_shared(r.n_bytes)]


def _parts(row: Sequence[tuple[int, int]], room_bytes: int) -> list[Room]:
    total = sum(size for _, size in row)
    count = max(-(-total // room_bytes), 1)
    goal, latest = total // count, total // count + room_bytes // 8
    parts: list[list[tuple[int, int]]] = [[]]
    taken = 0
    for item in row:
        if taken >= latest or (taken >= goal and storages.fills_segment(taken)):
            parts.append([])
            taken = 0
        parts[-1].append(item)
        taken += item[1]
    if len(parts) > 1 and taken < goal // 2:
        parts[-2:] = [parts[-2] + parts[-1]]
    return [Room(sum(size for _, size in part), tuple(i for i, _ in part)) for part in parts]


def take_cached(least_bytes: int, beside: list[Tensor], gateway: Gateway) -> None:
    """Have what is cached beside others' memory in use: the allocator would cut that before it
    takes a segment for a room, or cuts the room. As much as works."""
    with contextlib.suppress(RuntimeError):
        cached = storages.cached_blocks(gateway.device, least_bytes)
        beside.extend(gateway.allocate(n_bytes) for n_bytes in cached)


class Rooms:
    """Rooms for blocks that are about to be restored, each dropped with its first one.

    All are taken from the driver at once, before the first copy, as far as there is memory; the
    others one by one. Where device memory is short, or the allocator's settings are in the way,
    storages come to lie where they would without.

    Args:
        gateway: where device memory comes from.
        blocks: in the order in which they are restored; no other memory is allocated in between.
        held: device memory that is kept for them: cleared just before the first is restored.
    """

    def __init__(
        self, gateway: Gateway, blocks: Sequence[Block], held: list[Tensor] | None = None
    ) -> None:
        self._gateway, self._held = gateway, held
        self._sizes: dict[str, int] = {}  # by the key of a room's first block
        self._taken: dict[str, Tensor] | None = None  # before the first block is restored
        self._beside: list[Tensor] = []
        self._least_bytes = 0
        if storages.cuts_segments(gateway.device):
            found = [block for block in blocks if isinstance(block, StorageBlock)]
            sizes = [block.n_bytes for block in found]
            rooms = lay_out(sizes, ROOM_BYTES)
            self._sizes = {found[room.members[0]].key: room.n_bytes for room in rooms}
            self._least_bytes = min((sizes[i] for room in rooms for i in room.members), default=0)

    def take_for(self, block: Block) -> None:
        """If ``block`` is the first of a room, let the allocator have that in its cache."""
        if self._held is not None:
            self._held.clear()
        if self._taken is None:
            self._taken = {}
            if self._sizes and self._held is None:  # else whoever holds it has seen to that
                take_cached(self._least_bytes, self._beside, self._gateway)
            for key, n_bytes in self._sizes.items():
                room = self._allocate(n_bytes)
                if room is None:
                    self._beside.clear()  # there are storages without a room
                    break
                self._taken[key] = room
        n_bytes = self._sizes.pop(block.key, 0)
        if n_bytes and self._taken.pop(block.key, None) is None:
            self._allocate(n_bytes)

    def give_up(self) -> bool:
        """Let others have what is taken and not used yet; whether there was any."""
        had_some = bool(self._taken or self._beside)
        self._taken = {}
        self._beside.clear()
        return had_some

    def _allocate(self, n_bytes: int) -> Tensor | None:
        free = free_bytes(self._gateway.device)
        if free is not None and free < storages.segment_bytes(n_bytes):
            return None  # asking would make torch give up all that it has cached
        with contextlib.suppress(torch.OutOfMemoryError):
            return self._gateway.allocate(n_bytes)
        return None
