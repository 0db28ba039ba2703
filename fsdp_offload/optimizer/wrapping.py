"""Check the wrapped optimizer, and turn it into a second name of the wrapper."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..core import dtensor
from ..core.config import OffloadConfig
from ..core.errors import ConfigError, StateSchemaError
from ..core.progress import warn
from ..update.schema import check_supported, make_shadow, raw_step

_METHODS: Final = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")
_HOOKS: Final = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def check_wrappable(optimizer: object) -> None:
    """Refuse objects that cannot be wrapped.

    Raises:
        ConfigError: not an optimizer, already wrapped, or without trainable parameters.
        UnsupportedOptimizerError: see :func:`check_supported`.
    """
    if isinstance(optimizer, nn.Module):
        raise ConfigError(
            f"optimizer of type {type(optimizer).__name__}",
            reason="a module, where the optimizer is expected",
            remedy="pass the optimizer first: HybridDeviceOptimizer(optimizer, model)",
        )
    _refuse_facade(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer of type {type(optimizer).__name__}",
            reason="not a torch.optim.Optimizer",
            remedy="build one first: HybridDeviceOptimizer(torch.optim.AdamW(...), model)",
        )
    if getattr(optimizer, "is_offloaded", False):
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
            remedy="build it after fsdp_offload.shard(model) or fully_shard, from parameters with "
            "requires_grad=True",
        )


def _refuse_facade(optimizer: object) -> None:
    """Refuse an object that delegates to another optimizer: its class says nothing about the
    update.

    Raises:
        ConfigError: Accelerate's, Lightning's, or the caller's own class that delegates.
    """
    for name in ("optimizer", "_optimizer"):
        held = getattr(optimizer, name, None)
        if not isinstance(held, Optimizer) or held is optimizer:
            continue
        mine = getattr(optimizer, "param_groups", [])
        parameters = {id(p) for group in mine for p in group["params"]}
        if not any(id(p) in parameters for group in held.param_groups for p in group["params"]):
            continue
        reason = "it delegates to the optimizer that it holds, which keeps the state"
        remedy = f"wrap that one: optimizer.{name} = HybridDeviceOptimizer(optimizer.{name}, model)"
        if getattr(held, "is_offloaded", False):
            reason, remedy = "it is wrapped already", "use it as it is"
        what = f"{type(optimizer).__name__} around {type(held).__name__}"
        raise ConfigError(what, reason=reason, remedy=remedy)


def warn_that_state_stays(
    optimizer: Optimizer, config: OffloadConfig, device: torch.device
) -> None:
    """Warn that this class's state is not offloaded, unless nothing should be."""
    if config.offload_fraction == 0:
        return
    local = [dtensor.local(p) for group in optimizer.param_groups for p in group["params"]]
    warn(
        "%s is not a class of torch.optim: it runs its own step, and its "
        "state stays on %s (%d parameters of %d bytes on this rank, and as "
        "much again for each state tensor of their shape and dtype). If it "
        "updates each element from that element alone, "
        "HybridDeviceOptimizer(..., elementwise=True) offloads the state",
        type(optimizer).__name__,
        device,
        len(local),
        sum(p.numel() * p.itemsize for p in local),
    )


def check_any_gradient(
    optimizer: Optimizer, models: Sequence[nn.Module], names: Mapping[Tensor, str], *, warns: bool
) -> bool:
    """Whether any parameter has a gradient, before the first update.

    Each rank decides on its own, so empty shards do not count. ``names``: parameters' names at
    wrapping; ``warns``: warn if none has a gradient.

    Raises:
        ConfigError: ``models`` have replaced parameters that have no gradient.
    """
    every = [p for group in optimizer.param_groups for p in group["params"]]
    found = any(dtensor.raw_gradient(p) is not None for p in every)
    held = [p for p in every if p.requires_grad]
    without = [p for p in held if dtensor.raw_gradient(p) is None]
    is_all_empty = not found and not any(dtensor.with_history(p).numel() for p in without)
    if is_all_empty or any(map(dtensor.never_has_gradient, held)):
        return found
    now = {name: parameter for parameter, name in dtensor.parameter_names(models).items()}
    replaced = [p for p in without if now.get(names.get(p, ""), p) is not p]
    if replaced:
        first = replaced[0]
        is_late = isinstance(now[names[first]], DTensor) and not isinstance(first, DTensor)
        cause = "fully_shard was called" if is_late else "the module's parameters were assigned"
        order = "call fsdp_offload.shard(model) or fully_shard" if is_late else "assign them"
        raise ConfigError(
            f"step() of {names[first]} and {len(replaced) - 1} other parameters",
            reason=f"the model has other ones now, because {cause} after the optimizer was built",
            remedy=f"{order}, then build the optimizer from model.parameters(), then wrap it",
        )
    if not found and warns:
        warn(
            "the first step() updates none of %d parameters: none has a gradient. Either "
            "backward() did not reach them, or zero_grad() came between backward() and step(). "
            "Remedy: call zero_grad() after step(), or before backward()%s",
            len(held),
            ""
            if models
            else "; call fsdp_offload.shard(model) or fully_shard before the optimizer is built",
        )
    return found


