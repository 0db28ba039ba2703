"""The only file that touches private API of DTensor.

Four tensors stand for one parameter, and the rest of the package speaks only of the second:

* the *parameter* in ``param_groups``: an ``nn.Parameter``, for FSDP2 a DTensor of global shape;
* its *shard*: the local piece on this rank, ``DTensor._local_tensor`` (or the tensor itself).
  FSDP2's all-gather reads the same memory, so updates are written in place and the shard is
  never replaced;
* the *gradient shard*: the same for ``parameter.grad``;
* state tensors shaped like the shard, which are shown to the outside as DTensors with the
  parameter's own mesh and placements (:func:`like`).

Megatron-FSDP packs parameters into flat buffers and cuts those, so a rank holds any range of rows
(:func:`uneven`). Its DTensors still say ``Shard(0)``, for which torch computes even cuts. So this
module computes no local shape from placements, and state of such parameters carries its chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .chunks import attach_chunk, chunks_of
from .errors import UnsupportedParameterError
from .fsdp import gathered_parameters
from .gated import GatedShard, keeper_of, ungated
from .recorded import Record, record_of
from .storage import identity

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex


@dataclass(frozen=True)
class ShardInfo:
    """What plans and layouts need to know of one parameter."""

    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
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
    """The shard of ``tensor``: shares its memory, carries no autograd history.

    Updates of it may be under way: see [Note: gated shards]. A weight that is in host memory is
    shown there, unless the caller holds a view of its copy.
    """
    shard = with_history(tensor)
    if (keeper := keeper_of(shard)) is not None:
        return keeper.local()
    # AsyncCollectiveTensor: the collective is still in flight.
    if type(shard) is not Tensor and hasattr(shard, "wait"):
        shard = shard.wait()
    return shard.detach()


Gated = list[tuple[DTensor, GatedShard | None]]
"""Parameters, and what stands for their shards where a gate has been closed once."""


def gate(parameters: Iterable[Tensor], known: Gated) -> None:
    """Let ``known`` have these parameters; what stands for their shards is kept."""
    made = {id(parameter): gated for parameter, gated in known}
    known[:] = [(p, made.get(id(p))) for p in parameters if isinstance(p, DTensor)]


def close_gate(parameters: Gated, wait: Callable[[], None]) -> None:
    """Let the user's code call ``wait`` before each use of a shard, until :func:`open_gate`."""
    for index, (parameter, gated) in enumerate(parameters):
        shard = parameter._local_tensor
        if gated is None or shard is not ungated(gated):
            if type(shard) is not Tensor:  # closed already, or updated by its class in step()
                continue
            gated = GatedShard(shard, wait)
            parameters[index] = parameter, gated
        parameter._local_tensor = gated


def open_gate(parameters: Gated) -> None:
    """Give the shards back."""
    for parameter, gated in parameters:
        if gated is not None and parameter._local_tensor is gated:
            parameter._local_tensor = ungated(gated)


def put(parameter: Tensor | None, shard: Tensor) -> None:
    """Let a parameter, or its gradient, have this shard, or what stands for it."""
    assert isinstance(parameter, DTensor)
    parameter._local_tensor = shard


def record(gradient: Tensor) -> Record | None:
    """Of a gradient in host memory."""
    return record_of(with_history(gradient))


