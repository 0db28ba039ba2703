"""Gradients while parameters are away: dropped, moved, or left alone.

A gradient that is dropped must be one that ``step()`` has consumed. After each step the gradients
that are there are noted, weakly, with their version counters. When ``offload()`` is called, a
gradient counts as consumed if it is one of those and nothing was written into it since: another
backward makes a new one, or adds to it in place. One of zeros only, as
``zero_grad(set_to_none=False)`` leaves it, has nothing to lose.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..core import dtensor
from ..core.errors import UnspentGradientError
from ..core.fsdp import Group
from ..core.spent import is_spent
from .guard import parameters_of


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
        self._consumed: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by identity

    def hooks(self) -> list[RemovableHandle]:
        """Begin to watch steps; the caller removes them at the end."""
        if self._policy is not None or self._optimizer is None:
            return []
        return [self._optimizer.register_step_post_hook(self._note_step)]

    def _note_step(self, *_: object) -> None:
        """A step has just consumed what is there."""
        found = map(dtensor.raw_gradient, parameters_of(self._optimizer))
        self._consumed = {
            id(gradient): (weakref.ref(gradient), _version(gradient))
            for gradient in found
            if gradient is not None and not is_spent(gradient)
        }

    # Updates under way need not have ended for it.
    _note_step.reads_parameters = False  # type: ignore[attr-defined]

    def check(self, parameters: Mapping[str, Tensor]) -> None:
        """Refuse to drop what no step has consumed, unless that was asked for.

        Raises:
            UnspentGradientError: there is such a gradient.
        """
        if self._policy is not None:
            return
        for name, parameter in parameters.items():
            gradient = dtensor.raw_gradient(parameter)
            if gradient is not None and not self._is_consumed(gradient):
                raise self._unspent(name.partition(".")[2], parameter)
        if any(group.waiting_gradients for group in self._groups):
            raise UnspentGradientError(
                "offload() with gradients that FSDP2 has not reduced",
                reason="they would be dropped",
                remedy="call step() after a backward that reduces them, or build PhaseOffloader "
                'with grads="save"',
            )

    def _is_consumed(self, gradient: Tensor) -> bool:
        if is_spent(gradient):
            return True
        find, version = self._consumed.get(id(gradient), (None, 0))
        if find is not None and find() is gradient and _version(gradient) == version:
            return True
        return gradient.layout is torch.strided and not bool(dtensor.local(gradient).any())

    def _unspent(self, fqn: str, parameter: Tensor) -> UnspentGradientError:
        if any(parameter is each for each in parameters_of(self._optimizer)):
            reason = "no step() has consumed it since this PhaseOffloader was built"
            remedy = 'call step() first, or zero_grad() to drop it, or build it with grads="save"'
        else:
            reason = "the PhaseOffloader has no optimizer that holds this parameter, whose step() "
            reason += "it would see"
            remedy = 'call model.zero_grad() first, or build PhaseOffloader with grads="drop"'
        return UnspentGradientError(
            f"offload() with the gradient of {fqn}",
            reason=f"it would be dropped, and {reason}",
            remedy=remedy,
        )

    def tensors(self, parameters: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        """Keys and tensors of gradients that exist now and are not dropped."""
        if self._policy in (None, "drop"):
            return []
        found = [
            (name, gradient)
            for name, p in parameters.items()
            if (gradient := dtensor.raw_gradient(p)) is not None and not is_spent(gradient)
        ]
        for index, group in enumerate(self._groups):
            waiting = enumerate(group.waiting_gradients)
            found += [(f"group{index}.{i}", tensor) for i, tensor in waiting]
        return found

    def drop(self, parameters: Mapping[str, Tensor]) -> None:
        """Forget those that are to be dropped. Idempotent."""
        if self._policy not in (None, "drop"):
            return
        for parameter in parameters.values():
            parameter.grad = None
            dtensor.clear_decoupled_gradient(parameter)
        for group in self._groups:
            group.drop_waiting_gradients()


def _version(gradient: Tensor) -> int:
    """Changes with each write, FSDP2's into the shard of a DTensor included."""
    shard = dtensor.local(gradient)
    return 0 if shard.is_inference() else shard._version
