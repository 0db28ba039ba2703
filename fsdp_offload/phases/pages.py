"""Device memory at addresses that stay, in chunks that are mapped and unmapped.

An address range is reserved once. A chunk of it is mapped (has memory) or not; tensors over the
range keep their address all the time, and keep the range itself. Using one whose chunk is not
mapped is an error of the caller that torch does not catch: a kernel stops with an illegal access.

On the CPU an anonymous mapping stands for the range, and unmapping a chunk gives its memory back to
the kernel (``MADV_DONTNEED``): the same address rules without a GPU. There an unmapped chunk reads
as zeros.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

from ..core import storage as storages
from ..core.config import align
from ..core.cuda_driver import Driver
from ..core.errors import ConfigError, DeviceError, HostMemoryError
from ..link.storage_block import OwnedBlock

CHUNK_BYTES: Final = 256 << 20
"""To let the device use a chunk takes 1 ms while copies to it run, of any size, and 0.6 ms more per
256 MiB that are fresh from the driver (H200); so the fewer, the better."""
ROW_BYTES: Final = 512 << 20
"""Of storages that move together: what that takes of device memory beside them."""
_ALIGNMENT_BYTES: Final = 512  # of each tensor, as in torch's own allocator


class HostDriver:
    """What :class:`.cuda_driver.Driver` is for CUDA, for one range of the CPU."""

    granularity_bytes = mmap.PAGESIZE

    def reserve(self, n_bytes: int) -> int:
        """The address of the range.

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
        with suppress(OSError, AttributeError):  # whole chunks go, never a part of a huge page
            self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
        self._address = torch.frombuffer(self._mapping, dtype=torch.uint8, count=1).data_ptr()
        return self._address

    def map(self, address: int, n_bytes: int) -> None:
        """The kernel gives memory at the first use."""

    def unmap(self, address: int, n_bytes: int) -> None:
        """Give memory back to the kernel."""
        self._mapping.madvise(mmap.MADV_DONTNEED, address - self._address, n_bytes)

    def tensor(self, address: int, n_bytes: int, owner: object) -> Tensor:
        """1-D uint8 over a range; it keeps the mapping."""
        start = address - self._address
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=n_bytes, offset=start)

    def close(self, address: int, n_bytes: int, mapped: dict[int, int]) -> None:
        """The mapping goes with the last tensor over it."""


def driver_of(device: torch.device) -> Driver | HostDriver:
    """What maps memory there.

    Raises:
        DeviceError: neither CUDA with virtual memory management nor the CPU.
    """
    if device.type == "cpu":
        return HostDriver()
    if device.type == "cuda" and torch.version.hip is None:
        return Driver(device)
    raise DeviceError(
        f"memory at a fixed address on {device}",
        reason="only the CUDA driver is supported",
        remedy="do without fixed addresses there",
    )


class Pages:
    """An address range, all of it mapped at first; storages are given out of it front to back.

    Args:
        driver: of the device.
        key: begins the keys of its chunks.
        n_bytes: rounded up to what the device maps at least.
        chunk_bytes: of what is mapped as one; the last chunk may be smaller.
        owner: the :class:`FixedMemory` whose storages are moved in; None: tensors of a region.

    Raises:
        torch.OutOfMemoryError: there is no device memory; nothing was taken.
        HostMemoryError: likewise, on the CPU.
    """

    def __init__(
        self,
        driver: Driver | HostDriver,
        key: str,
        n_bytes: int,
        chunk_bytes: int,
        owner: FixedMemory | None = None,
    ) -> None:
        unit = driver.granularity_bytes
        self.key, self.n_bytes = key, align(max(n_bytes, 1), unit)
        self.address = driver.reserve(self.n_bytes)
        self.owner = None if owner is None else weakref.ref(owner)
        self.used_bytes = 0
        step = align(chunk_bytes, unit)
        self.chunks = [
            (self.address + start, min(step, self.n_bytes - start))
            for start in range(0, self.n_bytes, step)
        ]
        """Address and bytes of each, ascending, without gaps."""
        self._driver = driver
        self._mapped: dict[int, int] = {}  # bytes by address
        self._close = weakref.finalize(self, driver.close, self.address, self.n_bytes, self._mapped)
        self._close.atexit = False  # tensors are still in use then; the process's end gives it
        try:
            for index in range(len(self.chunks)):
                self.map(index)
        except BaseException:
            self._close()
            raise

    def map(self, index: int) -> None:
        """Give a chunk memory, with any content. It has none.

        Raises:
            torch.OutOfMemoryError: there is none; it stays without.
        """
        address, n_bytes = self.chunks[index]
        assert address not in self._mapped, index
        self._driver.map(address, n_bytes)
        self._mapped[address] = n_bytes

    def unmap(self, index: int) -> None:
        """Give a chunk's memory up. All work on it has completed."""
        address, n_bytes = self.chunks[index]
        self._driver.unmap(address, n_bytes)
        del self._mapped[address]

    @property
    def mapped_bytes(self) -> int:
        """Memory that it has now."""
        return sum(self._mapped.values())

    @property
    def is_present(self) -> bool:
        """Whether all of it has memory."""
        return self.mapped_bytes == self.n_bytes

    @torch.inference_mode(False)
    def tensor(self, start: int, n_bytes: int) -> Tensor:
        """1-D uint8 over a range that is mapped now; on CUDA its storage keeps the range."""
        return self._driver.tensor(self.address + start, n_bytes, self)

    def take(self, n_bytes: int) -> torch.UntypedStorage:
        """A storage over the next bytes."""
        taken = self.tensor(self.used_bytes, n_bytes).untyped_storage()
        self.used_bytes += align(n_bytes, _ALIGNMENT_BYTES)
        return taken


