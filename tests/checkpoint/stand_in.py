"""Parameters as Megatron-FSDP makes them, without it: it needs GPUs.

What is copied from it: parameters of a group lie one after the other in a flat buffer, each at a
multiple of its row, and the buffer is cut into equal pieces of whole rows; a rank's part of a
parameter is a view of its piece, in a DTensor that says ``Shard(0)``; the range is told in
``megatron_fsdp_slice``; a shard without elements has no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from fsdp_offload.checkpoint import megatron_fsdp

Shape = tuple[int, ...]


@dataclass(frozen=True)
class DistIndex:
    """The names of mesh axes, as ``megatron_fsdp_dist_index`` has them."""

    dp_shard_dim: str = "dp"
    dp_outer_dim: str | None = None
    tp_dim: str | None = None


def row_numel(shape: Shape) -> int:
    """Elements of a row, the unit of cuts."""
    return math.prod(shape[1:])


def cuts(shapes: Mapping[str, Shape], size: int) -> list[dict[str, slice]]:
    """Per rank, the range of each tensor, from packing them into one buffer."""
    chunk = math.lcm(*(row_numel(shape) for shape in shapes.values()))
    starts, end = {}, 0
    for name, shape in shapes.items():
        row = row_numel(shape)
        starts[name] = end = -(-end // row) * row
        end += math.prod(shape)
    piece = -(-end // (chunk * size)) * chunk
    found: list[dict[str, slice]] = []
    for rank in range(size):
        mine = {}
        for name, shape in shapes.items():
            low = min(max(rank * piece - starts[name], 0), math.prod(shape))
            high = min(max((rank + 1) * piece - starts[name], 0), math.prod(shape))
            mine[name] = slice(low, high) if low < high else slice(0, 0)
        found.append(mine)
    return found


def spec_of(mesh: DeviceMesh, placements: list[Placement], shape: Shape, dtype: torch.dtype) -> Any:
    """A DTensor spec with the strides of a contiguous global tensor."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def parameters(full: Mapping[str, Tensor], mesh: DeviceMesh) -> dict[str, nn.Parameter]:
    """This rank's parameters, as views of one buffer; the mesh has one axis."""
    spans = cuts({n: tuple(value.shape) for n, value in full.items()}, mesh.size())
    mine = spans[mesh.get_local_rank()]
    pieces = [full[name].reshape(-1)[span] for name, span in mine.items()]
    views = torch.cat(pieces).split([piece.numel() for piece in pieces])
    made = {}
    for (name, span), view in zip(mine.items(), views, strict=True):
        shape = tuple(full[name].shape)
        spec = spec_of(mesh, [Shard(0)], shape, view.dtype)
        made[name] = nn.Parameter(DTensor(view.view(-1, *shape[1:]), spec, requires_grad=False))
        made[name].orig_param = nn.Parameter(torch.empty(shape, device="meta"))
        made[name].megatron_fsdp_dist_index = DistIndex()
        made[name].megatron_fsdp_slice = span
    megatron_fsdp.describe(made.values())
    return made


def set_gradient(parameter: nn.Parameter, shard: Tensor, *, decoupled: bool = False) -> None:
    """As Megatron-FSDP installs it: nothing on an empty shard."""
    assert isinstance(parameter, DTensor)
    made = None
    if shard.numel():
        spec = spec_of(
            parameter.device_mesh,
            list(parameter.placements),
            tuple(parameter.shape),
            shard.dtype,
        )
        made = DTensor(shard.view(parameter._local_tensor.shape), spec, requires_grad=False)
    if decoupled:
        parameter.decoupled_grad = made
    else:
        parameter.grad = made
