"""The waits of phases, under the stream simulator: each one is needed, and they are enough."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import PhaseOffloader, swap
from fsdp_offload.phases import contents, offloader, optimizers
from fsdp_offload.testing import ADVERSARIES, StreamSimulator

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPES = (300_000, 40, 270_000, 7)


class Launching(torch.optim.SGD):
    """Its step is work of the current stream: copies state to ``seen``."""

    def __init__(self, parameters: Any, current: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.seen = [torch.zeros(n) for n in SHAPES]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self._current = current

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for seen, state in zip(self.seen, self.state.values(), strict=True):
            self._current.launch(copy_to, seen, state["momentum_buffer"])


def copy_to(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def fill(target: Tensor, value: float) -> None:
    target.fill_(value)


def model() -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.zeros(n), False) for n in SHAPES])


def run(simulator: StreamSimulator, *, wait: bool) -> bool:
    """Two cycles with work before, between and after; whether all numbers are right."""
    module, seen = model(), [torch.zeros(n) for n in SHAPES]
    current = simulator.current_stream()
    optimizer = Launching(module.parameters(), current)
    phases = PhaseOffloader(module, optimizer)
    states = [state["momentum_buffer"] for state in optimizer.state.values()]
    right = True
    for cycle in (1, 2):
        for index, (parameter, state) in enumerate(zip(module.parameters(), states, strict=True)):
            current.launch(fill, parameter.data, cycle + 10 * index)
            current.launch(fill, state, cycle + 10 * index + 5)
        handle = phases.offload(wait=wait)
        if not wait and cycle == 2:
            shown = [value.clone() for value in module.state_dict().values()]
            right &= all(bool((v == cycle + 10 * i).all()) for i, v in enumerate(shown))
        handle.wait()
        right &= all(p.untyped_storage().nbytes() == 0 for p in module.parameters())
        phases.reload(wait=wait)
        for parameter, out in zip(module.parameters(), seen, strict=True):
            current.launch(copy_to, out, parameter.data)
        optimizer.step()
        current.synchronize()
        right &= all(bool((v == cycle + 10 * i).all()) for i, v in enumerate(seen))
        right &= all(bool((v == cycle + 10 * i + 5).all()) for i, v in enumerate(optimizer.seen))
    phases.close()
    return right


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("policy", ADVERSARIES)
def test_numbers_are_right_under_every_policy(policy: str, wait: bool) -> None:
    with StreamSimulator(policy) as simulator:
        assert run(simulator, wait=wait)
    assert not simulator.late_uses


def test_what_follows_an_offload_is_not_delayed() -> None:
    with StreamSimulator("immediate:0") as simulator:  # the current stream runs whatever it may
        phases = PhaseOffloader(model())
        handle, after = phases.offload(wait=False), torch.zeros(1)
        simulator.current_stream().launch(fill, after, 3.0)
        simulator.current_stream().record().query()
        assert float(after) == 3
        assert not handle.is_done()
        handle.wait()
        assert handle.is_done()
        phases.reload()


def test_the_state_is_waited_for_by_the_step_alone() -> None:
    followed = []
    with StreamSimulator("lazy") as simulator, pytest.MonkeyPatch.context() as patch:
        module = model()
        optimizer = Launching(module.parameters(), simulator.current_stream())
        phases = PhaseOffloader(module, optimizer)
        phases.offload()
        original = optimizers.Trip.follow
        patch.setattr(
            optimizers.Trip, "follow", lambda t, s: (followed.append(t.n_bytes), original(t, s))[1]
        )
        phases.reload(wait=False)
        assert followed == [4 * sum(SHAPES), 0]  # parameters, and no gradients
        optimizer.step()
        assert followed[2:] == [sum(b.n_bytes for b in phases._contents.blocks["state"])]
        assert followed[2] >= 4 * sum(SHAPES)
        phases.reload()
        optimizer.step()
        assert len(followed) == 3


@pytest.mark.parametrize("policy", ADVERSARIES)
def test_swap_under_every_policy(policy: str) -> None:
    with StreamSimulator(policy) as simulator:
        current = simulator.current_stream()
        first, second = model(), model()
        a, b = PhaseOffloader(first), PhaseOffloader(second)
        for index, parameter in enumerate(second.parameters()):
            current.launch(fill, parameter.data, index)
        b.offload()
        for index, parameter in enumerate(first.parameters()):
            current.launch(fill, parameter.data, index + 7)
        swap(out=a, in_=b, wait=False)
        seen = [torch.zeros(n) for n in SHAPES]
        for out, parameter in zip(seen, second.parameters(), strict=True):
            current.launch(copy_to, out, parameter.data)
        current.synchronize()
        assert [float(out[-1]) for out in seen] == [0, 1, 2, 3]
        swap(out=b, in_=a)
        assert [float(p.data[-1]) for p in first.parameters()] == [7, 8, 9, 10]
        b.reload()
    assert not simulator.late_uses


class SwappedJob:
    """A module, its optimizer with state, its offloader, and the values that they hold."""

    def __init__(self, current: Any, value: float) -> None:
        self.current, self.value, self.module = current, value, model()
        self.optimizer = Launching(self.module.parameters(), current)
        self.phases = PhaseOffloader(self.module, self.optimizer)
        self.seen = [torch.zeros(n) for n in SHAPES]
        with self.phases.away():  # from now on it knows what may leave ahead
            pass

    def write(self) -> None:
        self.value += 100
        states = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        for index, pair in enumerate(zip(self.module.parameters(), states, strict=True)):
            self.current.launch(fill, pair[0].data, self.value + 10 * index)
            self.current.launch(fill, pair[1], self.value + 10 * index + 5)

    def is_right(self) -> bool:
        for parameter, out in zip(self.module.parameters(), self.seen, strict=True):
            self.current.launch(copy_to, out, parameter.data)
        self.optimizer.step()
        self.current.synchronize()
        found = [(float(v.min()), float(v.max())) for v in (*self.seen, *self.optimizer.seen)]
        wanted = [self.value + 10 * i + more for more in (0, 5) for i in range(len(SHAPES))]
        return found == [(v, v) for v in wanted]


def swap_jobs(simulator: StreamSimulator, *, wait: bool) -> bool:
    """Two jobs take turns; whether each finds its own numbers."""
    current = simulator.current_stream()
    here, away, right = SwappedJob(current, 1000), SwappedJob(current, 2000), True
    away.write()
    away.phases.offload()
    for _ in range(3):
        here.write()
        swap(out=here.phases, in_=away.phases, wait=wait)
        here, away = away, here
        right &= here.is_right()
    away.phases.reload()
    return right


@pytest.fixture
def came_early(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether what came in a swap was on its way before all copies out were; some can be."""
    monkeypatch.setattr(contents, "AHEAD_BYTES", 1)
    come, early = offloader._Coming.come, list[bool]()

    def noted(coming: Any, leaving: Any) -> None:
        early.append(coming._offloader._moves._begun is not None)
        come(coming, leaving)

    monkeypatch.setattr(offloader._Coming, "come", noted)
    return early


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("policy", ADVERSARIES)
def test_swapped_jobs_under_every_policy(policy: str, wait: bool, came_early: list[bool]) -> None:
    with StreamSimulator(policy) as simulator:
        assert swap_jobs(simulator, wait=wait)
    assert not simulator.late_uses
    assert came_early == [True] * 3


