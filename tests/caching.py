"""A model of torch's CUDA caching allocator, large requests of one stream, and storages over it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_offload import storages
from fsdp_offload.device import CpuGateway
from fsdp_offload.moving import StorageBlock, joining, rooms
from fsdp_offload.phases import offloader

MIB = 1 << 20


class CachingModel:
    """Segments of the driver, cut and cached as torch does.

    Args:
        capacity: what the driver has.
    """

    def __init__(self, capacity: int = 1 << 50) -> None:
        self.capacity = capacity
        self.segments: dict[int, int] = {}  # size by first address
        self.free: dict[int, int] = {}  # cached: size by address
        self.used: dict[int, int] = {}
        self.taken: list[int] = []  # from the driver, ever
        self.cuts = True
        self._next = 1 << 40

    @property
    def free_bytes(self) -> int:
        return self.capacity - sum(self.segments.values())

    def malloc(self, n_bytes: int) -> int:
        size = storages.block_bytes(n_bytes)
        found = [(s, a) for a, s in self.free.items() if s >= size and (self.cuts or s < 2 * size)]
        if not found:
            found = [self._segment(storages.segment_bytes(size))]
        whole, address = min(found)
        del self.free[address]
        if whole - size > MIB:
            self.free[address + size] = whole - size
        else:
            size = whole
        self.used[address] = size
        return address

    def _segment(self, size: int) -> tuple[int, int]:
        if size > self.free_bytes:
            self.empty_cache()
        if size > self.free_bytes:
            raise torch.OutOfMemoryError("the model's driver has no more")
        address, self._next = self._next, self._next + size  # side by side
        self.segments[address] = self.free[address] = size
        self.taken.append(size)
        return size, address

    def release(self, address: int) -> None:
        size = self.used.pop(address)
        end, before = address + size, address
        after = 0 if end in self.segments else self.free.pop(end, 0)
        if address not in self.segments:
            before = next((a for a, s in self.free.items() if a + s == address), address)
        self.free[before] = address - before + size + after

    def empty_cache(self) -> None:
        for address, size in list(self.segments.items()):
            if self.free.get(address) == size:
                del self.segments[address], self.free[address]


class ModelGateway(CpuGateway):
    """Device memory of a model."""

    def __init__(self, model: CachingModel) -> None:
        super().__init__(torch.device("cpu"))
        self.model = model

    def allocate(self, n_bytes: int) -> Tensor:
        address = self.model.malloc(n_bytes) if not storages.is_small(n_bytes) else 1
        tensor = torch.empty(n_bytes, dtype=torch.uint8)
        if address > 1:
            weakref.finalize(tensor, self.model.release, address)
        tensor.data_ptr = lambda: address  # type: ignore[method-assign]
        return tensor


@contextmanager
def storages_over(model: CachingModel) -> Iterator[None]:
    """Inside, storages that leave and come back take memory of the model, too."""
    lies: dict[int, int] = {}

    def address(block: StorageBlock) -> int:
        identity = block.storage._cdata
        if identity not in lies and not storages.is_small(block.n_bytes):
            lies[identity] = model.malloc(block.n_bytes)
        return lies.get(identity, 1)

    def release(block: StorageBlock, index: int) -> None:
        address(block)
        block.storage.resize_(0)
        if (lay := lies.pop(block.storage._cdata, None)) is not None:
            model.release(lay)

    def restore(block: StorageBlock, index: int) -> None:
        address(block)
        block.storage.resize_(block.n_bytes)

    def empty_cache(device: Any) -> None:
        model.empty_cache()

    def cached_blocks(device: Any, least_bytes: int) -> list[int]:
        whole = model.segments
        return [n for a, n in model.free.items() if n >= least_bytes and whole.get(a) != n]

    with pytest.MonkeyPatch.context() as patch:
        for name, replaced in (("address", address), ("release", release), ("restore", restore)):
            patch.setattr(StorageBlock, name, replaced)
        patch.setattr(storages, "cuts_segments", lambda device: True)
        patch.setattr(storages, "segments", lambda device: list(model.segments.items()))
        patch.setattr(storages, "cached_blocks", cached_blocks)
        for module in (rooms, joining):
            patch.setattr(module, "free_bytes", lambda device: model.free_bytes)
            patch.setattr(module, "ROOM_BYTES", 32 * MIB)
        patch.setattr(joining, "SPARE_BYTES", 0)
        for module in (joining, offloader):
            patch.setattr(module, "release_cached", empty_cache)
        yield
