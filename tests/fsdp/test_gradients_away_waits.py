"""The waits of gradients in host memory: each is removed in turn, and some policy notices it.

Parameters are those of a real FSDP2 model. Its gathers and reductions are played, on streams that
lag or lead. In "reads" the caller's stream keeps up with the host, as torch operations do that are
not launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from fsdp_offload.core import dtensor
from fsdp_offload.core.backend import Backend
from fsdp_offload.core.devices import CpuBackend
from fsdp_offload.core.fsdp import find_groups
from fsdp_offload.core.recorded import record_of
from fsdp_offload.optimizer.host_gradients import HostGradients
from tests.fsdp import models
from tests.fsdp.models import Ranks
from tests.helpers.fake_fsdp import add_gradient, copy, write_gradient
from tests.helpers.removed_waits import CPU, NOTHING, Removal, Simulator, Skip
from tests.helpers.simulator import ADVERSARIES, use_backend

LAYERS, STEPS = 4, 2
SCENES = ("forward", "accumulates", "reads")
"""Besides "skips": as "accumulates", and a group that was fetched ahead is not reduced."""


class Job:
    """A model, its optimizer, and an FSDP2 that is played."""

    def __init__(self, scene: str, backend: Backend) -> None:
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(nn.Linear(24 + i, 25 + i) for i in range(LAYERS)))
        for layer in model:
            fully_shard(layer, mesh=models.flat_mesh(1))
        self.scene, self.backend, self.groups = scene, backend, find_groups([model])
        self.current = backend.current_stream()
        self.gather, self.reduce = backend.stream("gather"), backend.stream("reduce")
        self.end = backend.stream("end")  # of a backward
        self.optimizer = HybridDeviceOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.05, fused=True),
            model,
            device_memory=0,
            overlap="forward" if scene in ("forward", "reads") else "step",
            transfer=TransferConfig(bucket_bytes="4KiB"),
        )
        updates: Any = self.optimizer._updates
        leaves = [[True] * len(group.parameters) for group in self.groups]
        config = updates.reserved.config
        self.gradients = HostGradients(self.groups, backend, config, leaves)
        updates.gradients, self.overlap = self.gradients, updates.overlap
        updates._attach()
        self.found: list[Tensor] = []

    def forward(self) -> list[list[Tensor]]:
        used = []
        self.gather.wait(self.current.record())
        for index, group in enumerate(self.groups):
            if self.overlap is not None:
                self.overlap.before_gather(index, self.gather)
            self.gradients.before_gather(index, self.gather)
            shards = [dtensor.with_history(p) for p in group.parameters]
            used.append([torch.empty_like(shard) for shard in shards])
            for target, shard in zip(used[-1], shards, strict=True):
                self.gather.launch(copy, target, shard)
            self.current.wait(self.gather.record())
            if self.overlap is not None:
                self.overlap.after_gather(index)
        return used

    @torch.no_grad()
    def backward(self, used: list[list[Tensor]], step: int) -> None:
        for index in reversed(range(LAYERS)):
            if (index, step) == (2, 1) and self.scene != "accumulates":
                continue
            self.gradients.before_reduce(index)
            if self.overlap is not None:
                self.overlap.before_reduce(index)
            self.reduce.wait(self.current.record())
            flat = torch.empty(sum(each.numel() for each in used[index]))
            parts = flat.split([each.numel() for each in used[index]])
            for parameter, read, part in zip(
                self.groups[index].parameters, used[index], parts, strict=True
            ):
                if parameter.grad is not None:
                    shard = dtensor.with_history(parameter.grad)
                    self.reduce.launch(add_gradient, shard, read, step)
                    continue
                self.reduce.launch(write_gradient, part.view(read.shape), read, step)
                parameter.grad = dtensor.like(parameter, part.view(read.shape))
            del flat, parts, part, parameter
            reduced = self.reduce.record()
            self.gradients.after_reduce(index, reduced, self.reduce)
        self.end.wait(reduced)
        self.current.wait(self.end.record())

    @torch.no_grad()
    def between(self, step: int) -> None:
        parameters = [p for group in self.groups for p in group.parameters]
        shards = [dtensor.with_history(p.grad) for p in parameters if p.grad is not None]
        if self.scene == "reads":
            for _ in range(2):
                self.found += torch._foreach_norm(shards, 2.0)
                torch._foreach_mul_(shards, torch.tensor(0.75))
            shards[3].add_(0.5)
            self.found.append(shards[5].sum())
        elif self.scene == "forward":
            torch._foreach_mul_(shards[::2], 0.5)
            shards[1].zero_()
            if step == 0:  # the next reduction brings it to the device
                self.kept = record_of(shards[3])

    def run(self) -> list[Tensor]:
        for step in range(STEPS):
            used = self.forward()
            for micro in range(1 if self.overlap is not None else 2):
                self.backward(used, step + micro)
            self.between(step)
            del used
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.found += [each for read in self.forward() for each in read]
        if self.scene == "forward":
            assert self.kept is not None
            assert self.kept.real is not None
            self.found.append(self.kept.real)
        self.current.synchronize()
        self.optimizer.synchronize()
        found = [each.clone() for each in self.found]
        self.optimizer.close()
        return found


def run(scene: str, policy: str, skip: Skip = NOTHING) -> tuple[list[Tensor], Simulator]:
    with Simulator(policy, skip, inline_current=scene == "reads") as simulator:
        return Job(scene, simulator).run(), simulator


def expect(scene: str) -> list[Tensor]:
    with use_backend(CpuBackend(CPU)) as backend:
        return Job(scene, backend).run()


WAITS = Removal(run, expect, lambda pair: any("gradients" in each for each in pair))


def complete(scene: str, policies: Sequence[str]) -> None:
    WAITS.check(scene, policies)


def pairs(scene: str) -> set[tuple[str, str]]:
    simulator, needed, _ = WAITS.complete(scene)
    found = {simulator.wait_log[index] for index in needed}
    # The caller's stream keeps up with the host: of the others' waits for it nothing is known.
    return {pair for pair in found if pair[0] == "current"} if scene == "reads" else found


def unnoticed(scene: str, of_each: int | None) -> list[str]:
    more = [f"random:{seed}" for seed in range(8, 40)]
    return WAITS.unnoticed(scene, pairs(scene), more, of_each=of_each)


def noticed_by_a_reader() -> bool:
    """What the caller's stream does is not launched here, so its order is not known."""
    _, simulator = run("reads", "lazy")
    return WAITS.shows("reads", "lazy", ("wait", simulator.wait_log.index(("current", "reduce"))))


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("scene", [*SCENES, "skips"])
def test_complete_waits_give_right_weights(ranks: Ranks, scene: str, step: int) -> None:
    ranks(1).run(complete, scene, ADVERSARIES[::step])


@pytest.mark.parametrize(
    "scene", ["forward", "reads", pytest.param("accumulates", marks=pytest.mark.long)]
)
def test_removing_any_single_wait_is_noticed(ranks: Ranks, scene: str, of_each: int | None) -> None:
    assert ranks(1).run(unnoticed, scene, of_each) == [[]]
    assert ranks(1).run(noticed_by_a_reader) == [True]


def test_every_pair_of_streams_has_a_wait_that_nothing_implies(ranks: Ranks) -> None:
    found = set[tuple[str, str]]().union(*(ranks(1).run(pairs, scene)[0] for scene in SCENES))
    fetch, store = "gradients:in", "gradients:out"
    assert found == {
        *((store, "reduce"), (store, fetch), (fetch, store), (fetch, "current"), (fetch, "update")),
        *(("update", fetch), ("current", fetch), ("current", store)),
    }
