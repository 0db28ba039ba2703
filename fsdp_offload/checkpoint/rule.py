"""Match keys of a checkpoint with tensors of a job by name: one rule for all loads.

A load finds two layouts without explicit prefixes::

    model.{fqn}   optim.state.{fqn}.exp_avg       this package, and torch's flat dicts
    model.{fqn}   optimizer.state.{fqn}.exp_avg   torch's nested dicts in many trainers

Options are beside the state, flat (``param_groups.{fqn}.lr``) or nested (``param_groups``, or
``param_groups.{index}.lr`` if an option is a tensor). A wrapper's ``module.`` may precede the FQNs
of the state (Megatron-FSDP).

A tied weight has several names. A load reads all of them that the checkpoint has, and
:class:`.reader.Reader` refuses values that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ..core.errors import OffloadError

STATE: Final = "state."
GROUPS: Final = "param_groups."
MODEL_PREFIX: Final = "model."
OPTIMIZER_PREFIXES: Final = ("optim.", "optimizer.")

Names = Sequence[str]
"""The FQNs of one tensor."""

Options = dict[str, Any]
Read = Callable[[list[str]], Mapping[str, Any]]


@dataclass(frozen=True)
class KeyLayout:
    """The prefixes of a checkpoint."""

    model: str | None  # prefix of a weight's FQN; None: no weights of this model
    optimizer: str | None  # prefix of ``state.`` and ``param_groups``; None: no state of this model
    inner: str = ""  # between these and the FQN

    def weight(self, fqn: str) -> str:
        """Return the key of a weight."""
        return f"{self.model}{fqn}"

    def state(self, fqn: str) -> str:
        """Return the prefix of a parameter's state."""
        return f"{self.optimizer}{STATE}{self.inner}{fqn}."

    def is_weight(self, key: str) -> bool:
        """Whether a key has the prefix of weights, and not that of the optimizer."""
        if self.model is None or not key.startswith(self.model):
            return False
        start = self.optimizer
        return start is None or not key.startswith((f"{start}{STATE}", f"{start}{GROUPS[:-1]}"))

    def entries(self, kind: str, keys: Collection[str]) -> dict[str, set[str]]:
        """Find the names of entries, of state (``STATE``) or of options (``GROUPS``), by FQN."""
        found: dict[str, set[str]] = {}
        start = f"{self.optimizer}{kind}{self.inner}"
        for key in keys:
            if self.optimizer is not None and key.startswith(start):
                fqn, _, name = key.removeprefix(start).rpartition(".")
                found.setdefault(fqn, set()).add(name)
        return found


class Match(NamedTuple):
    """Result of :func:`match`; a parameter's first name identifies it."""

    weights: dict[str, str]  # the key of each name that the checkpoint has
    missing: list[str]  # names of the model's tensors without any key
    unknown: list[str]  # keys of weights that the model lacks
    state: dict[str, dict[str, list[str]]]  # keys by entry, for each parameter of the optimizer
    options: list[Options]  # of each group
    absent: set[str]  # parameters of the optimizer with neither state nor options
    left: list[str]  # weights whose saved state the load skips: not in the optimizer


def match(
    layout: KeyLayout,
    keys: Collection[str],
    weights: Mapping[str, Names],
    groups: Sequence[Sequence[Names]],
    read: Read,
) -> Match:
    """Decide which key goes to which tensor.

    Args:
        weights: all names of the same tensor, by each name in the model.
        groups: names of each parameter, by group of the optimizer.
        read: returns the values of keys with options.
    """
    stored, entries = set(keys), layout.entries(STATE, keys)
    found = {fqn: layout.weight(fqn) for fqn in weights if layout.weight(fqn) in stored}
    taken = set(found.values())
    options, present = _find_options(layout, keys, groups, read)
    state: dict[str, dict[str, list[str]]] = {}
    absent, held = set(), set[str]()
    for names in (names for group in groups for names in group):
        mine = state.setdefault(names[0], {})
        for fqn in names:
            for entry in sorted(entries.get(fqn, ())):
                mine.setdefault(entry, []).append(layout.state(fqn) + entry)
        held.update(names)
        if not mine and present.isdisjoint(names):
            absent.add(names[0])
    return Match(
        weights=found,
        missing=sorted(f for f, names in weights.items() if found.keys().isdisjoint(names)),
        # Without a prefix, all other keys look like weights'.
        unknown=[k for k in keys if layout.model and layout.is_weight(k) and k not in taken],
        state=state,
        options=options,
        absent=absent,
        left=sorted(weights.keys() & entries.keys() - held),
    )


