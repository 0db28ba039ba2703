"""Whole optimizer states in one process: gathered to rank 0, and distributed from it.

torch's ``full_state_dict`` options do the same for state that is in one memory and of dtypes that
collectives know. These functions take state in two memories and int16 remainders, one tensor at a
time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.tensor import DTensor

from .. import shards
from ..errors import OffloadError, StateDictError
from ..optimizer import HybridDeviceOptimizer
from .conversion import Conversion
from .naming import Places, option_keys
from .packer import (
    STATE,
    Models,
    models_of,
    names_of,
    pack_optimizer_state,
    unpack_optimizer_state,
)
from .targets import Targets, packed_options, state_targets
from .team import Team

_PLACES = Places(None, "")


def gather_optimizer_state(model: Models, optimizer: HybridDeviceOptimizer) -> dict[str, Any]:
    """The packed state with whole tensors on the CPU: on rank 0; elsewhere empty. Collective.

    Gathers one tensor at a time over the parameter's own mesh, so that a rank never holds more
    than its state and one whole tensor on the device.

    Raises:
        ConfigError, StateDictError, LaneError: as of :func:`pack_optimizer_state`, on all ranks.
    """
    team = Team.of_world()

    def prepare() -> tuple[dict[str, Any], int]:
        packed = pack_optimizer_state(model, optimizer)
        for key, value in packed.items():
            if isinstance(value, DTensor) and shards.is_ragged(value):
                raise StateDictError(
                    f"{key}", reason="its shards are cut freely", remedy="use save() and load()"
                )
        return packed, _digest(packed)

    packed, digests = team.share(prepare)
    _check_same(digests)
    whole: dict[str, Any] = {}
    with torch.no_grad():
        for key, value in packed.items():
            found = shards.gather(value) if isinstance(value, DTensor) else value
            if team.is_lead:
                whole[key] = found.detach().cpu().clone() if isinstance(found, Tensor) else found
    return whole


def distribute_optimizer_state(
    model: Models, optimizer: HybridDeviceOptimizer, whole: Mapping[str, Any]
) -> None:
    """Load what :func:`gather_optimizer_state` returned; only rank 0 needs it. Collective.

    Also takes what torch's ``get_optimizer_state_dict(full_state_dict=True)`` returned, flattened
    or not, of this class or of a plain optimizer. Load the weights first.

    Raises:
        ConfigError: a parameter is not in ``model``.
        StateDictError: keys or shapes do not fit; nothing was written. On all ranks.
    """
    team = Team.of_world()

    def name() -> list[list[str]]:
        optimizer.check_usable(failed_ok=True)
        names = names_of(models_of(model), optimizer)
        return [[names[p] for p in group["params"]] for group in optimizer.param_groups]

    groups = team.together(name)
    content = team.lead(lambda: _describe(_flat(whole), [g[0] for g in groups if g]))

    def prepare() -> tuple[Targets, int]:
        names = names_of(models_of(model), optimizer)
        found = state_targets(optimizer, names, Metadata(content[0]), _PLACES)
        found.packed.update(packed_options(optimizer, groups, content[1], _PLACES))
        return found, _digest([*found.direct, *found.conversions])

    targets, digests = team.share(prepare)
    _check_same(digests)
    flat = _flat(whole) if team.is_lead else {}
    with optimizer._replacing_all("distribute_optimizer_state()", keep=OffloadError):
        for wanted in (targets.direct, targets.conversions):
            for key in sorted(wanted):
                _distribute(key, wanted, content, flat.get(key), optimizer)
    targets.packed.update({key: targets.direct[key] for key in targets.values})
    with optimizer._failing("distribute_optimizer_state()", keep=OffloadError):
        team.together(lambda: unpack_optimizer_state(model, optimizer, targets.packed))


def _digest(keys: Iterable[str]) -> int:
    return zlib.crc32("\n".join(sorted(keys)).encode())


def _check_same(digests: Sequence[int]) -> None:
    """Refuse ranks with different parameters, whose collectives would not match.

    Raises:
        StateDictError: on all ranks.
    """
    if len(set(digests)) > 1:
        raise StateDictError(
            "optimizer states with different keys on different ranks",
            reason="rank 0 cannot hold all of them, as in a pipeline of stages",
            remedy="use checkpoint.save() and checkpoint.load()",
        )


def _flat(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Torch's nested form as the flat one."""
    if not isinstance(whole.get("state"), Mapping):
        return dict(whole)
    flat = {
        f"{STATE}{fqn}.{name}": value
        for fqn, values in whole["state"].items()
        for name, value in values.items()
    }
    return {**flat, "param_groups": whole["param_groups"]}


def _describe(
    flat: Mapping[str, Any], fqns: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What all ranks need to know: state entries as DCP describes them, and options."""
    entries: dict[str, Any] = {}
    options = {key: flat[key] for key in option_keys(flat, _PLACES, fqns)}
    for key, value in flat.items():
        if isinstance(value, DTensor):
            raise StateDictError(
                f"{key} is a DTensor",
                reason="whole tensors are expected",
                remedy="pass a full state dict, or load a sharded one with load()",
            )
        if isinstance(value, Tensor) and key.startswith(STATE):
            chunk = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.shape)
            properties = TensorProperties(dtype=value.dtype)
            entries[key] = TensorStorageMetadata(properties, value.shape, [chunk])
        elif key not in options and key.startswith(STATE):
            entries[key] = BytesStorageMetadata()
            options[key] = value
    return entries, options


def _distribute(
    key: str,
    wanted: dict[str, Any],
    content: tuple[dict[str, Any], dict[str, Any]],
    value: Any,
    optimizer: HybridDeviceOptimizer,
) -> None:
    """Send one entry to all ranks, each of which keeps its part."""
    entries, values = content
    entry = entries[key]
    if not isinstance(entry, TensorStorageMetadata):
        wanted[key] = values[key]
        return
    whole = _broadcast(value, entry, optimizer)
    target = wanted[key]
    for chunk in _chunks(target):
        region = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        index = MetadataIndex(key, chunk.offsets)
        if isinstance(target, Conversion):
            target.apply(_read_item(index, chunk), whole[region].cpu().contiguous())
        else:
            shards.chunk(target, index).copy_(whole[region])


def _chunks(target: Any) -> list[ChunkStorageMetadata]:
    if isinstance(target, Conversion):
        return target.__create_chunk_list__()
    return shards.chunk_list(target)


def _read_item(index: MetadataIndex, chunk: ChunkStorageMetadata) -> ReadItem:
    start = torch.Size([0] * len(chunk.sizes))
    return ReadItem(LoadItemType.TENSOR, index, start, index, chunk.offsets, chunk.sizes)


def _broadcast(
    value: Tensor | None, entry: TensorStorageMetadata, optimizer: HybridDeviceOptimizer
) -> Tensor:
    """Rank 0's tensor on all ranks; as bytes, because collectives do not know every dtype."""
    if not (dist.is_available() and dist.is_initialized()):
        assert value is not None  # this process is the lead
        return value
    device = optimizer.device if dist.get_backend() == "nccl" else torch.device("cpu")
    if value is None:
        value = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
    value = value.detach().to(device).contiguous()
    dist.broadcast(value.reshape(-1).view(torch.uint8), src=0)
    return value
