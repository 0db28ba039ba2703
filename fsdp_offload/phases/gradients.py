"""Gradients while parameters are away: dropped, moved, or left alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from .. import shards
from ..errors import AwayError, OffloadError
from ..groups import Group
from ..spent import StandIn


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
        policy: ``"drop"``, ``"save"`` or ``"keep"``.
        groups: the FSDP2 groups of the model.
    """

    def __init__(self, policy: str, groups: Sequence[Group]) -> None:
        self._policy, self._groups = policy, groups
        self._held: list[tuple[Tensor, Tensor, Tensor]] = []

    def named(self, parameters: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        """Keys and tensors of gradients that exist now and are not dropped."""
        if self._policy == "drop":
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
        """Their memory is under way: nobody may use them. Idempotent."""
        for name, parameter in parameters.items():
            if self._policy == "drop":
                parameter.grad = None
                shards.clear_decoupled_gradient(parameter)
            elif self._policy == "save":
                gradient = parameter.grad
                if gradient is not None and not isinstance(gradient, StandIn):
                    stand_in = AwayGradient(parameter, name)
                    self._held.append((parameter, gradient, stand_in))  # while somebody has it
                    parameter.grad = stand_in
        if self._policy == "drop":
            for group in self._groups:
                group.drop_waiting_gradients()

    def come_back(self) -> None:
        """Put back those that were not dropped meanwhile. Idempotent."""
        for parameter, gradient, stand_in in self._held:
            if parameter.grad is stand_in:
                parameter.grad = gradient
        self._held.clear()
