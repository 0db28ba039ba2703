"""The stream simulator: complete waits give right numbers, each missing one gives wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch

from fsdp_offload.core.backend import Backend, Event, Stream
from fsdp_offload.core.devices import CpuBackend, backend_for
from fsdp_offload.core.errors import DeviceError
from tests.helpers.policies import POLICIES
from tests.helpers.simulator import ADVERSARIES, StreamSimulator, use_backend

CPU = torch.device("cpu")
N_BUCKETS, N_SLOTS, N_STEPS, NUMEL = 5, 2, 2, 4


# --------------------------------------------------------------------------- a toy pipeline


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def write_gradient(gradient: torch.Tensor, parameter: torch.Tensor) -> None:
    torch.mul(parameter, 0.5, out=gradient).add_(1)


def update(slot: torch.Tensor, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    slot.mul_(0.9).add_(gradient)
    parameter.sub_(slot)


class Toy:
    """Momentum SGD whose momentum travels through slots; backward feeds it bucket by bucket."""

    def __init__(self, *, drop_early: bool = False, persistent_gradients: bool = True) -> None:
        self.backend: Backend = backend_for(CPU)
        self.h2d, self.compute, self.d2h = map(self.backend.stream, ("h2d", "update", "d2h"))
        self.current = self.backend.current_stream()
        start = torch.arange(N_BUCKETS * NUMEL, dtype=torch.float32).view(N_BUCKETS, NUMEL)
        self.parameters = [row.clone() for row in start / 7]
        self.state = [row.clone() for row in start.flip(0) / 3]
        self.slots = [self.backend.allocate(4 * NUMEL).view(torch.float32) for _ in range(N_SLOTS)]
        self.free: list[Event | None] = [None] * N_SLOTS
        self.updated: Event | None = None
        self.gradients = [torch.zeros(NUMEL) for _ in range(N_BUCKETS)]
        self.drop_early, self.persistent_gradients = drop_early, persistent_gradients
        self.n_done = 0

    def bucket(self, index: int) -> None:
        """One bucket's way from its gradient to its updated state in host memory."""
        if not self.persistent_gradients:
            self.gradients[index] = torch.zeros(NUMEL)
        self.current.launch(write_gradient, self.gradients[index], self.parameters[index])
        ready = self.current.record()
        number = self.n_done % N_SLOTS
        slot, free = self.slots[number], self.free[number]
        if free is not None:
            self.h2d.wait(free)
        self.h2d.launch(copy, slot, self.state[index])
        loaded = self.h2d.record()
        self.compute.wait(ready)
        self.compute.wait(loaded)
        self.compute.launch(update, slot, self.parameters[index], self.gradients[index])
        self.updated = self.compute.record()
        if self.drop_early:
            self.gradients[index] = torch.zeros(0)
        self.d2h.wait(self.updated)
        self.d2h.launch(copy, self.state[index], slot)
        self.free[number] = self.d2h.record()
        self.n_done += 1

    def run(self) -> torch.Tensor:
        for _ in range(N_STEPS):
            if self.updated is not None:
                self.current.wait(self.updated)
            if not self.persistent_gradients:
                self.gradients = [torch.zeros(0)] * N_BUCKETS
            for index in reversed(range(N_BUCKETS)):
                self.bucket(index)
        self.current.wait(self.d2h.record())
        self.current.synchronize()
        return torch.stack([*self.parameters, *self.state])


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    with use_backend(CpuBackend(CPU)):
        return Toy().run()


def simulate(
    policy: str, make: Callable[[], Toy] = Toy, *, skip_wait: int | None = None
) -> tuple[torch.Tensor, StreamSimulator]:
    with StreamSimulator(policy, skip_wait=skip_wait) as simulator:
        return make().run(), simulator


def temporary() -> Toy:
    return Toy(persistent_gradients=False)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [Toy, temporary])
def test_complete_waits_give_the_cpu_backends_numbers(
    policy: str, make: Callable[[], Toy], expected: torch.Tensor
) -> None:
    result, simulator = simulate(policy, make)

    assert torch.equal(result, expected)
    assert simulator.late_uses == []


