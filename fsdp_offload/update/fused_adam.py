"""Adam and AdamW with ``fused=True``, called without the class around it.

[Note: direct Adam]
The class collects its parameters, gradients and state anew in every step, groups them by device
and dtype and checks what cannot change between the steps of a bucket. For a bucket that costs
several times what the two calls cost that all of it ends in: ``torch._foreach_add_`` on the step
counts and ``torch._fused_adam_`` (``_fused_adamw_``). Here the lists are made once, and these
calls get what ``torch.optim.adam._fused_adam`` (torch 2.11 to 2.13) would pass. Whatever is out
of the ordinary is left to the class: see :meth:`DirectAdam.make` and :func:`settings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from .params import SliceState
from .schema import raw_step, torch_class

_AVERAGE, _SQUARE, _LARGEST = "exp_avg", "exp_avg_sq", "max_exp_avg_sq"
_STATE: Final = {"step", _AVERAGE, _SQUARE}
_REAL: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Call:
    """Pieces of one group and one dtype: one call."""

    group: int
    positions: list[int]  # in the bucket
    parameters: list[Tensor]
    averages: list[Tensor]
    squares: list[Tensor]
    largest: list[Tensor]  # empty without amsgrad
    steps: list[Tensor]
    dtype: torch.dtype


class DirectAdam:
    """The direct calls for the slices of one bucket; :meth:`make` says for which."""

    def __init__(self, slices: Sequence[SliceState], device: torch.device) -> None:
        self._slices, self._device = slices, device
        self.refresh()

    @classmethod
    def make(cls, optimizer: Optimizer, slices: Sequence[SliceState]) -> DirectAdam | None:
        """For ``torch.optim.Adam`` or ``AdamW`` with torch's own step, over flat real
        tensors of one device; None for everything else."""
        step = raw_step(type(optimizer))
        is_torch_step = (step.__module__, step.__qualname__) == ("torch.optim.adam", "Adam.step")
        if torch_class(optimizer) not in (Adam, AdamW) or not is_torch_step or not slices:
            return None
        device = slices[0].tensor.device
        usual = all(
            type(sliced.tensor) is Tensor
            and sliced.param.schema.elementwise
            and sliced.tensor.device == device
            and sliced.tensor.dtype in _REAL
            and sliced.state.keys() - {_LARGEST} == _STATE
            and sliced.state["step"].device == device
            and all(
                sliced.state[name].dtype == sliced.tensor.dtype
                for name in sliced.state.keys() - {"step"}
            )
            for sliced in slices
        )
        return cls(slices, device) if usual else None

    def refresh(self) -> None:
        """Collect the tensors of the slices: at construction, and when they were bound anew."""
        positions: dict[tuple[int, torch.dtype, bool], list[int]] = {}
        for position, sliced in enumerate(self._slices):
            key = (sliced.param.group, sliced.tensor.dtype, _LARGEST in sliced.state)
            positions.setdefault(key, []).append(position)
        self._calls = [
            self._call_of(key[0], some) for key, some in sorted(positions.items(), key=_by)
        ]

    def _call_of(self, group: int, positions: list[int]) -> _Call:
        slices = [self._slices[position] for position in positions]
        return _Call(
            group,
            positions,
            [sliced.tensor for sliced in slices],
            [sliced.state[_AVERAGE] for sliced in slices],
            [sliced.state[_SQUARE] for sliced in slices],
            [sliced.state[_LARGEST] for sliced in slices if _LARGEST in sliced.state],
            [sliced.state["step"] for sliced in slices],
            slices[0].tensor.dtype,
        )

    def run(
        self,
        gradients: Sequence[Tensor | None],
        groups: Sequence[Mapping[str, Any]],
        overrides: Mapping[int, Mapping[str, Any]],
    ) -> bool:
        """Update all slices that have a gradient; False, and nothing done, if the class has to."""
        for sliced, gradient in zip(self._slices, gradients, strict=True):
            if gradient is None:
                continue
            if not sliced.stepped or gradient.dtype != sliced.tensor.dtype:
                return False
        calls = []
        for call in self._calls:
            group = groups[call.group]
            if call.group in overrides:
                group = {**group, **overrides[call.group]}
            values = settings(group, self._device)
            if values is None or values["amsgrad"] != bool(call.largest):
                return False
            calls.append((call, values, bool(group["decoupled_weight_decay"])))
        with torch.no_grad():
            for call, values, decoupled in calls:
                some = [gradients[position] for position in call.positions]
                _call(call, some, values, decoupled)
        return True


def _by(entry: tuple[tuple[int, torch.dtype, bool], list[int]]) -> tuple[int, int]:
    """Groups in order, as the class takes them; within one, in the order of the bucket."""
    return entry[0][0], entry[1][0]


def _call(
    call: _Call, gradients: list[Tensor | None], values: dict[str, Any], decoupled: bool
) -> None:
    lists: list[list[Any]] = [
        call.parameters,
        gradients,
        call.averages,
        call.squares,
        call.largest,
        call.steps,
    ]
    if any(gradient is None for gradient in gradients):
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if not present:
            return
        lists = [[some[i] for i in present] if some else [] for some in lists]
    torch._foreach_add_(lists[-1], 1)
    function: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    function(*lists, **values, grad_scale=None, found_inf=None)


def settings(group: Mapping[str, Any], device: torch.device) -> dict[str, Any] | None:
    """Keyword arguments of the fused call; None if the class would do more than pass them on."""
    lr = group["lr"]
    beta1, beta2 = group["betas"]
    if group["fused"] is not True or group["foreach"] or group["differentiable"]:
        return None
    if group["capturable"] or isinstance(beta1, Tensor) or isinstance(beta2, Tensor):
        return None
    # A tensor elsewhere is moved by the class.
    if isinstance(lr, Tensor) and (lr.dim() or lr.device not in (device, torch.device("cpu"))):
        return None
    return {
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": group["weight_decay"],
        "eps": group["eps"],
        "amsgrad": group["amsgrad"],
        "maximize": group["maximize"],
    }
