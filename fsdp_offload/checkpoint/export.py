"""Weights for other programs: safetensors files, as transformers reads them.

[Note: an export]
The export of a model is a save of DCP: the planner lays out the files from what all ranks have, and
the writer puts every rank's boxes straight into their byte ranges; no tensor is gathered. The
export of a checkpoint is one process's: the same files, of which the boxes are read from chunks.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.optim import Optimizer

from ..core import dtensor
from ..core.chunks import Box
from ..core.config import parse_bytes
from ..core.errors import CheckpointError, ConfigError, UnsupportedParameterError
from ..core.progress import progress as bar_over
from ..update import codec
from .api import coordination_group, run_save
from .files import fsync, memory_of, run_all, typed, write_bytes
from .layout import MODEL_PREFIXES, Layout, find_layout
from .planner import read_values
from .reader import Reader
from .safetensors import (
    ASIDE,
    CODES,
    Entry,
    File,
    Names,
    create_files,
    names_of,
    plan_files,
    publish_files,
    runs,
    split,
)
from .state import REMAINDER, WHOLE, wait_for
from .writer import Writer

STEP_BYTES: Final = 1 << 20
"""Of a file, converted and written at once."""
_DTYPES: Final = {None: None, "bf16": torch.bfloat16, "fp32": torch.float32}
_CONVERTED: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Other floating dtypes are quantised: without their scales a conversion makes no sense."""
_WRAPPERS: Final = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")
"""What torch.compile and activation checkpointing put into names."""


def export_safetensors(
    source: nn.Module | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    dtype: Literal["bf16", "fp32"] | None = None,
    max_shard_bytes: int | str = "5GB",
    progress: bool | None = None,
    names: Names | None = None,
    model_prefix: str | None = None,
    optimizer_prefix: str | None = None,
) -> tuple[Path, ...]:
    """Write the weights into folder ``out``: ``model.safetensors``, or several with an index.

    Args:
        source: the model, sharded or not, and then all ranks call this and see the same folder; or
            the folder of a checkpoint of DCP, which one process reads alone, without the model.
        out: made where it does not exist.
        optimizer: of a model: holds its fp32 masters. Several are allowed.
        dtype: ``"fp32"``: masters, exactly; weights without one are widened. ``"bf16"``: the
            weights that the training computed with. ``None``: as stored. Integers, buffers and
            quantised weights keep their dtype, and of a checkpoint what its optimizer lacks.
        max_shard_bytes: of one file's elements; a tensor is never cut.
        progress: show a bar on the first rank; ``None``: if stderr is a terminal.
        names: the name in the file for an FQN: a mapping (others keep theirs), or a function,
            whose ``None`` leaves the tensor out. Of a model's tied weights the first name is
            written, and others only where a mapping has them.
        model_prefix: before the FQNs of weights in a checkpoint; ``None``: ``"model."`` or none.
        optimizer_prefix: before ``state.{fqn}``; ``None``: a usual one.

    Returns:
        The files, the index last.

    Raises:
        ConfigError: an argument is wrong.
        UnsupportedParameterError: a tensor cannot be stored.
        CheckpointError: weights are missing, the file system refused, or another rank failed.
            Then nothing new stands in ``out`` under a final name.
        CheckpointCorruptError: the checkpoint is not as it was written.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    prefixes = (model_prefix, optimizer_prefix)

    def find() -> list[Source]:  # in DCP's local step: errors of one rank are raised on all
        _check_options(source, optimizers, dtype, prefixes)
        if isinstance(source, nn.Module):
            return _find_in_model(source, optimizers, _DTYPES[dtype])
        return _find_in_checkpoint(Reader(source), prefixes, _DTYPES[dtype])

    def layout(entries: Sequence[Entry]) -> tuple[File, ...]:
        return plan_files(entries, names, parse_bytes(max_shard_bytes, "max_shard_bytes"))

    planner = ExportPlanner(find, layout)
    shown = sys.stderr.isatty() if progress is None else progress
    group = coordination_group() if isinstance(source, nn.Module) else None
    run_save(ExportWriter(Path(out), shown=shown), planner, group)
    return tuple(Path(out) / name for name in names_of(planner.plan.planner_data))


def _check_options(
    source: object, optimizers: Sequence[Any], dtype: object, prefixes: Sequence[Any]
) -> None:
    if dtype not in _DTYPES:
        raise ConfigError(
            f"dtype={dtype!r}", reason="unknown choice", remedy='use "bf16", "fp32" or None'
        )
    wrong = [each for each in optimizers if not isinstance(each, Optimizer)]
    if isinstance(source, nn.Module):
        if wrong or any(prefix is not None for prefix in prefixes):
            raise ConfigError(
                f"a model with optimizers {optimizers} and prefixes {prefixes}",
                reason="masters are those of a torch.optim.Optimizer, and only keys of a "
                "checkpoint have prefixes",
                remedy="pass the optimizer of the model, or several; names= renames tensors",
            )
    elif not isinstance(source, str | os.PathLike) or optimizers:
        raise ConfigError(
            f"source of type {type(source).__name__} with optimizers {optimizers}",
            reason="it is no torch.nn.Module, and a checkpoint has its own masters",
            remedy="pass the model that is trained, or only the path of its checkpoint",
        )


def _file_dtype(
    fqn: str, stored: torch.dtype, wanted: torch.dtype | None, *, is_weight: bool
) -> torch.dtype:
    """The dtype in the file of a tensor that is stored as ``stored``."""
    if stored not in CODES:
        raise UnsupportedParameterError(
            f"{fqn} of {stored}",
            reason="safetensors has no such dtype",
            remedy="convert it, or leave it out of the model",
        )
    if wanted is None or not is_weight or stored not in _CONVERTED:
        return stored
    return wanted


def _value(weight: Tensor, master: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A part as it is written: contiguous, on the CPU, of ``dtype``.

    Args:
        weight: of any shape, as stored.
        master: of the same shape: the remainder (bf16), or the whole master; ``None``: none.
        dtype: another than the weight's only where masters count.
    """
    weight = weight.cpu().contiguous()
    if master is None or dtype == weight.dtype:
        return weight.to(dtype)
    master = master.cpu().contiguous()
    if master.dtype == torch.bfloat16:
        whole = torch.empty(weight.numel(), dtype=torch.float32, device="cpu")
        codec.decode(weight.reshape(-1), master.reshape(-1), whole)
        master = whole.view(weight.shape)
    return master.to(dtype)


