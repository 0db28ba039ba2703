"""FSDP2 models whose padded shards and state lie in a region: training as without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp_offload import shards
from fsdp_offload.moving import FixedAddressRegion, collect, settle_storages
from fsdp_offload.storages import can_swap
from tests.fsdp import models
from tests.fsdp.models import check
from tests.helpers.ranks import RankPool

Ranks = Callable[..., RankPool]
CPU = torch.device("cpu")


def of(model: models.Toy, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    named = list(model.named_parameters())
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        named += [(f"{name}.{key}", value) for key, value in state.items() if value.ndim]
    return named


def train() -> None:
    pair = []
    for _ in range(2):
        model = models.toy(models.flat_mesh(2))
        pair.append((model, torch.optim.AdamW(models.groups(model), fused=True)))
    region = FixedAddressRegion("all", CPU, chunk_bytes=1 << 14)
    (_, plain), (model, optimizer) = pair
    known: set[int] = set()
    settled: dict[str, int] = {}
    for step in range(1, 5):
        for m, o in pair:
            models.backward(m, step)
            o.step()
            o.zero_grad()
        named = of(model, optimizer)
        settle_storages(collect(named, CPU, known=known), region)
        addresses = {key: shards.local(tensor.detach()).data_ptr() for key, tensor in named}
        check(settled.items() <= addresses.items(), "an address changed")
        settled = addresses
        region.pause()
        check(region.device_bytes == 0, "something stayed")
        region.resume()
        check(
            {k: shards.local(t.detach()).data_ptr() for k, t in named} == addresses,
            "an address changed",
        )
        models.check_twins(optimizer, plain, f"step {step}")
    region.close()
    models.backward(model, 5)


@pytest.mark.skipif(not can_swap(), reason="this torch cannot swap CPU storages")
def test_training_between_pauses(ranks: Ranks) -> None:
    ranks(2).run(train)
