"""Collect the content of a save by key: optimizer state, weights, and plain values.

Keys are those of torch's flattened optimizer state dict: ``state.{fqn}.{name}`` and
``param_groups.{fqn}.{option}``, sorted. They follow from the groups and the schema of the
optimizer's class, never from a rank's shards, so all ranks have the same without a collective.

A save never writes an fp32 master twice. fp32 shards are masters themselves. A bf16 weight is the
upper half of its master, and ``master_remainder`` holds the other 16 bits. A whole master (updates
on the CPU, fp16 shards) is saved as ``master`` (fp32).
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Mapping, Sequence
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
from ..core.gated import keeper_of
from ..optimizer.hybrid import HybridDeviceOptimizer
from ..update.params import MasterForm
from ..update.schema import replaced
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
"""Remedy for several optimizers."""

Models = nn.Module | Sequence[nn.Module]


class OptimizerState:
    """Optimizer state as a ``Stateful``, for ``dcp.save({"optim": OptimizerState(...)})``.

    It has the keys and bytes of torch's ``get_optimizer_state_dict`` with
    ``flatten_optimizer_state_dict=True``, without that function's first step of a fresh optimizer.

    Args:
        model: holds the parameters; a sequence for parts of a pipeline.
        optimizer: a :class:`HybridDeviceOptimizer`, or any other (torch's function packs it).

    Raises:
        ConfigError: (both methods) a parameter is not in ``model``.
        StateDictError: (both methods) other ranks could not load the state, or it does not fit.
        LaneError: (:meth:`state_dict`) the optimizer has failed.
    """

    def __init__(self, model: Models, optimizer: Optimizer) -> None:
        check_optimizer(optimizer, several=SEVERAL)
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Pack the live state, sorted by key: no copy, no collective.

        Tensors are DTensors shaped like the parameters (plain tensors for plain parameters), so a
        load into them is a load into the optimizer; :meth:`load_state_dict` completes it.
        """
        return pack(self._model, self._optimizer)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; values may be the live state itself.

        Missing options keep their value; parameters without state get none. If anything does not
        fit, nothing is written.
        """
        names = names_of(listed(self._model), self._optimizer)
        groups, layout = groups_of(self._optimizer, names), KeyLayout(None, "")
        found = match(layout, state_dict, {}, groups, lambda keys: {k: state_dict[k] for k in keys})
        check_complete(found, names, "this state dict")
        state: dict[str, dict[str, Any]] = {}
        for fqn, entries in found.state.items():
            state[fqn] = {entry: state_dict[keys[0]] for entry, keys in entries.items()}
            for one, *others in entries.values():
                for other in others:
                    both = (dtensor.local(torch.as_tensor(state_dict[k])) for k in (one, other))
                    if not torch.equal(*both):
                        raise tied_error(StateDictError, one, other)
        load_state(self._optimizer, names, state, found.options)


def pack(model: Models, optimizer: Optimizer, *, for_writing: bool = True) -> dict[str, Any]:
    """Pack like :meth:`OptimizerState.state_dict`; ``for_writing``: the caller may write into the
    tensors, so the next step looks for writes."""
    optimizer = wrapper_of(optimizer)
    # To save what never stepped, torch's function steps with a learning rate of 0, and that counts.
    if not isinstance(optimizer, HybridDeviceOptimizer) and (for_writing or optimizer.state):
        return _pack_plain(listed(model), optimizer)
    names = names_of(listed(model), optimizer)
    packed: dict[str, Any] = {}
    state = optimizer.state if for_writing else state_to_read(optimizer)
    for group in optimizer.param_groups:
        options = {name: _plain(value) for name, value in group.items() if name != "params"}
        for parameter in group["params"]:
            fqn = names[parameter][0]
            for name, value in state.get(parameter, {}).items():
                _check_value(parameter, fqn, name, value)
                packed[f"{STATE}{fqn}.{name}"] = value
            packed |= {f"{GROUPS}{fqn}.{name}": value for name, value in options.items()}
    return dict(sorted(packed.items()))


def wrapper_of(optimizer: Any) -> Any:
    """Return the wrapper, if ``optimizer`` is wrapped by one."""
    view = getattr(optimizer, "_for_checkpoints", None)
    return optimizer if view is None else view.optimizer


def state_to_read(optimizer: Optimizer) -> Mapping[Tensor, Mapping[str, Any]]:
    """Return the final state by parameter, for a caller that does not write to it."""
    view = getattr(optimizer, "_for_checkpoints", None)
    return optimizer.state if view is None else view.read()


def groups_of(optimizer: Optimizer, names: Mapping[Tensor, Names]) -> list[list[Names]]:
    """List the names of each group's parameters."""
    return [[names[p] for p in group["params"]] for group in optimizer.param_groups]


def check_complete(found: Match, names: Mapping[Tensor, Names], where: str) -> None:
    """Refuse a load that would reset the state of a trained parameter.

    Raises:
        StateDictError: the checkpoint has neither state nor options of it.
    """
    lost = sorted(n[0] for p, n in names.items() if p.requires_grad and n[0] in found.absent)
    if lost:
        raise StateDictError(
            f"optimizer state in {where}",
            reason=f"it has neither state nor options of {some(lost)}, which this optimizer trains",
            remedy="build the optimizer that was saved, or start them without state: "
            "checkpoint.load(..., strict=False)",
        )


def load_state(
    optimizer: Optimizer,
    names: Mapping[Tensor, Names],
    state: Mapping[str, Mapping[str, Any]],
    options: Sequence[Mapping[str, Any]],
) -> None:
    """Load state by name and the options of each group; missing options stay."""
    groups = [
        {**group, **found, "params": [names[parameter][0] for parameter in group["params"]]}
        for group, found in zip(optimizer.param_groups, options, strict=True)
    ]
    optimizer.load_state_dict({"state": dict(state), "param_groups": groups})


def names_of(models: Sequence[nn.Module], optimizer: Optimizer) -> dict[Tensor, list[str]]:
    """Find the FQNs of each parameter of ``optimizer``; a tied weight has several.

    Raises:
        ConfigError: a parameter is in none of ``models``, or two share a name.
    """
    saved, names = dtensor.saved_names(models), dict[Tensor, list[str]]()
    owners: dict[str, Tensor] = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter not in saved:
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)}",
                reason="the optimizer has it but the model does not, so it has no name",
                remedy="pass the model that the optimizer was built from; after a forward "
                "under no_grad, call model.reshard() first",
            )
        names[parameter] = saved[parameter]
        if twice := [
            fqn for fqn in saved[parameter] if owners.setdefault(fqn, parameter) is not parameter
        ]:
            raise same_names(twice)
    return names


