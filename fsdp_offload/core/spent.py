"""Stand-ins for consumed gradients: tensors that raise on every use.

With ``overlap="backward"`` an update consumes a gradient during backward. ``None`` in its place
would silently turn clipping, unscaling and logging into no-ops, and a second backward would
silently start afresh where torch accumulates.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Final, NoReturn, Self

import torch
from torch import Tensor

from .errors import SpentGradientError

_FORWARD: Final = 'use overlap="forward", which leaves gradients alone until step()'
_USERS: Final = {
    "clip_grad_norm_": "clip_grad_norm_",
    "clip_grads_with_norm_": "clip_grad_norm_",
    "clip_grad_value_": "clip_grad_value_",
    "_unscale_grads_": "GradScaler.unscale_",
}
"""Functions that change all gradients, and the names that callers know."""


class SpentGradient(Tensor):
    """Stands for a gradient that the optimizer has consumed; holds no memory.

    Args:
        parameter: gives shape, dtype and device.
        fqn: the parameter's, for errors.
    """

    fqn: str

    @staticmethod
    def __new__(cls, parameter: Tensor, fqn: str) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            dtype=parameter.dtype,
            device=parameter.device,
            requires_grad=False,
        )
        made.fqn = fqn
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        owner = getattr(func, "__self__", None)  # of a property, such as Tensor.shape
        name = getattr(owner if func.__name__ == "__get__" else func, "__name__", str(func))
        found = _find([args, list((kwargs or {}).values())])
        raise _error(name, "a parameter" if found is None else found.fqn)

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        """Refuse attributes that only DTensors have."""
        if name.startswith("__") or name == "fqn":
            raise AttributeError(name)
        raise _error(name, self.fqn)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SpentGradient({self.fqn})"


def is_spent(gradient: Tensor | None) -> bool:
    """Whether ``gradient`` is such a stand-in."""
    return isinstance(gradient, SpentGradient)


def _find(values: Any) -> SpentGradient | None:
    if isinstance(values, SpentGradient):
        return values
    if isinstance(values, list | tuple):
        return next((found for value in values if (found := _find(value)) is not None), None)
    return None


def _error(use: str, fqn: str) -> SpentGradientError:
    what = _user() or f"{use} of the gradient of {fqn}"
    return SpentGradientError(
        f'{what} with overlap="backward"',
        reason=f"backward has already used the gradient of {fqn} for its update",
        remedy=_FORWARD,
    )


def another_backward_error(fqn: str, *, is_stepped: bool) -> SpentGradientError:
    """Build the error for another backward() while ``.grad`` of ``fqn`` is consumed.

    Args:
        fqn: the first such parameter's.
        is_stepped: whether the caller has called ``step()`` since.
    """
    if is_stepped:
        return SpentGradientError(
            "another backward() after step()",
            reason=f"step() has consumed the gradient of {fqn}; the gradients of this "
            "backward() were dropped",
            remedy=f"call zero_grad() after step(), or {_FORWARD}",
        )
    return SpentGradientError(
        'several backward() calls per step() with overlap="backward"',
        reason=f"the first one used the gradient of {fqn} for its update; the "
        "gradients of this backward() were dropped",
        remedy="run all but the last backward() inside `with "
        f"optimizer.accumulate():`, or {_FORWARD}",
    )


def changed_gradient_error(fqn: str) -> SpentGradientError:
    """Build the error for a caller that set ``.grad`` of ``fqn`` between its update and
    ``step()``."""
    return SpentGradientError(
        f"step() after .grad of {fqn} was replaced or cleared since backward()",
        reason='overlap="backward" had already updated the parameter; the next '
        "step() ends this iteration",
        remedy=f"change gradients after step(), or {_FORWARD}",
    )


def _user() -> str | None:
    # The operation's own name, such as _foreach_norm, tells a caller little.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if found := _USERS.get(frame.f_code.co_name):
            return found
        frame = frame.f_back
    return None
