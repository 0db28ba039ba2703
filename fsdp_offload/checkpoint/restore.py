"""``load``: check everything that can be checked, then read in place.

[Note: order of a load]
1. The lead compares files with the manifest and chunks with tensors; the others wait.
2. Every rank finds its keys, compares names and shapes, and reads options and ``extra``. Until
   here nothing was written, and an error leaves everything as it was, on all ranks.
3. Every rank reads its tensors in place: first what is stored as it is kept, then masters that
   are kept in another form. An error or an interrupt now leaves the optimizer *failed*.
4. Module and optimizer take over what was read. A Ctrl-C now waits until they have.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim import Optimizer

from ..core.offloadable import check_loadable
from ..errors import CheckpointError, OffloadError
from ..interrupts import held_back
from ..loading import tell_loaded
from ..optimizer import HybridDeviceOptimizer
from . import naming
from .conversion import Conversion
from .folder import Manifest, absolute, check_files, given, resolve
from .packer import GROUPS, STATE, Models, models_of, names_of, unpack_optimizer_state
from .reader import CheckpointReader, check_chunks, read_metadata
from .saving import (
    EXTRA,
    Folder,
    check_count,
    decode,
    optimizer_name,
    refuse_inherited,
    weights_of,
)
from .targets import Targets, check_shape, packed_options, plain_targets, state_targets
from .team import Team


def load(
    path: Folder,
    model: Models,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    model_prefix: str | None = None,
    optimizer_prefix: str | None = None,
    threads: int | None = None,
) -> dict[str, Any]:
    """Load a checkpoint in place: any world size, mesh, lane and fraction. All ranks call it.

    Reads what :func:`save` wrote, and what ``torch.distributed.checkpoint`` wrote of plain
    optimizers (flat or nested), with the prefixes that :mod:`.naming` knows.

    Args:
        path: folder of the checkpoint.
        model: the model, or the parts of a pipeline.
        optimizer: a :class:`HybridDeviceOptimizer` or a plain optimizer; ``None``: weights only,
            after which the masters of a :class:`HybridDeviceOptimizer` of ``model`` are its new
            weights.
        strict: refuse weights that only one side has, and another class of optimizer.
        model_prefix: what stands before the FQNs of weights (``"model."``), if not to be guessed.
        optimizer_prefix: what stands before ``state.{fqn}`` (``"optim."``), likewise.
        threads: that read; ``None``: this rank's share of the cores, at most 16.

    Returns:
        The ``extra`` that was saved; empty if there was none.

    Raises:
        CheckpointError: there is no checkpoint, or it is of another model or optimizer; nothing
            was written.
        CheckpointCorruptError: a file is not as it was written. If that was found while tensors
            were read, the optimizer has failed until a load succeeds, and weights are undefined.
        StateDictError: state does not fit; nothing was written.
    """
    refuse_inherited(optimizer)
    team = Team.of_world()
    known: list[Metadata] = []  # the lead has read it

    def inspect() -> tuple[Path, Manifest | None]:
        folder = resolve(absolute(given(path)))
        manifest = check_files(folder)
        known.append(read_metadata(folder))
        check_chunks(folder, known[0])
        return folder, manifest

    folder, manifest = team.lead(inspect)

    def prepare() -> tuple[_Load, list[str]]:
        check_count("threads", threads, "for this rank's share of the cores")
        metadata = known[0] if known else read_metadata(folder)
        reader = CheckpointReader(folder, threads=threads)
        job = _Load(models_of(model), optimizer, metadata, reader)
        job.prepare(manifest, model_prefix, optimizer_prefix, strict=strict)
        return job, job.unknown

    job, unknown = team.share(prepare)
    if strict:
        _check_all_known(folder, unknown)
    with contextlib.ExitStack() as taking_over:
        if isinstance(optimizer, HybridDeviceOptimizer):
            with optimizer._replacing_all("checkpoint.load()", keep=CheckpointError):
                team.together(job.read)
                # Before the reading counts as done: from here on half of a load would be a success.
                taking_over.enter_context(held_back())
            with optimizer._failing("checkpoint.load()", keep=OffloadError):
                team.together(job.take_over)
        else:
            team.together(job.read)
            taking_over.enter_context(held_back())
            team.together(job.take_over)
    return job.extra


def _check_all_known(folder: Path, unknown: Sequence[Collection[str]]) -> None:
    """Refuse weights that no rank has; in a pipeline each rank has some of them.

    Raises:
        CheckpointError: there are any.
    """
    if nobodys := sorted(set(unknown[0]).intersection(*unknown[1:])):
        raise CheckpointError(
            f"weights of {folder}",
            reason=f"unknown to this model: {_some(nobodys)}",
            remedy="build the model that was saved, or pass strict=False",
        )


@dataclass
class _Load:
    """One load, on one rank."""

    models: tuple[nn.Module, ...]
    optimizer: Optimizer | None
    metadata: Metadata
    reader: CheckpointReader
    extra: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)  # by FQN
    targets: Targets = field(default_factory=Targets)  # of weights and state, by key
    packed: dict[str, Any] | None = None  # what the optimizer takes over, by packed key
    unknown: list[str] = field(default_factory=list)  # keys of weights that this rank lacks

    def prepare(
        self,
        manifest: Manifest | None,
        model_prefix: str | None,
        optimizer_prefix: str | None,
        *,
        strict: bool,
    ) -> None:
        """Find keys, compare them, and read what is not kept in place."""
        check_loadable("checkpoint.load()", self.models, self.optimizer)
        stored = self.metadata.state_dict_metadata
        self.weights = weights_of(self.models)
        if isinstance(self.optimizer, HybridDeviceOptimizer):
            self.optimizer.check_usable(failed_ok=True)
            self.optimizer.check_loadable("checkpoint.load()")
        places = self._places(manifest, model_prefix, optimizer_prefix)
        self._prepare_weights(places, strict=strict)
        if self.optimizer is not None:
            self._prepare_state(self.optimizer, manifest, places, strict=strict)
        if isinstance(stored.get(EXTRA), BytesStorageMetadata):
            data = self._read_values([EXTRA])[EXTRA]
            if isinstance(data, bytes):  # of another program, it is none of ours
                self.extra = decode(io.BytesIO(data))

    def _places(
        self, manifest: Manifest | None, model_prefix: str | None, optimizer_prefix: str | None
    ) -> naming.Places:
        keys = self.metadata.state_dict_metadata
        if manifest is not None and model_prefix is None and optimizer_prefix is None:
            return replace(naming.OWN, base=naming.OWN.base if manifest.optimizer else None)
        names = set(naming.STATE_NAMES)
        if isinstance(self.optimizer, HybridDeviceOptimizer):
            names |= {k.name for r in self.optimizer.records for k in r.schema.kinds}
        return naming.find_places(
            keys,
            self.weights,
            names,
            model_prefix=model_prefix,
            optimizer_prefix=optimizer_prefix,
        )

    def _prepare_weights(self, places: naming.Places, *, strict: bool) -> None:
        stored = self.metadata.state_dict_metadata
        if places.model is None:
            raise CheckpointError(
                f"{self.reader.path}",
                reason="no key of it ends with the name of a weight of this model",
                remedy="build the model that was saved, or give model_prefix=",
            )
        missing = sorted(f for f in self.weights if places.weight(f) not in stored)
        if missing and (strict or len(missing) == len(self.weights)):
            raise CheckpointError(
                f"weights of {self.reader.path}",
                reason=f"missing there: {_some(missing)}",
                remedy="build the model that was saved, or pass strict=False",
            )
        known = {places.weight(fqn) for fqn in self.weights}
        other = (f"{places.base}{STATE}", f"{places.base}{GROUPS}") if places.base else ()
        self.unknown = sorted(
            key for key in stored
            if key not in known and places.model and key.startswith(places.model)
            and not key.startswith(other)
        )  # fmt: skip
        values = [
            key for key, entry in stored.items()
            if key in known and isinstance(entry, BytesStorageMetadata)
        ]  # fmt: skip
        read = self._read_values(values)
        for fqn, value in self.weights.items():
            key = places.weight(fqn)
            if key in read:  # what get_extra_state() gave
                self.weights[fqn] = read[key]
            elif key in stored:
                check_shape(key, stored[key], value)
                self.targets.direct[key] = value

    def _prepare_state(
        self,
        optimizer: Optimizer,
        manifest: Manifest | None,
        places: naming.Places,
        *,
        strict: bool,
    ) -> None:
        if places.base is None:
            raise CheckpointError(
                f"{self.reader.path}",
                reason="it has no optimizer state for the parameters of this model",
                remedy="pass optimizer=None to load weights alone, or give optimizer_prefix=",
            )
        if strict and manifest is not None and manifest.optimizer != optimizer_name(optimizer):
            raise CheckpointError(
                f"{self.reader.path} of {manifest.optimizer or 'no optimizer'}",
                reason=f"this optimizer is {optimizer_name(optimizer)}",
                remedy="build the optimizer that was saved, or pass strict=False",
            )
        names = names_of(self.models, optimizer)
        if isinstance(optimizer, HybridDeviceOptimizer):
            found = state_targets(optimizer, names, self.metadata, places)
        else:
            found = plain_targets(optimizer, names, self.metadata, places)
        self.targets.add(found)
        groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
        firsts = [fqns[0] for fqns in groups if fqns]
        keys = naming.option_keys(self.metadata.state_dict_metadata, places, firsts)
        options = packed_options(optimizer, groups, self._read_values(keys), places)
        self.packed = {**found.packed, **options}

    def _read_values(self, keys: Sequence[str]) -> dict[str, Any]:
        """Values that are no tensors, and small tensors, from the checkpoint."""
        values: dict[str, Any] = {}
        for key in keys:
            entry = self.metadata.state_dict_metadata[key]
            values[key] = None
            if isinstance(entry, TensorStorageMetadata):
                values[key] = torch.zeros(entry.size, dtype=entry.properties.dtype)
        read_into(values, self.metadata, self.reader)
        return values

    def read(self) -> None:
        """Read all tensors in place."""
        read_into(self.targets.direct, self.metadata, self.reader)
        if self.targets.conversions:
            read_into(self.targets.conversions, self.metadata, self.reader)

    def take_over(self) -> None:
        """Let module and optimizer know."""
        options = StateDictOptions(strict=False)
        for model in self.models:
            mine = weights_of([model])
            set_model_state_dict(model, {f: self.weights[f] for f in mine}, options=options)
            if self.optimizer is None:
                # The weights were read in place before, so the optimizer saw no change just now.
                tell_loaded(model)
        if self.optimizer is not None and self.packed is not None:
            self.packed.update(
                {key: self.targets.direct[stored] for key, stored in self.targets.values.items()}
            )
            unpack_optimizer_state(self.models, self.optimizer, self.packed)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5]) or "none"
    return f"{shown}, ... ({len(names)} in all)" if len(names) > 5 else shown


def read_into(targets: Mapping[str, Any], metadata: Metadata, reader: CheckpointReader) -> None:
    """Fill ``targets``, a flat dict whose keys are those of the checkpoint; no collective."""
    planner = _Planner()
    planner.set_up_planner(dict(targets), metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    for key, value in planner.state_dict.items():
        if not isinstance(value, Tensor | Conversion):
            targets[key] = value  # type: ignore[index]


class _Planner(DefaultLoadPlanner):
    """torch's planner for a flat dict; no code is run for values, and some are converted."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take ``state_dict`` as it is."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator
        self.piecewise = {k for k, v in state_dict.items() if isinstance(v, Conversion)}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle a value; classes other than torch's own are refused."""
        key = read_item.dest_index.fqn
        try:
            self.state_dict[key] = decode(value)
        except Exception as error:
            raise CheckpointError(
                f"{key}",
                reason=f"it cannot be loaded without running code of its own: {error}",
                remedy="save it with plain values only",
            ) from error

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where the elements go: the live tensor, or memory for a piece to be converted."""
        target = self.state_dict[read_item.dest_index.fqn]
        if isinstance(target, Conversion):
            return target.scratch(read_item)
        found: Tensor = super().resolve_tensor(read_item)
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Convert what has been read."""
        target = self.state_dict[read_item.dest_index.fqn]
        if isinstance(target, Conversion):
            target.apply(read_item, tensor)