def same_names(names: Sequence[str]) -> ConfigError:
    """Build the error for two models with equal tensor names."""
    return ConfigError(
        f"{some(names)} of two of the models",
        reason="both models use these names, and one set would be lost",
        remedy="save both as one: model=nn.ModuleDict({'first': first, 'second': second})",
    )


def some(names: Sequence[str]) -> str:
    """List the first five names, for an error."""
    shown = ", ".join(names[:5]) or "none"
    return f"{shown}, ... ({len(names)} in all)" if len(names) > 5 else shown


def _plain(value: Any) -> Any:
    is_numpy = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    return value.item() if is_numpy else value


def _check_value(parameter: Tensor, fqn: str, name: str, value: Any) -> None:
    """Refuse a shard's state that is a plain tensor: DCP would save that of one rank."""
    is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.dim() > 0
    if isinstance(parameter, DTensor) and is_plain:
        raise StateDictError(
            f"state {name!r} of {fqn} with shape {tuple(value.shape)}",
            reason="only this rank's shard has it, and it is not sharded like the "
            "parameter, so other ranks could not load it",
            remedy="gather it with the functions of the optimizer's package",
        )


def _pack_plain(models: Sequence[nn.Module], optimizer: Optimizer) -> dict[str, Any]:
    names_of(models, optimizer)  # refuses equal names, because torch's dict would lose one
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    single = models[0] if len(models) == 1 else nn.ModuleList(models)
    packed = get_optimizer_state_dict(single, optimizer, options=options)
    if len(models) > 1:  # the position in the list is not part of a name
        packed = {re.sub(r"^(state|param_groups)\.\d+\.", r"\1.", k): v for k, v in packed.items()}
    return dict(sorted(packed.items()))


# --------------------------------------------------------------------------- weights and values


