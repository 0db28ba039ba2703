"""Groups by hooks on modules, for models whose source one cannot edit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .group import StashGroup


class Attachment:
    """Hooks of :meth:`.PagedStash.attach`."""

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
        """Take the hooks away. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        group = self._make_group()
        group.__enter__()
        self._group = group

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _say_rows(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._group is not None:
            self._group.rows(inputs[0], self._rows(*inputs))

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        group, self._group = self._group, None
        if group is not None:  # without output forward raised, or no backward can come from it
            group.leave(takes=output is not None)