def test_without_any_single_wait_some_adversary_gives_other_numbers(
    expected: torch.Tensor,
) -> None:
    _, simulator = simulate("lazy")
    waits = simulator.wait_log

    # Per bucket: gradient ready, state loaded, updated, and a free slot but for the first ones.
    assert len(waits) == 4 * N_BUCKETS * N_STEPS - N_SLOTS + (N_STEPS - 1) + 1
    unnoticed = [
        (k, names)
        for k, names in enumerate(waits)
        if all(torch.equal(simulate(policy, skip_wait=k)[0], expected) for policy in ADVERSARIES)
    ]
    assert unnoticed == []


# --------------------------------------------------------------------------- events and the host


def append(log: list[str], text: str) -> None:
    log.append(text)


def test_nothing_runs_before_the_host_waits() -> None:
    simulator, log = StreamSimulator(), []
    stream = simulator.stream("a")
    empty = stream.record()
    stream.launch(append, log, "first")
    first = stream.record()
    stream.launch(append, log, "second")

    assert empty.query()
    assert not first.query()
    assert log == []
    first.synchronize()
    assert first.query()
    assert log == ["first"]
    stream.synchronize()
    assert log == ["first", "second"]


@pytest.mark.parametrize(
    ("policy", "before", "order"),
    [
        ("lazy", [], ["a1"]),
        ("eager", [], ["b1", "b2", "a1"]),
        ("immediate", ["a1", "b1", "b2", "a2"], []),
        ("immediate:b", ["b1", "b2"], ["a1"]),
        ("immediate:2", ["b1", "b2"], ["a1"]),
        ("lag:a", ["b1", "b2"], ["a1"]),
        ("lag:b", ["a1", "a2"], []),
    ],
)
def test_policies_choose_what_runs(policy: str, before: list[str], order: list[str]) -> None:
    simulator, log = StreamSimulator(policy), []
    a, b = simulator.stream("a"), simulator.stream("b")
    a.launch(append, log, "a1")
    event = a.record()
    b.launch(append, log, "b1")
    b.launch(append, log, "b2")
    a.launch(append, log, "a2")

    assert log == before
    event.synchronize()
    assert log[len(before) :] == order


def random_order(policy: str) -> list[str]:
    simulator, log = StreamSimulator(policy), []
    streams = [simulator.stream(name) for name in "abc"]
    for number in range(10):
        for stream in streams:
            stream.launch(append, log, f"{stream.name}{number}")
    streams[0].synchronize()
    log.append("|")
    simulator.synchronize()
    return log


def test_the_random_policy_is_fixed_by_its_seed() -> None:
    orders = [random_order(f"random:{seed}") for seed in range(6)]

    assert orders == [random_order(f"random:{seed}") for seed in range(6)]
    assert len({tuple(order) for order in orders}) == 6
    for order in orders:
        for name in "abc":
            assert [e for e in order if e[0] == name] == [f"{name}{n}" for n in range(10)]


def test_host_waits_are_counted_and_can_be_skipped() -> None:
    def read(skip_sync: int | None) -> tuple[list[float], list[str]]:
        simulator = StreamSimulator(skip_sync=skip_sync)
        stream, tensor, seen = simulator.stream("d2h"), torch.zeros(1), []
        for value in (1.0, 2.0):
            stream.launch(torch.Tensor.fill_, tensor, value)
            stream.record().synchronize()
            seen.append(tensor.item())
        stream.synchronize()
        assert len(simulator.sync_log) == 2
        return seen, simulator.sync_log

    assert read(None) == ([1.0, 2.0], ["d2h", "d2h"])
    assert read(0) == ([0.0, 2.0], ["d2h", "d2h"])
    assert read(1) == ([1.0, 1.0], ["d2h", "d2h"])


def fail() -> None:
    raise RuntimeError("kernel failed")


def test_an_error_surfaces_where_it_ran_and_its_entry_counts_as_run() -> None:
    simulator, log = StreamSimulator(), []
    stream = simulator.stream("a")
    stream.launch(fail)
    stream.launch(append, log, "after")

    with pytest.raises(RuntimeError, match="kernel failed"):
        stream.synchronize()
    assert log == []
    stream.synchronize()
    assert log == ["after"]
    with pytest.raises(RuntimeError, match="kernel failed"):
        StreamSimulator("immediate").current_stream().launch(fail)


