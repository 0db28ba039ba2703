"""Every wait of the pipeline is there, and removing any single one gives wrong numbers.

The real optimizer runs under the stream simulator. What the caller would do on its own stream
(writing gradients from parameters, zeroing them, reading parameters) is launched on the current
stream, so that a wait missing towards the caller shows as well. Three kinds of waits are removed,
one at a time: stream waits, the host lane's waits for events, and the host's waits for whole
streams before it reads state.

A stream wait that is implied by others (the stream, or the host, has waited for something later)
cannot show. :class:`Order` computes which ones these are from the calls alone; they are shown to
be harmless, and every pair of streams with a wait has one that is not implied.

Not to be seen here: the host thread running beside the caller (what it does is done when something
waits for it, which is the order in which a missing wait shows), transfers that are not launched but
run at once (clones in a snapshot, contiguous copies of gradients), lifetimes of what a launch gets
inside an object (the snapshot), and memory of the arena, which the simulator never gives to anybody
else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from fsdp_offload.core.devices import CpuBackend, backend_for
from fsdp_offload.update.params import Work
from tests.helpers.lanes import in_lanes
from tests.helpers.removed_waits import (
    CPU,
    NOTHING,
    Call,
    Order,
    Removal,
    Simulator,
    Skip,
    same,
    use_few_slots,
)
from tests.helpers.simulator import ADVERSARIES, use_backend

FP32, BF16 = torch.float32, torch.bfloat16
NUMELS = (700, 64, 500, 130, 1000)
ADDED_NUMELS = (1300, 300)


# --------------------------------------------------------------------------- what is run


@pytest.fixture(autouse=True)
def _few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_slots(monkeypatch)


@dataclass(frozen=True)
class Scenario:
    """One training run of a few steps."""

    lanes: tuple[str, ...]
    dtype: torch.dtype = FP32
    steps: int = 2
    absent: tuple[frozenset[int], ...] = ()  # per step, parameters without a gradient
    gradients: str = "overwritten"  # or "zeroed" or "dropped" after the step, or "strided"
    grows: bool = False  # a group is added after the first step

    def __str__(self) -> str:
        lanes = "+".join(sorted(set(self.lanes)))
        text = f"{lanes}-{str(self.dtype).removeprefix('torch.')}"
        text += f"-{self.gradients}" + ("-absent" if self.absent else "")
        return text + ("-grows" if self.grows else "")


STREAMED, ON_HOST, RESIDENT = (("streamed",) * 5, ("host",) * 5, ("resident",) * 5)
MIXED = ("host", "streamed", "resident", "host", "streamed")
SOME_ABSENT = (frozenset({0}), frozenset({1, 2}), frozenset[int]())
# In two steps: a run is repeated for each of its waits. MORE has all of them in three.
SCENARIOS = [
    Scenario(STREAMED, absent=SOME_ABSENT, gradients="dropped"),
    Scenario(STREAMED, BF16, grows=True),
    Scenario(ON_HOST, gradients="dropped"),
    Scenario(RESIDENT, BF16, gradients="zeroed"),
    Scenario(MIXED, absent=SOME_ABSENT, gradients="zeroed"),
]
MORE = [
    Scenario(lanes, dtype, 3, absent, gradients, grows)
    for lanes in (STREAMED, ON_HOST, MIXED)
    for dtype in (FP32, BF16)
    for absent in ((), SOME_ABSENT)
    for gradients in ("overwritten", "zeroed", "dropped")
    for grows in (False, True)
    # A host lane makes the host wait for the gradients before the added group is enqueued, and
    # an fp32 group that was never stepped does not look at what arrives: nothing can show.
    if not grows or (lanes is STREAMED and dtype is BF16)
]
MORE.append(Scenario(RESIDENT, BF16, steps=3, gradients="zeroed"))


def write_gradient(gradient: Tensor, parameter: Tensor, step: int) -> None:
    gradient.copy_(parameter * 0.5 + (step + 1) / 8)


def make_parameters(numels: tuple[int, ...], dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(len(numels))
    return [nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in numels]


def build(scene: Scenario) -> tuple[list[nn.Parameter], HybridDeviceOptimizer]:
    parameters = make_parameters(NUMELS, scene.dtype)
    inner = torch.optim.AdamW(parameters, lr=0.05)
    # These have state that must arrive even in the first step, and that is another for each.
    for index, parameter in enumerate(parameters[::2]):
        parameter.grad = torch.full_like(parameter, (index + 1) / 8)
    inner.step()
    inner.zero_grad()
    transfer = TransferConfig(bucket_bytes="4KiB", host_threads=1)
    optimizer = in_lanes(inner, update_on=scene.lanes, transfer=transfer)
    return parameters, optimizer


def backward(scene: Scenario, parameters: list[nn.Parameter], step: int) -> None:
    """Gradients that depend on the parameters, written on the caller's stream."""
    current = backend_for(CPU).current_stream()
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
            backend_for(CPU).current_stream().launch(Tensor.zero_, parameter.grad)


