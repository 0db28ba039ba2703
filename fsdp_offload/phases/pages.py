"""Device memory at an address that stays, in chunks that come and go.

[Note: pages]
An address range is reserved once. A chunk of it is mapped (has memory) or not; tensors over the
range keep their address all the time, and keep the range itself. Using one whose chunk is not
mapped is an error of the caller that torch does not catch: a kernel stops with an illegal access.

On the CPU an anonymous mapping stands for the range, and unmapping a chunk gives its memory back to
the kernel (``MADV_DONTNEED``): the same address rules without a GPU. There an unmapped chunk reads
as zeros.
"""

from __future__ import annotations

import abc
import mmap
import weakref
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

from ..core.cuda_driver import Driver
from ..core.errors import DeviceError, HostMemoryError
from ..plan.layout import align

CHUNK_BYTES: Final = 256 << 20
"""To let the device use a chunk takes 1 ms while copies to it run, of any size, and 0.6 ms more per
256 MiB that are fresh from the driver (H200); so the fewer, the better."""


class Pages(abc.ABC):
    """An address range of one device, all of it mapped at first.

    Args:
        n_bytes: rounded up to whole units.
        chunk_bytes: of each part that is mapped as one; the last one may be smaller.
        unit_bytes: what the device maps at least.
    """

    address: int

    def __init__(self, n_bytes: int, chunk_bytes: int, unit_bytes: int) -> None:
        self.n_bytes, step = align(n_bytes, unit_bytes), align(chunk_bytes, unit_bytes)
        self.chunks = [
            (start, min(start + step, self.n_bytes)) for start in range(0, self.n_bytes, step)
        ]
        """``(start, stop)`` in bytes, ascending, without gaps."""

    @abc.abstractmethod
    def is_mapped(self, index: int) -> bool:
        """Whether the chunk has memory."""

    @abc.abstractmethod
    def map(self, index: int) -> None:
        """Give the chunk memory, with any content. It has none.

        Raises:
            torch.OutOfMemoryError: there is none; it stays without.
        """

    @abc.abstractmethod
    def unmap(self, index: int) -> None:
        """Give its memory up. All work on it has completed."""

    @abc.abstractmethod
    def tensor(self, start: int, n_bytes: int) -> Tensor:
        """1-D uint8 over part of the range, a storage of its own that keeps the range alive.

        The part is mapped now.
        """


def make(device: torch.device, n_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Pages:
    """Pages of at least ``n_bytes``, rounded up to what the device maps at least.

    Raises:
        torch.OutOfMemoryError: there is no device memory; nothing was taken.
        HostMemoryError: likewise, on the CPU.
        DeviceError: the device cannot do it.
    """
    driver = check(device)
    return DevicePages(driver, n_bytes, chunk_bytes) if driver else HostPages(n_bytes, chunk_bytes)


def check(device: torch.device) -> Driver | None:
    """The driver of a CUDA device, None for the CPU.

    Raises:
        DeviceError: another device, or one without virtual memory management.
    """
    if device.type == "cpu":
        return None
    if device.type == "cuda" and torch.version.hip is None:
        return Driver(device)
    raise DeviceError(
        f"memory at a fixed address on {device}",
        reason="only the CUDA driver is supported",
        remedy="do without fixed addresses there",
    )


class DevicePages(Pages):
    """:class:`Pages` of a CUDA device; see :func:`make` for what it raises."""

    def __init__(self, driver: Driver, n_bytes: int, chunk_bytes: int) -> None:
        super().__init__(n_bytes, chunk_bytes, driver.granularity_bytes)
        self.address = driver.reserve(self.n_bytes)
        self._driver = driver
        self._mapped: dict[int, tuple[int, int]] = {}  # (address, bytes) by chunk
        self._give_back = weakref.finalize(
            self, _give_back, driver, self.address, self.n_bytes, self._mapped
        )
        self._give_back.atexit = False  # tensors are still in use then; the process's end gives it
        try:
            for index in range(len(self.chunks)):
                self.map(index)
        except BaseException:
            self._give_back()
            raise

    def is_mapped(self, index: int) -> bool:
        return index in self._mapped

    def map(self, index: int) -> None:
        assert index not in self._mapped, index
        start, stop = self.chunks[index]
        place = (self.address + start, stop - start)
        self._driver.map(*place)
        self._mapped[index] = place

    def unmap(self, index: int) -> None:
        self._driver.unmap(*self._mapped[index])
        del self._mapped[index]

    def tensor(self, start: int, n_bytes: int) -> Tensor:
        part = _Part(self, self.address + start, n_bytes)
        with torch.inference_mode(False):
            return torch.as_tensor(part, device=self._driver.device)


class _Part:
    """What torch takes a tensor from; the tensor's storage keeps it, and it keeps the pages."""

    def __init__(self, pages: DevicePages, address: int, n_bytes: int) -> None:
        self.pages = pages
        self.__cuda_array_interface__ = {
            "shape": (n_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _give_back(
    driver: Driver, address: int, n_bytes: int, mapped: dict[int, tuple[int, int]]
) -> None:
    """The range and what is mapped there, when nothing refers to it. Never raises: it runs when
    tensors are collected."""
    try:
        if torch.cuda.is_current_stream_capturing():
            return  # to wait would end the capture; the range is left as it is
        torch.cuda.synchronize(driver.device)  # the last tensor may go before kernels that use it
        while mapped:
            driver.unmap(*mapped.popitem()[1])
        driver.free(address, n_bytes)
    except Exception:  # a failed device: likewise
        return


class HostPages(Pages):
    """:class:`Pages` of host memory.

    Raises:
        HostMemoryError: the kernel refused to map it.
    """

    def __init__(self, n_bytes: int, chunk_bytes: int) -> None:
        super().__init__(n_bytes, chunk_bytes, mmap.PAGESIZE)
        try:
            self._mapping = mmap.mmap(-1, self.n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise HostMemoryError(
                f"{self.n_bytes} bytes at a fixed address",
                reason=f"the kernel refused to map them ({error})",
                remedy="ask for less, or raise the limit on address space (ulimit -v)",
            ) from None
        with suppress(OSError, AttributeError):  # whole chunks go, never a part of a huge page
            self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
        self.address = torch.frombuffer(self._mapping, dtype=torch.uint8, count=1).data_ptr()
        self._mapped = set(range(len(self.chunks)))

    def is_mapped(self, index: int) -> bool:
        return index in self._mapped

    def map(self, index: int) -> None:
        assert index not in self._mapped, index
        self._mapped.add(index)

    def unmap(self, index: int) -> None:
        start, stop = self.chunks[index]
        self._mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)
        self._mapped.remove(index)

    def tensor(self, start: int, n_bytes: int) -> Tensor:
        with torch.inference_mode(False):
            return torch.frombuffer(self._mapping, dtype=torch.uint8, count=n_bytes, offset=start)


class Chunk:
    """One chunk of pages as a :class:`~..memory.transfer.Block`: unmapped and mapped, in place."""

    def __init__(self, key: str, pages: Pages, index: int) -> None:
        self.key = key
        self._pages, self._index = pages, index
        self._start, stop = pages.chunks[index]
        self.n_bytes = stop - self._start

    def view(self) -> Tensor:
        return self._pages.tensor(self._start, self.n_bytes)

    def release(self) -> None:
        self._pages.unmap(self._index)

    def restore(self) -> None:
        self._pages.map(self._index)
