"""What happens to the wrapped optimizer: checked, taken over, made inert."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import shards
from .device import Gateway, gateway_for
from .errors import ClosedError, ConfigError, DeviceError, UnsupportedParameterError
from .fsdp import check_torch, offloads_parameters
from .pipeline.schema import check_supported

_FORWARDED: Final = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")
_HOOKS: Final = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def check_wrappable(optimizer: object) -> None:
    """Refuse what cannot be wrapped.

    Raises:
        ConfigError: not an optimizer, wrapped before, or without trainable parameters.
        UnsupportedOptimizerError: see :func:`check_supported`.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer of type {type(optimizer).__name__}",
            reason="not a torch.optim.Optimizer",
            remedy="build one first: HybridDeviceOptimizer(torch.optim.AdamW(...), model=model)",
        )
    if getattr(optimizer, "is_offloaded", False) or getattr(
        optimizer.__dict__.get("step"), "forwards_to_wrapper", False
    ):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__}",
            reason="it is wrapped already",
            remedy="keep the first wrapper; close() it and build a new optimizer to start over",
        )
    check_supported(optimizer)
    if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            "an optimizer with no trainable parameter",
            reason="there is no state to offload",
            remedy="build it after fully_shard, from parameters with requires_grad=True",
        )


def modules_of(model: nn.Module | Sequence[nn.Module] | None) -> list[nn.Module]:
    """The modules given as ``model=``.

    Raises:
        ConfigError: something else was given.
        UnsupportedParameterError: one was sharded with ``CPUOffloadPolicy``.
        UnsupportedTorchError: see :func:`check_torch`.
    """
    models: list[Any] = [] if model is None else [model]
    if isinstance(model, Iterable) and not isinstance(model, nn.Module):
        models = list(model)
    for each in models:
        if not isinstance(each, nn.Module):
            raise ConfigError(
                f"model of type {type(each).__name__}",
                reason="not a torch.nn.Module",
                remedy="pass the module whose parameters the optimizer holds, or several",
            )
    check_torch(models)
    if offloads_parameters(models):
        raise UnsupportedParameterError(
            "a model sharded with CPUOffloadPolicy",
            reason="it keeps parameters and gradients on the CPU, so no state is on the device",
            remedy="call fully_shard without offload_policy",
        )
    return models


def check_holds(optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
    """Refuse an optimizer that holds nothing of the models: it would never see a gradient.

    Raises:
        ConfigError: it was built before ``fully_shard``, or for another model.
    """
    named = shards.parameter_names(models)
    held = (p for group in optimizer.param_groups for p in group["params"])
    if named and not any(parameter in named for parameter in held):
        raise ConfigError(
            f"model= with {len(named)} parameters, none of them in the optimizer",
            reason="fully_shard replaces parameters, and the optimizer has other ones",
            remedy="call fully_shard, then build the optimizer, then wrap it",
        )


def gateway_of(parameters: Iterable[Tensor]) -> Gateway:
    """The gateway of the one device that all shards live on.

    Raises:
        DeviceError: several devices, or one that torch cannot use here.
        UnsupportedParameterError: DTensors of a GPU mesh with shards on the CPU.
    """
    devices: dict[torch.device, Tensor] = {}
    for parameter in parameters:
        shard = shards.local(parameter)
        mesh_type = shards.mesh_device_type(parameter)
        if mesh_type != shard.device.type:
            raise UnsupportedParameterError(
                f"a shard on {shard.device} of a {mesh_type} mesh",
                reason="CPUOffloadPolicy (or a move by hand) keeps it off its device",
                remedy="call fully_shard without offload_policy",
            )
        devices.setdefault(shard.device, parameter)
    if len(devices) > 1:
        raise DeviceError(
            f"parameters on {', '.join(sorted(map(str, devices)))}",
            reason="one optimizer streams over one device's link",
            remedy="move them to one device, or wrap one optimizer per device",
        )
    return gateway_for(next(iter(devices)))


def share_hooks(inner: Optimizer, wrapper: Optimizer) -> None:
    """Hooks registered on either run once, with the wrapper as their argument."""
    for name in _HOOKS:
        if name in inner.__dict__:
            wrapper.__dict__[name] = inner.__dict__[name]


def make_inert(inner: Optimizer, wrapper: Optimizer) -> None:
    """Forward the inner optimizer's methods and share its groups with the wrapper."""
    reference = weakref.ref(wrapper)
    for name in _FORWARDED:
        inner.__dict__[name] = _forwarder(name, reference)
    inner.param_groups = wrapper.param_groups
    # Else a GradScaler would leave unscaling to a fused step that no longer runs on the inner one.
    inner.__dict__["_step_supports_amp_scaling"] = False


def _forwarder(name: str, reference: weakref.ref[Optimizer]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        wrapper = reference()
        if wrapper is None:
            raise ClosedError(
                f"{name}() of a wrapped optimizer",
                reason="its HybridDeviceOptimizer no longer exists",
                remedy="keep a reference to the wrapper for as long as you train",
            )
        return getattr(wrapper, name)(*args, **kwargs)

    forward.__name__ = name
    forward.forwards_to_wrapper = True  # type: ignore[attr-defined]
    # A scheduler built on the inner optimizer looks for this mark on its step.
    forward._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return forward
