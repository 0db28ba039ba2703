"""Reads items of checkpoints: block by block and verified where this package wrote the file."""

from __future__ import annotations

import functools
import io
import math
import os
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from ..chunks import Box, covers
from ..errors import CheckpointError, OffloadError
from .blocks import (
    BLOCK_BYTES,
    as_bytes,
    corrupt,
    memory_of,
    read_block,
    read_bytes,
    run_all,
    scratch,
)
from .folder import METADATA
from .items import Item, Table, item_key, read_table

PIECE_BYTES: Final = 4 * BLOCK_BYTES
"""What one thread reads at once where elements are converted or lie in another order: the blocks
at its edges are read twice."""

Job = Callable[[], None]


def read_metadata(path: Path) -> Metadata:
    """``.metadata`` of a checkpoint.

    Raises:
        CheckpointCorruptError: it cannot be understood.
    """
    try:
        with (path / METADATA).open("rb") as file:
            metadata = pickle.load(file)
    except Exception as error:  # changed bytes of a pickle may raise anything
        raise corrupt(path / METADATA, f"it cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise corrupt(path / METADATA, f"it holds a {type(metadata).__name__}")
    return metadata


def check_chunks(path: Path, metadata: Metadata) -> None:
    """Whether files hold all items, and chunks all elements, before anything is read.

    Raises:
        CheckpointCorruptError: a file is missing, or too short, or a chunk is in none.
        CheckpointError: elements are in no chunk.
    """
    try:
        _check_chunks(path, metadata)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise corrupt(path / METADATA, f"it is not what a save writes: {error}") from error


def _check_chunks(path: Path, metadata: Metadata) -> None:
    sizes: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        name = info.relative_path
        if name not in sizes:
            if not (path / name).is_file():
                raise corrupt(path / name, "it is missing")
            sizes[name] = (path / name).stat().st_size
        if info.offset + info.length > sizes[name]:
            raise corrupt(path / name, f"it ends within {index.fqn}")
    for key, value in metadata.state_dict_metadata.items():
        if isinstance(value, TensorStorageMetadata):
            boxes = [Box(tuple(c.offsets), tuple(c.sizes)) for c in value.chunks]
            for box in boxes:
                if box.numel and MetadataIndex(key, box.offsets) not in metadata.storage_data:
                    raise corrupt(path / METADATA, f"it names no file that has {key} at {box}")
            if not covers(value.size, boxes):
                raise CheckpointError(
                    f"{path}: {key} of shape {tuple(value.size)}",
                    reason=f"its {len(boxes)} chunks leave elements out",
                    remedy="save it again with all ranks taking part",
                )


class CheckpointReader(FileSystemReader):
    """Reads what this rank asks for, with several threads, into the memory where it belongs.

    Elements that lie in the file as in the target are read there without a copy between. Of
    files that another program wrote, items are loaded by ``torch.load``, as torch does.

    Args:
        path: folder of the checkpoint.
        threads: that read; ``None``: this rank's share of the cores, at most 16.
    """

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        super().__init__(path)
        self._threads = threads
        self._tables: dict[str, Table | None] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See :func:`read_metadata`."""
        return read_metadata(Path(self.path))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Remember where items lie."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._metadata = metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of ``plan``.

        Raises:
            CheckpointCorruptError: a file is not as it was written.
            CheckpointError: the file system refused.
        """
        ours: dict[str, list[ReadItem]] = {}
        foreign: list[ReadItem] = []
        for request in plan.items:
            name = self.storage_data[request.storage_index].relative_path
            if self._table(name) is None:
                foreign.append(request)
            else:
                ours.setdefault(name, []).append(request)
        for name, requests in ours.items():
            self._read_file(name, requests, planner)
        if foreign:
            self._read_foreign(replace(plan, items=foreign), planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read_box(self, key: str, box: Box) -> Tensor:
        """Elements of tensor ``key``, as stored: of the box's sizes, on the CPU.

        Several threads may call it, after :meth:`set_up_storage_reader`.

        Raises:
            CheckpointCorruptError: a file is not as it was written.
            CheckpointError: the file system refused.
        """
        stored = self._metadata.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata), key
        target = torch.empty(box.sizes, dtype=stored.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        plan = LoadPlan(create_read_items_for_chunk_list(key, stored, [wanted]))
        self.read_data(plan, _BoxPlanner(target))
        return target

    def _table(self, name: str) -> Table | None:
        if name not in self._tables:
            path = Path(self.path) / name
            try:
                self._tables[name] = read_table(path)
            except OSError as error:
                raise corrupt(path, f"it cannot be read: {error.strerror}") from error
        return self._tables[name]

    def _read_foreign(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        try:
            super().read_data(plan, planner)
        except OffloadError:
            raise
        except Exception as error:  # changed bytes of an archive may raise anything
            raise corrupt(self.path, f"torch cannot read an item: {error!r}") from error

    def _read_file(self, name: str, requests: list[ReadItem], planner: LoadPlanner) -> None:
        path = Path(self.path) / name
        table = self._table(name)
        assert table is not None  # the caller asked
        items = {item.key: item for item in table.items}
        descriptor = os.open(path, os.O_RDONLY)
        try:
            file = _File(path, descriptor, table.block_bytes)
            jobs: list[Job] = []
            for request in requests:
                key = item_key(request.storage_index)
                if key not in items:
                    raise corrupt(path, f"its table does not name {key[0]}")
                if request.type is LoadItemType.BYTE_IO:
                    planner.load_bytes(request, io.BytesIO(file.whole(items[key])))
                else:
                    chunk = self._chunk(request)
                    jobs += _tensor_jobs(file, items[key], chunk, request, planner)
            run_all(jobs, threads=self._threads)
        finally:
            os.close(descriptor)

    def _chunk(self, request: ReadItem) -> _Chunk:
        stored = self._metadata.state_dict_metadata[request.storage_index.fqn]
        assert isinstance(stored, TensorStorageMetadata)  # the planner asked for a tensor
        offsets = request.storage_index.offset
        sizes = next(c.sizes for c in stored.chunks if c.offsets == offsets)
        return _Chunk(tuple(sizes), stored.properties.dtype)


class _BoxPlanner(DefaultLoadPlanner):
    """A planner for one box of one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of the box that one chunk has."""
        found = self._target
        for dim, size in enumerate(read_item.lengths):
            found = found.narrow(dim, read_item.dest_offsets[dim], size)
        return found


@dataclass(frozen=True)
class _Chunk:
    """What an item holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _File:
    """An open file with a table."""

    path: Path
    descriptor: int
    block_bytes: int

    def whole(self, item: Item) -> bytes:
        """The elements of a small item, verified."""
        data = torch.empty(item.data_nbytes, dtype=torch.uint8)
        self.read(item, 0, data)
        return bytes(memory_of(data))

    def check_frame(self, item: Item) -> None:
        """Verify what stands around the elements, which only torch reads."""
        before = bytearray(item.data_offset - item.offset)
        end = item.data_offset + item.data_nbytes
        after = bytearray(item.offset + item.nbytes - end)
        read_bytes(self.descriptor, item.offset, memoryview(before), self.path)
        read_bytes(self.descriptor, end, memoryview(after), self.path)
        if zlib.crc32(before + after) != item.frame_crc:
            raise corrupt(self.path, f"the frame of {item.key[0]} is not as it was written")

    def read(self, item: Item, start: int, into: Tensor) -> None:
        """Fill ``into`` (1-D uint8, CPU) with elements' bytes from ``start``, verified.

        Blocks that ``into`` covers are read into it; of others, a copy is read and verified.
        """
        stop = start + into.numel()
        for index in range(start // self.block_bytes, -(-stop // self.block_bytes)):
            first = index * self.block_bytes
            last = min(first + self.block_bytes, item.data_nbytes)
            crc, offset = item.crcs[index], item.data_offset + first
            if start <= first and last <= stop:
                target = into[first - start : last - start]
                read_block(self.descriptor, offset, target, crc, self.path)
            else:
                block = torch.empty(last - first, dtype=torch.uint8)
                read_block(self.descriptor, offset, block, crc, self.path)
                low, high = max(start, first), min(stop, last)
                into[low - start : high - start] = block[low - first : high - first]


def _tensor_jobs(
    file: _File, item: Item, chunk: _Chunk, request: ReadItem, planner: LoadPlanner
) -> Iterator[Job]:
    """Jobs that read the wanted part of a chunk into its target."""
    expected = math.prod(chunk.shape) * chunk.dtype.itemsize
    if item.data_nbytes != expected:
        raise corrupt(file.path, f"{item.key[0]} has {item.data_nbytes} bytes, not {expected}")
    yield functools.partial(file.check_frame, item)
    if request.dest_index.fqn not in getattr(planner, "piecewise", ()):
        target = planner.resolve_tensor(request).detach()
        in_order = _is_one_run(request.lengths, chunk.shape)
        if in_order and target.dtype == chunk.dtype and target.is_contiguous():
            yield from _block_jobs(file, item, _first_byte(chunk, request), target)
            planner.commit_tensor(request, target)  # nothing to do but for planners of others
            return
    for piece in _pieces(chunk, request):
        yield functools.partial(_read_piece, file, item, chunk, piece, planner)


def _is_one_run(lengths: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a box of ``lengths`` lies without gaps in a row-major chunk of ``shape``."""
    first = next((dim for dim, length in enumerate(lengths) if length != 1), len(lengths))
    return tuple(lengths[first + 1 :]) == tuple(shape[first + 1 :])


def _block_jobs(file: _File, item: Item, first: int, target: Tensor) -> Iterator[Job]:
    """One job for each block of the file that has elements of ``target``."""
    memory, stop, size = as_bytes(target), first + target.nbytes, file.block_bytes
    for edge in range(first // size * size, stop, size):
        low, high = max(first, edge), min(stop, edge + size)
        yield functools.partial(_read_bytes, file, item, low, memory[low - first : high - first])


def _read_bytes(file: _File, item: Item, start: int, target: Tensor) -> None:
    if target.device.type == "cpu":
        file.read(item, start, target)
    else:
        block = scratch(target.numel())
        file.read(item, start, block)
        target.copy_(block)


def _pieces(chunk: _Chunk, request: ReadItem) -> Iterator[ReadItem]:
    """``request`` cut along its first dimension into reads of about ``PIECE_BYTES``."""
    if not request.lengths:
        yield request
        return
    row_bytes = math.prod(chunk.shape[1:]) * chunk.dtype.itemsize
    rows = max(1, PIECE_BYTES // max(1, row_bytes))
    for start in range(0, request.lengths[0], rows):
        count = min(rows, request.lengths[0] - start)
        yield replace(
            request,
            storage_offsets=_moved(request.storage_offsets, start),
            dest_offsets=_moved(request.dest_offsets, start),
            lengths=torch.Size((count, *request.lengths[1:])),
        )


def _moved(offsets: torch.Size, by: int) -> torch.Size:
    return torch.Size((offsets[0] + by, *offsets[1:]))


def _read_piece(
    file: _File, item: Item, chunk: _Chunk, piece: ReadItem, planner: LoadPlanner
) -> None:
    """Read rows of a chunk, and copy from them what the target wants, in its dtype."""
    with torch.no_grad():
        target = planner.resolve_tensor(piece).detach()
        rows = torch.empty((*piece.lengths[:1], *chunk.shape[1:]), dtype=chunk.dtype)
        start = replace(piece, storage_offsets=_first_of_row(piece.storage_offsets))
        file.read(item, _first_byte(chunk, start), as_bytes(rows))
        for dim in range(1, len(piece.lengths)):
            rows = rows.narrow(dim, piece.storage_offsets[dim], piece.lengths[dim])
        target.copy_(rows)
        planner.commit_tensor(piece, target)


def _first_of_row(offsets: torch.Size) -> torch.Size:
    return torch.Size((*offsets[:1], *(0 for _ in offsets[1:])))


def _first_byte(chunk: _Chunk, request: ReadItem) -> int:
    """Where the first element that ``request`` wants stands in a row-major chunk."""
    index = 0
    for size, offset in zip(chunk.shape, request.storage_offsets, strict=True):
        index = index * size + offset
    return index * chunk.dtype.itemsize
