"""The waits of weights in host memory: each is removed in turn, and some policy notices it.

The shards are those of a real FSDP2 model; the gathers are played, on a stream that lags or leads.
In "reads" the caller's stream keeps up with the host, as torch operations do that are not launched.

Trained weights: the whole optimizer, beside a forward and a backward that are played. Updates read
and write host memory, gathers read it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fsdp_offload import HybridDeviceOptimizer
from fsdp_offload.core import dtensor
from fsdp_offload.core.backend import Backend
from fsdp_offload.core.config import OffloadConfig
from fsdp_offload.core.devices import CpuBackend
from fsdp_offload.core.fsdp import find_groups
from fsdp_offload.core.gated import keeper_of
from fsdp_offload.optimizer import ring as ring_module
from fsdp_offload.optimizer.ring import AHEAD
from fsdp_offload.optimizer.weights import Weights
from fsdp_offload.plan import residency
from tests.fsdp import models
from tests.fsdp.models import Ranks
from tests.helpers.fake_fsdp import add, copy, write_gradient
from tests.helpers.removed_waits import CPU, NOTHING, Removal, Simulator, Skip, adversaries
from tests.helpers.simulator import ADVERSARIES, use_backend

FORWARD, BACKWARD = (0, 1, 2, 3, 4), (4, 3, 2, 1, 0)
ORDERS = {"gathers": (FORWARD, BACKWARD, FORWARD, (4, 2, 0)), "reads": (FORWARD, BACKWARD)}


def play(scene: str, backend: Backend) -> list[Tensor]:
    """What each gather read, and the weights that come back."""
    model: Any = nn.Sequential(*(nn.Linear(8 + i, 8 + i + 1) for i in range(5)))
    for layer in model.requires_grad_(False):
        fully_shard(layer, mesh=models.flat_mesh(1))
    current, groups = backend.current_stream(), find_groups([model])
    for number, group in enumerate(groups):
        for shard in group.shards:
            fresh = torch.empty_like(shard.padded)
            shard.padded = fresh
            shard.parameter._local_tensor = fresh.view(shard.parameter.shape)  # type: ignore[attr-defined]
            current.launch(Tensor.fill_, fresh, float(number + 1))
    del fresh
    config = OffloadConfig.make(offload="all", device_memory=0)
    weights = Weights(groups, backend, config, [group.shards for group in groups])
    gather, found = backend.stream("gather"), []
    for round_, order in enumerate(ORDERS[scene]):
        for index in order:
            gather.wait(current.record())  # FSDP2's
            with weights.lending(index, gather):
                for shard in groups[index].shards:
                    found.append(torch.zeros_like(shard.padded))
                    gather.launch(copy, found[-1], shard.padded)
            if scene == "reads":
                use(groups[index], round_, found)
    gather.synchronize()
    found = [each.clone() for each in found]
    weights.close()
    for group in groups:
        for shard in group.shards:
            found.append(torch.zeros_like(shard.padded))
            current.launch(copy, found[-1], shard.padded)
    current.synchronize()
    return found


@torch.no_grad()
def use(group: Any, round_: int, found: list[Tensor]) -> None:
    for parameter in group.parameters:
        found.append((parameter + round_).to_local())
        parameter.mul_(1.5)
        found.append((parameter * 2).to_local())


def run(scene: str, policy: str, skip: Skip = NOTHING) -> tuple[list[Tensor], Simulator]:
    with Simulator(policy, skip, inline_current=scene == "reads") as simulator:
        return play(scene, simulator), simulator


def expect(scene: str) -> list[Tensor]:
    return play(scene, CpuBackend(CPU))


WAITS = Removal(run, expect, lambda pair: pair != ("gather", "current"))


def noticed_by_a_reader() -> bool:
    """What the caller's stream does is not launched here, so its order is not known."""
    _, simulator = run("reads", "lazy")
    first = simulator.wait_log.index(("current", "weights:in"))
    return WAITS.shows("reads", "lazy", ("wait", first))


