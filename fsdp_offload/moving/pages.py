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

import mmap
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, Protocol

import torch
from torch import Tensor

from ..driver import Driver
from ..errors import DeviceError, HostMemoryError
from ..plan.layout import align

CHUNK_BYTES: Final = 256 << 20
"""To let the device use a chunk takes 1 ms while copies to it run, of any size, and 0.6 ms more per
256 MiB that are fresh from the driver (H200); so the fewer, the better."""


class Spares:
    """Memory of chunks that go, for chunks of the same sizes that come at the same time.

    Memory that is fresh from the driver makes the copies beside it slower, because it is cleared.

    All pages are of one device.
    """

    def __init__(self) -> None:
        self._coming: Counter[int] = Counter()  # chunks by size
        self._found: dict[int, list[int]] = {}  # handles by size
        self._drop: Callable[[int], None] | None = None
        self._lock, self._is_closed = threading.Lock(), False

    def await_from(self, leaving: Iterable[Pages]) -> None:
        """Have the memory of chunks that go; what is mapped now is waited for."""
        for pages in leaving:
            pages.spares = self
            self._coming.update(
                stop - start
                for index, (start, stop) in enumerate(pages.chunks)
                if pages.is_mapped(index)
            )

    def put(self, n_bytes: int, handle: int, drop: Callable[[int], None]) -> None:
        """The memory of a chunk that went, and what gives it to the driver."""
        with self._lock:
            if not self._is_closed:
                self._coming[n_bytes] -= 1
                self._found.setdefault(n_bytes, []).append(handle)
                self._drop = drop
                return
        drop(handle)

    def take(self, n_bytes: int) -> int | None:
        """A handle of that much memory; None: there is none, and none will come.

        Raises:
            torch.OutOfMemoryError: there is none yet.
        """
        with self._lock:
            if found := self._found.get(n_bytes):
                return found.pop()
            if not self._is_closed and self._coming[n_bytes] > 0:
                raise torch.OutOfMemoryError(f"no {n_bytes} bytes have left yet")
        return None

    def close(self) -> bool:
        """Wait for no more, and give the driver what is left; whether it was open."""
        with self._lock:
            was_open, self._is_closed = not self._is_closed, True
            left = [handle for found in self._found.values() for handle in found]
            self._found.clear()
        for handle in left:
            assert self._drop is not None
            self._drop(handle)
        return was_open


class Pages(Protocol):
    """An address range of one device, all of it mapped at first."""

    address: int
    n_bytes: int
    chunks: Sequence[tuple[int, int]]
    """``(start, stop)`` in bytes, ascending, without gaps."""
    spares: Spares | None
    """Where memory goes and comes from before it is the driver's."""

    def is_mapped(self, index: int) -> bool:
        """Whether the chunk has memory."""
        ...

    def map(self, index: int) -> None:
        """Give the chunk memory, with any content. It has none.

        Raises:
            torch.OutOfMemoryError: there is none, or ``spares`` has none yet; it stays without.
        """
        ...

    def unmap(self, index: int) -> None:
        """Give its memory up. All work on it has completed."""
        ...

    def tensor(self, start: int, n_bytes: int) -> Tensor:
        """1-D uint8 over part of the range, a storage of its own that keeps the range alive.

        The part is mapped now.
        """
        ...


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


def _cut(n_bytes: int, chunk_bytes: int, unit_bytes: int) -> list[tuple[int, int]]:
    """Chunks of ``chunk_bytes``, the last one shorter; each a multiple of ``unit_bytes``."""
    total, step = align(n_bytes, unit_bytes), align(chunk_bytes, unit_bytes)
    return [(start, min(start + step, total)) for start in range(0, total, step)]


class DevicePages:
    """:class:`Pages` of a CUDA device; see :func:`make` for what it raises."""

    def __init__(self, driver: Driver, n_bytes: int, chunk_bytes: int) -> None:
        self.chunks: Sequence[tuple[int, int]] = _cut(
            n_bytes, chunk_bytes, driver.granularity_bytes
        )
        self.n_bytes = self.chunks[-1][1]
        self.address = driver.reserve(self.n_bytes)
        self.spares: Spares | None = None
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
        """See :class:`Pages`."""
        return index in self._mapped

    def map(self, index: int) -> None:
        """See :class:`Pages`."""
        assert index not in self._mapped, index
        start, stop = self.chunks[index]
        place, spares = (self.address + start, stop - start), self.spares
        handle = None if spares is None else spares.take(stop - start)
        if handle is None:
            self._driver.map(*place)
        else:
            self._driver.put(*place, handle)
        self._mapped[index] = place

    def unmap(self, index: int) -> None:
        """See :class:`Pages`."""
        place, spares = self._mapped[index], self.spares  # another thread may end a swap
        if spares is None:
            self._driver.unmap(*place)
            del self._mapped[index]
        else:
            handle = self._driver.take(*place)
            del self._mapped[index]
            spares.put(place[1], handle, self._driver.release)

    def tensor(self, start: int, n_bytes: int) -> Tensor:
        """See :class:`Pages`."""
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


class HostPages:
    """:class:`Pages` of host memory.

    Raises:
        HostMemoryError: the kernel refused to map it.
    """

    def __init__(self, n_bytes: int, chunk_bytes: int) -> None:
        self.chunks: Sequence[tuple[int, int]] = _cut(n_bytes, chunk_bytes, mmap.PAGESIZE)
        self.n_bytes = self.chunks[-1][1]
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
        self.spares: Spares | None = None
        self._mapped = set(range(len(self.chunks)))

    def is_mapped(self, index: int) -> bool:
        """See :class:`Pages`."""
        return index in self._mapped

    def map(self, index: int) -> None:
        """See :class:`Pages`."""
        assert index not in self._mapped, index
        start, stop = self.chunks[index]
        spares = self.spares
        if spares is not None:
            spares.take(stop - start)
        self._mapped.add(index)

    def unmap(self, index: int) -> None:
        """See :class:`Pages`."""
        start, stop = self.chunks[index]
        self._mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)
        self._mapped.remove(index)
        spares = self.spares
        if spares is not None:  # the kernel's already: a count of chunks
            spares.put(stop - start, 0, _nothing)

    def tensor(self, start: int, n_bytes: int) -> Tensor:
        """See :class:`Pages`."""
        with torch.inference_mode(False):
            return torch.frombuffer(self._mapping, dtype=torch.uint8, count=n_bytes, offset=start)


def _nothing(_: int) -> None:
    """Gives up what is no memory."""


class PageBlock:
    """Pages as a block (``blocks.py``): its pieces are the chunks.

    ``release`` and ``restore`` unmap and map; the address stays.
    """

    def __init__(self, key: str, pages: Pages) -> None:
        self.key, self.pages = key, pages
        self.n_bytes, self.pieces = pages.n_bytes, pages.chunks
        self._bytes = pages.tensor(0, pages.n_bytes)

    def is_present(self, index: int) -> bool:
        """See :class:`~fsdp_offload.moving.blocks.Block`."""
        return self.pages.is_mapped(index)

    def view(self, index: int) -> Tensor:
        """See :class:`~fsdp_offload.moving.blocks.Block`."""
        start, stop = self.pieces[index]
        return self._bytes[start:stop]

    def release(self, index: int) -> None:
        """See :class:`~fsdp_offload.moving.blocks.Block`."""
        self.pages.unmap(index)

    def restore(self, index: int) -> None:
        """See :class:`~fsdp_offload.moving.blocks.Block`."""
        self.pages.map(index)