class GroupedParameters:
    """Remembers which parameter was in which group of an optimizer."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        # They stay alive, so that ids stay unique.
        self._groups = [list(group["params"]) for group in groups]
        self._ids = [list(map(id, group)) for group in self._groups]

    def are_same(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether groups have the same parameters. Costs about 30 us per 1000 parameters."""
        return self._ids == [list(map(id, group["params"])) for group in groups]

    def gone(self, groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """List parameters that have left their group."""
        now = [set(map(id, group["params"])) for group in groups]
        now += [set()] * (len(self._groups) - len(now))
        pairs = zip(self._groups, now, strict=False)
        return [p for before, after in pairs for p in before if id(p) not in after]


def changed_groups_error(gone: Sequence[Tensor], names: Mapping[Tensor, str]) -> StateSchemaError:
    """Build the error for a caller that changed groups with existing state."""
    return StateSchemaError(
        f"param_groups in which {names.get(gone[0], 'a parameter')} and "
        f"{len(gone) - 1} others moved or are missing",
        reason="their state belongs to a parameter and its group",
        remedy="put them back; to freeze parameters, call requires_grad_(False)",
    )


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Ignore ``inference_mode``, ``with torch.device(...)`` and ``torch.set_default_device``
    inside, because memory outlives them."""
    with torch.inference_mode(False), torch.device("cpu"):
        yield


def without_face(optimizer: Optimizer) -> Optimizer:
    """Make a twin of ``optimizer`` that shares its attributes, for the class's own code after
    :func:`make_face`."""
    inner = object.__new__(type(optimizer))
    inner.__dict__ = optimizer.__dict__
    return inner


def make_face(optimizer: Optimizer, inner: Optimizer, wrapper: Optimizer) -> None:
    """Make ``optimizer`` forward to ``wrapper``, through a subclass of its class with the same
    name. Hooks registered on either run once, with the wrapper as argument.

    The wrapper lives as long as ``optimizer``, since callers may keep either. They refer to each
    other, so Python's cyclic collector frees them; ``close()`` frees memory at once.

    Args:
        optimizer: the caller's object.
        inner: its twin of :func:`without_face`.
        wrapper: gives state, groups and methods.
    """
    own = optimizer.__dict__
    for name in _HOOKS:
        if name in own:
            wrapper.__dict__[name] = own[name]
    for name in _METHODS:
        own.pop(name, None)  # of a scheduler
    optimizer.param_groups = wrapper.param_groups
    # Otherwise a GradScaler would leave unscaling to the inner one's fused step, which no longer
    # runs.
    own["_step_supports_amp_scaling"] = False
    cls = type(optimizer)

    def find(self: Optimizer, name: str) -> Any:
        return getattr(wrapper if hasattr(type(wrapper), name) else inner, name)

    def restore(self: Optimizer, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():  # from a load_state_dict bound before wrapping
            setattr(self, name, value)

    members: dict[str, Any] = {name: getattr(cls, name) for name in ("__module__", "__qualname__")}
    members |= {"__doc__": cls.__doc__, "is_offloaded": True}
    members |= {name: _attribute(name, wrapper) for name in ("state", "param_groups", "defaults")}
    members |= {name: _method(name, wrapper) for name in (*_METHODS, "__reduce_ex__")}
    members |= {"__getattr__": find, "__setstate__": restore}
    face = types.new_class(cls.__name__, (cls,), exec_body=lambda body: body.update(members))
    object.__setattr__(optimizer, "__class__", face)


def check_no_scale(optimizer: Optimizer) -> None:
    """Refuse attributes with which torch's fused step would unscale gradients.

    Raises:
        ConfigError: a loss scale, or a flag for infinite gradients, is set on the optimizer.
    """
    own = optimizer.__dict__
    if own.get("grad_scale") is not None or own.get("found_inf") is not None:
        raise ConfigError(
            "step() of an optimizer with grad_scale or found_inf",
            reason="they make a fused step unscale gradients itself",
            remedy="set both to None, and call scaler.unscale_(optimizer) before step()",
        )


def forward_bound_steps(optimizer: Optimizer, inner: Optimizer, wrapper: Optimizer) -> None:
    """Redirect steps that were bound before wrapping to the wrapper; Accelerate binds one for its
    GradScaler.

    Nothing can replace such a step, but torch lets a hook exchange its arguments. The class's code
    then runs on a shadow without parameters, where it only calls the closure, which is the
    wrapper's step. Both share hooks, and torch runs them for this step.
    """
    idle = make_shadow(inner, [])
    step = functools.partial(raw_step(type(wrapper)), wrapper)

    def exchange(stepped: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if stepped is not optimizer:
            return None  # the wrapper's own step
        return (idle, functools.partial(step, *args[1:], **kwargs)), {}

    optimizer.register_step_pre_hook(exchange)


def _method(name: str, wrapper: Optimizer) -> Callable[..., Any]:
    def forward(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return getattr(wrapper, name)(*args, **kwargs)

    forward.__name__ = name
    # torch need not add hooks, which the wrapper has. A scheduler on the wrapped optimizer looks
    # for the second mark on its step.
    forward.hooked = forward._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return forward


def _attribute(name: str, wrapper: Optimizer) -> property:
    def read(self: Optimizer) -> Any:
        return getattr(wrapper, name)

    def write(self: Optimizer, value: Any) -> None:
        setattr(wrapper, name, value)

    return property(read, write)
