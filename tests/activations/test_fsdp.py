"""FSDP2 with a stash, or with activations in host memory: the bits without, in each mode of the
optimizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_offload import ActivationOffload, HybridDeviceOptimizer, PagedStash
from fsdp_offload.activations import offload
from tests.activations import moe, test_offload
from tests.activations.moe import CPU
from tests.helpers.ranks import RankPool

# As many rows as the second weight has: were it taken for an activation, its rows beyond the count
# would be lost.
CAPACITY = moe.WIDTH


def trained(
    model: nn.Module,
    layers: Any,
    batch: Callable[[int], Tensor],
    mode: tuple[str, torch.dtype],
    *,
    stash: PagedStash | None = None,
    move: Callable[[HybridDeviceOptimizer], ActivationOffload] | None = None,
) -> list[Tensor]:
    """Losses and shards of six steps, of two microbatches each."""
    overlap, dtype = mode
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    device = batch(0).device
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = HybridDeviceOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2), model=model, overlap=overlap
    )
    inside = nullcontext() if move is None else move(optimizer)
    found: list[Tensor] = []
    for step in range(6):
        for micro in range(2 if overlap != "backward" else 1):
            x = batch(4 * step + 2 * micro + dist.get_rank())
            with inside:
                loss = model(x).float().square().mean()
            loss.backward()
            found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if stash is not None and step == 1:
            stash.prepare(margin=1.5)
    optimizer.synchronize()
    found += [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    optimizer.close()
    return found


def compare_stash(overlap: str, dtype: torch.dtype, device_type: str) -> None:
    device = torch.device(device_type, dist.get_rank()) if device_type == "cuda" else CPU
    stash = PagedStash(device, page_bytes="256B", tail="nan")
    found = []
    for used in (None, stash):
        model = moe.model(3, capacity=CAPACITY).use(used).to(device)
        batch = lambda seed: moe.batch(seed).to(device)  # noqa: E731
        found.append(trained(model, model.layers, batch, (overlap, dtype), stash=used))
    assert moe.same(*found)
    stash.check()
    now = stash.statistics()
    assert now.kept_bytes["a parameter"] > 0
    assert now.groups > now.exact_groups > 0
    assert now.used_device_pages == now.inactive_groups == 0


MODES = pytest.mark.parametrize(
    ("overlap", "dtype"),
    [("step", torch.bfloat16), ("forward", torch.float32), ("backward", torch.bfloat16)],
)


@MODES
def test_a_stash_changes_no_bit(ranks: Any, size: int, overlap: str, dtype: torch.dtype) -> None:
    pool: RankPool = ranks(size)
    pool.run(compare_stash, overlap, dtype, "cpu")


@pytest.mark.gpus(2)
@MODES
def test_a_stash_changes_no_bit_on_gpus(ranks: Any, overlap: str, dtype: torch.dtype) -> None:
    pool: RankPool = ranks(2, device_type="cuda")
    pool.run(compare_stash, overlap, dtype, "cuda")


def compare_offload(share: float, overlap: str, dtype: torch.dtype) -> None:
    made: list[ActivationOffload] = []

    def move(optimizer: HybridDeviceOptimizer) -> ActivationOffload:
        made.append(ActivationOffload("1MiB", share, device=optimizer.device))
        return made[0]

    found = []
    with patch.object(offload, "BATCH_BYTES", 4096), patch.object(offload, "LEAST_BYTES", 512):
        for chosen in (None, move):
            model = test_offload.model(3, checkpointed=overlap == "forward")
            torch.manual_seed(0)  # dropout
            batch, mode = test_offload.batch, (overlap, dtype)
            found.append(trained(model, model.blocks, batch, mode, move=chosen))
    assert moe.same(*found)
    now = made[0].statistics()
    assert now.sent_bytes == now.returned_bytes > 0
    assert now.live_batches == 0
    assert now.inactive == 0
    assert overlap == "forward" or now.kept_bytes["a parameter"] > 0
    made[0].close()


@pytest.mark.parametrize(
    ("share", "overlap", "dtype"),
    [
        (1.0, "step", torch.bfloat16),
        (0.5, "forward", torch.float32),
        (1.0, "backward", torch.bfloat16),
    ],
)
def test_moving_changes_no_bit(
    ranks: Any, size: int, share: float, overlap: str, dtype: torch.dtype
) -> None:
    pool: RankPool = ranks(size)
    pool.run(compare_offload, share, overlap, dtype)
