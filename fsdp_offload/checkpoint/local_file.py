"""One rank's file of a local snapshot: valid safetensors, in blocks that are checked.

[Note: header]
``__metadata__`` holds the table (JSON), the CRC-32 of every block of every tensor, and the CRC-32
of the header itself with that field zeroed. Its length does not depend on checksums, so data goes
first and the header last. It is padded so that the first tensor starts at a whole page.
"""

from __future__ import annotations

import functools
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ..device import Gateway
from ..errors import CheckpointCorruptError, CheckpointError
from ..plan.layout import align
from . import blocks

FORMAT_VERSION: Final = 1
PAGE_BYTES: Final = 4096
MAX_HEADER_BYTES: Final = 100_000_000
"""What safetensors itself accepts."""

_CRC_AT: Final = b'{"__metadata__":{"header_crc32":"'
_NO_CRC: Final = "00000000"
_CODES: Final = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""dtypes that safetensors names; others are stored as bytes."""

Table = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: what is written from, and read into."""

    name: str
    tensor: Tensor  # dense and contiguous, on any device
    origin: Tensor | None = None  # a tensor that is not, and gets its values from there

    @property
    def n_bytes(self) -> int:
        """Bytes of all elements."""
        return self.tensor.numel() * self.tensor.itemsize


def missing(path: Path) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{path}",
        reason="this rank's file is missing: the save was interrupted, or files were removed",
        remedy="bring the file back, or load another checkpoint",
    )


@dataclass(frozen=True)
class Contents:
    """What is about to be written."""

    entries: list[Entry]
    table: Table


@dataclass(frozen=True)
class RankFile:
    """A file whose header is as it was written."""

    path: Path
    ranges: dict[str, tuple[int, int]]  # of each tensor in the file: bytes [start, stop)
    crcs: dict[str, str]  # of each tensor: 8 hex digits per block
    block_bytes: int
    table: Table


def make_header(contents: Contents, save_id: str, crcs: Mapping[str, str]) -> bytes:
    """The safetensors header with its length, padded to whole pages.

    ``crcs`` has 8 hex digits per block, so its length does not depend on their values.
    """
    tensors: Table = {}
    start = 0
    for entry in contents.entries:
        code = _CODES.get(entry.tensor.dtype)
        shape = list(entry.tensor.shape) if code else [entry.n_bytes]
        stop = start + entry.n_bytes
        tensors[entry.name] = {"dtype": code or "U8", "shape": shape, "data_offsets": [start, stop]}
        start = stop
    metadata = {
        "header_crc32": _NO_CRC,
        "format_version": str(FORMAT_VERSION),
        "save_id": save_id,
        "block_bytes": str(blocks.BLOCK_BYTES),
        "crc32": json.dumps(crcs),
        "table": json.dumps(contents.table),
    }
    text = json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()
    text = text.ljust(align(len(text) + 8, PAGE_BYTES) - 8)
    crc = f"{zlib.crc32(text):08x}".encode()
    text = text[: len(_CRC_AT)] + crc + text[len(_CRC_AT) + len(crc) :]
    return len(text).to_bytes(8, "little") + text


def block_ranges(n_bytes: int, block_bytes: int) -> list[tuple[int, int]]:
    """Bytes ``[start, stop)`` of each block of a tensor."""
    starts = range(0, n_bytes, block_bytes)
    return [(start, min(start + block_bytes, n_bytes)) for start in starts]


def write_file(path: Path, contents: Contents, save_id: str) -> None:
    """Write aside, flush, rename. The caller removes the folder if that fails.

    Raises:
        CheckpointError: the file system refused.
    """
    aside = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _write(descriptor, aside, contents, save_id)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        aside.rename(path)
        for folder in (path.parent, path.parent.parent):
            _flush_folder(folder)
    except OSError as error:
        raise CheckpointError(
            f"{path}",
            reason=f"it could not be written: {error.strerror}",
            remedy="free space or choose another folder, and save again",
        ) from error


