"""The only file that touches private API of DTensor.

Four tensors stand for one parameter, and the rest of the package speaks only of the second:

* the *parameter* in ``param_groups``: an ``nn.Parameter``, for FSDP2 a DTensor of global shape;
* its *shard*: the local piece on this rank, ``DTensor._local_tensor`` (or the tensor itself).
  FSDP2's all-gather reads the same memory, so updates are written in place and the shard is
  never replaced;
* the *gradient shard*: the same for ``parameter.grad``;
* state tensors shaped like the shard, which callers see as DTensors with the parameter's mesh and
  placements (:func:`like`).

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
    """Metadata of one parameter for plans and layouts."""

    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_plain: bool  # the shard is an ordinary dense tensor, not a subclass such as float8

    @property
    def local_numel(self) -> int:
        """Elements of this rank's shard."""
        return math.prod(self.local_shape)


def local(tensor: Tensor) -> Tensor:
    """Return the shard of ``tensor``, which shares its memory and has no autograd history.

    Updates may still write to it: see [Note: gated shards]. For a weight in host memory, returns
    the host memory, unless the caller holds a view of its copy.
    """
    shard = with_history(tensor)
    if (keeper := keeper_of(shard)) is not None:
        return keeper.local()
    # AsyncCollectiveTensor: the collective is still running.
    if type(shard) is not Tensor and hasattr(shard, "wait"):
        shard = shard.wait()
    return shard.detach()


Gated = list[tuple[DTensor, GatedShard | None]]
"""Parameters, with the stand-ins for their shards once a gate has been closed."""


def gate(parameters: Iterable[Tensor], known: Gated) -> None:
    """Replace the parameters of ``known``, and keep the stand-ins for their shards."""
    made = {id(parameter): gated for parameter, gated in known}
    known[:] = [(p, made.get(id(p))) for p in parameters if isinstance(p, DTensor)]


def close_gate(parameters: Gated, wait: Callable[[], None]) -> None:
    """Make user code call ``wait`` before each use of a shard, until :func:`open_gate`."""
    for index, (parameter, gated) in enumerate(parameters):
        shard = parameter._local_tensor  # if it is the same, so is its stand-in
        if gated is None or shard is not ungated(gated):
            if type(shard) is not Tensor:  # already closed, or updated by its class in step()
                continue
            gated = GatedShard(shard, wait)
            parameters[index] = parameter, gated
        parameter._local_tensor = gated


def open_gate(parameters: Gated) -> None:
    """Put the shards back into their parameters."""
    for parameter, gated in parameters:
        if gated is not None and parameter._local_tensor is gated:
            parameter._local_tensor = ungated(gated)


def put(parameter: Tensor | None, shard: Tensor) -> None:
    """Set the shard of a parameter or gradient, or its stand-in."""
    assert isinstance(parameter, DTensor)
    parameter._local_tensor = shard


def record(gradient: Tensor) -> Record | None:
    """Return the record of a gradient in host memory."""
    return record_of(with_history(gradient))


class GatedGradients:
    """Gates ``.grad`` of DTensors while updates read it."""

    def __init__(self) -> None:
        self._made: list[GatedShard | None] = []
        self._closed: list[tuple[DTensor, GatedShard]] = []

    def close(self, parameters: Sequence[Tensor], wait: Callable[[], None]) -> None:
        """Make user code call ``wait`` before each use of a gradient, until :meth:`open`."""
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
        """Put the gradients back, also those that no parameter holds any more."""
        for gradient, gated in self._closed:
            if gradient._local_tensor is gated:
                gradient._local_tensor = ungated(gated)
            gated.release()
        self._closed.clear()


def _is_plain(shard: Tensor) -> bool:
    return type(shard) in (Tensor, nn.Parameter)


