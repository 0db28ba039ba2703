"""The only file that touches private API of torch's storages and its CUDA allocator.

[Note: other memory for a storage]
A storage object is what all views, aliases and DTensors of some memory share. To move them all at
once, the object is given other memory. torch 2.13 swaps the memory of two storages. Earlier
versions can only *resize* a storage, which allocates from the current memory pool and copies; so on
CUDA a pool is used whose memory we give. Its allocator is called with the allocator's lock and the
GIL held. Python code there could be interrupted by a thread that holds the GIL while it waits for
the lock; so the callback is a built-in method (``dict.get``), which cannot be interrupted. Memory
is given back by the region that owns it, not through the pool, whose callback for that does
nothing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, Final

import torch

_MIB: Final = 1 << 20
_kept: list[object] = []  # torch keeps bare pointers to allocators and their functions


def can_swap() -> bool:
    """Whether two storages can exchange their memory."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def swap_memory(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange the memory of two storages of equal size, and whether it is resizable."""
    storage._swap_data_ptr_(other)  # type: ignore[attr-defined]


def tie(storage: torch.UntypedStorage, memory: object) -> None:
    """Keep ``memory``, which the storage lies in, alive as long as the storage."""
    storage._fsdp_offload_memory = memory  # type: ignore[attr-defined]


def untie(storage: torch.UntypedStorage) -> None:
    """Undo :func:`tie`."""
    del storage._fsdp_offload_memory  # type: ignore[attr-defined]


def is_tied(storage: torch.UntypedStorage) -> bool:
    """Whether it lies in memory of somebody here, who moves it."""
    return hasattr(storage, "_fsdp_offload_memory")


def renew(storage: torch.UntypedStorage) -> None:
    """Give the storage ordinary memory of torch's, with its content, on the current stream."""
    n_bytes = storage.nbytes()
    if n_bytes == 0:
        return
    if storage.resizable():
        storage.resize_(n_bytes)  # the same size: other memory, and a copy
        return
    fresh = torch.UntypedStorage(n_bytes, device=storage.device)  # swapped flags, too
    fresh.copy_(storage)
    swap_memory(storage, fresh)


class AddressPool:
    """A pool of torch's CUDA allocator that takes memory where it is told to.

    Args:
        device: ``cuda`` with an index.
        memory: gives the address of device memory of a size in bytes, which stays.
    """

    def __init__(self, device: torch.device, memory: Callable[[int], int]) -> None:
        self._device, self._memory = device, memory
        self._spare: dict[int, int] = {}  # address by size: what the next segment gets
        allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(self._spare.get)
        release = ctypes.CDLL(None).getpid  # any function without effect
        allocator = torch._C._cuda_customAllocator(_pointer(allocate), _pointer(release))
        with torch.cuda.device(device):
            self._pool = torch.cuda.MemPool(allocator)
        _kept.append((allocate, allocator))

    def move(self, storage: torch.UntypedStorage) -> bool:
        """Give the storage memory of the pool, with its content, on the current stream.

        Returns:
            False: torch's allocator wanted a segment of another size than it is known to; the
            storage is as before.
        """
        n_bytes = storage.nbytes()
        size = segment_bytes(n_bytes)
        if size not in self._spare:
            self._spare[size] = self._memory(size)
        spare = self._spare[size]
        try:
            with torch.cuda.use_mem_pool(self._pool, self._device):
                storage.resize_(n_bytes)  # the same size: other memory, and a copy
        except torch.OutOfMemoryError:
            return False
        if spare <= storage.data_ptr() < spare + size:
            del self._spare[size]  # else it was a part of an earlier segment
        return True

    def forget_spare(self) -> set[int]:
        """Addresses of memory that was given and is not used; it never will be."""
        unused = set(self._spare.values())
        self._spare.clear()
        return unused


def _pointer(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def segment_bytes(n_bytes: int) -> int:
    """What torch's caching allocator asks for, when it has no room for ``n_bytes``."""
    if is_small(n_bytes):
        return 2 * _MIB
    if is_shared(n_bytes):
        return 20 * _MIB
    return -(-n_bytes // (2 * _MIB)) * 2 * _MIB


def is_small(n_bytes: int) -> bool:
    """Whether the allocator has segments of their own for requests of that size."""
    return n_bytes <= _MIB


def is_shared(n_bytes: int) -> bool:
    """Whether the allocator takes more than is asked for, for later requests."""
    return n_bytes < 10 * _MIB


def block_bytes(n_bytes: int) -> int:
    """What the allocator cuts from a segment for a request."""
    return max(-(-n_bytes // 512), 1) * 512


def fills_segment(n_bytes: int) -> bool:
    """Whether blocks of that many bytes in all use up the segment that is made for their sum: more
    than 1 MiB of rest would be cut off the last one, and given to others."""
    return segment_bytes(n_bytes) - n_bytes <= _MIB


def cuts_segments(device: torch.device) -> bool:
    """Whether the allocator cuts large requests, exactly, from a larger segment that it has cached.

    Settings can forbid that, or make it useless: expandable segments are one anyway.
    """
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return False
    settings = _allocator_settings().replace(" ", "").lower()
    others = ("max_split_size_mb", "roundup_power2_divisions", "expandable_segments:true")
    return not any(name in settings for name in others)


def _allocator_settings() -> str:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    found = [os.environ.get(name, "") for name in names]
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is not None:  # what was set later
        found.append(str(read()))
    return ",".join(found)