class GatedGradients:
    """``.grad`` of DTensors, while updates read it."""

    def __init__(self) -> None:
        self._made: list[GatedShard | None] = []
        self._closed: list[tuple[DTensor, GatedShard]] = []

    def close(self, parameters: Sequence[Tensor], wait: Callable[[], None]) -> None:
        """Let the user's code call ``wait`` before each use of a gradient, until :meth:`open`."""
        if len(self._made) != len(parameters):
            self._made = [None] * len(parameters)
        for index, parameter in enumerate(parameters):
            gradient = parameter.grad
            if not isinstance(gradient, DTensor):
                continue
            shard = gradient._local_tensor
            if type(shard) is not Tensor:
                continue
            gated = self._made[index]
            if gated is None or not gated.takes(shard):
                gated = self._made[index] = GatedShard(shard, wait)
            gradient._local_tensor = gated
            self._closed.append((gradient, gated))

    def open(self) -> None:
        """Give the gradients back, those too that are no parameter's any more."""
        for gradient, gated in self._closed:
            if gradient._local_tensor is gated:
                gradient._local_tensor = ungated(gated)
            gated.release()
        self._closed.clear()


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
            reason="only dense parameters can be split into buckets",
            remedy="put it into an optimizer of its own",
        )
    if plain and not shard.is_contiguous():
        raise UnsupportedParameterError(
            f"parameter {fqn} with shard shape {tuple(shard.shape)}, strides {shard.stride()}",
            reason="the shard is not contiguous, and fused kernels would skip elements of it",
            remedy="before wrapping, call model.to(memory_format=torch.contiguous_format), or "
            "assign parameter.data = parameter.data.contiguous()",
        )
    if isinstance(parameter, DTensor) and any(p.is_partial() for p in parameter.placements):
        raise UnsupportedParameterError(
            f"parameter {fqn} with placements {parameter.placements}",
            reason="a Partial parameter has no values of its own on this rank",
            remedy="redistribute it to Shard or Replicate",
        )
    _check_even(parameter, fqn, tuple(shard.shape))
    return ShardInfo(
        global_shape=tuple(parameter.shape),
        local_shape=tuple(shard.shape),
        dtype=parameter.dtype,
        device=with_history(parameter).device,
        is_plain=plain,
    )


def first_index(parameter: Tensor) -> int:
    """Where the shard begins: the row-major index in the global tensor of its first element.

    0 for an empty shard. No collective.
    """
    if not isinstance(parameter, DTensor):
        return 0
    chunks = chunk_list(like(parameter, local(parameter)))  # an uneven one's own
    if not chunks:
        return 0
    index = 0
    for size, offset in zip(parameter.shape, chunks[0].offsets, strict=True):
        index = index * size + offset
    return index


# --------------------------------------------------------------------------- uneven shards


def uneven_offsets(parameter: Tensor) -> tuple[int, ...] | None:
    """Where a shard begins, per dim of the global tensor, that is not cut where its placements say
    and tells it by chunk metadata, which the parameter or its local tensor brings; zeros if it is
    empty; ``None`` where the placements are right. No collective.

    Raises:
        UnsupportedParameterError: the metadata are not those of one box of the shard's shape.
    """
    if not isinstance(parameter, DTensor):
        return None
    shard = with_history(parameter)
    holders = [each for each in (parameter, shard) if chunks_of(each) is not None]
    if not holders:
        return None
    chunks = chunks_of(holders[0]) or []
    if [tuple(chunk.sizes) for chunk in chunks] != [tuple(shard.shape)] * bool(shard.numel()):
        raise UnsupportedParameterError(
            f"a parameter of shape {tuple(parameter.shape)} with a shard of {tuple(shard.shape)}",
            reason=f"its chunk metadata gives this rank {chunks}",
            remedy="let __create_chunk_list__ return one chunk with the shard's shape",
        )
    return tuple(chunks[0].offsets if chunks else [0] * parameter.dim())


def _check_even(parameter: Tensor, fqn: str, shape: tuple[int, ...]) -> None:
    """Refuse a shard that is cut elsewhere and does not say where."""
    if not isinstance(parameter, DTensor) or uneven_offsets(parameter) is not None:
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    expected, _ = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    if tuple(expected) != shape:
        raise UnsupportedParameterError(
            f"parameter {fqn} with shard shape {shape}",
            reason=f"its placements {parameter.placements} give this rank {tuple(expected)}",
            remedy="with Megatron-FSDP, call "
            "fsdp_offload.checkpoint.megatron_fsdp.describe(model) first",
        )


def _is_replica(parameter: DTensor) -> bool:
    """Whether another rank, which comes first, holds the same shard."""
    coordinate = parameter.device_mesh.get_coordinate() or ()
    placed = zip(coordinate, parameter.placements, strict=False)
    return any(at and placement.is_replicate() for at, placement in placed)


# --------------------------------------------------------------------------- gradients and state


def mesh_device_type(parameter: Tensor) -> str:
    """Device type that the parameter computes on (a DTensor's mesh may differ from its shard)."""
    if isinstance(parameter, DTensor):
        return parameter.device_mesh.device_type
    return parameter.device.type


