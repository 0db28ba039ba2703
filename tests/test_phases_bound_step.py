"""Steps that pass ``optimizer.step`` by: bound before, or called by the class."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from fsdp_offload import HybridDeviceOptimizer, PhaseOffloader
from fsdp_offload.errors import AwayError
from fsdp_offload.phases import optimizers
from fsdp_offload.testing import ADVERSARIES, StreamSimulator

pytestmark = pytest.mark.usefixtures("one_thread")
Step = Callable[[], object]
BOUND: dict[str, Callable[[Any], Step]] = {
    "bound": lambda optimizer: optimizer.step,
    "by class": lambda optimizer: lambda: type(optimizer).step(optimizer),
}
"""How a step is reached, as it is kept from before."""
KEPT = {"params": "keep", "grads": "keep"}


class Derived(torch.optim.AdamW):
    """Its step calls another one that torch hooks."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


def job(kind: type[Optimizer] = torch.optim.AdamW) -> tuple[nn.Module, Any]:
    """A model and an optimizer with state, and gradients for the next step."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    for _ in range(2):
        model(torch.ones(2, 8)).square().sum().backward()
        if not optimizer.state:
            optimizer.step()
    return model, optimizer


_OF_OTHERS: set[int] = set()


@pytest.fixture(autouse=True)
def know_others() -> None:
    """What other tests have left away, and still hold, has entries in torch's own table."""
    gc.collect()
    _OF_OTHERS.clear()
    _OF_OTHERS.update(torch_optimizer._global_optimizer_pre_hooks)


def hooks(optimizer: Optimizer) -> list[Any]:
    """All that torch would call, but for other tests'."""
    of_all = torch_optimizer._global_optimizer_pre_hooks
    new = [hook for key, hook in of_all.items() if key not in _OF_OTHERS]
    return [*new, *optimizer._optimizer_step_pre_hooks.values()]


def refused(step: Step) -> bool:
    """Whether it raises before it touches state, which would kill the process."""
    seen: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module("torch.optim.adam")  # where steps begin to compute
        patch.setattr(module, "adam", lambda *args, **options: seen.append(args))
        try:
            step()
        except AwayError:
            return not seen
    return False


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Derived])
@pytest.mark.parametrize("how", BOUND)
def test_a_step_with_parameters_here_and_state_away_raises(how: str, kind: type[Optimizer]) -> None:
    (model, optimizer), (twin, other) = job(kind), job(kind)
    step = BOUND[how](optimizer)
    phases = PhaseOffloader(model, optimizer, **KEPT)
    for _ in range(2):
        phases.offload()
        assert refused(step)
        assert refused(optimizer.step)
        phases.reload()
        assert not hooks(optimizer)
        step()
        other.step()
        assert torch.equal(model.weight, twin.weight)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Derived])
@pytest.mark.parametrize("kept", [KEPT, {"grads": "save"}], ids=["kept", "all away"])
@pytest.mark.parametrize("how", [*BOUND, "by name"])
def test_a_step_may_reload(how: str, kept: dict[str, str], kind: type[Optimizer]) -> None:
    (model, optimizer), (twin, other) = job(kind), job(kind)
    step = BOUND.get(how, lambda o: lambda: o.step())(optimizer)
    phases = PhaseOffloader(model, optimizer, on_use="reload", **kept)
    for cycle in (1, 2):
        phases.offload()
        step()
        other.step()
        assert not phases.is_away
        assert phases.statistics().cycles == cycle
        assert torch.equal(model.weight, twin.weight)
        assert not hooks(optimizer)


def test_hooks_of_others_run_beside_one_that_reloads() -> None:
    """torch goes over its tables while entries would leave them."""
    called: list[str] = []
    (model, optimizer), (other_model, other) = job(), job()
    step = optimizer.step
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    phases = PhaseOffloader(model, optimizer, on_use="reload", **KEPT)
    others = PhaseOffloader(other_model, other, on_use="reload", grads="keep")
    phases.offload()
    others.offload()
    late = optimizer.register_step_pre_hook(lambda *_: called.append("after"))
    step()
    assert called == ["before", "after"]
    assert not phases.is_away
    assert others.is_away
    step()
    assert called == ["before", "after"] * 2
    late.remove()
    others.reload()
    with phases.away():
        pass
    assert len(hooks(optimizer)) == 1