def _find_options(
    layout: KeyLayout,
    keys: Collection[str],
    groups: Sequence[Sequence[Names]],
    read: Read,
) -> tuple[list[Options], set[str]]:
    """Find the options of each group, and the FQNs that have some.

    The group's first parameter in the checkpoint decides its options.
    """
    start = f"{layout.optimizer}{GROUPS[:-1]}"
    flat = layout.entries(GROUPS, keys)
    outer = KeyLayout(layout.model, layout.optimizer).entries(GROUPS, keys)
    # A module may be named "0", too; a nested group always lists its parameters.
    indexed = {i: names for i, names in outer.items() if i.isdecimal() and "params" in names}
    nested: list[Options] = []
    if start in keys:
        nested += read([start])[start] or []
    for index in sorted(indexed, key=int):
        values = read([f"{start}.{index}.{name}" for name in sorted(indexed[index])])
        nested.append({key.rpartition(".")[2]: value for key, value in values.items()})
    by_fqn = {
        str(fqn).removeprefix(layout.inner): group
        for group in nested
        for fqn in group.get("params") or ()
    }
    present = (flat.keys() - indexed.keys()) | by_fqn.keys()
    options = []
    for group in groups:
        speaker = next((fqn for names in group for fqn in names if fqn in present), None)
        found = by_fqn.get(speaker or "", {})
        if speaker is not None and speaker not in by_fqn:
            of_speaker = f"{layout.optimizer}{GROUPS}{layout.inner}{speaker}."
            values = read([of_speaker + name for name in sorted(flat[speaker])])
            found = {key.removeprefix(of_speaker): value for key, value in values.items()}
        # The saved group's parameter names are not this group's.
        options.append({n: v for n, v in found.items() if n not in ("params", "param_names")})
    return options, present


def find_layout(
    keys: Collection[str],
    fqns: Collection[str],
    *,
    model_prefix: str | None = None,
    optimizer_prefix: str | None = None,
) -> KeyLayout:
    """Find the layout of a checkpoint with these keys, for a model whose weights have these FQNs.

    Args:
        model_prefix: prefix of the FQNs of weights; ``None``: ``"model."``.
        optimizer_prefix: prefix of ``state.``; ``None``: ``"optim."``, else ``"optimizer."``.
    """
    known = set(keys)
    start = MODEL_PREFIX if model_prefix is None else model_prefix
    # A rank of a pipeline may hold nothing: to it, all weights of the checkpoint are unknown.
    model = start if not fqns or any(start + fqn in known for fqn in fqns) else None
    owners = {key.rpartition(".")[0] for key in known}
    prefixes = OPTIMIZER_PREFIXES if optimizer_prefix is None else (optimizer_prefix,)
    for inner in ("", "module."):
        for prefix in prefixes:
            starts = f"{prefix}{STATE}{inner}", f"{prefix}{GROUPS}{inner}"
            if any(start + fqn in owners for start in starts for fqn in fqns):
                return KeyLayout(model, prefix, inner)
    for prefix in prefixes:  # nested groups of a class without state
        start = f"{prefix}{GROUPS[:-1]}"
        if fqns and not known.isdisjoint((start, f"{start}.0.params")):
            return KeyLayout(model, prefix)
    return KeyLayout(model, None)


def or_give(option: str, keys: Iterable[str], fqns: Iterable[str], kind: str = "") -> str:
    """Continue a remedy with the prefixes of the model's longest FQN, if any; ``kind``: ``STATE``,
    or empty for weights."""
    ends = kind + max(fqns, key=len, default="")
    names = {key.rpartition(".")[0] if kind else key for key in keys}
    found = {name.removesuffix(ends) for name in names if name.endswith(ends)}
    fit = " or ".join(repr(prefix) for prefix in sorted(found) if prefix[-1:] in ("", "."))
    return f", or give {option}={fit}" if fit else ""


def tied_error(kind: type[OffloadError], one: str, other: str) -> OffloadError:
    """Build the error for two names of one memory whose values differ."""
    return kind(
        f"{one} and {other}",
        reason="their values differ, and here both are one tensor, such as tied weights",
        remedy="untie them in the model, as they were when they were saved",
    )
