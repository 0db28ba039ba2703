"""Weights for other programs: safetensors files, as transformers reads them.

An export is a save of DCP: the planner lays out the files from what all ranks have, and every rank
writes its chunks straight into their byte ranges, which the library ``safetensors`` cannot do. No
tensor is gathered. A :class:`Source` says which tensors there are and reads their chunks: from a
model, on all ranks, or from a checkpoint, in one process.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.optim import Optimizer

from ..core import dtensor
from ..core.arguments import check_optimizer
from ..core.config import parse_bytes
from ..core.errors import CheckpointError, ConfigError, UnsupportedParameterError
from ..core.interrupts import held_back, let_through
from ..core.progress import progress
from ..update import codec
from . import folder
from .api import coordination_group, run_save
from .files import done, memory_of, run_all, typed, write_bytes, write_whole
from .planner import FlatSavePlanner, read_values
from .reader import Reader
from .rule import GROUPS, STATE, find_layout
from .state import REMAINDER, WHOLE, state_to_read, wait_for, weights_of
from .writer import Writer

INDEX: Final = "model.safetensors.index.json"
STEP_BYTES: Final = 1 << 20
"""Of a file, converted and written at once."""
CODES: Final = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.uint16: "U16", torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64",
    torch.uint64: "U64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
_DTYPES: Final = {None: None, "bf16": torch.bfloat16, "fp32": torch.float32}
_CONVERTED: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Other floating dtypes are quantised: without their scales a conversion makes no sense."""
_USUAL: Final = ("", "model.", "model.module.")
"""Prefixes of weights that the only optimizer state of a checkpoint belongs to."""


def export_safetensors(
    source: nn.Module | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    dtype: Literal["bf16", "fp32"] | None = None,
    max_shard_bytes: int | str = "5GB",
    names: Mapping[str, str | None] | None = None,
    model_prefix: str | None = None,
    optimizer_prefix: str | None = None,
) -> tuple[Path, ...]:
    """Write the weights into a new folder: ``model.safetensors``, or several files with an index.

    ``transformers`` needs a ``config.json`` beside them: ``model.config.save_pretrained(out)``
    after the export.

    Args:
        source: the model, sharded or not, and then all ranks call this and see the same folder; or
            the folder of a checkpoint of DCP, which one process reads alone, without the model.
        out: a folder that does not exist yet, or is empty. It appears when all files are complete.
        optimizer: of a model: holds its fp32 masters.
        dtype: ``"fp32"``: masters, exactly; weights without one are widened. ``"bf16"``: the
            weights that the training computed with. ``None``: as stored. Integers, buffers and
            quantised weights keep their dtype, and of a checkpoint what its optimizer lacks.
        max_shard_bytes: of one file's elements; a tensor is never cut.
        names: the name in the file for an FQN (others keep theirs), ``None``: left out. Of a
            model's tied weights the first name is written, and others only if they are listed.
        model_prefix: before the FQNs of weights in a checkpoint; ``None``: ``"model."`` or none.
        optimizer_prefix: before ``state.{fqn}``; ``None``: a usual one.

    Returns:
        The files, the index last.

    Raises:
        ConfigError: an argument is wrong, or ranks have different tensors of one name.
        UnsupportedParameterError: a tensor cannot be stored.
        CheckpointError: weights are missing, ``out`` holds files, the file system refused, or
            another rank failed. ``out`` is as it was.
        CheckpointCorruptError: the checkpoint is not as it was written.
    """

    writer, prefixes = _ExportWriter(out), (model_prefix, optimizer_prefix)

    def find() -> Source:  # in DCP's local step: errors of one rank are raised on all
        wanted = _wanted(source, optimizer, dtype, prefixes)
        if isinstance(source, nn.Module):
            return _of_model(source, optimizer, wanted)
        return _of_checkpoint(Reader(source), *prefixes, wanted)

    def lay_out(entries: Sequence[Entry]) -> list[File]:
        max_bytes = parse_bytes(max_shard_bytes, "max_shard_bytes")
        return plan_files(_named(entries, names or {}), max_bytes)

    with held_back() as interrupt:
        of_model = isinstance(source, nn.Module)
        group = coordination_group("export_safetensors", interrupt) if of_model else None
        run_save(writer, _ExportPlanner(find, lay_out), group)
    written = [file.name for file in writer.files]
    return tuple(Path(out) / name for name in written + [INDEX] * (len(written) > 1))


