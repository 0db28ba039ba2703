"""Tensors and DTensors of storages that are away; :mod:`.whereabouts` for whoever moves many.

:func:`present` gives a tensor itself, or one like it over the host memory that holds its bytes.
What is written there arrives on the device when the storage comes back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import shards
from . import whereabouts


class Settle:
    """When the bytes of storages that are away are in their places.

    Args:
        wait: returns when they are. It must not keep absences alive.
    """

    __slots__ = ("wait",)

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


class Absence:
    """One storage that is away, for as long as this object lives or until :meth:`end`.

    Args:
        storage: whose memory is, or is about to be, given up.
        place: its bytes in host memory: uint8, 1-D.
        settle: waited for before each use of ``place``; one for many storages.
        is_present: whether the storage has its memory; None: whether its size is not 0.
    """

    __slots__ = ("__weakref__", "_is_over", "_is_present", "_storage", "_wait")

    def __init__(
        self,
        storage: torch.UntypedStorage,
        place: Tensor,
        settle: Settle | None = None,
        is_present: Callable[[], bool] | None = None,
    ) -> None:
        self._storage, self._wait = storage, settle
        self._is_present = is_present
        self._is_over = False
        whereabouts.left(storage, place, self._wait)

    def end(self) -> None:
        """The storage is, or is about to be, back. Idempotent."""
        if not self._is_over:
            self._is_over = True
            whereabouts.returned(self._storage)

    def __del__(self) -> None:  # a finalizer would cost ten times as much, for each storage
        self.end()

    def is_over(self) -> bool:
        """End if the storage still has its memory; whether it has."""
        if self._storage.nbytes() > 0 if self._is_present is None else self._is_present():
            self.end()
        return self._is_over


def is_absent(tensor: Tensor) -> bool:
    """Whether the memory of a tensor, or of a DTensor's shard, is away."""
    return whereabouts.is_away(shards.local(tensor))


def host_view(tensor: Tensor) -> Tensor | None:
    """``tensor`` over the host memory of its storage, or ``None`` if that is not away.

    The same shape, strides, dtype and offset; for a DTensor a DTensor of the same placements. It
    carries no gradient. The device is not touched.

    Raises:
        AwayError: its memory is gone, and nobody said where the bytes are.
    """
    shard = shards.local(tensor)
    if not whereabouts.is_away(shard):
        return None
    return shards.like(tensor, whereabouts.here(shard))


def present(tensor: Tensor) -> Tensor:
    """The tensor to read or write now: ``tensor`` itself, or its :func:`host_view`."""
    view = host_view(tensor)
    return tensor if view is None else view
