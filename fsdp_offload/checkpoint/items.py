"""The items of one file: where each lies, and the table of checksums at the file's end.

[Note: file]
A file is a sequence of items, as ``torch.distributed.checkpoint`` wants them: each is readable by
``torch.load`` from its offset and length, which ``.metadata`` holds. Behind the last item stands
what only this package reads::

    table       JSON: per item its place, and the CRC-32 of its frame and of each block of elements
    tail        CRC-32 of the table (4 bytes), length of the table (8), magic (8), little-endian

so that a reader knows of a truncated or changed file before, and of changed elements while,
it reads them, and reads only the blocks that it needs.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch.distributed.checkpoint.metadata import MetadataIndex

from .blocks import corrupt

MAGIC: Final = b"FSDPOFF1"
_TAIL = struct.Struct("<IQ8s")


@dataclass(frozen=True)
class Item:
    """One item of a file.

    Args:
        key: (FQN, offsets of the chunk or ``None``): what ``.metadata`` calls it.
        offset: first byte in the file.
        nbytes: of the item, frame included.
        data_offset: first byte of the elements; the whole item where it is no tensor.
        data_nbytes: of the elements.
        frame_crc: CRC-32 of the bytes before and after the elements.
        crcs: CRC-32 of each block of elements.
    """

    key: tuple[str, tuple[int, ...] | None]
    offset: int
    nbytes: int
    data_offset: int
    data_nbytes: int
    frame_crc: int
    crcs: tuple[int, ...]


def item_key(index: MetadataIndex) -> tuple[str, tuple[int, ...] | None]:
    """What tells items of a checkpoint apart; ``index.index`` is a hint only."""
    return index.fqn, None if index.offset is None else tuple(index.offset)


@dataclass(frozen=True)
class Table:
    """All items of a file, and the size of their blocks."""

    block_bytes: int
    items: tuple[Item, ...]

    def encode(self) -> bytes:
        """The table and its tail, as they stand in the file."""
        rows = [
            (i.key, i.offset, i.nbytes, i.data_offset, i.data_nbytes, i.frame_crc, _pack(i.crcs))
            for i in self.items
        ]
        content: dict[str, Any] = {"block_bytes": self.block_bytes, "items": rows}
        text = json.dumps(content, separators=(",", ":")).encode()
        return text + _TAIL.pack(zlib.crc32(text), len(text), MAGIC)

    @classmethod
    def decode(cls, end: bytes, path: Path) -> Table:
        """From the last bytes of a file: at least :func:`table_nbytes` of them.

        Raises:
            CheckpointCorruptError: the checksum differs.
        """
        crc, nbytes, _ = _TAIL.unpack(end[-_TAIL.size :])
        text = end[-_TAIL.size - nbytes : -_TAIL.size]
        if not text or zlib.crc32(text) != crc:
            raise corrupt(path, "its table of checksums is not as it was written")
        try:
            content = json.loads(text)
            return cls(content["block_bytes"], tuple(_item(row) for row in content["items"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise corrupt(path, "its table of checksums is not what a save writes") from error


def _pack(crcs: Sequence[int]) -> str:
    return base64.b64encode(array("I", crcs).tobytes()).decode()


def _item(row: list[Any]) -> Item:
    # A later release may add columns.
    (fqn, offsets), offset, nbytes, data_offset, data_nbytes, frame_crc, packed = row[:7]
    key = (fqn, None if offsets is None else tuple(offsets))
    crcs = tuple(array("I", base64.b64decode(packed)))
    return Item(key, offset, nbytes, data_offset, data_nbytes, frame_crc, crcs)


def table_nbytes(tail: bytes, path: Path, file_nbytes: int) -> int | None:
    """Bytes of the table with its tail, from the last bytes of a file.

    ``None`` if the file is not of this package.

    Raises:
        CheckpointCorruptError: the length cannot be true.
    """
    if len(tail) < _TAIL.size or not tail.endswith(MAGIC):
        return None
    nbytes: int = _TAIL.unpack(tail[-_TAIL.size :])[1] + _TAIL.size
    if nbytes > file_nbytes:
        raise corrupt(path, f"its table would have {nbytes} of {file_nbytes} bytes")
    return nbytes


TAIL_BYTES: Final = _TAIL.size


def _verified(end: bytes, path: Path) -> bytes:
    """The text of a table, from the last bytes of a file."""
    crc, nbytes, _ = _TAIL.unpack(end[-_TAIL.size :])
    text = end[-_TAIL.size - nbytes : -_TAIL.size]
    if zlib.crc32(text) != crc:
        raise corrupt(path, "its table of checksums is not as it was written")
    return text


def read_table(path: Path) -> Table | None:
    """The table of a file, or ``None`` if another program wrote it.

    Raises:
        CheckpointCorruptError: it is not as it was written.
        OSError: the file cannot be read.
    """
    end = _read_end(path)
    return None if end is None else Table.decode(end, path)


def table_crc(path: Path) -> int | None:
    """CRC-32 of a file's table, in which those of all blocks stand; else as :func:`read_table`."""
    end = _read_end(path)
    return None if end is None else zlib.crc32(_verified(end, path))


def _read_end(path: Path) -> bytes | None:
    """The table and the tail of a file, if it has them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - TAIL_BYTES))
        nbytes = table_nbytes(file.read(), path, size)
        if nbytes is None:
            return None
        file.seek(size - nbytes)
        return file.read()
