"""Weights of a job as safetensors files, as transformers reads them; no tensor is gathered.

[Note: an export]
Names, shapes and dtypes are known before any element is read, and with them the place of every
element in the files. So the first rank makes the files with their headers, and then every rank
writes the *boxes* it holds straight into their byte ranges, block by block: nobody holds more of
a tensor than it did before, but for a few blocks. Of ranks that hold the same boxes (replicas) the
first one writes. Files stand as ``*.tmp`` until every rank is done with all of them.

Steps at which a rank may fail end with one small collective, so that all ranks raise or none.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import logging
import math
import os
import pickle
import re
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.optim import Optimizer

from .. import shards
from ..chunks import Box, covers
from ..config import parse_bytes
from ..device import gateway_for
from ..errors import CheckpointError, ConfigError, OffloadError, UnsupportedParameterError
from ..pipeline import codec
from ..pipeline.state import REMAINDER, WHOLE
from .blocks import MAX_THREADS, corrupt, memory_of, run_all, thread_count, write_bytes
from .folder import fsync_folder

BLOCK_BYTES: Final = 1 << 20
"""Of a file, read, converted and written at once. With weight, remainder and the decoder's scratch
a thread holds about three times as much, so that eight of them stay below one bucket (32 MiB)."""
INDEX: Final = "model.safetensors.index.json"

_TEMPORARY: Final = ".tmp"
_OUR_FILES: Final = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}
_CONVERTED: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Other floating dtypes are quantised: without their scales a conversion makes no sense."""
_CODES: Final = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.uint16: "U16", torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64",
    torch.uint64: "U64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
_WRAPPERS: Final = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing put into names."""
_BATCH: Final = 512  # tensors whose boxes are compared in one collective
_PRIME: Final = (1 << 40) - 87

_log = logging.getLogger("fsdp_offload")
_Result = TypeVar("_Result")
Names = Mapping[str, str] | Callable[[str], str | None]


def export_safetensors(
    source: nn.Module | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    dtype: Literal["bf16", "fp32"] | None = None,
    max_shard_bytes: int | str = "5GB",
    progress: bool | None = None,
    names: Names | None = None,
    prefix: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Path, ...]:
    """Write the weights into folder ``out``: ``model.safetensors``, or several with an index.

    ``source`` is the model, sharded or not, and then all ranks of ``group`` call this and see the
    same folder; or the folder of a checkpoint in ``torch.distributed.checkpoint``'s format, which
    one process reads alone: no process group, no device, no model.

    Args:
        optimizer: of a model: holds the fp32 masters of bf16 and fp16 weights. Several are
            allowed. A checkpoint has its own.
        dtype: ``"fp32"``: masters, exactly; weights without one are widened. ``"bf16"``: the
            weights that the training computed with. ``None``: as stored. Integers, buffers and
            quantised weights keep their dtype. A checkpoint does not tell what is a buffer: where
            it has optimizer state, what the optimizer does not know keeps its dtype too.
        max_shard_bytes: of one file's elements; a tensor is never cut.
        progress: show a bar on the first rank; ``None``: if stderr is a terminal.
        names: the name in the file for an FQN: a mapping (others keep theirs), or a function,
            whose ``None`` leaves the tensor out. Of tied weights the first name is written, and
            others only where a mapping has them.
        prefix: of the model's keys in a checkpoint, such as ``"app.model."``; ``None``: found.
        group: the ranks that call this; ``None``: all.

    Returns:
        The files, the index last.

    Raises:
        ConfigError: an argument is wrong, or a checkpoint may mean several models.
        UnsupportedParameterError: a tensor cannot be stored.
        CheckpointError: weights are missing, the file system refused, or another rank failed.
            Then nothing new stands in ``out`` under a final name.
        CheckpointCorruptError: the checkpoint is not as it was written.
    """
    alone = not isinstance(source, nn.Module)
    return _export(
        _ranks(group, alone=alone),
        functools.partial(_open, source, optimizer, dtype, prefix),
        Path(out),
        functools.partial(parse_bytes, max_shard_bytes, "max_shard_bytes"),
        names,
        progress,
    )


def _export(
    ranks: _Ranks,
    open_source: Callable[[], _Source],
    out: Path,
    max_bytes: Callable[[], int],
    names: Names | None,
    progress: bool | None,
) -> tuple[Path, ...]:
    source, limit = ranks.together(lambda: (open_source(), max_bytes()))
    found = _union(ranks, source.found)
    files = ranks.together(lambda: plan_files(name_tensors(found, names), limit))
    entries = [entry for file in files for entry in file.entries]
    pieces = {e.name: source.pieces(e.fqn) if e.fqn in source.here else () for e in entries}
    mine = _owned(ranks, entries, pieces)
    output = _Output(out, files)
    todo = sum(p.box.numel * e.dtype.itemsize for e in entries if e.name in mine
               for p in pieces[e.name])  # fmt: skip
    try:
        with _bar(todo if ranks.first else 0, progress) as advance:
            ranks.together(output.create if ranks.first else lambda: None)
            for file in files:
                jobs = [
                    functools.partial(_copy_block, output.place(file, entry), piece, box, advance)
                    for entry in file.entries
                    if entry.name in mine
                    for piece in pieces[entry.name]
                    for box in split(piece.box, BLOCK_BYTES // entry.dtype.itemsize)
                ]
                ranks.together(functools.partial(output.write, file, jobs, source.threads))
            ranks.together(output.publish if ranks.first else lambda: None)
    except BaseException:
        if ranks.first:
            output.discard()
        raise
    return output.paths


# --------------------------------------------------------------------------- layout: pure


@dataclass(frozen=True)
class Found:
    """One tensor of a source. ``dtype`` is that of the file; ``tied``: the FQN of the tensor that
    it shares its memory with, if that comes first."""

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tied: str | None = None


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    fqn: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    other_names: tuple[str, ...] = ()
    """Of tied weights, which are not written again."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class File:
    """One file: its entries lie behind its header, in order and without gaps."""

    name: str
    entries: tuple[Entry, ...]

    @functools.cached_property
    def header(self) -> bytes:
        """Length (8 bytes, little-endian) and JSON, padded with spaces to a multiple of 8."""
        notes = {"format": "pt"}  # transformers refuses files without it
        notes.update((other, entry.name) for entry in self.entries for other in entry.other_names)
        table: dict[str, Any] = {"__metadata__": notes}
        for entry, start in zip(self.entries, self._starts, strict=True):
            table[entry.name] = {
                "dtype": _CODES[entry.dtype],
                "shape": entry.shape,
                "data_offsets": [start, start + entry.nbytes],
            }
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @functools.cached_property
    def offsets(self) -> dict[str, int]:
        """Where the elements of each entry begin in the file."""
        starts = zip(self.entries, self._starts, strict=True)
        return {entry.name: len(self.header) + start for entry, start in starts}

    @property
    def _starts(self) -> list[int]:
        return list(itertools.accumulate((e.nbytes for e in self.entries), initial=0))[:-1]

    @property
    def data_nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.header) + self.data_nbytes


