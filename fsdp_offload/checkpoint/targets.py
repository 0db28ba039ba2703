"""Where optimizer state is read to: the live state, by the keys of the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from .. import shards
from ..errors import StateDictError
from ..optimizer import HybridDeviceOptimizer
from ..pipeline import state as state_io
from ..pipeline.records import Record
from .conversion import Conversion
from .naming import Places, options_by_fqn
from .packer import GROUPS, REMAINDER, STATE, WHOLE, parameters_of

_log = logging.getLogger("fsdp_offload")


@dataclass
class Targets:
    """What is to be read.

    Args:
        direct: tensors (or ``None`` for other values) by the checkpoint's key.
        conversions: masters in another form, read when the weights are there.
        values: packed key of everything that the optimizer takes over, with the checkpoint's.
        packed: what it takes over of live state that is not read under its own key.
    """

    direct: dict[str, Any] = field(default_factory=dict)
    conversions: dict[str, Any] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    packed: dict[str, Any] = field(default_factory=dict)

    def add(self, other: Targets) -> None:
        """Take over all of ``other`` but ``packed``."""
        self.direct.update(other.direct)
        self.conversions.update(other.conversions)
        self.values.update(other.values)


def plain_targets(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    metadata: Metadata,
    places: Places,
) -> Targets:
    """For an optimizer of another package: live state is read in place, other state is made.

    Raises:
        StateDictError: entries have other shapes.
    """
    targets = Targets()
    saved = _saved_names(metadata, places)
    lost = [found & {WHOLE, REMAINDER} for found in saved.values()]
    if count := sum(map(bool, lost)):
        _log.warning(
            "the checkpoint has fp32 masters of %d parameters (%s): %s ignores them and goes on "
            "from the weights",
            count, ", ".join(sorted(set().union(*lost))), type(optimizer).__name__,
        )  # fmt: skip
    for parameter, _ in parameters_of(optimizer):
        fqn, live = names[parameter], optimizer.state.get(parameter, {})
        device = shards.local(parameter).device
        _add_native(targets, parameter, fqn, saved.get(fqn, set()), metadata, places, device, live)
    return targets


def state_targets(
    optimizer: HybridDeviceOptimizer,
    names: Mapping[Tensor, str],
    metadata: Metadata,
    places: Places,
) -> Targets:
    """For the offloaded state, which is read in place, and what stayed native.

    Raises:
        StateDictError: entries are missing, or have other shapes.
    """
    targets = Targets()
    saved = _saved_names(metadata, places)
    for record in optimizer.records:
        fqn = names[record.parameter]
        _add_record(targets, record, fqn, saved.get(fqn, set()), metadata, places)
    recorded = {record.parameter for record in optimizer.records}
    for parameter, _ in parameters_of(optimizer):
        if parameter not in recorded:
            fqn = names[parameter]
            device = optimizer.device
            _add_native(targets, parameter, fqn, saved.get(fqn, set()), metadata, places, device)
    return targets


def _saved_names(metadata: Metadata, places: Places) -> dict[str, set[str]]:
    """Which entries a checkpoint has, by FQN."""
    saved: dict[str, set[str]] = {}
    start = f"{places.base}{STATE}{places.inner}"
    for key in metadata.state_dict_metadata:
        if key.startswith(start):
            fqn, _, name = key.removeprefix(start).rpartition(".")
            saved.setdefault(fqn, set()).add(name)
    return saved


def _add_record(
    targets: Targets,
    record: Record,
    fqn: str,
    saved: set[str],
    metadata: Metadata,
    places: Places,
) -> None:
    if not saved:
        return  # the parameter never had a gradient: its state is reset
    live = state_io.expose(record)
    state_io.show(record, live)
    stored = metadata.state_dict_metadata
    state_io.check_names(record, saved)
    if REMAINDER in saved:
        source = places.state(fqn) + REMAINDER
        check_shape(source, stored[source], record.parameter)
        if isinstance(entry := stored[source], TensorStorageMetadata):
            state_io.check_remainder(source, entry.properties.dtype)
    for kind in state_io.kinds_in(record, saved):
        source = places.state(fqn) + kind.name
        _add(targets, f"{STATE}{fqn}.{kind.name}", source, live[kind.name], stored[source])
    form = record.form.value
    if record.emits_master and form in saved:
        source = places.state(fqn) + form
        _add(targets, f"{STATE}{fqn}.{form}", source, live[form], stored[source])
        return
    weight = shards.like(record.parameter, shards.local(record.parameter))
    kept = live[form] if record.emits_master else weight
    for name, dtype in ((WHOLE, torch.float32), (REMAINDER, torch.bfloat16)):
        source = places.state(fqn) + name
        if name in saved and _can_convert(record, dtype):
            check_shape(source, stored[source], kept)
            same = kept.dtype == dtype
            targets.conversions[source] = kept if same else Conversion(weight, kept, dtype)
            break
    else:
        source = places.weight(fqn)
        if not (record.emits_master and _is_fp32(stored.get(source))):
            return  # the master becomes the weight
        targets.conversions[source] = Conversion(weight, kept, torch.float32)
    if record.emits_master:
        targets.packed[f"{STATE}{fqn}.{form}"] = kept


def _is_fp32(stored: object) -> bool:
    """Whether a weight was saved with all that an fp32 master would say."""
    return isinstance(stored, TensorStorageMetadata) and stored.properties.dtype == torch.float32


def _can_convert(record: Record, stored: torch.dtype) -> bool:
    """Whether a master stored as ``stored`` says something of this parameter."""
    if record.emits_master:
        return record.info.dtype == torch.bfloat16 and record.compute_dtype == torch.float32
    return record.info.dtype == torch.float32 or stored != torch.bfloat16


def packed_options(
    optimizer: Optimizer,
    groups: Sequence[Sequence[str]],
    values: Mapping[str, Any],
    places: Places,
) -> dict[str, Any]:
    """Options of a checkpoint by packed key: of a group, those of its first parameter.

    Args:
        optimizer: that is to take them over.
        groups: FQNs of its groups.
        values: those of ``naming.option_keys``.
        places: of the checkpoint.

    Raises:
        StateDictError: they need other state than is reserved.
    """
    found = options_by_fqn(values, places)
    options = [found.get(fqns[0], {}) if fqns else {} for fqns in groups]
    if isinstance(optimizer, HybridDeviceOptimizer):
        optimizer.check_options(options)
    return {
        f"{GROUPS}{fqn}.{option}": value
        for fqns, values in zip(groups, options, strict=True)
        for fqn in fqns
        for option, value in values.items()
    }


def _add_native(
    targets: Targets,
    parameter: Tensor,
    fqn: str,
    saved: set[str],
    metadata: Metadata,
    places: Places,
    device: torch.device,
    live: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """State that the class makes at its first step: ``live``, or room for what was saved."""
    for name in sorted(saved - {WHOLE, REMAINDER}):
        source = places.state(fqn) + name
        entry = metadata.state_dict_metadata[source]
        value: Any = live.get(name)
        if isinstance(entry, TensorStorageMetadata) and not isinstance(value, Tensor):
            dtype = entry.properties.dtype
            if entry.size == parameter.shape and name != "step":
                value = shards.like(
                    parameter,
                    torch.zeros_like(shards.local(parameter), dtype=dtype, device=device),
                )
            else:
                value = torch.zeros(entry.size, dtype=dtype)
        _add(targets, f"{STATE}{fqn}.{name}", source, value, entry)


def _add(targets: Targets, key: str, source: str, value: Any, stored: Any) -> None:
    check_shape(source, stored, value)
    targets.direct[source] = value if isinstance(stored, TensorStorageMetadata) else None
    targets.values[key] = source


def check_shape(key: str, stored: Any, value: Any) -> None:
    """Refuse a tensor of another shape.

    Raises:
        StateDictError: the shapes differ, or only one of the two is a tensor.
    """
    if not isinstance(stored, TensorStorageMetadata):
        if isinstance(value, Tensor) and value.dim() > 0:
            raise StateDictError(
                f"{key}", reason="it is no tensor in the checkpoint", remedy="build what was saved"
            )
        return
    expected = tuple(value.size()) if hasattr(value, "size") else ()
    if expected != tuple(stored.size):
        raise StateDictError(
            f"{key} of shape {tuple(stored.size)}",
            reason=f"here it has shape {expected}",
            remedy="build the model and the optimizer that were saved",
        )