def test_what_leaves_does_not_wait_for_what_comes(came_early: list[bool]) -> None:
    with StreamSimulator("lazy") as simulator:
        here, away = (SwappedJob(simulator.current_stream(), v) for v in (1000, 2000))
        away.phases.offload()
        leaving, coming = swap(out=here.phases, in_=away.phases, wait=False)
        leaving.wait()
        assert not coming.is_done()
        coming.wait()
    assert came_early == [True]


@pytest.mark.parametrize("fails", ["collect", "reserve"])
def test_what_had_begun_stays_away_if_the_other_cannot_leave(
    fails: str, came_early: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    with StreamSimulator("lazy") as simulator:
        here, away = (SwappedJob(simulator.current_stream(), v) for v in (1000, 2000))
        away.write()
        away.phases.offload()
        here.write()
        owner = here.phases._contents if fails == "collect" else here.phases._moves
        with monkeypatch.context() as patch:
            patch.setattr(owner, fails, raising)
            with pytest.raises(ZeroDivisionError):
                swap(out=here.phases, in_=away.phases, wait=False)
        assert not here.phases.is_away
        assert here.is_right()
        assert away.phases.is_away
        assert all(p.untyped_storage().nbytes() == 0 for p in away.module.parameters())
        away.phases.reload()
        assert away.is_right()
    assert not simulator.late_uses
    assert came_early == []


class Shared(nn.Module):
    """A parameter that is another module's, too, and one of its own."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Parameter(torch.zeros(SHAPES[0]))


@pytest.mark.parametrize("policy", ADVERSARIES)
def test_what_comes_early_is_not_taken_for_what_leaves(policy: str, came_early: list[bool]) -> None:
    """Where two models share a parameter, it is the one's with which it has left."""
    with StreamSimulator(policy) as simulator:
        shared = nn.Parameter(torch.zeros(SHAPES[2]))
        first, second = Shared(shared), Shared(shared)
        optimizer = torch.optim.SGD([first.own], lr=0.1, momentum=0.9)
        first.own.grad = torch.zeros_like(first.own)
        optimizer.step()
        optimizer.zero_grad()
        here, away = PhaseOffloader(first, optimizer), PhaseOffloader(second)
        with here.away():
            pass
        simulator.current_stream().launch(fill, shared.data, 7.0)
        away.offload()
        for _ in range(2):
            swap(out=here, in_=away, wait=False)
            seen = torch.zeros_like(shared)
            simulator.current_stream().launch(copy_to, seen, shared.data)
            simulator.current_stream().synchronize()
            assert float(seen.min()) == float(seen.max()) == 7
            swap(out=away, in_=here)
    assert not simulator.late_uses
    assert came_early == [True, False] * 2  # the second has no state that could leave ahead


def test_nobody_else_finds_what_comes_early_before_it_is_followed(
    came_early: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[bool]()
    with StreamSimulator("lazy") as simulator:
        here, away = (SwappedJob(simulator.current_stream(), v) for v in (1000, 2000))
        away.phases.offload()
        collect = here.phases._contents.collect

        def look(*args: Any) -> Any:
            def use() -> None:
                found.append(away.phases.is_away)
                with away.phases._lock:  # as whoever uses it does
                    found.append(away.phases.is_away)

            thread = threading.Thread(target=use)
            thread.start()
            thread.join(0.2)
            threads.append(thread)
            return collect(*args)

        threads = list[threading.Thread]()
        monkeypatch.setattr(here.phases._contents, "collect", look)
        swap(out=here.phases, in_=away.phases)
        threads[0].join()
    assert found == [True, False]
    assert came_early == [True]


def test_two_threads_swap_in_opposite_directions() -> None:
    """Locks are taken in one order."""
    first, second = PhaseOffloader(model()), PhaseOffloader(model())
    second.offload()

    def turns(out: PhaseOffloader, in_: PhaseOffloader) -> None:
        for _ in range(200):
            swap(out=out, in_=in_)

    pairs = ((first, second), (second, first))
    threads = [threading.Thread(target=turns, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert first.is_away is not second.is_away


def raising(*args: Any) -> None:
    raise ZeroDivisionError


def is_noticed(index: int) -> bool:
    """Whether numbers are wrong under some policy without this wait."""
    for policy in ADVERSARIES:
        try:
            with StreamSimulator(policy, skip_wait=index) as broken:
                if not run(broken, wait=False) or broken.late_uses:
                    return True
        except AssertionError:
            return True
    return False


def test_waits_are_needed() -> None:
    with StreamSimulator("lazy") as simulator:
        run(simulator, wait=False)
    log = list(enumerate(simulator.wait_log))
    leaving = [i for i, (who, whom) in log if who != "current" and whom == "current"]
    coming = [i for i, (who, _) in log if who == "current"]
    # State leaves before the parameters, so that its wait implies theirs.
    assert any(is_noticed(index) for index in leaving)
    # In two cycles the caller follows parameters, and then state.
    assert sum(is_noticed(index) for index in coming) >= 4
