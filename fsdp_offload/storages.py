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

[Note: storages that share]
A storage moved alone gets what the allocator takes for it: 20 MiB for one of 7. So storages are
moved together, and what is rounded is their sum: the allocator takes one segment for it and, as
that is dropped at once, cuts them from it (``moving/rooms.py``). Requests up to 1 MiB have segments
of 2 MiB, several in each, whatever is done.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
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
    """Undo :func:`tie` and :func:`own`. Idempotent."""
    vars(storage).pop("_fsdp_offload_memory", None)
    vars(storage).pop("_fsdp_offload_owner", None)


def is_tied(storage: torch.UntypedStorage) -> bool:
    """Whether it lies in memory of somebody here, who moves it."""
    return hasattr(storage, "_fsdp_offload_memory")


def own(storage: torch.UntypedStorage, owner: object) -> None:
    """Say who has moved a storage to where it is tied, and lets it leave; not kept alive."""
    storage._fsdp_offload_owner = weakref.ref(owner)  # type: ignore[attr-defined]


def is_owned(storage: torch.UntypedStorage) -> bool:
    """Whether somebody has moved it, who may be gone."""
    return hasattr(storage, "_fsdp_offload_owner")


def owner_of(storage: torch.UntypedStorage) -> object | None:
    """Who has moved it, if it was moved and they are not gone."""
    find = getattr(storage, "_fsdp_offload_owner", None)
    return None if find is None else find()


def memory_of(storage: torch.UntypedStorage) -> Any:
    """What it is tied to."""
    return storage._fsdp_offload_memory  # type: ignore[attr-defined]


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
        self._unused: list[int] = []
        allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(self._spare.get)
        release = ctypes.CDLL(None).getpid  # any function without effect
        self._allocator = torch._C._cuda_customAllocator(_pointer(allocate), _pointer(release))
        self._pool = self._new_pool()
        self._can_share = cuts_segments(device)
        _kept.append((allocate, self._allocator))

    def move(self, storage: torch.UntypedStorage) -> bool:
        """Give the storage memory of the pool, with its content, on the current stream.

        Returns:
            False: torch's allocator wanted a segment of another size than it is known to; the
            storage is as before.
        """
        size = self._provide(storage.nbytes())
        if not self._resize(storage):
            return False
        self._note(storage.data_ptr(), size)
        return True

    def move_together(self, found: Sequence[torch.UntypedStorage]) -> bool:
        """:meth:`move` for storages, none of them small, without rounding for each.

        Returns:
            False: torch's allocator does not cut segments as it is known to; each storage is as
            before, or moved.
        """
        if not self._can_share:
            return False
        n_bytes = sum(block_bytes(storage.nbytes()) for storage in found)
        size = self._provide(n_bytes)
        try:
            with torch.cuda.use_mem_pool(self._pool, self._device):
                address = _allocate_and_drop(n_bytes, self._device)
        except BaseException as error:
            self._can_share = False
            self._pool = self._new_pool()  # the old one may have cached it, or not
            if isinstance(error, torch.OutOfMemoryError):
                return False
            raise
        is_taken = self._note(address, size)
        self._can_share = all(self._resize(storage) for storage in found)
        if is_taken and not any(address <= s.data_ptr() < address + size for s in found):
            self._can_share = False
            self._pool = self._new_pool()  # the segment goes with the old one
            self._unused.append(address)
        return self._can_share

    def start_anew(self) -> None:
        """Nothing lies in the pool any more: its memory may go, what it has cached is forgotten."""
        self.forget_spare()
        self._pool = self._new_pool()
        self._can_share = cuts_segments(self._device)

    def forget_spare(self) -> set[int]:
        """Addresses of memory that was given and is not used; it never will be."""
        unused = {*self._spare.values(), *self._unused}
        self._spare.clear()
        self._unused.clear()
        return unused

    def _provide(self, n_bytes: int) -> int:
        """Have memory for the segment that a request may need; its size."""
        size = segment_bytes(n_bytes)
        if size not in self._spare:
            self._spare[size] = self._memory(size)
        return size

    def _note(self, address: int, size: int) -> bool:
        """Whether the memory of that size was used; else it was a part of an earlier segment."""
        spare = self._spare[size]
        is_used = spare <= address < spare + size
        if is_used:
            del self._spare[size]
        return is_used

    def _resize(self, storage: torch.UntypedStorage) -> bool:
        try:
            with torch.cuda.use_mem_pool(self._pool, self._device):
                storage.resize_(storage.nbytes())  # the same size: other memory, and a copy
        except torch.OutOfMemoryError:
            return False
        return True

    def _new_pool(self) -> Any:
        with torch.cuda.device(self._device):
            return torch.cuda.MemPool(self._allocator)


def _allocate_and_drop(n_bytes: int, device: torch.device) -> int:
    """The address of memory that the current pool has cached from now on."""
    return torch.empty(n_bytes, dtype=torch.uint8, device=device).data_ptr()


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


def segments(device: torch.device) -> list[tuple[int, int]]:
    """Address and bytes of each segment that torch's allocator has of the CUDA driver."""
    found = torch.cuda.memory_snapshot()
    return [(s["address"], s["total_size"]) for s in found if s["device"] == device.index]


def cached_blocks(device: torch.device, least_bytes: int) -> list[int]:
    """Sizes, from ``least_bytes`` on, of what the allocator would cut before it takes a larger
    block for the current stream: parts of segments whose other parts are in use."""
    cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if cached_bytes < least_bytes:
        return []  # a snapshot costs some ms
    stream, pool = torch.cuda.current_stream(device).cuda_stream, (0, 0)
    return [
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index and segment["stream"] == stream
        if segment["segment_type"] == "large"
        if tuple(segment.get("segment_pool_id", pool)) == pool
        for block in segment["blocks"]
        if block["state"] == "inactive" and least_bytes <= block["size"] < segment["total_size"]
    ]


def _allocator_settings() -> str:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    found = [os.environ.get(name, "") for name in names]
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is not None:  # what was set later
        found.append(str(read()))
    return ",".join(found)
