"""What a data file holds: items as ``torch.save`` writes them, then a table of checksums.

[Note: data file]
``torch.distributed.checkpoint`` (DCP) wants each item to be readable by ``torch.load`` from its
offset and length, which ``.metadata`` holds. Behind the last item stands what only this package
reads::

    table   uint32 each; per item, in the order of the file: where in the item its elements begin,
            then the CRC-32 of every block of the item, the last one shorter
    tail    CRC-32 of the table, bytes of the table, bytes of a block, magic

so that a reader knows of a truncated file before, and of changed bytes while, it reads them, and
reads only the blocks that it needs. Numbers are little-endian.
"""

from __future__ import annotations

import functools
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from .files import corrupt

MAGIC: Final = b"FSDPOFF3"
ALIGNMENT_BYTES: Final = 64
"""Items begin at multiples of it, and torch lets elements begin at multiples of 64 within."""

_TAIL = struct.Struct("<IQI8s")


def aligned(nbytes: int) -> int:
    """``nbytes``, up to a multiple of the alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class _Sink:
    """A file that keeps what ``torch.save`` writes, but for the elements, which it skips."""

    def __init__(self) -> None:
        self.before, self.after = bytearray(), bytearray()
        self._skipped = False

    def write(self, data: memoryview) -> int:
        """Keep ``data``."""
        target = self.after if self._skipped else self.before
        target += data
        return len(data)

    def seek(self, nbytes: int, whence: int) -> None:
        """The elements would stand here."""
        assert whence == os.SEEK_CUR, (nbytes, whence)
        self._skipped = True

    def flush(self) -> None:
        """Nothing is buffered."""


@functools.lru_cache(maxsize=1024)
def envelope(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What ``torch.save`` writes before and behind the elements of a tensor, whatever they are.

    The archive's own CRC-32 of the elements is left out (0), which torch does not compare.
    """
    sink = _Sink()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype, device="cpu"), sink)  # type: ignore[arg-type]
    return bytes(sink.before), bytes(sink.after)


@dataclass(frozen=True)
class Checksums:
    """Of one item.

    Args:
        data_start: byte of the item where its elements begin; 0 where it is no tensor.
        crcs: CRC-32 of every block of the item.
    """

    data_start: int
    crcs: Sequence[int]


@dataclass(frozen=True)
class Table:
    """The checksums of a file: of its items in the order of their offsets."""

    block_bytes: int
    crc: int
    words: Sequence[int]

    def of(self, items: Iterable[tuple[int, int]], path: Path) -> dict[int, Checksums]:
        """Checksums by offset of the item.

        Args:
            items: offset and length of every item, as ``.metadata`` says.
            path: of the file.

        Raises:
            CheckpointCorruptError: the table is of other items.
        """
        found, at = {}, 0
        for offset, length in sorted(set(items)):
            count = -(-length // self.block_bytes)
            words = self.words[at : at + 1 + count]
            if len(words) != 1 + count or words[0] > length:
                raise corrupt(path, f"its table does not describe the item at byte {offset}")
            found[offset] = Checksums(words[0], words[1:])
            at += 1 + count
        if at != len(self.words):
            raise corrupt(path, "its table describes other items than .metadata names")
        return found


def encode_table(items: Iterable[Checksums], block_bytes: int) -> bytes:
    """The table and the tail, as they stand in the file."""
    words = [word for item in items for word in (item.data_start, *item.crcs)]
    text = struct.pack(f"<{len(words)}I", *words)
    return text + _TAIL.pack(zlib.crc32(text), len(text), block_bytes, MAGIC)


def read_table(path: Path) -> Table | None:
    """The table of a file, or ``None`` if another program wrote the file.

    Raises:
        CheckpointCorruptError: it is missing, or not as it was written.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - _TAIL.size))
            tail = file.read()
            if len(tail) < _TAIL.size or not tail.endswith(MAGIC):
                return None
            crc, nbytes, block_bytes, _ = _TAIL.unpack(tail)
            start = size - _TAIL.size - nbytes
            file.seek(max(0, start))
            text = file.read(nbytes) if start >= 0 else b""
    except OSError as error:
        raise corrupt(path, f"it cannot be read: {error.strerror}") from error
    if len(text) != nbytes or zlib.crc32(text) != crc or nbytes % 4 or not block_bytes:
        raise corrupt(path, "its table of checksums is not as it was written")
    return Table(block_bytes, crc, struct.unpack(f"<{nbytes // 4}I", text))
