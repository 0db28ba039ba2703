"""Every wait of the pipeline is there, and removing any single one gives wrong numbers.

The real optimizer runs under the stream simulator. What the caller would do on its own stream
(writing gradients from parameters, zeroing them, reading parameters) is launched on the current
stream, so that a wait missing towards the caller shows as well. Four kinds of waits are removed,
one at a time: stream waits, the host thread's waits for events, the caller's waits for the host
thread, and the host's waits for whole streams before it reads state.

A stream wait that is implied by others (the stream, or the host, has waited for something later)
cannot show. :class:`Order` computes which ones these are from the calls alone; they are shown to
be harmless, and every pair of streams with a wait has one that is not implied.

Not to be seen here: the host thread running beside the caller (:class:`LazyWorker` stands for it,
as late as possible, which is the order in which a missing wait shows), transfers that are not
launched but run at once (``shard.cpu()`` when a host bucket is re-seeded, clones in a snapshot,
contiguous copies of gradients), lifetimes of what a launch gets inside an object (the snapshot),
and memory of the arena, which the simulator never gives to anybody else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from fsdp_offload.device import CpuGateway, Event, gateway_for, use_gateway
from fsdp_offload.pipeline import engine, host
from fsdp_offload.pipeline.records import Work
from fsdp_offload.pipeline.worker import Calls, Ticket
from fsdp_offload.testing import ADVERSARIES, StreamSimulator
from fsdp_offload.testing.simulator import SimulatedEvent, SimulatedStream

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16
NUMELS = (700, 64, 500, 130, 1000)
ADDED_NUMELS = (1300, 300)
HOST = -1  # stands where the index of a stream does, for waits of the host


# --------------------------------------------------------------------------- what is run


@dataclass(frozen=True)
class Scenario:
    """One training run of a few steps."""

    lanes: tuple[str, ...]
    dtype: torch.dtype = FP32
    slots: int = 2
    steps: int = 3
    absent: tuple[frozenset[int], ...] = ()  # per step, parameters without a gradient
    gradients: str = "overwritten"  # or "zeroed" or "dropped" after the step, or "strided"
    grows: bool = False  # a group is added after the first step

    def __str__(self) -> str:
        lanes = "+".join(sorted(set(self.lanes)))
        text = f"{lanes}-{str(self.dtype).removeprefix('torch.')}-{self.slots}slots"
        text += f"-{self.gradients}" + ("-absent" if self.absent else "")
        return text + ("-grows" if self.grows else "")


STREAMED, ON_HOST, RESIDENT = (("streamed",) * 5, ("host",) * 5, ("resident",) * 5)
MIXED = ("host", "streamed", "resident", "host", "streamed")
SOME_ABSENT = (frozenset({0}), frozenset({1, 2}), frozenset[int]())
SCENARIOS = [
    Scenario(STREAMED),
    Scenario(STREAMED, BF16, slots=3, gradients="dropped"),
    Scenario(STREAMED, slots=3, absent=SOME_ABSENT),
    Scenario(STREAMED, BF16, steps=2, grows=True),
    Scenario(ON_HOST, steps=2, gradients="dropped"),
    Scenario(ON_HOST, BF16, absent=SOME_ABSENT, gradients="zeroed"),
    Scenario(RESIDENT, BF16, gradients="zeroed"),
    Scenario(MIXED, BF16, steps=2, gradients="dropped"),
    Scenario(MIXED, slots=3, absent=SOME_ABSENT, gradients="zeroed"),
]
MORE = [
    Scenario(lanes, dtype, slots, 3, absent, gradients, grows)
    for lanes in (STREAMED, ON_HOST, MIXED)
    for dtype in (FP32, BF16)
    for slots in ((2,) if lanes is ON_HOST else (2, 3))
    for absent in ((), SOME_ABSENT)
    for gradients in ("overwritten", "zeroed", "dropped")
    for grows in (False, True)
    # A host lane makes the host wait for the gradients before the added group is enqueued, and
    # an fp32 group that was never stepped does not look at what arrives: nothing can show.
    if not grows or (lanes is STREAMED and dtype is BF16)
]


def write_gradient(gradient: Tensor, parameter: Tensor, step: int) -> None:
    gradient.copy_(parameter * 0.5 + (step + 1) / 8)


def copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def zero(gradient: Tensor) -> None:
    gradient.zero_()


def make_parameters(numels: tuple[int, ...], dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(len(numels))
    return [nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in numels]


def build(scene: Scenario) -> tuple[list[nn.Parameter], HybridDeviceOptimizer]:
    parameters = make_parameters(NUMELS, scene.dtype)
    inner = torch.optim.AdamW(parameters, lr=0.05)
    for parameter in parameters[::2]:  # these have state that must arrive even in the first step
        parameter.grad = torch.full_like(parameter, 0.25)
    inner.step()
    inner.zero_grad()
    transfer = TransferConfig(bucket_bytes=4096, slots=scene.slots, host_threads=1)
    optimizer = HybridDeviceOptimizer(inner, update_on=scene.lanes, transfer=transfer)
    return parameters, optimizer


def backward(scene: Scenario, parameters: list[nn.Parameter], step: int) -> None:
    """Gradients that depend on the parameters, written on the caller's stream."""
    current = gateway_for(CPU).current_stream()
    absent = scene.absent[step] if scene.absent else frozenset[int]()
    for index, parameter in enumerate(parameters):
        if index in absent:
            parameter.grad = None
            continue
        if parameter.grad is None:
            wide = torch.zeros(2 * parameter.numel(), dtype=parameter.dtype)
            strided = scene.gradients == "strided"
            parameter.grad = wide[::2] if strided else torch.zeros_like(parameter)
        current.launch(write_gradient, parameter.grad, parameter, step)


