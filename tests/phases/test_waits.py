"""The waits of phases, under the stream simulator: each one is needed, and they are enough."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import FixedAddressRegion, PhaseOffloader, swap
from fsdp_offload.link import transfer
from fsdp_offload.link.block import StorageBlock
from tests.helpers.policies import POLICIES
from tests.helpers.simulator import ADVERSARIES, StreamSimulator
from tests.phases.twins import failing

SHAPES = (600_000, 40, 270_000, 7)  # the first is a batch of its own, the others are one together


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BATCH_BYTES", 2 << 20)


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


class Job:
    """A module, its optimizer with state, its offloader, and the values that they hold."""

    def __init__(self, simulator: StreamSimulator, value: float = 1000) -> None:
        self.current, self.value = simulator.current_stream(), value
        self.module = nn.ParameterList([nn.Parameter(torch.zeros(n), False) for n in SHAPES])
        self.optimizer = Launching(self.module.parameters(), self.current)
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


def run(simulator: StreamSimulator, *, wait: bool) -> bool:
    """Two cycles with work before, between and after; whether all numbers are right."""
    job = Job(simulator)
    right = True
    for cycle in range(2):
        job.write()
        handle = job.phases.offload(wait=wait)
        if not wait and cycle:
            shown = [value.clone() for value in job.module.state_dict().values()]
            right &= all(bool((v == job.value + 10 * i).all()) for i, v in enumerate(shown))
        handle.wait()
        right &= all(p.untyped_storage().nbytes() == 0 for p in job.module.parameters())
        job.phases.reload(wait=wait)
        right &= job.is_right()
    job.phases.close()
    return right


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_numbers_are_right_under_every_policy(policy: str, wait: bool) -> None:
    with StreamSimulator(policy) as simulator:
        assert run(simulator, wait=wait)
    assert not simulator.late_uses


@pytest.mark.parametrize("policy", POLICIES)
def test_swapped_jobs_under_every_policy(policy: str) -> None:
    """Two take turns; each finds its own numbers."""
    with StreamSimulator(policy) as simulator:
        here, away = Job(simulator, 1000), Job(simulator, 2000)
        away.write()
        away.phases.offload()
        for wait in (False, True, False):
            here.write()
            swap(out=here.phases, in_=away.phases, wait=wait)
            here, away = away, here
            assert here.is_right()
        away.phases.reload()
    assert not simulator.late_uses


@pytest.mark.parametrize("policy", POLICIES)
def test_a_region_under_every_policy(policy: str) -> None:
    """Copies wait for the caller's work, and it for them; so does memory that is not copied."""
    with StreamSimulator(policy) as simulator:
        region, out = FixedAddressRegion("kv", "cpu", chunk_bytes="64KiB"), torch.zeros(1)
        tensor = region.empty(49_152, dtype=torch.float32)
        current = simulator.current_stream()
        for value in (3.0, 4.0):
            current.launch(fill, tensor, value)
            region.pause()
            handle = region.resume(wait=False)
            current.launch(copy_to, out, tensor[-1:])
            current.synchronize()
            assert float(out) == value
            handle.wait()
        current.launch(fill, tensor, 2.0)
        current.launch(copy_to, out, tensor[-1:])
        region.pause(save=False)
        assert float(out) == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_copies_end_although_the_caller_does_not_wait(policy: str) -> None:
    with StreamSimulator(policy) as simulator:
        job = Job(simulator)
        job.write()
        job.phases.offload()
        job.phases.reload(wait=False)
        del job.phases
        gc.collect()
        assert job.is_right()
    assert not simulator.late_uses


@pytest.mark.parametrize("policy", POLICIES)
def test_a_failed_offload_leaves_no_copy_under_way(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StreamSimulator(policy) as simulator:
        job = Job(simulator)
        job.write()
        fail = failing(StorageBlock.view, 5, ZeroDivisionError())  # behind all of the parameters
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
        job, after = Job(simulator), torch.zeros(1)
        handle = job.phases.offload(wait=False)
        job.current.launch(fill, after, 3.0)
        job.current.record().query()
        assert float(after) == 3
        assert not handle.is_done()
        assert repr(handle).endswith(": copying)")
        handle.wait()
        assert handle.is_done()
        job.phases.reload()


def test_the_state_is_waited_for_by_the_step_alone() -> None:
    with StreamSimulator("lazy") as simulator:
        job = Job(simulator)
        job.phases.offload()
        waited = len(simulator.wait_log)
        job.phases.reload(wait=False)
        assert [who for who, _ in simulator.wait_log[waited:]].count("current") == 1
        for count in (2, 2):  # once
            job.optimizer.step()
            assert [who for who, _ in simulator.wait_log[waited:]].count("current") == count
        job.phases.reload()


def test_an_offload_does_not_wait_for_the_reload_beside_it() -> None:
    with StreamSimulator("lazy") as simulator:
        here, away = Job(simulator), Job(simulator)
        away.phases.offload()
        out, back = swap(out=here.phases, in_=away.phases, wait=False)
        out.wait()
        assert not back.is_done()
        back.wait()


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
    assert unnoticed == [("phase:in", "current")] * 2


@pytest.mark.long
def test_memory_goes_after_its_copy() -> None:
    with StreamSimulator("lazy") as simulator:
        run(simulator, wait=False)
    noticed = [
        any(goes_wrong(policy, skip_sync=index) for policy in ADVERSARIES)
        for index in range(len(simulator.sync_log))
    ]
    assert sum(noticed) == 2 * 4  # in each cycle two batches of parameters, and two of state
