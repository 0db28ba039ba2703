"""Updates beside forward and backward give the plain optimizer's bits with real FSDP2 models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from fsdp_offload.testing import RankPool
from tests.fsdp import models

STEPS = 5
SMALL = TransferConfig(bucket_bytes=4096, slots=2, host_threads=1, prefetch_bytes=4 * 4096)


def tokens(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(models.VOCABULARY, (4, 6), generator=generator)


def loss_of(model: Any, step: int, skip: int | None = None) -> Tensor:
    batch = tokens(step)
    logits = model(batch, skip=skip)
    return F.cross_entropy(logits.flatten(0, 1), batch.flatten())


def build(dtype: torch.dtype, size: int) -> Any:
    torch.manual_seed(0)
    return models.shard(models.Toy().to(dtype), models.flat_mesh(size))


def train(model: Any, optimizer: Any, *, clip: bool, skips: bool, micro: int = 1) -> list[float]:
    """Losses of a few steps; with ``skips`` one block has no gradient in every other one."""
    losses = []
    for step in range(STEPS):
        for part in range(micro):
            model.set_requires_gradient_sync(part == micro - 1)
            loss = loss_of(model, micro * step + part, 1 if skips and step % 2 else None)
            loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def twins(overlap: str, dtype: torch.dtype, size: int, options: dict[str, Any], **how: Any) -> None:
    plain, mine = build(dtype, size), build(dtype, size)
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
    reference = torch.optim.AdamW(plain.parameters(), **settings)
    inner = torch.optim.AdamW(mine.parameters(), **settings)
    optimizer = HybridDeviceOptimizer(
        inner, model=mine, overlap=overlap, **{"transfer": SMALL, **options}
    )
    expected = train(plain, reference, **how)
    found = train(mine, optimizer, **how)
    assert found == expected, f"losses {found}, plain {expected}"
    for (name, a), b in zip(mine.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(models.local(a), models.local(b)), name
    state, other = optimizer.state, reference.state
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        assert state[a].keys() == other[b].keys()
        for name in other[b]:
            assert torch.equal(models.local(state[a][name]), models.local(other[b][name])), name
    optimizer.close()


Ranks = Callable[..., RankPool]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_the_bits_are_those_of_the_plain_optimizer(ranks: Ranks, overlap: str, size: int) -> None:
    for how in ({"clip": False, "skips": False}, {"clip": False, "skips": True}):
        ranks(size).run(twins, overlap, torch.float32, size, {}, **how)
