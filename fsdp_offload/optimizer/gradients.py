"""Gradients: what an update reads of ``.grad``, and clipping, with the bits of torch's
``clip_grad_norm_``.

Norms are torch's own, one per mesh. Other than in torch, gradients may lie on several meshes,
beside plain tensors, or be empty on this rank (torch has no infinity norm of those); what is
returned is replicated, never pending a reduction.

``.grad`` is multiplied, as torch does. The update reads gradients anyway and could multiply there;
but a coefficient that is kept for later meets gradients that it was not computed from, as soon as
they are replaced, added to, or clipped again in between. The pass reads and writes every gradient
once: about 2 ms for 1.33 G bf16 elements on an H200.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import get_total_norm

from ..core import dtensor
from ..core.errors import AwayError, ConfigError, NonFiniteGradientError, StateSchemaError
from ..core.gated import keeper_of
from ..core.recorded import Taken, record_of
from ..core.storage import is_empty
from ..update.params import ParamState


def gradient_of(param: ParamState) -> Tensor | Taken | None:
    """This rank's gradient of a parameter: 1-D, contiguous, or in host memory, or None.

    Raises:
        AwayError: the shard or its gradient is offloaded.
        StateSchemaError: the shard is not where it was when the optimizer was wrapped.
        UnsupportedParameterError: see :func:`.core.dtensor.gradient_shard`.
    """
    shard = dtensor.with_history(param.parameter)
    storage = None if keeper_of(shard) is not None else shard.untyped_storage()
    if storage is not None and is_empty(shard, storage):
        raise AwayError(
            f"the shard of {param.fqn}",
            reason="its device memory is offloaded, and an update writes into it",
            remedy="reload the model first",
        )
    gradient = taken_gradient(param.parameter) or dtensor.gradient_shard(
        param.parameter, param.fqn, param.info.local_shape
    )
    if gradient is None:
        return None
    if isinstance(gradient, Tensor) and is_empty(gradient):
        raise AwayError(
            f"the gradient of {param.fqn}",
            reason="its device memory is offloaded",
            remedy="reload the model first",
        )
    if dtensor.memory_of(shard, storage) != param.memory:
        raise StateSchemaError(
            f"shard of {param.fqn}",
            reason="parameter.data was assigned after wrapping, by the caller or by a move of the "
            "model, and updates write into the memory of before",
            remedy="write values in place, `with torch.no_grad(): parameter.copy_(values)`, and "
            "move the model before the optimizer is wrapped",
        )
    return gradient.view(-1) if isinstance(gradient, Tensor) else gradient


def taken_gradient(parameter: Tensor) -> Taken | None:
    """A gradient that is in host memory. What writes have brought to the device is an ordinary one
    from here on."""
    gradient = parameter.grad
    record = None if gradient is None else dtensor.record(gradient)
    if record is not None and record.real is not None:
        dtensor.put(gradient, record.real)
    return None if record is None or record.real is not None else record.taken


def count_empty_shards(
    params: Sequence[ParamState], empty: Sequence[ParamState], gradients: list[Tensor | None]
) -> None:
    """Let ``step`` of a parameter advance on the ranks that hold nothing of it too.

    FSDP2 gives empty shards an empty gradient, Megatron-FSDP gives them none. Their ``step`` would
    stay behind that of the other ranks, and a checkpoint takes it from any rank.

    Args:
        params: all.
        empty: those that never have a gradient here, for that reason alone.
        gradients: one each; those of ``empty`` are filled in, unless none of the others has one.
    """
    held = [r.index for r in params if r.info.local_numel] if empty else []
    if held and all(gradients[index] is None for index in held):
        return  # a step without any gradient
    for param in empty:
        if gradients[param.index] is None:
            gradients[param.index] = dtensor.local(param.parameter).reshape(-1)


# --------------------------------------------------------------------------- clipping


def clip(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float, *, error_if_nonfinite: bool
) -> Tensor:
    """Scale gradients in place to a norm of at most ``max_norm``; see :func:`total_norm`, whose
    value it returns."""
    gradients = gradients_of(parameters)
    norm = total_norm(gradients, norm_type, error_if_nonfinite=error_if_nonfinite)
    scale(gradients, coefficient(norm, max_norm))
    return norm


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients that are there, as DTensors where the parameters are; order kept.

    Raises:
        AwayError: one is offloaded.
    """
    found = [g for p in parameters if (g := dtensor.whole_gradient(p)) is not None]
    shards = (dtensor.local(gradient) for gradient in found)
    if any(record_of(shard) is None and is_empty(shard) for shard in shards):
        raise AwayError(
            "the norm of gradients that are offloaded",
            reason="their device memory was given up",
            remedy="reload the model first",
        )
    return found