def test_removing_any_single_wait_is_noticed(ranks: Ranks) -> None:
    assert ranks(1).run(unnoticed, "gathers", None) == [[]]
    assert ranks(1).run(noticed_by_a_reader) == [True]


def test_every_pair_of_streams_has_a_wait_that_nothing_implies(ranks: Ranks) -> None:
    store = ("weights:out", "current")
    fetch = [("gather", "weights:in"), ("weights:in", "current"), ("weights:in", "gather")]
    assert ranks(1).run(pairs, "gathers") == [[*fetch, store]]


# --------------------------------------------------------------------------- trained weights

STAYS = 14_000
"""Bytes for slots and some of the buckets."""
TRAINED = {
    "step": ("step", torch.float32, 0, AHEAD),
    "forward": ("forward", torch.float32, 0, AHEAD),
    "forward, late": ("forward", torch.float32, 0, 1),
    "backward": ("backward", torch.float32, 0, AHEAD),
    "backward, some stay": ("backward", torch.bfloat16, STAYS, AHEAD),
    "host": ("forward", torch.float32, 0, AHEAD),
    "host, some stay": ("backward", torch.bfloat16, STAYS, AHEAD),
}
"""Overlap, dtype, device memory, and how many updates may wait in the device's queues.

In "host" host memory is read and written after each step, and copies are read before."""


class Trained:
    """A model, its optimizer, and an FSDP2 of several ranks that is played."""

    def __init__(self, scene: str, backend: Backend, offload: str) -> None:
        overlap, dtype, memory, _ = TRAINED[scene]
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(nn.Linear(12 + i, 25, dtype=dtype) for i in range(4)))
        for layer in model:
            fully_shard(layer, mesh=models.flat_mesh(1))
        self.model, self.groups = model, find_groups([model])
        self.current = backend.current_stream()
        self.gather, self.reduce = backend.stream("gather"), backend.stream("reduce")
        self.backend, self.reader = backend, backend.stream("reader")
        for group in self.groups:
            for shard in group.shards:
                self.current.launch(double, shard.padded)
        inner = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
        self.optimizer = HybridDeviceOptimizer(
            inner, model, offload=offload, overlap=overlap, device_memory=0,
            transfer=models.TRANSFER,
        )  # fmt: skip
        self.updates = self.optimizer._updates
        ring = self.updates.reserved.engine.ring
        if memory:
            ring.fit(memory, 0)
        self.uses_host, self.found = "host" in scene, list[Tensor]()
        self.gradients = list[weakref.ref[Tensor]]()
        self.held_bytes = list[int]()  # of gradients, after each reduction

    def gathered(self, index: int) -> list[Tensor]:
        """What a gather reads, on the compute stream."""
        if (watcher := self.updates.overlap) is not None:
            watcher.before_gather(index, self.gather)
        weights = self.updates.weights
        shards, found = self.groups[index].shards, []
        with weights.lending(index, self.gather) if weights else contextlib.nullcontext():
            for shard in shards:
                found.append(torch.zeros_like(shard.padded))
                self.gather.launch(copy, found[-1], shard.padded)
        self.current.wait(self.gather.record())
        if watcher is not None:
            watcher.after_gather(index)
        return found

    @torch.no_grad()
    def iterate(self, step: int) -> None:
        self.gather.wait(self.current.record())
        order = range(len(self.groups))
        used = [self.gathered(index) for index in order]
        for index in reversed(order):
            for mine, again in zip(used[index], self.gathered(index), strict=True):
                self.current.launch(add, mine, again)
            self.reduce.wait(self.current.record())
            for shard, mine in zip(self.groups[index].shards, used[index], strict=True):
                gradient = torch.zeros_like(mine)
                self.gradients.append(weakref.ref(gradient))
                self.reduce.launch(write_gradient, gradient, mine, step)
                parameter = shard.parameter
                shape = dtensor.with_history(parameter).shape
                parameter.grad = dtensor.like(parameter, gradient.view(shape))
            if (watcher := self.updates.overlap) is not None:
                watcher.after_reduce(index, self.reduce.record(), self.reduce)
            alive = (ref() for ref in self.gradients)
            self.held_bytes.append(sum(each.nbytes for each in alive if each is not None))
        self.current.wait(self.reduce.record())
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.uses_host:
            order = self.groups[step:] + self.groups[:step]  # each is once the first
            self.use_host([p for group in order for p in group.parameters])

    def use_host(self, parameters: Sequence[Tensor]) -> None:
        """The first as checkpoints do, the last as readers on two streams do, others as both."""
        for index, parameter in enumerate(parameters):
            keeper = keeper_of(dtensor.with_history(parameter))
            if index > 1:
                shard = dtensor.local(parameter) if keeper is None else keeper.take()
                self.found.append(torch.zeros_like(shard))
                self.current.launch(copy, self.found[-1], shard)
            if index == len(parameters) - 1:
                self.found.append(torch.zeros_like(shard))
                if keeper is not None:
                    keeper.used(shard, is_shared=True)
                    with mock.patch.object(
                        self.backend, "current_stream", return_value=self.reader
                    ):
                        keeper.take()
                self.reader.launch(copy, self.found[-1], shard)
                self.current.wait(self.reader.record())
            if keeper is None:  # else what is read is not the weight that is written
                self.current.synchronize()
            if index < len(parameters) - 2:
                shard = dtensor.local(parameter)
                self.found.append(shard.clone())
                shard.mul_(1.5)

    def result(self) -> list[Tensor]:
        self.gather.wait(self.current.record())
        found = [each for index in range(len(self.groups)) for each in self.gathered(index)]
        self.current.synchronize()
        found = [each.clone() for each in (*self.found, *found)]
        for entry in self.optimizer.state.values():
            found += [models.local(value).clone() for value in entry.values()]
        self.optimizer.close()
        for shard in (shard for group in self.groups for shard in group.shards):
            found.append(torch.zeros_like(shard.padded))
            self.current.launch(copy, found[-1], shard.padded)
        self.current.synchronize()
        return found


