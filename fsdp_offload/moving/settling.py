"""Storages of existing tensors, moved into a region once: from then on their address stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import storages
from ..errors import DeviceError
from .blocks import StorageBlock
from .pages import PageBlock
from .region import FixedAddressRegion


@dataclass(frozen=True)
class Seat:
    """Where a storage lies: bytes ``start`` to ``start + n_bytes`` of a block of the region.

    So while the block is away, ``places.of(seat.block)[seat.start:seat.start + seat.n_bytes]`` is
    the storage's content.
    """

    block: PageBlock
    start: int
    n_bytes: int


def settle_storages(blocks: Sequence[StorageBlock], region: FixedAddressRegion) -> dict[str, Seat]:
    """Move storages into a region, behind the current stream; the objects and all views stay valid.

    Their addresses change here, and never again until ``region.close()``, which gives them ordinary
    memory. What lies in the region already stays. After an error some are moved and some are not,
    all of them whole; a later call goes on.

    Args:
        blocks: present storages of the region's device.
        region: not paused. Its blocks move in place of these.

    Returns:
        The seat of each, by its block's key.

    Raises:
        DeviceMemoryError: the region cannot grow.
        AwayError, ClosedError: the region is paused, or closed.
        DeviceError: this version of torch cannot do it here.
    """
    seats: dict[str, Seat] = {}
    region.synchronize()
    try:
        for block in blocks:
            storage = block.storage
            seat = find_seat(storage, region)
            if seat is None:
                seat = _move(storage, region)
                region.adopt(storage, seat.block.pages)
            seats[block.key] = seat
    finally:
        region.trim()
    return seats


def find_seat(storage: torch.UntypedStorage, region: FixedAddressRegion) -> Seat | None:
    """Where a storage lies in a region; None: elsewhere."""
    address, n_bytes = storage.data_ptr(), storage.nbytes()
    for block in region.blocks():
        start = address - block.pages.address
        if 0 <= start < block.n_bytes:
            return Seat(block, start, n_bytes)
    return None


def _move(storage: torch.UntypedStorage, region: FixedAddressRegion) -> Seat:
    if storages.can_swap():
        room = region.room(storage.nbytes())
        room.copy_(storage, non_blocking=True)
        storages.swap_memory(storage, room)
    elif storage.device.type == "cuda":
        region.pool().move(storage)
    seat = find_seat(storage, region)
    if seat is None:
        raise DeviceError(
            f"a storage of {storage.nbytes()} bytes on {storage.device} at a fixed address",
            reason=f"torch {torch.__version__}, with its allocator's settings here, does not give "
            "it the region's memory",
            remedy="use torch 2.13 or later, or unset PYTORCH_ALLOC_CONF and "
            "PYTORCH_CUDA_ALLOC_CONF, or do without fixed addresses",
        )
    return seat
