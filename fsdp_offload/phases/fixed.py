"""Memory at fixed addresses, for tensors of a region and for storages that move in."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Final

import torch

from ..core import storage as storages
from ..core.config import align
from ..core.errors import ConfigError, DeviceError
from ..link import address_range
from ..link.address_range import ALIGNMENT_BYTES, AddressRange, Chunk
from ..link.block import OwnedBlock
from ..link.transfer import batches

ROW_BYTES: Final = 512 << 20
"""Most bytes of storages that move together, and so of the extra device memory."""


class FixedMemory:
    """Address ranges of a device, added as needed.

    Args:
        name: prefix of the keys of all chunks.
        device: CUDA or the CPU.
        chunk_bytes: memory is mapped and unmapped in chunks of this size.
        owner: the offloader whose storages move in; None for tensors of a region.

    Raises:
        DeviceError: the device cannot keep addresses.
    """

    def __init__(
        self, name: str, device: torch.device, chunk_bytes: int, owner: object = None
    ) -> None:
        address_range.driver_of(device)
        self._name, self._device, self._chunk_bytes = name, device, chunk_bytes
        self._owner = None if owner is None else weakref.ref(owner)
        self.ranges: dict[AddressRange, list[torch.UntypedStorage]] = {}  # with what was moved in

    @property
    def n_bytes(self) -> int:
        """Bytes of all ranges, mapped or not."""
        return sum(each.n_bytes for each in self.ranges)

    def blocks(self) -> list[Chunk]:
        """Return all chunks."""
        return [
            chunk
            for each, moved in self.ranges.items()
            for chunk in each.chunks([(s, s.data_ptr() - each.address) for s in moved])
        ]

    def grow(self, n_bytes: int) -> AddressRange:
        """Add a range.

        Raises:
            torch.OutOfMemoryError: not enough memory.
        """
        driver, key = address_range.driver_of(self._device), f"{self._name}/{len(self.ranges)}"
        made = AddressRange(driver, key, n_bytes, self._chunk_bytes, self._owner)
        self.ranges[made] = []
        return made

    def move_in(self, found: Iterable[OwnedBlock]) -> None:
        """Move storages into the ranges, with their content, on the current stream.

        Raises:
            torch.OutOfMemoryError: not enough memory for another row; moved storages stay here
                until :meth:`move_out`.
            DeviceError: this torch, or its allocator's settings, cannot do it; moved storages stay,
                too.
        """
        if not storages.can_swap():
            if self._device.type == "cpu":
                raise DeviceError(
                    f"keep_addresses=True on the CPU with torch {torch.__version__}",
                    reason="this torch cannot exchange the memory of two storages",
                    remedy="use torch 2.13 or later, or leave keep_addresses out",
                )
            return self._move_through_pool(list(found))
        for row in batches(found, ROW_BYTES):
            addresses = self.grow(sum(align(block.n_bytes, ALIGNMENT_BYTES) for block in row))
            for block in row:
                fresh = addresses.take(block.n_bytes)
                storage, _ = block.storages[0]
                fresh.copy_(storage)
                storages.swap_memory(storage, fresh)
                self._note(storage, addresses)

    def _move_through_pool(self, found: list[OwnedBlock]) -> None:
        pool = storages.AddressPool(self._device, lambda n: self.grow(n).address)
        large = (block for block in found if not storages.is_small(block.n_bytes))
        small = (block for block in found if storages.is_small(block.n_bytes))
        row_bytes = ROW_BYTES if storages.cuts_segments(self._device) else 1
        for row in (*batches(large, row_bytes), *batches(small, 1)):
            moved = [storage for block in row for storage, _ in block.storages]
            pool.move(moved)
            for storage in moved:
                address = storage.data_ptr()
                found_in = (r for r in self.ranges if 0 <= address - r.address < r.n_bytes)
                if (addresses := next(found_in, None)) is None:
                    raise storages.elsewhere_error(storage.nbytes())
                self._note(storage, addresses)
        # The allocator did not need all segments.
        self.ranges = {each: moved for each, moved in self.ranges.items() if moved}

    def _note(self, storage: torch.UntypedStorage, addresses: AddressRange) -> None:
        storages.tie(storage, addresses)  # torch before 2.13 does not keep them alive
        self.ranges[addresses].append(storage)

    def move_out(self) -> None:
        """Move all storages to ordinary memory again, a row at a time. They are present.

        Raises:
            torch.OutOfMemoryError: not enough memory; the rest stays here, and a later call
                continues.
        """
        while self.ranges:
            addresses, moved = next(reversed(self.ranges.items()))
            while moved:
                _make_ordinary(moved[-1])
                moved.pop()
            # Its memory is freed after the copies: closing it waits for the device.
            del self.ranges[addresses]


def _make_ordinary(storage: torch.UntypedStorage) -> None:
    storages.renew(storage)
    storages.untie(storage)


def is_movable(storage: torch.UntypedStorage, offloader: object) -> bool:
    """Whether a storage moves by itself: not one in a region, which its owner pauses, nor one whose
    address ``offloader`` keeps. A storage of a dead offloader gets ordinary memory.

    Raises:
        ConfigError: another PhaseOffloader keeps its address.
    """
    addresses = storages.owner_of(storage)
    if addresses is None:
        return True
    if addresses.owner is None:
        return False
    owner = addresses.owner()
    if owner is None:
        _make_ordinary(storage)
    elif owner is not offloader:
        raise ConfigError(
            f"a storage of {storage.nbytes()} bytes",
            reason="another PhaseOffloader keeps its address, and offloads it",
            remedy="close() that one first, or give both sets of tensors to one PhaseOffloader",
        )
    return owner is None
