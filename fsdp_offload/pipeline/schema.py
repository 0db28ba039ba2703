"""What state an optimizer class keeps per parameter, found by running it once on scratch data.

[Note: schema probe]
The class's own step runs twice on a 192-element scratch parameter with different data. A
recording dict notes each state value as it was when first set. Values are classified by shape:
*like* the parameter, a *scalar* (0-dim tensor), a python *number*, or *other*. For classes that
are not torch's own the probe also decides whether the update is element-wise: a 1-D run must
equal a 2-D run and runs cut at 64 and at 128 elements, bit for bit, in parameters and state.
State that vectors and matrices do not share is *other*. Such a class also runs on two parameters,
together and each alone: if that differs, they are *coupled* (a norm over all gradients, noise
from one generator) and need one call for all.
Lazily created state is not always zero (SGD's first momentum, Rprop, ASGD, NAdam), so initial
values are recorded for display only and the class initialises its state itself.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import shards
from ..errors import StateSchemaError, UnsupportedOptimizerError

PROBE_NUMEL: Final = 192
FUSED_ON_CPU: Final = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.Adagrad,
)
"""Classes with a fused CPU kernel (torch/optim, torch 2.11 to 2.13)."""

_VECTOR: Final = (PROBE_NUMEL,)
_MATRIX: Final = (16, 12)
_WHOLE: Final = ("Muon", "Adafactor")
_REFUSED: Final = {
    "LBFGS": "it evaluates its closure several times per step over the full parameter vector",
    "SparseAdam": "it updates only the rows of sparse gradients, which cannot be cut into buckets",
}
# Attributes of an instance that a shadow must not share: its state, what a GradScaler leaves
# behind for one call, and the methods that schedulers and this package put on the instance.
_PRIVATE: Final = frozenset(
    "state param_groups step grad_scale found_inf zero_grad state_dict load_state_dict "
    "add_param_group".split()
)

Role = Literal["like", "scalar", "number", "other"]


@dataclass(frozen=True)
class StateKind:
    """One entry of a parameter's state."""

    name: str
    role: Role
    dtype: torch.dtype | None = None  # None for a number
    on_device: bool = True  # where a scalar lives
    initial: complex = 0.0  # shown before the first step, where it is the same everywhere


@dataclass(frozen=True)
class Schema:
    """State of one parameter under one group's hyper-parameters."""

    kinds: tuple[StateKind, ...]
    elementwise: bool  # may be cut into slices
    eager: bool  # the class makes its state at construction, not at the first step
    coupled: bool = False  # parameters depend on each other, or on what is drawn for others

    def shows_initial(self, kind: StateKind) -> bool:
        """Whether fresh (zeroed) memory is not yet what ``kind`` shows before the first step."""
        return kind.initial != 0 or not any(k.name == "step" for k in self.kinds)

    def role(self, role: Role) -> tuple[StateKind, ...]:
        """The entries of one role, in the class's order."""
        return tuple(kind for kind in self.kinds if kind.role == role)


def host_flags(group: dict[str, Any]) -> dict[str, Any]:
    """Values of a group that must differ on the CPU: ``capturable`` is for accelerators only."""
    return {"capturable": False} if group.get("capturable") else {}


def is_torch_class(optimizer: Optimizer) -> bool:
    """Whether the class is one of ``torch.optim``'s own: its behaviour is known."""
    cls = type(optimizer)
    return getattr(torch.optim, cls.__name__, None) is cls


def works_on_matrices(optimizer: Optimizer) -> bool:
    """Whether a class of ``torch.optim`` updates whole matrices, not single elements."""
    return type(optimizer).__name__ in _WHOLE


