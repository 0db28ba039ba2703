"""The waits of ``overlap="forward"`` and ``"backward"``: as ``test_ring_waits``, beside an
FSDP2 that the test plays.

Its groups gather, compute and reduce on streams of their own (:mod:`tests.helpers.fake_fsdp`);
under the simulator a gather that does not wait for its updates reads old or half-written weights,
and a gradient that is dropped too early is filled with NaN. Only waits of this package are removed.

Not to be seen here: work that is not launched, such as clones of learning rates on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import TransferConfig
from fsdp_offload.core.devices import CpuBackend, backend_for
from fsdp_offload.optimizer import ring
from fsdp_offload.optimizer.ring import AHEAD
from tests.helpers.fake_fsdp import FakeFsdp, scale
from tests.helpers.removed_waits import CPU, NOTHING, Removal, Simulator, Skip, use_few_slots
from tests.helpers.simulator import ADVERSARIES, use_backend

FP32, BF16 = torch.float32, torch.bfloat16
GROUPS = ((300, 64), (900,), (130, 500), (260,))
LOOSE = (70,)
LATE = (200,)
OF_FSDP2 = {("gather", "current"), ("current", "gather"), ("reduce", "current"),
            ("current", "reduce")}  # fmt: skip


@pytest.fixture(autouse=True)
def _few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_slots(monkeypatch)


@dataclass(frozen=True)
class Scenario:
    """One training run of a few steps."""

    overlap: str
    lanes: tuple[str, ...] = ("streamed",)  # of the parameters in turn
    dtype: torch.dtype = FP32
    memory: int = 0  # on the device: slots, and buckets that stay
    steps: int = 3
    one_rank: bool = False
    ahead: bool = False
    unused: tuple[frozenset[int], ...] = ()  # per step, groups that the forward leaves out
    without: tuple[frozenset[int], ...] = ()  # per step, parameters without a gradient
    clips: bool = False
    accumulates: bool = False
    writes_state: bool = False
    reorders: bool = False
    grows: bool = False
    at_once: int = AHEAD  # updates that are enqueued before they must be

    def __str__(self) -> str:
        parts = [
            self.overlap,
            "+".join(sorted(set(self.lanes))),
            str(self.dtype).removeprefix("torch."),
        ]
        parts += [f"{self.memory}bytes"]
        flags = ("one_rank", "ahead", "unused", "without", "clips", "accumulates")
        flags += ("writes_state", "reorders", "grows")
        parts += [] if self.at_once == AHEAD else [f"{self.at_once}late"]
        return "-".join(parts + [flag for flag in flags if getattr(self, flag)])


MIXED = ("streamed", "host", "resident")
ONE_ON_HOST = ("streamed", "streamed", "resident", "host", "streamed", "resident", "streamed")
"""With several host buckets the host waits for all but the last ones anyway."""
UNUSED = (frozenset({1}), frozenset[int](), frozenset({0, 3}))
WITHOUT = (frozenset({2}), frozenset({0, 3}), frozenset({6}))
BOTH = ("forward", "backward")
FEW = [
    Scenario("forward", clips=True, memory=30_000),
    Scenario("backward", ("streamed",), BF16, memory=35_000, reorders=True),
    Scenario("forward", MIXED, BF16, unused=UNUSED, ahead=True),
    Scenario("backward", MIXED, unused=UNUSED, without=WITHOUT, one_rank=True),
    Scenario("backward", without=WITHOUT, writes_state=True, memory=60_000, grows=True),
    Scenario("forward", MIXED, BF16, unused=UNUSED, without=WITHOUT, steps=5, at_once=0),
    Scenario("forward", memory=30_000, ahead=True, reorders=True, accumulates=True, at_once=1),
    Scenario("backward", MIXED, unused=UNUSED, without=WITHOUT, at_once=0),
]
MORE = [
    Scenario(overlap, lanes, dtype, memory, **how)
    for overlap in BOTH
    for lanes in (("streamed",), ("resident",), ("host",), MIXED)
    for dtype in (FP32, BF16)
    for memory in ((0, 30_000, 120_000) if "streamed" in lanes else (0,))
    for how in (
        {"one_rank": True, "reorders": True},
        {"ahead": True, "unused": UNUSED, "writes_state": True},
        {"without": WITHOUT, "accumulates": True, "grows": True},
        {"clips": overlap == "forward", "unused": UNUSED, "without": WITHOUT, "steps": 5},
    )
]


class Job:
    """Parameters, their optimizer and what is played around them."""

    def __init__(self, scene: Scenario, backend: Any, *, plain: bool) -> None:
        generator = torch.Generator().manual_seed(0)

        def make(numel: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(numel, generator=generator).to(scene.dtype))

        groups = [[make(n) for n in numels] for numels in GROUPS]
        loose = [make(n) for n in LOOSE]
        self.late = [make(n) for n in LATE] if scene.grows else []
        self.trained = [p for group in groups for p in group] + loose
        groups[1] += self.late
        self.scene, self.plain = scene, plain
        self.played = FakeFsdp(backend, groups, loose, one_rank=scene.one_rank, ahead=scene.ahead)
        for parameter in self.late:
            parameter.requires_grad_(False)
        inner = torch.optim.AdamW(self.trained, lr=0.05, fused=True)
        for parameter in self.trained[::2]:  # state that must arrive even in the first step
            parameter.grad = torch.full_like(parameter, 0.25)
        inner.step()
        inner.zero_grad()
        overlap = "step" if plain else scene.overlap
        self.optimizer: Any = inner
        if scene.dtype != FP32 or not plain:
            self.optimizer = self.played.wrap(
                inner,
                update_on=scene.lanes,
                overlap=overlap,
                device_memory=f"{scene.memory}B",
                transfer=TransferConfig(bucket_bytes="4KiB", host_threads=1),
            )

    def train(self) -> list[Tensor]:
        """Parameters as a last forward reads them, and as they are, and state."""
        for step in range(self.scene.steps):
            self.iterate(step)
            self.between(step)
        self.played.forward()
        found = [used for group in self.played.groups for used in group.used]
        found += self.played.loose_used
        self.played.current.synchronize()
        found = [each.clone() for each in found]
        state = self.optimizer.state
        found += [p.detach().clone() for p in self.trained]
        found += [value.clone() for p in self.trained for value in state[p].values()]
        if hasattr(self.optimizer, "close"):
            self.optimizer.close()
        return found

    def iterate(self, step: int) -> None:
        scene, played = self.scene, self.played
        unused = scene.unused[step % len(scene.unused)] if scene.unused else ()
        numbers = scene.without[step % len(scene.without)] if scene.without else ()
        without = frozenset(self.trained[i] for i in numbers)
        if scene.accumulates:
            played.forward(unused)
            played.backward(step, unused=unused, without=without, is_last=False)
        played.forward(unused)
        played.backward(step, unused=unused, without=without)
        if scene.clips:  # in "backward" what has no gate: other gradients were taken
            for parameter in played.loose if scene.overlap == "backward" else self.trained:
                if parameter.grad is not None:
                    played.current.launch(scale, parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer.param_groups[0]["lr"] *= 0.75

    def between(self, step: int) -> None:
        """What a loop does between two iterations."""
        if self.scene.grows and step == 0:
            for parameter in self.late:
                parameter.requires_grad_(True)
            self.optimizer.add_param_group({"params": self.late, "lr": 0.02})
            self.trained = self.trained + self.late
        if self.scene.writes_state:
            state = self.optimizer.state
            for parameter in self.trained[:: step + 1]:
                if "exp_avg" in state[parameter]:
                    state[parameter]["exp_avg"].mul_(0.5)
        if self.scene.reorders and not self.plain:
            times = [float((7 * i + 3 * step) % 5) for i in range(len(GROUPS))]
            overlap = self.optimizer._updates.overlap
            overlap._reorder(times, 1e-3)


def run(scene: Scenario, policy: str, skip: Skip = NOTHING) -> tuple[list[Tensor], Simulator]:
    late = mock.patch.object(ring, "AHEAD", scene.at_once)
    with late, Simulator(policy, skip) as simulator:
        return Job(scene, simulator, plain=False).train(), simulator


def expect(scene: Scenario) -> list[Tensor]:
    """fp32: the plain optimizer's numbers; bf16: those of ``overlap="step"``."""
    with use_backend(CpuBackend(CPU)):
        return Job(scene, backend_for(CPU), plain=True).train()


