"""Storages that are moved once, to addresses that stay: ``PhaseOffloader(keep_addresses=True)``."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import torch

from ..core import storage as storages
from ..core.errors import ConfigError, DeviceError
from ..plan.layout import align
from .pages import CHUNK_BYTES, Pages
from .region import ALIGNMENT_BYTES, Extents

ROW_BYTES: Final = 512 << 20
"""Of storages that move together: what that takes of device memory beside them."""


class _Place(NamedTuple):
    """What a storage that was moved is tied to."""

    pages: Pages  # torch before 2.13 does not keep them by itself
    memory: weakref.ref[FixedMemory]


class FixedMemory:
    """Device memory that storages of others are moved into; its chunks leave and come back.

    Args:
        name: begins the keys of its chunks.
        device: CUDA, or the CPU from torch 2.13 on.
        chunk_bytes: memory comes and goes in parts of this size.

    Raises:
        DeviceError: the device, or this version of torch there, cannot keep addresses.
    """

    def __init__(self, name: str, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.extents = Extents(name, device, chunk_bytes)
        if device.type == "cpu" and not storages.can_swap():
            raise DeviceError(
                f"keep_addresses=True on the CPU with torch {torch.__version__}",
                reason="it cannot exchange the memory of two storages",
                remedy="use torch 2.13 or later, or leave keep_addresses out",
            )
        self._device = device
        self._moved: list[torch.UntypedStorage] = []

    def move_in(self, found: Sequence[torch.UntypedStorage]) -> None:
        """Give storages memory of this one's, with their content, on the current stream.

        Raises:
            torch.OutOfMemoryError: there is no room for a row beside; those that were moved stay
                here until :meth:`move_out`.
            DeviceError: likewise, torch's allocator was told to round sizes.
        """
        if storages.can_swap():
            self._swap_in(found)
        else:
            self._resize_in(found)

    def _swap_in(self, found: Sequence[torch.UntypedStorage]) -> None:
        for row in _rows(found):
            extent = self.extents.grow(sum(align(s.nbytes(), ALIGNMENT_BYTES) for s in row))
            for storage in row:
                fresh = extent.take(storage.nbytes())
                fresh.copy_(storage)
                storages.swap_memory(storage, fresh)
                self._note(storage, extent.pages)

    def _resize_in(self, found: Sequence[torch.UntypedStorage]) -> None:
        """For torch before 2.13, see [Note: other memory for a storage] in core/storage.py."""
        pool = storages.AddressPool(self._device, self._segment)
        small = [storage for storage in found if storages.is_small(storage.nbytes())]
        large = [storage for storage in found if not storages.is_small(storage.nbytes())]
        for row in _rows(large):
            pool.move_together(row)  # else one by one
        for storage in (*large, *small):
            if self.extents.locate(storage) is None and not pool.move(storage):
                raise DeviceError(
                    f"{storage.nbytes()} bytes at a given address",
                    reason="torch's allocator asks for other sizes than it does by default",
                    remedy="use torch 2.13 or later, or take roundup_power2_divisions out of "
                    "PYTORCH_ALLOC_CONF, or leave keep_addresses out",
                )
            extent = next(extent for extent in self.extents if extent.holds(storage))
            self._note(storage, extent.pages)
        for extent in list(self.extents):  # taken for a segment that the allocator did not need
            if not any(map(extent.holds, self._moved)):
                self.extents.drop(extent)

    def _segment(self, n_bytes: int) -> int:
        """The address of memory that the pool gets as a whole."""
        extent = self.extents.grow(n_bytes)
        extent.used_bytes = extent.pages.n_bytes
        return extent.pages.address

    def _note(self, storage: torch.UntypedStorage, pages: Pages) -> None:
        storages.tie(storage, _Place(pages, weakref.ref(self)))
        self._moved.append(storage)

    def move_out(self) -> None:
        """Give all storages ordinary memory again, an extent at a time. It is present.

        Raises:
            torch.OutOfMemoryError: there is no room; what was not reached stays here, and a later
                call goes on.
        """
        for extent in list(self.extents):
            for storage in [s for s in self._moved if extent.holds(s)]:
                storages.renew(storage)
                storages.untie(storage)
                self._moved = [s for s in self._moved if s is not storage]
            # Its memory goes once the copies are done: the pages' finalizer waits for the device.
            self.extents.drop(extent)


def movable(storage: torch.UntypedStorage, mine: Sequence[FixedMemory]) -> bool:
    """Whether a storage moves by itself: not one in a region, which its owner pauses.

    One that a PhaseOffloader has left behind gets ordinary memory.

    Raises:
        ConfigError: another PhaseOffloader keeps its address.
    """
    owner = storages.owner_of(storage)
    if owner is None:
        return True
    if not isinstance(owner, _Place):
        return False
    memory = owner.memory()
    if memory is None:
        storages.renew(storage)
        storages.untie(storage)
        return True
    if all(memory is not each for each in mine):
        raise ConfigError(
            f"a storage of {storage.nbytes()} bytes",
            reason="another PhaseOffloader keeps its address, and lets it leave",
            remedy="close() that one first, or give both sets of tensors to one PhaseOffloader",
        )
    return False


def _rows(found: Iterable[torch.UntypedStorage]) -> Iterator[list[torch.UntypedStorage]]:
    """Storages of about ``ROW_BYTES`` in all, at least one."""
    row: list[torch.UntypedStorage] = []
    row_bytes = 0
    for storage in found:
        if row and row_bytes + storage.nbytes() > ROW_BYTES:
            yield row
            row, row_bytes = [], 0
        row.append(storage)
        row_bytes += storage.nbytes()
    if row:
        yield row