def test_two_offloaders_whose_parameters_are_away_reload_one_by_one() -> None:
    (model, optimizer), (other_model, other) = job(), job()
    step = optimizer.step
    phases = PhaseOffloader(model, optimizer, on_use="reload", grads="keep")
    others = PhaseOffloader(other_model, other, on_use="reload", grads="keep")
    phases.offload()
    others.offload()
    step()
    assert not phases.is_away
    assert others.is_away
    others.reload()
    with phases.away():
        pass
    assert not hooks(optimizer)


class Launching(torch.optim.SGD):
    """Its step is work of the current stream: copies state to ``seen``."""

    def __init__(self, parameters: Any, current: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        (self.parameter,) = self.param_groups[0]["params"]
        self.seen = torch.zeros(300_000)
        self.state[self.parameter]["momentum_buffer"] = torch.zeros_like(self.parameter)
        self._current = current

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._current.launch(copy_to, self.seen, self.state[self.parameter]["momentum_buffer"])


def copy_to(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


@pytest.mark.parametrize("on_use", ["error", "reload"])
@pytest.mark.parametrize("how", BOUND)
def test_a_step_follows_state_that_is_under_way(how: str, on_use: str) -> None:
    for policy in ADVERSARIES:
        with StreamSimulator(policy) as simulator:
            current = simulator.current_stream()
            module = nn.ParameterList([nn.Parameter(torch.zeros(300_000))])
            optimizer = Launching(module.parameters(), current)
            step = BOUND[how](optimizer)
            phases = PhaseOffloader(module, optimizer, on_use=on_use, **KEPT)
            for cycle in (1, 2):
                optimizer.state[optimizer.parameter]["momentum_buffer"].fill_(cycle)
                phases.offload()
                if on_use == "error":
                    phases.reload(wait=False)
                step()
                current.synchronize()
                assert bool((optimizer.seen == cycle).all()), (policy, cycle)
                phases.reload()
                assert not hooks(optimizer)
            assert not simulator.late_uses


def test_a_step_by_name_follows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = []
    with StreamSimulator("lazy") as simulator:
        module = nn.ParameterList([nn.Parameter(torch.zeros(300_000))])
        optimizer = Launching(module.parameters(), simulator.current_stream())
        step = optimizer.step
        phases = PhaseOffloader(module, optimizer, **KEPT)
        phases.offload()
        phases.reload(wait=False)
        original = optimizers.Trip.follow
        monkeypatch.setattr(
            optimizers.Trip, "follow", lambda t, s: (followed.append(t), original(t, s))[1]
        )
        optimizer.step()
        assert len(followed) == 1
        step()
        assert len(followed) == 2
        phases.reload()
        step()
        assert len(followed) == 2


def test_hooks_are_in_no_copy_and_keep_nothing() -> None:
    model, optimizer = job()
    phases = PhaseOffloader(model, optimizer, **KEPT)
    expected = len(hooks(optimizer))
    phases.offload()
    assert len(hooks(optimizer)) == expected + 2  # of this optimizer, and of all
    assert optimizer.state_dict().keys() == {"state", "param_groups"}
    for hook in hooks(optimizer):
        for twin in (pickle.loads(pickle.dumps(hook)), copy.deepcopy(hook)):
            twin(optimizer, (), {})  # does not raise
    phases.close()
    assert len(hooks(optimizer)) == expected
    found = weakref.ref(phases)
    del phases
    gc.collect()
    assert found() is None


class Foreign(Optimizer):
    """Wraps another one and has none of torch's own attributes, as ``accelerate`` does it."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.state, self.param_groups = inner.state, inner.param_groups

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)


def test_optimizers_without_hooks_are_kept_from_stepping_by_name() -> None:
    model, inner = job()
    optimizer = Foreign(inner)
    phases = PhaseOffloader(model, optimizer, **KEPT)
    with phases.away(), pytest.raises(AwayError):
        optimizer.step()
    optimizer.step()


@pytest.mark.parametrize("state", ["save", "keep"])
def test_optimizers_that_check_themselves_get_no_hook(state: str) -> None:
    model, inner = job()
    optimizer = HybridDeviceOptimizer(inner, model=model, offload_fraction=0.0)
    own = dict(optimizer._optimizer_step_pre_hooks)
    phases = PhaseOffloader(model, optimizer, state=state, **KEPT)
    phases.offload()
    assert optimizer._optimizer_step_pre_hooks == own
    phases.reload(wait=False)
    assert optimizer._optimizer_step_pre_hooks == own
    optimizer.step()
    phases.close()
    optimizer.close()
