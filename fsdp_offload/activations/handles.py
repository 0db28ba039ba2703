"""Handles that autograd's graph holds instead of saved tensors, wherever their memory is.

A node of autograd's graph holds the handles of its saved tensors, and both hooks as long as those.
So neither a hook nor a handle may refer back to the node: a kept tensor is detached; a handle
refers to its memory range, and that to its batch or group, which refers to ranges only weakly.
Reference counts then free all of them. A finalizer makes no device calls, because it may run in any
thread, even during a capture: it appends to a list for later.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from ..core.errors import ActivationError
from .selection import View

_log = logging.getLogger("fsdp_offload")


class MemoryRange:
    """Memory that several saved tensors may share."""

    __slots__ = ("__weakref__", "restore", "words")

    def __init__(self, restore: Callable[[], None]) -> None:
        self.restore = restore  # gives all ranges that were saved together their memory
        self.words: Tensor | None = None  # restored

    def restored(self) -> Tensor:
        """Return its memory, 1-D, of any dtype."""
        if self.words is None:
            self.restore()
        assert self.words is not None
        return self.words


class SavedTensor:
    """The handle that autograd's graph holds instead of a saved tensor."""

    __slots__ = ("__weakref__", "memory", "tensor", "version", "view")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor  # until its place is decided, or if it is kept
        self.version = tensor._version
        self.memory: MemoryRange | None = None
        self.view: View | None = None

    def keep(self) -> None:
        """Keep the tensor, without the history that would refer back to this handle."""
        if self.tensor is not None and self.tensor.grad_fn is not None:
            self.tensor = self.tensor.detach()

    def take(self, memory: MemoryRange, view: View) -> None:
        """Replace the tensor by a view of a range that is copied away."""
        self.tensor, self.memory, self.view = None, memory, view

    def check_version(self) -> None:
        """Refuse a tensor that an in-place operation has written to after it was saved."""
        tensor = self.tensor
        if tensor is not None and tensor._version != self.version:
            raise written_error(tensor.shape, tensor.dtype)


def unpack(handle: SavedTensor) -> Tensor:
    """Return the saved tensor: the unpack hook of all handles."""
    if handle.memory is not None and handle.view is not None:
        return handle.view.over(handle.memory.restored())
    handle.check_version()  # torch leaves this check to hooks
    assert handle.tensor is not None
    return handle.tensor


def written_error(shape: torch.Size, dtype: torch.dtype) -> ActivationError:
    """Build the error for a saved tensor that changed while it was needed."""
    return ActivationError(
        f"a saved tensor of shape {tuple(shape)}, {dtype}",
        reason="an in-place operation changed it after it was saved for backward",
        remedy="use the out-of-place operation",
    )


def note_inactive(counts: Counter[str], key: str, what: str) -> None:
    """Count a context that does nothing; log the first one."""
    counts[key] += 1
    if counts[key] == 1:
        _log.info(
            "%s does nothing inside activation checkpointing or other hooks for saved tensors", what
        )