@dataclass(frozen=True)
class Source:
    """One tensor, as one process knows it.

    Args:
        entry: what the file will have.
        items: the boxes of it that this process can read.
        read: of an item: the weight as stored, and the master where that decides; on any device.
    """

    entry: Entry
    items: Sequence[WriteItem]
    read: Callable[[MetadataIndex], tuple[Tensor, Tensor | None]]


class ExportPlanner(DefaultSavePlanner):
    """Lays out the files of an export from the tensors of all ranks.

    Args:
        find: gives the tensors of this rank.
        layout: from all tensors to files.
    """

    def __init__(
        self,
        find: Callable[[], Sequence[Source]],
        layout: Callable[[Sequence[Entry]], tuple[File, ...]],
    ) -> None:
        super().__init__(flatten_state_dict=False)
        self._find, self._layout = find, layout
        self.sources: dict[str, Source] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing: the tensors are found in the next step."""

    def create_local_plan(self) -> SavePlan:
        """The boxes, and what the layout needs to know."""
        with typed():
            self.sources = {source.entry.fqn: source for source in self._find()}
        items = [item for source in self.sources.values() for item in source.items]
        return SavePlan(items, planner_data=[source.entry for source in self.sources.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Every rank learns the files; of ranks that hold the same box, one writes it.

        Raises:
            CheckpointError: ranks have different tensors of one FQN, or do not cover one.
            ConfigError: ``names`` are wrong.
        """
        union: dict[str, Entry] = {}
        for entry in (entry for plan in all_plans for entry in plan.planner_data):
            if union.setdefault(entry.fqn, entry) != entry:
                raise CheckpointError(
                    f"{entry.fqn} of shape {entry.shape}, {entry.dtype}",
                    reason=f"another rank has {union[entry.fqn]}",
                    remedy="give tensors of different pipeline stages different names",
                )
        files = self._layout(list(union.values()))
        with typed():
            plans, metadata = super().create_global_plan(all_plans)
        return [replace(plan, planner_data=files) for plan in plans], metadata


