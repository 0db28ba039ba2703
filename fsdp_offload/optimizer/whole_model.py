"""Which weights and gradients leave the device."""

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
from ..plan.residency import choose_travelling, gradients_fit
from ..update.params import ParamState
from .host_gradients import HostGradients
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


def send_gradients(
    models: Sequence[nn.Module],
    params: Sequence[ParamState],
    backend: Backend,
    config: OffloadConfig,
) -> HostGradients | None:
    """What ``offload="all"`` asks for: gradients leave of ``params`` whose state does. None: all
    stay; with ``overlap="backward"`` they are used as soon as they are there.

    Raises:
        HostMemoryError, PinningError: see :class:`.HostGradients`.
    """
    groups, by_parameter = find_groups(models), {param.parameter: param for param in params}
    found = [[by_parameter.get(p) for p in group.parameters] for group in groups]
    known = [param for group in found for param in group if param is not None]
    leaves = [[param is not None and param.lane == "streamed" for param in of] for of in found]
    shard_bytes = sum(param.info.local_numel * param.info.dtype.itemsize for param in known)
    state_bytes = sum(param.spec.state_bytes for param in known)
    allowed = None if config.device_memory == "auto" else config.first_device_bytes
    stay = gradients_fit(state_bytes, shard_bytes, allowed, backend.free_and_total()[1])
    if config.overlap == "backward" or stay or not any(map(any, leaves)):
        return None
    gradients = HostGradients(groups, backend, config, leaves)
    if is_rank_0():
        _log.info("gradients leave the device: %d bytes of host memory", gradients.host_bytes)
    return gradients
