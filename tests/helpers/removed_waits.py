"""What tests of waits share: a simulator that removes single waits, and what orders them.

:class:`Simulator` notes the order of calls, so that :class:`Order` can tell which waits others
imply. The host lane has no thread here: what it does is done when something waits for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_offload.core.backend import Event
from fsdp_offload.optimizer import host
from fsdp_offload.plan import residency
from tests.helpers.compare import same
from tests.helpers.simulator import ADVERSARIES, SimulatedEvent, SimulatedStream, StreamSimulator

CPU = torch.device("cpu")
HOST = -1  # stands where the index of a stream does, for waits of the host


# --------------------------------------------------------------------------- order of the calls

Clock = dict[int, int]
"""Per stream, how many of its launches have run."""


@dataclass
class Call:
    """One call on a stream, or a wait of the host."""

    kind: str  # "launch", "wait", "sync"
    stream: int
    position: int = 0  # entries of the stream after it
    event: tuple[int, int] = (HOST, 0)  # stream and position


@dataclass
class Order:
    """What must have run before what, from the calls that were made."""

    calls: list[Call] = field(default_factory=list)

    def waits(self) -> list[Call]:
        return [call for call in self.calls if call.kind == "wait"]

    def implied(self, without: int) -> bool:
        """Whether the wait with this number (among waits) orders nothing that was not ordered.

        That is so if the next launch on its stream comes after all that the event stands for
        without it, too, or if no launch follows.
        """
        clocks: dict[int, Clock] = defaultdict(dict)
        history: dict[int, list[tuple[int, Clock]]] = defaultdict(list)
        removed, stands_for = self.waits()[without], Clock()
        seen = False
        for call in self.calls:
            clock = clocks[call.stream]
            if call.kind == "launch":
                if seen and call.stream == removed.stream:
                    return all(clock.get(s, 0) >= count for s, count in stands_for.items())
                _join(clock, clocks[HOST])
                clock[call.stream] = clock.get(call.stream, 0) + 1
            else:
                event = _at(history[call.event[0]], call.event[1])
                if call is removed:
                    seen, stands_for = True, event
                else:  # after a wait of the host, all later calls come after
                    for each in clocks.values() if call.kind == "sync" else (clock,):
                        _join(each, event)
            history[call.stream].append((call.position, dict(clock)))
        return True


def _join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


def _at(history: list[tuple[int, Clock]], position: int) -> Clock:
    """Everything that has run when a stream's entries have run up to the position."""
    return next((clock for reached, clock in reversed(history) if reached <= position), {})


# --------------------------------------------------------------------------- the simulator

Skip = tuple[str, int]
"""Kind of wait ("wait", "sync" or "drain") and its number among those."""
NOTHING: Skip = ("nothing", -1)


class Simulator(StreamSimulator):
    """Also notes the order of calls, can ignore the host's wait for a whole stream, and gives out
    memory that the caller's stream still writes to."""

    def __init__(self, policy: str, skip: Skip = NOTHING, *, inline_current: bool = False) -> None:
        kind, index = self.skip = skip
        super().__init__(
            policy,
            skip_wait=index if kind == "wait" else None,
            skip_sync=index if kind == "sync" else None,
            inline_current=inline_current,
        )
        self._current.__class__ = CountedStream
        self.order = Order()
        self.drain_log: list[str] = []

    def allocate(self, n_bytes: int) -> Tensor:
        memory = super().allocate(n_bytes)
        self.current_stream().launch(_scribble, memory)  # by its last owner
        return memory

    def stream(self, name: str, *, is_urgent: bool = False) -> SimulatedStream:
        made = super().stream(name)
        made.__class__ = CountedStream
        return made

    def _launch(self, stream: SimulatedStream, fn: Any, operands: tuple[Any, ...]) -> None:
        super()._launch(stream, fn, operands)
        self.order.calls.append(Call("launch", stream.index, stream.n_enqueued))

    def _wait(self, stream: SimulatedStream, event: Event) -> None:
        super()._wait(stream, event)
        assert isinstance(event, SimulatedEvent)
        at = (event.stream.index, event.position)
        self.order.calls.append(Call("wait", stream.index, stream.n_enqueued, at))

    def _synchronize(self, event: SimulatedEvent) -> None:
        super()._synchronize(event)
        self.order.calls.append(Call("sync", HOST, 0, (event.stream.index, event.position)))


