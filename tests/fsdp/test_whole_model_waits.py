"""The waits of weights in host memory: each is removed in turn, and some policy notices it.

The shards are those of a real FSDP2 model; the gathers are played, on a stream that lags or leads.
In "reads" the caller's stream keeps up with the host, as torch operations do that are not launched.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fsdp_offload.core.backend import Backend
from fsdp_offload.core.config import OffloadConfig
from fsdp_offload.core.devices import CpuBackend
from fsdp_offload.core.fsdp import find_groups
from fsdp_offload.optimizer.weights import Weights
from tests.fsdp import models
from tests.fsdp.models import Ranks
from tests.helpers.fake_fsdp import copy
from tests.helpers.removed_waits import CPU, NOTHING, Removal, Simulator, Skip
from tests.helpers.simulator import ADVERSARIES

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


def complete(scene: str) -> None:
    WAITS.check(scene, ADVERSARIES[::3])


def unnoticed(scene: str) -> list[str]:
    return WAITS.unnoticed(scene)


def noticed_by_a_reader() -> bool:
    """What the caller's stream does is not launched here, so its order is not known."""
    _, simulator = run("reads", "lazy")
    first = simulator.wait_log.index(("current", "weights:in"))
    return WAITS.shows("reads", "lazy", ("wait", first))


def pairs(scene: str) -> list[tuple[str, str]]:
    simulator, needed, _ = WAITS.complete(scene)
    return sorted({simulator.wait_log[i] for i in needed})


@pytest.mark.parametrize("scene", list(ORDERS))
def test_complete_waits_give_right_weights(ranks: Ranks, scene: str) -> None:
    ranks(1).run(complete, scene)


def test_removing_any_single_wait_is_noticed(ranks: Ranks) -> None:
    assert ranks(1).run(unnoticed, "gathers") == [[]]
    assert ranks(1).run(noticed_by_a_reader) == [True]


def test_every_pair_of_streams_has_a_wait_that_nothing_implies(ranks: Ranks) -> None:
    store = ("weights:out", "current")
    fetch = [("gather", "weights:in"), ("weights:in", "current"), ("weights:in", "gather")]
    assert ranks(1).run(pairs, "gathers") == [[*fetch, store]]
