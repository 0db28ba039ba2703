"""Weights for other programs: safetensors files, as transformers reads them.

[Note: an export]
The export of a model is a save of DCP: the planner lays out the files from what all ranks have, and
every rank writes its chunks straight into their byte ranges, which the library ``safetensors``
cannot do; no tensor is gathered. The export of a checkpoint is one process's: the same files.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from ..core.arguments import check_optimizer
from ..core.config import parse_bytes
from ..core.errors import CheckpointError, ConfigError, UnsupportedParameterError
from ..core.progress import progress
from ..update import codec
from .api import coordination_group, run_save
from .files import fsync_folder, memory_of, run_all, typed, write_bytes, write_whole
from .folder import remove
from .planner import check_same, read_values
from .reader import Reader
from .rule import GROUPS, STATE, find_layout
from .state import REMAINDER, WHOLE, state_to_read, wait_for, weights_of
from .writer import Writer

INDEX: Final = "model.safetensors.index.json"
ASIDE: Final = ".export.writing"
"""Where files stand until all are complete: within the folder, which may be a mount point."""
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
_MARK: Final = "fsdp_offload.export"
"""In the first bytes of every file, which tell it from weights of another origin."""
_FILES: Final = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


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
    """Write the weights into folder ``out``: ``model.safetensors``, or several with an index.

    Args:
        source: the model, sharded or not, and then all ranks call this and see the same folder; or
            the folder of a checkpoint of DCP, which one process reads alone, without the model.
        out: made where it does not exist.
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
        CheckpointError: weights are missing, ``out`` holds some that no export wrote, the file
            system refused, or another rank failed. Then nothing new stands in ``out`` under a
            final name.
        CheckpointCorruptError: the checkpoint is not as it was written.
    """

    def find() -> _Found:  # in DCP's local step: errors of one rank are raised on all
        _check_options(source, optimizer, dtype, (model_prefix, optimizer_prefix))
        if isinstance(source, nn.Module):
            return _find_in_model(source, optimizer, _DTYPES[dtype])
        return _find_in_checkpoint(Reader(source), model_prefix, optimizer_prefix, _DTYPES[dtype])

    def layout(entries: Sequence[Entry]) -> list[File]:
        return plan_files(entries, names or {}, parse_bytes(max_shard_bytes, "max_shard_bytes"))

    writer = _ExportWriter(out)
    group = coordination_group("export_safetensors") if isinstance(source, nn.Module) else None
    run_save(writer, _ExportPlanner(find, layout), group)
    return tuple(Path(out) / name for name in _names_of(writer.files))


def _check_options(
    source: object, optimizer: object, dtype: Any, prefixes: tuple[Any, Any]
) -> None:
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


# --------------------------------------------------------------------------- files


@dataclass(frozen=True)
class Entry:
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


@dataclass
class File:
    """One file: a header, then its tensors, by the names that they have there, without gaps."""

    name: str
    entries: Mapping[str, Entry]
    header: bytes = b""  # length (8 bytes, little-endian) and JSON
    offsets: dict[str, int] = field(default_factory=dict)  # of the first element, by FQN

    def __post_init__(self) -> None:
        # transformers asks for the format.
        table: dict[str, Any] = {"__metadata__": {"format": "pt", "writer": _MARK}}
        stop = 0
        for name, entry in self.entries.items():
            start, stop = stop, stop + entry.nbytes
            code = CODES[entry.dtype]
            table[name] = {"dtype": code, "shape": entry.shape, "data_offsets": [start, stop]}
            self.offsets[entry.fqn] = start
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.offsets = {fqn: len(self.header) + at for fqn, at in self.offsets.items()}

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())


def plan_files(
    found: Sequence[Entry], names: Mapping[str, str | None], max_bytes: int
) -> list[File]:
    """Name the tensors, and cut them, in their order, into files of at most ``max_bytes``.

    A larger tensor gets a file of its own. In a file the widest dtypes come first, so that every
    tensor begins at a multiple of its element's size.

    Raises:
        ConfigError: ``names`` has an unknown FQN, or one name for two tensors.
    """
    batches: list[dict[str, Entry]] = [{}]
    filled = 0
    for name, entry in _named(found, names).items():
        if batches[-1] and filled + entry.nbytes > max_bytes:
            batches.append({})
            filled = 0
        batches[-1][name] = entry
        filled += entry.nbytes
    count, files = len(batches), []
    for index, batch in enumerate(batches, 1):
        name = f"model-{index:05d}-of-{count:05d}" if count > 1 else "model"
        ordered = dict(sorted(batch.items(), key=lambda item: -item[1].dtype.itemsize))
        files.append(File(f"{name}.safetensors", ordered))
    return files


def _named(found: Sequence[Entry], names: Mapping[str, str | None]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for entry in found:
        name = names.get(entry.fqn, None if entry.is_tied else entry.fqn)
        if name is None:
            continue
        if name in entries or name == "__metadata__":
            raise ConfigError(
                f"the name {name!r} for {entry.fqn}",
                reason=f"it stands for {entries[name].fqn}" if name in entries else "reserved",
                remedy="give every tensor a name of its own",
            )
        entries[name] = entry
    if not entries or names.keys() - {entry.fqn for entry in found}:
        raise ConfigError(
            f"names for {list(names)[:4]}",
            reason="there are no such weights, or none is left",
            remedy=f"use FQNs of the model, such as {[entry.fqn for entry in found][:4]}",
        )
    return entries


def _names_of(files: Sequence[File]) -> list[str]:
    """Of all files of an export, the index last; one file alone has none."""
    return [file.name for file in files] + ([INDEX] if len(files) > 1 else [])


def _create_files(made: Path, files: Sequence[File]) -> None:
    """Make files of full size, with their headers, in an empty folder."""
    remove(made)  # of an export that was killed
    made.mkdir(parents=True)
    for file in files:
        write_whole(made / file.name, file.header)
        os.truncate(made / file.name, len(file.header) + file.nbytes)
    if len(files) > 1:
        metadata = {"total_size": sum(file.nbytes for file in files), "writer": _MARK}
        weights = {name: file.name for file in files for name in file.entries}
        index = json.dumps({"metadata": metadata, "weight_map": weights}, indent=2)
        write_whole(made / INDEX, index.encode())


def _earlier_export(folder: Path) -> list[Path]:
    """Files that an export into ``folder`` replaces, the index first.

    Raises:
        CheckpointError: one of them is not of an export, and would be lost.
    """
    found = [path for path in folder.glob("model*") if _FILES.fullmatch(path.name)]
    for path in found:
        with path.open("rb") as file:
            if f'"{_MARK}"'.encode() not in file.read(256):
                raise CheckpointError(
                    f"{path}",
                    reason="no export_safetensors() wrote it, and this one would replace it",
                    remedy="choose another folder, or move the weights away that are there",
                )
    return sorted(found, key=lambda path: path.name != INDEX)


def _publish_files(folder: Path, files: Sequence[File]) -> None:
    """Give complete files their places, and remove an earlier export there.

    The index goes first and comes last, so that at no time it names files of two exports.
    """
    for path in _earlier_export(folder):
        path.unlink()
    try:
        for name in _names_of(files):
            (folder / ASIDE / name).rename(folder / name)
    except OSError:
        for name in _names_of(files):  # rather no export than half of one
            (folder / name).unlink(missing_ok=True)
        raise
    (folder / ASIDE).rmdir()
    fsync_folder(folder)


# --------------------------------------------------------------------------- DCP


@dataclass(frozen=True)
class _Found:
    """What one process knows of the tensors.

    Args:
        entries: all of them.
        tensors: by FQN, for DCP to ask which chunks this process can read.
        read: a chunk: the weight as stored, and its master if there is one; on any device.
    """

    entries: Sequence[Entry]
    tensors: Mapping[str, Tensor]
    read: Callable[[MetadataIndex], tuple[Tensor, Tensor | None]]


class _ExportPlanner(DefaultSavePlanner):
    """Lays out the files of an export from the tensors of all ranks."""

    def __init__(
        self, find: Callable[[], _Found], layout: Callable[[Sequence[Entry]], list[File]]
    ) -> None:
        super().__init__(flatten_state_dict=False)
        self._find, self._layout = find, layout

    def set_up_planner(  # torch looks for the name storage_meta, and warns without it
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing: the tensors are found in the next step."""

    def create_local_plan(self) -> SavePlan:
        """The chunks, and what the layout needs to know."""
        with typed():
            self.found = self._find()
        plan = create_default_local_save_plan(dict(self.found.tensors), is_coordinator=True)
        return replace(plan, planner_data=self.found.entries)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Every rank learns the files; of ranks that hold the same chunk, one writes it."""
        check_same(all_plans)
        union: dict[str, Entry] = {}
        for entry in (entry for plan in all_plans for entry in plan.planner_data):
            union.setdefault(entry.fqn, entry)
        files = self._layout(list(union.values()))
        with typed():
            plans, metadata = super().create_global_plan(all_plans)
        return [replace(plan, planner_data=files) for plan in plans], metadata


class _ExportWriter(Writer):
    """Writes what an :class:`_ExportPlanner` has planned."""

    files: Sequence[File] = ()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Any folder will do, the current one, too."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the files.

        Raises:
            CheckpointError: weights of another origin are in their way.
        """
        _earlier_export(self.path)
        self._aside = self.path / ASIDE  # what discard() removes
        _create_files(self._aside, plans[0].planner_data)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks, and make them permanent."""
        assert isinstance(planner, _ExportPlanner)
        self.files = plan.planner_data
        with progress(len(plan.items), "exporting", unit=" chunks") as bar:
            for file in self.files:
                items = [item for item in plan.items if item.index.fqn in file.offsets]
                if items:
                    path = self.path / ASIDE / file.name
                    _write_chunks(path, file, items, planner.found, bar.advance)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Give the files their names."""
        _publish_files(self.path, self.files)


