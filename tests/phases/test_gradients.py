"""Gradients that an offload would drop: only those that a step has consumed, unless told to."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import HybridDeviceOptimizer, PhaseOffloader, UnspentGradientError
from tests.away import has_memory

UNSPENT = r"the gradient of 0\.weight: .* no step\(\) .*Remedy: call step\(\) first, or zero_grad"


def plain(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def wrapped(model: nn.Module, **options: Any) -> Any:
    return HybridDeviceOptimizer(plain(model), model=model, **options)


BUILDERS = pytest.mark.parametrize("build", [plain, wrapped])


class Job:
    """A model, its optimizer and its offloader, which was built first of all."""

    def __init__(self, build: Callable[[nn.Module], Any] = plain, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.optimizer = build(self.model)
        self.phases = PhaseOffloader(self.model, self.optimizer, **options)

    def backward(self) -> Tensor:
        loss = self.model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.model.parameters()]

    def cycle(self) -> None:
        """All gradients are dropped."""
        with self.phases.away():
            assert self.gradients() == [None] * 4

    def check_refused(self, match: str = UNSPENT) -> None:
        """Nothing has moved, and no gradient is lost."""
        before = copy.deepcopy(self.gradients())
        with pytest.raises(UnspentGradientError, match=match):
            self.phases.offload()
        assert not self.phases.is_away
        assert all(map(has_memory, self.model.parameters()))
        torch.testing.assert_close(self.gradients(), before, rtol=0, atol=0)


@BUILDERS
def test_between_backward_and_step_it_is_refused(build: Callable[[nn.Module], Any]) -> None:
    """And the step that follows has the bits of a job without phases."""
    job, other = Job(build), Job(build)
    for _ in range(3):
        job.backward()
        job.check_refused()
        job.optimizer.step()
        job.cycle()
        other.backward()
        other.optimizer.step()
        other.optimizer.zero_grad()
    torch.testing.assert_close(job.model.state_dict(), other.model.state_dict(), rtol=0, atol=0)


@BUILDERS
def test_what_comes_after_the_step_is_not_consumed(build: Callable[[nn.Module], Any]) -> None:
    job = Job(build)
    for zeroes in (True, False):
        job.optimizer.step(job.backward)
        if zeroes:
            job.optimizer.zero_grad()
        job.backward()  # without zero_grad() in place
        job.check_refused()
        job.optimizer.step()
        job.cycle()


def test_zeros_are_nothing_to_lose() -> None:
    job = Job()
    job.backward()
    job.optimizer.zero_grad(set_to_none=False)
    job.cycle()


def test_a_step_that_was_made_before_it_was_built_is_not_seen() -> None:
    job = Job(grads="drop")
    job.backward()
    job.optimizer.step()
    job.phases = PhaseOffloader(job.model, job.optimizer)
    job.check_refused(r"no step\(\) has consumed it")
    job.optimizer.zero_grad()
    job.cycle()


@pytest.mark.parametrize("held", [0, 2])
def test_of_parameters_that_the_optimizer_does_not_hold(held: int) -> None:
    """Other optimizers' steps are not seen: their gradients are dropped only by their owner."""
    job = Job()
    parameters = list(job.model.parameters())
    mine = torch.optim.SGD(parameters[:held], lr=0.1) if held else None
    others = torch.optim.SGD(parameters[held:], lr=0.1)
    job.phases = PhaseOffloader(job.model, mine)
    job.backward()
    for optimizer in (mine, others):
        if optimizer is not None:
            optimizer.step()
    name = r"1\.weight" if held else r"0\.weight"
    job.check_refused(rf"gradient of {name}: .* no optimizer that holds .*model\.zero_grad\(\)")
    others.zero_grad()
    job.cycle()


def test_a_decoupled_gradient_is_saved_like_any_other() -> None:
    job = Job(grads="save")
    job.backward()
    weight: Any = next(job.model.parameters())
    weight.decoupled_grad, weight.grad = weight.grad, None  # as Megatron-FSDP keeps it
    expected = weight.decoupled_grad.clone()
    with job.phases.away():
        stayed = has_memory(weight.decoupled_grad)  # pytest would print what is away
    assert not stayed
    assert torch.equal(weight.decoupled_grad, expected)


def test_a_consumed_gradient_is_not_kept_alive() -> None:
    job = Job()
    job.backward()
    job.optimizer.step()
    gradients = [weakref.ref(each) for each in job.gradients()]
    job.optimizer.zero_grad()
    gc.collect()
    assert not any(each() for each in gradients)
