"""Streams that take turns: every order that CUDA allows keeps what a single stream promises."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from fsdp_offload.device import CHUNK_BYTES, _TakingTurns, in_chunks


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


class Chunk:
    """What is copied: notes when, through the machine's current stream."""

    def __init__(self, machine: Machine, log: list[str], name: str) -> None:
        self.machine, self.log, self.name = machine, log, name

    def copy_(self, source: object, *, non_blocking: bool) -> None:
        assert non_blocking
        assert self.machine.current is not None
        self.machine.current.queue.append(("call", lambda: self.log.append(self.name)))


@pytest.mark.parametrize("seed", range(60))
def test_copies_come_between_what_was_waited_for_and_what_is_recorded(seed: int) -> None:
    machine, log = Machine(seed), list[str]()
    turns = _TakingTurns([Stream(machine) for _ in range(3)], machine, "h2d")
    before, after = Stream(machine), Stream(machine)
    counts = [machine.random.randrange(1, 8) for _ in range(12)]
    for bucket, count in enumerate(counts):
        before.queue.append(("call", lambda bucket=bucket: log.append(f"free {bucket}")))
        free = Event()
        free.record(before)
        turns.wait(free)  # type: ignore[arg-type]
        chunks: Any = [Chunk(machine, log, f"{bucket}.{i}") for i in range(count)]
        turns.copy(chunks, chunks)
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


def test_what_is_launched_comes_after_all_copies_and_before_later_ones() -> None:
    for seed in range(40):
        machine, log = Machine(seed), list[str]()
        turns = _TakingTurns([Stream(machine) for _ in range(3)], machine, "h2d")

        def note(name: str, machine: Machine = machine, log: list[str] = log) -> None:
            Chunk(machine, log, name).copy_(None, non_blocking=True)

        first: Any = [Chunk(machine, log, f"a{i}") for i in range(5)]
        last: Any = [Chunk(machine, log, f"b{i}") for i in range(5)]
        turns.copy(first, first)
        turns.launch(note, "launched")
        turns.copy(last, last)
        machine.run()
        place = log.index("launched")
        assert sorted(log[:place]) == [f"a{i}" for i in range(5)]
        assert sorted(log[place + 1 :]) == [f"b{i}" for i in range(5)]


@pytest.mark.parametrize(
    "numel", [0, 1, 5, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 7]
)
def test_chunks_are_the_tensor_in_parts_of_like_size(numel: int) -> None:
    tensor = torch.empty(numel, dtype=torch.uint8)
    parts = in_chunks([tensor])
    assert sum(part.numel() for part in parts) == numel
    assert all(part.numel() <= CHUNK_BYTES for part in parts)
    assert len(parts) == max(1, -(-numel // CHUNK_BYTES))
    address = tensor.data_ptr()
    for part in filter(torch.Tensor.numel, parts):
        assert part.data_ptr() == address
        address += part.numel()
