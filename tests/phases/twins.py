"""A job that is offloaded and reloaded, beside a twin that stays: both have the same bits."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_offload import HybridDeviceOptimizer


class Job:
    """A model with a tied weight, a view and buffers; an optimizer with state, fused or a wrapper
    with that share of state offloaded; a twin of both."""

    def __init__(self, offload_fraction: float | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 40))
        self.model[2].weight = self.model[0].weight
        self.view = self.model[0].weight.detach()[3:5]
        self.twin = copy.deepcopy(self.model)
        models = (self.model, self.twin)
        self.optimizer, self.other = (self.build(model, offload_fraction) for model in models)
        self.steps = 0
        self.train()

    @staticmethod
    def build(model: nn.Module, fraction: float | None) -> Any:
        plain = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        if fraction is None:
            return plain
        return HybridDeviceOptimizer(plain, model, offload_fraction=fraction)

    def train(self) -> None:
        self.steps += 1
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(self.steps))
        for model, optimizer in ((self.model, self.optimizer), (self.twin, self.other)):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def tensors(self) -> list[Tensor]:
        state = [v for s in self.optimizer.state.values() for v in s.values()]
        return [*self.model.parameters(), *self.model.buffers(), *state]

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.tensors()]

    def check(self) -> None:
        for mine, other in ((self.model, self.twin), (self.optimizer, self.other)):
            torch.testing.assert_close(mine.state_dict(), other.state_dict(), rtol=0, atol=0)


def failing(
    call: Callable[..., Any], at: int, error: BaseException, *, onwards: bool = False
) -> Callable[..., Any]:
    """``call``, which raises in one of its calls, or from then on."""
    calls = itertools.count()

    def fail(*args: Any) -> Any:
        index = next(calls)
        if index == at or (onwards and index > at):
            raise error
        return call(*args)

    return fail
