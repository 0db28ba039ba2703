"""One group: hooks for tensors that autograd saves while it is open.

The first handle that backward needs restores the whole group, on the current stream. A range's
memory is freed with its last handle, or with the caller's graph (``retain_graph``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..core import storage as storages
from ..core.errors import ActivationError, ConfigError
from ..core.offloadable import remove_all
from .offload import ActivationOffload
from .saved import ByteRange, MemoryRange, SavedTensor, View, note_inactive, rows_or_reason, unpack
from .store import Held, RowStore


class SavedRows:
    """The copied rows of one group, until they are restored."""

    def __init__(self, store: RowStore, capacity: int) -> None:
        self._store, self._capacity = store, capacity
        self._ranges: list[weakref.ref[MemoryRange]] = []
        self._row_bytes: list[int] = []
        self.held: Held | None = None

    def add(self, rows: ByteRange) -> MemoryRange:
        made = MemoryRange(self.restore)
        self._ranges.append(weakref.ref(made))
        self._row_bytes.append(rows.n_bytes // self._capacity)
        return made

    def hold(self, count: Tensor, words: list[Tensor]) -> None:
        self.held = self._store.hold(count, self._capacity, self._row_bytes, words)

    def restore(self) -> None:
        """Give each range its memory."""
        assert self.held is not None
        words = self._store.restore(self.held, self._capacity, self._row_bytes)
        self.held = None
        for find, memory in zip(self._ranges, words, strict=True):
            if (found := find()) is not None:  # else no handle needs it
                found.words = memory

    def __del__(self) -> None:
        if self.held is not None:
            self._store.dropped.append(self.held)


class StashGroup:
    """The saved tensors of one call of an expert layer: see :meth:`.PagedStash.group`."""

    def __init__(self, store: RowStore) -> None:
        self._store = store
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._handles: list[weakref.ref[SavedTensor]] = []
        self._asked_to_keep: list[Tensor] = []
        self._outer: ActivationOffload | None = None  # around this group; gets what it keeps
        self._capacity = 0
        self._count: Tensor | None = None

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def rows(self, x: Tensor, count: Tensor) -> None:
        """Set how many rows are in use. Call it once per group, anywhere inside.

        Args:
            x: a buffer on the stash's device; ``x.shape[0]`` is the capacity.
            count: integer tensor with one element on the same device: that many leading rows of
                ``x``, and of all tensors computed from it row by row, are in use. Nothing may write
                it before the group closes.

        Raises:
            ConfigError: an argument is something else.
            ActivationError: called twice in one group.
        """
        if self._count is not None:
            raise ActivationError(
                "rows() called twice in one group",
                reason="a group has one capacity",
                remedy="open one group per buffer",
            )
        _check_buffer(x, self._store.device)
        _check_count(count, self._store.device)
        self._capacity, self._count = x.shape[0], count

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def keep(self, *tensors: Tensor) -> None:
        """Keep these tensors, and all other views of their memory, whole; for example a floating
        tensor whose rows beyond the count are read."""
        self._asked_to_keep += tensors

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __enter__(self) -> StashGroup:
        if not torch.is_grad_enabled():
            return self
        # torch calls the innermost hooks alone, so an ActivationOffload outside gets the tensors
        # that this group keeps from the group.
        hook = storages.saved_tensor_hook()
        outer = getattr(hook, "__self__", None)
        self._outer = outer if isinstance(outer, ActivationOffload) else None
        if hook is not None and self._outer is None and not self._store.is_open:
            note_inactive(self._store.counts, "inactive_groups", "a group of a PagedStash")
            return self
        self._store.open()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)
        self._hooks.__enter__()
        return self

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __exit__(self, kind: object, *_: object) -> None:
        self.leave(takes=kind is None)

    def leave(self, *, takes: bool) -> None:
        """Close the group; ``takes``: copy saved tensors away, else keep them."""
        if self._hooks is None:
            return
        self._hooks.__exit__(None, None, None)
        self._hooks = None  # it holds a method of this group
        self._store.is_open = False
        handles = [handle for find in self._handles if (handle := find()) is not None]
        self._handles.clear()
        try:
            if takes and handles:
                self._close(handles)
        finally:
            for handle in handles:
                if self._outer is not None and takes and handle.memory is None:
                    self._outer.save(handle)
                handle.keep()
            self._outer = None
            self._asked_to_keep.clear()
            self._count = None

    def _pack(self, tensor: Tensor) -> SavedTensor:
        handle = SavedTensor(tensor)
        self._handles.append(weakref.ref(handle))
        return handle

    def _close(self, handles: list[SavedTensor]) -> None:
        if self._count is None:
            raise ActivationError(
                "a group without rows()",
                reason="the stash does not know how many rows are in use",
                remedy="call group.rows(buffer, count) inside, or pass both to group()",
            )
        for handle in handles:
            handle.check_version()
        store = self._store
        saved = SavedRows(store, self._capacity)
        ranges: dict[tuple[int, ByteRange], MemoryRange] = {}
        words: list[Tensor] = []
        taken: list[tuple[SavedTensor, MemoryRange, View]] = []
        asked = {storages.identity(t.untyped_storage()) for t in self._asked_to_keep}
        for handle in handles:
            tensor = handle.tensor
            assert tensor is not None
            rows = rows_or_reason(tensor, self._capacity, store.device)
            if isinstance(rows, ByteRange) and storages.identity(tensor.untyped_storage()) in asked:
                rows = "asked for"
            if isinstance(rows, str):
                store.kept_bytes[rows] += tensor.numel() * tensor.itemsize
                continue
            key = (storages.identity(tensor.untyped_storage()), rows)
            if key not in ranges:
                ranges[key] = saved.add(rows)
                words.append(_words(tensor, rows))
            taken.append((handle, ranges[key], View.of(tensor, rows)))
        store.counts["groups"] += 1
        if words:
            saved.hold(self._count, words)
        for handle, memory, view in taken:
            handle.take(memory, view)


def _words(tensor: Tensor, rows: ByteRange) -> Tensor:
    made = torch.empty(0, dtype=torch.int64, device=tensor.device)
    storage, numel = tensor.untyped_storage(), rows.n_bytes // 8
    return made.set_(storage, rows.start_bytes // 8, (numel,), (1,))


def _check_buffer(x: object, device: torch.device) -> None:
    if not isinstance(x, Tensor) or x.dim() == 0 or x.device != device:
        what = f"{tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
        raise ConfigError(
            f"rows of {what}",
            reason="x must be a tensor with rows on the stash's device",
            remedy=f"pass the buffer whose dim 0 is the capacity, on {device}",
        )


def _check_count(count: object, device: torch.device) -> None:
    if isinstance(count, Tensor):
        what = f"a count of shape {tuple(count.shape)}, {count.dtype}, on {count.device}"
        is_integer = not (count.is_floating_point() or count.is_complex()) and (
            count.dtype is not torch.bool
        )
        if is_integer and count.numel() == 1 and count.device == device:
            return
    else:
        what = f"a count of type {type(count).__name__}"
    raise ConfigError(
        what,
        reason="a count is an integer tensor with one element on the stash's device",
        remedy="pass the dispatcher's count on the device, such as counts.sum()",
    )


class Attachment:
    """Makes groups by hooks on modules, for models whose source cannot change: the hooks of
    :meth:`.PagedStash.attach`."""

    def __init__(
        self,
        make_group: Callable[[], StashGroup],
        scope: nn.Module,
        rows: Callable[..., Tensor],
        at: nn.Module,
    ) -> None:
        self._make_group, self._rows = make_group, rows
        self._group: StashGroup | None = None
        self._handles: list[RemovableHandle] = [
            scope.register_forward_pre_hook(self._enter, prepend=True),
            at.register_forward_pre_hook(self._say_rows),
            scope.register_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        remove_all(self._handles)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._group = self._make_group().__enter__()

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _say_rows(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._group is not None:
            self._group.rows(inputs[0], self._rows(*inputs))

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        group, self._group = self._group, None
        if group is not None:  # without output, forward raised, or no backward can follow
            group.leave(takes=output is not None)