@torch.no_grad()
def scribble(tensor: Tensor) -> None:
    tensor.fill_(torch.nan)


@torch.no_grad()
def double(tensor: Tensor) -> None:
    tensor.mul_(2)


def train(scene: str, backend: Backend, offload: str = "all") -> list[Tensor]:
    with mock.patch.object(residency, "LEAST_SLOTS", 2):
        job = Trained(scene, backend, offload)
    ring = job.updates.reserved.engine.ring
    assert bool(ring.staying) == (TRAINED[scene][2] > 0), ring.sizes
    travelling = len(ring.sizes) - len(ring.staying)
    # Else a slot would be that of one bucket alone, whose bytes need not come again.
    assert offload == "state" or travelling % 2 == 0, (ring.sizes, ring.staying.keys())
    with (
        mock.patch.object(ring_module, "AHEAD", TRAINED[scene][3]),
        # It saves memory, and would hide other waits.
        mock.patch.object(ring_module.Ring, "wait_for_updates"),
    ):
        # A store that a third step repeats is read by nobody where the buckets stay.
        for step in range(2 if TRAINED[scene][2] else 3):
            job.iterate(step)
        return job.result()


def simulate(scene: str, policy: str, skip: Skip = NOTHING) -> tuple[list[Tensor], Simulator]:
    with Simulator(policy, skip) as simulator:
        made = torch.empty_like

        def scribbled(like: Tensor, **options: Any) -> Tensor:
            memory = made(like, **options)
            simulator.current_stream().launch(scribble, memory)  # by its last owner
            return memory

        with mock.patch.object(torch, "empty_like", scribbled):
            return train(scene, simulator), simulator


def expect_trained(scene: str) -> list[Tensor]:
    with use_backend(CpuBackend(CPU)):
        return train(scene, CpuBackend(CPU), "state")