def _wanted(
    source: object, optimizer: object, dtype: Any, prefixes: tuple[Any, Any]
) -> torch.dtype | None:
    """The dtype of weights in the files; refuses wrong arguments."""
    if dtype not in _DTYPES:
        raise ConfigError(
            f"dtype={dtype!r}",
            reason="weights are written in bf16 or fp32, or as they are",
            remedy='use "bf16", "fp32" or None',
        )
    check_optimizer(optimizer, several='leave it out with dtype="bf16" or None')
    fits = isinstance(source, str | os.PathLike) and optimizer is None
    if isinstance(source, nn.Module):
        fits = prefixes == (None, None)
    if not fits:
        raise ConfigError(
            f"source of type {type(source).__name__} with an optimizer of type "
            f"{type(optimizer).__name__} and prefixes {prefixes}",
            reason="the masters of a torch.nn.Module are in its torch.optim.Optimizer, those of a "
            "checkpoint in the same folder, and only keys of a checkpoint have prefixes",
            remedy="pass the model and its optimizer, or only the path of a checkpoint",
        )
    return _DTYPES[dtype]


# --------------------------------------------------------------------------- files


class Entry(NamedTuple):
    """One tensor: its whole shape, its dtype in the file, and whether another FQN, which comes
    first, has the same parameter."""

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_tied: bool = False

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class File:
    """One file: a header, then its tensors, by the names that they have there, without gaps."""

    def __init__(self, name: str, named: Mapping[str, Entry]) -> None:
        self.name, self.named = name, named
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
        at = 0
        for key, entry in named.items():
            places = {"shape": entry.shape, "data_offsets": [at, at + entry.nbytes]}
            table[key] = {"dtype": CODES[entry.dtype], **places}
            at += entry.nbytes
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self.header) + at
        starts = {key: len(self.header) + table[key]["data_offsets"][0] for key in named}
        self.places = {entry.fqn: (starts[key], entry) for key, entry in named.items()}


def plan_files(named: Mapping[str, Entry], max_bytes: int) -> list[File]:
    """Cut tensors, in their order, into files of at most ``max_bytes`` of elements.

    A larger tensor gets a file of its own. In a file the widest dtypes come first, so that every
    tensor begins at a multiple of its element's size.
    """
    batches: list[dict[str, Entry]] = [{}]
    filled = 0
    for name, entry in named.items():
        if batches[-1] and filled + entry.nbytes > max_bytes:
            batches.append({})
            filled = 0
        batches[-1][name] = entry
        filled += entry.nbytes
    count, files = len(batches), []
    for index, batch in enumerate(batches, 1):
        stem = f"model-{index:05d}-of-{count:05d}" if count > 1 else "model"
        ordered = dict(sorted(batch.items(), key=lambda item: -item[1].dtype.itemsize))
        files.append(File(f"{stem}.safetensors", ordered))
    return files


def _named(found: Sequence[Entry], names: Mapping[str, str | None]) -> dict[str, Entry]:
    """The tensors by their names in the files.

    Raises:
        ConfigError: ``names`` has an unknown FQN, or one name for two tensors.
    """
    entries: dict[str, Entry] = {}
    for entry in found:
        name = names.get(entry.fqn, None if entry.is_tied else entry.fqn)
        if name in entries or name == "__metadata__":
            raise ConfigError(
                f"the name {name!r} for {entry.fqn}",
                reason=f"it stands for {entries[name].fqn}" if name in entries else "reserved",
                remedy="give every tensor a name of its own",
            )
        if name is not None:
            entries[name] = entry
    if not entries or names.keys() - {entry.fqn for entry in found}:
        raise ConfigError(
            f"names for {list(names)[:4]}",
            reason="there are no such weights, or none is left",
            remedy=f"use FQNs of the model, such as {[entry.fqn for entry in found][:4]}",
        )
    return entries


