"""Storages that were allocated one by one get common rooms, before the first departure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from .. import storages
from ..device import Gateway, free_bytes, release_cached
from .blocks import StorageBlock
from .mover import Mover, in_order
from .rooms import ROOM_BYTES, Room, lay_out, take_cached

SPARE_BYTES: Final = 256 << 20
"""Of free device memory beside a room: the mover's staging, and whatever others take meanwhile."""


def join(blocks: Sequence[StorageBlock], mover: Mover, gateway: Gateway) -> None:
    """Let storages leave and come back, a room at a time: then they lie together.

    Bytes, objects and views stay the same, addresses do not. Their segments, and what torch had
    cached, are the driver's afterwards, but for segments in which others lie, too. What lies
    together already stays, and so does everything from where device memory has no room beside: it
    is taken before anything leaves.

    Args:
        blocks: present; work on them by other streams than the current one has completed.
        mover: has places for them.
        gateway: of their device.

    Raises:
        torch.OutOfMemoryError: somebody else took the room in the middle; places hold what is not
            present.
    """
    if not storages.cuts_segments(gateway.device):
        return
    ordered = in_order(blocks)
    segments = storages.segments(gateway.device)
    for room in lay_out([block.n_bytes for block in ordered], ROOM_BYTES):
        members = [ordered[index] for index in room.members]
        if _is_together(members, room, segments):
            continue
        release_cached(gateway.device)  # out of which the room would be cut
        free = free_bytes(gateway.device)
        if free is not None and free < storages.segment_bytes(room.n_bytes) + SPARE_BYTES:
            return
        beside: list[Tensor] = []
        try:
            take_cached(room.n_bytes, beside, gateway)
            held = [gateway.allocate(room.n_bytes)]  # a segment of its own
        except torch.OutOfMemoryError:
            return
        finally:
            beside.clear()
        try:
            mover.out(members).wait()
            release_cached(gateway.device)  # else the allocator takes the old segments again
            # None is small, see lay_out().
            take_cached(min(block.n_bytes for block in members), beside, gateway)
        finally:
            _bring_back(members, held, beside, mover, gateway)


def _bring_back(
    members: Sequence[StorageBlock],
    held: list[Tensor],
    beside: list[Tensor],
    mover: Mover,
    gateway: Gateway,
) -> None:
    """It is tried twice: then without ``beside``, which may be all the room that there is."""
    try:
        trip = mover.back(members, held=held)
        beside.clear()
        trip.wait()
    except BaseException:
        beside.clear()
        held.clear()
        release_cached(gateway.device)
        mover.back(members).wait()
        raise


def _is_together(
    members: Sequence[StorageBlock], room: Room, segments: Sequence[tuple[int, int]]
) -> bool:
    """Whether they have a segment of their own. Addresses alone do not say: those of one segment
    often begin where another one ends."""
    start = min(block.address() for block in members)
    stop = max(block.address() + block.n_bytes for block in members)
    size = storages.segment_bytes(room.n_bytes)
    return any(first <= start and stop <= first + n <= first + size for first, n in segments)