class CountedStream(SimulatedStream):
    """A stream whose ``synchronize`` is counted."""

    def synchronize(self) -> None:
        simulator = self.simulator
        assert isinstance(simulator, Simulator)
        simulator.drain_log.append(self.name)
        if simulator.skip != ("drain", len(simulator.drain_log) - 1):
            super().synchronize()
            simulator.order.calls.append(Call("sync", HOST, 0, (self.index, self.n_enqueued)))


def _scribble(memory: Tensor) -> None:
    memory.fill_(0xFF)  # NaN


def adversaries(skip: Skip, order: Order) -> list[str]:
    """All policies, those first that are likely to show this missing wait."""
    likely = ["lazy", "immediate"]
    if skip[0] == "wait":
        call = order.waits()[skip[1]]
        likely = [f"immediate:{call.stream}", f"lag:{call.event[0]}", *likely]
    return list(dict.fromkeys((*likely, *ADVERSARIES)))


def use_few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than buckets, in every lane."""
    monkeypatch.setattr(residency, "LEAST_SLOTS", 2)
    monkeypatch.setattr(host, "HOST_SLOTS", 2)


# --------------------------------------------------------------------------- one wait less


class Removal:
    """Runs of scenarios under adversaries, complete or with one wait removed.

    Args:
        run: makes a run of a scenario under a policy: the tensors it comes to, its simulator.
        expect: the same tensors without a simulator.
        ours: whether waits of a pair of streams are this package's.
    """

    def __init__(
        self,
        run: Callable[[Any, str, Skip], tuple[list[Tensor], Simulator]],
        expect: Callable[[Any], list[Tensor]],
        ours: Callable[[tuple[str, str]], bool] = lambda pair: True,
    ) -> None:
        self._run, self.expected, self._ours = run, cache(expect), ours
        self.complete = cache(self._complete)

    def _complete(self, scene: Any) -> tuple[Simulator, list[int], list[int]]:
        """The simulator of a complete run; numbers of waits that are needed, and implied ones."""
        _, simulator = self._run(scene, "lazy", NOTHING)
        needed, implied = list[int](), list[int]()
        for index, pair in enumerate(simulator.wait_log):
            if self._ours(pair):
                (implied if simulator.order.implied(index) else needed).append(index)
        return simulator, needed, implied

    def check(self, scene: Any, policies: Sequence[str]) -> None:
        """Complete waits give the expected tensors, and nothing is used after its end."""
        for policy in policies:
            found, simulator = self._run(scene, policy, NOTHING)
            assert same(found, self.expected(scene)), policy
            assert simulator.late_uses == [], policy

    def shows(self, scene: Any, policy: str, skip: Skip) -> bool:
        """Whether the missing wait is noticed under this policy."""
        found, simulator = self._run(scene, policy, skip)
        return bool(simulator.late_uses) or not same(found, self.expected(scene))

    def unnoticed(
        self,
        scene: Any,
        pairs: set[tuple[str, str]] | None = None,
        more: Sequence[str] = (),
        *,
        of_each: int | None = None,
    ) -> list[str]:
        """Waits that no adversary (nor any of ``more``) misses: of these pairs of streams, or all
        and the host's; of each pair, all, or the first and last ``of_each``."""
        simulator, needed, _ = self.complete(scene)
        log = simulator.wait_log
        by_pair: dict[Any, list[Skip]] = defaultdict(list)
        for index in needed:
            if pairs is None or log[index] in pairs:
                by_pair[log[index]].append(("wait", index))
        if pairs is None:
            by_pair["host"] = [("sync", i) for i in range(len(simulator.sync_log))]
        skips = list[Skip]()
        for each in by_pair.values():
            ends = each if of_each is None else (*each[:of_each], *each[-of_each:])
            skips += dict.fromkeys(ends)
        return [
            f"{skip}: {log[skip[1]] if skip[0] == 'wait' else ''}"
            for skip in skips
            if not any(
                self.shows(scene, policy, skip)
                for policy in (*adversaries(skip, simulator.order), *more)
            )
        ]

    def check_implied(self, scene: Any, chosen: slice = slice(None)) -> None:
        """A wait that others imply changes nothing when it is removed."""
        simulator, _, implied = self.complete(scene)
        for index in implied[chosen]:
            skip = ("wait", index)
            for policy in adversaries(skip, simulator.order)[:3]:
                assert not self.shows(scene, policy, skip), (skip, simulator.wait_log[index])
