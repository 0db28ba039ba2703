"""Expert layers under FSDP2 with a stash: the bits without one, in each mode of the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_offload import HybridDeviceOptimizer, PagedStash
from tests.activations import moe
from tests.activations.moe import CPU
from tests.helpers.ranks import RankPool

# As many rows as the second weight has: were it taken for an activation, its rows beyond the count
# would be lost.
CAPACITY = moe.WIDTH


def trained(
    stash: PagedStash | None, overlap: str, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Losses and shards of six steps, of two microbatches each."""
    model = moe.model(3, capacity=CAPACITY).use(stash).to(device)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = HybridDeviceOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2), model=model, overlap=overlap
    )
    found: list[Tensor] = []
    for step in range(6):
        for micro in range(2 if overlap != "backward" else 1):
            x = moe.batch(4 * step + 2 * micro + dist.get_rank()).to(device)
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


def compare(overlap: str, dtype: torch.dtype, device_type: str) -> None:
    device = torch.device(device_type, dist.get_rank()) if device_type == "cuda" else CPU
    stash = PagedStash(device, page_bytes=256, tail="nan")
    expected = trained(None, overlap, dtype, device)
    assert moe.same(trained(stash, overlap, dtype, device), expected)
    stash.check()
    now = stash.statistics()
    assert now.kept["a parameter"] > 0
    assert now.groups > now.exact_groups > 0
    assert now.used_device_pages == now.inactive_groups == 0


MODES = pytest.mark.parametrize(
    ("overlap", "dtype"),
    [("step", torch.bfloat16), ("forward", torch.float32), ("backward", torch.bfloat16)],
)


@MODES
def test_a_stash_changes_no_bit(ranks: Any, overlap: str, dtype: torch.dtype) -> None:
    pool: RankPool = ranks(2)
    pool.run(compare, overlap, dtype, "cpu")


@pytest.mark.gpus(2)
@MODES
def test_a_stash_changes_no_bit_on_gpus(ranks: Any, overlap: str, dtype: torch.dtype) -> None:
    pool: RankPool = ranks(2, device_type="cuda")
    pool.run(compare, overlap, dtype, "cuda")