def check_supported(optimizer: Optimizer) -> None:
    """Refuse what cannot be offloaded exactly.

    Raises:
        UnsupportedOptimizerError: LBFGS, SparseAdam (and subclasses), ``differentiable=True``.
    """
    for base in type(optimizer).__mro__:
        if base.__module__.startswith("torch.optim") and base.__name__ in _REFUSED:
            raise UnsupportedOptimizerError(
                f"optimizer {type(optimizer).__name__}",
                reason=_REFUSED[base.__name__],
                remedy="keep it unwrapped, or use a dense optimizer such as AdamW",
            )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedOptimizerError(
            "differentiable=True",
            reason="autograd cannot record an update that runs in reused staging memory",
            remedy="build the optimizer with differentiable=False",
        )


def signature(group: dict[str, Any]) -> tuple[tuple[str, object], ...]:
    """The part of a group's hyper-parameters on which its schema may depend.

    Flags and whether a number is zero decide which state exists (amsgrad, momentum, centered);
    the magnitude does not.
    """
    return tuple(
        (name, value if isinstance(value, bool | str | None) else bool(value))
        for name, value in sorted(group.items())
        if name not in ("params", "lr", "initial_lr", "param_names")
        and isinstance(value, bool | int | float | str | None)
    )


# --------------------------------------------------------------------------- calling the class


def raw_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """The class's step without torch's hook and profiling wrapper (one level only: the next one
    would drop ``no_grad``). Source: ``Optimizer.profile_hook_step``."""
    step = cls.step
    if getattr(step, "hooked", False):
        return step.__wrapped__  # type: ignore[attr-defined,no-any-return]
    return step


