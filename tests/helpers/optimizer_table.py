"""Every dense optimizer of ``torch.optim``: a line for each kind of state, flag and branch.

Another lr, eps or betas is torch's arithmetic alone; random sequences draw them, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

TENSOR_LR: Final = torch.tensor(0.001)

SETTINGS: Final[dict[str, list[dict[str, Any]]]] = {
    "Adadelta": [{}, {"weight_decay": 0.1, "maximize": True}],
    "Adafactor": [{}, {"weight_decay": 0.1, "maximize": True}],
    "Adagrad": [
        {},
        {"lr": TENSOR_LR},
        {"weight_decay": 0.1, "lr_decay": 0.5},
        {"initial_accumulator_value": 0.3, "lr_decay": 0.1, "maximize": True},
    ],
    "Adam": [
        {},
        {"lr": TENSOR_LR, "amsgrad": True},
        {"decoupled_weight_decay": True, "weight_decay": 0.1},
        {"weight_decay": 0.1, "amsgrad": True, "maximize": True},
    ],
    "AdamW": [
        {},
        {"lr": TENSOR_LR},
        {"weight_decay": 0.1, "maximize": True},
        {"weight_decay": 0.1, "amsgrad": True},
    ],
    "Adamax": [{}, {"weight_decay": 0.1, "maximize": True}],
    "ASGD": [
        {},
        {"t0": 2, "lambd": 0.1, "alpha": 0.5},  # averages from an early step on
        {"weight_decay": 0.1, "maximize": True},
    ],
    "Muon": [
        {},
        {"lr": TENSOR_LR, "weight_decay": 0.2},
        {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
    ],
    "NAdam": [
        {},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"weight_decay": 0.1, "momentum_decay": 6e-3, "maximize": True},
    ],
    "RAdam": [
        {},
        {"betas": (0.5, 0.6)},  # rectified from an early step on
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"weight_decay": 0.1, "maximize": True},
    ],
    "RMSprop": [
        {},
        {"lr": TENSOR_LR},
        {"momentum": 0.9},
        {"weight_decay": 0.1, "centered": True},
        {"weight_decay": 0.1, "centered": True, "momentum": 0.1, "maximize": True},
    ],
    "Rprop": [{}, {"maximize": True}],
    "SGD": [
        {},
        {"lr": TENSOR_LR},
        {"weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5, "maximize": True},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
}

FOREACH: Final = frozenset(SETTINGS) - {"Muon"}
FUSED: Final = frozenset({"Adam", "AdamW", "Adagrad", "SGD"})
"""Classes with a fused CPU kernel. What only CUDA has is left out: ``capturable=True`` fails in
plain torch on CPU tensors, and ``differentiable=True`` is refused when wrapping."""
ELEMENTWISE: Final = frozenset(SETTINGS) - {"Muon", "Adafactor"}
IMPLEMENTATIONS: Final[dict[str, dict[str, Any]]] = {
    "open": {},
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@dataclass(frozen=True)
class Setting:
    """An optimizer class, an implementation of it, and its keyword arguments."""

    name: str
    implementation: str
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        flags = ",".join(f"{k}={_short(v)}" for k, v in self.kwargs.items())
        return f"{self.name}-{self.implementation}-{flags or 'default'}"

    @property
    def cls(self) -> type[Optimizer]:
        return getattr(torch.optim, self.name)

    @property
    def takes_empty(self) -> bool:
        """Plain Adafactor divides by the number of elements."""
        return self.name != "Adafactor"

    def build(self, params: Iterable[Any], **changed: Any) -> Optimizer:
        """A new optimizer; tensors among the arguments are its own."""
        kwargs = {**IMPLEMENTATIONS[self.implementation], **self.kwargs, **changed}
        own = {k: v.clone() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
        return self.cls(params, **own)


def settings(*implementations: str, names: Iterable[str] | None = None) -> list[Setting]:
    """Settings of the named classes (all by default) that run on CPU tensors."""
    return [
        Setting(name, implementation, kwargs)
        for name in (SETTINGS if names is None else sorted(names))
        for implementation in implementations
        if _has(name, implementation)
        for kwargs in SETTINGS[name]
        if _runs(kwargs, implementation)
    ]


def _has(name: str, implementation: str) -> bool:
    where = {"fused": FUSED, "foreach": FOREACH, "for-loop": FOREACH}
    return implementation == "open" or name in where[implementation]


def _runs(kwargs: dict[str, Any], implementation: str) -> bool:
    """torch refuses a tensor lr with foreach=True unless capturable."""
    return implementation != "foreach" or not isinstance(kwargs.get("lr"), Tensor)


def _short(value: object) -> str:
    if isinstance(value, Tensor):
        return f"tensor({value.item():g})"
    return str(value).replace(" ", "")
