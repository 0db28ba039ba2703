"""FSDP2 with activations in host memory: the bits without, in each mode of the optimizer."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_offload import ActivationOffload, HybridDeviceOptimizer
from fsdp_offload.activations import offload
from tests.activations import moe, test_offload
from tests.helpers.ranks import RankPool


def trained(share: Any, overlap: str, dtype: torch.dtype) -> list[Tensor]:
    """Losses and shards of five steps, of two microbatches each."""
    model = test_offload.model(3, checkpointed=overlap == "forward")
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = HybridDeviceOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2), model=model, overlap=overlap
    )
    moved = None
    if share is not None:
        moved = ActivationOffload("1MiB", share, optimizer)
    found: list[Tensor] = []
    for step in range(5):
        for micro in range(2 if overlap != "backward" else 1):
            x = test_offload.batch(4 * step + 2 * micro + dist.get_rank())
            if moved is None:
                loss = model(x).float().square().mean()
            else:
                with moved:
                    loss = model(x).float().square().mean()
            loss.backward()
            found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    found += [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    if moved is not None:
        now = moved.statistics()
        assert now.sent_bytes == now.returned_bytes > 0
        assert now.live_batches == 0
        assert now.inactive == 0
        assert overlap == "forward" or now.kept["a parameter"] > 0
        moved.close()
    optimizer.close()
    return found


def compare(share: Any, overlap: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    expected = trained(None, overlap, dtype)
    torch.manual_seed(0)
    with patch.object(offload, "BATCH_BYTES", 4096), patch.object(offload, "LEAST_BYTES", 512):
        assert moe.same(trained(share, overlap, dtype), expected)


@pytest.mark.parametrize(
    ("share", "overlap", "dtype"),
    [
        (1.0, "step", torch.bfloat16),
        (0.5, "forward", torch.float32),
        ("auto", "backward", torch.bfloat16),
    ],
)
def test_moving_changes_no_bit(ranks: Any, share: Any, overlap: str, dtype: torch.dtype) -> None:
    pool: RankPool = ranks(2)
    pool.run(compare, share, overlap, dtype)