def shard_info(parameter: Tensor, fqn: str) -> ShardInfo:
    """Read and check the metadata of ``parameter``.

    Raises:
        UnsupportedParameterError: the shard is not contiguous, sparse, or a Partial DTensor.
    """
    shard = with_history(parameter)
    # Shape and strides of a weight in host memory are known; a read would wait for updates.
    plain = keeper_of(shard) is not None or _is_plain(shard := local(parameter))
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
    """Return the row-major index of the shard's first element in the global tensor.

    0 for an empty shard. No collective.
    """
    if not isinstance(parameter, DTensor):
        return 0
    shape = with_history(parameter).shape  # no values: updates ask while weights are in host memory
    chunks = chunk_list(like(parameter, torch.empty(shape, device="meta")))  # covers uneven shards
    if not chunks:
        return 0
    index = 0
    for size, offset in zip(parameter.shape, chunks[0].offsets, strict=True):
        index = index * size + offset
    return index


# --------------------------------------------------------------------------- uneven shards


def uneven_offsets(parameter: Tensor) -> tuple[int, ...] | None:
    """Return where an uneven shard begins, per dim of the global tensor, from the chunk metadata of
    the parameter or its local tensor; zeros if it is empty, ``None`` if it is cut as its placements
    say. No collective.

    Raises:
        UnsupportedParameterError: the metadata do not describe one box of the shard's shape.
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
    coordinate = parameter.device_mesh.get_coordinate() or ()
    placed = zip(coordinate, parameter.placements, strict=False)
    return any(at and placement.is_replicate() for at, placement in placed)


# --------------------------------------------------------------------------- gradients and state


def mesh_device_type(parameter: Tensor) -> str:
    """Return the device type that the parameter computes on; a DTensor's mesh may differ from its
    shard."""
    if isinstance(parameter, DTensor):
        return parameter.device_mesh.device_type
    return parameter.device.type


def gradient_shard(parameter: Tensor, fqn: str, expected: tuple[int, ...]) -> Tensor | None:
    """Return this rank's shard of ``parameter.grad``, contiguous, of shape ``expected``, or
    ``None``.

    Redistributes a gradient whose placements differ from its parameter's, as DTensor does when the
    plain optimizer adds the two. Without ``.grad``, takes Megatron-FSDP's ``decoupled_grad``, and
    widens it if it has fewer bits than the parameter.

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
    """Return ``parameter.grad``, else Megatron-FSDP's ``decoupled_grad``, with its own placements.

    Wraps a plain shard like the parameter.
    """
    gradient = raw_gradient(parameter)
    if gradient is None or gradient is parameter.grad or isinstance(gradient, DTensor):
        return gradient
    return like(parameter, gradient)


def raw_gradient(parameter: Tensor) -> Tensor | None:
    if parameter.grad is not None:
        return parameter.grad
    decoupled: Tensor | None = getattr(parameter, "decoupled_grad", None)
    return decoupled


def clear_decoupled_gradient(parameter: Tensor) -> None:
    """Clear ``decoupled_grad``, as ``zero_grad`` clears ``.grad``."""
    if getattr(parameter, "decoupled_grad", None) is not None:
        parameter.decoupled_grad = None  # type: ignore[attr-defined]


def zero_gradient(parameter: Tensor) -> Tensor:
    """Build the zero gradient of ``zero_grad(set_to_none=False)``; waits for no update."""
    shard = with_history(parameter)
    return like(parameter, torch.zeros(shard.shape, dtype=shard.dtype, device=shard.device))


def never_has_gradient(parameter: Tensor) -> bool:
    """Whether the shard is empty on this rank, and therefore never gets a gradient."""
    if not isinstance(parameter, DTensor) or parameter._local_tensor.numel():
        return False
    return uneven_offsets(parameter) is not None


def like(parameter: Tensor, shard: Tensor) -> Tensor:
    """Wrap ``shard`` (local shape, any dtype and device) as a tensor placed like ``parameter``.

    No copy, no collective, no move: ``DTensor.from_local`` would move a CPU shard to the mesh's
    device, so this builds the DTensor from the parameter's spec. It carries chunk metadata if the
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
    """Ask DCP for this rank's chunks of ``tensor``."""
    from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

    return _create_chunk_list(tensor)


