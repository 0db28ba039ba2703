"""The only file that touches private API of torch's storages, CUDA allocator and hooks of
saved tensors.

All views, aliases and DTensors of some memory share one storage object. To move them all to chosen
addresses, this module gives the object other memory. torch 2.13 exchanges the memory of two
storages. Earlier versions can only *resize* a storage, which allocates from the current memory pool
and copies; so on CUDA this module uses a pool with its own memory. torch calls the pool's allocator
with the allocator's lock and the GIL held. A thread that holds the GIL while it waits for the lock
could interrupt Python code there; so the callback is a built-in method (``dict.get``), which
nothing interrupts. The owner frees the memory; the pool's callback for that does nothing.

A storage that moves alone gets a whole segment: 20 MiB for 7. So storages move together: the
allocator takes one segment for their sum, frees it at once, and cuts the storages from it. Requests
up to 1 MiB always share segments of 2 MiB.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor, nn

from .errors import AwayError, DeviceError

_MIB: Final = 1 << 20


# --------------------------------------------------------------------------- identity and presence


def identity(storage: torch.UntypedStorage) -> int:
    """Identify a storage: the same for all its Python objects, as long as one of them lives."""
    return int(storage._cdata)


def owners(storage: torch.UntypedStorage) -> int:
    """Count the tensors, in Python or C++, that hold a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def _alone() -> int:
    # Versions of torch count differently.
    tensor = torch.empty(1, device="cpu")
    return owners(tensor.untyped_storage())


_ALONE: Final = _alone()


def is_shared(tensor: Tensor) -> bool:
    """Whether other tensors have the same storage."""
    return owners(tensor.untyped_storage()) > _ALONE


def is_held(storage: torch.UntypedStorage) -> bool:
    """Whether any tensor has that storage."""
    return owners(storage) >= _ALONE


def refuse_addresses(tensor: Tensor) -> None:
    """Make C++ code raise instead of reading address 0 of a tensor without memory."""
    torch._C._set_throw_on_mutable_data_ptr(tensor)


def is_empty(tensor: Tensor, storage: torch.UntypedStorage | None = None) -> bool:
    """Whether a resize has freed a plain tensor's memory; false for sparse ones. Cheap.

    ``storage``: its own, if the caller has it.
    """
    try:  # checking the layout first would make each call half as slow again
        storage = tensor.untyped_storage() if storage is None else storage
    except NotImplementedError:  # sparse: its values are other tensors, which stay
        return False
    return storage.nbytes() == 0 and tensor.numel() > 0 and tensor.layout is torch.strided


def present(tensor: Tensor, what: str = "use") -> Tensor:
    """Return ``tensor``, plain and strided, after checking that its memory is present.

    Raises:
        AwayError: the memory is offloaded.
    """
    storage = tensor.untyped_storage()
    if is_empty(tensor, storage) or not getattr(owner_of(storage), "is_present", True):
        raise AwayError(
            f"{what} of a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}",
            reason="its device memory is offloaded",
            remedy="call reload() first",
        )
    return tensor


@torch.inference_mode(False)  # it may outlive the mode, and be written to then
def view_over(memory: Tensor, like: Tensor) -> Tensor:
    """Build a tensor like ``like`` over a copy of its storage.

    Args:
        memory: the copy, 1-D uint8; all bytes of the storage.
        like: plain; gives dtype, shape, strides and offset.
    """
    start = memory.storage_offset()
    # Exactly these bytes, so that torch.save takes nothing else with them.
    storage = memory.untyped_storage()[start : start + memory.numel()]
    made = torch.empty(0, dtype=like.dtype, device=memory.device)
    made.set_(storage, like.storage_offset(), like.size(), like.stride())
    made = torch._neg_view(made) if like.is_neg() else made
    return made.conj() if like.is_conj() else made


def as_bytes(tensor: Tensor) -> Tensor:
    """View the memory of a contiguous tensor as 1-D uint8."""
    # One element may have any stride, which view() to another dtype refuses.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


# --------------------------------------------------------------------------- whose memory it is


def move(parameter: Tensor, device: torch.device) -> None:
    """Move a parameter and its gradient in place; one on the meta device gets uninitialised
    memory."""
    data = parameter.detach()
    data = torch.empty_like(data, device=device) if data.is_meta else data.to(device)
    gradient = None if parameter.grad is None else parameter.grad.to(device)
    moved = nn.Parameter(data, parameter.requires_grad)
    vars(moved).update(vars(parameter))
    parameter.grad = None  # only now: the device may have been full
    torch.utils.swap_tensors(parameter, moved)
    parameter.grad = gradient


def tie(storage: torch.UntypedStorage, owner: object) -> None:
    """Keep ``owner``, which owns the storage's memory, alive as long as the storage."""
    storage._fsdp_offload_memory = owner  # type: ignore[attr-defined]


def untie(storage: torch.UntypedStorage) -> None:
    """Undo :func:`tie`. Idempotent."""
    vars(storage).pop("_fsdp_offload_memory", None)


def owner_of(storage: torch.UntypedStorage) -> Any:
    """Return the owner of :func:`tie`, or None."""
    return getattr(storage, "_fsdp_offload_memory", None)


# --------------------------------------------------------------------------- other memory


def can_swap() -> bool:
    """Whether two storages can exchange their memory."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def swap_memory(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange the memory of two storages of equal size, with their resizable flags."""
    storage._swap_data_ptr_(other)  # type: ignore[attr-defined]


