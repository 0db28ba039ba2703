"""What is saved of a job, and under which keys: optimizer state, weights, and plain values.

[Note: keys]
They are those of torch's flattened optimizer state dict: ``state.{fqn}.{name}`` and
``param_groups.{fqn}.{option}``, sorted. They follow from the groups and from the schema of the
optimizer's class, never from what a rank holds, so they are the same on all ranks without asking.

[Note: masters]
An fp32 master is never saved twice. fp32 shards are masters themselves. Of a bf16 shard the weight
is the upper half, so ``master_remainder`` (16 bits) is all that is left to say. Where a
lane keeps a whole master (host lane, fp16 shards), that is emitted as ``master`` (fp32).

[Note: layouts]
Weights stand under one of three prefixes, optimizer state under one of three others::

    model.{fqn}         optim.state.{fqn}.exp_avg        this package, and most users of torch's DCP
    {fqn}               optimizer.state.{fqn}.exp_avg    torchtitan
    model.module.{fqn}  optimizer.state.module.{fqn}.exp_avg    Megatron-FSDP

The first prefix under which there is a weight (state) of this model is taken, unless the caller
names one. Options of groups stand beside the state, flat (``param_groups.{fqn}.lr``) or nested
(``param_groups`` as one list, or ``param_groups.{index}.lr`` if an option is a tensor).
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from ..core.arguments import backend_of, listed
from ..core.backend import backend_for
from ..core.errors import ConfigError, StateDictError
from ..optimizer.hybrid import HybridDeviceOptimizer
from ..update.params import MasterForm

REMAINDER = MasterForm.REMAINDER.value
WHOLE = MasterForm.WHOLE.value
STATE: Final = "state."
GROUPS: Final = "param_groups."
EXTRA: Final = "extra"
MODEL_PREFIXES: Final = ("model.", "", "model.module.")
OPTIMIZER_PREFIXES: Final = ("optim.", "optimizer.", "")


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
        fqn = names[parameter]
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
    state: dict[str, dict[str, Any]] = {}
    options_of: dict[str, dict[str, Any]] = {}
    for key, value in packed.items():
        for prefix, found in ((STATE, state), (GROUPS, options_of)):
            if key.startswith(prefix):
                fqn, _, name = key.removeprefix(prefix).rpartition(".")
                found.setdefault(fqn, {})[name] = value
    groups = []
    for group in optimizer.param_groups:
        fqns = [names[parameter] for parameter in group["params"]]
        options = options_of.get(fqns[0] if fqns else "", {})
        groups.append({**group, **options, "params": fqns})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


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


def names_of(models: Sequence[nn.Module], optimizer: Optimizer) -> dict[Tensor, str]:
    """The FQN of each parameter of ``optimizer``.

    Raises:
        ConfigError: a parameter is in none of ``models``.
    """
    names = dtensor.saved_names(models)
    for parameter, _ in parameters_of(optimizer):
        if parameter not in names:
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)}",
                reason="the optimizer holds it, but the model does not, so it has no name",
                remedy="pass the model whose parameters the optimizer was built with; after a "
                "forward under no_grad, call model.reshard() first",
            )
    return names


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
            raise ConfigError(
                f"weights {twice[:5]} of two of the models",
                reason="they have the same names, and one set would be lost",
                remedy="give the models different names, as parts of one module have",
            )
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
        others = {name for parameter, name in names.items() if not dtensor.is_first(parameter)}
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
    """Refuse an optimizer of the parent process before any collective: no rank answers a child.

    Raises:
        ClosedError: this process is a fork of the one that built it.
    """
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


# --------------------------------------------------------------------------- where keys are


@dataclass(frozen=True)
class Layout:
    """The prefixes of a checkpoint.

    Args:
        model: before the FQN of a weight; ``None``: it has none of this model.
        optimizer: before ``state.`` and ``param_groups``; ``None``: it has no state of this model.
        inner: between those and the FQN.
    """

    model: str | None
    optimizer: str | None
    inner: str = ""

    def weight(self, fqn: str) -> str:
        """The key of a weight."""
        return f"{self.model}{fqn}"

    def state(self, fqn: str) -> str:
        """What the keys of a parameter's state begin with."""
        return f"{self.optimizer}{STATE}{self.inner}{fqn}."

    def is_weight(self, key: str) -> bool:
        """Whether a key may be that of a weight: it has the prefix, and is no optimizer's."""
        if self.model is None or not key.startswith(self.model):
            return False
        if self.optimizer is None:
            return True
        start = self.optimizer
        return not key.startswith((f"{start}{STATE}", f"{start}{GROUPS[:-1]}"))

    def entries(self, kind: str, keys: Collection[str]) -> dict[str, set[str]]:
        """Names of the entries, of state (``STATE``) or of options (``GROUPS``), by FQN."""
        found: dict[str, set[str]] = {}
        start = f"{self.optimizer}{kind}{self.inner}"
        for key in keys:
            if self.optimizer is not None and key.startswith(start):
                fqn, _, name = key.removeprefix(start).rpartition(".")
                found.setdefault(fqn, set()).add(name)
        return found

    def option_keys(self, keys: Collection[str], fqns: Collection[str]) -> list[str]:
        """Keys that hold options of the groups of ``fqns``, in any of the three forms."""
        start = f"{self.optimizer}{GROUPS[:-1]}"
        owners = {f"{self.inner}{fqn}" for fqn in fqns}
        found = []
        for key in keys:
            owner = key.removeprefix(f"{start}.").rpartition(".")[0]
            if key == start or (
                key.startswith(f"{start}.") and (owner.isdecimal() or owner in owners)
            ):
                found.append(key)
        return found

    def options(self, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Options of the group of each parameter, from the values of :meth:`option_keys`.

        A nested form gives them for all parameters of a group, which it names by FQN.
        """
        start = f"{self.optimizer}{GROUPS[:-1]}"
        nested: dict[int, dict[str, Any]] = dict(enumerate(values.get(start) or []))
        found: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            owner, _, option = key.removeprefix(f"{start}.").rpartition(".")
            if key == start:
                continue
            # A module may be called "0" too; the nested form always has the names of parameters.
            if f"{start}.{owner}.params" in values:
                nested.setdefault(int(owner), {})[option] = value
            else:
                found.setdefault(owner.removeprefix(self.inner), {})[option] = value
        for group in nested.values():
            options = {name: value for name, value in group.items() if name != "params"}
            for fqn in group.get("params") or ():
                found[str(fqn).removeprefix(self.inner)] = options
        return found


def find_layout(
    keys: Collection[str],
    fqns: Collection[str],
    *,
    model_prefix: str | None = None,
    optimizer_prefix: str | None = None,
) -> Layout:
    """The layout of a checkpoint.

    Args:
        keys: of the checkpoint.
        fqns: of the model's weights.
        model_prefix: before the FQNs of weights; ``None``: the first that fits.
        optimizer_prefix: before ``state.``; ``None``: the first that fits.
    """
    known = set(keys)
    prefixes = MODEL_PREFIXES if model_prefix is None else (model_prefix,)
    model = next((p for p in prefixes if any(p + fqn in known for fqn in fqns)), None)
    owners = {key.rpartition(".")[0] for key in known}
    prefixes = OPTIMIZER_PREFIXES if optimizer_prefix is None else (optimizer_prefix,)
    for inner in ("", "module."):
        for prefix in prefixes:
            starts = f"{prefix}{STATE}{inner}", f"{prefix}{GROUPS}{inner}"
            if any(start + fqn in owners for start in starts for fqn in fqns):
                return Layout(model, prefix, inner)
    return Layout(model, None)
