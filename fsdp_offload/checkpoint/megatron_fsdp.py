"""Describe where shards of Megatron-FSDP's parameters begin.

Megatron-FSDP packs parameters into flat buffers and cuts those at rows, so a rank holds any range
of rows of a parameter. Its DTensors still say ``Shard(0)``, for which torch computes even cuts. So
call this before you wrap such parameters, and again for each new model::

    from fsdp_offload.checkpoint import megatron_fsdp

    megatron_fsdp.describe(model)
    optimizer = HybridDeviceOptimizer(optimizer, model)

Nothing else in this package imports this file.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..core import dtensor
from ..core.chunks import attach_chunk
from ..core.errors import UnsupportedParameterError

__all__ = ["describe"]


def describe(parameters: nn.Module | Iterable[Tensor]) -> None:
    """Attach to parameters which of their rows this rank has, for DCP and this package.

    The rows follow from the attributes ``megatron_fsdp_slice`` (a range of the block on the other
    mesh axes) and ``megatron_fsdp_dist_index``, or from the buffers of the newer form. Skips
    parameters without them. No collective.

    Args:
        parameters: a model, or its parameters.

    Raises:
        UnsupportedParameterError: the range does not match the shard, or is not whole rows.
    """
    found = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    for parameter in found:
        if isinstance(parameter, DTensor) and (span := _flat_range(parameter)) is not None:
            _describe(parameter, *span)


def _describe(parameter: DTensor, start: int, stop: int) -> None:
    shard = dtensor.local(parameter)
    offsets, block = _block(parameter)
    row_numel = math.prod(block[1:])
    rows, rest = divmod(stop - start, row_numel or 1)
    if tuple(shard.shape) != (rows, *block[1:]) or rest or start % (row_numel or 1):
        raise UnsupportedParameterError(
            f"a parameter of shape {tuple(parameter.shape)} with a shard of {tuple(shard.shape)}",
            reason=f"its Megatron-FSDP attributes give this rank elements {start} to "
            f"{stop} of a block of {tuple(block)}",
            remedy="shard optimizer state over the inner data axis only "
            '(outer_dp_sharding_strategy="no_shard")',
        )
    first = offsets[0] + start // (row_numel or 1)
    attach_chunk(parameter, shard, parameter.shape, (first, *offsets[1:]))


def _flat_range(parameter: DTensor) -> tuple[int, int] | None:
    """Find this rank's elements of its block, in either form of Megatron-FSDP."""
    span = getattr(parameter, "megatron_fsdp_slice", None)
    if span is not None:
        return span.start, span.stop
    group: Any = getattr(parameter, "_mfsdp_parameter_group", None)
    if isinstance(group, weakref.ref):
        group = group()
    if group is None:
        return None
    index = next(i for i, p in enumerate(group.sharded_parameters) if p is parameter)
    owned = group.main_weight._get_owned_range(index)
    if owned is None:
        return 0, 0
    return owned.tensor_relative_offset, owned.tensor_relative_offset + owned.numel


def _block(parameter: DTensor) -> tuple[list[int], list[int]]:
    """Find offsets and sizes of the block that all ranks of the data axes hold together: the
    tensor, cut along the other axes (tensor parallel), whose placements are right."""
    offsets, sizes = [0] * parameter.dim(), list(parameter.shape)
    mesh = parameter.device_mesh
    coordinate, names = mesh.get_coordinate(), mesh.mesh_dim_names
    index = getattr(parameter, "megatron_fsdp_dist_index", None)
    if index is None or names is None or coordinate is None:
        return offsets, sizes
    for axis, placement in enumerate(parameter.placements):
        dim = getattr(placement, "dim", None)
        if dim is None or names[axis] in (index.dp_shard_dim, index.dp_outer_dim):
            continue
        step = -(-sizes[dim] // mesh.size(axis))
        start = min(coordinate[axis] * step, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(step, sizes[dim] - start)
    return offsets, sizes