class ExportWriter(Writer):
    """Writes what an :class:`ExportPlanner` has planned.

    Args:
        folder: for the files.
        shown: show a bar on the first rank.
    """

    def __init__(self, folder: Path, *, shown: bool) -> None:
        super().__init__(folder)
        self._shown = shown
        self._files: tuple[File, ...] = ()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Any folder will do, the current one, too."""
        self._path = self._path.absolute()

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the files."""
        self._files = plans[0].planner_data
        self._aside = self._path / ASIDE  # what discard() removes
        create_files(self._path, self._files)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's boxes, and make them permanent."""
        assert isinstance(planner, ExportPlanner)
        boxes: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            boxes.setdefault(item.index.fqn, []).append(item)
        total = sum(
            _box_of(item).numel * entry.dtype.itemsize
            for file in plan.planner_data
            for entry in file.entries
            for item in boxes.get(entry.fqn, ())
        )
        is_first = self._aside is not None
        with bar_over(total if self._shown and is_first else 0, "exporting") as bar:
            for file in plan.planner_data:
                mine = [(e, item) for e in file.entries for item in boxes.get(e.fqn, ())]
                if mine:
                    self._write_file(file, mine, planner, bar.advance)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def _write_file(
        self,
        file: File,
        boxes: Sequence[tuple[Entry, WriteItem]],
        planner: ExportPlanner,
        advance: Callable[[int], None],
    ) -> None:
        path = self._path / ASIDE / file.name
        descriptor = os.open(path, os.O_WRONLY)
        try:
            for entry, item in boxes:
                weight, master = planner.sources[entry.fqn].read(item.index)
                write = functools.partial(
                    _write_rows, descriptor, path, entry, file.offsets[entry.fqn], weight, master
                )
                box = _box_of(item)
                # A row may be more than this: a thread holds about three times as much.
                parts = split(box, STEP_BYTES // entry.dtype.itemsize)
                run_all(functools.partial(write, box, part) for part in parts)
                advance(box.numel * entry.dtype.itemsize)
            fsync(descriptor, path)
        finally:
            os.close(descriptor)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Give the files their names."""
        publish_files(self._path, self._files)


def _box_of(item: WriteItem) -> Box:
    assert item.tensor_data is not None, item
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def _write_rows(
    descriptor: int,
    path: Path,
    entry: Entry,
    offset: int,
    weight: Tensor,
    master: Tensor | None,
    box: Box,
    part: Box,
) -> None:
    """Write a part of a box to its byte ranges; the tensor begins at ``offset`` of the file."""
    inside = tuple(
        slice(low - base, low - base + size)
        for low, base, size in zip(part.offsets, box.offsets, part.sizes, strict=True)
    )
    weight, master = weight[inside], None if master is None else master[inside]
    value, size = _value(weight, master, entry.dtype), entry.dtype.itemsize
    numel, starts = runs(entry.shape, part)
    for index, start in enumerate(starts):
        data = memory_of(value)[index * numel * size : (index + 1) * numel * size]
        write_bytes(descriptor, offset + start * size, data, path)


# --------------------------------------------------------------------------- a model


def _find_in_model(
    model: nn.Module, optimizers: Sequence[Optimizer], wanted: torch.dtype | None
) -> list[Source]:
    """The shards that this process holds, and their masters; nothing is copied.

    Raises:
        CheckpointError, UnsupportedParameterError: a tensor has no elements of its own here.
    """
    masters = _masters_of(optimizers)
    found: list[Source] = []
    first: dict[int, str] = {}
    held = _tensors_of(model)  # over host memory, where an offloader has moved it away
    for fqn, tensor in _tensors_of(model, keep_vars=True).items():
        _check_exportable(fqn, tensor)
        dtype = _file_dtype(fqn, tensor.dtype, wanted, is_weight=isinstance(tensor, nn.Parameter))
        tied = first.setdefault(id(tensor), fqn)
        entry = Entry(fqn, tuple(tensor.shape), dtype, None if tied == fqn else tied)
        # As a tensor of its own: a ragged shard tells its boxes by what is attached.
        shown = dtensor.like(tensor, dtensor.local(held[fqn]))
        items = create_default_local_save_plan({fqn: shown}, is_coordinator=True).items
        read = functools.partial(_read_shard, shown, masters.get(tensor))
        found.append(Source(entry, items, read))
    wait_for([model])
    return found


def _read_shard(
    weight: Tensor, master: Tensor | None, index: MetadataIndex
) -> tuple[Tensor, Tensor | None]:
    return dtensor.chunk(weight, index), None if master is None else dtensor.chunk(master, index)


def _tensors_of(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Tensor]:
    """Parameters and persistent buffers by FQN, tied ones under every name; sharded."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    tensors: dict[str, Tensor] = {}
    for key, tensor in model.state_dict(keep_vars=keep_vars).items():
        if isinstance(tensor, Tensor) and not key.endswith("_extra_state"):
            tensors[_WRAPPERS.sub("", key)] = tensor
    return tensors


def _masters_of(optimizers: Sequence[Optimizer]) -> dict[Tensor, Tensor]:
    """Remainders and whole masters by parameter, final."""
    masters: dict[Tensor, Tensor] = {}
    for optimizer in optimizers:
        if getattr(optimizer.__dict__.get("step"), "forwards_to_wrapper", False):
            optimizer.state_dict()  # the wrapper's: waits for its transfers
        for parameter, state in optimizer.state.items():
            for name in (REMAINDER, WHOLE):
                if isinstance(found := state.get(name), Tensor):
                    masters[parameter] = found
    return masters


def _check_exportable(fqn: str, tensor: Tensor) -> None:
    """Refuse what has no elements of its own here."""
    shard = dtensor.local(tensor)
    if shard.device.type == "meta":
        raise CheckpointError(
            f"{fqn} on the meta device",
            reason="its weights are missing: they were never made or loaded",
            remedy="materialise the model (to_empty, then initialise or load) before exporting",
        )
    placements = getattr(tensor, "placements", ())
    packed = type(shard) not in (Tensor, nn.Parameter, nn.Buffer)
    if tensor.layout is not torch.strided or packed or any(p.is_partial() for p in placements):
        raise UnsupportedParameterError(
            f"{fqn} of type {type(shard).__name__}, layout {tensor.layout}, placed {placements}",
            reason="only dense shards with values of their own can be written",
            remedy="convert it to a plain tensor, redistribute it, or leave it out of the model",
        )


# --------------------------------------------------------------------------- a checkpoint


def _find_in_checkpoint(
    reader: Reader, prefixes: tuple[str | None, str | None], wanted: torch.dtype | None
) -> list[Source]:
    """The weights in a checkpoint and their masters; one whole tensor of each is read at a time.

    Raises:
        CheckpointError: weights are missing, or it is not known whose the masters are.
        CheckpointCorruptError: a file is not as it was written.
    """
    reader.set_up_storage_reader(reader.read_metadata(), True)
    stored = reader.metadata.state_dict_metadata
    tensors = {k: v for k, v in stored.items() if isinstance(v, TensorStorageMetadata)}
    layout = _layout_of(reader.metadata, tensors, *prefixes)
    weights = {
        key.removeprefix(layout.model or ""): key
        for key in tensors
        if layout.is_weight(key) and not key.endswith("_extra_state")
    }
    if not weights:
        raise CheckpointError(
            f"a checkpoint without tensors under {layout.model!r}",
            reason="weights are missing: no tensor has such a key",
            remedy="name the checkpoint of a model, or what its keys begin with (model_prefix=)",
        )
    masters = _stored_masters(tensors, weights, layout, wanted)
    start = f"{layout.optimizer}param_groups.{layout.inner}"
    trained = {k.removeprefix(start).rpartition(".")[0] for k in stored if k.startswith(start)}
    trained |= layout.state_names(stored).keys()
    found: list[Source] = []
    for fqn, key in weights.items():
        stored_dtype, size = tensors[key].properties.dtype, tensors[key].size
        is_weight = fqn in trained or not trained & weights.keys()
        dtype = _file_dtype(fqn, stored_dtype, wanted, is_weight=is_weight)
        whole = torch.empty(size, dtype=stored_dtype, device="meta")
        items = create_default_local_save_plan({fqn: whole}, is_coordinator=True).items
        master = masters.get(fqn) if dtype != stored_dtype else None
        read = functools.partial(_read_whole, reader, key, master)
        found.append(Source(Entry(fqn, tuple(size), dtype), items, read))
    return found


def _layout_of(
    metadata: Metadata,
    tensors: Mapping[str, TensorStorageMetadata],
    model: str | None,
    optimizer: str | None,
) -> Layout:
    """Where the keys of weights and masters are."""
    if model is None:
        # Where each key stood in the nested dict that was saved, as far as it is known.
        paths = metadata.planner_data or {key: tuple(key.split(".")) for key in tensors}
        sections = {path[0] for path in paths.values() if len(path) > 1}
        model = "model." if "model" in sections else ""
    # State of "model." fits weights of "ema.", too: the caller has to say that it is theirs.
    if optimizer is None and model not in MODEL_PREFIXES:
        return Layout(model, None)
    fqns = [key.removeprefix(model) for key in tensors if key.startswith(model)]
    keys = metadata.state_dict_metadata
    return find_layout(keys, fqns, model_prefix=model, optimizer_prefix=optimizer)


def _stored_masters(
    tensors: Mapping[str, TensorStorageMetadata],
    weights: Mapping[str, str],
    layout: Layout,
    wanted: torch.dtype | None,
) -> dict[str, str]:
    """Keys of masters by FQN."""
    masters = {
        fqn: layout.state(fqn) + name
        for fqn, names in layout.state_names(tensors).items()
        for name in (REMAINDER, WHOLE)
        if name in names and fqn in weights
    }
    lost = {k for k in tensors if k.endswith((f".{REMAINDER}", f".{WHOLE}"))}
    lost -= {key for fqn, key in masters.items() if tensors[key].size == tensors[weights[fqn]].size}
    if wanted == torch.float32 and lost - set(weights.values()):
        raise CheckpointError(
            f"masters {sorted(lost)[:4]}",
            reason="it is not known whose they are, so fp32 weights would not be exact",
            remedy="name theirs with optimizer_prefix=, save optimizer state by FQN "
            '(get_optimizer_state_dict), or export with dtype="bf16" or None',
        )
    return masters


def _read_whole(
    reader: Reader, weight: str, master: str | None, _: MetadataIndex
) -> tuple[Tensor, Tensor | None]:
    values = read_values(reader, [weight] if master is None else [weight, master])
    return values[weight], None if master is None else values[master]
