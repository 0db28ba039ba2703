"""What ``.grad`` is while the optimizer owns the gradient: a tensor whose every use raises.

With ``overlap="forward"`` and ``"backward"`` a gradient is read after the call that took it, and
may be gone at any time. ``None`` in its place would make clipping, unscaling and logging silent
no-ops, and a second backward would silently start anew where torch accumulates.
"""

from __future__ import annotations

from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from .errors import OffloadError, SpentGradientError


class StandIn(Tensor):
    """Stands for the gradient of one parameter that is not there; holds no memory."""

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
        cls._refuse(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        cls._refuse(func, args, kwargs)

    @classmethod
    def _refuse(cls, func: Any, args: Any, kwargs: Any) -> NoReturn:
        owner = getattr(func, "__self__", None)  # of a property, such as Tensor.shape
        name = getattr(owner if func.__name__ == "__get__" else func, "__name__", str(func))
        found = _find([args, list((kwargs or {}).values())])
        raise found.refusal(name) if found is not None else cls.refusal_of(name, "a parameter")

    @classmethod
    def refusal_of(cls, use: str, fqn: str) -> OffloadError:
        """The error of somebody who used the gradient of ``fqn``."""
        raise NotImplementedError

    def refusal(self, use: str) -> OffloadError:
        """The error of somebody who used this one."""
        return self.refusal_of(use, self.fqn)

    def __getattr__(self, name: str) -> Any:
        """What tensors do not have, but DTensors do."""
        if name.startswith("__") or name == "fqn":
            raise AttributeError(name)
        raise self.refusal(name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.fqn})"


class SpentGradient(StandIn):
    """Stands for a gradient that the optimizer has consumed."""

    @classmethod
    def refusal_of(cls, use: str, fqn: str) -> OffloadError:
        """See :class:`StandIn`."""
        return spent_error(use, fqn)


def _find(values: Any) -> StandIn | None:
    if isinstance(values, StandIn):
        return values
    if isinstance(values, list | tuple):
        return next((found for value in values if (found := _find(value)) is not None), None)
    return None


def spent_error(use: str, fqn: str) -> SpentGradientError:
    """The error of somebody who used the gradient of ``fqn``."""
    return SpentGradientError(
        f"{use} with the gradient of {fqn}",
        reason="the optimizer has consumed it: it updates parameters while gradients arrive "
        '(overlap="backward") or after step() has returned (overlap="forward")',
        remedy="call zero_grad() after step(); accumulate inside optimizer.accumulate(); clip with "
        'overlap="forward", before step(); read gradients before step(), or use overlap="step"',
    )


def is_spent(gradient: Tensor | None) -> bool:
    """Whether ``gradient`` is such a stand-in."""
    return isinstance(gradient, SpentGradient)