def _create(made: Path, files: Sequence[File]) -> None:
    """Make files of full size, with their headers, in an empty folder."""
    for file in files:
        write_whole(made / file.name, file.header)
        os.truncate(made / file.name, file.nbytes)
    if len(files) > 1:
        total = sum(file.nbytes - len(file.header) for file in files)
        weights = {name: file.name for file in files for name in file.named}
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        write_whole(made / INDEX, json.dumps(index, indent=2).encode())


# --------------------------------------------------------------------------- DCP


@dataclass(frozen=True)
class Source:
    """Where weights are.

    Args:
        entries: all that this process knows of.
        tensors: by FQN, for DCP to ask which chunks this process can read.
        read: a chunk: the weight as stored, and its master if there is one; on any device.
    """

    entries: Sequence[Entry]
    tensors: Mapping[str, Tensor]
    read: Callable[[MetadataIndex], tuple[Tensor, Tensor | None]]


class _ExportPlanner(FlatSavePlanner):
    """Lays out the files of an export from the tensors of all ranks."""

    def __init__(
        self, find: Callable[[], Source], lay_out: Callable[[Sequence[Entry]], list[File]]
    ) -> None:
        super().__init__(dict)  # what is saved is found below
        self._find, self._lay_out = find, lay_out

    @let_through()
    def set_up_planner(  # torch looks for the name storage_meta, and warns without it
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Find the tensors; the plan tells the coordinator of all of them."""
        with typed():
            self.source = self._find()
        self.state_dict, self.is_coordinator = dict(self.source.tensors), is_coordinator
        self.mappings: Any = {entry.fqn: entry for entry in self.source.entries}

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Every rank learns the files; of ranks that hold the same chunk, one writes it."""
        plans, metadata = super().create_global_plan(all_plans)
        files = self._lay_out(list(metadata.planner_data.values()))
        return [replace(plan, planner_data=files) for plan in plans], metadata


class _ExportWriter(Writer):
    """Writes what an :class:`_ExportPlanner` has planned."""

    files: Sequence[File] = ()

    @held_back()
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the files in an empty folder."""
        if self.path.is_dir() and any(self.path.iterdir()):
            raise CheckpointError(
                f"{self.path}",
                reason="it holds files, and an export replaces none",
                remedy="choose a folder that does not exist yet",
            )
        plans = super().prepare_global_plan(plans)
        assert self._aside is not None  # it was made just now
        _create(self._aside, plans[0].planner_data)
        return plans

    @let_through()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks, and make them permanent."""
        assert isinstance(planner, _ExportPlanner)
        self.files = plan.planner_data
        with progress(len(plan.items), "exporting", unit=" chunks") as bar:
            for file in self.files:
                if items := [item for item in plan.items if item.index.fqn in file.places]:
                    path = (self.path.parent / plan.storage_data).with_name(file.name)
                    with typed(path), path.open("r+b") as opened:
                        for item in items:
                            _write_chunk(opened.fileno(), file, item, planner.source)
                            bar.advance()
                        os.fsync(opened.fileno())
        return done([])

    @held_back()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Give the folder its name."""
        assert self._aside is not None, "prepare_global_plan() first"
        folder.install(self._aside, self.path, overwrite=False)
        self._complete("exported", sum(file.nbytes for file in self.files))


def _write_chunk(descriptor: int, file: File, item: WriteItem, source: Source) -> None:
    """Convert and write a chunk of a tensor, a few rows at a time."""
    assert item.tensor_data is not None  # the planner has tensors only
    offset, entry = file.places[item.index.fqn]
    first, *others = item.tensor_data.chunk.offsets or (0,)
    # The weight, and its master if there is one; an element is a row of one.
    found = [torch.atleast_1d(t) for t in source.read(item.index) if t is not None]
    # A row may be more than this: a thread holds about three times as much.
    rows = max(1, STEP_BYTES // max(1, entry.dtype.itemsize * found[0][:1].numel()))

    def write(start: int) -> None:
        box = _value(entry.dtype, *(tensor[start : start + rows] for tensor in found))
        for at, run in _runs(box, entry.shape or (1,), (first + start, *others)):
            write_bytes(descriptor, offset + at * box.element_size(), memory_of(run), file.name)

    run_all(functools.partial(write, start) for start in range(0, len(found[0]), rows))


def _runs(
    box: Tensor, shape: Sequence[int], begin: Sequence[int], at: int = 0
) -> Iterator[tuple[int, Tensor]]:
    """What of a box at index ``begin`` lies in one place of a tensor, and from which element on."""
    row = math.prod(shape[1:])
    if tuple(box.shape[1:]) == tuple(shape[1:]):
        yield at + begin[0] * row, box
    else:
        for index, below in enumerate(box, begin[0]):
            yield from _runs(below, shape[1:], begin[1:], at + index * row)


def _value(dtype: torch.dtype, weight: Tensor, master: Tensor | None = None) -> Tensor:
    """A box as it is written: its values in order, on the CPU, of ``dtype``.

    The master, of the weight's shape, is the remainder (bf16) or whole.
    """
    # The memory of a lazy conjugate or negative has other values.
    weight = weight.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if master is None or dtype == weight.dtype:
        return weight.to(dtype)
    master = master.detach().cpu().contiguous()
    whole = codec.decoded(weight, master) if master.dtype == torch.bfloat16 else master
    return whole.to(dtype)


# --------------------------------------------------------------------------- sources


def _entry(
    fqn: str, tensor: Tensor, wanted: torch.dtype | None, *, is_weight: bool, is_tied: bool = False
) -> Entry:
    """Of a tensor as it is stored; ``wanted``: the dtype of weights."""
    if tensor.dtype not in CODES:
        raise UnsupportedParameterError(
            f"{fqn} of {tensor.dtype}",
            reason="safetensors has no such dtype",
            remedy="convert it, or leave it out of the model",
        )
    dtype = wanted if wanted and is_weight and tensor.dtype in _CONVERTED else tensor.dtype
    return Entry(fqn, tuple(tensor.shape), dtype, is_tied)


def _of_model(model: nn.Module, optimizer: Optimizer | None, wanted: torch.dtype | None) -> Source:
    """The shards that this process holds, and their masters; nothing is copied.

    Raises:
        UnsupportedParameterError: a tensor has no elements of its own here.
    """
    state = {} if optimizer is None else state_to_read(optimizer)
    named = dtensor.saved_names([model]).items()
    parameters = {n: p for p, names in named if isinstance(p, nn.Parameter) for n in names}
    entries: list[Entry] = []
    tensors: dict[str, Tensor] = {}
    masters: dict[str, Tensor] = {}
    owners: set[Tensor] = set()
    for fqn, held in weights_of([model]).items():
        if not isinstance(held, Tensor) or fqn.endswith("_extra_state"):
            continue
        owner = parameters.get(fqn, held)
        _check_dense(fqn, owner)
        is_weight, is_tied = fqn in parameters, owner in owners
        entries.append(_entry(fqn, held, wanted, is_weight=is_weight, is_tied=is_tied))
        owners.add(owner)
        # Placed like the parameter, which alone may tell where its shard was cut.
        tensors[fqn] = dtensor.like(owner, dtensor.local(held))
        for name in {REMAINDER, WHOLE} & state.get(owner, {}).keys():
            masters[fqn] = state[owner][name]
    wait_for([model])

    def read(index: MetadataIndex) -> tuple[Tensor, Tensor | None]:
        master = masters.get(index.fqn)
        weight = dtensor.chunk(tensors[index.fqn], index)
        return weight, None if master is None else dtensor.chunk(master, index)

    return Source(entries, tensors, read)


def _check_dense(fqn: str, tensor: Tensor) -> None:
    """Refuse what has no elements of its own here."""
    shard, placements = dtensor.local(tensor), getattr(tensor, "placements", ())
    is_dense = tensor.layout is torch.strided and not (shard.is_meta or shard.is_nested)
    is_plain = type(shard) in (Tensor, nn.Parameter, nn.Buffer)
    if not (is_dense and is_plain) or any(p.is_partial() for p in placements):
        raise UnsupportedParameterError(
            f"{fqn}: {type(shard).__name__}, {shard.device}, {tensor.layout}, placed {placements}",
            reason="only dense shards with values of their own can be written",
            remedy="initialise it, convert it to a plain tensor, redistribute it, or leave it out",
        )


def _of_checkpoint(
    reader: Reader, prefix: str | None, optimizer_prefix: str | None, wanted: torch.dtype | None
) -> Source:
    """The weights in a checkpoint and their masters; one whole tensor of each is read at a time.

    Raises:
        CheckpointError: weights are missing, or it is not known whose the masters are.
        CheckpointCorruptError: a file is not as it was written.
    """
    reader.set_up_storage_reader(reader.read_metadata(), True)
    stored = reader.metadata.state_dict_metadata
    sizes = {k: v for k, v in stored.items() if isinstance(v, TensorStorageMetadata)}
    if prefix is None:
        # Where each key stood in the nested dict that was saved, as far as it is known.
        paths = reader.metadata.planner_data or {key: tuple(key.split(".")) for key in sizes}
        prefix = "model." if any(p[0] == "model" and len(p) > 1 for p in paths.values()) else ""
    fqns = [key.removeprefix(prefix) for key in sizes if key.startswith(prefix)]
    # State of "model." fits weights of "ema.", too: the caller has to say that it is theirs.
    known = fqns if optimizer_prefix is not None or prefix in _USUAL else []
    layout = find_layout(stored, known, model_prefix=prefix, optimizer_prefix=optimizer_prefix)
    layout = replace(layout, model=prefix)
    keys = {
        fqn: [prefix + fqn]
        for fqn in fqns
        if layout.is_weight(prefix + fqn) and not fqn.endswith("_extra_state")
    }
    if not keys:
        raise CheckpointError(
            f"a checkpoint without tensors under {prefix!r}",
            reason="weights are missing: no tensor has such a key",
            remedy="name the checkpoint of a model, or what its keys begin with (model_prefix=)",
        )
    names = layout.entries(STATE, stored)
    lost = {key for key in sizes if key.endswith((f".{REMAINDER}", f".{WHOLE}"))}
    for fqn, found in keys.items():
        found += [layout.state(fqn) + n for n in (REMAINDER, WHOLE) if n in names.get(fqn, ())]
        lost -= {key for key in found if sizes[key].size == sizes[prefix + fqn].size}
    if lost and wanted == torch.float32:
        raise CheckpointError(
            f"masters {sorted(lost)[:4]}",
            reason="it is not known whose they are, so fp32 weights would not be exact",
            remedy="name theirs with optimizer_prefix=, save optimizer state by FQN "
            '(get_optimizer_state_dict), or export with dtype="bf16" or None',
        )
    trained = (names.keys() | layout.entries(GROUPS, stored).keys()) & keys.keys()
    entries, tensors = [], {}
    for fqn in keys:
        stored_as = sizes[prefix + fqn].properties.dtype
        tensors[fqn] = torch.empty(sizes[prefix + fqn].size, dtype=stored_as, device="meta")
        entry = _entry(fqn, tensors[fqn], wanted, is_weight=fqn in trained or not trained)
        if entry.dtype == stored_as:
            del keys[fqn][1:]
        entries.append(entry)

    def read(index: MetadataIndex) -> tuple[Tensor, Tensor | None]:
        weight, *masters = read_values(reader, keys[index.fqn][:2]).values()
        return weight, masters[0] if masters else None

    return Source(entries, tensors, read)
