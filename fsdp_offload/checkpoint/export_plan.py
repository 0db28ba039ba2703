"""The plan of an export: which tensor stands where in which file. Pure, no element is read."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from ..chunks import Box, covers
from ..errors import CheckpointError, ConfigError, UnsupportedParameterError

INDEX: Final = "model.safetensors.index.json"
CODES: Final = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.uint16: "U16", torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64",
    torch.uint64: "U64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip

_CONVERTED: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Other floating dtypes are quantised: without their scales a conversion makes no sense."""

Names = Mapping[str, str] | Callable[[str], str | None]


@dataclass(frozen=True)
class Found:
    """One tensor, as one process knows it.

    Args:
        fqn: of the model.
        shape: of the whole tensor.
        dtype: of the file.
        tied: FQN of the tensor that it shares its memory with, if that comes first.
        boxes: what this process can read; none is empty.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tied: str | None = None
    boxes: tuple[Box, ...] = ()


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
                "dtype": CODES[entry.dtype],
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


@dataclass(frozen=True)
class Share:
    """What one rank writes of one tensor.

    Args:
        file: name of the file.
        offset: of the tensor's first element in it, in bytes.
        entry: the tensor.
        boxes: those that this rank writes.
    """

    file: str
    offset: int
    entry: Entry
    boxes: tuple[Box, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that this rank writes."""
        return sum(box.numel for box in self.boxes) * self.entry.dtype.itemsize


def plan_export(
    found: Sequence[Sequence[Found]], names: Names | None, max_bytes: int
) -> tuple[tuple[File, ...], list[list[Share]]]:
    """The files, and by rank what it writes: of ranks that hold the same box, the first.

    Args:
        found: by rank, what it has; pipeline stages have different tensors.
        names: see ``export_safetensors``.
        max_bytes: of one file's elements.

    Raises:
        ConfigError: ``names`` are wrong.
        CheckpointError: ranks have different tensors of one FQN, or do not cover one.
    """
    union: dict[str, Found] = {}
    writers: dict[str, dict[Box, int]] = {}
    for rank, each in enumerate(found):
        for tensor in each:
            known = union.setdefault(tensor.fqn, tensor)
            if replace(known, boxes=tensor.boxes) != tensor:
                raise CheckpointError(
                    f"{tensor.fqn} of shape {tensor.shape}, {tensor.dtype} on rank {rank}",
                    reason=f"other ranks have shape {known.shape}, {known.dtype}",
                    remedy="give tensors of different pipeline stages different names",
                )
            for box in tensor.boxes:
                writers.setdefault(tensor.fqn, {}).setdefault(box, rank)
    files = plan_files(name_tensors(list(union.values()), names), max_bytes)
    shares: list[list[Share]] = [[] for _ in found]
    for file in files:
        for entry in file.entries:
            by_box = writers.get(entry.fqn, {})
            if not covers(entry.shape, by_box):
                raise CheckpointError(
                    f"{entry.fqn!r} of shape {entry.shape}",
                    reason=f"the shards of {len(found)} rank(s) do not cover it",
                    remedy="call export_safetensors on all ranks that hold a part of the model",
                )
            for rank in sorted(set(by_box.values())):
                mine = tuple(box for box, writer in by_box.items() if writer == rank)
                shares[rank].append(Share(file.name, file.offsets[entry.name], entry, mine))
    return files, shares


def name_tensors(found: Sequence[Found], names: Names | None) -> list[Entry]:
    """What is written, and under which names.

    Raises:
        ConfigError: ``names`` has an unknown FQN, or one name for two tensors.
    """
    known = {each.fqn for each in found}
    listed = names if isinstance(names, Mapping) else {}
    if unknown := sorted(listed.keys() - known):
        raise ConfigError(
            f"names for {some(unknown)}",
            reason="there are no such weights",
            remedy=f"use FQNs of the model, such as {some(sorted(known))}",
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


def file_dtype(
    fqn: str, stored: torch.dtype, wanted: torch.dtype | None, *, is_weight: bool
) -> torch.dtype:
    """The dtype in the file of a tensor that is stored as ``stored``.

    Raises:
        UnsupportedParameterError: safetensors has no such dtype.
    """
    if stored not in CODES:
        raise UnsupportedParameterError(
            f"{fqn} of {stored}",
            reason="safetensors has no such dtype",
            remedy="convert it, or leave it out of the model",
        )
    if wanted is None or not is_weight or stored not in _CONVERTED:
        return stored
    return wanted


def some(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    shown = ", ".join(map(repr, names[:4]))
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