def after_step(scene: Scenario, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        if scene.gradients == "dropped":
            parameter.grad = None
        elif scene.gradients == "zeroed" and parameter.grad is not None:
            gateway_for(CPU).current_stream().launch(zero, parameter.grad)


def train(scene: Scenario, *, drain: bool = False) -> list[Tensor]:
    """Parameters and state after the scenario's steps, under whatever gateway is in use.

    Parameters are read by the caller's stream, or with ``drain`` by the host after ``.state``.
    """
    parameters, optimizer = build(scene)
    for step in range(scene.steps):
        backward(scene, parameters, step)
        optimizer.step()
        after_step(scene, parameters)
        if scene.grows and step == 0:
            added = make_parameters(ADDED_NUMELS, scene.dtype)
            optimizer.add_param_group({"params": added, "lr": 0.02})
            parameters = parameters + added
    current = gateway_for(CPU).current_stream()
    found = [torch.zeros_like(p) for p in parameters]
    if not drain:
        for target, parameter in zip(found, parameters, strict=True):
            current.launch(copy, target, parameter)
        current.synchronize()
    state = optimizer.state  # waits by itself
    if drain:
        found = [p.detach().clone() for p in parameters]
    found += [value.clone() for p in parameters for value in state[p].values()]
    optimizer.close()
    return found


@cache
def expected_of(scene: Scenario) -> list[Tensor]:
    """The CPU gateway's numbers: every launch runs at once."""
    with use_gateway(CpuGateway(CPU)):
        return train(scene)


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether all bits agree; NaNs of the same pattern are equal."""
    as_integers = {2: torch.int16, 4: torch.int32}
    return all(
        torch.equal(a.view(as_integers[a.itemsize]), b.view(as_integers[b.itemsize]))
        for a, b in zip(found, expected, strict=True)
    )


# --------------------------------------------------------------------------- a lazy host thread


class LazyTicket(Ticket):
    """Its calls run when it is waited for."""

    def __init__(self, worker: LazyWorker) -> None:
        super().__init__()
        self._worker = worker

    def join(self, alive: Callable[[], bool] = lambda: True) -> None:
        if self._worker.run(self):
            assert self._done.is_set(), "a call was announced and never submitted"


class LazyWorker:
    """The host threads of a busy machine: a call runs only when somebody waits for it.

    Args:
        skip: index among the waits for calls that had not run yet; this one is ignored.
    """

    def __init__(self, skip: int) -> None:
        self._pending: list[tuple[Ticket, Callable[..., Calls | None], tuple[Any, ...]]] = []
        self._skip = skip
        self.n_waits = 0

    def submit(self, fn: Callable[..., Calls | None], *args: Any) -> Ticket:
        ticket = LazyTicket(self)
        self._pending.append((ticket, fn, args))
        return ticket

    def run(self, ticket: Ticket) -> bool:
        """Run the ticket's call and those that it returns. False: the wait was ignored."""
        mine = [item for item in self._pending if item[0] is ticket]
        if not mine:
            return True
        self.n_waits += 1
        if self._skip == self.n_waits - 1:
            return False
        self._pending.remove(mine[0])
        _, fn, args = mine[0]
        for call in fn(*args) or ():
            call()
        ticket.finish(None)
        return True

    def alive(self) -> bool:
        return True

    def stop(self) -> None:
        self._pending.clear()


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
"""Kind of wait ("wait", "sync", "ticket" or "drain") and its number among those."""
NOTHING: Skip = ("nothing", -1)


class Simulator(StreamSimulator):
    """Also notes the order of calls, has a lazy host thread, can ignore the host's wait for a
    whole stream, and gives out memory that the caller's stream still writes to."""

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
        self.worker = LazyWorker(index if kind == "ticket" else -1)

    def allocate(self, n_bytes: int) -> Tensor:
        memory = super().allocate(n_bytes)
        self.current_stream().launch(_scribble, memory)  # by its last owner
        return memory

    def stream(self, name: str) -> SimulatedStream:
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


@pytest.fixture(autouse=True)
def _lazy_host_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "InlineWorker", lambda: gateway_for(CPU).worker)  # type: ignore[attr-defined]
    # Many more buckets than buffers, and several units of work in each.
    monkeypatch.setattr(engine, "HOST_BUCKET_FACTOR", 1)
    monkeypatch.setattr(engine, "HOST_DEPTH", 2)
    monkeypatch.setattr(host, "UNIT_NUMEL", 128)


