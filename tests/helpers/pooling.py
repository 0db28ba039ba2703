"""A model of torch's CUDA allocator with pools over memory of others, and storages over it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
from collections.abc import Iterator

import pytest
import torch

from fsdp_offload.core import storage as storages
from fsdp_offload.link import address_range
from fsdp_offload.phases.region import FixedMemory

MIB = 1 << 20


class Pool:
    """What a pool has cached: ``(size, address)``, small and large."""

    def __init__(self) -> None:
        self.free: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])


class Allocator:
    """torch's: segments by their callback, the smallest cached block that fits, cut."""

    def __init__(self) -> None:
        self.callback = 0
        self.active: Pool | None = None
        self.segments: list[tuple[int, int]] = []  # start and end, ever
        self.small_segment = 2 * MIB
        self.rounds = False  # to powers of two
        self._ordinary = itertools.count(1 << 50, 1 << 40)

    def take(self, n_bytes: int) -> tuple[int, int]:
        """Size and address."""
        if self.active is None:
            return n_bytes, next(self._ordinary)
        size = storages.block_bytes(n_bytes)
        size = 1 << (size - 1).bit_length() if self.rounds else size
        is_small = size <= MIB
        free = self.active.free[is_small]
        found = min((b for b in free if b[0] >= size), default=None)
        if found is None:
            found = self._segment(size)
        else:
            free.remove(found)
        rest = found[0] - size
        if not (rest >= 512 if is_small else rest > MIB):
            return found
        free.append((rest, found[1] + size))
        return size, found[1]

    def _segment(self, size: int) -> tuple[int, int]:
        wanted = self.small_segment if size <= MIB else storages.segment_bytes(size)
        function = ctypes.CFUNCTYPE(
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        )(self.callback)
        address = function(wanted, 0, None)
        if address is None:
            raise torch.OutOfMemoryError("the callback gave nothing")
        self.segments.append((address, address + wanted))
        return wanted, address

    def take_and_drop(self, n_bytes: int, **_: object) -> Dropped:
        assert self.active is not None
        size, address = self.take(n_bytes)
        free = self.active.free[size <= MIB]
        rest = next((b for b in free if b[1] == address + size), None)
        if rest is not None:
            free.remove(rest)
            size += rest[0]
        free.append((size, address))
        return Dropped(address)


class Dropped:
    """In place of a tensor of the pool that is not kept."""

    def __init__(self, address: int) -> None:
        self.data_ptr = lambda: address


class Storage:
    """Resized in place of torch's."""

    device = torch.device("cuda", 0)

    def __init__(self, allocator: Allocator, n_bytes: int) -> None:
        self._allocator, self._n_bytes = allocator, n_bytes
        self._cdata = id(self)
        self.address = allocator.take(n_bytes)[1]

    def nbytes(self) -> int:
        return self._n_bytes

    def data_ptr(self) -> int:
        return self.address

    def resizable(self) -> bool:
        return True

    def resize_(self, n_bytes: int) -> None:
        self.address = self._allocator.take(n_bytes)[1]


class Driver:
    """Addresses without memory, and what is held of them."""

    granularity_bytes = 2 * MIB

    def __init__(self) -> None:
        self.held_bytes = 0
        self._addresses = itertools.count(1 << 40, 1 << 38)

    def reserve(self, n_bytes: int) -> int:
        self.held_bytes += n_bytes
        return next(self._addresses)

    def map(self, address: int, n_bytes: int) -> None: ...

    def close(self, address: int, n_bytes: int, mapped: object) -> None:
        self.held_bytes -= n_bytes


def allocator_in_place(patch: pytest.MonkeyPatch) -> Allocator:
    """In place of torch's in ``storages.AddressPool``."""
    made = Allocator()
    gc.collect()  # finalizers of earlier tests' optimizers call torch.empty

    def custom(allocate: int, release: int) -> object:
        made.callback = allocate
        return object()

    @contextlib.contextmanager
    def use(pool: Pool, device: object) -> Iterator[None]:
        made.active = pool
        try:
            yield
        finally:
            made.active = None

    patch.setattr(torch._C, "_cuda_customAllocator", custom, raising=False)
    patch.setattr(torch.cuda, "MemPool", lambda allocator: Pool())
    patch.setattr(torch.cuda, "use_mem_pool", use)
    patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    patch.setattr(storages.torch, "empty", made.take_and_drop)
    patch.setattr(storages, "cuts_segments", lambda device: True)
    return made


def memory_in_place(patch: pytest.MonkeyPatch) -> tuple[FixedMemory, Driver]:
    """Fixed memory of a CUDA device with a torch that cannot swap, all of it modelled."""
    driver = Driver()
    patch.setattr(address_range, "driver_of", lambda device: driver)
    patch.setattr(storages, "can_swap", lambda: False)
    return FixedMemory("state", Storage.device, address_range.CHUNK_BYTES), driver
