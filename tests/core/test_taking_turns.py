"""Streams that take turns: every order that CUDA allows keeps what a single stream promises."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from fsdp_offload.core.backend import TURN_BYTES, in_turns
from fsdp_offload.core.devices import _TakingTurns, _TorchCommands


class Stream:
    """A queue; :class:`Machine` runs entries of streams in any order that events allow."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.queue, self.done = machine, list[tuple[str, Any]](), 0
        machine.streams.append(self)

    def wait_event(self, event: Event) -> None:
        if event.point is not None:  # what it stands for now, whatever it is recorded on later
            self.queue.append(("wait", event.point))

    def __enter__(self) -> None:
        self.machine.current = self

    def __exit__(self, *_: object) -> None:
        self.machine.current = None


class Event:
    def __init__(self, **_: object) -> None:
        self.point: tuple[Stream, int] | None = None

    def record(self, stream: Stream) -> None:
        self.point = (stream, stream.done + len(stream.queue))


class Machine:
    """Stands for ``torch.cuda`` as far as :class:`_TakingTurns` uses it."""

    Event = Event

    def __init__(self, seed: int) -> None:
        self.streams: list[Stream] = []
        self.current: Stream | None = None
        self.random = random.Random(seed)

    def is_ready(self, stream: Stream) -> bool:
        if not stream.queue:
            return False
        kind, value = stream.queue[0]
        return kind != "wait" or value[0].done >= value[1]

    def run(self) -> None:
        while ready := [stream for stream in self.streams if self.is_ready(stream)]:
            stream = self.random.choice(ready)
            kind, value = stream.queue.pop(0)
            stream.done += 1
            if kind == "call":
                value()
        assert not any(stream.queue for stream in self.streams), "a deadlock"


class Commands(_TorchCommands):
    """Copies that only note their names when they run."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def copy(self, stream: Any, targets: Any, sources: Any) -> None:
        for name in targets:
            stream.queue.append(("call", lambda name=name: self.log.append(name)))


LATER = [pytest.param(seed, marks=pytest.mark.long) for seed in range(5, 60)]


def turns_of(machine: Machine, log: list[str]) -> _TakingTurns:
    raws = [Stream(machine) for _ in range(3)]
    return _TakingTurns(raws, machine, "h2d", Commands(log))


@pytest.mark.parametrize("seed", [*range(5), *LATER])
def test_copies_come_between_what_was_waited_for_and_what_is_recorded(seed: int) -> None:
    machine, log = Machine(seed), list[str]()
    turns = turns_of(machine, log)
    before, after = Stream(machine), Stream(machine)
    counts = [machine.random.randrange(1, 8) for _ in range(12)]
    for bucket, count in enumerate(counts):
        before.queue.append(("call", lambda bucket=bucket: log.append(f"free {bucket}")))
        free = Event()
        free.record(before)
        turns.wait(free)  # type: ignore[arg-type]
        chunks: Any = [[f"{bucket}.{i}"] for i in range(count)]
        turns.copy_in_turns(chunks, chunks)
        arrived: Any = turns.record()
        after.wait_event(arrived)
        after.queue.append(("call", lambda bucket=bucket: log.append(f"used {bucket}")))
    machine.run()
    at = {name: position for position, name in enumerate(log)}
    assert len(log) == len(at) == sum(counts) + 2 * len(counts)
    order = [f"{bucket}.{i}" for bucket, count in enumerate(counts) for i in range(count)]
    for position, name in enumerate(order):
        bucket = int(name.split(".")[0])
        assert at[f"free {bucket}"] < at[name] < at[f"used {bucket}"]
        if position >= 2:  # one may run beside its neighbour, never beside the one before
            assert at[order[position - 2]] < at[name]


@pytest.mark.parametrize("seed", [*range(5), *LATER])
def test_copies_to_the_same_targets_may_be_kept_in_order(seed: int) -> None:
    machine, log = Machine(seed), list[str]()
    turns = turns_of(machine, log)
    for _ in range(6):
        chunks: Any = [["again"]]
        turns.copy_in_turns(chunks, chunks)
        turns.keep_order()
        chunks = [["other"], ["other"]]
        turns.copy_in_turns(chunks, chunks)
        turns.keep_order()
    machine.run()
    assert log == ["again", "other", "other"] * 6


def test_what_is_launched_comes_after_all_copies_and_before_later_ones() -> None:
    for seed in range(40):
        machine, log = Machine(seed), list[str]()
        turns = turns_of(machine, log)

        def note(name: str, machine: Machine = machine, log: list[str] = log) -> None:
            assert machine.current is not None
            machine.current.queue.append(("call", lambda: log.append(name)))

        first: Any = [[f"a{i}"] for i in range(5)]
        last: Any = [[f"b{i}"] for i in range(5)]
        turns.copy_in_turns(first, first)
        turns.launch(note, "launched")
        turns.copy_in_turns(last, last)
        machine.run()
        place = log.index("launched")
        assert sorted(log[:place]) == [f"a{i}" for i in range(5)]
        assert sorted(log[place + 1 :]) == [f"b{i}" for i in range(5)]


@pytest.mark.parametrize(
    "numel", [0, 1, 5, TURN_BYTES - 1, TURN_BYTES, TURN_BYTES + 1, 3 * TURN_BYTES + 7]
)
def test_a_large_tensor_is_cut_into_turns_of_like_size(numel: int) -> None:
    tensor = torch.empty(numel, dtype=torch.uint8)
    turns = in_turns([tensor])
    assert all(len(turn) == 1 for turn in turns)
    parts = [part for turn in turns for part in turn]
    assert sum(part.numel() for part in parts) == numel
    assert all(part.numel() <= TURN_BYTES for part in parts)
    assert len(parts) == max(1, -(-numel // TURN_BYTES))
    address = tensor.data_ptr()
    for part in filter(torch.Tensor.numel, parts):
        assert part.data_ptr() == address
        address += part.numel()


def test_small_tensors_share_a_turn() -> None:
    third = TURN_BYTES // 3
    sizes = [third, third, third, 1, 0, TURN_BYTES, third, TURN_BYTES - third + 1]
    turns = in_turns([torch.empty(size, dtype=torch.uint8) for size in sizes])
    assert [[part.numel() for part in turn] for turn in turns] == [
        [third, third, third, 1, 0],
        [TURN_BYTES],
        [third],
        [TURN_BYTES - third + 1],
    ]
