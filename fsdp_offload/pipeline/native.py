"""Parameters that keep the class's own state: tensor-subclass shards, state of unknown shape, and
classes whose parameters depend on each other.

They are always resident. The shadow steps the parameters themselves, whole, and the state stays
as the class made it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .records import Snapshot
from .schema import is_torch_class, make_shadow, raw_step
from .shadow import apply_own, collect_changes


class NativeUpdate:
    """One shadow over whole parameters.

    Args:
        optimizer: the wrapped optimizer.
        members: (parameter, index of its param_group), in order.
    """

    def __init__(self, optimizer: Optimizer, members: list[tuple[Tensor, int]]) -> None:
        self.parameters = [parameter for parameter, _ in members]
        self._indices = sorted({group for _, group in members})
        groups: list[dict[str, Any]] = [
            {"params": [p for p, group in members if group == index]} for index in self._indices
        ]
        self._shadow = make_shadow(optimizer, groups)
        self._step = raw_step(type(optimizer))
        self._trusted = is_torch_class(optimizer)
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        self._shadow.state = self.state

    def run(self, snapshot: Snapshot) -> None:
        """Step every member that has a gradient."""
        groups = snapshot.groups
        if not self._trusted:
            groups = apply_own(self._shadow, groups, snapshot)
        for group, index in zip(self._shadow.param_groups, self._indices, strict=True):
            group.update(groups[index])
        if snapshot.clip is not None:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(snapshot.clip)
        with torch.no_grad():
            self._step(self._shadow)
        if not self._trusted:
            collect_changes(self._shadow, self._indices, snapshot.groups, snapshot, {})

    def state_bytes(self) -> int:
        """Bytes of state tensors on this rank."""
        tensors = [v for s in self.state.values() for v in s.values() if isinstance(v, Tensor)]
        return sum(t.numel() * t.itemsize for t in tensors)
