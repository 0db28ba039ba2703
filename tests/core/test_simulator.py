"""The stream simulator: orders, errors and lifetimes. That it notices each missing wait of a
pipeline is shown by tests that remove them, such as ``tests/optimizer/test_ring_waits.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch

from fsdp_offload.core.backend import Stream
from fsdp_offload.core.devices import CpuBackend
from fsdp_offload.core.errors import DeviceError
from tests.helpers.simulator import StreamSimulator

CPU = torch.device("cpu")


# --------------------------------------------------------------------------- events and the host


def append(log: list[str], text: str) -> None:
    log.append(text)


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