def test_a_deadlock_names_the_streams_and_their_waits() -> None:
    simulator = StreamSimulator()
    a, b = simulator.stream("a"), simulator.stream("b")

    def wait_for_b() -> None:
        b.record().synchronize()

    a.launch(wait_for_b)
    b.wait(a.record())

    with pytest.raises(AssertionError) as caught:
        a.synchronize()
    message = str(caught.value)
    assert "deadlock: event 1 of 'b' cannot be reached" in message
    assert "stream 'b' at entry 0 waits for event 1 of 'a'" in message
    assert "stream 'a' is inside of" in message


def test_events_of_other_backends_are_refused() -> None:
    stream = StreamSimulator().stream("a")
    for other in (StreamSimulator(), CpuBackend(CPU)):
        with pytest.raises(DeviceError, match="does not belong to this simulator"):
            stream.wait(other.stream("b").record())


def test_an_inline_current_stream_keeps_up_with_plain_torch_operations() -> None:
    def read(skip_wait: int | None) -> float:
        simulator = StreamSimulator(inline_current=True, skip_wait=skip_wait)
        side, tensor = simulator.stream("side"), torch.zeros(())
        side.launch(torch.Tensor.fill_, tensor, 1.0)
        assert tensor.item() == 0.0
        simulator.current_stream().wait(side.record())
        return tensor.item()

    assert read(None) == 1.0
    assert read(0) == 0.0


# --------------------------------------------------------------------------- operands


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


@pytest.fixture
def racing() -> Iterator[tuple[StreamSimulator, Stream]]:
    """A simulator whose current stream runs at once, and a stream that lags behind it."""
    with StreamSimulator("immediate:current") as simulator:
        yield simulator, simulator.stream("side")


def total(out: list[float], *operands: object) -> None:
    def values(operand: object) -> Iterator[float]:
        if isinstance(operand, torch.Tensor):
            yield operand.double().sum().item()
        elif isinstance(operand, dict):
            yield from values(list(operand.values()))
        elif isinstance(operand, (list, tuple)):
            for part in operand:
                yield from values(part)

    out.append(sum(values(operands)))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[1:].view(3, 1).t(),
        lambda tensor: [1, (tensor,)],
        lambda tensor: {"a": tensor, "b": None},
        lambda tensor: Pair(tensor, 3),
        lambda tensor: torch.nn.Parameter(tensor),
    ],
)
def test_operands_dropped_before_the_current_stream_waited_read_nan(
    racing: tuple[StreamSimulator, Stream], wrap: Callable[[torch.Tensor], object]
) -> None:
    simulator, side = racing
    for is_ordered in (True, False):
        out: list[float] = []
        operand = wrap(torch.ones(4))
        side.launch(total, out, operand)
        if is_ordered:
            simulator.current_stream().wait(side.record())
        del operand
        simulator.current_stream()  # any call: here the drop is noticed
        side.synchronize()
        assert (out[0] == out[0]) is is_ordered
        assert bool(simulator.late_uses) is not is_ordered


@pytest.mark.parametrize("keep", ["view", "storage", "graph", "later operand"])
def test_memory_that_somebody_holds_is_not_reused(
    racing: tuple[StreamSimulator, Stream], keep: str
) -> None:
    simulator, side = racing
    tensor, out = torch.ones(4), []
    kept: object
    if keep == "view":
        kept = tensor[2:]
    elif keep == "storage":
        kept = tensor.untyped_storage()
    elif keep == "graph":
        kept = torch.ones(4, requires_grad=True) * tensor
    else:
        kept = [tensor]
    side.launch(total, out, tensor)
    del tensor
    simulator.current_stream()
    side.launch(total, out, kept if keep == "later operand" else None)
    side.synchronize()
    assert out[0] == 4.0
    del kept
    simulator.synchronize()
    assert simulator.late_uses == []


def test_what_a_launched_function_keeps_is_not_reused() -> None:
    simulator, kept = StreamSimulator(), []
    side = simulator.stream("side")
    tensor = torch.ones(2)
    side.launch(kept.append, tensor)
    del tensor
    side.synchronize()
    simulator.synchronize()

    assert kept[0].tolist() == [1.0, 1.0]


def test_a_storage_resized_under_a_pending_launch_is_an_error() -> None:
    simulator = StreamSimulator()
    stream, tensor = simulator.stream("a"), torch.ones(4)
    stream.launch(torch.Tensor.zero_, tensor)
    tensor.untyped_storage().resize_(0)

    with pytest.raises(AssertionError, match="resized to 0 bytes"):
        stream.synchronize()
