"""Parameters as Megatron-FSDP makes them, without it: it needs GPUs.

What is copied from it: parameters of a group lie one after the other in a flat buffer, each at a
multiple of its row, and the buffer is cut into equal pieces of whole rows; a rank's part of a
parameter is a view of its piece, in a DTensor that says ``Shard(0)``; the range is told in
``megatron_fsdp_slice``, counted within the tensor-parallel block; a shard without elements has no
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

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


def block(full: Tensor, dim: int | None, size: int, rank: int) -> Tensor:
    """What tensor parallelism leaves to ``rank``; even, as in Megatron."""
    if dim is None:
        return full
    assert full.shape[dim] % size == 0, (full.shape, size)
    return full.chunk(size, dim)[rank].contiguous()


def parameter(
    data: Tensor,
    shape: Shape,
    span: slice,
    mesh: DeviceMesh,
    placements: list[Placement],
    index: DistIndex,
) -> nn.Parameter:
    """``data``: this rank's elements, 1-D; ``shape``: global."""
    view = data.view(-1, *shape[1:]) if len(shape) > 1 else data.view(-1)
    if len(shape) > 1 and (tp := next((p.dim for p in placements[1:] if p.is_shard()), 0)):
        local_rest = list(shape[1:])
        local_rest[tp - 1] //= mesh.size(mesh.ndim - 1)
        view = data.view(-1, *local_rest)
    made = nn.Parameter(
        DTensor(view, spec_of(mesh, placements, shape, data.dtype), requires_grad=False)
    )
    made.orig_param = nn.Parameter(torch.empty(shape, device="meta"))
    made.megatron_fsdp_dist_index = index
    made.megatron_fsdp_slice = span
    megatron_fsdp.describe([made])
    return made


def spec_of(mesh: DeviceMesh, placements: list[Placement], shape: Shape, dtype: torch.dtype) -> Any:
    """A DTensor spec with the strides of a contiguous global tensor."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


@dataclass(frozen=True)
class Layout:
    """A mesh with the ranks that cut, and what its other axes do."""

    mesh: DeviceMesh
    outer: bool = False  # axis 0 replicates (HSDP)
    tp_dim: int | None = None  # the last axis cuts this dim, before the ragged cuts

    @property
    def index(self) -> DistIndex:
        """Names of the axes."""
        return DistIndex(
            "dp", "outer" if self.outer else None, None if self.tp_dim is None else "tp"
        )

    @property
    def placements(self) -> list[Placement]:
        """As Megatron-FSDP sets them."""
        found: list[Placement] = [Replicate()] if self.outer else []
        found.append(Shard(0))
        return found if self.tp_dim is None else [*found, Shard(self.tp_dim)]

    def make(self, full: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
        """This rank's parameters, as views of one buffer."""
        names = self.mesh.mesh_dim_names
        assert names is not None
        coordinate = dict(zip(names, self.mesh.get_coordinate(), strict=True))
        size = self.mesh.size(names.index("dp"))
        tp_size = self.mesh.size(names.index("tp")) if "tp" in names else 1
        blocks = {
            name: block(value, self.tp_dim, tp_size, coordinate.get("tp", 0))
            for name, value in full.items()
        }
        spans = cuts({n: tuple(b.shape) for n, b in blocks.items()}, size)[coordinate["dp"]]
        pieces = [blocks[name].reshape(-1)[span] for name, span in spans.items()]
        buffer, end, made = torch.cat(pieces), 0, {}
        for (name, span), piece in zip(spans.items(), pieces, strict=True):
            data = buffer[end : end + piece.numel()]
            end += piece.numel()
            made[name] = parameter(
                data, tuple(full[name].shape), span, self.mesh, self.placements, self.index
            )
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
