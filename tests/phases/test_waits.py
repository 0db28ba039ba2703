"""The waits of phases, under the stream simulator: each one is needed, and they are enough."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import PhaseOffloader, swap
from fsdp_offload.memory.transfer import StorageBlock
from fsdp_offload.testing import ADVERSARIES, StreamSimulator

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPES = (600_000, 40, 270_000, 7)  # one travels alone, three together


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


@pytest.mark.parametrize("policy", ADVERSARIES)
def test_copies_end_although_nobody_waits_for_them(policy: str) -> None:
    with StreamSimulator(policy) as simulator:
        job = SwappedJob(simulator.current_stream(), 1000)
        job.write()
        job.phases.offload()
        job.phases.reload(wait=False)
        del job.phases
        gc.collect()
        assert job.is_right()
    assert not simulator.late_uses


@pytest.mark.parametrize("policy", ADVERSARIES)
def test_a_failed_offload_leaves_no_copy_under_way(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One could write into staging memory that the caller has by then."""
    with StreamSimulator(policy) as simulator:
        job = SwappedJob(simulator.current_stream(), 1000)
        job.write()
        view, left = StorageBlock.view, iter(range(5, -1, -1))  # behind all of the parameters

        def fail(block: StorageBlock) -> Tensor:
            if next(left, -1) == 0:
                raise ZeroDivisionError
            return view(block)

        with monkeypatch.context() as patch:
            patch.setattr(StorageBlock, "view", fail)
            with pytest.raises(ZeroDivisionError):
                job.phases.offload()
        assert job.is_right()
        with job.phases.away():
            pass
        assert job.is_right()
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
    with StreamSimulator("lazy") as simulator:
        module = model()
        optimizer = Launching(module.parameters(), simulator.current_stream())
        phases = PhaseOffloader(module, optimizer)
        phases.offload()
        waited = len(simulator.wait_log)
        phases.reload(wait=False)
        assert [who for who, _ in simulator.wait_log[waited:]].count("current") == 1
        for count in (2, 2):  # once
            optimizer.step()
            assert [who for who, _ in simulator.wait_log[waited:]].count("current") == count
        phases.reload()


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


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("policy", ADVERSARIES)
def test_swapped_jobs_under_every_policy(policy: str, wait: bool) -> None:
    with StreamSimulator(policy) as simulator:
        assert swap_jobs(simulator, wait=wait)
    assert not simulator.late_uses


def test_what_leaves_does_not_wait_for_what_comes() -> None:
    with StreamSimulator("lazy") as simulator:
        here, away = (SwappedJob(simulator.current_stream(), v) for v in (1000, 2000))
        away.phases.offload()
        leaving, coming = swap(out=here.phases, in_=away.phases, wait=False)
        leaving.wait()
        assert not coming.is_done()
        coming.wait()


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


def goes_wrong(policy: str, **skipped: int) -> bool:
    """Whether numbers are wrong without a wait, or memory goes under a copy."""
    try:
        with StreamSimulator(policy, **skipped) as broken:
            return not run(broken, wait=False) or bool(broken.late_uses)
    except AssertionError:
        return True


def test_every_wait_is_needed() -> None:
    with StreamSimulator("lazy") as simulator:
        run(simulator, wait=False)
    unnoticed = [
        pair
        for index, pair in enumerate(simulator.wait_log)
        if not any(goes_wrong(policy, skip_wait=index) for policy in ADVERSARIES)
    ]
    # On the way back memory that torch's allocator has cached is waited for, which the simulator
    # has none of.
    assert unnoticed == [("phase_in", "current")] * 2


@pytest.mark.long
def test_memory_goes_after_its_copy() -> None:
    with StreamSimulator("lazy") as simulator:
        run(simulator, wait=False)
    noticed = [
        any(goes_wrong(policy, skip_sync=index) for policy in ADVERSARIES)
        for index in range(len(simulator.sync_log))
    ]
    assert sum(noticed) == 2 * 4  # in each cycle two groups of parameters, and two of state
