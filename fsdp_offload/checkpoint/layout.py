"""Where a checkpoint keeps weights and optimizer state: pure functions of its keys.

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

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from .state import STATE

MODEL_PREFIXES: Final = ("model.", "", "model.module.")
OPTIMIZER_PREFIXES: Final = ("optim.", "optimizer.", "")

_GROUPS = "param_groups"


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
        return not key.startswith((f"{start}{STATE}", f"{start}{_GROUPS}"))

    def state_names(self, keys: Collection[str]) -> dict[str, set[str]]:
        """Which entries there are, by FQN."""
        found: dict[str, set[str]] = {}
        start = f"{self.optimizer}{STATE}{self.inner}"
        for key in keys:
            if self.optimizer is not None and key.startswith(start):
                fqn, _, name = key.removeprefix(start).rpartition(".")
                found.setdefault(fqn, set()).add(name)
        return found

    def option_owners(self, keys: Collection[str]) -> set[str]:
        """FQNs of parameters whose options are there by name."""
        start = f"{self.optimizer}{_GROUPS}.{self.inner}"
        found = (
            key.removeprefix(start).rpartition(".")[0] for key in keys if key.startswith(start)
        )
        return set() if self.optimizer is None else set(found)

    def option_keys(self, keys: Collection[str], fqns: Collection[str]) -> list[str]:
        """Keys that hold options of the groups of ``fqns``, in any of the three forms."""
        start = f"{self.optimizer}{_GROUPS}"
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
        start = f"{self.optimizer}{_GROUPS}"
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
            starts = f"{prefix}{STATE}{inner}", f"{prefix}{_GROUPS}.{inner}"
            if any(start + fqn in owners for start in starts for fqn in fqns):
                return Layout(model, prefix, inner)
    return Layout(model, None)
