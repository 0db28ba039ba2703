"""Which weights and gradients leave the device."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core import dtensor
from ..core.backend import Backend
from ..core.config import OffloadConfig
from ..core.errors import ConfigError
from ..core.fsdp import GroupShard, find_groups
from ..core.progress import warn
from ..plan.residency import LEAST_SLOTS, bytes_for_weights, choose_travelling, gradients_fit
from ..update.params import ParamState
from ..update.schema import has_schema, works_on_matrices
from .host_gradients import HostGradients
from .weight_slots import slot_count
from .weights import Weights, padded_bytes

_log = logging.getLogger("fsdp_offload")


def _may_leave(
    shard: GroupShard,
    device: torch.device,
    homes: Mapping[Tensor, torch.device],
    trained: Collection[Tensor],
) -> bool:
    """Whether it is frozen, or trained by this optimizer, and an ordinary tensor that FSDP2 gathers
    from as it is, on ``device`` or with its home there."""
    local, padded = dtensor.with_history(shard.parameter), shard.padded
    is_plain = type(local) is type(padded) is Tensor and local.is_contiguous()
    is_meant = not shard.parameter.requires_grad or shard.parameter in trained
    is_here = local.device == device or homes.get(shard.parameter) == device
    return is_meant and is_plain and is_here and padded.numel() > 0


def _trained(inner: Optimizer, config: OffloadConfig, *, steps_itself: bool) -> set[Tensor]:
    """What the optimizer trains, where its updates can bring the weight along."""
    reason = ""
    if steps_itself or works_on_matrices(inner) or not has_schema(inner):
        reason = f"{type(inner).__name__} does not update element by element"
    elif config.update_on == "host" or config.offload_fraction < 1:
        reason = "only updates on the device bring them along, with state that is offloaded"
    trained = {p for group in inner.param_groups for p in group["params"] if p.requires_grad}
    if reason and trained:
        warn('offload="all": trained weights stay on the device: %s', reason)
    return set() if reason else trained


def keep_on_host(
    models: Sequence[nn.Module],
    inner: Optimizer,
    backend: Backend,
    config: OffloadConfig,
    *,
    steps_itself: bool,
) -> Weights | None:
    """What ``offload="all"`` asks for: weights of ``models`` leave the device.

    Args:
        models: of which FSDP2 gathers weights.
        inner: the wrapped optimizer, which has no state on the host yet.
        backend: of their device.
        config: of the optimizer.
        steps_itself: see :class:`.Updates`.

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
            remedy="call fsdp_offload.shard(model) or fully_shard and pass model=, or use "
            'offload="state"',
        )
    trained = _trained(inner, config, steps_itself=steps_itself)
    movable = [
        [s for s in g.shards if _may_leave(s, backend.device, g.homes, trained)] for g in groups
    ]
    sizes = [sum(map(padded_bytes, shards)) for shards in movable]
    allowed = bytes_for_weights(
        config.device_memory,
        backend.free_and_total()[1],
        gradient_bytes=sum(dtensor.with_history(p).nbytes for p in trained),
        ring_bytes=LEAST_SLOTS * config.bucket_bytes if trained else 0,
    )
    travelling = choose_travelling(sizes, allowed, slot_count(config.overlap))
    chosen = [shards if i in travelling else [] for i, shards in enumerate(movable)]
    if not any(chosen):
        _log.info('offload="all": no weights leave the device')
        return None
    weights = Weights(groups, backend, config, chosen)
    weights.staying_bytes = sum(sizes) - sum(sizes[i] for i in travelling)
    return weights


def send_gradients(
    models: Sequence[nn.Module],
    params: Sequence[ParamState],
    backend: Backend,
    config: OffloadConfig,
) -> HostGradients | None:
    """What ``offload="all"`` asks for: gradients leave of ``params`` whose state does. None: all
    stay.

    Raises:
        HostMemoryError, PinningError: see :class:`.HostGradients`.
    """
    groups, by_parameter = find_groups(models), {param.parameter: param for param in params}
    found = [[by_parameter.get(p) for p in group.parameters] for group in groups]
    known = [param for group in found for param in group if param is not None]
    leaves = [[param is not None and param.lane == "streamed" for param in of] for of in found]
    fits = gradients_fit(
        sum(param.spec.state_bytes for param in known),
        sum(param.info.local_numel * param.info.dtype.itemsize for param in known),
        None if config.device_memory == "auto" else config.first_device_bytes,
        backend.free_and_total()[1],
    )
    if fits or not any(map(any, leaves)):
        return None
    return HostGradients(groups, backend, config, leaves)
