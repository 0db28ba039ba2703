"""What is updated as the class does it, on the device, with the state that the class makes:
parameters of torch's classes whose state :mod:`..update.schema` does not declare (tensor-subclass
shards, Adafactor). A shadow steps the parameters themselves, whole.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core import dtensor
from ..core.config import OffloadConfig
from ..update.params import Snapshot
from ..update.schema import make_shadow, raw_step

_log = logging.getLogger("fsdp_offload")

States = dict[Tensor, dict[str, Any]]


class NativeUpdate:
    """One shadow over whole parameters.

    Args:
        optimizer: the wrapped optimizer.
        placed: (parameter, index of its param_group), in order.
        state: what the optimizer shows as its state; the class reads and writes it itself, so
            what the caller puts there or deletes counts as it does without wrapping.
    """

    def __init__(
        self, optimizer: Optimizer, placed: list[tuple[Tensor, int]], state: States
    ) -> None:
        self.parameters = [parameter for parameter, _ in placed]
        self._indices = sorted({group for _, group in placed})
        groups: list[dict[str, Any]] = [
            {"params": [p for p, group in placed if group == index]} for index in self._indices
        ]
        self._shadow = make_shadow(optimizer, groups)
        self._step = raw_step(type(optimizer))
        self._shadow.__dict__["state"] = state

    def run(self, snapshot: Snapshot) -> None:
        """Step every parameter that has a gradient."""
        for group, index in zip(self._shadow.param_groups, self._indices, strict=True):
            group.update(snapshot.groups[index])
        with torch.no_grad():
            self._step(self._shadow)


def warn_that_state_stays(
    optimizer: Optimizer, config: OffloadConfig, device: torch.device
) -> None:
    """Say of a class that runs its own step that nothing is offloaded, unless nothing was to be."""
    if config.offload_fraction == 0:
        return
    local = [dtensor.local(p) for group in optimizer.param_groups for p in group["params"]]
    _log.warning(
        "%s is not a class of torch.optim: it runs its own step, and its state stays on %s "
        "(%d parameters of %d bytes on this rank, and as much again for each state tensor of "
        "their shape and dtype). If each element's update depends on that element alone, "
        "HybridDeviceOptimizer(..., elementwise=True) offloads the state",
        type(optimizer).__name__,
        device,
        len(local),
        sum(p.numel() * p.itemsize for p in local),
    )