def renew(storage: torch.UntypedStorage) -> None:
    """Move the storage to ordinary memory of torch's, with its content, on the current stream.

    Raises:
        torch.OutOfMemoryError: no memory; the storage is unchanged.
    """
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
    """A pool of torch's CUDA allocator at addresses of the caller's choice.

    Args:
        device: ``cuda`` with an index.
        memory: returns the address of device memory of a size in bytes, which stays.
    """

    def __init__(self, device: torch.device, memory: Callable[[int], int]) -> None:
        self._device, self._memory = device, memory
        self._ready: dict[int, int] = {}  # address by size, for the next segment
        allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(self._ready.get)
        release = ctypes.CDLL(None).getpid  # any function without effect
        self._allocator = torch._C._cuda_customAllocator(_pointer(allocate), _pointer(release))
        with torch.cuda.device(device):
            self._pool = torch.cuda.MemPool(self._allocator)
        # torch keeps bare pointers to both, and the pool may end after this object.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object((allocate, self._allocator)))

    def move(self, found: Sequence[torch.UntypedStorage]) -> None:
        """Move storages into the pool, with their content, on the current stream.

        Args:
            found: one; or several, none of them small, which share a segment, where the allocator
                :func:`cuts_segments`.

        Raises:
            torch.OutOfMemoryError: ``memory`` has too little.
            DeviceError: torch's allocator asked for unexpected segment sizes; each storage is
                unchanged or has moved.
        """
        n_bytes = sum(block_bytes(storage.nbytes()) for storage in found)
        size = segment_bytes(n_bytes)
        if size not in self._ready:
            self._ready[size] = self._memory(size)
        address = 0
        try:
            with torch.cuda.use_mem_pool(self._pool, self._device):
                if len(found) > 1:  # freed at once, so the pool has cached memory from now on
                    whole = torch.empty(n_bytes, dtype=torch.uint8, device=self._device)
                    address = whole.data_ptr()
                    del whole
                for storage in found:
                    storage.resize_(storage.nbytes())  # the same size: other memory, and a copy
        except torch.OutOfMemoryError as error:  # the prepared memory had another size
            raise elsewhere_error(n_bytes) from error
        start = self._ready[size]
        if start <= (address or found[0].data_ptr()) < start + size:
            del self._ready[size]  # the request used it, not the rest of an earlier segment


def elsewhere_error(n_bytes: int) -> DeviceError:
    """Build the error for an :class:`AddressPool` that got memory elsewhere."""
    return DeviceError(
        f"{n_bytes} bytes at a given address",
        reason="torch's allocator does not request its default sizes",
        remedy="use torch 2.13 or later, remove roundup_power2_divisions from "
        "PYTORCH_ALLOC_CONF, or leave keep_addresses out",
    )


def _pointer(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def segment_bytes(n_bytes: int) -> int:
    """Return the segment size that torch's allocator requests for ``n_bytes``."""
    # kSmallBuffer, kLargeBuffer and kRoundLarge of torch (c10/core/AllocatorConfig.h)
    if is_small(n_bytes):
        return 2 * _MIB
    # Below 10 MiB: more than requested, for later requests.
    return 20 * _MIB if n_bytes < 10 * _MIB else -(-n_bytes // (2 * _MIB)) * 2 * _MIB


def is_small(n_bytes: int) -> bool:
    """Whether the allocator has separate segments for requests of that size."""
    return n_bytes <= _MIB


def block_bytes(n_bytes: int) -> int:
    """Return the block size that the allocator cuts from a segment for a request."""
    return max(-(-n_bytes // 512), 1) * 512


def may_cut(device: torch.device) -> bool:
    """Whether the allocator cuts large requests from any larger segment that it has cached."""
    return device.type == "cuda" and "max_split_size_mb" not in _allocator_settings()


def cuts_segments(device: torch.device) -> bool:
    """Whether the allocator cuts exactly what a request needs from such a segment.

    Settings can forbid that, or make it useless, like expandable segments.
    """
    if not may_cut(device) or torch.cuda.get_allocator_backend() != "native":
        return False
    is_rounded = "roundup_power2_divisions" in _allocator_settings()
    return not is_rounded and not has_expandable_segments()


def has_expandable_segments() -> bool:
    """Whether torch's allocator uses expandable segments."""
    return "expandable_segments:true" in _allocator_settings().replace(" ", "").lower()


def _allocator_settings() -> str:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    found = [os.environ.get(name, "") for name in names]
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is not None:  # settings changed after import
        found.append(str(read()))
    return ",".join(found)


# --------------------------------------------------------------------------- autograd's hooks


def saved_tensor_hook() -> Callable[[Tensor], Any] | None:
    """Return the first active hook for saved tensors of this thread, such as that of activation
    checkpointing or ``save_on_cpu``. None also if torch cannot tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    pair = None if top is None else top(True)
    return None if pair is None else pair[0]


# --------------------------------------------------------------------------- traces


def span(name: str) -> AbstractContextManager[object]:
    """Mark what the host enqueues inside as ``fsdp_offload::name`` in torch's profiler.

    Costs 0.5 microseconds; ``torch.profiler.record_function`` costs 13.
    """
    return torch._C._profiler._RecordFunctionFast(f"fsdp_offload::{name}")
