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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..errors import CheckpointError
from ..pipeline.state import REMAINDER, WHOLE

STATE_NAMES: Final = frozenset(
    {"step", "exp_avg", "momentum_buffer", "square_avg", "sum", REMAINDER, WHOLE}
)
"""Entries by which optimizer state is recognised: every usual class has one of them."""

_STATE = "state."
_GROUPS = "param_groups"
_STATE_PART = re.compile(r"(?:^|(?<=\.))state\.")
_MODELS = ("model.", "")


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


def find_places(
    keys: Collection[str],
    fqns: Collection[str],
    names: Collection[str],
    *,
    model_prefix: str | None = None,
    optimizer_prefix: str | None = None,
) -> Places:
    """Recognise the prefixes.

    Args:
        keys: of the checkpoint.
        fqns: of the parameters.
        names: of state entries that show what is optimizer state (``exp_avg``, ``step``, ...).
        model_prefix: the only one to look for weights under.
        optimizer_prefix: the only one to look for optimizer state under.

    Raises:
        CheckpointError: several sets of weights or states fit.
    """
    owners = [key.rpartition(".")[0] for key in keys if key.rpartition(".")[2] in names]
    states = {p: found for p, found in _by_prefix(owners, fqns).items() if _STATE_PART.search(p)}
    weights = _by_prefix(keys, fqns)
    if model_prefix is None:
        weights = {p: found for p, found in weights.items() if not _is_group_prefix(p)}
    else:
        weights = {p: found for p, found in weights.items() if p == model_prefix}
    if optimizer_prefix is not None:
        start = f"{optimizer_prefix}{_STATE}"
        states = {p: found for p, found in states.items() if p.startswith(start)}
    state = _choose(states, "optimizer states", ("optim.", "optimizer.", ""))
    model = _choose(weights, "weights", _MODELS)
    if state is None:
        return Places(model, None)
    part = list(_STATE_PART.finditer(state))[-1]  # a section may be called so as well
    return Places(model, state[: part.start()], state[part.end() :])


OWN: Final = Places("model.", "optim.")
"""Those of this package."""


def _by_prefix(keys: Iterable[str], fqns: Collection[str]) -> dict[str, set[str]]:
    """Which of ``fqns`` keys end with, by what stands before (nothing, or up to a dot)."""
    wanted = set(fqns)
    found: dict[str, set[str]] = {}
    for key in keys:
        parts = key.split(".")
        for i in range(len(parts)):
            tail = ".".join(parts[i:])
            if tail in wanted:
                found.setdefault(key[: len(key) - len(tail)], set()).add(tail)
    return found


def _is_group_prefix(prefix: str) -> bool:
    return bool(re.search(rf"(^|\.)({_GROUPS}|state)\.", prefix))


def _choose(
    found: Mapping[str, Collection[str]], what: str, preferred: Sequence[str]
) -> str | None:
    """The prefix under which most was found; among equals, a usual one."""
    most = max((len(each) for each in found.values()), default=0)
    best = sorted(prefix for prefix, each in found.items() if len(each) == most)
    chosen = _usual(best, preferred)
    if best and chosen is None:
        raise CheckpointError(
            f"a checkpoint with {what} under {best}",
            reason="they fit equally well",
            remedy="name the one that you mean with model_prefix= or optimizer_prefix=",
        )
    return chosen


def _usual(prefixes: Sequence[str], preferred: Sequence[str]) -> str | None:
    """The only one, or the first that is preferred."""
    if len(prefixes) == 1:
        return prefixes[0]
    usual = (p for start in preferred for p in prefixes if p in (start, f"{start}{_STATE}"))
    return next(usual, None)


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
        # A module may be called "0" too; the nested form always has the names of parameters.
        if f"{start}.{owner}.params" in values:
            nested.setdefault(int(owner), {})[option] = value
        else:
            found.setdefault(owner.removeprefix(places.inner), {})[option] = value
    for group in nested.values():
        options = {name: value for name, value in group.items() if name != "params"}
        for fqn in group.get("params") or ():
            found[str(fqn).removeprefix(places.inner)] = options
    return found


# --------------------------------------------------------------------------- of an unknown model


@dataclass(frozen=True)
class Stored:
    """What a checkpoint has of a model that nobody has built.

    Args:
        weights: key of every weight and buffer, by FQN.
        masters: key of the remainder or the whole master, by FQN.
        trained: FQNs that an optimizer knows; empty without optimizer state.
        orphans: keys of masters that may be those of other weights, or are under integer ids.
    """

    weights: Mapping[str, str]
    masters: dict[str, str] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    orphans: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _State:
    """Keys ``{start}{owner}.{name}`` that look like optimizer state.

    Args:
        start: ends with ``state.``.
        owners: keys by name, by owner: the FQN, perhaps with something before.
        models: prefixes under which there is a tensor for every owner.
    """

    start: str
    owners: Mapping[str, Mapping[str, str]]
    models: Sequence[str]

    def masters(self) -> dict[str, str]:
        """Keys of masters by owner."""
        return {
            owner: keys[name]
            for owner, keys in self.owners.items()
            for name in (REMAINDER, WHOLE)
            if name in keys
        }


