"""Where a checkpoint keeps weights and optimizer state: pure functions of its keys.

Programs put the same things under different prefixes::

    model.{fqn}       optim.state.{fqn}.exp_avg        this package, and most users of torch's DCP
    {fqn}             optimizer.state.{fqn}.exp_avg    torchtitan
    model.module.{fqn}  optimizer.state.module.{fqn}.exp_avg    Megatron-FSDP (fsdp_dtensor)

Options of groups stand beside the state, flat (``param_groups.{fqn}.lr``) or nested
(``param_groups`` as one list, or ``param_groups.{index}.lr`` if an option is a tensor).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError

_STATE = "state."
_GROUPS = "param_groups"


@dataclass(frozen=True)
class Places:
    """The prefixes of a checkpoint.

    Args:
        model: before the FQN of a weight; ``None``: it has no weights.
        base: before ``state.`` and ``param_groups``; ``None``: it has no optimizer state.
        inner: between those and the FQN.
    """

    model: str | None
    base: str | None
    inner: str = ""

    def weight(self, fqn: str) -> str:
        """The key of a weight."""
        return f"{self.model}{fqn}"

    def state(self, fqn: str) -> str:
        """What the keys of a parameter's state begin with."""
        return f"{self.base}{_STATE}{self.inner}{fqn}."


def find_places(keys: Collection[str], fqns: Collection[str], names: Collection[str]) -> Places:
    """Recognise the prefixes.

    Args:
        keys: of the checkpoint.
        fqns: of the parameters.
        names: of state entries that show what is optimizer state (``exp_avg``, ``step``, ...).

    Raises:
        CheckpointError: several sets of weights or states fit.
    """
    wanted = set(fqns)
    states: dict[str, set[str]] = {}
    weights: dict[str, set[str]] = {}
    for key in keys:
        for prefix, fqn in _splits(key, wanted):
            weights.setdefault(prefix, set()).add(fqn)
        owner, _, name = key.rpartition(".")
        if name in names:
            for prefix, fqn in _splits(owner, wanted):
                if re.search(r"(^|\.)state\.", prefix):
                    states.setdefault(prefix, set()).add(fqn)
    weights = {p: found for p, found in weights.items() if not _is_group_prefix(p)}
    state = _choose(states, "optimizer states", ("optim.", "optimizer.", ""))
    model = _choose(weights, "weights", ("model.", ""))
    if state is None:
        return Places(model, None)
    base, _, inner = state.partition(_STATE)
    return Places(model, base, inner)


def _splits(key: str, fqns: set[str]) -> list[tuple[str, str]]:
    """Every way to read ``key`` as a prefix (empty, or ending with a dot) and an FQN."""
    parts = key.split(".")
    tails = (".".join(parts[i:]) for i in range(len(parts)))
    return [(key[: len(key) - len(tail)], tail) for tail in tails if tail in fqns]


def _is_group_prefix(prefix: str) -> bool:
    return bool(re.search(rf"(^|\.)({_GROUPS}|state)\.", prefix))


def _choose(found: Mapping[str, set[str]], what: str, preferred: Sequence[str]) -> str | None:
    """The prefix with most parameters; among equals, a usual one."""
    most = max((len(fqns) for fqns in found.values()), default=0)
    best = sorted(prefix for prefix, fqns in found.items() if len(fqns) == most)
    if len(best) <= 1:
        return best[0] if best else None
    for start in preferred:
        usual = [p for p in best if p in (start, f"{start}{_STATE}")]
        if usual:
            return usual[0]
    raise CheckpointError(
        f"a checkpoint with {what} under {best}",
        reason="they fit equally well",
        remedy="name the one to load with model_prefix= or optimizer_prefix=",
    )


def option_keys(keys: Collection[str], places: Places, fqns: Collection[str]) -> list[str]:
    """Keys that hold options of the groups of ``fqns``, in any of the three forms."""
    start = f"{places.base}{_GROUPS}"
    owners = {f"{places.inner}{fqn}" for fqn in fqns}
    found = []
    for key in keys:
        owner, _, _ = key.removeprefix(f"{start}.").rpartition(".")
        if key == start or (key.startswith(f"{start}.") and (owner.isdecimal() or owner in owners)):
            found.append(key)
    return found


def options_by_fqn(values: Mapping[str, Any], places: Places) -> dict[str, dict[str, Any]]:
    """Options of the group of each parameter, from the values of :func:`option_keys`.

    A nested form gives them for all parameters of a group; parameters are named there by FQN.
    """
    start = f"{places.base}{_GROUPS}"
    nested: dict[int, dict[str, Any]] = dict(enumerate(values.get(start) or []))
    found: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        owner, _, option = key.removeprefix(f"{start}.").rpartition(".")
        if key == start:
            continue
        if owner.isdecimal():
            nested.setdefault(int(owner), {})[option] = value
        else:
            found.setdefault(owner.removeprefix(places.inner), {})[option] = value
    for group in nested.values():
        options = {name: value for name, value in group.items() if name != "params"}
        for fqn in group.get("params") or ():
            found[str(fqn).removeprefix(places.inner)] = options
    return found
