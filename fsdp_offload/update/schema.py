"""The state that an optimizer keeps per parameter: declared for torch's classes, probed for others.

For each class of ``torch.optim``, a table lists the entries that ``_init_group`` makes, in its
order, under a group's hyper-parameters (torch/optim/*.py, the same in 2.11 to 2.15). A subclass
that overrides any method but ``__init__`` does not count as torch's.

No probe can predict what such a class does with a parameter: it may factor large ones, begin a
phase after some steps, or read another parameter's state. So it runs its own step on the device
(``Updates.run_class``), unless the caller passes ``elementwise=True``. Then its step runs once on a
scratch vector, which shows the entries of its state; each must be shaped like the parameter, a
0-dim tensor or a number.

Lazily created state is not always zero (SGD's first momentum, Rprop, ASGD, NAdam). So initial
values only serve for display, and to detect whether state was ever written; the class initialises
its state itself.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.errors import StateSchemaError, UnsupportedOptimizerError

FUSED_ON_CPU: Final = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.Adagrad,
)
"""Classes with a fused CPU kernel (torch/optim, torch 2.11 to 2.15)."""

_SCRATCH_NUMEL: Final = 192
_WHOLE: Final = ("Muon", "Adafactor")
_REFUSED: Final = {
    "LBFGS": "it evaluates its closure several times per step over the full parameter vector",
    "SparseAdam": "it updates only the rows of sparse gradients, which cannot be split "
    "into buckets",
}
# Instance attributes that a shadow must not share: its state, the attributes that a GradScaler sets
# for one call, and methods that schedulers and this package put on the instance.
_PRIVATE: Final = frozenset(
    "state param_groups step grad_scale found_inf zero_grad state_dict load_state_dict "
    "add_param_group".split()
)

Role = Literal["like", "scalar", "number"]


@dataclass(frozen=True)
class StateKind:
    """One entry of a parameter's state."""

    name: str
    role: Role
    dtype: torch.dtype | None = None  # None for a number
    on_device: bool = True  # where a scalar lives
    initial: complex = 0.0  # shown before the first step, if equal in all elements
    option: str = ""  # the hyper-parameter that gives the initial value


@dataclass(frozen=True)
class Schema:
    """State of one parameter under one group's hyper-parameters."""

    kinds: tuple[StateKind, ...]
    elementwise: bool  # may be cut into slices
    eager: bool = False  # the class makes its state at construction, not at the first step

    def in_group(self, group: dict[str, Any]) -> Schema:
        """Return this schema with the initial values of ``group``: groups of one signature may
        differ in them."""
        kinds = tuple(
            replace(kind, initial=_initial(group[kind.option], kind.dtype)) if kind.option else kind
            for kind in self.kinds
        )
        return self if kinds == self.kinds else replace(self, kinds=kinds)

    def role(self, role: Role) -> tuple[StateKind, ...]:
        """Return the entries of one role, in the class's order."""
        return tuple(kind for kind in self.kinds if kind.role == role)


def host_flags(group: dict[str, Any]) -> dict[str, Any]:
    """Return group values that must differ on the CPU: ``capturable`` only suits accelerators."""
    return {"capturable": False} if group.get("capturable") else {}


def host_overrides(
    optimizer: Optimizer, group: dict[str, Any], compute: torch.dtype
) -> dict[str, Any]:
    """Return group values for the CPU: the fused kernel if the class has one and the user left the
    choice open.

    Not for half precision, where fused SGD on the CPU skips elements (pytorch #191763).
    """
    left_open = group.get("fused") is None and group.get("foreach") is None
    is_fused = torch_class(optimizer) in FUSED_ON_CPU
    has_kernel = is_fused and compute in (torch.float32, torch.float64)
    return {**host_flags(group), **({"fused": True} if left_open and has_kernel else {})}


def torch_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """Return the class of ``torch.optim`` whose behaviour ``optimizer`` has; None if it is not
    torch's.

    A subclass of torch's may only override the constructor.
    """
    for cls, *bases in (type(optimizer).__mro__[i:] for i in range(len(type(optimizer).__mro__))):
        if getattr(torch.optim, cls.__name__, None) is cls:
            return None if cls is Optimizer else cls
        inherited = {"state", "param_groups"}.union(*map(vars, bases))
        if any(name in inherited for name in vars(cls) if not name.startswith("__")):
            return None
    return None