def weights_of(models: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the live parameters and buffers of all models by FQN, wherever their memory is.

    Raises:
        ConfigError: two models have equal names.
    """
    weights: dict[str, Any] = {}
    for model in models:
        # torch raises for a model without any state, which a rank of a pipeline may have.
        is_empty = next(model.parameters(), None) is None and not model.state_dict()
        state = {} if is_empty else get_model_state_dict(model)
        found = {fqn: _in_memory(value) for fqn, value in state.items()}
        if twice := sorted(weights.keys() & found.keys()):
            raise same_names(twice)
        weights.update(found)
    return weights


def _in_memory(value: Any) -> Any:
    is_away = isinstance(value, DTensor) and keeper_of(dtensor.with_history(value)) is not None
    return dtensor.like(value, dtensor.local(value)) if is_away else value


def wait_for(models: Sequence[nn.Module]) -> None:
    """Block until the current stream is done: threads read on streams of their own."""
    # A rank of a pipeline may hold nothing.
    tensors: list[Tensor] = [parameter for model in models for parameter in model.parameters()]
    tensors = tensors or [buffer for model in models for buffer in model.buffers()]
    backend = backend_of(tensors) if tensors else backend_for(torch.device("cpu"))
    backend.current_stream().synchronize()


def collect(
    models: Sequence[nn.Module], optimizer: Optimizer | None, extra: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Collect the content of a save, in the order of the current stream: weights as
    ``model.{fqn}``, state as ``optim.{key}``, and ``extra`` as bytes.

    All ranks have the same options and step counts. Only the first rank of a parameter's mesh
    returns them, because every planned item travels to the coordinator.
    """
    state: dict[str, Any] = {f"model.{fqn}": value for fqn, value in weights_of(models).items()}
    if optimizer is not None:
        names = names_of(models, optimizer)
        others = {found[0] for p, found in names.items() if not dtensor.is_first(p)}
        for key, value in pack(models, optimizer, for_writing=False).items():
            owner = key.partition(".")[2].rpartition(".")[0]
            if isinstance(value, DTensor) or owner not in others:
                state[f"optim.{key}"] = value
    if extra is not None:
        state[EXTRA] = encode(dict(extra), EXTRA)
    return state


def class_name(optimizer: Optimizer | None) -> str:
    """Name the (wrapped) class, for the manifest; empty without an optimizer."""
    if isinstance(optimizer, HybridDeviceOptimizer):
        return optimizer._for_checkpoints.class_name
    return "" if optimizer is None else type(optimizer).__qualname__


def checked_optimizer(optimizer: Any) -> Optimizer | None:
    """Return the optimizer, or its wrapper, if it can be saved and loaded; no collective.

    Raises:
        ConfigError: not one optimizer.
        ClosedError: this process is a fork of the one that built it, and no rank answers a child.
    """
    check_optimizer(optimizer, several=SEVERAL)
    found = wrapper_of(optimizer)
    if isinstance(found, HybridDeviceOptimizer):
        found._for_checkpoints.check_not_inherited()
    return found  # type: ignore[no-any-return]


def held(
    optimizer: Optimizer | None, *, saves: bool = True
) -> contextlib.AbstractContextManager[None]:
    """Make other threads' steps wait while this thread saves, or loads.

    Raises:
        BusyError: a signal handler calls this in the middle of a step.
    """
    if isinstance(optimizer, HybridDeviceOptimizer):
        return (
            optimizer._for_checkpoints.saving() if saves else optimizer._for_checkpoints.loading()
        )
    return contextlib.nullcontext()


def encode(value: Any, what: str) -> bytes:
    """Encode ``value`` with ``torch.save``.

    Raises:
        ConfigError: ``torch.load(weights_only=True)``, which every load uses, refuses it, or it
            holds a DTensor of several ranks.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        decode(buffer)
    except Exception as error:
        for name, each in value.items() if isinstance(value, Mapping) else ():
            encode(each, f"{what}[{name!r}]")  # raises if this entry is the reason
        raise ConfigError(
            f"{what} of type {type(value).__name__}",
            reason="a load would have to run its code",
            remedy="store numbers, strings, lists, dicts and tensors, such as its state_dict()",
        ) from error
    replaced(value, functools.partial(_check_whole, what))  # only containers that can be copied
    return buffer.getvalue()


def _check_whole(what: str, tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1:
        raise ConfigError(
            f"{what} with a DTensor of shape {tuple(tensor.shape)}",
            reason="one rank writes it, so the shards of the others would be lost",
            remedy="store its full_tensor()",
        )
    return tensor


def decode(data: io.BytesIO) -> Any:
    """Decode the result of :func:`encode`, and run no code that the data name."""
    with torch.serialization.safe_globals([io.BytesIO]):  # some modules' extra state is one
        return torch.load(data, weights_only=True, map_location="cpu")