def _write(descriptor: int, path: Path, contents: Contents, save_id: str) -> None:
    sizes = {e.name: block_ranges(e.n_bytes, blocks.BLOCK_BYTES) for e in contents.entries}
    blank = {name: _NO_CRC * len(ranges) for name, ranges in sizes.items()}
    position = len(make_header(contents, save_id, blank))
    jobs: list[Callable[[], int]] = []
    for entry in contents.entries:
        source = blocks.as_bytes(entry.tensor)
        for start, stop in sizes[entry.name]:
            block = source[start:stop]
            jobs.append(
                functools.partial(blocks.write_block, descriptor, position + start, block, path)
            )
        position += entry.n_bytes
    found = iter(blocks.run_all(jobs))
    crcs = {n: "".join(f"{next(found):08x}" for _ in ranges) for n, ranges in sizes.items()}
    blocks.write_bytes(descriptor, 0, make_header(contents, save_id, crcs), path)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_header(path: Path) -> RankFile:
    """The table of a file, verified: header checksum, id, size.

    Raises:
        CheckpointCorruptError: it is not as it was written, or of another save.
        CheckpointError: the file system refused, or a newer version of this package wrote it.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= min(size, MAX_HEADER_BYTES) else b""
    except FileNotFoundError:
        raise missing(path) from None
    except OSError as error:
        raise CheckpointError(
            f"{path}",
            reason=f"it could not be read: {error.strerror}",
            remedy="check the file system, and load again",
        ) from error
    at = len(_CRC_AT)
    blank = text[:at] + _NO_CRC.encode() + text[at + 8 :]
    if text[:at] != _CRC_AT or text[at : at + 8] != f"{zlib.crc32(blank):08x}".encode():
        raise blocks.corrupt(path, "its header is damaged")
    header = json.loads(text)
    metadata = header.pop("__metadata__")
    if int(metadata["format_version"]) != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} of format version {metadata['format_version']}",
            reason=f"this package reads version {FORMAT_VERSION}",
            remedy="load it with the version of the package that saved it",
        )
    if metadata["save_id"] != path.parent.name:
        raise blocks.corrupt(path, f"it belongs to save {metadata['save_id']}")
    first = 8 + length
    ranges = {
        name: (first + tensor["data_offsets"][0], first + tensor["data_offsets"][1])
        for name, tensor in header.items()
    }
    expected = max(stop for _, stop in ranges.values())
    if size != expected:
        raise blocks.corrupt(path, f"it has {size} bytes, but {expected} were written")
    crcs, table = json.loads(metadata["crc32"]), json.loads(metadata["table"])
    return RankFile(path, ranges, crcs, int(metadata["block_bytes"]), table)


def read_entries(file: RankFile, entries: Sequence[Entry], gateway: Gateway | None) -> None:
    """Fill the entries' memory from the file, by several threads.

    Raises:
        CheckpointCorruptError: a checksum differs, or the file ends early.
        CheckpointError: the file system refused.
    """
    try:
        descriptor = os.open(file.path, os.O_RDONLY)
    except OSError as error:
        raise blocks.corrupt(file.path, f"it cannot be opened: {error.strerror}") from error
    try:
        jobs: list[Callable[[], None]] = []
        for entry in entries:
            first, end = file.ranges[entry.name]
            assert end - first == entry.n_bytes, (entry.name, end - first, entry.n_bytes)
            memory, crcs = blocks.as_bytes(entry.tensor), file.crcs[entry.name]
            ranges = block_ranges(entry.n_bytes, file.block_bytes)
            for index, (start, stop) in enumerate(ranges):
                crc = int(crcs[8 * index : 8 * index + 8], 16)
                place = (descriptor, first + start, memory[start:stop], crc, file.path)
                jobs.append(functools.partial(_read_block, *place, gateway))
        blocks.run_all(jobs)
    finally:
        os.close(descriptor)


def _read_block(
    descriptor: int, offset: int, block: Tensor, crc: int, path: Path, gateway: Gateway | None
) -> None:
    """Into host memory at once, into device memory through this thread's scratch."""
    if block.device.type == "cpu":
        blocks.read_block(descriptor, offset, block, crc, path)
        return
    staged = blocks.scratch(block.numel())
    blocks.read_block(descriptor, offset, staged, crc, path)
    block.copy_(staged)
    assert gateway is not None
    gateway.current_stream().synchronize()  # of this thread; the scratch is reused