def name_tensors(found: Sequence[Found], names: Names | None) -> list[Entry]:
    """What is written, and under which names.

    Raises:
        ConfigError: ``names`` has an unknown FQN, or one name for two tensors.
    """
    known = {each.fqn for each in found}
    listed = names if isinstance(names, Mapping) else {}
    if unknown := sorted(listed.keys() - known):
        raise ConfigError(
            f"names for {_some(unknown)}",
            reason="there are no such weights",
            remedy=f"use FQNs of the model, such as {_some(sorted(known))}",
        )
    others: dict[str, list[str]] = {}
    entries: dict[str, Entry] = {}
    for each in found:
        if each.tied is not None and each.fqn not in listed:
            others.setdefault(each.tied, []).append(each.fqn)
    for each in found:
        if each.tied is not None and each.fqn not in listed:
            continue
        name = names(each.fqn) if callable(names) else listed.get(each.fqn, each.fqn)
        if name is None:
            continue
        if name in entries or name == "__metadata__":
            raise ConfigError(
                f"the name {name!r} for {each.fqn}",
                reason=f"it stands for {entries[name].fqn}" if name in entries else "reserved",
                remedy="give every tensor a name of its own",
            )
        tied = tuple(others.get(each.fqn, ()))
        entries[name] = Entry(each.fqn, name, each.shape, each.dtype, tied)
    if not entries:
        raise ConfigError(
            "an export without tensors",
            reason="the model has none" if not found else "names leaves all of them out",
            remedy="pass a model with parameters, and names of them",
        )
    return list(entries.values())


def plan_files(entries: Sequence[Entry], max_bytes: int) -> tuple[File, ...]:
    """Cut the entries, in their order, into files of at most ``max_bytes`` of elements.

    A larger tensor gets a file of its own. In a file the widest dtypes come first, so that every
    tensor begins at a multiple of its element's size.
    """
    batches: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if batches[-1] and filled + entry.nbytes > max_bytes:
            batches.append([])
            filled = 0
        batches[-1].append(entry)
        filled += entry.nbytes
    count = len(batches)
    files = []
    for index, batch in enumerate(batches, 1):
        name = f"model-{index:05d}-of-{count:05d}" if count > 1 else "model"
        ordered = sorted(batch, key=lambda entry: -entry.dtype.itemsize)
        files.append(File(f"{name}.safetensors", tuple(ordered)))
    return tuple(files)


def index_of(files: Sequence[File]) -> bytes:
    """The index of several files, as transformers reads it."""
    content = {
        "metadata": {"total_size": sum(file.data_nbytes for file in files)},
        "weight_map": {entry.name: file.name for file in files for entry in file.entries},
    }
    return json.dumps(content, indent=2).encode() + b"\n"


def split(box: Box, max_numel: int) -> Iterator[Box]:
    """Parts of ``box`` of at most ``max_numel`` elements, in row-major order.

    Each is contiguous where the box is.
    """
    if box.numel <= max_numel:
        if box.numel:
            yield box
        return
    row_numel = math.prod(box.sizes[1:])
    first, rows = box.offsets[0], box.sizes[0]
    if row_numel <= max_numel:
        step = max_numel // row_numel
        for start in range(0, rows, step):
            count = min(step, rows - start)
            yield Box((first + start, *box.offsets[1:]), (count, *box.sizes[1:]))
        return
    for row in range(first, first + rows):
        for inner in split(Box(box.offsets[1:], box.sizes[1:]), max_numel):
            yield Box((row, *inner.offsets), (1, *inner.sizes))


def runs(shape: Sequence[int], box: Box) -> tuple[int, Iterator[int]]:
    """A box as stretches of the row-major tensor: elements of each, and where they begin."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    dim, numel = len(shape), 1
    while dim:
        dim -= 1
        numel *= box.sizes[dim]
        if box.sizes[dim] != shape[dim]:
            break
    base = sum(o * s for o, s in zip(box.offsets[dim:], strides[dim:], strict=True))
    outer = [
        range(offset * stride, (offset + size) * stride, stride)
        for offset, size, stride in zip(
            box.offsets[:dim], box.sizes[:dim], strides[:dim], strict=True
        )
    ]
    return numel, (base + sum(position) for position in itertools.product(*outer))


def fingerprint(shape: Sequence[int], boxes: Iterable[Box]) -> tuple[int, int]:
    """Number and sum of positions of the elements in ``boxes``, modulo a prime.

    Of disjoint boxes that cover the tensor, the sums equal that of the whole.
    """
    count = positions = 0
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for box in boxes:
        first = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
        extent = sum((n - 1) * s for n, s in zip(box.sizes, strides, strict=True))
        count += box.numel
        positions += box.numel * (2 * first + extent) // 2
    return count % _PRIME, positions % _PRIME


def file_dtype(stored: torch.dtype, wanted: torch.dtype | None, *, is_weight: bool) -> torch.dtype:
    """The dtype in the file of a tensor that is stored as ``stored``."""
    if wanted is None or not is_weight or stored not in _CONVERTED:
        return stored
    return wanted


def value(weight: Tensor, master: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A block as it is written: contiguous, on the CPU, of ``dtype``.

    Args:
        weight: of any shape, as stored.
        master: of the same shape: int16 remainder, or the whole master; ``None``: none.
        dtype: another than the weight's only where masters count.
    """
    weight = weight.cpu().contiguous()
    if master is None or dtype == weight.dtype:
        return weight.to(dtype)
    flat, master = weight.reshape(-1), master.cpu().contiguous().reshape(-1)
    if master.dtype == torch.int16:
        whole = torch.empty(flat.numel(), dtype=torch.float32, device="cpu")
        codec.decode(flat, master, whole)
    else:
        whole = _unless_overwritten(flat, master)
    return whole.to(dtype).view(weight.shape)


