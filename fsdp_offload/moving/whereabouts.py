"""Where the bytes of a storage are: on the device, or in host memory while it is away.

[Note: one question]
Whoever reads or writes a weight outside of a step asks :func:`here` for it: the tensor itself, or
a tensor of the same dtype, shape and strides over its place in host memory. Whoever moves storages
says so with :func:`left` and :func:`returned`, so that nobody has to know who moved what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import AwayError


class _Trip(Protocol):
    def wait(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Entry:
    # Held while it is away: nobody else may get its identity. Not on its way back, where a
    # stranger with its identity would but wait for a trip that ends.
    storage: torch.UntypedStorage | None
    place: Tensor | None  # None: on its way back
    trip: _Trip | None


_entries: dict[int, _Entry] = {}  # by the storage's identity


def left(storage: torch.UntypedStorage, place: Tensor, trip: _Trip | None = None) -> None:
    """``storage`` is away: its bytes are in ``place`` once ``trip`` has ended.

    Args:
        storage: whose memory is given up, or about to be.
        place: uint8, 1-D; as many bytes as the storage has when it is present.
        trip: waited for, on the host, before the place is read.
    """
    _entries[storage._cdata] = _Entry(storage, place, trip)


def returned(storage: torch.UntypedStorage, trip: _Trip | None = None) -> None:
    """``storage`` has its memory again, and its bytes once ``trip`` has ended. Idempotent."""
    if trip is None:
        _entries.pop(storage._cdata, None)
    elif storage._cdata in _entries:
        _entries[storage._cdata] = _Entry(None, None, trip)


def is_away(tensor: Tensor, storage: torch.UntypedStorage | None = None) -> bool:
    """Whether the memory of a plain tensor is not on its device: never, if it is sparse. Cheap.

    ``storage``: its own.
    """
    try:  # asking for the layout first would take half as long again, at each call
        storage = tensor.untyped_storage() if storage is None else storage
    except NotImplementedError:  # sparse: its values are other tensors, which stay
        return False
    entry = _entries.get(storage._cdata) if _entries else None
    if entry is not None:
        return entry.place is not None
    return storage.nbytes() == 0 and tensor.numel() > 0 and tensor.layout is torch.strided


def here(tensor: Tensor) -> Tensor:
    """``tensor``, or its twin in host memory while it is away; what is under way is waited for.

    Args:
        tensor: plain; a DTensor's shard, not the DTensor. A sparse one is always here.

    Raises:
        AwayError: its memory is gone, and nobody said where the bytes are.
    """
    if tensor.layout is not torch.strided:
        return tensor
    storage = tensor.untyped_storage()
    entry = _entries.get(storage._cdata)
    if entry is None:
        if is_away(tensor):
            raise AwayError(
                f"a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}",
                reason="its device memory was given up, and its bytes are not in host memory",
                remedy="reload it first",
            )
        return tensor
    if entry.trip is not None:
        entry.trip.wait()
    if entry.place is None:
        _entries.pop(storage._cdata, None)
        return tensor
    return twin(tensor, entry.place)


def twin(tensor: Tensor, place: Tensor) -> Tensor:
    """A tensor like ``tensor`` over ``place``, the bytes of its storage (uint8, 1-D, host)."""
    start, size = place.storage_offset(), tensor.itemsize
    assert start % size == 0, (start, tensor.dtype)
    offset = start // size + int(tensor.storage_offset())
    return _over(place.untyped_storage(), offset, tensor)


def twin_at(tensor: Tensor, place: Tensor, start: int) -> Tensor:
    """As :func:`twin` for a contiguous tensor whose bytes begin at ``start`` of the place; its
    storage is exactly these bytes, so that ``torch.save`` takes nothing else with them."""
    first = place.storage_offset() + start
    n_bytes = tensor.numel() * tensor.itemsize
    return _over(place.untyped_storage()[first : first + n_bytes], 0, tensor)


@torch.inference_mode(False)  # it may outlive the mode, and is written to then
def _over(storage: torch.UntypedStorage, offset: int, like: Tensor) -> Tensor:
    made = torch.empty(0, dtype=like.dtype, device=storage.device)
    return made.set_(storage, offset, like.size(), like.stride())