def is_torch_class(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` behaves as torch's: see :func:`torch_class`."""
    return torch_class(optimizer) is not None


def works_on_matrices(optimizer: Optimizer) -> bool:
    """Whether a class of ``torch.optim`` updates whole matrices, not single elements."""
    cls = torch_class(optimizer)
    return cls is not None and cls.__name__ in _WHOLE


def check_supported(optimizer: Optimizer) -> None:
    """Refuse optimizers that cannot be offloaded exactly.

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
    """Return the part of a group's hyper-parameters that may affect its schema.

    Flags, and whether a number is zero, decide which state exists (amsgrad, momentum, centered);
    magnitudes do not.
    """
    return tuple(
        (name, value if isinstance(value, bool | str | None) else bool(value))
        for name, value in sorted(group.items())
        if name not in ("params", "lr", "initial_lr", "param_names")
        and isinstance(value, bool | int | float | str | None)
    )


# --------------------------------------------------------------------------- calling the class


def raw_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """Unwrap the class's step from torch's hook and profiling wrapper (one level only: the next one
    is ``no_grad``). Source: ``Optimizer.profile_hook_step``."""
    step = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def make_shadow(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Make an instance of the same class with the same settings, its own groups and empty state."""
    shadow = object.__new__(type(optimizer))
    for name, value in public_attributes(optimizer).items():
        shadow.__dict__[name] = own_copy(value)
    for name in optimizer.__dict__:
        if name.endswith("_hooks"):
            shadow.__dict__[name] = OrderedDict()
    shadow.__dict__["state"] = defaultdict(dict)
    shadow.__dict__["param_groups"] = groups
    return shadow


def own_copy(value: Any) -> Any:
    """Copy containers and one-element tensors, also nested ones, which a step may change in place:
    a shadow's changes must not reach the optimizer."""
    return replaced(value, lambda tensor: tensor.clone() if tensor.numel() == 1 else tensor)


def replaced(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Copy ``value``, a tensor or a container of tensors, with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [replaced(each, change) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list | dict):
        made = copy.copy(value)
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            made[key] = replaced(each, change)
        return made
    return copy.copy(value) if isinstance(value, set) else value


def public_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the instance attributes that a shadow copies. Not hooks, which may hold the
    wrapper."""
    return {
        name: value
        for name, value in optimizer.__dict__.items()
        if name not in _PRIVATE and not name.endswith("_hooks")
    }


# --------------------------------------------------------------------------- torch's own classes


class _Entry(NamedTuple):
    """An entry of state that a class of ``torch.optim`` makes per parameter."""

    name: str
    role: Role = "like"
    option: str = ""  # made only if this hyper-parameter is not zero
    initial: float | str | None = None  # or the hyper-parameter that gives it; None: zero
    always_on_device: bool = False  # a scalar that no flag moves to the CPU


_STEP: Final = _Entry("step", "scalar")
_AVERAGES: Final = _Entry("exp_avg"), _Entry("exp_avg_sq")
_DECLARED: Final[dict[str, tuple[_Entry, ...]]] = {
    "Adadelta": (_STEP, _Entry("square_avg"), _Entry("acc_delta")),
    "Adagrad": (_STEP, _Entry("sum", initial="initial_accumulator_value")),
    "Adam": (_STEP, *_AVERAGES, _Entry("max_exp_avg_sq", option="amsgrad")),
    "AdamW": (_STEP, *_AVERAGES, _Entry("max_exp_avg_sq", option="amsgrad")),
    "Adamax": (_STEP, _Entry("exp_avg"), _Entry("exp_inf")),
    "ASGD": (
        _Entry("step", "scalar", always_on_device=True),
        _Entry("eta", "scalar", initial="lr", always_on_device=True),
        _Entry("mu", "scalar", initial=1.0, always_on_device=True),
        _Entry("ax"),
    ),
    "NAdam": (_STEP, _Entry("mu_product", "scalar", initial=1.0), *_AVERAGES),
    "RAdam": (_STEP, *_AVERAGES),
    "RMSprop": (
        _STEP,
        _Entry("square_avg"),
        _Entry("momentum_buffer", option="momentum"),
        _Entry("grad_avg", option="centered"),
    ),
    "Rprop": (_STEP, _Entry("prev"), _Entry("step_size", initial="lr")),
    "SGD": (_Entry("momentum_buffer", option="momentum"),),
    "Muon": (_Entry("momentum_buffer"),),
}


def _declared_kinds(
    entries: Sequence[_Entry], group: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> tuple[StateKind, ...]:
    # Source: torch.optim.optimizer._get_scalar_dtype.
    wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
    scalar_dtype = torch.float64 if wide else torch.float32
    # torch keeps scalars on the CPU unless a kernel reads them.
    moves = bool(group.get("capturable") or group.get("fused")) or device.type == "cpu"
    zero = _zero("step" in (entry.name for entry in entries))
    kinds = []
    for name, role, option, given, always_on_device in entries:
        if option and not group[option]:
            continue
        value, of_option = (group[given], given) if isinstance(given, str) else (given or zero, "")
        is_scalar = role == "scalar"
        on_device = moves or always_on_device or not is_scalar
        own_dtype = scalar_dtype if is_scalar else dtype
        initial = _initial(value, own_dtype)
        kinds.append(StateKind(name, role, own_dtype, on_device, initial, of_option))
    return tuple(kinds)


def _initial(value: Any, dtype: torch.dtype | None) -> complex:
    number = float(value)
    is_complex = dtype is not None and dtype.is_complex and number
    return complex(number, number) if is_complex else number


def _zero(has_step: bool) -> float:
    """Return the value before the first step: a negative zero if state has no step count."""
    return 0.0 if has_step else -0.0


@functools.cache
def makes_its_state(cls: type[Optimizer]) -> bool:
    """Whether ``step`` makes missing state, which Adagrad's does not in every version."""
    with torch.inference_mode(False), torch.device("cpu"), torch.no_grad():
        parameter = torch.zeros(1)
        parameter.grad = torch.zeros(1)
        optimizer = cls([parameter])  # type: ignore[call-arg]
        optimizer.state.clear()
        try:
            raw_step(cls)(optimizer)
        except KeyError:
            return False
    return True


def has_schema(optimizer: Optimizer) -> bool:
    """Whether the entries of state are known in advance; not for Adafactor, which keeps factors of
    matrices, nor for classes that torch may add."""
    cls = torch_class(optimizer)
    return cls is None or cls.__name__ in _DECLARED


def schema_of(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> Schema:
    """Return the schema of ``optimizer``'s class under ``group`` for parameters of ``dtype``.

    Probes a class that is not torch's, which takes 1 to 2 ms and leaves the optimizer, its
    parameters and the random state unchanged.

    Raises:
        UnsupportedOptimizerError: ``capturable=True`` on the CPU.
        StateSchemaError: a probed class fails on a dense scratch vector, or keeps an entry that is
            neither shaped like the parameter nor a single number.
    """
    cls = torch_class(optimizer)
    if cls is not None:
        if group.get("capturable") and not group.get("fused") and device.type == "cpu":
            raise UnsupportedOptimizerError(
                "capturable=True with parameters on the CPU",
                reason="only steps on an accelerator can be captured",
                remedy="build the optimizer with capturable=False",
            )
        kinds = _declared_kinds(_DECLARED[cls.__name__], group, dtype, device)
        eager = cls.__name__ == "Adagrad" and not makes_its_state(cls)  # type: ignore[arg-type]
        return Schema(kinds, elementwise=cls.__name__ not in _WHOLE, eager=eager)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        kinds = _found_kinds(optimizer, group, dtype, device)
    return Schema(kinds, elementwise=True)


# --------------------------------------------------------------------------- other classes


def _found_kinds(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> tuple[StateKind, ...]:
    """Probe the state of a scratch vector after one step of the class."""
    scratch = torch.ones(_SCRATCH_NUMEL, dtype=dtype, device=device)
    scratch.grad = torch.ones_like(scratch)
    try:
        copied = {name: own_copy(v) for name, v in group.items() if name != "params"}
        shadow = make_shadow(optimizer, [{**copied, "params": [scratch]}])
        raw_step(type(optimizer))(shadow)
    except Exception as error:
        raise StateSchemaError(
            f"optimizer {type(optimizer).__name__} with elementwise=True",
            reason=f"its step failed on a vector of {_SCRATCH_NUMEL} elements: {error!r}",
            remedy="leave out elementwise=True: the class then runs its own step on the device",
        ) from error
    state: dict[str, Any] = shadow.state[scratch]
    return tuple(_kind(optimizer, state, name, device) for name in state)


def _kind(
    optimizer: Optimizer, state: dict[str, Any], name: str, device: torch.device
) -> StateKind:
    value = state[name]
    initial = _zero("step" in state)
    if isinstance(value, bool | int | float):
        return StateKind(name, "number", initial=initial)
    if isinstance(value, Tensor) and tuple(value.shape) in ((), (_SCRATCH_NUMEL,)):
        role: Role = "like" if value.dim() else "scalar"
        return StateKind(name, role, value.dtype, value.device.type == device.type, initial)
    found = type(value).__name__
    if isinstance(value, Tensor):
        found += f" of shape {tuple(value.shape)}"
    raise StateSchemaError(
        f"state {name!r} of {type(optimizer).__name__} with elementwise=True",
        reason=f"a {found} for a vector of {_SCRATCH_NUMEL} elements: neither "
        "shaped like the parameter nor a single number",
        remedy="leave out elementwise=True: the class then runs its own step on the device",
    )