def chunk(tensor: Tensor, index: MetadataIndex) -> Tensor:
    """Return the local data of ``tensor`` at DCP's ``index``, which shares its memory."""
    from torch.distributed.checkpoint.utils import find_tensor_shard

    return local(find_tensor_shard(tensor, index))


def is_first(parameter: Tensor) -> bool:
    """Whether this rank is the first of the parameter's mesh; true for plain tensors."""
    if not isinstance(parameter, DTensor):
        return True
    return not any(parameter.device_mesh.get_coordinate() or (1,))


def same_placement(parameter: Tensor, value: Tensor) -> bool:
    """Whether ``value`` is sharded like ``parameter``; a plain local tensor counts.

    Compares the offsets of uneven shards. A value without offsets (state that the plain optimizer
    made) counts as this rank's.
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
    """As ``model.named_parameters()``, but with sharded parameters even while FSDP2 has them
    gathered."""
    sharded = gathered_parameters([model])
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield name, sharded.get(parameter, parameter)


def parameter_names(models: Sequence[nn.Module]) -> dict[Tensor, str]:
    """Map every parameter of ``models`` to its FQN, tied ones once, in order of registration."""
    names: dict[Tensor, str] = {}
    for index, model in enumerate(models):
        prefix = f"{index}." if len(models) > 1 else ""
        for name, parameter in named_parameters(model):
            names.setdefault(parameter, prefix + name)
    return names


def saved_names(models: Sequence[nn.Module]) -> dict[Tensor, list[str]]:
    """Map every parameter and buffer to its FQNs as in state dicts, without prefixes of wrappers
    (``torch.compile``, activation checkpointing, DDP); tied ones have several."""
    from torch.distributed.checkpoint.state_dict import _get_fqns

    names: dict[Tensor, list[str]] = {}
    for model in models:
        named = named_parameters(model, remove_duplicate=False)
        for name, tensor in (*named, *model.named_buffers(remove_duplicate=False)):
            known = names.setdefault(tensor, [])
            known += [fqn for fqn in _get_fqns(model, name) if fqn not in known]
    return names


def with_history(tensor: Tensor) -> Tensor:
    """As :func:`local` but cheaper, only to look at the shard's memory."""
    return ungated(tensor._local_tensor) if isinstance(tensor, DTensor) else tensor


def memory_of(parameter: Tensor, storage: torch.UntypedStorage | None = None) -> tuple[int, int]:
    """Identify the memory of the shard: the storage's identity, and the offset in it.

    ``storage``: the shard's, if the caller has it; then it is on the device or away with a phase.
    Stays the same while the storage is away and after it comes back elsewhere, as long as a tensor
    holds it. (0, 0) for an empty shard, (-1, 0) for one in host memory.
    """
    shard = with_history(parameter)
    if storage is None and keeper_of(shard) is not None:
        return -1, 0
    if not shard.numel():
        return 0, 0
    storage = shard.untyped_storage() if storage is None else storage
    return identity(storage), int(shard.storage_offset())


def plain_tensors(tensor: Tensor) -> list[tuple[str, Tensor]]:
    """List the plain tensors inside a tensor, a DTensor or a subclass, each with a name.

    Empty for a tensor without such parts, or whose memory is not strided, and for a weight that
    lives in host memory, which no offload moves.
    """
    if type(tensor) is Tensor and tensor.layout is torch.strided:  # nearly always
        return [("", tensor)]
    if isinstance(tensor, DTensor):
        return [] if keeper_of(with_history(tensor)) else plain_tensors(local(tensor))
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
    """Rebuild ``tensor`` with each of its :func:`plain_tensors` replaced by one of the same
    shape."""
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
