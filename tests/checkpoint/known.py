"""A small job whose weights and state are set to known values of a step, in one process or sharded.

No training: any tensor of any step can be told from its name, so that what a load gave can be
compared by bits without a second run.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from tests.helpers.compare import same
from tests.helpers.lanes import in_lanes

Job = tuple[nn.Module, HybridDeviceOptimizer]


class Model(nn.Module):
    """Large and small items, an uneven one, one that rank 1 holds nothing of."""

    def __init__(self, rows: int = 301) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(rows, 100))
        self.uneven = nn.Parameter(torch.zeros(7, 5))
        self.one = nn.Parameter(torch.zeros(1))


def model_of(rows: int = 301) -> Model:
    """Sharded over all ranks where there is a process group."""
    model = Model(rows)
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def job(rows: int = 301, *, away: bool = False) -> Job:
    """A fresh model, and an optimizer with all three lanes; ``away``: all is in host memory."""
    model = model_of(rows)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    transfer = TransferConfig(bucket_bytes="4KiB", host_threads=1)
    if away:
        options: Any = {"offload": "all", "device_memory": 0, "transfer": transfer}
        return model, HybridDeviceOptimizer(inner, model, **options)
    lanes = ["streamed", "host", "resident"]
    return model, in_lanes(inner, model=model, update_on=lanes, transfer=transfer)


def known(name: str, step: int, like: Tensor) -> Tensor:
    """The value of a weight or state tensor at ``step``, placed like ``like``."""
    if name.endswith(".step"):
        return torch.tensor(float(step))
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    value = torch.randn(like.shape, generator=generator)
    if isinstance(like, DTensor):
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value


def tensors(made: Job) -> Iterator[tuple[str, Tensor]]:
    """Weights and state, by name."""
    model, optimizer = made
    state = optimizer.state
    for fqn, parameter in model.named_parameters():
        yield fqn, parameter.detach()
        yield from ((f"{fqn}.{name}", value) for name, value in state[parameter].items())


@torch.no_grad()
def set_to(made: Job, step: int) -> None:
    """Everything as it is at ``step``."""
    for name, value in tensors(made):
        value.copy_(known(name, step, value))
    made[1].param_groups[0]["lr"] = step / 8


def check_is(made: Job, step: int) -> None:
    """Raise if anything is not as :func:`set_to` left it."""
    for name, value in tensors(made):
        if not same(value, known(name, step, value)):
            raise AssertionError(f"{name} is not that of step {step}")
    if (lr := made[1].param_groups[0]["lr"]) != step / 8:
        raise AssertionError(f"lr {lr} is not that of step {step}")
