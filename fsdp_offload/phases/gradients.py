"""Gradients while parameters are away: dropped, moved, or left alone.

An offload drops only gradients that ``step()`` has consumed. After each step, a weak list remembers
the gradients and their version counters. ``offload()`` counts a gradient as consumed if it is on
that list and unchanged since: another backward makes a new one, or adds to it in place. A gradient
of zeros, as ``zero_grad(set_to_none=False)`` leaves it, has nothing to lose.
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
    """``.grad`` of all parameters, and gradients that FSDP2 keeps for a later reduction.

    ``policy``: see ``grads`` of :class:`.PhaseOffloader`. Steps of ``optimizer`` consume gradients.
    """

    def __init__(
        self, policy: str | None, groups: Sequence[Group], optimizer: Optimizer | None
    ) -> None:
        self._policy, self._groups, self._optimizer = policy, groups, optimizer
        self._consumed: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by identity

    def hooks(self) -> list[RemovableHandle]:
        """Install hooks that watch steps; the caller removes them."""
        if self._policy is not None or self._optimizer is None:
            return []
        return [self._optimizer.register_step_post_hook(self._note_step)]

    def _note_step(self, *_: object) -> None:
        found = map(dtensor.raw_gradient, parameters_of(self._optimizer))
        self._consumed = {
            id(gradient): (weakref.ref(gradient), _version(gradient))
            for gradient in found
            if gradient is not None and not is_spent(gradient)
        }

    # Does not wait for running updates.
    _note_step.reads_parameters = False  # type: ignore[attr-defined]

    def check(self, parameters: Mapping[str, Tensor]) -> None:
        """Refuse to drop gradients that no step has consumed, unless the policy allows it.

        Raises:
            UnspentGradientError: a gradient would be lost.
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
            reason = "no optimizer that holds this parameter was passed"
            remedy = 'call model.zero_grad() first, or build PhaseOffloader with grads="drop"'
        return UnspentGradientError(
            f"offload() with the gradient of {fqn}",
            reason=f"it would be dropped, and {reason}",
            remedy=remedy,
        )

    def tensors(self, parameters: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        """List keys and tensors of the gradients that are kept."""
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
        """Set dropped gradients to None. Idempotent."""
        if self._policy not in (None, "drop"):
            return
        for parameter in parameters.values():
            parameter.grad = None
            dtensor.clear_decoupled_gradient(parameter)
        for group in self._groups:
            group.drop_waiting_gradients()


def _version(gradient: Tensor) -> int:
    """Return a counter of writes, which includes FSDP2's into the shard of a DTensor."""
    shard = dtensor.local(gradient)
    return 0 if shard.is_inference() else shard._version