def _write_chunks(
    path: Path,
    file: File,
    items: Sequence[WriteItem],
    found: _Found,
    advance: Callable[[], None],
) -> None:
    """Convert and write chunks of tensors, a few rows at a time."""
    entries = {entry.fqn: entry for entry in file.entries.values()}
    with path.open("r+b") as opened:
        descriptor = opened.fileno()
        for item in items:
            assert item.tensor_data is not None  # the planner has tensors only
            entry, offset = entries[item.index.fqn], file.offsets[item.index.fqn]
            first, *others = item.tensor_data.chunk.offsets or (0,)
            # The weight, and its master if there is one; an element is a row of one.
            tensors = [torch.atleast_1d(t) for t in found.read(item.index) if t is not None]
            # A row may be more than this: a thread holds about three times as much.
            rows = max(1, STEP_BYTES // max(1, entry.dtype.itemsize * tensors[0][:1].numel()))
            write = functools.partial(_write_rows, descriptor, path, offset, entry)
            run_all(
                functools.partial(
                    write, (first + start, *others), *(t[start : start + rows] for t in tensors)
                )
                for start in range(0, len(tensors[0]), rows)
            )
            advance()
        os.fsync(descriptor)


def _write_rows(
    descriptor: int,
    path: Path,
    offset: int,
    entry: Entry,
    begin: Sequence[int],
    weight: Tensor,
    master: Tensor | None = None,
) -> None:
    """Convert rows that begin at index ``begin`` of a tensor, and write them."""
    value = _value(weight, master, entry.dtype)
    _write_box(descriptor, path, offset, entry.shape or (1,), begin, value)


def _write_box(
    descriptor: int,
    path: Path,
    offset: int,
    shape: Sequence[int],
    begin: Sequence[int],
    box: Tensor,
) -> None:
    """Write a box that begins at index ``begin`` of a tensor, which begins at ``offset``."""
    row_bytes = math.prod(shape[1:]) * box.element_size()
    if not box.dim() or tuple(box.shape[1:]) == tuple(shape[1:]):  # without gaps in the file, too
        write_bytes(descriptor, offset + row_bytes * sum(begin[:1]), memory_of(box), path)
        return
    for index, below in enumerate(box, begin[0]):
        _write_box(descriptor, path, offset + row_bytes * index, shape[1:], begin[1:], below)


def _value(weight: Tensor, master: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A box as it is written: contiguous, on the CPU, of ``dtype``.

    Args:
        weight: of any shape, as stored.
        master: of the same shape: the remainder (bf16), or the whole master; ``None``: none.
        dtype: another than the weight's only where masters count.
    """
    weight = weight.detach().cpu().contiguous()
    if master is None or dtype == weight.dtype:
        return weight.to(dtype)
    master = master.detach().cpu().contiguous()
    if master.dtype == torch.bfloat16:
        whole = torch.empty(weight.numel(), dtype=torch.float32, device="cpu")
        codec.decode(weight.reshape(-1), master.reshape(-1), whole)
        master = whole.view(weight.shape)
    return master.to(dtype)


# --------------------------------------------------------------------------- where weights are


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


def _find_in_model(
    model: nn.Module, optimizer: Optimizer | None, wanted: torch.dtype | None
) -> _Found:
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
        _check_exportable(fqn, owner)
        dtype = _file_dtype(fqn, held.dtype, wanted, is_weight=fqn in parameters)
        entries.append(Entry(fqn, tuple(held.shape), dtype, owner in owners))
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

    return _Found(entries, tensors, read)


def _check_exportable(fqn: str, tensor: Tensor) -> None:
    """Refuse what has no elements of its own here."""
    shard = dtensor.local(tensor)
    placements = getattr(tensor, "placements", ())
    packed = type(shard) not in (Tensor, nn.Parameter, nn.Buffer)
    strange = tensor.layout is not torch.strided or any(p.is_partial() for p in placements)
    if shard.is_meta or packed or strange:
        raise UnsupportedParameterError(
            f"{fqn} of type {type(shard).__name__} on {shard.device}, layout {tensor.layout}, "
            f"placed {placements}",
            reason="only dense shards with values of their own can be written",
            remedy="initialise or load it, convert it to a plain tensor, redistribute it, or leave "
            "it out of the model",
        )


def _find_in_checkpoint(
    reader: Reader, prefix: str | None, optimizer_prefix: str | None, wanted: torch.dtype | None
) -> _Found:
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
        dtype = _file_dtype(fqn, stored_as, wanted, is_weight=fqn in trained or not trained)
        if dtype == stored_as:
            del keys[fqn][1:]
        entries.append(Entry(fqn, tuple(tensors[fqn].shape), dtype))

    def read(index: MetadataIndex) -> tuple[Tensor, Tensor | None]:
        weight, *masters = read_values(reader, keys[index.fqn][:2]).values()
        return weight, masters[0] if masters else None

    return _Found(entries, tensors, read)
