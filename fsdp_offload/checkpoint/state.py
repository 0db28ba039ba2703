"""What is saved of a job, and under which keys: optimizer state, weights, and plain values.

They are those of torch's flattened optimizer state dict: ``state.{fqn}.{name}`` and
``param_groups.{fqn}.{option}``, sorted. They follow from the groups and from the schema of the
optimizer's class, never from what a rank holds, so they are the same on all ranks without asking.

An fp32 master is never saved twice. fp32 shards are masters themselves. Of a bf16 shard the weight
is the upper half, so ``master_remainder`` (16 bits) is all that is left to say. Where a
lane keeps a whole master (host lane, fp16 shards), that is emitted as ``master`` (fp32).
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..core import dtensor
from ..core.arguments import backend_of, check_optimizer, listed
from ..core.devices import backend_for
from ..core.errors import ConfigError, StateDictError
from ..optimizer.hybrid import HybridDeviceOptimizer
from ..update.params import MasterForm
from .rule import GROUPS, STATE, KeyLayout, Match, Names, match, tied_error

REMAINDER = MasterForm.REMAINDER.value
WHOLE = MasterForm.WHOLE.value
EXTRA: Final = "extra"
SEVERAL: Final = (
    "save with your own names for them: dcp.save({'model': get_model_state_dict(model), "
    "'first': OptimizerState(model, first), 'second': OptimizerState(model, second)}, "
    "storage_writer=checkpoint.Writer(path)), and load one after the other: "
    "checkpoint.load(path, model, first, optimizer_prefix='first.')"
)
"""What to do with several optimizers."""

Models = nn.Module | Sequence[nn.Module]


def pack(model: Models, optimizer: Optimizer, *, for_writing: bool = True) -> dict[str, Any]:
    """The state of ``optimizer``, sorted by key, for ``torch.distributed.checkpoint``.

    No copy, no collective, nothing is moved: tensors are parameter-shaped DTensors (plain tensors
    for plain parameters) around the live state, so a load into them is a load into the optimizer;
    :func:`unpack` completes it. Packing twice gives the same.

    Args:
        model: holds the parameters; a sequence for parts of a pipeline.
        optimizer: a :class:`HybridDeviceOptimizer`, or any other (packed by torch's function).
        for_writing: the caller may write into the tensors, which the next step then looks for.

    Raises:
        ConfigError: a parameter is not in ``model``.
        StateDictError: state that other ranks could not take over.
        LaneError: the optimizer has failed.
    """
    optimizer = wrapper_of(optimizer)
    if not isinstance(optimizer, HybridDeviceOptimizer):
        return _pack_plain(listed(model), optimizer)
    names = names_of(listed(model), optimizer)
    packed: dict[str, Any] = {}
    state = optimizer.state if for_writing else state_to_read(optimizer)
    for parameter, group in parameters_of(optimizer):
        fqn = names[parameter][0]
        for name, value in state.get(parameter, {}).items():
            _check_value(parameter, fqn, name, value)
            packed[f"{STATE}{fqn}.{name}"] = value
        for option, value in group.items():
            if option != "params":
                packed[f"{GROUPS}{fqn}.{option}"] = _plain(value)
    return dict(sorted(packed.items()))


def wrapper_of(optimizer: Any) -> Any:
    """The wrapper, where ``optimizer`` is the one that it wraps."""
    view = getattr(optimizer, "_for_checkpoints", None)
    return optimizer if view is None else view.optimizer


def state_to_read(optimizer: Optimizer) -> Mapping[Tensor, Mapping[str, Any]]:
    """State by parameter, final, for a caller who does not write into it."""
    if isinstance(optimizer, HybridDeviceOptimizer):
        return optimizer._for_checkpoints.read()
    return optimizer.state


def unpack(model: Models, optimizer: Optimizer, packed: Mapping[str, Any]) -> None:
    """Load what :func:`pack` returned; values may be the live state itself.

    Options that are missing keep their value; parameters without any state get none.

    Raises:
        ConfigError: a parameter is not in ``model``.
        StateDictError: keys, shapes or placements do not fit; nothing was written.
    """
    names = names_of(listed(model), optimizer)
    groups = groups_of(optimizer, names)
    layout = KeyLayout(None, "")
    found = match(layout, packed, {}, groups, lambda keys: {key: packed[key] for key in keys})
    check_told(found, names, "this state dict")
    state: dict[str, dict[str, Any]] = {}
    for fqn, entries in found.state.items():
        state[fqn] = {entry: packed[keys[0]] for entry, keys in entries.items()}
        for one, *others in entries.values():
            for other in others:
                both = (dtensor.local(torch.as_tensor(packed[key])) for key in (one, other))
                if not torch.equal(*both):
                    raise tied_error(StateDictError, one, other)
    hand_over(optimizer, names, state, found.options)


def groups_of(optimizer: Optimizer, names: Mapping[Tensor, Names]) -> list[list[Names]]:
    """Names of the parameters of each group."""
    return [[names[p] for p in group["params"]] for group in optimizer.param_groups]


def check_told(found: Match, names: Mapping[Tensor, Names], where: str) -> None:
    """Refuse a load that says nothing of a parameter that is trained: its state would be reset.

    Raises:
        StateDictError: there are neither state nor options of it.
    """
    lost = sorted(n[0] for p, n in names.items() if p.requires_grad and n[0] in found.untold)
    if lost:
        raise StateDictError(
            f"optimizer state in {where}",
            reason=f"it has neither state nor options of {some(lost)}, which this optimizer trains",
            remedy="build the optimizer that was saved, or let their state begin anew: "
            "checkpoint.load(..., strict=False)",
        )


def hand_over(
    optimizer: Optimizer,
    names: Mapping[Tensor, Names],
    state: Mapping[str, Mapping[str, Any]],
    options: Sequence[Mapping[str, Any]],
) -> None:
    """Load state by name and the options of each group; options that are missing stay."""
    groups = [
        {**group, **found, "params": [names[parameter][0] for parameter in group["params"]]}
        for group, found in zip(optimizer.param_groups, options, strict=True)
    ]
    optimizer.load_state_dict({"state": dict(state), "param_groups": groups})


class OptimizerState:
    """Optimizer state as a ``Stateful``, for ``dcp.save({"optim": OptimizerState(...)})``.

    The same keys and bytes as torch's ``get_optimizer_state_dict`` with
    ``flatten_optimizer_state_dict=True``, without its first step on a fresh optimizer.

    Args:
        model: holds the parameters; a sequence for parts of a pipeline.
        optimizer: a :class:`HybridDeviceOptimizer`, or any other.

    Raises:
        ConfigError: (of both methods) a parameter is not in ``model``.
        StateDictError: (likewise) state that other ranks could not take over, or that does not fit.
    """

    def __init__(self, model: Models, optimizer: Optimizer) -> None:
        check_optimizer(optimizer, several=SEVERAL)
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Live state: DTensors shaped like the parameters (plain tensors for plain parameters)."""
        return pack(self._model, self._optimizer)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; its values may be the live state."""
        unpack(self._model, self._optimizer, state_dict)


def parameters_of(optimizer: Optimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Every parameter with its group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter, group


def names_of(models: Sequence[nn.Module], optimizer: Optimizer) -> dict[Tensor, list[str]]:
    """The FQNs of each parameter of ``optimizer``: several of a tied weight.

    Raises:
        ConfigError: a parameter is in none of ``models``, or two have one name.
    """
    saved, names = dtensor.saved_names(models), dict[Tensor, list[str]]()
    owners: dict[str, Tensor] = {}
    for parameter, _ in parameters_of(optimizer):
        if parameter not in saved:
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)}",
                reason="the optimizer holds it, but the model does not, so it has no name",
                remedy="pass the model whose parameters the optimizer was built with; after a "
                "forward under no_grad, call model.reshard() first",
            )
        names[parameter] = saved[parameter]
        if twice := [
            fqn for fqn in saved[parameter] if owners.setdefault(fqn, parameter) is not parameter
        ]:
            raise same_names(twice)
    return names


def same_names(names: Sequence[str]) -> ConfigError:
    """Of two models whose tensors have the same names."""
    return ConfigError(
        f"{some(names)} of two of the models",
        reason="they have the same names, and one set would be lost",
        remedy="save both as one: model=nn.ModuleDict({'first': first, 'second': second})",
    )


def some(names: Sequence[str]) -> str:
    """Some names for an error."""
    shown = ", ".join(names[:5]) or "none"
    return f"{shown}, ... ({len(names)} in all)" if len(names) > 5 else shown


def _plain(value: Any) -> Any:
    """NumPy's scalars, which schedules leave in groups, as Python's."""
    is_numpy = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    return value.item() if is_numpy else value


def _check_value(parameter: Tensor, fqn: str, name: str, value: Any) -> None:
    """Refuse state of a sharded parameter that would be saved as if all ranks had the same."""
    if not isinstance(value, Tensor):
        return
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.dim() > 0:
        raise StateDictError(
            f"state {name!r} of {fqn} with shape {tuple(value.shape)}",
            reason="it belongs to this rank's shard and is not cut as the parameter is, so other "
            "ranks could not take it over",
            remedy="gather this state by the means of the optimizer's package",
        )


def _pack_plain(models: Sequence[nn.Module], optimizer: Optimizer) -> dict[str, Any]:
    names_of(models, optimizer)  # refuses equal names, of which torch's dict would lose one
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    single = models[0] if len(models) == 1 else nn.ModuleList(models)
    packed = get_optimizer_state_dict(single, optimizer, options=options)
    if len(models) > 1:  # the position in the list is no part of a name
        packed = {re.sub(r"^(state|param_groups)\.\d+\.", r"\1.", k): v for k, v in packed.items()}
    return dict(sorted(packed.items()))


# --------------------------------------------------------------------------- weights and values


def weights_of(models: Sequence[nn.Module]) -> dict[str, Any]:
    """Parameters and buffers of all models by FQN: the live ones.

    Raises:
        ConfigError: two models have the same name.
    """
    weights: dict[str, Any] = {}
    for model in models:
        found = get_model_state_dict(model)
        if twice := sorted(weights.keys() & found.keys()):
            raise same_names(twice)
        weights.update(found)
    return weights


def wait_for(models: Sequence[nn.Module]) -> None:
    """Block until their device is done: threads read on streams of their own.

    A rank of a pipeline may hold nothing.
    """
    tensors: list[Tensor] = [parameter for model in models for parameter in model.parameters()]
    tensors = tensors or [buffer for model in models for buffer in model.buffers()]
    backend = backend_of(tensors) if tensors else backend_for(torch.device("cpu"))
    backend.current_stream().synchronize()


def collect(
    models: Sequence[nn.Module], optimizer: Optimizer | None, extra: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What is saved, by key, final and readable by any thread: weights as ``model.{fqn}``, state as
    ``optim.{key}``, and ``extra`` as bytes.

    Options and step counts are left to the first rank of the parameter's mesh, which has the
    same: all of them would travel to the coordinator.
    """
    state: dict[str, Any] = {f"model.{fqn}": value for fqn, value in weights_of(models).items()}
    if optimizer is not None:
        names = names_of(models, optimizer)
        others = {found[0] for p, found in names.items() if not dtensor.is_first(p)}
        for key, value in pack(models, optimizer, for_writing=False).items():
            owner = key.removeprefix(GROUPS).removeprefix(STATE).rpartition(".")[0]
            if isinstance(value, DTensor) or owner not in others:
                state[f"optim.{key}"] = value
    if extra is not None:
        state[EXTRA] = encode(dict(extra), EXTRA)
    wait_for(models)
    return state


def class_name(optimizer: Optimizer | None) -> str:
    """What a checkpoint calls the (wrapped) class; empty without an optimizer."""
    if isinstance(optimizer, HybridDeviceOptimizer):
        return optimizer._for_checkpoints.class_name
    return "" if optimizer is None else type(optimizer).__qualname__


def refuse_inherited(optimizer: Optimizer | None) -> None:
    """Refuse an optimizer of the parent process, and what is no optimizer, before any collective:
    no rank answers a child.

    Raises:
        ConfigError: it is several optimizers, or something else.
        ClosedError: this process is a fork of the one that built it.
    """
    check_optimizer(optimizer, several=SEVERAL)
    if isinstance(optimizer, HybridDeviceOptimizer):
        optimizer._for_checkpoints.check_not_inherited()


def held(
    optimizer: Optimizer | None, *, saves: bool = True
) -> contextlib.AbstractContextManager[None]:
    """Inside of a save or a load other threads wait before they step.

    Raises:
        BusyError: a signal handler called it in the middle of a step.
    """
    if isinstance(optimizer, HybridDeviceOptimizer):
        view = optimizer._for_checkpoints
        return view.saving() if saves else view.loading()
    return contextlib.nullcontext()


def encode(value: Any, what: str) -> bytes:
    """``value`` as ``torch.save`` writes it.

    Raises:
        ConfigError: ``torch.load(weights_only=True)``, which is all that a load uses, refuses it.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        decode(buffer)
    except Exception as error:
        raise ConfigError(
            f"{what} of type {type(value).__name__}",
            reason=f"it cannot be loaded without running code of its own: {error}",
            remedy="keep numbers, strings, lists, dicts and tensors in it, such as state_dict()s",
        ) from error
    return buffer.getvalue()


def decode(data: io.BytesIO) -> Any:
    """What :func:`encode` was given; no code of its own is run.

    Raises:
        Exception: whatever torch raises of other data.
    """
    with torch.serialization.safe_globals([io.BytesIO]):  # some modules' extra state is one
        return torch.load(data, weights_only=True, map_location="cpu")
