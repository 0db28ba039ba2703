"""Which weights leave the device."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..core import dtensor
from ..core.backend import Backend
from ..core.config import OffloadConfig
from ..core.errors import ConfigError
from ..core.fsdp import GroupShard, find_groups
from ..core.progress import is_rank_0
from ..plan.residency import choose_travelling
from .weights import SLOTS, Weights, padded_bytes

_log = logging.getLogger("fsdp_offload")


def _may_leave(shard: GroupShard, device: torch.device) -> bool:
    """Whether it is frozen, and an ordinary tensor that FSDP2 gathers from as it is."""
    local, padded = dtensor.with_history(shard.parameter), shard.padded
    is_plain = type(local) is type(padded) is Tensor and local.is_contiguous()
    is_frozen = not shard.parameter.requires_grad
    return is_frozen and is_plain and local.device == device and padded.numel() > 0


def keep_on_host(
    models: Sequence[nn.Module], backend: Backend, config: OffloadConfig, used_bytes: int
) -> Weights | None:
    """What ``offload="all"`` asks for: frozen weights of ``models`` leave the device.

    Args:
        models: of which FSDP2 gathers weights.
        backend: of their device.
        config: of the optimizer.
        used_bytes: of ``device_memory`` that the optimizer's state takes.

    Returns:
        None: everything stays.

    Raises:
        ConfigError: FSDP2 gathers nothing of the models.
        HostMemoryError, PinningError, DeviceMemoryError: see :class:`Weights`.
    """
    groups = find_groups(models)
    if not groups:
        raise ConfigError(
            'offload="all" without an FSDP2 module in model=',
            reason="weights are fetched when FSDP2 gathers them",
            remedy='call fully_shard and pass model=, or use offload="state"',
        )
    frozen = [[s for s in group.shards if _may_leave(s, backend.device)] for group in groups]
    sizes = [sum(map(padded_bytes, shards)) for shards in frozen]
    allowed = max(config.first_device_bytes - used_bytes, 0)
    if config.device_memory == "auto":  # all stay, or none
        total_bytes = backend.free_and_total()[1]
        allowed = sum(sizes) if 2 * sum(sizes) <= total_bytes else 0
    travelling = choose_travelling(sizes, allowed, SLOTS)
    chosen = [shards if i in travelling else [] for i, shards in enumerate(frozen)]
    if not any(chosen):
        _log.info('offload="all": no frozen weights leave the device')
        return None
    weights = Weights(groups, backend, config, chosen)
    if is_rank_0():
        count = sum(map(len, chosen))
        _log.info("%d frozen weights, %d bytes, are in host memory", count, weights.host_bytes)
    return weights