def simulate(
    scene: Scenario, policy: str, skip: Skip = NOTHING, **settings: bool
) -> tuple[list[Tensor], Simulator]:
    with Simulator(policy, skip, **settings) as simulator:
        return train(scene, drain=skip[0] == "drain"), simulator


def shows(scene: Scenario, policy: str, skip: Skip) -> bool:
    """Whether the missing wait is noticed under this policy."""
    found, simulator = simulate(scene, policy, skip)
    return bool(simulator.late_uses) or not same(found, expected_of(scene))


def adversaries(skip: Skip, order: Order) -> list[str]:
    """All policies, those first that are likely to show this missing wait."""
    likely = ["lazy", "immediate"]
    if skip[0] == "wait":
        call = order.waits()[skip[1]]
        likely = [f"immediate:{call.stream}", f"lag:{call.event[0]}", *likely]
    return list(dict.fromkeys((*likely, *ADVERSARIES)))


@cache
def complete(scene: Scenario) -> tuple[Simulator, frozenset[int]]:
    """The simulator of a complete run, and the numbers of the waits that are implied."""
    _, simulator = simulate(scene, "lazy")
    numbers = range(simulator.wait_count)
    return simulator, frozenset(i for i in numbers if simulator.order.implied(i))


def unnoticed(scene: Scenario) -> list[str]:
    """Waits that can be removed without any adversary noticing."""
    simulator, implied = complete(scene)
    skips = [("wait", i) for i in range(simulator.wait_count) if i not in implied]
    skips += [("sync", i) for i in range(simulator.sync_count)]
    skips += [("ticket", i) for i in range(simulator.worker.n_waits)]
    return [
        f"{skip}: {simulator.wait_log[skip[1]] if skip[0] == 'wait' else ''}"
        for skip in skips
        if not any(shows(scene, policy, skip) for policy in adversaries(skip, simulator.order))
    ]


