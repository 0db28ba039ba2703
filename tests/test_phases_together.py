"""Phases beside other things of a job: modes, compiled modules, other optimizers and offloaders."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer

from fsdp_offload import HybridDeviceOptimizer, PhaseOffloader, swap
from fsdp_offload.errors import AwayError, ClosedError
from fsdp_offload.moving import Mover
from fsdp_offload.patching import Patch
from fsdp_offload.storages import can_swap


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def batch(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    model(batch(step)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(model: nn.Module, expected: list[Tensor]) -> bool:
    return all(map(torch.equal, values(model), expected))


def wrapped(**options: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda m: HybridDeviceOptimizer(torch.optim.AdamW(m.parameters()), model=m, **options)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "plain": lambda m: torch.optim.AdamW(m.parameters()),
    "resident": wrapped(offload_fraction=0.0),
    "host": wrapped(update_on="host"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_everything_may_begin_in_inference_mode(name: str) -> None:
    model, twin = Net(), Net()
    optimizer, other = OPTIMIZERS[name](model), OPTIMIZERS[name](twin)
    train(model, optimizer, 0)
    train(twin, other, 0)
    with torch.inference_mode():
        phases = PhaseOffloader(model, optimizer)
        phases.offload()
    model.load_state_dict(copy.deepcopy(model.state_dict()))  # writes where the mode is off
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.inference_mode():
        phases.reload()
    for step in range(1, 4):
        train(model, optimizer, step)
        train(twin, other, step)
        with phases.away():
            pass
    assert same(model, values(twin))


@pytest.mark.parametrize("given", ["module", "compiled"])
@pytest.mark.parametrize("how", ["function", "in place"])
def test_compiled_modules_notice_and_are_not_compiled_again(how: str, given: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # torch compiles the call of its own modules with all that is in it, of others the forward.
    model = nn.Sequential(Net()) if how == "function" else Net()
    compiled: Any = model
    if how == "in place":
        model.compile(backend="aot_eager")
    else:
        compiled = torch.compile(model, backend="aot_eager")
    expected = compiled(batch(0)).detach()
    phases = PhaseOffloader(compiled if given == "compiled" else model)
    for _ in range(12):
        phases.offload()
        with pytest.raises(AwayError):
            compiled(batch(0))
        phases.reload()
        assert torch.equal(compiled(batch(0)), expected)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs <= 2, graphs  # one, and one of the refusal


def test_optimizers_that_nobody_named_do_not_step_while_it_is_away() -> None:
    model = Net()
    other = torch.optim.AdamW(model.parameters())
    phases = PhaseOffloader(model, grads="keep")
    model(batch(0)).sum().backward()
    expected = values(model)
    with phases.away(), pytest.raises(AwayError, match="step"):
        other.step()
    assert same(model, expected)
    other.step()
    assert not same(model, expected)
    phases = PhaseOffloader(model, grads="keep", on_use="reload")
    phases.offload()
    other.step()
    assert not phases.is_away


def test_a_state_dict_of_an_optimizer_without_state_is_refused_and_harms_nothing() -> None:
    """torch makes the state by a step with a learning rate of 0, which it sets back afterwards."""
    model, twin = Net(), Net()
    optimizer, other = OPTIMIZERS["plain"](model), OPTIMIZERS["plain"](twin)
    with PhaseOffloader(model, optimizer).away(), pytest.raises(AwayError, match="step"):
        get_optimizer_state_dict(model, optimizer)
    assert all(p.grad is None for p in model.parameters())
    for step in range(2):
        train(model, optimizer, step)
        train(twin, other, step)
    assert same(model, values(twin))


def test_two_offloaders_of_a_model_leave_nothing_on_it() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 0)
    before = [set(module.__dict__) for module in model.modules()], set(optimizer.__dict__)
    first, second = PhaseOffloader(model, optimizer), PhaseOffloader(model, optimizer)
    for _ in range(3):
        first.offload()
        second.offload()
        first.reload()  # not the one that came last
        second.reload()
    assert ([set(m.__dict__) for m in model.modules()], set(optimizer.__dict__)) == before


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("where", ["take_ahead", "collect"])
def test_what_another_offloader_has_away_is_its_own(
    where: str, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one cannot leave, and does not bring back what it had moved before."""
    model = nn.Sequential(Net(), nn.Linear(8, 8).bfloat16())
    optimizer = OPTIMIZERS["host"](model)
    first, second = (PhaseOffloader(model, optimizer) for _ in range(2))
    with second.away():
        pass
    for parameter in model.parameters():
        parameter.data.add_(1.5)
    expected = values(model)
    first.offload()

    def fails(*args: Any) -> None:
        raise ZeroDivisionError

    def full(mover: Mover, blocks: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(second._contents, where, fails)
        if not has_room:
            patch.setattr(Mover, "back", full)
        with pytest.raises(ZeroDivisionError):
            second.offload()
    assert second.is_away is not has_room
    shown = copy.deepcopy(list(model.state_dict().values()))
    assert all(map(torch.equal, shown, expected))
    second.reload()
    first.reload()
    assert same(model, expected)


def test_a_patch_below_of_somebody_else_stays() -> None:
    class Owner:
        def call(self) -> str:
            return "original"

    owner = Owner()
    first = Patch(owner, "call", lambda original: "first")
    scheduler: Any = owner.call.__func__  # type: ignore[attr-defined]

    def theirs(*args: Any) -> str:
        return "theirs, " + scheduler(*args)

    theirs.__dict__.update(scheduler.__dict__)  # as functools.wraps does
    owner.call = theirs.__get__(owner)  # type: ignore[method-assign]
    second = Patch(owner, "call", lambda original: "second")
    first.remove()
    assert owner.call() == "second"
    second.remove()
    assert owner.call() == "theirs, original"


def test_the_model_comes_back_although_its_optimizer_was_closed() -> None:
    model = Net()
    optimizer = wrapped(offload_fraction=0.0)(model)
    train(model, optimizer, 0)
    expected = values(model)
    phases = PhaseOffloader(model, optimizer)
    phases.offload()
    optimizer.close()  # type: ignore[attr-defined]
    phases.close()
    assert same(model, expected)


@pytest.mark.skipif(not can_swap(), reason="this torch cannot swap CPU storages")
def test_state_dicts_of_fixed_addresses_are_saved_tensor_by_tensor() -> None:
    model = nn.Sequential(Net(), nn.BatchNorm1d(8))  # its buffers have two dtypes
    expected = values(model)
    phases = PhaseOffloader(model, fixed_address=True)
    phases.offload()
    shown = model.state_dict()
    saved = io.BytesIO()
    torch.save(shown, saved)  # refuses views of one storage as two dtypes
    phases.reload()
    saved.seek(0)
    model.load_state_dict(torch.load(saved))
    assert same(model, expected)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in shown.values())


def test_swap_with_a_closed_one_moves_nothing() -> None:
    here, closed = PhaseOffloader(Net()), PhaseOffloader(Net())
    closed.close()
    with pytest.raises(ClosedError):
        swap(out=here, in_=closed)
    assert not here.is_away


def test_swap_for_one_that_never_left() -> None:
    model, other = Net(), Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 0)
    phases, expected = PhaseOffloader(model, optimizer), values(model)
    here = PhaseOffloader(other)
    with phases.away():
        pass
    swap(out=phases, in_=here)
    assert phases.is_away
    assert not here.is_away
    phases.reload()
    assert same(model, expected)


@pytest.mark.parametrize("grads", ["save", "keep"])
def test_sparse_gradients_stay(grads: str) -> None:
    model = nn.Embedding(10, 4, sparse=True)
    model(torch.tensor([1, 2])).sum().backward()
    expected = model.weight.grad.clone()
    with PhaseOffloader(model, grads=grads).away():
        pass
    assert torch.equal(model.weight.grad.to_dense(), expected.to_dense())
