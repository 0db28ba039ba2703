"""Which storages are away, and where their bytes are meanwhile.

Whoever reads or writes a tensor that may be away asks here: :func:`present` gives the tensor
itself, or one like it over the host memory that holds its bytes. What is written there arrives on
the device when the storage comes back. The table knows storages, not who moved them, so code that
only reads parameters does not have to know that either.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from .. import shards

Place = Tensor | Callable[[], Tensor]


class Absence:
    """One storage that is away, for as long as this object lives or until :meth:`end`.

    Args:
        storage: whose memory is, or is about to be, given up. Kept alive.
        place: 1-D uint8 host tensor, a storage of its own, as long as the storage was; or what
            makes one when the bytes are first asked for.
        settle: called before each use of ``place``: it returns when the bytes are there.
    """

    def __init__(
        self, storage: torch.UntypedStorage, place: Place, settle: Callable[[], None] | None = None
    ) -> None:
        # The table does not keep this object alive, and this object keeps the storage alive: so
        # an address in the table is never that of another storage.
        self._storage, self._place, self._settle = storage, place, settle
        _absent[storage._cdata] = self

    def end(self) -> None:
        """The storage is back, or about to be. Idempotent."""
        if _absent.get(self._storage._cdata) is self:
            del _absent[self._storage._cdata]

    def end_if_present(self) -> bool:
        """End if the storage still has its memory; whether this goes on."""
        if self._storage.nbytes():
            self.end()
        return not self._storage.nbytes()

    def provide(self, place: Tensor) -> None:
        """The place, ahead of who makes it: that one may look up the storage itself."""
        self._place = place

    def bytes(self) -> torch.UntypedStorage:
        """The host memory, when it holds the bytes."""
        if self._settle is not None:
            self._settle()
        if not isinstance(self._place, Tensor):
            self._place = self._place()
        return self._place.untyped_storage()


_absent: weakref.WeakValueDictionary[int, Absence] = weakref.WeakValueDictionary()


def register(
    storage: torch.UntypedStorage, place: Place, settle: Callable[[], None] | None = None
) -> Absence:
    """Enter a storage; the caller keeps what is returned. See :class:`Absence`."""
    return Absence(storage, place, settle)


def is_absent(tensor: Tensor) -> bool:
    """Whether the storage of a tensor, or of a DTensor's shard, is away."""
    return bool(_absent) and shards.local(tensor).untyped_storage()._cdata in _absent


def host_view(tensor: Tensor) -> Tensor | None:
    """``tensor`` over the host memory of its storage, or ``None`` if that is not away.

    The same shape, strides, dtype and offset; for a DTensor a DTensor of the same placements. It
    carries no gradient. The device is not touched.
    """
    if not _absent:
        return None
    shard = shards.local(tensor)
    absence = _absent.get(shard.untyped_storage()._cdata)
    if absence is None:
        return None
    empty = torch.empty(0, dtype=shard.dtype, device="cpu")
    view: Tensor = empty.set_(absence.bytes(), shard.storage_offset(), shard.shape, shard.stride())
    return shards.like(tensor, view)


def present(tensor: Tensor) -> Tensor:
    """The tensor to read or write now: ``tensor`` itself, or its :func:`host_view`."""
    view = host_view(tensor)
    return tensor if view is None else view