@contextmanager
def gradients_dropped_early(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Buckets get copies of gradients that nobody keeps once the bucket is enqueued."""
    original = Work.of

    def of(work: Work, pieces: list[Any]) -> list[Tensor | None]:
        return [None if g is None else g.clone() for g in original(work, pieces)]

    with monkeypatch.context() as patch:
        patch.setattr(Work, "of", of)
        yield


# --------------------------------------------------------------------------- tests


@pytest.mark.parametrize("scene", SCENARIOS, ids=str)
def test_complete_waits_give_the_cpu_gateways_numbers_under_all_adversaries(
    scene: Scenario,
) -> None:
    for policy in ADVERSARIES:
        found, simulator = simulate(scene, policy)

        assert same(found, expected_of(scene)), policy
        assert simulator.late_uses == [], policy


@pytest.mark.parametrize("lanes", [STREAMED, RESIDENT, MIXED], ids=lambda lanes: lanes[2])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_temporary_copies_of_strided_gradients_live_long_enough(
    lanes: tuple[str, ...], dtype: torch.dtype
) -> None:
    scene = Scenario(lanes, dtype, steps=2, gradients="strided")
    for policy in ADVERSARIES[::2]:
        found, simulator = simulate(scene, policy, inline_current=True)

        assert same(found, expected_of(scene)), policy
        assert simulator.late_uses == [], policy


@pytest.mark.parametrize("lanes", [STREAMED, RESIDENT, MIXED], ids=lambda lanes: lanes[2])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_gradients_dropped_before_their_update_are_noticed(
    lanes: tuple[str, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scenario(lanes, dtype, steps=2, gradients="strided")
    expected = expected_of(scene)
    with gradients_dropped_early(monkeypatch):
        found, simulator = simulate(scene, "lazy", inline_current=True)

    assert not same(found, expected)
    assert any("BucketUpdate.run" in use for use in simulator.late_uses)


@pytest.mark.parametrize("scene", SCENARIOS, ids=str)
def test_removing_any_single_wait_is_noticed(scene: Scenario) -> None:
    assert unnoticed(scene) == []


@pytest.mark.long
@pytest.mark.parametrize("scene", MORE, ids=str)
def test_removing_any_single_wait_is_noticed_in_every_combination(scene: Scenario) -> None:
    for policy in ADVERSARIES:
        found, simulator = simulate(scene, policy)
        assert same(found, expected_of(scene)), policy
        assert simulator.late_uses == [], policy

    assert unnoticed(scene) == []


@pytest.mark.parametrize("scene", SCENARIOS, ids=str)
def test_a_wait_that_others_imply_changes_nothing_when_it_is_removed(scene: Scenario) -> None:
    simulator, implied = complete(scene)
    for index in sorted(implied):
        skip = ("wait", index)
        for policy in adversaries(skip, simulator.order)[:4]:
            assert not shows(scene, policy, skip), (skip, simulator.wait_log[index], policy)


def test_every_pair_of_streams_with_a_wait_has_one_that_nothing_implies() -> None:
    there, needed = set(), set()
    for scene in SCENARIOS:
        simulator, implied = complete(scene)
        there.update(simulator.wait_log)
        needed.update(w for i, w in enumerate(simulator.wait_log) if i not in implied)

    assert needed == there == {
        ("update", "current"), ("current", "update"),
        ("h2d", "d2h"), ("update", "h2d"), ("d2h", "update"),
        ("host_cast", "current"), ("host_cast", "host_d2h"), ("host_d2h", "host_cast"),
        ("host_h2d", "host_cast"), ("host_cast", "host_h2d"), ("current", "host_cast"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("lanes", "drained"),
    [(RESIDENT, "update"), (STREAMED, "d2h"), (ON_HOST, "host_cast")],
    ids=["resident", "streamed", "host"],
)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_reading_state_waits_for_each_lane(
    lanes: tuple[str, ...], drained: str, dtype: torch.dtype
) -> None:
    scene = Scenario(lanes, dtype)
    found, simulator = simulate(scene, "lazy", ("drain", -1))
    assert same(found, expected_of(scene))

    assert shows(scene, "lazy", ("drain", simulator.drain_log.index(drained)))


@pytest.mark.parametrize(
    ("lanes", "grows"),
    [(STREAMED, False), (STREAMED, True), (MIXED, False)],
    ids=["streamed", "streamed-grows", "mixed"],
)
def test_new_slots_wait_for_what_the_caller_enqueued_before(
    lanes: tuple[str, ...], grows: bool
) -> None:
    """The allocator orders the reuse of memory on the caller's stream only."""
    scene = Scenario(lanes, BF16, grows=grows)
    found, simulator = simulate(scene, "immediate:h2d", ("drain", -1))
    assert same(found, expected_of(scene))
    constructions = [i for i, name in enumerate(simulator.drain_log) if name == "current"]

    assert len(constructions) == 1 + grows
    for index in constructions:
        assert shows(scene, "immediate:h2d", ("drain", index))


def test_the_analysis_finds_a_wait_that_a_later_event_implies() -> None:
    calls = [
        Call("launch", 1, 1),
        Call("launch", 1, 2),
        Call("wait", 2, 1, (1, 2)),
        Call("launch", 2, 2),
        Call("wait", 3, 1, (2, 2)),
        Call("wait", 3, 2, (1, 1)),
        Call("launch", 3, 3),
        Call("wait", 1, 3, (3, 3)),
    ]

    assert [Order(calls).implied(i) for i in range(4)] == [False, False, True, True]
