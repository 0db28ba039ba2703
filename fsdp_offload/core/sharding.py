"""``shard``: apply FSDP2 to the repeated blocks of a model and to its root, even in one process."""

from __future__ import annotations

import atexit
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from . import dtensor
from .arguments import listed
from .devices import default_device
from .errors import ConfigError, UnsupportedParameterError

M = TypeVar("M", bound=nn.Module)


def shard(
    model: M,
    blocks: Iterable[nn.Module] | type[nn.Module] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> M:
    """Apply torch's ``fully_shard`` to each repeated block of ``model``, then to ``model``.

    ``python train.py`` on one GPU then trains as an FSDP2 job does: updates run beside the forward.
    Build the optimizer afterwards. All ranks pass the same weights, and FSDP2 moves them to the
    current accelerator. ``model.load_state_dict`` takes state dicts of the unsharded model, too.
    Without a process group, ``shard`` makes one: of all ranks if ``RANK`` is set (``torchrun``),
    else of this process.

    Args:
        model: changed in place. Modules whose trained parameters have another dtype than most, such
            as fp32 norms, are sharded on their own.
        blocks: modules of the model, or their class. None: the children of each ``ModuleList`` and
            ``Sequential`` whose children have one class; of nested lists the outermost. Blocks that
            share parameters with other modules stay with the root.
        mesh: as for ``fully_shard``; None: all ranks.
        options: other keywords of ``fully_shard``, such as ``mp_policy``, for each call.

    Raises:
        ConfigError: ``model`` is sharded already, or does not contain ``blocks``.
        UnsupportedParameterError: FSDP2 cannot gather a parameter.
    """
    _check(model)
    groups = _groups(model, {model, *_checked(model, blocks), *_of_other_dtype(model)})
    for held in groups.values():
        dtypes = {each.dtype: name for each, name in held.items() if each.requires_grad}
        if len(dtypes) > 1:
            raise UnsupportedParameterError(
                ", ".join(f"{name} of {dtype}" for dtype, name in dtypes.items()),
                reason="FSDP2 reduces their gradients together, in one dtype",
                remedy="give the model one dtype, model.to(torch.bfloat16), or freeze one of them",
            )
    mesh = mesh or _mesh_of_all_ranks()
    for module in reversed([*model.modules()]):  # inner ones first
        if module in groups or module is model:
            fully_shard(module, mesh=mesh, **options)
    model.register_load_state_dict_pre_hook(_cut_whole_tensors)  # type: ignore[no-untyped-call]
    return model


def _cut_whole_tensors(
    model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object
) -> None:
    """Let ``load_state_dict`` take an unsharded model's tensors: each rank loads its shards."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        whole = state_dict.get(prefix + name)
        if whole is None or isinstance(whole, DTensor) or whole.shape != parameter.shape:
            continue  # nothing to cut; torch reports what does not fit
        if isinstance(parameter, DTensor):
            state_dict[prefix + name] = dtensor.like(parameter, shard_of(parameter, whole))


def shard_of(parameter: DTensor, whole: Tensor) -> Tensor:
    """Return the view of ``whole`` (global shape) that this rank's shard of ``parameter`` holds."""
    (chunk,) = dtensor.chunk_list(parameter)
    ends = map(sum, zip(chunk.offsets, chunk.sizes, strict=True))
    return whole[tuple(map(slice, chunk.offsets, ends))]


def _check(model: nn.Module) -> None:
    for name, module in listed([model])[0].named_modules():
        if isinstance(module, FSDPModule | DistributedDataParallel):
            raise ConfigError(
                f"{name or 'model'} of type {type(module).__name__}",
                reason="it is sharded or replicated already",
                remedy="pass the unsharded model; an FSDP2 model needs no shard()",
            )
    for name, parameter in model.named_parameters():
        kind, index = type(parameter), parameter.device.index
        is_special = kind is not nn.Parameter and issubclass(kind, nn.Parameter)
        is_far = index is not None and index != torch.accelerator.current_device_index()
        if is_special or is_far or not parameter.dim() or not parameter.is_contiguous():
            what = f"type {kind.__name__}" if is_special or parameter.dim() else "shape ()"
            raise UnsupportedParameterError(
                f"{name} of {what} on {parameter.device}",
                reason="FSDP2 shards dimension 0 of plain contiguous tensors on the current device",
                remedy="initialise, dequantise or reshape it, or move it to the current device",
            )


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    children = [*module.children()]
    is_list = isinstance(module, nn.ModuleList | nn.Sequential) and len(children) > 1
    if is_list and len({*map(type, children)}) == 1 and all(map(_has_forward, children)):
        yield from (child for child in children if [*child.parameters()])
    else:
        for child in children:
            yield from _repeated(child)


def _checked(model: nn.Module, blocks: Any) -> list[nn.Module]:
    inside = [*model.modules()]
    if isinstance(blocks, type):
        blocks = [module for module in inside if isinstance(module, blocks)] or [blocks]
    found = [*(_repeated(model) if blocks is None else blocks)]
    if not {*inside}.issuperset(found) or not all(map(_has_forward, [model, *found])):
        raise ConfigError(
            f"a {type(model).__name__} with blocks={blocks}",
            reason="blocks must be modules of the model, and FSDP2 needs modules with a forward",
            remedy="pass the whole model, and a class or modules of it, such as "
            "blocks=model.layers",
        )
    return found


def _has_forward(module: nn.Module) -> bool:
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _of_other_dtype(model: nn.Module) -> set[nn.Module]:
    """Find modules to shard on their own, because FSDP2 reduces one dtype at a time."""
    sizes = Counter[torch.dtype]()
    for each in model.parameters():
        sizes[each.dtype] += each.numel() * each.requires_grad
    others = {dtype for dtype, _ in sizes.most_common()[1:]}  # all but that of most elements
    return {
        module
        for module in filter(_has_forward, model.modules())
        if any(p.requires_grad and p.dtype in others for p in module.parameters(recurse=False))
    }


def _groups(model: nn.Module, units: set[nn.Module]) -> dict[nn.Module, dict[nn.Parameter, str]]:
    """Assign parameters to FSDP2 modules. Modules that share one leave theirs to the root, because
    FSDP2 would make several of it."""
    groups: dict[nn.Module, dict[nn.Parameter, str]] = defaultdict(dict)
    unit_of: dict[str, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        unit = module if module in units else unit_of[path.rpartition(".")[0]]
        unit_of[path] = unit
        for name, parameter in module.named_parameters(path, recurse=False):
            groups[unit][parameter] = name
    counts = Counter(parameter for held in groups.values() for parameter in held)
    tied = {unit for unit, held in groups.items() if any(counts[each] > 1 for each in held)}
    # Parameters of a unit that goes move into the next outer one, which may be tied then.
    return _groups(model, units - tied | {model}) if tied - {model} else groups


def _mesh_of_all_ranks() -> DeviceMesh:
    device = default_device()
    if "LOCAL_RANK" not in os.environ:
        torch.empty(0, device=device)  # DeviceMesh sets a device if none is in use
    if not dist.is_initialized() and "RANK" in os.environ:
        dist.init_process_group()
    elif not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(store=store, rank=0, world_size=1)
        # NCCL warns if a process exits with a group.
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    return init_device_mesh(device.type, (dist.get_world_size(),))
