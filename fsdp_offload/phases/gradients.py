"""Gradients while parameters are away: dropped, moved, or left alone.

[Note: consumed]
A gradient that is dropped must be one that ``step()`` has consumed. After each step the gradients
that are there are noted, weakly, with their version counters. At a departure a gradient counts as
consumed if it is one of those and nothing was written into it since: another backward makes a new
one, or adds to it in place. One of zeros only, as ``zero_grad(set_to_none=False)`` leaves it, has
nothing to lose.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..core import dtensor
from ..core.errors import AwayError, OffloadError, UnspentGradientError
from ..core.fsdp import Group
from ..core.spent import StandIn
from .guard import WeakHook, parameters_of, remove_all


class AwayGradient(StandIn):
    """Stands for a gradient that is away: every use raises :class:`AwayError`."""

    @classmethod
    def refusal_of(cls, use: str, fqn: str) -> OffloadError:
        """See :class:`StandIn`."""
        return AwayError(
            f"{use} with the gradient of {fqn}",
            reason="it is offloaded, as it was saved with the parameters",
            remedy="reload() first, or drop it: zero_grad(set_to_none=True)",
        )


class Gradients:
    """``.grad`` of all parameters, and what FSDP2 keeps for a later reduction.

    Args:
        policy: ``None``, ``"drop"``, ``"save"`` or ``"keep"``.
        groups: the FSDP2 groups of the model.
        optimizer: whose steps consume gradients.
    """

    def __init__(
        self, policy: str | None, groups: Sequence[Group], optimizer: Optimizer | None
    ) -> None:
        self._policy, self._groups, self._optimizer = policy, groups, optimizer
        self._drops = policy in (None, "drop")
        self._consumed: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by identity
        self._held: list[tuple[Tensor, Tensor, Tensor]] = []
        handles: list[RemovableHandle] = []
        if policy is None and optimizer is not None:
            handles.append(optimizer.register_step_post_hook(WeakHook(self._note_step)))
        self.close = weakref.finalize(self, remove_all, handles)
        """Ends the watching of steps, once."""

    def _note_step(self, *_: object) -> None:
        """A step has just consumed what is there."""
        found = map(dtensor.raw_gradient, parameters_of(self._optimizer))
        self._consumed = {
            id(gradient): (weakref.ref(gradient), _version(gradient))
            for gradient in found
            if gradient is not None and not isinstance(gradient, StandIn)
        }

    def check(self, parameters: Mapping[str, Tensor]) -> None:
        """Refuse to drop what no step has consumed, unless that was asked for.

        Raises:
            UnspentGradientError: there is such a gradient.
        """
        if self._policy is not None:
            return
        for name, parameter in parameters.items():
            gradient = dtensor.raw_gradient(parameter)
            if gradient is not None and not self._may_go(gradient):
                raise self._unspent(name.partition(".")[2], parameter)
        if any(group.waiting_gradients for group in self._groups):
            raise UnspentGradientError(
                "offload() with gradients that FSDP2 has not reduced",
                reason="they were accumulated with set_requires_gradient_sync(False), and would "
                "be dropped",
                remedy="call step() after a backward that reduces them, or build PhaseOffloader "
                'with grads="save", which brings them back',
            )

    def _may_go(self, gradient: Tensor) -> bool:
        if isinstance(gradient, StandIn):
            return True
        find, version = self._consumed.get(id(gradient), (None, 0))
        if find is not None and find() is gradient and _version(gradient) == version:
            return True
        return gradient.layout is torch.strided and not bool(dtensor.local(gradient).any())

    def _unspent(self, fqn: str, parameter: Tensor) -> UnspentGradientError:
        what = f"offload() with the gradient of {fqn}"
        if any(parameter is each for each in parameters_of(self._optimizer)):
            return UnspentGradientError(
                what,
                reason="it would be dropped, and no step() since this PhaseOffloader was built has "
                "consumed it",
                remedy="call step() first, or zero_grad() to drop it, or build PhaseOffloader with "
                'grads="save", which brings it back',
            )
        return UnspentGradientError(
            what,
            reason="it would be dropped, and the PhaseOffloader has no optimizer that holds this "
            "parameter, so it does not see whether a step() has consumed it",
            remedy='call model.zero_grad() first, or build PhaseOffloader with grads="drop"',
        )

    def named(self, parameters: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        """Keys and tensors of gradients that exist now and are not dropped."""
        if self._drops:
            return []
        found = [
            (f"grads.{name}", p.grad)
            for name, p in parameters.items()
            if p.grad is not None and not isinstance(p.grad, StandIn)
        ]
        for index, group in enumerate(self._groups):
            waiting = enumerate(group.waiting_gradients)
            found += [(f"grads.group{index}.{i}", tensor) for i, tensor in waiting]
        return found

    def leave(self, parameters: Mapping[str, Tensor]) -> None:
        """Their memory is under way: each use of them raises. Idempotent."""
        for name, parameter in parameters.items():
            if self._drops:
                parameter.grad = None
                dtensor.clear_decoupled_gradient(parameter)
            elif self._policy == "save":
                gradient = parameter.grad
                if gradient is not None and not isinstance(gradient, StandIn):
                    stand_in = AwayGradient(parameter, name)
                    self._held.append((parameter, gradient, stand_in))  # while an offloader has it
                    parameter.grad = stand_in
        if self._drops:
            for group in self._groups:
                group.drop_waiting_gradients()

    def come_back(self) -> None:
        """Put back those that were not dropped meanwhile. Idempotent."""
        for parameter, gradient, stand_in in self._held:
            if parameter.grad is stand_in:
                parameter.grad = gradient
        self._held.clear()


def _version(gradient: Tensor) -> int:
    """Changes with each write, FSDP2's into the shard of a DTensor included."""
    shard = dtensor.local(gradient)
    return 0 if shard.is_inference() else shard._version