def gradient_shard(parameter: Tensor, fqn: str, expected: tuple[int, ...]) -> Tensor | None:
    """This rank's piece of ``parameter.grad``: contiguous, of shape ``expected``, or ``None``.

    A gradient placed otherwise than its parameter is redistributed first, as DTensor does when
    the plain optimizer adds the two. Where ``.grad`` is absent, Megatron-FSDP's ``decoupled_grad``
    counts; it may be of fewer bits than the parameter, and is then widened.

    Raises:
        UnsupportedParameterError: the gradient is sparse, or its shape is not the shard's.
    """
    gradient = raw_gradient(parameter)
    if gradient is None:
        return None
    if gradient.layout is not torch.strided:
        raise UnsupportedParameterError(
            f"gradient of {fqn} with layout {gradient.layout}",
            reason="sparse gradients cannot be split into buckets",
            remedy="build the embedding with sparse=False",
        )
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
    shard = with_history(gradient)
    if type(shard) is not Tensor or shard.requires_grad:
        shard = local(gradient)
    if shard.shape != expected:
        raise UnsupportedParameterError(
            f"gradient shard of {fqn} with shape {tuple(shard.shape)}",
            reason=f"the parameter's shard has shape {expected}",
            remedy="let backward fill .grad, or assign a gradient with the parameter's placements",
        )
    if shard.dtype != parameter.dtype and (
        torch.promote_types(shard.dtype, parameter.dtype) == parameter.dtype
    ):
        shard = shard.to(parameter.dtype)
    return shard if shard.is_contiguous() else shard.contiguous()


def whole_gradient(parameter: Tensor) -> Tensor | None:
    """``parameter.grad``, else Megatron-FSDP's ``decoupled_grad``, placed as it is, or ``None``.

    A plain shard in a DTensor's place is wrapped like the parameter.
    """
    gradient = raw_gradient(parameter)
    if gradient is None or gradient is parameter.grad or isinstance(gradient, DTensor):
        return gradient
    return like(parameter, gradient)


def raw_gradient(parameter: Tensor) -> Tensor | None:
    """``parameter.grad``, else Megatron-FSDP's ``decoupled_grad``."""
    if parameter.grad is not None:
        return parameter.grad
    decoupled: Tensor | None = getattr(parameter, "decoupled_grad", None)
    return decoupled


def clear_decoupled_gradient(parameter: Tensor) -> None:
    """What ``zero_grad`` does for ``decoupled_grad``."""
    if getattr(parameter, "decoupled_grad", None) is not None:
        parameter.decoupled_grad = None  # type: ignore[attr-defined]


def zero_gradient(parameter: Tensor) -> Tensor:
    """What ``zero_grad(set_to_none=False)`` leaves of a gradient; waits for no update."""
    shard = with_history(parameter)
    return like(parameter, torch.zeros(shard.shape, dtype=shard.dtype, device=shard.device))


def never_has_gradient(parameter: Tensor) -> bool:
    """Whether the shard is empty here and is left without a gradient for that reason alone."""
    if not isinstance(parameter, DTensor) or parameter._local_tensor.numel():
        return False
    return uneven_offsets(parameter) is not None


def like(parameter: Tensor, shard: Tensor) -> Tensor:
    """``shard`` (local shape, any dtype and device) as a tensor placed like ``parameter``.

    No copy, no collective, no move: ``DTensor.from_local`` would move a CPU shard to the mesh's
    device, so the DTensor is built from the parameter's own spec. It tells where it begins if the
    parameter does.
    """
    if not isinstance(parameter, DTensor):
        return shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = parameter._spec
    meta = TensorMeta(parameter.shape, parameter.stride(), shard.dtype)
    made = DTensor(
        shard, DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False
    )
    if (offsets := uneven_offsets(parameter)) is not None:
        writes = not _is_replica(parameter)
        attach_chunk(made, shard, parameter.shape, offsets, writes=writes)
    return made


# --------------------------------------------------------------------------- checkpoints


def chunk_list(tensor: Tensor) -> list[ChunkStorageMetadata]:
    """What DCP says this rank holds of ``tensor``."""
    from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

    return _create_chunk_list(tensor)


def chunk(tensor: Tensor, index: MetadataIndex) -> Tensor:
    """The local data of ``tensor`` that DCP calls ``index``: shares its memory."""
    from torch.distributed.checkpoint.utils import find_tensor_shard

    return local(find_tensor_shard(tensor, index))


def is_first(parameter: Tensor) -> bool:
    """Whether no rank of its mesh comes before this one; a plain tensor has no mesh."""
    if not isinstance(parameter, DTensor):
        return True
    return not any(parameter.device_mesh.get_coordinate() or (1,))


