"""Saved tensors: which to take, the memory to copy, and the handles that replace them.

A group takes a tensor if its dim 0 is the group's, so that its row ``i`` is row ``i`` of the
buffer. It copies whole rows of the memory that the tensor views: ``gate`` and ``up``, two chunks of
one tensor, have the same :class:`ByteRange`, which is copied once. Rows beyond the count are not
copied, so a group must never take a parameter, whose rows all count, nor a view or a cast of one.

Copies to the host take the span of a tensor, or of the tensor that it is a chunk of: query, key and
value, interleaved in one product, have the same :class:`ByteRange`.

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
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from ..core import dtensor
from ..core.errors import ActivationError

_log = logging.getLogger("fsdp_offload")

ALIGNMENT: Final = 16
"""Bytes that a kernel reads at once."""


class ByteRange(NamedTuple):
    """Bytes of one storage; of a group's tensor, all rows of its buffer."""

    start_bytes: int
    """A multiple of :data:`ALIGNMENT`, so that views of other memory have the same alignment."""
    end_bytes: int

    @property
    def n_bytes(self) -> int:
        """Length in bytes."""
        return self.end_bytes - self.start_bytes


class View(NamedTuple):
    """A tensor over a :class:`ByteRange`."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset_bytes: int
    """Offset in it."""

    @classmethod
    def of(cls, tensor: Tensor, whole: ByteRange) -> View:
        """Describe ``tensor`` as a view."""
        offset_bytes = int(tensor.storage_offset()) * tensor.itemsize - whole.start_bytes
        return cls(tensor.dtype, tensor.size(), tensor.stride(), offset_bytes)

    def over(self, words: Tensor) -> Tensor:
        """Make the same view of other memory (1-D)."""
        made = torch.empty(0, dtype=self.dtype, device=words.device)
        start_bytes = int(words.storage_offset()) * words.itemsize
        offset = (start_bytes + self.offset_bytes) // self.dtype.itemsize
        return made.set_(words.untyped_storage(), offset, self.size, self.stride)


def rows_or_reason(tensor: Tensor, capacity: int, device: torch.device) -> ByteRange | str:
    """Return all rows of the memory of a saved tensor, or the reason to keep it.

    ``capacity`` is dim 0 of the group's buffer.
    """
    if (reason := _reason(tensor, device)) is not None:
        return reason
    if tensor.dim() == 0 or tensor.shape[0] != capacity or not tensor.numel():
        return "other rows"
    rows = _rows_of(tensor, capacity)
    if rows is None:
        return "rows apart"
    address = tensor.untyped_storage().data_ptr() + rows.start_bytes
    if rows.n_bytes // capacity % ALIGNMENT or address % ALIGNMENT:
        return f"rows of no multiple of {ALIGNMENT} bytes"
    return rows


def span_or_reason(tensor: Tensor, device: torch.device, least_bytes: int) -> ByteRange | str:
    """As :func:`rows_or_reason`, for a tensor whose elements all count; a span of less than
    ``least_bytes`` is not worth a copy."""
    if (reason := _reason(tensor, device)) is not None:
        return reason
    start, end = _span_of(tensor) if tensor.numel() else (0, 0)
    if end - start < least_bytes:
        return "small"
    end = min(-(-end // ALIGNMENT) * ALIGNMENT, tensor.untyped_storage().nbytes())
    return ByteRange(start // ALIGNMENT * ALIGNMENT, end)


def _span_of(tensor: Tensor) -> ByteRange:
    """Return the span of a tensor without gaps. With gaps, return the span of the tensor that it
    views, or of its storage, unless that is much larger."""
    start, end = own = _extent(tensor)
    if end - start > tensor.numel() * tensor.itemsize:
        base = tensor._base
        wholes = [] if base is None else [_extent(base)]
        for whole in (*wholes, ByteRange(0, tensor.untyped_storage().nbytes())):
            if whole[0] <= start and end <= whole[1] <= whole[0] + 2 * (end - start):
                return whole
    return own


def _extent(tensor: Tensor) -> ByteRange:
    start = int(tensor.storage_offset())
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return ByteRange(start * tensor.itemsize, (start + last + 1) * tensor.itemsize)


def _reason(tensor: Tensor, device: torch.device) -> str | None:
    """Return the reason to keep a saved tensor regardless of its size."""
    if _is_of_parameter(tensor):
        return "a parameter"
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_neg():
        return "a subclass"
    if tensor.device != device:
        return "another device"
    return None if tensor.is_floating_point() else "not floating"


def _rows_of(tensor: Tensor, capacity: int) -> ByteRange | None:
    """Return rows of the tensor itself, of the tensor that it views, or of its storage."""
    if tensor.is_contiguous():
        return _extent(tensor)
    start, end = _extent(tensor.detach()[0])
    row_bytes, base = tensor.stride(0) * tensor.itemsize, tensor._base
    wholes = [] if base is None or not base.is_contiguous() else [_extent(base)]
    for whole in (*wholes, ByteRange(0, tensor.untyped_storage().nbytes())):
        first = whole.start_bytes
        if whole.n_bytes == capacity * row_bytes and first <= start and end <= first + row_bytes:
            return whole
    return None


def _is_of_parameter(tensor: Tensor) -> bool:
    """Whether it is a parameter, a view of one, or computed from one and constants, with as many
    elements: a cast or a DTensor's local tensor, which autocast and expert parallelism save, or a
    parameter times a number. All their rows count."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter):
        return True
    node = base.grad_fn
    while node is not None:  # back through operations on one tensor
        inputs = [each for each, _ in node.next_functions if each is not None]
        if len(inputs) != 1:
            break
        node = inputs[0]
    parameter = getattr(node, "variable", None)  # set on nodes that accumulate a gradient
    if not isinstance(parameter, nn.Parameter):
        return False
    return dtensor.with_history(parameter).numel() == base.numel()


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
