"""A plain optimizer that is loaded while away, by a load that succeeds or raises."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from fsdp_offload import PhaseOffloader
from fsdp_offload.moving import absent
from fsdp_offload.phases import plain_state

pytestmark = pytest.mark.usefixtures("one_thread")


class InPlace(torch.optim.SGD):
    """With a load of its own, which calls no hooks and keeps the table."""

    raises = False

    def load_state_dict(self, state_dict: Any) -> None:
        for index, parameter in enumerate(p for g in self.param_groups for p in g["params"]):
            self.state[parameter] = dict(state_dict["state"][index])
        if self.raises:
            raise ZeroDivisionError


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    *others, last = model.parameters()
    return [{"params": others}, {"params": [last], "lr": 0.5}]


BUILDERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adam": lambda m: torch.optim.Adam(grouped(m), lr=0.01),
    "amsgrad": lambda m: torch.optim.Adam(grouped(m), lr=0.03, amsgrad=True),
    "fused": lambda m: torch.optim.Adam(grouped(m), lr=0.01, fused=True),
    "sgd": lambda m: torch.optim.SGD(grouped(m), lr=0.1, momentum=0.9),
    "in place": lambda m: InPlace(grouped(m), lr=0.1, momentum=0.9),
}


class Job:
    """A small model under an offloader, and a state dict that is another's.

    Args:
        name: of the optimizer.
        n_steps: that it has made.
        loaded: the other's; it has made 3 steps.
    """

    def __init__(self, name: str = "adam", n_steps: int = 1, loaded: str | None = None) -> None:
        self.model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8, bias=False))
        self.optimizer = BUILDERS[name](self.model)
        self.step(n_steps)
        other = BUILDERS[loaded or name](self.model)
        self.step(3, other)
        self.before, self.wanted = (copy.deepcopy(o.state_dict()) for o in (self.optimizer, other))
        self.lists = [group["params"] for group in self.optimizer.param_groups]
        self.phases = PhaseOffloader(self.model, self.optimizer)
        self.attributes = set(vars(self.optimizer))

    def step(self, count: int, optimizer: Optimizer | None = None) -> None:
        for _ in range(count):
            for parameter in self.model.parameters():
                parameter.grad = torch.randn(parameter.shape)
            (optimizer or self.optimizer).step()
        self.model.zero_grad()

    def load(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.wanted))

    def check(self) -> str:
        """Which of both it has, away and back, all of it, and goes on with."""
        parameters = list(self.model.parameters())
        groups = self.optimizer.param_groups
        assert all(g["params"] is each for g, each in zip(groups, self.lists, strict=True))
        assert {id(key) for key in self.optimizer.state} <= {id(p) for p in parameters}
        found = self.which()
        self.phases.reload()
        assert self.which() == found
        assert set(vars(self.optimizer)) == self.attributes
        assert not any(absent.is_absent(t) for t in self.tensors())
        counts = [float(values["step"]) for values in self.optimizer.state.values()]
        self.step(1)
        stepped = [float(self.optimizer.state[p]["step"]) for p in parameters]
        assert stepped == ([count + 1 for count in counts] or [1.0] * len(parameters))
        return found

    def tensors(self) -> Iterator[Tensor]:
        yield from self.model.parameters()
        for values in self.optimizer.state.values():
            yield from values.values()

    def which(self) -> str:
        shown = self.optimizer.state_dict()
        found = [name for name in ("before", "wanted") if same(shown, getattr(self, name))]
        assert found, "a part of each, or neither"
        return found[0]


def same(first: Any, second: Any) -> bool:
    try:
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    except AssertionError:
        return False
    return True


def fail(*_: object) -> None:
    raise ZeroDivisionError


def look_and_fail(optimizer: Optimizer, *_: object) -> None:
    """It makes entries for what is in groups."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter].get("step")
    fail()


@pytest.mark.parametrize(
    ("when", "hook"), [("pre", look_and_fail), ("post", fail), ("post", look_and_fail)]
)
def test_a_hook_raises(when: str, hook: Callable[..., None]) -> None:
    job = Job()
    handle = getattr(job.optimizer, f"register_load_state_dict_{when}_hook")(hook)
    job.phases.offload()
    with pytest.raises(ZeroDivisionError):
        job.load()
    handle.remove()
    assert job.check() == "before"
    job.phases.offload()
    job.load()
    assert job.check() == "wanted"