def _unless_overwritten(weight: Tensor, master: Tensor) -> Tensor:
    """``master``, but the weight where the two differ by more than rounding: it was written from
    outside, and the next step would take it over."""
    rounded = master.to(weight.dtype)
    same = rounded.view(torch.int16) == weight.view(torch.int16)
    if weight.dtype == torch.bfloat16:
        codec.round_to_value(master, rounded)  # ties differ from torch's
        same |= rounded.view(torch.int16) == weight.view(torch.int16)
    return torch.where(same, master, weight.to(master.dtype))


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:4]))
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# --------------------------------------------------------------------------- sources


class _Piece(Protocol):
    """A box of a tensor that this process can read."""

    @property
    def box(self) -> Box: ...

    def read(self, box: Box, dtype: torch.dtype) -> Tensor:
        """A part of :attr:`box`, as :func:`value` gives it."""
        ...


class _Source(Protocol):
    """Where weights come from."""

    found: Sequence[Found]
    threads: int
    """That may read at once."""

    @property
    def here(self) -> Collection[str]:
        """FQNs that this process knows of; pipeline stages know of others."""
        ...

    def pieces(self, fqn: str) -> Sequence[_Piece]:
        """What this process has of a tensor; empty boxes are left out."""
        ...


def _open(
    source: object,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    dtype: str | None,
    prefix: str | None,
) -> _Source:
    """Check the arguments and read the names.

    Raises:
        ConfigError: they do not fit together.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(
            f"dtype={dtype!r}", reason="unknown choice", remedy='use "bf16", "fp32" or None'
        )
    wanted = None if dtype is None else _DTYPES[dtype]
    if isinstance(source, nn.Module):
        if prefix is not None:
            raise ConfigError(
                f"prefix={prefix!r} with a model",
                reason="only keys of a checkpoint have one",
                remedy="leave it out; names= renames tensors",
            )
        return _Model(source, _optimizers_of(optimizer), wanted)
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"source of type {type(source).__name__}",
            reason="neither a torch.nn.Module nor the folder of a checkpoint",
            remedy="pass the model that is trained, or the path of its checkpoint",
        )
    if optimizer is not None:
        raise ConfigError(
            "optimizer= with a checkpoint",
            reason="masters are read from the checkpoint",
            remedy="leave it out",
        )
    return _Checkpoint(Path(source), wanted, prefix)


def _optimizers_of(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    for each in given:
        if not isinstance(each, Optimizer):
            raise ConfigError(
                f"optimizer of type {type(each).__name__}",
                reason="not a torch.optim.Optimizer",
                remedy="pass the optimizer of the model, or several",
            )
    return given


def _check_storable(fqn: str, dtype: torch.dtype) -> None:
    if dtype not in _CODES:
        raise UnsupportedParameterError(
            f"{fqn} of {dtype}",
            reason="safetensors has no such dtype",
            remedy="convert it, or leave it out with names=",
        )


# --------------------------------------------------------------------------- source: a model


@dataclass(frozen=True)
class _HeldPiece:
    """A part of a shard, with the same part of its master."""

    box: Box
    weight: Tensor
    master: Tensor | None

    def read(self, box: Box, dtype: torch.dtype) -> Tensor:
        """See :class:`_Piece`."""
        parts: list[Tensor | None] = []
        for tensor in (self.weight, self.master):
            if tensor is not None:
                for dim, start in enumerate(box.offsets):
                    tensor = tensor.narrow(dim, start - self.box.offsets[dim], box.sizes[dim])
            parts.append(tensor)
        weight, master = parts
        assert weight is not None
        return value(weight, master, dtype)


class _Model:
    """Weights that live in this process."""

    threads = MAX_THREADS

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], wanted: torch.dtype | None
    ) -> None:
        self._tensors = _tensors_of(model)
        self._masters = _masters_of(optimizers)
        found: list[Found] = []
        first: dict[int, str] = {}
        for fqn, tensor in self._tensors.items():
            is_weight = isinstance(tensor, nn.Parameter)
            dtype = file_dtype(tensor.dtype, wanted, is_weight=is_weight)
            _check_exportable(fqn, tensor, dtype)
            tied = first.setdefault(id(tensor), fqn)
            found.append(Found(fqn, tuple(tensor.shape), dtype, None if tied == fqn else tied))
        self.found: Sequence[Found] = found
        for device in {shards.local(tensor).device for tensor in self._tensors.values()}:
            # Other threads read, on streams of their own.
            gateway_for(device).current_stream().synchronize()

    @property
    def here(self) -> Collection[str]:
        """See :class:`_Source`."""
        return self._tensors.keys()

    def pieces(self, fqn: str) -> list[_HeldPiece]:
        """See :class:`_Source`."""
        tensor = self._tensors[fqn]
        shard = shards.local(tensor)
        master = self._masters.get(tensor)
        if master is not None:
            master = shards.local(master).reshape(shard.shape)
        ragged = shards.ragged_of(tensor)
        if ragged is None:
            box = _box_of(tensor)
            return [_HeldPiece(box, shard, master)] if box.numel else []
        flat = shard.reshape(-1)
        flat_master = None if master is None else master.reshape(-1)
        held, start = [], 0
        for box in ragged.boxes:
            stop = start + box.numel
            part = None if flat_master is None else flat_master[start:stop].view(box.sizes)
            held.append(_HeldPiece(box, flat[start:stop].view(box.sizes), part))
            start = stop
        return held


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by FQN, tied ones under every name; sharded."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    tensors: dict[str, Tensor] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or key.endswith("_extra_state"):
            continue
        for wrapper in _WRAPPERS:
            key = key.replace(wrapper, "")
        tensors[key] = tensor
    return tensors


def _masters_of(optimizers: Sequence[Optimizer]) -> dict[Tensor, Tensor]:
    """Remainders (int16) and whole masters by parameter, final."""
    masters: dict[Tensor, Tensor] = {}
    for optimizer in optimizers:
        if getattr(optimizer.__dict__.get("step"), "forwards_to_wrapper", False):
            optimizer.state_dict()  # the wrapper's: waits for its transfers
        for parameter, state in optimizer.state.items():
            for name in (REMAINDER, WHOLE):
                if isinstance(found := state.get(name), Tensor):
                    masters[parameter] = found
    return masters


def _check_exportable(fqn: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Refuse what has no elements of its own here.

    Raises:
        CheckpointError: on the meta device.
        UnsupportedParameterError: a sparse, partial or packed tensor, or an unknown dtype.
    """
    _check_storable(fqn, dtype)
    shard = shards.local(tensor)
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


