"""The only file that touches private API of DTensor and FSDP2.

[Note: tensors of a parameter]
Four tensors stand for one parameter, and the rest of the package speaks only of the second:

* the *parameter* in ``param_groups``: an ``nn.Parameter``, for FSDP2 a DTensor of global shape;
* its *shard*: the local piece on this rank, ``DTensor._local_tensor`` (or the tensor itself).
  FSDP2's all-gather reads the same memory, so updates are written in place and the shard is
  never replaced;
* the *gradient shard*: the same for ``parameter.grad``;
* state tensors shaped like the shard, which are shown to the outside as DTensors with the
  parameter's own mesh and placements (:func:`like`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .errors import UnsupportedParameterError


@dataclass(frozen=True)
class ShardInfo:
    """What plans and layouts need to know of one parameter."""

    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    max_local_numel: int  # largest shard over all ranks, from global metadata alone
    dtype: torch.dtype
    device: torch.device
    is_plain: bool  # the shard is an ordinary dense tensor, not a subclass such as float8

    @property
    def local_numel(self) -> int:
        """Elements of this rank's shard."""
        return math.prod(self.local_shape)

    @property
    def global_numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.global_shape)


def local(tensor: Tensor) -> Tensor:
    """The shard of ``tensor``: shares its memory, carries no autograd history."""
    if isinstance(tensor, DTensor):
        shard = tensor._local_tensor
        if hasattr(shard, "wait"):  # AsyncCollectiveTensor: the collective is still in flight
            shard = shard.wait()
        return shard.detach()
    return tensor.detach()


def _is_plain(shard: Tensor) -> bool:
    return type(shard) in (Tensor, nn.Parameter)


def shard_info(parameter: Tensor, fqn: str) -> ShardInfo:
    """Metadata of ``parameter``, checked.

    Raises:
        UnsupportedParameterError: the shard is not contiguous, sparse, or a Partial DTensor.
    """
    shard = local(parameter)
    plain = _is_plain(shard)
    if parameter.layout is not torch.strided:
        raise UnsupportedParameterError(
            f"parameter {fqn} with layout {parameter.layout}",
            reason="only dense parameters have shards that can be cut",
            remedy="keep it in an optimizer of its own",
        )
    if plain and not shard.is_contiguous():
        raise UnsupportedParameterError(
            f"parameter {fqn} with shard shape {tuple(shard.shape)}, strides {shard.stride()}",
            reason="the shard is not contiguous, and fused kernels would skip elements of it",
            remedy="replace it by parameter.contiguous() before building the optimizer",
        )
    if isinstance(parameter, DTensor) and any(p.is_partial() for p in parameter.placements):
        raise UnsupportedParameterError(
            f"parameter {fqn} with placements {parameter.placements}",
            reason="a Partial parameter has no values of its own on this rank",
            remedy="redistribute it to Shard or Replicate",
        )
    return ShardInfo(
        global_shape=tuple(parameter.shape),
        local_shape=tuple(shard.shape),
        max_local_numel=_max_local_numel(parameter),
        dtype=parameter.dtype,
        device=shard.device,
        is_plain=plain,
    )


def _max_local_numel(parameter: Tensor) -> int:
    """Elements of the largest shard on any rank: the same number on all of them."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    shape = list(parameter.shape)
    for axis, placement in enumerate(parameter.placements):
        dim = getattr(placement, "dim", None)  # Shard and _StridedShard; Replicate has none
        if dim is not None:
            shape[dim] = -(-shape[dim] // parameter.device_mesh.size(axis))
    return math.prod(shape)


def mesh_device_type(parameter: Tensor) -> str:
    """Device type that the parameter computes on (a DTensor's mesh may differ from its shard)."""
    if isinstance(parameter, DTensor):
        return parameter.device_mesh.device_type
    return parameter.device.type


def gradient_shard(parameter: Tensor, fqn: str, expected: tuple[int, ...]) -> Tensor | None:
    """This rank's piece of ``parameter.grad``: contiguous, of shape ``expected``, or ``None``.

    A gradient placed otherwise than its parameter is redistributed first, as DTensor does when
    the plain optimizer adds the two.

    Raises:
        UnsupportedParameterError: the gradient is sparse, or its shape is not the shard's.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.layout is not torch.strided:
        raise UnsupportedParameterError(
            f"gradient of {fqn} with layout {gradient.layout}",
            reason="sparse gradients cannot be cut into buckets",
            remedy="use sparse=False in the embedding",
        )
    if (
        isinstance(gradient, DTensor)
        and isinstance(parameter, DTensor)
        and gradient.placements != parameter.placements
    ):
        gradient = gradient.redistribute(placements=parameter.placements)
    shard = local(gradient)
    if shard.shape != expected:
        raise UnsupportedParameterError(
            f"gradient shard of {fqn} with shape {tuple(shard.shape)}",
            reason=f"the parameter's shard has shape {expected}",
            remedy="let backward fill .grad, or assign a gradient with the parameter's placements",
        )
    return shard if shard.is_contiguous() else shard.contiguous()


def like(parameter: Tensor, shard: Tensor) -> Tensor:
    """``shard`` (local shape, any dtype and device) as a tensor placed like ``parameter``.

    No copy, no collective, no move: ``DTensor.from_local`` would move a CPU shard to the mesh's
    device, so the DTensor is built from the parameter's own spec.
    """
    if not isinstance(parameter, DTensor):
        return shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = parameter._spec
    meta = TensorMeta(parameter.shape, parameter.stride(), shard.dtype)
    return DTensor(
        shard, DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False
    )


def same_placement(parameter: Tensor, value: Tensor) -> bool:
    """Whether ``value`` is cut over ranks as ``parameter`` is (a plain local tensor counts)."""
    if isinstance(parameter, DTensor) and isinstance(value, DTensor):
        return (
            value.shape == parameter.shape
            and value.placements == parameter.placements
            and value.device_mesh.size() == parameter.device_mesh.size()
        )
    return True


def parameter_names(models: Sequence[nn.Module]) -> dict[Tensor, str]:
    """FQN of every parameter of ``models``, tied ones once, in order of registration."""
    names: dict[Tensor, str] = {}
    for index, model in enumerate(models):
        prefix = f"{index}." if len(models) > 1 else ""
        for name, parameter in model.named_parameters():
            names.setdefault(parameter, prefix + name)
    return names


def fsdp_parameters(models: Iterable[nn.Module]) -> set[Tensor]:
    """Parameters that an FSDP2 module of ``models`` all-gathers."""
    managed: set[Tensor] = set()
    for group in _fsdp_groups(models):
        managed.update(fsdp_param.sharded_param for fsdp_param in group.fsdp_params)
    return managed


def offloads_parameters(models: Iterable[nn.Module]) -> bool:
    """Whether a module was sharded with ``CPUOffloadPolicy``."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    return any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in _fsdp_groups(models))


def _fsdp_groups(models: Iterable[nn.Module]) -> list:  # type: ignore[type-arg]
    """FSDP2 parameter groups. torch 2.11 keeps one per module, later versions a list."""
    from torch.distributed.fsdp import FSDPModule

    groups = []
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                single = getattr(state, "_fsdp_param_group", None)
                found = getattr(state, "_fsdp_param_groups", None) or [single]
                groups += [group for group in found if group is not None]
    return groups


def address(parameter: Tensor) -> int:
    """Where the shard lies in memory; 0 for an empty one."""
    shard = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return shard.data_ptr() if shard.numel() else 0