def test_a_hook_raises_after_a_load_in_the_place_of_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is to arrive is what was loaded first."""
    job = Job(n_steps=0)
    job.phases.offload()
    job.load()
    job.wanted, first = job.before, job.wanted
    handle = job.optimizer.register_load_state_dict_post_hook(fail)
    with pytest.raises(ZeroDivisionError):
        job.load()
    handle.remove()
    job.before = first
    moved: list[Any] = []
    monkeypatch.setattr(plain_state, "_to_device", lambda v, _: (moved.append(v), v)[1])
    assert job.check() == "before"
    assert len(moved) == 2 * len(list(job.model.parameters()))


def test_post_hooks_see_parameters_and_values_and_may_change_them() -> None:
    job = Job()
    kept = {id(t) for t in job.tensors()}
    seen: list[Tensor] = []

    def double(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                seen.append(parameter)
                optimizer.state[parameter]["exp_avg"].mul_(2)

    job.optimizer.register_load_state_dict_post_hook(double)
    job.phases.offload()
    job.load()
    for values in job.wanted["state"].values():
        values["exp_avg"].mul_(2)
    assert [id(each) for each in seen] == [id(p) for p in job.model.parameters()]
    assert job.which() == "wanted"
    job.phases.reload()
    assert job.which() == "wanted"
    assert {id(t) for t in job.tensors()} == kept


def test_a_post_hook_puts_a_value_from_before_back() -> None:
    job = Job()
    state = job.optimizer.state
    saved = {p: values["exp_avg"] for p, values in state.items()}

    def put_back(optimizer: Optimizer) -> None:
        for parameter, value in saved.items():
            optimizer.state[parameter]["exp_avg"] = value

    job.optimizer.register_load_state_dict_post_hook(put_back)
    job.phases.offload()
    job.load()
    for index, values in job.wanted["state"].items():
        values["exp_avg"] = job.before["state"][index]["exp_avg"]
    assert job.which() == "wanted"
    job.phases.reload()
    assert job.which() == "wanted"


def test_an_optimizer_with_a_load_of_its_own() -> None:
    job = Job("in place")
    table = job.optimizer.state
    for raises in (True, False):
        job.phases.offload()
        job.optimizer.raises = raises
        if raises:
            with pytest.raises(ZeroDivisionError):
                job.load()
            is_itself = job.optimizer.state is table
            assert is_itself
        else:
            job.load()
        assert {id(p) for p in job.optimizer.state} == {id(p) for p in job.model.parameters()}
        expected = job.before if raises else job.wanted
        assert same(job.optimizer.state_dict(), expected)
        job.phases.reload()
        assert same(job.optimizer.state_dict(), expected)


def storages_of(optimizer: Optimizer) -> list[StorageWeakRef]:
    values = (v for state in optimizer.state.values() for v in state.values())
    return [StorageWeakRef(v.untyped_storage()) for v in values if isinstance(v, Tensor)]


@pytest.mark.parametrize("has_left", [False, True])
def test_state_that_a_load_replaces_is_freed(has_left: bool) -> None:
    """While it is here; the offloader knows it from a departure, or from its construction."""
    job = Job()
    if has_left:
        job.phases.offload()
        job.phases.reload()
    before = storages_of(job.optimizer)
    job.optimizer.load_state_dict(job.wanted)
    gc.collect()
    assert before
    assert all(each.expired() for each in before)
    for _ in range(2):
        expected = copy.deepcopy(job.optimizer.state_dict())
        job.phases.offload()
        assert all(not each.expired() for each in storages_of(job.optimizer))
        job.phases.reload()
        torch.testing.assert_close(job.optimizer.state_dict(), expected, rtol=0, atol=0)
        job.step(1)


def test_a_load_while_away_forgets_nothing() -> None:
    job = Job()
    job.phases.offload()
    job.optimizer.load_state_dict(job.wanted)
    job.phases.reload()
    torch.testing.assert_close(job.optimizer.state_dict(), job.wanted, rtol=0, atol=0)


def test_values_that_change_places_while_away() -> None:
    """What a state dict shows then lies in the places that a load writes to."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    optimizer = torch.optim.Adam(model.parameters())
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, index + 1.0)
    optimizer.step()
    optimizer.zero_grad()
    expected = copy.deepcopy(optimizer.state_dict()["state"])
    with PhaseOffloader(model, optimizer).away():
        live = optimizer.state_dict()
        shifted = {i: live["state"][(i + 1) % 3] for i in range(3)}
        optimizer.load_state_dict({**live, "state": shifted})
    found = optimizer.state_dict()["state"]
    for i in range(3):
        for name, value in expected[(i + 1) % 3].items():
            assert torch.equal(found[i][name], value), (i, name)


def test_an_optimizer_keeps_no_offloader_and_no_hook_of_a_closed_one() -> None:
    job = Job()
    hooks = job.optimizer._optimizer_load_state_dict_pre_hooks
    assert len(hooks) == 1
    job.phases.close()
    assert not hooks
    job.phases = PhaseOffloader(job.model, job.optimizer)
    find = weakref.ref(job.phases)
    copy.deepcopy(job.optimizer)
    del job.phases
    gc.collect()
    assert find() is None
    assert not hooks
    job.optimizer.load_state_dict(job.wanted)