OF_FSDP2 = {("gather", "current"), ("current", "gather"), ("reduce", "current"),
            ("current", "reduce")}  # fmt: skip
UPDATES = Removal(simulate, expect_trained, lambda pair: pair not in OF_FSDP2)


def complete(scene: str) -> None:
    removal_of(scene).check(scene, ADVERSARIES[::3])


def unnoticed(scene: str, of_each: int | None) -> list[str]:
    return removal_of(scene).unnoticed(scene, of_each=of_each)


def pairs(scene: str) -> list[tuple[str, str]]:
    simulator, needed, _ = removal_of(scene).complete(scene)
    return sorted({simulator.wait_log[i] for i in needed})


def removal_of(scene: str) -> Removal:
    return WAITS if scene in ORDERS else UPDATES


@pytest.mark.parametrize(
    "scene",
    [
        *(*ORDERS, "forward, late", "backward, some stay", "host"),
        *(
            pytest.param(s, marks=pytest.mark.long)
            for s in ("step", "forward", "backward", "host, some stay")
        ),
    ],
)
def test_complete_waits_give_right_weights(ranks: Ranks, scene: str) -> None:
    ranks(1).run(complete, scene)


@pytest.mark.parametrize(
    "scene",
    [
        "backward",
        *(
            pytest.param(s, marks=pytest.mark.long)
            for s in ("step", "forward", "forward, late", "backward, some stay")
        ),
    ],
)
def test_removing_any_single_wait_of_an_update_is_noticed(
    ranks: Ranks, scene: str, of_each: int | None
) -> None:
    assert ranks(1).run(unnoticed, scene, of_each) == [[]]


def held_gradients() -> list[int]:
    """By reduction, in groups, if the device does nothing until the host waits."""
    with Simulator("lazy", NOTHING) as simulator:
        job = Trained("backward", simulator, "all")
        weights = job.updates.weights
        assert weights is not None
        largest = max(sum(each.host.nbytes for each in group) for group in weights.away)
        for step in range(2):
            job.iterate(step)
        job.result()
        return [n_bytes // largest for n_bytes in job.held_bytes]


def test_gradients_do_not_pile_up_while_weights_travel(ranks: Ranks) -> None:
    """Slots for all four groups let two of them wait for updates, and a part of one more."""
    assert max(ranks(1).run(held_gradients)[0]) == 2


READERS = {("current", "weights:in"), ("reader", "weights:in")}
NEEDED = {*READERS, ("weights:in", "current"), ("weights:in", "state:out")}


def noticed_by_host_memory(scene: str) -> tuple[list[str], set[object]]:
    """Waits of readers that are not noticed, and what else is noticed at least once."""
    simulator, needed, _ = UPDATES.complete(scene)
    missed, seen = list[str](), set[object]()
    for index in needed:
        pair, skip = simulator.wait_log[index], ("wait", index)
        if pair in NEEDED and (pair in READERS or pair not in seen):
            policies = adversaries(skip, simulator.order)[:4]
            if any(UPDATES.shows(scene, policy, skip) for policy in policies):
                seen.add(pair)
            elif pair in READERS:
                missed.append(f"{skip} {pair}")
    if UPDATES.shows(scene, "lazy", ("sync", 0)):
        seen.add("stored")
    for index, name in enumerate(simulator.drain_log):
        if name == "weights:in" and UPDATES.shows(scene, "lazy", ("drain", index)):
            seen.add("fetched")
            break
    return missed, seen


@pytest.mark.parametrize("scene", ["host, some stay", pytest.param("host", marks=pytest.mark.long)])
def test_what_reads_host_memory_waits(ranks: Ranks, scene: str) -> None:
    """For stores; what writes it, for fetches; a copy, and each stream that uses it, likewise."""
    assert ranks(1).run(noticed_by_host_memory, scene) == [([], {*NEEDED, "stored", "fetched"})]


def test_gathers_wait_for_stores(ranks: Ranks) -> None:
    assert ("weights:in", "state:out") in ranks(1).run(pairs, "forward")[0]
