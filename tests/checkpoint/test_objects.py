"""Objects reach the ranks that they are for, of any size, and without numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from fsdp_offload.checkpoint import objects
from tests.helpers.ranks import RankPool


def exchange() -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    value = {"rank": rank, "text": "x" * 1000 * (world - rank)}
    with mock.patch.object(Tensor, "numpy", side_effect=RuntimeError("Numpy is not available")):
        return {
            "all_gather": objects.all_gather(value, None),
            "gather": objects.gather(value, None),
            "broadcast": objects.broadcast(value, None),
            "scatter": objects.scatter(
                [("for", r, "y" * 100 * r) for r in range(world)] if rank == 0 else None, None
            ),
        }


@pytest.mark.parametrize("world", [2, 4])
def test_objects_of_several_sizes(ranks: Callable[..., RankPool], world: int) -> None:
    values = [{"rank": r, "text": "x" * 1000 * (world - r)} for r in range(world)]
    for rank, found in enumerate(ranks(world).run(exchange)):
        assert found == {
            "all_gather": values,
            "gather": values if rank == 0 else [],
            "broadcast": values[0],
            "scatter": ("for", rank, "y" * 100 * rank),
        }