class Chunk(OwnedBlock):
    """One chunk of pages, unmapped and mapped in place."""

    __slots__ = ("_address", "_index", "_pages")

    def __init__(
        self, pages: Pages, index: int, found: Sequence[tuple[torch.UntypedStorage, int]] = ()
    ) -> None:
        self._pages, self._index = pages, index
        self._address, n_bytes = pages.chunks[index]
        super().__init__(f"{pages.key}/{index}", n_bytes, found)

    def view(self) -> Tensor:
        return self._pages.tensor(self._address - self._pages.address, self.n_bytes)

    def release(self) -> None:
        self._pages.unmap(self._index)

    def restore(self) -> None:
        self._pages.map(self._index)


class FixedMemory:
    """Device memory at addresses that stay; it grows, and storages of others can be moved in.

    Args:
        name: begins the keys of all chunks.
        device: CUDA or the CPU.
        chunk_bytes: memory is mapped and unmapped in chunks of this size.

    Raises:
        DeviceError: the device cannot keep addresses.
    """

    def __init__(self, name: str, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        driver_of(device)
        self.name, self._device, self._chunk_bytes = name, device, chunk_bytes
        self._pages: list[Pages] = []
        self._moved: list[tuple[Pages, torch.UntypedStorage]] = []
        self._n_made = 0  # so far: no two have the same key

    @property
    def n_bytes(self) -> int:
        """Whether it has memory or not."""
        return sum(pages.n_bytes for pages in self._pages)

    @property
    def mapped_bytes(self) -> int:
        """Memory that it has now."""
        return sum(pages.mapped_bytes for pages in self._pages)

    def blocks(self) -> list[Chunk]:
        """All of the memory."""
        inside: dict[int, list[tuple[torch.UntypedStorage, int]]] = {}
        for pages, storage in self._moved:
            start = storage.data_ptr() - pages.address
            inside.setdefault(id(pages), []).append((storage, start))
        # Buffers of a range's chunks lie side by side, so the first may have all storages.
        return [
            Chunk(pages, index, () if index else inside.get(id(pages), ()))
            for pages in self._pages
            for index in range(len(pages.chunks))
        ]

    def take(self, n_bytes: int) -> tuple[torch.UntypedStorage, Pages]:
        """A storage, and where it lies.

        Raises:
            torch.OutOfMemoryError: there is no memory to grow by.
        """
        found = (pages for pages in self._pages if pages.used_bytes + n_bytes <= pages.n_bytes)
        pages = next(found, None) or self._grow(n_bytes)
        return pages.take(n_bytes), pages

    def _grow(self, n_bytes: int, owner: FixedMemory | None = None) -> Pages:
        key = f"{self.name}/{self._n_made}"
        pages = Pages(driver_of(self._device), key, n_bytes, self._chunk_bytes, owner)
        self._pages.append(pages)
        self._n_made += 1
        return pages

    def clear(self) -> None:
        """Forget all memory: it goes when nothing refers to it any more."""
        self._pages.clear()

    # ------------------------------------------------------------------ storages of others

    def move_in(self, found: Iterable[torch.UntypedStorage]) -> None:
        """Give storages memory of this one's, with their content, on the current stream.

        Raises:
            torch.OutOfMemoryError: there is no memory for a row beside; those that were moved stay
                here until :meth:`move_out`.
            DeviceError: likewise, this version of torch, or how its allocator was set up, is in
                the way.
        """
        if storages.can_swap():
            for row in _rows(found):
                pages = self._grow(sum(align(s.nbytes(), _ALIGNMENT_BYTES) for s in row), self)
                for storage in row:
                    fresh = pages.take(storage.nbytes())
                    fresh.copy_(storage)
                    storages.swap_memory(storage, fresh)
                    self._note(storage, pages)
            return
        if self._device.type == "cpu":
            raise DeviceError(
                f"keep_addresses=True on the CPU with torch {torch.__version__}",
                reason="it cannot exchange the memory of two storages",
                remedy="use torch 2.13 or later, or leave keep_addresses out",
            )
        self._resize_in(list(found))

    def _resize_in(self, found: Sequence[torch.UntypedStorage]) -> None:
        """For torch before 2.13, see core/storage.py."""
        pool = storages.AddressPool(self._device, lambda n: self._grow(n, self).address)
        small = [storage for storage in found if storages.is_small(storage.nbytes())]
        large = [storage for storage in found if not storages.is_small(storage.nbytes())]
        for row in (*_rows(large), *([storage] for storage in small)):
            moved = pool.move(row)
            for storage in row:
                pages = self._holding(storage)
                if pages is None and not moved and pool.move([storage]):
                    pages = self._holding(storage)
                if pages is None:
                    raise DeviceError(
                        f"{storage.nbytes()} bytes at a given address",
                        reason="torch's allocator asks for other sizes than it does by default",
                        remedy="use torch 2.13 or later, or take roundup_power2_divisions out of "
                        "PYTORCH_ALLOC_CONF, or leave keep_addresses out",
                    )
                self._note(storage, pages)
        used = {id(pages) for pages, _ in self._moved}  # the allocator did not need all segments
        self._pages = [pages for pages in self._pages if id(pages) in used]

    def _holding(self, storage: torch.UntypedStorage) -> Pages | None:
        address = storage.data_ptr()
        found = (pages for pages in self._pages if 0 <= address - pages.address < pages.n_bytes)
        return next(found, None)

    def _note(self, storage: torch.UntypedStorage, pages: Pages) -> None:
        storages.tie(storage, pages)  # torch before 2.13 does not keep them by itself
        self._moved.append((pages, storage))

    def move_out(self) -> None:
        """Give all storages ordinary memory again, a row at a time. It is present.

        Raises:
            torch.OutOfMemoryError: there is no memory; what was not reached stays here, and a later
                call goes on.
        """
        while self._moved:
            pages, storage = self._moved[-1]
            make_ordinary(storage)
            self._moved.pop()
            if not self._moved or self._moved[-1][0] is not pages:
                # Its memory goes once the copies are done: closing it waits for the device.
                self._pages = [each for each in self._pages if each is not pages]
        self._pages.clear()


def make_ordinary(storage: torch.UntypedStorage) -> None:
    """Undo a move; raises as :func:`.storage.renew`."""
    storages.renew(storage)
    storages.untie(storage)


def is_movable(storage: torch.UntypedStorage, mine: Sequence[FixedMemory]) -> bool:
    """Whether a storage moves by itself: not one in a region, which its owner pauses.

    One of a PhaseOffloader that does not exist any more gets ordinary memory.

    Raises:
        ConfigError: another PhaseOffloader keeps its address.
    """
    pages = storages.owner_of(storage)
    if pages is None:
        return True
    find: Callable[[], FixedMemory | None] | None = pages.owner
    if find is None:
        return False
    owner = find()
    if owner is None:
        make_ordinary(storage)
        return True
    if all(owner is not each for each in mine):
        raise ConfigError(
            f"a storage of {storage.nbytes()} bytes",
            reason="another PhaseOffloader keeps its address, and offloads it",
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
