"""Optimizers whose parameters are in chosen lanes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

from torch.optim import Optimizer

from fsdp_offload import HybridDeviceOptimizer
from fsdp_offload.optimizer.inventory import Inventory


def in_lanes(
    optimizer: Optimizer,
    model: Any = None,
    *,
    update_on: str | Sequence[str] = "device",
    **options: Any,
) -> HybridDeviceOptimizer:
    """A wrapper. A sequence of lanes is given to its trainable parameters in turn, in the order of
    the groups, in the place of what ``offload_fraction`` would choose; those that come later are
    streamed."""
    if isinstance(update_on, str):
        return HybridDeviceOptimizer(optimizer, model, update_on=update_on, **options)
    plan = Inventory.plan

    def chosen(inventory: Inventory, added: Any, *, lanes: Any = None) -> Any:
        each = dict(zip((p for p, _ in added), itertools.cycle(update_on), strict=False))
        return plan(inventory, added, lanes=each if lanes is None else lanes)

    with mock.patch.object(Inventory, "plan", chosen):
        return HybridDeviceOptimizer(optimizer, model, **options)
