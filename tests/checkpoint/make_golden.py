"""Writes ``checkpoints/golden``: ``python -m tests.checkpoint.make_golden NAME ...``

Tiny checkpoints that later versions must read. One is written once, with the version of the
format that it stands for, and is then never written again: a new form gets a new name. Beside each
stands ``expected.safetensors``: weights, state, and the fp32 masters, whole tensors, as they
were when it was saved.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from fsdp_offload import checkpoint
from tests.helpers.compare import master_of
from tests.helpers.lanes import in_lanes
from tests.helpers.ranks import RankPool

GOLDEN = Path(__file__).parents[2] / "checkpoints" / "golden"
LR = 0.0625
EXTRA = {"step": 3, "scheduler": {"last_epoch": 3}}
Job = tuple[nn.Module, Optimizer]


def model_of(dtype: torch.dtype) -> nn.Module:
    """One layer: weight (3, 5), which two ranks share unevenly, and bias (3,); values of dtype."""
    model = nn.Linear(5, 3)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(wave(parameter.shape, index))
    model.to(dtype)
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def wave(shape: torch.Size, seed: int) -> Tensor:
    """Numbers between -1 and 1 with all bits of an fp32 in use: fp32 of ``shape``."""
    numel = shape.numel()
    return (torch.arange(numel) * 7919 + 104729 * seed).remainder(2003).reshape(shape) / 1001.3 - 1


def job(dtype: torch.dtype, lane: str | None) -> Job:
    """A model and its AdamW; ``lane`` ``None``: not wrapped."""
    model = model_of(dtype)
    inner = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.8, 0.95), foreach=False)
    if lane is None:
        return model, inner
    return model, in_lanes(inner, model=model, update_on=[lane])


def train(made: Job) -> None:
    """Three steps with gradients that need no forward."""
    model, optimizer = made
    for step in range(3):
        for index, parameter in enumerate(model.parameters()):
            gradient = wave(parameter.shape, 10 * step + index).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(
                    gradient, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            parameter.grad = gradient
        optimizer.step()


def whole(tensor: Tensor) -> Tensor:
    """The global tensor, on every rank."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def dump(made: Job) -> dict[str, Tensor]:
    """Weights, state and masters as whole tensors, by ``{fqn}`` and ``{fqn}.{name}``.

    ``{fqn}.master`` (fp32) is what the parameter is exactly, in whatever form it is kept.
    """
    model, optimizer = made
    state = optimizer.state
    found: dict[str, Tensor] = {}
    for fqn, parameter in model.named_parameters():
        found[fqn] = whole(parameter)
        values = {name: whole(value) for name, value in state[parameter].items()}
        values["master"] = master_of(found[fqn], values).float()
        values.pop("master_remainder", None)
        found |= {f"{fqn}.{name}": value for name, value in values.items()}
    return {name: value.clone().contiguous() for name, value in found.items()}


def save_ours(path: Path, dtype: torch.dtype, lane: str) -> dict[str, Tensor]:
    made = job(dtype, lane)
    train(made)
    checkpoint.save(path, *made, extra=EXTRA)
    return dump(made)


def save_by_torch(path: Path, *, flat: bool) -> dict[str, Tensor]:
    """Of the plain optimizer: flat under ``optim``, or nested under ``optimizer``."""
    made = job(torch.float32, None)
    train(made)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {
        "model": get_model_state_dict(made[0]),
        "optim" if flat else "optimizer": get_optimizer_state_dict(*made, options=options),
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return dump(made)


def save_on_two_ranks(path: Path) -> dict[str, Tensor]:
    with RankPool(2) as pool:
        return pool.run(save_ours, path, torch.bfloat16, "streamed")[0]


MAKERS: dict[str, Callable[[Path], dict[str, Tensor]]] = {
    "v3_fp32_streamed": lambda path: save_ours(path, torch.float32, "streamed"),
    "v3_bf16_remainder": lambda path: save_ours(path, torch.bfloat16, "streamed"),
    "v3_bf16_host_master": lambda path: save_ours(path, torch.bfloat16, "host"),
    "v3_bf16_two_ranks": save_on_two_ranks,
    "torch_adamw_flat": lambda path: save_by_torch(path, flat=True),
    "torch_adamw_nested": lambda path: save_by_torch(path, flat=False),
}


def make(name: str, root: Path = GOLDEN) -> None:
    """Write one golden checkpoint below ``root``."""
    shutil.rmtree(root / name, ignore_errors=True)
    (root / name).mkdir(parents=True)
    expected = MAKERS[name](root / name / "checkpoint")
    save_file(expected, root / name / "expected.safetensors")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or MAKERS:
        make(wanted)