@torch.no_grad()
def total_norm(
    gradients: Sequence[Tensor], norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """What ``get_total_norm`` returns for all gradients, which may lie on several meshes.
    Collective over these; the host waits for the device only with ``error_if_nonfinite``.

    Returns:
        0-dim, on the device of the first one; a replicated DTensor if all are on one mesh.

    Raises:
        ConfigError: ``norm_type`` is NaN.
        NonFiniteGradientError: see ``error_if_nonfinite``.
    """
    p = float(norm_type)
    if math.isnan(p):
        raise ConfigError(
            f"norm_type={norm_type!r}", reason="not an order of a norm", remedy="use 2 or inf"
        )
    meshes: dict[DeviceMesh | None, list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        meshes.setdefault(mesh, []).append(gradient)
    norms = [_norm_over(mesh, alike, p) for mesh, alike in meshes.items()]
    total = norms[0] if norms else torch.tensor(0.0)
    if len(norms) > 1:
        device = dtensor.local(gradients[0]).device
        parts = torch.stack([dtensor.local(norm).to(device) for norm in norms])
        total = torch.linalg.vector_norm(parts, p)
    if error_if_nonfinite and not bool(dtensor.local(total).isfinite()):
        raise NonFiniteGradientError(
            f"total gradient norm of order {p} is {dtensor.local(total).item()}",
            reason="gradients cannot be scaled by a norm that is not finite",
            remedy="find out which gradient it is, or pass error_if_nonfinite=False",
        )
    return total


def _norm_over(mesh: DeviceMesh | None, gradients: list[Tensor], p: float) -> Tensor:
    """Norm of order ``p`` of tensors on ``mesh`` (None: plain ones); 0-dim, replicated."""
    if mesh is None:
        # torch has no infinity norm of an empty tensor.
        held = [g for g in gradients if g.numel()] if math.isinf(p) else gradients
        return get_total_norm(held, p) if held else gradients[0].new_zeros(())
    replicated = [Replicate()] * mesh.ndim
    if not math.isinf(p):
        norm = get_total_norm(gradients, p)
        assert isinstance(norm, DTensor)
        return norm.redistribute(placements=replicated)
    # torch's raises on ranks whose shard is empty, and the others wait for them. Elements that
    # several ranks hold do not change a maximum, so every axis of the mesh is reduced over.
    # The norm of a sum, which a Partial gradient is, needs the sum.
    shards_here = []
    for gradient in gradients:
        if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
            gradient = gradient.redistribute(placements=replicated)
        shards_here.append(dtensor.local(gradient))
    held = [shard for shard in shards_here if shard.numel()]
    norms = list(torch._foreach_norm(held, p)) if held else []
    norms.append(shards_here[0].new_full((), 0.0 if p > 0 else math.inf))
    extremum = torch.linalg.vector_norm(torch.stack(norms), p)
    for axis in range(mesh.ndim):
        operation = dist.ReduceOp.MAX if p > 0 else dist.ReduceOp.MIN
        dist.all_reduce(extremum, operation, group=mesh.get_group(axis))
    return DTensor.from_local(extremum, mesh, replicated, run_check=False)


@torch.no_grad()
def coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of norm ``total_norm`` are multiplied by: ``max_norm`` over it, at most 1; a
    0-dim plain tensor.

    Raises:
        ConfigError: ``max_norm`` is NaN or negative.
    """
    limit = float(max_norm)
    if not limit >= 0.0:
        raise ConfigError(
            f"max_norm={max_norm!r}", reason="not a norm", remedy="use a number of 0 or more"
        )
    return torch.clamp(limit / (dtensor.local(total_norm) + 1e-6), max=1.0)


@torch.no_grad()
def scale(gradients: Sequence[Tensor], coefficient: Tensor) -> None:
    """Multiply ``gradients`` in place by ``coefficient``, with the rounding of torch's clipping."""
    alike = defaultdict[tuple[torch.device, torch.dtype], list[Tensor]](list)
    for gradient in gradients:
        shard = dtensor.local(gradient)
        alike[shard.device, shard.dtype].append(shard)
    for (device, _), some in alike.items():
        torch._foreach_mul_(some, coefficient.to(device))
