"""Safetensors files: where each tensor stands in them, and a folder that gets them all at once."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from ..core.chunks import Box
from ..core.errors import CheckpointError, ConfigError
from .files import create, fsync_folder, write_bytes
from .folder import remove

INDEX: Final = "model.safetensors.index.json"
ASIDE: Final = ".export.writing"
"""Where files stand until all are complete: within the folder, which may be a mount point."""
CODES: Final = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.uint16: "U16", torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64",
    torch.uint64: "U64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip

_OUR_FILES: Final = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")

Names = Mapping[str, str] | Callable[[str], str | None]


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Args:
        fqn: in the model.
        shape: of the whole tensor.
        dtype: in the file.
        tied: FQN of the tensor that it shares its memory with, if that comes first.
        name: in the file.
        other_names: of tensors tied to it, which are not written.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tied: str | None = None
    name: str = ""
    other_names: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of all elements."""
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
        for entry, start in zip(self.entries, self._starts, strict=False):
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
        """Where the elements of each entry begin in the file, by FQN."""
        starts = zip(self.entries, self._starts, strict=False)
        return {entry.fqn: len(self.header) + start for entry, start in starts}

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return len(self.header) + self._starts[-1]

    @functools.cached_property
    def _starts(self) -> list[int]:
        """Of each entry behind the header, and the end of the last one."""
        return list(itertools.accumulate((e.nbytes for e in self.entries), initial=0))


def plan_files(found: Sequence[Entry], names: Names | None, max_bytes: int) -> tuple[File, ...]:
    """Name the tensors, and cut them, in their order, into files of at most ``max_bytes``.

    A larger tensor gets a file of its own. In a file the widest dtypes come first, so that every
    tensor begins at a multiple of its element's size.

    Raises:
        ConfigError: ``names`` has an unknown FQN, or one name for two tensors.
    """
    batches: list[list[Entry]] = [[]]
    filled = 0
    for entry in _named(found, names):
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


def _named(found: Sequence[Entry], names: Names | None) -> list[Entry]:
    listed = names if isinstance(names, Mapping) else {}
    if unknown := sorted(listed.keys() - {entry.fqn for entry in found}):
        raise ConfigError(
            f"names for {unknown[:4]}",
            reason="there are no such weights",
            remedy=f"use FQNs of the model, such as {[entry.fqn for entry in found][:4]}",
        )
    entries: dict[str, Entry] = {}
    left_out = {e.fqn: e.tied for e in found if e.tied is not None and e.fqn not in listed}
    for entry in found:
        name = names(entry.fqn) if callable(names) else listed.get(entry.fqn, entry.fqn)
        if name is None or entry.fqn in left_out:
            continue
        if name in entries or name == "__metadata__":
            raise ConfigError(
                f"the name {name!r} for {entry.fqn}",
                reason=f"it stands for {entries[name].fqn}" if name in entries else "reserved",
                remedy="give every tensor a name of its own",
            )
        others = tuple(fqn for fqn, tied in left_out.items() if tied == entry.fqn)
        entries[name] = replace(entry, name=name, other_names=others)
    if not entries:
        raise ConfigError(
            "an export without tensors",
            reason="the model has none, or names leaves all of them out",
            remedy="pass a model with parameters, and names of them",
        )
    return list(entries.values())


def names_of(files: Sequence[File]) -> list[str]:
    """Of all files of an export, the index last; one file alone has none."""
    return [file.name for file in files] + ([INDEX] if len(files) > 1 else [])


def create_files(folder: Path, files: Sequence[File]) -> None:
    """Make the files of an export, of full size and with their headers, in ``ASIDE``.

    Raises:
        CheckpointError: the folder is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(
            f"{folder}",
            reason="it is a file, and a folder is needed",
            remedy="name a folder, which may not exist yet",
        )
    made = folder / ASIDE
    remove(made)  # of an export that was killed
    made.mkdir(parents=True)
    weights = {entry.name: file.name for file in files for entry in file.entries}
    total = sum(file.nbytes - len(file.header) for file in files)
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    contents = [(file.header, file.nbytes) for file in files]
    contents.append((json.dumps(index, indent=2).encode() + b"\n", 0))
    for name, (begin, nbytes) in zip(names_of(files), contents, strict=False):
        descriptor = create(made / name)
        try:
            os.ftruncate(descriptor, nbytes)
            write_bytes(descriptor, 0, begin, made / name)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def publish_files(folder: Path, files: Sequence[File]) -> None:
    """Give complete files their places in ``folder``, and remove an earlier export there.

    The index goes first and comes last, so that at no time it names files of two exports.
    """
    made = folder / ASIDE
    (folder / INDEX).unlink(missing_ok=True)
    for path in folder.iterdir():
        if _OUR_FILES.fullmatch(path.name):
            path.unlink()
    try:
        for name in names_of(files):
            (made / name).rename(folder / name)
    except OSError:
        for name in names_of(files):  # rather no export than half of one
            (folder / name).unlink(missing_ok=True)
        raise
    made.rmdir()
    fsync_folder(folder)


def split(box: Box, max_numel: int) -> Iterator[Box]:
    """Ranges of rows of ``box`` of at most ``max_numel`` elements, or of one row."""
    if not box.numel:
        return
    if not box.sizes:
        yield box
        return
    step = max(1, max_numel // math.prod(box.sizes[1:]))
    for start in range(0, box.sizes[0], step):
        count = min(step, box.sizes[0] - start)
        offsets = (box.offsets[0] + start, *box.offsets[1:])
        yield Box(offsets, (count, *box.sizes[1:]))


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
