"""Storages of existing tensors, moved into a region once: from then on their address stays.

They are moved in rows of about 1 GiB that lie in one range of the region, so that what is rounded
up to whole pages is the row and not the storage. How torch's allocator is brought to that, where
storages cannot be swapped, is in ``storages.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .. import storages
from ..errors import DeviceError, DeviceMemoryError
from .blocks import StorageBlock
from .pages import PageBlock
from .region import FixedAddressRegion
from .rooms import ROOM_BYTES, divide


@dataclass(frozen=True)
class Seat:
    """Where a storage lies: bytes ``start`` to ``start + n_bytes`` of a block of the region.

    So while the block is away, ``places.of(seat.block)[seat.start:seat.start + seat.n_bytes]`` is
    the storage's content.
    """

    block: PageBlock
    start: int
    n_bytes: int


def settle_storages(
    blocks: Sequence[StorageBlock], region: FixedAddressRegion
) -> dict[StorageBlock, Seat]:
    """Move storages into a region, behind the current stream; the objects and all views stay valid.

    Their addresses change here, and never again until ``region.close()``, which gives them ordinary
    memory. What lies in the region already stays. After an error some are moved and some are not,
    all of them whole; a later call goes on. The region grows by about 1 GiB before as much of the
    old memory is free; where there is not so much, by less at a time.

    Args:
        blocks: present storages of the region's device.
        region: not paused. Its blocks move in place of these.

    Returns:
        The seat of each.

    Raises:
        DeviceMemoryError: the region cannot grow.
        AwayError, ClosedError: the region is paused, or closed.
        DeviceError: this version of torch cannot do it here.
    """
    region.synchronize()
    fresh = {b.storage._cdata: b.storage for b in blocks if find_seat(b.storage, region) is None}
    try:
        for row in _rows(list(fresh.values())):
            _settle(row, region)
    finally:
        region.trim()
    return seats_of(blocks, region)


def seats_of(
    blocks: Sequence[StorageBlock], region: FixedAddressRegion
) -> dict[StorageBlock, Seat]:
    """Where those lie that lie in a region."""
    found = ((block, find_seat(block.storage, region)) for block in blocks)
    return {block: seat for block, seat in found if seat is not None}


def find_seat(storage: torch.UntypedStorage, region: FixedAddressRegion) -> Seat | None:
    """Where a storage lies in a region; None: elsewhere."""
    address, n_bytes = storage.data_ptr(), storage.nbytes()
    for block in region.blocks():
        start = address - block.pages.address
        if 0 <= start < block.n_bytes:
            return Seat(block, start, n_bytes)
    return None


def _rows(found: Sequence[torch.UntypedStorage]) -> Iterator[list[torch.UntypedStorage]]:
    """Storages that are going to lie together: large ones, then those that the allocator has
    segments of their own for."""
    large = [s for s in found if not storages.is_small(s.nbytes())]
    small = [s for s in found if storages.is_small(s.nbytes())]
    yield from ([s] for s in large if s.nbytes() >= ROOM_BYTES)
    kinds = ([s for s in large if s.nbytes() < ROOM_BYTES], small)
    for kind in ([*kinds[0], *kinds[1]],) if storages.can_swap() else kinds:
        for room in divide([storages.block_bytes(s.nbytes()) for s in kind], ROOM_BYTES):
            yield [kind[index] for index in room.members]


def _settle(row: list[torch.UntypedStorage], region: FixedAddressRegion) -> None:
    """Move storages to one range, or, where there is no memory for it, in halves."""
    try:
        _move(row, region)
    except DeviceMemoryError:
        left = [storage for storage in row if find_seat(storage, region) is None]
        if len(row) == 1:
            raise
        half = (len(left) + 1) // 2
        for part in (left[:half], left[half:]):
            if part:
                _settle(part, region)


def _move(row: Sequence[torch.UntypedStorage], region: FixedAddressRegion) -> None:
    try:
        if storages.can_swap():
            _swap(row, region)
        elif region.device.type == "cuda":
            _resize(row, region)
    finally:  # whatever has come to lie there
        for storage in row:
            seat = find_seat(storage, region)
            if seat is not None:
                region.adopt(storage, seat.block.pages)
    for storage in row:
        _check_seated(storage, region)


def _swap(row: Sequence[torch.UntypedStorage], region: FixedAddressRegion) -> None:
    region.grow(sum(storages.block_bytes(storage.nbytes()) for storage in row))
    for storage in row:
        room = region.room(storage.nbytes())
        room.copy_(storage, non_blocking=True)
        storages.swap_memory(storage, room)


def _resize(row: Sequence[torch.UntypedStorage], region: FixedAddressRegion) -> None:
    pool = region.pool()
    if _shares(row):
        if pool.move_together(row):
            return
        region.trim()
    for storage in row:
        if find_seat(storage, region) is None and not pool.move(storage):
            return


def _shares(row: Sequence[torch.UntypedStorage]) -> bool:
    """Whether moving them together takes less than moving them one by one."""
    n_bytes = sum(storages.block_bytes(storage.nbytes()) for storage in row)
    is_small = storages.is_small(row[0].nbytes())
    return len(row) > 1 and not is_small and not storages.is_shared(n_bytes)


def _check_seated(storage: torch.UntypedStorage, region: FixedAddressRegion) -> None:
    if find_seat(storage, region) is None:
        raise DeviceError(
            f"a storage of {storage.nbytes()} bytes on {storage.device} at a fixed address",
            reason=f"torch {torch.__version__}, with its allocator's settings here, does not give "
            "it the region's memory",
            remedy="use torch 2.13 or later, or unset PYTORCH_ALLOC_CONF and "
            "PYTORCH_CUDA_ALLOC_CONF, or do without fixed addresses",
        )