def find_stored(
    tensors: Collection[str],
    others: Collection[str],
    paths: Mapping[str, Sequence[Any]],
    model_prefix: str | None = None,
    optimizer_prefix: str | None = None,
) -> Stored:
    """Tell the keys of a checkpoint apart by the FQNs that weights and optimizer state share.

    Args:
        tensors: keys of tensors.
        others: keys of everything else.
        paths: of each key, where it stood in the nested dict that was saved, as far as known.
        model_prefix: as of ``load``.
        optimizer_prefix: as of ``load``: its masters are those of these weights, no others are.

    Raises:
        CheckpointError: several models fit, or weights are missing.
    """
    states = _states_in(tensors)
    model = model_prefix
    if model is None:
        model = _choose(_fitting(states), "weights", _MODELS)
    if model is None:
        model = _likely_model(tensors, paths, states)
    stored = Stored(_weights(tensors, paths, states, model))
    if not stored.weights:
        raise CheckpointError(
            f"a checkpoint without tensors under {model!r}",
            reason="weights are missing: no tensor has such a key",
            remedy="name the checkpoint of a model, or the beginning of its keys (model_prefix=)",
        )
    if optimizer_prefix is not None:
        states = [s for s in states if s.start == f"{optimizer_prefix}{_STATE}"]
    is_told = model_prefix is None or optimizer_prefix is not None
    _add_states(stored, states, model, {*tensors, *others}, is_told=is_told)
    return stored


def _states_in(tensors: Collection[str]) -> list[_State]:
    """Everything that may be optimizer state, the shortest start first."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for key in tensors:
        for match in _STATE_PART.finditer(key):
            owner, _, name = key[match.end() :].rpartition(".")
            if owner and name in STATE_NAMES:
                found.setdefault(key[: match.end()], {}).setdefault(owner, {})[name] = key
    states = []
    for start in sorted(found, key=len):
        owners = found[start]
        places = _by_prefix(tensors, owners).items()
        models = [p for p, fqns in places if len(fqns) == len(owners) and not _is_group_prefix(p)]
        states.append(_State(start, owners, sorted(models)))
    return states


def _fitting(states: Sequence[_State]) -> dict[str, list[str]]:
    """Starts of the states that fit, by prefix of a model."""
    found: dict[str, list[str]] = {}
    for state in states:
        for prefix in state.models:
            found.setdefault(prefix, []).append(state.start)
    return found


def _likely_model(
    tensors: Collection[str], paths: Mapping[str, Sequence[Any]], states: Sequence[_State]
) -> str:
    """The prefix of a model where no optimizer tells it."""
    starts = tuple(state.start for state in states)
    plain = [key for key in tensors if not key.startswith(starts)]
    if all(key in paths for key in plain):
        found = {key.removesuffix(str(paths[key][-1])) for key in plain}
        return _choose(dict.fromkeys(found, ()), "weights", _MODELS[:1]) or ""
    found = {"model." if key.startswith("model.") else "" for key in plain}
    return _choose(dict.fromkeys(found, ()), "weights", ()) or ""


def _weights(
    tensors: Collection[str],
    paths: Mapping[str, Sequence[Any]],
    states: Sequence[_State],
    model: str,
) -> dict[str, str]:
    """Keys under ``model`` by FQN; without a prefix, those that stood at the top."""
    others: tuple[str, ...] = ()
    for state in states:
        if state.models or all(owner.isdecimal() for owner in state.owners):
            others += state.start, f"{state.start.removesuffix(_STATE)}{_GROUPS}"
    return {
        key.removeprefix(model): key
        for key in tensors
        if key.startswith(model)
        and not key.startswith(others)
        and not key.endswith("_extra_state")
        and (model or len(paths.get(key, ("",))) == 1)
    }


def _add_states(
    stored: Stored, states: Sequence[_State], model: str, keys: Collection[str], *, is_told: bool
) -> None:
    """Take over what is state of these weights.

    Args:
        stored: is added to.
        states: that may be theirs.
        model: prefix of the weights.
        keys: of the whole checkpoint.
        is_told: whether state that fits these weights is theirs; else only if no other weights are
            meant: state of ``model.`` fits ``ema.`` too.

    Raises:
        CheckpointError: weights are missing, or one has two masters.
    """
    known: tuple[str, ...] = ()
    lacking: set[str] = set()
    for state in states:  # the shortest first: within it may be a module that is called "state"
        if state.start.startswith(known):
            continue
        found = _by_prefix(state.owners, stored.weights)
        inner = _choose(found, "optimizer states", ("",)) or ""
        fqns = found.get(inner, set())
        if len(fqns) < len(state.owners):
            is_orphan = not state.models  # else it is that of other weights
            if is_orphan and fqns:
                lacking |= state.owners.keys() - {inner + fqn for fqn in fqns}
        else:
            known += (state.start,)
            start = f"{state.start.removesuffix(_STATE)}{_GROUPS}.{inner}"
            listed = {k.removeprefix(start).rpartition(".")[0] for k in keys if k.startswith(start)}
            stored.trained.update(fqns, listed & stored.weights.keys())
            whose = model if is_told else _usual([p + inner for p in state.models], _MODELS)
            is_orphan = whose is None
            if whose == model:
                _add_masters(stored, state, inner)
        if is_orphan:
            stored.orphans.update(state.masters().values())
    if lacking and not known:
        raise CheckpointError(
            f"a checkpoint with optimizer state of {sorted(lacking)[:4]}",
            reason=f"their weights are missing under {model!r}",
            remedy="save model and optimizer together, or name their keys with model_prefix= and "
            "optimizer_prefix=",
        )


def _add_masters(stored: Stored, state: _State, inner: str) -> None:
    for owner, key in state.masters().items():
        fqn = owner.removeprefix(inner)
        if stored.masters.setdefault(fqn, key) != key:
            raise CheckpointError(
                f"masters {stored.masters[fqn]!r} and {key!r}",
                reason=f"each may be that of {fqn}",
                remedy="name the one that you mean with optimizer_prefix=",
            )