def train(scene: Scenario, *, drain: bool = False) -> list[Tensor]:
    """Parameters and state after the scenario's steps, under whatever backend is in use.

    Parameters are read by the caller's stream, or with ``drain`` by the host after ``.state``.
    """
    parameters, optimizer = build(scene)
    current, seen = backend_for(CPU).current_stream(), list[Tensor]()
    for step in range(scene.steps):
        backward(scene, parameters, step)
        optimizer.step()
        after_step(scene, parameters)
        if scene.grows and step == 0:
            seen = [torch.zeros_like(p) for p in parameters]  # it makes the host wait for updates
            for target, parameter in zip(seen, parameters, strict=True):
                current.launch(Tensor.copy_, target, parameter)
            added = make_parameters(ADDED_NUMELS, scene.dtype)
            optimizer.add_param_group({"params": added, "lr": 0.02})
            parameters = parameters + added
    found = [torch.zeros_like(p) for p in parameters]
    if not drain:
        for target, parameter in zip(found, parameters, strict=True):
            current.launch(Tensor.copy_, target, parameter)
        current.synchronize()
    state = optimizer.state  # waits by itself
    if drain:
        found = [p.detach().clone() for p in parameters]
    found += [value.clone() for p in parameters for value in state[p].values()]
    optimizer.close()
    return found + seen


def expect(scene: Scenario) -> list[Tensor]:
    """The CPU backend's numbers: every launch runs at once."""
    with use_backend(CpuBackend(CPU)):
        return train(scene)


def simulate(
    scene: Scenario, policy: str, skip: Skip = NOTHING, **settings: bool
) -> tuple[list[Tensor], Simulator]:
    with Simulator(policy, skip, **settings) as simulator:
        return train(scene, drain=skip[0] == "drain"), simulator


WAITS = Removal(simulate, expect)


# --------------------------------------------------------------------------- tests


@pytest.mark.parametrize("scene", SCENARIOS, ids=str)
def test_removing_any_single_wait_is_noticed(scene: Scenario) -> None:
    WAITS.check(scene, ADVERSARIES[::3])
    assert WAITS.unnoticed(scene, of_each=2) == []


@pytest.mark.long
@pytest.mark.parametrize("scene", SCENARIOS + MORE, ids=str)
def test_removing_any_single_wait_is_noticed_in_every_combination(scene: Scenario) -> None:
    WAITS.check(scene, ADVERSARIES)
    assert WAITS.unnoticed(scene) == []
    WAITS.check_implied(scene)


@pytest.mark.parametrize("scene", SCENARIOS[::2], ids=str)
def test_a_wait_that_others_imply_changes_nothing_when_it_is_removed(scene: Scenario) -> None:
    WAITS.check_implied(scene, slice(None, None, 3))


@pytest.mark.parametrize(("lanes", "dtype"), [(STREAMED, BF16), (RESIDENT, FP32), (MIXED, BF16)])
def test_temporary_copies_of_strided_gradients_live_long_enough(
    lanes: tuple[str, ...], dtype: torch.dtype
) -> None:
    scene = Scenario(lanes, dtype, steps=2, gradients="strided")
    for policy in ADVERSARIES[::3]:
        found, simulator = simulate(scene, policy, inline_current=True)

        assert same(found, WAITS.expected(scene)), policy
        assert simulator.late_uses == [], policy


@pytest.mark.parametrize(("lanes", "dtype"), [(STREAMED, FP32), (RESIDENT, BF16), (MIXED, FP32)])
def test_gradients_dropped_before_their_update_are_noticed(
    lanes: tuple[str, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets get copies of gradients that nobody keeps once the bucket is enqueued."""
    scene = Scenario(lanes, dtype, steps=2, gradients="strided")
    expected = WAITS.expected(scene)
    original = Work.of

    def of(work: Work, pieces: list[Any]) -> list[Tensor | None]:
        return [None if g is None else g.clone() for g in original(work, pieces)]

    monkeypatch.setattr(Work, "of", of)
    found, simulator = simulate(scene, "lazy", inline_current=True)

    assert not same(found, expected)
    assert any("BucketUpdate.run" in use for use in simulator.late_uses)


def test_every_pair_of_streams_with_a_wait_has_one_that_nothing_implies() -> None:
    there, needed = set(), set()
    for scene in SCENARIOS:
        simulator, own, _ = WAITS.complete(scene)
        there.update(simulator.wait_log)
        needed.update(simulator.wait_log[i] for i in own)

    assert needed == there == {
        ("update", "current"), ("current", "update"),
        ("state:in", "state:out"), ("update", "state:in"), ("state:out", "update"),
        ("state:in", "current"),
        ("host:out", "current"), ("current", "host:in"), ("host:out", "host:in"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("lanes", "drained"),
    [(RESIDENT, "update"), (STREAMED, "state:out"), (ON_HOST, "host:in")],
    ids=["resident", "streamed", "host"],
)
def test_reading_state_waits_for_each_lane(lanes: tuple[str, ...], drained: str) -> None:
    scene = Scenario(lanes, BF16)
    found, simulator = simulate(scene, "lazy", ("drain", -1))
    assert same(found, WAITS.expected(scene))

    assert WAITS.shows(scene, "lazy", ("drain", simulator.drain_log.index(drained)))


@pytest.mark.parametrize(
    ("lanes", "grows"),
    [(STREAMED, False), (STREAMED, True), (("streamed", "resident") * 2 + ("streamed",), False)],
    ids=["streamed", "streamed-grows", "mixed"],
)
def test_new_slots_wait_for_what_the_caller_enqueued_before(
    lanes: tuple[str, ...], grows: bool
) -> None:
    """The allocator orders the reuse of memory on the caller's stream only."""
    scene = Scenario(lanes, BF16, grows=grows)
    found, simulator = simulate(scene, "immediate:state:in")
    assert same(found, WAITS.expected(scene))
    waits = [i for i, pair in enumerate(simulator.wait_log) if pair == ("state:in", "current")]

    assert len(waits) == 1 + grows
    for index in waits:
        assert WAITS.shows(scene, "immediate:state:in", ("wait", index))


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
