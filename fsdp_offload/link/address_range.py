"""Device memory at fixed addresses: ranges whose chunks are mapped and unmapped.

An address range is reserved once. Its chunks are mapped (have memory) or not. Tensors over the
range keep their address, and keep the range alive. If a caller uses one whose chunk is not mapped,
torch does not notice: the kernel stops with an illegal access.

On the CPU the range is an anonymous mapping, and unmapping a chunk returns its memory to the kernel
(``MADV_DONTNEED``): the same address rules without a GPU. An unmapped chunk reads as zeros there.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

from ..core.config import align
from ..core.cuda_driver import Driver
from ..core.errors import DeviceError, HostMemoryError
from .block import OwnedBlock

CHUNK_BYTES: Final = 256 << 20
"""Mapping a chunk of any size takes 1 ms while copies to it run, and 0.6 ms more per 256 MiB of new
driver memory (H200), so larger chunks are better."""
ALIGNMENT_BYTES: Final = 512  # of each tensor, as in torch's own allocator


class HostDriver:
    """As :class:`.cuda_driver.Driver`, for one range of CPU memory."""

    granularity_bytes = mmap.PAGESIZE

    def reserve(self, n_bytes: int) -> int:
        """Reserve the range; returns its address.

        Raises:
            HostMemoryError: the kernel refused to map it.
        """
        try:
            self._mapping = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise HostMemoryError(
                f"{n_bytes} bytes at a fixed address",
                reason=f"the kernel refused to map them ({error})",
                remedy="ask for less, or raise the limit on address space (ulimit -v)",
            ) from None
        with suppress(OSError, AttributeError):  # chunks are freed, never a part of a huge page
            self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
        self._address = torch.frombuffer(self._mapping, dtype=torch.uint8, count=1).data_ptr()
        return self._address

    def map(self, address: int, n_bytes: int) -> None:
        """Do nothing: the kernel provides memory at the first use."""

    def unmap(self, address: int, n_bytes: int) -> None:
        """Return memory to the kernel."""
        self._mapping.madvise(mmap.MADV_DONTNEED, address - self._address, n_bytes)

    def tensor(self, address: int, n_bytes: int, owner: object) -> Tensor:
        """Return a 1-D uint8 tensor over a part of the range; it keeps the mapping alive."""
        start = address - self._address
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=n_bytes, offset=start)

    def close(self, address: int, n_bytes: int, mapped: dict[int, int]) -> None:
        """Drop the mapping, which ends with the last tensor over it."""


def driver_of(device: torch.device) -> Driver | HostDriver:
    """Return the driver that maps memory on ``device``.

    Raises:
        DeviceError: the device is neither CUDA with virtual memory management nor the CPU.
    """
    if device.type == "cpu":
        return HostDriver()
    if device.type == "cuda" and torch.version.hip is None:
        return Driver(device)
    raise DeviceError(
        f"memory at a fixed address on {device}",
        reason="only CUDA devices support it",
        remedy="do without fixed addresses",
    )


class AddressRange:
    """A range of addresses, all mapped at first, handed out as storages from front to back.

    Args:
        driver: the device's.
        key: prefix of the keys of its chunks.
        n_bytes: size, rounded up to the device's mapping granularity.
        chunk_bytes: size of one chunk; the last chunk may be smaller.
        owner: the object that moves other storages in; None for tensors of a region.

    Raises:
        torch.OutOfMemoryError: not enough device memory; nothing was taken.
        HostMemoryError: the same, on the CPU.
    """

    def __init__(
        self,
        driver: Driver | HostDriver,
        key: str,
        n_bytes: int,
        chunk_bytes: int,
        owner: weakref.ref[object] | None = None,
    ) -> None:
        unit = driver.granularity_bytes
        self._driver, self._key, self._step = driver, key, align(chunk_bytes, unit)
        self.n_bytes = align(max(n_bytes, 1), unit)
        self.address = driver.reserve(self.n_bytes)
        self.owner, self.used_bytes = owner, 0
        self._mapped: dict[int, int] = {}  # bytes by address
        self._close = weakref.finalize(self, driver.close, self.address, self.n_bytes, self._mapped)
        self._close.atexit = False  # tensors are still in use then; the end of the process frees it
        try:
            for chunk in self.chunks():
                chunk.restore()
        except BaseException:
            self._close()
            raise

    def chunks(self, storages: Sequence[tuple[torch.UntypedStorage, int]] = ()) -> list[Chunk]:
        """Return all chunks; ``storages`` begin at these bytes of the range."""
        # The chunks' host memory is contiguous, so the first may list all storages.
        return [
            Chunk(self, f"{self._key}/{index}", start, self._step, () if index else storages)
            for index, start in enumerate(range(0, self.n_bytes, self._step))
        ]

    def map(self, start: int, n_bytes: int) -> None:
        """As :meth:`.OwnedBlock.restore`."""
        address = self.address + start
        assert address not in self._mapped, start
        self._driver.map(address, n_bytes)
        self._mapped[address] = n_bytes

    def unmap(self, start: int, n_bytes: int) -> None:
        """As :meth:`.OwnedBlock.release`."""
        self._driver.unmap(self.address + start, n_bytes)
        del self._mapped[self.address + start]

    @property
    def mapped_bytes(self) -> int:
        """Bytes that are mapped now."""
        return sum(self._mapped.values())

    @property
    def is_present(self) -> bool:
        """Whether all of it is mapped."""
        return self.mapped_bytes == self.n_bytes

    @torch.inference_mode(False)
    def tensor(self, start: int, n_bytes: int) -> Tensor:
        """Return a 1-D uint8 tensor over mapped bytes; on CUDA its storage keeps the range
        alive."""
        return self._driver.tensor(self.address + start, n_bytes, self)

    def take(self, n_bytes: int) -> torch.UntypedStorage:
        """Take the next bytes as a storage."""
        taken = self.tensor(self.used_bytes, n_bytes).untyped_storage()
        self.used_bytes += align(n_bytes, ALIGNMENT_BYTES)
        return taken


class Chunk(OwnedBlock):
    """One chunk of a range, unmapped and mapped in place."""

    __slots__ = ("_range", "_start")

    def __init__(
        self,
        addresses: AddressRange,
        key: str,
        start: int,
        most_bytes: int,
        storages: Sequence[tuple[torch.UntypedStorage, int]],
    ) -> None:
        super().__init__(key, min(most_bytes, addresses.n_bytes - start), storages)
        self._range, self._start = addresses, start

    def view(self) -> Tensor:
        return self._range.tensor(self._start, self.n_bytes)

    def release(self) -> None:
        self._range.unmap(self._start, self.n_bytes)

    def restore(self) -> None:
        self._range.map(self._start, self.n_bytes)