def _box_of(tensor: Tensor) -> Box:
    """The box of this rank's shard, as ``torch.distributed.checkpoint`` is told it."""
    if not hasattr(tensor, "__create_chunk_list__"):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    chunks = tensor.__create_chunk_list__()
    assert len(chunks) == 1, chunks  # several are ragged
    return Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes))


# --------------------------------------------------------------------------- source: a checkpoint


@dataclass(frozen=True)
class _StoredPiece:
    """A chunk of a checkpoint."""

    box: Box
    reader: ChunkReader
    key: str
    master: str | None

    def read(self, box: Box, dtype: torch.dtype) -> Tensor:
        """See :class:`_Piece`."""
        weight = self.reader.read_box(self.key, box.offsets, box.sizes)
        master = None
        if self.master is not None and weight.dtype != dtype:
            master = self.reader.read_box(self.master, box.offsets, box.sizes)
        return value(weight, master, dtype)


class _Checkpoint:
    """Weights in files. Host memory: one chunk of a weight and one of its master."""

    threads = 1

    def __init__(self, path: Path, wanted: torch.dtype | None, prefix: str | None) -> None:
        metadata = read_metadata(path)
        tensors = {
            key: each
            for key, each in metadata.state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }
        paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
        self._keys = find_keys(
            tensors, metadata.state_dict_metadata.keys() - tensors.keys(), paths, prefix, path
        )
        if wanted == torch.float32 and self._keys.orphans and not self._keys.masters:
            raise CheckpointError(
                f"masters {_some(sorted(self._keys.orphans))} in {path}",
                reason="it is not told whose they are, so fp32 weights would not be exact",
                remedy="save optimizer state by FQN (get_optimizer_state_dict) beside one model, "
                'or export with dtype="bf16" or None',
            )
        self._tensors = {fqn: tensors[key] for fqn, key in self._keys.weights.items()}
        for fqn, each in self._tensors.items():
            _check_covered(path, fqn, each)
            if fqn in self._keys.masters:
                _check_covered(path, fqn, tensors[self._keys.masters[fqn]], each.size)
        tied = _tied_in(path, metadata, self._keys, self._tensors)
        masters = self._keys.masters
        self._masters = {fqn: key for fqn, key in masters.items() if wanted is not None}
        self._masters.update({f: masters[t] for f, t in tied.items() if t in self._masters})
        pairs = {self._keys.weights[fqn]: key for fqn, key in self._masters.items()}
        self._reader = ChunkReader(path, metadata, pairs)
        found = []
        for fqn, each in self._tensors.items():
            is_weight = not self._keys.trained or fqn in self._keys.trained or fqn in tied
            dtype = file_dtype(each.properties.dtype, wanted, is_weight=is_weight)
            _check_storable(fqn, dtype)
            found.append(Found(fqn, tuple(each.size), dtype, tied.get(fqn)))
        self.found: Sequence[Found] = found

    @property
    def here(self) -> Collection[str]:
        """See :class:`_Source`."""
        return self._tensors.keys()

    def pieces(self, fqn: str) -> list[_StoredPiece]:
        """See :class:`_Source`."""
        key, master = self._keys.weights[fqn], self._masters.get(fqn)
        boxes = _boxes_in(self._tensors[fqn])
        return [_StoredPiece(box, self._reader, key, master) for box in boxes]


def read_metadata(path: Path) -> Metadata:
    """What a checkpoint says of itself.

    Raises:
        CheckpointError: there is none.
        CheckpointCorruptError: it cannot be read.
    """
    if not (path / ".metadata").is_file():
        raise CheckpointError(
            f"{path}",
            reason="it has no .metadata: no checkpoint of torch.distributed.checkpoint, or one "
            "whose saving was interrupted",
            remedy="name the folder of a complete checkpoint",
        )
    try:
        return FileSystemReader(path).read_metadata()
    except (OSError, EOFError, ValueError, AttributeError, ImportError, IndexError) as error:
        raise corrupt(path / ".metadata", f"it cannot be read: {error}") from error
    except pickle.UnpicklingError as error:
        raise corrupt(path / ".metadata", f"it cannot be unpickled: {error}") from error


def _boxes_in(tensor: TensorStorageMetadata) -> list[Box]:
    """Boxes of the chunks that hold something, each once."""
    boxes = (Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks)
    return list(dict.fromkeys(box for box in boxes if box.numel))


def _check_covered(
    path: Path, fqn: str, tensor: TensorStorageMetadata, size: Sequence[int] | None = None
) -> None:
    if size is not None and tuple(tensor.size) != tuple(size):
        raise CheckpointError(
            f"master of {fqn} with shape {tuple(tensor.size)} in {path}",
            reason=f"the weight has shape {tuple(size)}: the two are of different models",
            remedy='export with dtype="bf16" or None, which need no masters',
        )
    if not covers(tensor.size, _boxes_in(tensor)):
        raise CheckpointError(
            f"{fqn} of shape {tuple(tensor.size)} in {path}",
            reason=f"its {len(tensor.chunks)} chunks do not cover it",
            remedy="export another checkpoint; this one was not saved by all ranks",
        )