def make_shadow(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An instance of the same class with the same settings, its own groups and empty state."""
    shadow = object.__new__(type(optimizer))
    for name, value in public_attributes(optimizer).items():
        shadow.__dict__[name] = OrderedDict() if name.endswith("_hooks") else own_copy(value)
    shadow.__dict__["state"] = defaultdict(dict)
    shadow.__dict__["param_groups"] = groups
    return shadow


def own_copy(value: Any) -> Any:
    """A copy of what a step may change in place, containers and single numbers in tensors: such
    changes of a shadow must not reach the optimizer."""
    if isinstance(value, Tensor):
        return value.clone() if value.numel() == 1 else value
    return copy.copy(value) if isinstance(value, list | dict | set) else value


def public_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Instance attributes that a shadow copies."""
    return {name: v for name, v in optimizer.__dict__.items() if name not in _PRIVATE}


# --------------------------------------------------------------------------- probing


class _Recorder(dict):  # type: ignore[type-arg]
    """State dict of the probe: keeps a copy of each value as it was when first set."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.first:
            self.first[name] = value.clone() if isinstance(value, Tensor) else value
        super().__setitem__(name, value)


def probe(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> Schema:
    """The schema of ``optimizer``'s class under ``group`` for parameters of ``dtype``.

    Costs 2 to 4 ms. The optimizer, its parameters and the random state are left as they were.

    Raises:
        StateSchemaError: the class fails on a dense scratch parameter, or keeps a kind of state
            that is neither tensor nor number.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        if is_torch_class(optimizer):
            whole = works_on_matrices(optimizer)
            shape = _MATRIX if whole else _VECTOR
            kinds, eager = _kinds(optimizer, group, shape, dtype, device)
            return Schema(kinds, elementwise=not whole, eager=eager)
        try:
            kinds, eager = _kinds(optimizer, group, _VECTOR, dtype, device)
        except StateSchemaError:  # some classes take matrices only
            kinds, eager = _kinds(optimizer, group, _MATRIX, dtype, device)
            coupled = _is_coupled(optimizer, group, dtype, device, eager)
            return Schema(kinds, elementwise=False, eager=eager, coupled=coupled)
        of_matrix, _ = _kinds(optimizer, group, _MATRIX, dtype, device)
        kinds = _for_all_shapes(kinds, of_matrix)
        # A norm over all gradients may have the same bits however one parameter is cut.
        coupled = _is_coupled(optimizer, group, dtype, device, eager)
        elementwise = not coupled and _is_elementwise(optimizer, group, dtype, device, kinds, eager)
    return Schema(kinds, elementwise=elementwise, eager=eager, coupled=coupled)


def _kinds(
    optimizer: Optimizer,
    group: dict[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[tuple[StateKind, ...], bool]:
    """The state of a scratch parameter of ``shape``, and whether it is made at construction."""

    def run(seed: int, seed_state: dict[str, Any] | None) -> _Run:
        return _run(optimizer, group, [shape], dtype, device, seed, seed_state)

    try:
        try:
            runs, eager = [run(seed, None) for seed in (1, 2)], False
        except KeyError:
            if not (existing := _existing_state(optimizer, group, dtype)):
                raise
            runs, eager = [run(seed, existing) for seed in (1, 2)], True
    except Exception as error:
        raise StateSchemaError(
            f"optimizer {type(optimizer).__name__}",
            reason=f"its step failed on a {shape} scratch parameter: {error!r}",
            remedy="offload only optimizers whose step works on any dense parameter",
        ) from error
    return _classify(optimizer, runs, shape, device), eager


def _for_all_shapes(
    of_vector: tuple[StateKind, ...], of_matrix: tuple[StateKind, ...]
) -> tuple[StateKind, ...]:
    """Kinds that vectors and matrices do not share (factored moments) are of unknown shape."""
    shared = {(k.name, k.role) for k in of_vector} & {(k.name, k.role) for k in of_matrix}
    every = {kind.name: kind for kind in (*of_vector, *of_matrix)}
    return tuple(
        kind if (kind.name, kind.role) in shared else replace(kind, role="other")
        for kind in every.values()
    )


def _existing_state(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype
) -> dict[str, Any] | None:
    """State that the class made for one parameter of the group at construction; what has the
    parameter's dtype, in ``dtype``. Taken from a shard that is not empty, where there is one, so
    that ranks with empty shards come to the same verdict."""
    for parameter in sorted(group["params"], key=lambda p: shards.local(p).numel() == 0):
        if state := optimizer.state.get(parameter):
            return {
                name: shards.local(v).to(
                    dtype if v.dtype == parameter.dtype and v.dim() else v.dtype
                )
                if isinstance(v, Tensor)
                else v
                for name, v in state.items()
            }
    return None


@dataclass
class _Run:
    parameters: list[Tensor]
    states: list[_Recorder]
    group: dict[str, Any]


def _run(
    optimizer: Optimizer,
    group: dict[str, Any],
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    seed_state: dict[str, Any] | None,
    steps: int = 1,
    present: tuple[bool, ...] | None = None,
) -> _Run:
    """Steps of the class on scratch parameters that together hold the same 192 numbers;
    ``present``: which of them have a gradient (default: all)."""
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randn(PROBE_NUMEL, generator=generator, dtype=torch.float64)]
    numbers += [torch.randn(PROBE_NUMEL, generator=generator, dtype=torch.float64) for _ in "ab"]
    flat, *gradients = (n.to(dtype).to(device) for n in numbers)
    cuts = [torch.Size(shape).numel() for shape in shapes]
    scratch = [p.clone().view(s) for p, s in zip(flat.split(cuts), shapes, strict=True)]
    copied = {name: own_copy(v) for name, v in group.items() if name != "params"}
    copied["params"] = scratch
    shadow = make_shadow(optimizer, [copied])
    shadow.state = defaultdict(_Recorder)
    for parameter in scratch:
        for name, value in (seed_state or {}).items():
            shadow.state[parameter][name] = _scratch_value(value, parameter)
    for gradient in gradients[:steps]:
        pieces = zip(
            scratch, gradient.split(cuts), shapes, present or [True] * len(cuts), strict=True
        )
        for parameter, g, shape, has_gradient in pieces:
            parameter.grad = g.clone().view(shape) if has_gradient else None
        raw_step(type(optimizer))(shadow)
    return _Run(scratch, [shadow.state[p] for p in scratch], copied)


def _scratch_value(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        return value.clone()
    first = value.flatten()[:1]
    return torch.full_like(parameter, first.item() if first.numel() else 1.0, dtype=value.dtype)


def _classify(
    optimizer: Optimizer, runs: list[_Run], shape: tuple[int, ...], device: torch.device
) -> tuple[StateKind, ...]:
    kinds = []
    first, second = (run.states[0].first for run in runs)
    for name, value in runs[0].states[0].items():
        if isinstance(value, bool | int | float):
            kinds.append(StateKind(name, "number"))
        elif isinstance(value, Tensor):
            role: Role = "other"
            if tuple(value.shape) == shape:
                role = "like"
            elif value.dim() == 0:
                role = "scalar"
            initial = _constant(first.get(name), second.get(name))
            same_device = value.device.type == device.type
            kinds.append(StateKind(name, role, value.dtype, same_device, initial))
        else:
            raise StateSchemaError(
                f"state {name!r} of type {type(value).__name__} in {type(optimizer).__name__}",
                reason="only tensors and numbers can be kept in flat memory",
                remedy="keep this optimizer unwrapped",
            )
    if not any(kind.name == "step" for kind in kinds):  # see state.write
        kinds = [replace(k, initial=-0.0) if k.initial == 0 else k for k in kinds]
    return tuple(kinds)


def _constant(a: Any, b: Any) -> complex:
    """The one number that both recorded tensors are filled with, else 0."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.numel() == 0:
        return 0.0
    number = a.flatten()[0]
    if bool((a == number).all()) and bool((b == number).all()):
        return number.item()
    return 0.0


def _is_elementwise(
    optimizer: Optimizer,
    group: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    kinds: tuple[StateKind, ...],
    eager: bool,
) -> bool:
    """Whether the update of each element depends on that element alone, bit for bit."""
    if any(kind.role == "other" for kind in kinds):
        return False
    seed_state = _existing_state(optimizer, group, dtype) if eager else None
    outcomes = []
    for shapes in ([(192,)], [(12, 16)], [(64,), (128,)], [(128,), (64,)]):
        try:
            run = _run(optimizer, group, shapes, dtype, device, 3, seed_state, steps=2)  # type: ignore[arg-type]
        except Exception:  # any failure on a cut means: not element-wise
            return False
        outcomes.append(_flatten(run, kinds))
    return all(
        set(outcome) == set(outcomes[0])
        and all(_same(outcome[name], outcomes[0][name]) for name in outcome)
        for outcome in outcomes[1:]
    )


def _is_coupled(
    optimizer: Optimizer,
    group: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    eager: bool,
) -> bool:
    """Whether a parameter is updated otherwise when another one is updated with it."""
    seed_state = _existing_state(optimizer, group, dtype) if eager else None
    shapes: list[tuple[int, ...]] = [(8, 12), (8, 12)]
    both, *alone = (
        _run(optimizer, group, shapes, dtype, device, 4, seed_state, steps=2, present=present)
        for present in ((True, True), (True, False), (False, True))
    )
    return not all(
        _same(run.parameters[index], both.parameters[index])
        and run.states[index].keys() == both.states[index].keys()
        and all(_same(v, both.states[index][name]) for name, v in run.states[index].items())
        for index, run in enumerate(alone)
    )


def _flatten(run: _Run, kinds: tuple[StateKind, ...]) -> dict[str, Any]:
    """Everything a run produced, free of how it was cut."""
    result: dict[str, Any] = {"": torch.cat([p.flatten() for p in run.parameters])}
    for kind in kinds:
        values = [state[kind.name] for state in run.states]
        if kind.role == "like":
            result[kind.name] = torch.cat([v.flatten() for v in values])
        else:  # all pieces must agree: they stand for one parameter
            result[kind.name] = values[0] if all(_same(v, values[0]) for v in values) else object()
    for name, value in run.group.items():
        if name != "params":
            result[f"group {name}"] = value
    return result


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    return bool(a == b)