WAITS = Removal(run, expect, lambda pair: pair not in OF_FSDP2)


@pytest.mark.parametrize("scene", FEW, ids=str)
def test_the_numbers_are_those_of_the_plain_optimizer(scene: Scenario) -> None:
    WAITS.check(scene, ADVERSARIES[::4])


@pytest.mark.long
@pytest.mark.parametrize("scene", [*FEW, *MORE], ids=str)
def test_the_numbers_are_those_of_the_plain_optimizer_in_every_combination(
    scene: Scenario,
) -> None:
    WAITS.check(scene, ADVERSARIES)


# --------------------------------------------------------------------------- waits removed

REMOVED = [
    Scenario("forward", steps=2),
    Scenario("backward", steps=2, clips=True),
    # Groups 1 and 3 share a bucket: a gate without gradients, were it the first of the two, would
    # wait for an update that leaves it alone.
    Scenario("forward", ONE_ON_HOST, BF16, steps=2, unused=(frozenset({3}), frozenset[int]())),
    Scenario("backward", ONE_ON_HOST, steps=2, one_rank=True, unused=UNUSED[:2]),
    Scenario("forward", steps=2, at_once=0),
    Scenario("forward", ONE_ON_HOST, BF16, steps=2, at_once=1),
    Scenario("backward", steps=2, clips=True, at_once=0),
]
GATES = {("gather", "update"), ("gather", "host:in"), ("current", "update"),
         ("current", "host:in"), ("update", "reduce")}  # fmt: skip
"""What is not already in :mod:`tests/optimizer.test_ring_waits`."""


@pytest.mark.parametrize("scene", REMOVED, ids=str)
def test_removing_a_wait_at_a_gate_is_noticed(scene: Scenario, of_each: int | None) -> None:
    assert WAITS.unnoticed(scene, GATES, of_each=of_each) == []


@pytest.mark.long
@pytest.mark.parametrize("scene", REMOVED[:3], ids=str)
def test_removing_any_wait_is_noticed(scene: Scenario) -> None:
    assert WAITS.unnoticed(scene) == []


def test_every_kind_of_wait_at_a_gate_is_needed_somewhere() -> None:
    needed: set[tuple[str, str]] = set()
    for scene in REMOVED:
        simulator, own, _ = WAITS.complete(scene)
        needed.update(simulator.wait_log[i] for i in own)

    assert needed >= GATES