def same_placement(parameter: Tensor, value: Tensor) -> bool:
    """Whether ``value`` is cut over ranks as ``parameter`` is (a plain local tensor counts).

    Of uneven ones the offsets are compared; a value that does not tell them (state that the plain
    optimizer made) is taken for one of this rank.
    """
    if not isinstance(parameter, DTensor) or not isinstance(value, DTensor):
        return True
    if (
        value.shape != parameter.shape
        or value.placements != parameter.placements
        or value.device_mesh.size() != parameter.device_mesh.size()
    ):
        return False
    told = uneven_offsets(value)
    return told is None or told == uneven_offsets(parameter)


def named_parameters(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """As ``model.named_parameters()``, sharded ones also while FSDP2 has them gathered."""
    sharded = gathered_parameters([model])
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield name, sharded.get(parameter, parameter)


def parameter_names(models: Sequence[nn.Module]) -> dict[Tensor, str]:
    """FQN of every parameter of ``models``, tied ones once, in order of registration."""
    names: dict[Tensor, str] = {}
    for index, model in enumerate(models):
        prefix = f"{index}." if len(models) > 1 else ""
        for name, parameter in named_parameters(model):
            names.setdefault(parameter, prefix + name)
    return names


def saved_names(models: Sequence[nn.Module]) -> dict[Tensor, list[str]]:
    """FQNs of every parameter and buffer as state dicts spell them; tied ones have several.

    Unlike :func:`parameter_names`, without what wrappers (``torch.compile``, activation
    checkpointing, DDP) put between the names of modules.
    """
    from torch.distributed.checkpoint.state_dict import _get_fqns

    names: dict[Tensor, list[str]] = {}
    for model in models:
        named = named_parameters(model, remove_duplicate=False)
        for name, tensor in (*named, *model.named_buffers(remove_duplicate=False)):
            known = names.setdefault(tensor, [])
            known += [fqn for fqn in _get_fqns(model, name) if fqn not in known]
    return names


def with_history(tensor: Tensor) -> Tensor:
    """:func:`local` without its costs, to look at the shard's memory alone."""
    return ungated(tensor._local_tensor) if isinstance(tensor, DTensor) else tensor


def memory_of(parameter: Tensor, storage: torch.UntypedStorage | None = None) -> tuple[int, int]:
    """Which memory the shard is a view of: the storage's identity, and the offset in it.

    ``storage``: the shard's, if it is at hand.

    It stays the same while the storage is away and when it comes back elsewhere, as long as
    a tensor holds it. (0, 0) for an empty shard, (-1, 0) for one that lives in host memory.
    """
    shard = with_history(parameter)
    if keeper_of(shard) is not None:
        return -1, 0
    if not shard.numel():
        return 0, 0
    storage = shard.untyped_storage() if storage is None else storage
    return identity(storage), int(shard.storage_offset())


def plain_tensors(tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The plain tensors that a tensor, a DTensor or a subclass is made of, with a name each.

    What is made of none, or of memory that is not strided, has no parts.
    """
    if type(tensor) is Tensor and tensor.layout is torch.strided:  # nearly always
        return [("", tensor)]
    if isinstance(tensor, DTensor):
        return plain_tensors(local(tensor))
    if (known := record_of(tensor)) is not None:
        return [] if known.real is None else [("", known.real)]
    if _is_plain(tensor):
        return [("", tensor.detach())] if tensor.layout is torch.strided else []
    if not hasattr(tensor, "__tensor_flatten__"):
        return []
    names, _ = tensor.__tensor_flatten__()
    return [
        (f".{name}{below}", part)
        for name in names
        for below, part in plain_tensors(getattr(tensor, name))
    ]


def rebuilt(tensor: Tensor, replace: Callable[[Tensor], Tensor]) -> Tensor:
    """``tensor`` with each of its :func:`plain_tensors` replaced by one of the same shape."""
    if isinstance(tensor, DTensor):
        return like(tensor, rebuilt(local(tensor), replace))
    if _is_plain(tensor):
        return replace(tensor.detach()) if tensor.layout is torch.strided else tensor
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor
    names, context = tensor.__tensor_flatten__()
    parts = {name: rebuilt(getattr(tensor, name), replace) for name in names}
    make: Any = type(tensor)
    return make.__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())  # type: ignore[no-any-return]
