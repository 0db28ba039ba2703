"""The only file that touches private API of torch's storages, CUDA allocator, profiler and hooks of
saved tensors.

[Note: other memory for a storage]
A storage object is what all views, aliases and DTensors of some memory share. To move them all to
addresses of our choice, the object is given other memory: torch 2.13 and later exchange the memory
of two storages.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .errors import AwayError

# --------------------------------------------------------------------------- identity and presence


def identity(storage: torch.UntypedStorage) -> int:
    """The same for every Python object of one storage, as long as one of them lives."""
    return int(storage._cdata)


def owners(storage: torch.UntypedStorage) -> int:
    """How many tensors, in Python or C++, hold a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def refuse_addresses(tensor: Tensor) -> None:
    """Let C++ that asks for the address of a tensor without memory raise, not read address 0."""
    torch._C._set_throw_on_mutable_data_ptr(tensor)


def is_empty(tensor: Tensor, storage: torch.UntypedStorage | None = None) -> bool:
    """Whether a plain tensor's memory was given up by a resize: never, if it is sparse. Cheap.

    ``storage``: its own, if it is at hand.
    """
    try:  # asking for the layout first would take half as long again, at each call
        storage = tensor.untyped_storage() if storage is None else storage
    except NotImplementedError:  # sparse: its values are other tensors, which stay
        return False
    return storage.nbytes() == 0 and tensor.numel() > 0 and tensor.layout is torch.strided


def present(tensor: Tensor, what: str = "use") -> Tensor:
    """``tensor``, plain and strided, whose memory is about to be read or written.

    Raises:
        AwayError: it was given up.
    """
    storage = tensor.untyped_storage()
    if is_empty(tensor, storage) or not getattr(owner_of(storage), "is_present", True):
        raise AwayError(
            f"{what} of a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}",
            reason="its device memory is offloaded",
            remedy="call reload() first",
        )
    return tensor


@torch.inference_mode(False)  # it may outlive the mode, and is written to then
def view_over(memory: Tensor, like: Tensor) -> Tensor:
    """A tensor like ``like`` over a copy of its storage.

    Args:
        memory: the copy, 1-D uint8; all bytes of the storage.
        like: plain; its dtype, shape, strides and offset are taken.
    """
    start = memory.storage_offset()
    # Exactly these bytes, so that torch.save takes nothing else with them.
    storage = memory.untyped_storage()[start : start + memory.numel()]
    made = torch.empty(0, dtype=like.dtype, device=memory.device)
    return made.set_(storage, like.storage_offset(), like.size(), like.stride())


# --------------------------------------------------------------------------- whose memory it is


def tie(storage: torch.UntypedStorage, owner: object) -> None:
    """Say that ``owner`` gives the storage its memory: it lives as long as the storage."""
    storage._fsdp_offload_memory = owner  # type: ignore[attr-defined]


def untie(storage: torch.UntypedStorage) -> None:
    """Undo :func:`tie`. Idempotent."""
    vars(storage).pop("_fsdp_offload_memory", None)


def owner_of(storage: torch.UntypedStorage) -> Any:
    """What it was tied to, or None."""
    return getattr(storage, "_fsdp_offload_memory", None)


# --------------------------------------------------------------------------- other memory


def can_swap() -> bool:
    """Whether two storages can exchange their memory."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def swap_memory(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange the memory of two storages of equal size, and whether it is resizable."""
    storage._swap_data_ptr_(other)  # type: ignore[attr-defined]


def renew(storage: torch.UntypedStorage) -> None:
    """Give the storage ordinary memory of torch's, with its content, on the current stream.

    Raises:
        torch.OutOfMemoryError: there is none; it is as before.
    """
    n_bytes = storage.nbytes()
    if n_bytes == 0:
        return
    fresh = torch.UntypedStorage(n_bytes, device=storage.device)  # swapped flags, too
    fresh.copy_(storage)
    swap_memory(storage, fresh)


def is_small(n_bytes: int) -> bool:
    """Whether the allocator has segments of their own for requests of that size."""
    return n_bytes <= 1 << 20


def block_bytes(n_bytes: int) -> int:
    """What the allocator cuts from a segment for a request."""
    return max(-(-n_bytes // 512), 1) * 512


def may_cut(device: torch.device) -> bool:
    """Whether the allocator cuts large requests from any larger segment that it has cached."""
    return device.type == "cuda" and "max_split_size_mb" not in _allocator_settings()


def _allocator_settings() -> str:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    found = [os.environ.get(name, "") for name in names]
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is not None:  # what was set later
        found.append(str(read()))
    return ",".join(found)


# --------------------------------------------------------------------------- autograd's hooks


def saved_tensor_hook() -> Callable[[Tensor], Any] | None:
    """The first hook that saved tensors of this thread go through now: activation checkpointing has
    some, ``save_on_cpu`` has. None, too, where torch cannot be asked."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    pair = None if top is None else top(True)
    return None if pair is None else pair[0]


# --------------------------------------------------------------------------- the profiler


def is_profiling() -> bool:
    """Whether a profiler of torch records in this thread: a second one would end the first."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]