class ChunkReader:
    """Reads boxes out of the files of ``torch.distributed.checkpoint``, a whole chunk at a time.

    Holds the last chunk of a tensor, and that of its partner, whose boxes are read in turn.

    Args:
        folder: of the checkpoint.
        metadata: of the checkpoint.
        partners: keys that are read side by side.
    """

    def __init__(self, folder: Path, metadata: Metadata, partners: Mapping[str, str]) -> None:
        self._folder, self._metadata = folder, metadata
        self._partners = {**partners, **{b: a for a, b in partners.items()}}
        self._held: dict[str, tuple[Box, Tensor]] = {}

    def read_box(self, key: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """A box of tensor ``key``, on the CPU; a view where one chunk has it all.

        Raises:
            CheckpointCorruptError: a file is missing, truncated or not as it was written.
        """
        wanted = Box(tuple(offsets), tuple(lengths))
        tensor = self._metadata.state_dict_metadata[key]
        assert isinstance(tensor, TensorStorageMetadata), key
        made: Tensor | None = None
        for box in _boxes_in(tensor):
            common = _intersection(wanted, box)
            if common is None:
                continue
            part = _part(self._chunk(key, box, tensor.properties.dtype), box, common)
            if common == wanted:
                return part
            if made is None:
                made = torch.empty(wanted.sizes, dtype=part.dtype, device="cpu")
            _part(made, wanted, common).copy_(part)
        assert made is not None, (key, wanted)  # chunks cover the tensor
        return made

    def _chunk(self, key: str, box: Box, dtype: torch.dtype) -> Tensor:
        held = self._held.get(key)
        if held is not None and held[0] == box:
            return held[1]
        del held
        partner = self._partners.get(key)
        self._held = {k: chunk for k, chunk in self._held.items() if k == partner}
        tensor = self._load(key, box)
        if tuple(tensor.shape) != box.sizes or tensor.dtype != dtype:
            raise corrupt(
                self._folder,
                f"a chunk of {key} has shape {tuple(tensor.shape)} of {tensor.dtype}, but its "
                f"metadata say {box.sizes} of {dtype}",
            )
        self._held[key] = box, tensor
        return tensor

    def _load(self, key: str, box: Box) -> Tensor:
        stored = self._metadata.storage_data.get(MetadataIndex(key, box.offsets))
        if stored is None:
            raise corrupt(self._folder, f"its metadata say of no file that has {key} {box}")
        path = self._folder / stored.relative_path
        if getattr(stored, "transform_descriptors", None):
            raise CheckpointError(
                f"{path}",
                reason=f"it is transformed by {stored.transform_descriptors}",
                remedy="save it again without extensions of the storage writer",
            )
        try:
            with path.open("rb") as file:
                view = io.BufferedReader(_Slice(file, stored.offset, stored.length))
                loaded = torch.load(view, map_location="cpu", weights_only=True)
        except FileNotFoundError as error:
            raise corrupt(path, "it is missing") from error
        except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            raise corrupt(path, f"{key} cannot be read from it: {error}") from error
        if not isinstance(loaded, Tensor):
            raise corrupt(path, f"in place of {key} it has a {type(loaded).__name__}")
        return loaded.detach()


class _Slice(io.RawIOBase):
    """Bytes ``[offset, offset + length)`` of a file, as a file."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")
        view = view[: max(0, self._length - self._position)]
        self._file.seek(self._offset + self._position)
        count = self._file.readinto(view)
        self._position += count
        return count


def _intersection(a: Box, b: Box) -> Box | None:
    """Elements in both, or ``None``."""
    starts = tuple(map(max, a.offsets, b.offsets))
    ends = tuple(
        min(ao + an, bo + bn)
        for ao, an, bo, bn in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(starts, sizes) if all(size > 0 for size in sizes) else None


def _part(tensor: Tensor, whole: Box, box: Box) -> Tensor:
    """``box`` of a tensor that holds ``whole``: a view."""
    for dim, start in enumerate(box.offsets):
        tensor = tensor.narrow(dim, start - whole.offsets[dim], box.sizes[dim])
    return tensor


def _tied_in(
    path: Path, metadata: Metadata, keys: Keys, tensors: Mapping[str, TensorStorageMetadata]
) -> dict[str, str]:
    """Names of tied weights: a checkpoint has their elements under every name.

    The optimizer has state under the first name only; so a matrix without state that equals one
    with state, in every bit, is taken for the same weight.
    """
    tied: dict[str, str] = {}
    for fqn, tensor in tensors.items():
        if not keys.trained or fqn in keys.trained or len(tensor.size) < 2:
            continue
        for first, other in tensors.items():
            if first not in keys.trained or (tensor.size, tensor.properties.dtype) != (
                other.size, other.properties.dtype
            ):  # fmt: skip
                continue
            pair = keys.weights[fqn], keys.weights[first]
            if _equal(ChunkReader(path, metadata, dict([pair])), *pair, _boxes_in(tensor)):
                _log.info("%s equals %s and is taken for the same weight", fqn, first)
                tied[fqn] = first
                break
    return tied


def _equal(reader: ChunkReader, a: str, b: str, boxes: Sequence[Box]) -> bool:
    """Whether two tensors of the same shape and dtype have the same bits."""
    for whole in boxes:
        for box in split(whole, BLOCK_BYTES // 4):
            one, other = (reader.read_box(key, box.offsets, box.sizes) for key in (a, b))
            if memory_of(one.contiguous()) != memory_of(other.contiguous()):
                return False
    return True


# --------------------------------------------------------------------------- keys of a checkpoint


@dataclass(frozen=True)
class Keys:
    """Which keys of a checkpoint are the model's."""

    weights: Mapping[str, str]
    """Key of every tensor of the model, by FQN."""

    masters: Mapping[str, str]
    """Key of the remainder or the whole master, by FQN."""

    trained: frozenset[str]
    """FQNs that the optimizer knows; empty if the checkpoint has no optimizer state."""

    orphans: frozenset[str] = frozenset()
    """Keys of masters that cannot be told to belong to any model."""


@dataclass(frozen=True)
class _State:
    """Keys ``{prefix}{fqn}.{kind}`` that look like state of an optimizer."""

    prefix: str
    keys: Mapping[str, tuple[str, str]]  # key -> (FQN, kind)

    @functools.cached_property
    def fqns(self) -> frozenset[str]:
        return frozenset(fqn for fqn, _ in self.keys.values())

    def models(self, tensors: Collection[str]) -> frozenset[str]:
        """Prefixes under which all its FQNs stand."""
        longest = max(self.fqns, key=len)
        found = (
            key[: -len(longest)] for key in tensors if key == longest or key.endswith("." + longest)
        )
        return frozenset(p for p in found if all(p + fqn in tensors for fqn in self.fqns))


def find_keys(
    tensors: Collection[str],
    others: Collection[str],
    paths: Mapping[str, Sequence[Any]],
    prefix: str | None,
    where: object,
) -> Keys:
    """Tell the keys of a checkpoint apart.

    Args:
        tensors: keys of tensors.
        others: keys of everything else.
        paths: of each key, where it stood in the nested dict that was saved, as far as known.
        prefix: of the model's keys, if the caller says.
        where: the checkpoint, for messages.

    Raises:
        ConfigError: several models are possible.
        CheckpointError: weights are missing.
    """
    if prefix and not prefix.endswith("."):
        prefix += "."
    states = _states_in(tensors, paths)
    models = {state.prefix: state.models(tensors) for state in states}
    states = [s for s in states if models[s.prefix] and not _inside(s, states, models)]
    if prefix is None:
        sets = [models[state.prefix] for state in states]
        if sets:
            candidates = frozenset.intersection(*sets) or frozenset.union(*sets)
        else:
            candidates = _usual_prefixes(tensors, paths)
        prefix = _only(candidates, where)
    states = [state for state in states if prefix in models[state.prefix]]
    state_keys = {key for state in states for key in state.keys}
    weights = {
        key[len(prefix) :]: key
        for key in tensors
        if key.startswith(prefix)
        and key not in state_keys
        and not key.endswith("_extra_state")
        and (prefix or len(paths.get(key, ("",))) == 1)
    }
    _check_complete(weights, states, _states_in(tensors, paths), prefix, where)
    masters = [s for s in states if _owner(models[s.prefix]) == prefix]
    known = {key for s in states if _owner(models[s.prefix]) is not None for key in s.keys}
    orphans = {
        key for key in tensors if key.endswith((f".{REMAINDER}", f".{WHOLE}")) and key not in known
    } - set(weights.values())
    return Keys(
        weights,
        _master_keys(masters, where),
        _trained(states, others) & weights.keys(),
        frozenset(orphans),
    )


def _owner(candidates: Collection[str]) -> str | None:
    """Which of the models an optimizer updates that has the FQNs of all of them (of EMA copies)."""
    named = [each for each in candidates if each.split(".")[-2:-1] == ["model"]]
    found = named if len(named) == 1 else candidates
    return next(iter(found)) if len(found) == 1 else None


def _trained(states: Sequence[_State], others: Collection[str]) -> frozenset[str]:
    """FQNs that optimizers have state or, in a flat state dict, group values of."""
    groups = tuple(state.prefix.removesuffix("state.") + "param_groups." for state in states)
    listed = {
        key.removeprefix(group).rpartition(".")[0]
        for group in groups
        for key in others
        if key.startswith(group)
    }
    return frozenset(listed.union(*(state.fqns for state in states)))


def _states_in(tensors: Collection[str], paths: Mapping[str, Sequence[Any]]) -> list[_State]:
    """Everything that may be state of an optimizer, shortest prefix first."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for key in tensors:
        for start in _state_prefixes(key, paths.get(key)):
            fqn, _, kind = key[len(start) :].rpartition(".")
            if fqn:
                found.setdefault(start, {})[key] = fqn, kind
    return [_State(start, found[start]) for start in sorted(found, key=len)]


def _state_prefixes(key: str, path: Sequence[Any] | None) -> list[str]:
    """Beginnings of ``key`` that end with the component ``state``."""
    if path is None:
        return [key[: match.end()] for match in re.finditer(r"(?:^|(?<=\.))state\.", key)]
    starts, at = [], 0
    for part in map(str, path):  # FQNs have dots, and stand in one part
        if part == "state" or part.startswith("state."):
            starts.append(key[: at + len("state.")])
        at += len(part) + 1
    return starts


def _inside(state: _State, states: Sequence[_State], models: Mapping[str, frozenset[str]]) -> bool:
    """Whether these are keys of another optimizer, or of a module that is called ``state``."""
    for other in states:
        if other is not state and models[other.prefix]:
            if state.prefix.startswith(other.prefix):
                return True
            if any(model and state.prefix.startswith(model) for model in models[other.prefix]):
                return True
    return False


def _usual_prefixes(tensors: Collection[str], paths: Mapping[str, Sequence[Any]]) -> frozenset[str]:
    """Prefixes that a model may have where no optimizer tells."""
    if all(key in paths for key in tensors):
        found = {key[: len(key) - len(str(paths[key][-1]))] for key in tensors}
        named = {each for each in found if each.split(".")[-2:-1] == ["model"]}
        return frozenset(named if len(named) == 1 else found)
    under_model = {key.startswith("model.") for key in tensors}
    return frozenset("model." if each else "" for each in under_model)


def _only(candidates: Collection[str], where: object) -> str:
    if len(candidates) == 1:
        return next(iter(candidates))
    raise ConfigError(
        f"{where} with tensors under the prefixes {_some(sorted(candidates))}"
        if candidates
        else f"{where} without tensors",
        reason="each may be the model" if candidates else "there are no weights to export",
        remedy="say which one with prefix=" if candidates else "name the checkpoint of a model",
    )


def _check_complete(
    weights: Mapping[str, str],
    states: Sequence[_State],
    possible: Sequence[_State],
    prefix: str,
    where: object,
) -> None:
    if not weights:
        raise CheckpointError(
            f"{where} under prefix {prefix!r}",
            reason="weights are missing: no tensor has such a key",
            remedy="leave prefix= out, or name the beginning of the model's keys",
        )
    if states:
        return
    for state in possible:
        missing = sorted(state.fqns - weights.keys())
        if missing and len(missing) < len(state.fqns):
            raise CheckpointError(
                f"{where} under prefix {prefix!r}",
                reason=f"there is optimizer state ({state.prefix}...) of {_some(missing)}, but "
                "their weights are missing",
                remedy="save model and optimizer together, or name the model's keys with prefix=",
            )


def _master_keys(states: Sequence[_State], where: object) -> dict[str, str]:
    masters: dict[str, str] = {}
    for state in states:
        for key, (fqn, kind) in state.keys.items():
            if kind not in (REMAINDER, WHOLE):
                continue
            if fqn in masters:
                raise ConfigError(
                    f"{where} with masters {masters[fqn]!r} and {key!r}",
                    reason=f"each may be that of {fqn}",
                    remedy="save one optimizer per parameter, and export again",
                )
            masters[fqn] = key
    return masters


# --------------------------------------------------------------------------- files


@dataclass(frozen=True)
class _Place:
    """Where an entry lies: the descriptor is known when its file is open."""

    path: Path
    entry: Entry
    offset: int


class _Output:
    """The files of an export, temporary until :meth:`publish`."""

    def __init__(self, folder: Path, files: Sequence[File]) -> None:
        self._folder, self._files = folder, files
        self._index = folder / INDEX if len(files) > 1 else None
        self._made: dict[Path, tuple[int, int]] = {}
        paths = [folder / file.name for file in files]
        self.paths = (*paths, self._index) if self._index else tuple(paths)

    def create(self) -> None:
        """First rank: make the temporary files, of full size, with their headers.

        Raises:
            CheckpointError: the folder is a file, or the file system refused.
        """
        if self._folder.exists() and not self._folder.is_dir():
            raise CheckpointError(
                f"{self._folder}",
                reason="it is a file, and a folder is needed",
                remedy="name a folder, which may not exist yet",
            )
        with _refusals(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            for file in self._files:
                self._make(file.name, file.header, file.nbytes)
            if self._index:
                content = index_of(self._files)
                self._make(INDEX, content, len(content))

    def _make(self, name: str, begin: bytes, nbytes: int) -> None:
        path = self._temporary(name)
        path.unlink(missing_ok=True)  # of an export that was killed
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            found = os.fstat(descriptor)
            self._made[path] = found.st_dev, found.st_ino
            os.ftruncate(descriptor, nbytes)
            write_bytes(descriptor, 0, begin, path)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def place(self, file: File, entry: Entry) -> _Place:
        """Where ``entry`` is written."""
        return _Place(self._temporary(file.name), entry, file.offsets[entry.name])

    def write(self, file: File, jobs: Sequence[Callable[[int], None]], threads: int) -> None:
        """Run ``jobs``, which get the descriptor of the open file, and make it permanent.

        Raises:
            CheckpointError: this rank does not see the file, or the file system refused.
        """
        if not jobs:
            return
        path = self._temporary(file.name)
        try:
            descriptor = os.open(path, os.O_WRONLY)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path}",
                reason="the first rank made it, but this one does not see it",
                remedy="export to a folder that all ranks share",
            ) from error
        try:
            bound = (functools.partial(job, descriptor) for job in jobs)
            run_all(bound, threads=min(threads, thread_count()))
            with _refusals(path):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def publish(self) -> None:
        """First rank, when all files are complete: give them their names, remove an earlier export.

        The index goes first and comes last, so that at no time it names files of two exports.

        Raises:
            CheckpointError: the file system refused, or another export wrote to the folder.
        """
        self._check_ours()
        named: list[Path] = []
        with _refusals(self._folder):
            try:
                if self._index:
                    self._index.unlink(missing_ok=True)
                for file in self._files:
                    self._temporary(file.name).rename(self._folder / file.name)
                    named.append(self._folder / file.name)
                for path in self._folder.iterdir():
                    if path not in self.paths and (_OUR_FILES.fullmatch(path.name)
                                                   or path.name == INDEX):  # fmt: skip
                        path.unlink()
                if self._index:
                    self._temporary(INDEX).rename(self._index)
            except OSError:
                for path in named:
                    path.unlink(missing_ok=True)
                raise
            fsync_folder(self._folder)

    def discard(self) -> None:
        """Remove temporary files. Never raises: an error is on its way."""
        for path in self._made:
            with suppress(OSError, CheckpointError):
                self._check_ours([path])
                path.unlink()

    def _check_ours(self, paths: Iterable[Path] | None = None) -> None:
        for path in self._made if paths is None else paths:
            try:
                found = path.stat()
                ours = (found.st_dev, found.st_ino) == self._made[path]
            except OSError:
                ours = False
            if not ours:
                raise CheckpointError(
                    f"{path}",
                    reason="it is not the file that was made: another export writes to this folder",
                    remedy="export a checkpoint from one process only, into a folder of its own",
                )

    def _temporary(self, name: str) -> Path:
        return self._folder / (name + _TEMPORARY)


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Errors of the file system, typed."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path}",
            reason=f"the file system refused: {error.strerror}",
            remedy="free space, or choose a folder that this process may write to",
        ) from error


def _copy_block(
    place: _Place, piece: _Piece, box: Box, advance: Callable[[int], None], descriptor: int
) -> None:
    """Read a box and write it to its byte ranges."""
    entry = place.entry
    block = piece.read(box, entry.dtype)
    memory = memory_of(block)
    numel, starts = runs(entry.shape, box)
    nbytes = numel * entry.dtype.itemsize
    for index, start in enumerate(starts):
        data = memory[index * nbytes : (index + 1) * nbytes]
        write_bytes(descriptor, place.offset + start * entry.dtype.itemsize, data, place.path)
    advance(len(memory))


@contextmanager
def _bar(nbytes: int, progress: bool | None) -> Iterator[Callable[[int], None]]:
    """A progress bar over ``nbytes``, or nothing; called by several threads."""
    shown = sys.stderr.isatty() if progress is None else progress
    if not nbytes or not shown:
        yield lambda _: None
        return
    from tqdm import tqdm

    lock = threading.Lock()
    with tqdm(total=nbytes, unit="B", unit_scale=True, unit_divisor=1024, desc="exporting") as bar:

        def advance(count: int) -> None:
            with lock:
                bar.update(count)

        yield advance


# --------------------------------------------------------------------------- ranks


class _Ranks:
    """The ranks that export together; one process alone has no group."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        self._group, self.rank, self.size = group, rank, size

    @property
    def first(self) -> bool:
        """Whether this is the rank that makes and names the files."""
        return self.rank == 0

    def together(self, action: Callable[[], _Result]) -> _Result:
        """``action()`` on every rank; if it raises anywhere, all ranks raise."""
        if self.size == 1:
            return action()
        error: Exception | None = None
        result: list[_Result] = []
        try:
            result.append(action())
        except Exception as raised:
            error = raised
        for rank, told in enumerate(self.gather_objects(_portable(error))):
            if error is not None:
                raise error
            if told is not None:
                raise type(told)(
                    f"rank {rank}: {told.what}", reason=told.reason, remedy=told.remedy
                )
        return result[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """What every rank has."""
        found: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(found, value, group=self._group)
        return found

    def gather(self, value: Tensor) -> Tensor:
        """int64 CPU tensors of one shape, stacked: (size, ...)."""
        found = [torch.empty_like(value) for _ in range(self.size)] if self.size > 1 else [value]
        if self.size > 1:
            dist.all_gather(found, value, group=self._group)
        return torch.stack(found)

    def total(self, value: Tensor) -> Tensor:
        """The sum of int64 CPU tensors of one shape."""
        if self.size > 1:
            dist.all_reduce(value, group=self._group)
        return value

    def tell(self, value: Any, rank: int) -> Any:
        """What ``rank`` has."""
        told = [value]
        dist.broadcast_object_list(told, group=self._group, group_src=rank)
        return told[0]


def _portable(error: Exception | None) -> OffloadError | None:
    if error is None or isinstance(error, OffloadError):
        return error
    return CheckpointError(
        f"{type(error).__name__}: {error}", reason="this rank failed", remedy="see its traceback"
    )


_host_groups: weakref.WeakKeyDictionary[object, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def _ranks(group: dist.ProcessGroup | None, *, alone: bool) -> _Ranks:
    """The ranks of ``group``, with collectives on host tensors.

    Raises:
        ConfigError: a group of some ranks has no backend for them; on all of its ranks.
    """
    if alone or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return _Ranks(None, 0, 1)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if "cpu:" in dist.get_backend_config(group):
        return _Ranks(group, rank, size)
    if group is not None and group is not dist.group.WORLD:
        raise ConfigError(
            f"a group with backend {dist.get_backend_config(group)}",
            reason="ranks agree by way of host memory, and only all ranks can make a group for it",
            remedy='make one of the same ranks with new_group(ranks, backend="gloo"), and pass it',
        )
    world: object = dist.group.WORLD
    if world not in _host_groups:  # kept: one that is made again may meet the last one's addresses
        _host_groups[world] = dist.new_group(backend="gloo")
    return _Ranks(_host_groups[world], rank, size)


def _union(ranks: _Ranks, found: Sequence[Found]) -> list[Found]:
    """The tensors of all ranks, the same on all of them; pipeline stages have different ones.

    Raises:
        CheckpointError: two ranks have different tensors of one FQN.
    """
    digest = hashlib.sha256(repr(list(found)).encode()).hexdigest()
    digests = ranks.gather_objects(digest)
    union: dict[str, Found] = {}
    for rank in sorted({digests.index(each) for each in digests}):
        for each in found if ranks.size == 1 else ranks.tell(list(found), rank):
            if union.setdefault(each.fqn, each) != each:
                raise CheckpointError(
                    f"{each.fqn}: {each} on rank {rank}",
                    reason=f"other ranks have {union[each.fqn]}",
                    remedy="give tensors of different pipeline stages different names",
                )
    return list(union.values())


def _owned(
    ranks: _Ranks, entries: Sequence[Entry], pieces: Mapping[str, Sequence[_Piece]]
) -> set[str]:
    """Names of entries whose pieces this rank writes: of ranks with the same boxes, the first.

    Raises:
        CheckpointError: what is written does not cover a tensor; on all ranks.
    """
    mine: set[str] = set()
    uncovered: list[str] = []
    for start in range(0, len(entries), _BATCH):
        batch = entries[start : start + _BATCH]
        boxes = [[piece.box for piece in pieces[entry.name]] for entry in batch]
        held = torch.tensor([_hash(each) for each in boxes], device="cpu")
        earlier = ranks.gather(held)[: ranks.rank]
        writes = (held != 0) & ~(earlier == held).any(0)
        sums = [fingerprint(e.shape, b) for e, b in zip(batch, boxes, strict=True)]
        written = ranks.total(torch.tensor(sums, device="cpu") * writes[:, None]) % _PRIME
        for entry, own, total in zip(batch, writes.tolist(), written.tolist(), strict=True):
            whole = Box((0,) * len(entry.shape), entry.shape)
            if own:
                mine.add(entry.name)
            if tuple(total) != fingerprint(entry.shape, [whole] if whole.numel else []):
                uncovered.append(entry.fqn)
    if uncovered:
        raise CheckpointError(
            f"{_some(uncovered)}",
            reason=f"the shards of {ranks.size} rank(s) do not cover it exactly once",
            remedy="call export_safetensors on all ranks that hold a part of the model",
        )
    return mine


def _hash(boxes: Sequence[Box]) -> int:
    """64 bits, not 0, that tell lists of boxes apart; 0 for none."""
    if not boxes:
        return 0
    digest = hashlib.sha256(repr(boxes).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True) or 1
