"""Writes the items of one rank to one file, of which the layout is known in advance."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from .archive import Frame, combine_crc
from .blocks import (
    BLOCK_BYTES,
    TensorSource,
    create,
    fsync,
    memory_of,
    run_all,
    write_block,
    write_bytes,
    write_whole,
)
from .folder import METADATA, fsync_folder
from .items import Item, Table, item_key

SMALL_BYTES: Final = 64 << 10
"""Tensors up to this size are written together: thousands of step counts are one write."""


@dataclass(frozen=True)
class Large:
    """A tensor that is written block by block."""

    item: WriteItem
    source: TensorSource
    frame: Frame


class RankFile:
    """The file of one rank: first :meth:`write` everything, then :meth:`finish`.

    Memory: what a thread holds is one block of 8 MiB, and that only of tensors which are not in
    host memory. The same state gives the same bytes.

    Args:
        path: of the file, which must not exist. Without items, none is made.
        plan: what to write.
        planner: gives the values; small ones and those that are no tensors are taken at once.
        threads: that write; ``None``: this rank's share of the cores, at most 16.

    Raises:
        CheckpointError: the file system refused.
    """

    def __init__(
        self, path: Path, plan: SavePlan, planner: SavePlanner, *, threads: int | None = None
    ) -> None:
        self._path, self._threads = path, threads
        self._entries: list[tuple[WriteItem, Item]] = []
        self.large: tuple[Large, ...] = ()
        items = sorted(plan.items, key=lambda item: (item.index.fqn, item.index.offset or ()))
        self._descriptor = -1
        if items:
            self._descriptor = create(path)
            with self._closing_on_error():
                head, self._entries, self.large = _layout(items, planner)
                write_bytes(self._descriptor, 0, head, path)

    def write(self, entries: Iterable[Large]) -> None:
        """Write some of :attr:`large`; a copy with another source may stand for an entry."""
        with self._closing_on_error():
            self._entries += _write_large(
                self._descriptor, list(entries), self._path, self._threads
            )

    def finish(self) -> list[WriteResult]:
        """Write the table, make everything permanent, and say where the items are."""
        if self._descriptor < 0:
            return []
        assert len(self._entries) >= len(self.large), "write() everything first"
        with self._closing_on_error():
            end = max(entry.offset + entry.nbytes for _, entry in self._entries)
            entries = sorted((entry for _, entry in self._entries), key=lambda e: e.offset)
            table = Table(BLOCK_BYTES, tuple(entries))
            write_bytes(self._descriptor, end, table.encode(), self._path)
            fsync(self._descriptor, self._path)
        self.close()
        return [
            WriteResult(
                index=item.index,
                size_in_bytes=entry.data_nbytes,
                storage_data=_StorageInfo(self._path.name, entry.offset, entry.nbytes),
            )
            for item, entry in self._entries
        ]

    def close(self) -> None:
        """Close the file, complete or not. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


def write_metadata(
    folder: Path, metadata: Metadata, results: Iterable[Iterable[WriteResult]]
) -> None:
    """Write ``.metadata`` when all ranks have finished their files; ``results``: what they said."""
    metadata.version = CURRENT_DCP_VERSION
    metadata.storage_data = {r.index: r.storage_data for rank in results for r in rank}
    metadata.storage_meta = StorageMeta()
    path = folder / METADATA
    write_whole(path, pickle.dumps(metadata))
    fsync_folder(folder)


def _layout(
    items: list[WriteItem], planner: SavePlanner
) -> tuple[bytes, list[tuple[WriteItem, Item]], tuple[Large, ...]]:
    """The bytes of all small items, where they are, and the large ones behind them."""
    head = bytearray()
    entries: list[tuple[WriteItem, Item]] = []
    waiting: list[tuple[WriteItem, Tensor]] = []
    for item in items:
        value = planner.resolve_data(item)
        if isinstance(value, io.BytesIO):
            entries.append((item, _plain_item(item, len(head), value.getbuffer())))
            head += value.getbuffer()
        elif value.nbytes <= SMALL_BYTES:
            entry, data = _small_item(item, value, len(head))
            entries.append((item, entry))
            head += data
        else:
            waiting.append((item, value))
    offset, large = len(head), list[Large]()
    for item, value in waiting:
        frame = Frame(value.dtype, tuple(value.shape), offset)
        large.append(Large(item, TensorSource(value), frame))
        offset += frame.nbytes
    return bytes(head), entries, tuple(large)


def _plain_item(item: WriteItem, offset: int, data: memoryview) -> Item:
    """An item that is no tensor: its bytes are the elements, and there is no frame."""
    nbytes = len(data)
    blocks = (data[at : at + BLOCK_BYTES] for at in range(0, nbytes, BLOCK_BYTES))
    crcs = tuple(zlib.crc32(block) for block in blocks)
    return Item(item_key(item.index), offset, nbytes, offset, nbytes, 0, crcs)


def _small_item(item: WriteItem, tensor: Tensor, offset: int) -> tuple[Item, bytes]:
    frame = Frame(tensor.dtype, tuple(tensor.shape), offset)
    host = TensorSource(tensor.cpu())
    data = bytes(memory_of(host.block(0, host.nbytes)))
    crc = zlib.crc32(data)
    before, after = frame.before(crc), frame.after(crc)
    return _framed_item(item, frame, before, after, (crc,)), before + data + after


def _framed_item(
    item: WriteItem, frame: Frame, before: bytes, after: bytes, crcs: tuple[int, ...]
) -> Item:
    return Item(
        item_key(item.index),
        frame.offset,
        frame.nbytes,
        frame.data_offset,
        frame.data_nbytes,
        zlib.crc32(before + after),
        crcs,
    )


def _write_large(
    descriptor: int, large: list[Large], path: Path, threads: int | None
) -> list[tuple[WriteItem, Item]]:
    jobs = [
        functools.partial(_write_one, descriptor, entry, start, path)
        for entry in large
        for start in range(0, entry.source.nbytes, BLOCK_BYTES)
    ]
    crcs = iter(run_all(jobs, threads=threads))
    entries = []
    for entry in large:
        nbytes, frame = entry.source.nbytes, entry.frame
        starts = range(0, nbytes, BLOCK_BYTES)
        found = tuple(next(crcs) for _ in starts)
        whole = 0
        for start, crc in zip(starts, found, strict=True):
            whole = combine_crc(whole, crc, min(BLOCK_BYTES, nbytes - start))
        before, after = frame.before(whole), frame.after(whole)
        write_bytes(descriptor, frame.offset, before, path)
        write_bytes(descriptor, frame.data_offset + nbytes, after, path)
        entries.append((entry.item, _framed_item(entry.item, frame, before, after, found)))
    return entries


def _write_one(descriptor: int, entry: Large, start: int, path: Path) -> int:
    with torch.no_grad():
        block = entry.source.block(start, min(start + BLOCK_BYTES, entry.source.nbytes))
        return write_block(descriptor, entry.frame.data_offset + start, block, path)
