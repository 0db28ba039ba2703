"""Check the models and parameters that callers pass, before anything is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from . import dtensor
from .backend import Backend
from .devices import backend_for
from .errors import ConfigError, DeviceError, UnsupportedParameterError
from .fsdp import find_groups, fsdp_parameters, gathered_parameters
from .fsdp_names import check_torch
from .progress import warn


def listed(model: object) -> list[nn.Module]:
    """Return one or several modules as a list.

    Raises:
        ConfigError: ``model`` is something else.
    """
    models: list[Any] = [model]
    if isinstance(model, Iterable) and not isinstance(model, nn.Module):
        models = list(model)
    for each in models:
        if not isinstance(each, nn.Module):
            raise ConfigError(
                f"model of type {type(each).__name__}",
                reason="not a torch.nn.Module",
                remedy="pass the module whose parameters the optimizer holds, or several",
            )
    return models


def check_optimizer(optimizer: object, *, several: str) -> None:
    """Refuse anything but an optimizer or None; ``several``: the remedy if it is several.

    Raises:
        ConfigError: ``optimizer`` is something else.
    """
    if optimizer is None or isinstance(optimizer, Optimizer):
        return
    reason, remedy = "not a torch.optim.Optimizer", "the order is path (if any), model, optimizer"
    each: Any = optimizer.values() if isinstance(optimizer, Mapping) else optimizer
    if isinstance(each, Iterable) and any(isinstance(one, Optimizer) for one in each):
        reason, remedy = "this call takes one optimizer", several
    raise ConfigError(f"optimizer of type {type(optimizer).__name__}", reason=reason, remedy=remedy)


def check_holds(optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
    """Refuse an optimizer without any parameter of the models, which would never see a gradient.

    Raises:
        ConfigError: the optimizer was built before ``fully_shard``, while FSDP2 had parameters
            gathered, or for another model.
    """
    named = dtensor.parameter_names(models)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    sharded = gathered_parameters(models)
    if gathered := [named[sharded[p]] for p in held if p in sharded]:
        raise ConfigError(
            f"an optimizer of {len(gathered)} gathered parameters, such as {gathered[0]}",
            reason="FSDP2 trains sharded parameters; the optimizer was built after "
            "unshard() or a forward without a backward",
            remedy="call reshard() of each FSDPModule in model.modules(), build the "
            "optimizer from model.parameters(), then pass it",
        )
    if not named or any(parameter in named for parameter in held):
        return  # one is enough: another optimizer may hold the others
    reason = "the optimizer was built from the parameters of another module"
    remedy = "pass the module that the optimizer was built from"
    shapes = {tuple(parameter.shape) for parameter in named}
    are_sharded = fsdp_parameters(models) or any(isinstance(p, DTensor) for p in named)
    same_shapes = {tuple(parameter.shape) for parameter in held} <= shapes  # a DTensor's is global
    if are_sharded and same_shapes and not any(isinstance(p, DTensor) for p in held):
        reason = "fully_shard replaced the parameters after the optimizer was built"
        remedy = (
            "call fsdp_offload.shard(model) or fully_shard, then build the optimizer, then pass it"
        )
    what = f"model= with {len(named)} parameters, none of them in the optimizer"
    raise ConfigError(what, reason=reason, remedy=remedy)


def modules_of(model: nn.Module | Sequence[nn.Module] | None) -> list[nn.Module]:
    """Return the modules that the caller passed as ``model=``.

    Raises:
        ConfigError: ``model`` is something else.
        UnsupportedTorchError: see :func:`check_torch`.
    """
    models = [] if model is None else listed(model)
    check_torch(models)
    return models


def leave_cpu(models: Iterable[nn.Module], moved_bytes: int = 0) -> None:
    """Take ``CPUOffloadPolicy`` off, with a warning: weights and gradients move to the device.

    ``moved_bytes``: bytes of weights that have moved already.
    """
    if moved_bytes := moved_bytes + sum(group.leave_cpu() for group in find_groups(models)):
        warn(
            "the model was sharded with CPUOffloadPolicy: its weights, %d bytes in all, are on the "
            "device from now on, or in this optimizer's host memory, as after fully_shard without "
            "offload_policy",
            moved_bytes,
        )


def cpu_homes(models: Iterable[nn.Module]) -> dict[Tensor, torch.device]:
    """Map parameters that ``CPUOffloadPolicy`` keeps on the CPU to their compute device."""
    return {p: home for group in find_groups(models) for p, home in group.homes.items()}


def backend_of(
    parameters: Iterable[Tensor], homes: Mapping[Tensor, torch.device] | None = None
) -> Backend:
    """Return the backend of the one device that all shards live on.

    Args:
        parameters: the optimizer's.
        homes: the devices that some of them will move to: see :func:`cpu_homes`.

    Raises:
        DeviceError: several devices, or one that torch cannot use here.
        UnsupportedParameterError: DTensors of a GPU mesh with shards on the CPU.
    """
    devices: dict[torch.device, Tensor] = {}
    for parameter in parameters:
        shard = dtensor.with_history(parameter)
        device, mesh_type = shard.device, dtensor.mesh_device_type(parameter)
        if homes is not None:
            device = homes.get(parameter, device)
        if device.type not in (mesh_type, "meta"):
            raise UnsupportedParameterError(
                f"a shard on {shard.device} of a {mesh_type} mesh",
                reason="CPUOffloadPolicy (or a move by hand) keeps it off its device",
                remedy="call fsdp_offload.shard(model) or fully_shard without offload_policy, or "
                "make the optimizer first, HybridDeviceOptimizer(optimizer, model), which moves it",
            )
        devices.setdefault(device, parameter)
    if len(devices) > 1:
        raise DeviceError(
            f"parameters on {', '.join(sorted(map(str, devices)))}",
            reason="one optimizer streams over one device's link",
            remedy="move them to one device, or wrap one optimizer per device",
        )
    return backend_for(next(iter(devices)))
