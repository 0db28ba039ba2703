"""A ``StorageReader`` for ``dcp.load`` that verifies each block and reads into the target."""

from __future__ import annotations

import functools
import io
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ..core.config import align
from ..core.errors import CheckpointError, OffloadError
from ..core.storage import as_bytes
from ..link.link import fill, scratch
from .files import (
    ALIGNMENT_BYTES,
    BLOCK_BYTES,
    Checksums,
    Table,
    check_count,
    corrupt,
    done,
    memory_of,
    read_bytes,
    read_table,
    run_all,
    typed,
)
from .manifest import Manifest, check_files, open_checkpoint
from .rule import tied_error
from .safetensors import SUFFIX

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import _StorageInfo

SLICE_BYTES: Final = 4 * BLOCK_BYTES
"""A thread reads so many bytes at once if it converts or reorders elements. It reads blocks at the
edges twice."""

Job = Callable[[], None]


class Reader(FileSystemReader):
    """Reads a checkpoint, for ``dcp.load(state, storage_reader=Reader(path))``.

    Each rank reads what it needs, with several threads, and compares every block with its checksum.
    Elements with the same layout in file and target need no intermediate copy. ``torch.load`` reads
    files of other programs. Keys whose targets share memory, such as tied weights, must have equal
    values.

    Args:
        path: folder of the checkpoint.
        threads: number of reading threads; ``None``: this rank's share of the cores, at most 16.

    Raises:
        CheckpointError: (in ``dcp.load``, inside a ``CheckpointException``) no checkpoint is at
            ``path``, the file system refused, or two keys have different values for one memory.
        CheckpointCorruptError: (likewise) a file changed after it was written.
    """

    def __init__(self, path: str | os.PathLike[str] | None, *, threads: int | None = None) -> None:
        if path is None:
            raise CheckpointError(
                "a checkpoint at None",
                reason="latest() returns None if the folder has no complete checkpoint",
                remedy="check the result of latest() first, and start from scratch if it is None",
            )
        super().__init__(path)
        self._threads = threads
        self._failure: OffloadError | None = None
        self.manifest: Manifest | None = None
        self.metadata = Metadata({})
        self._tables: dict[str, Table | None] = {}
        self._items: dict[str, list[tuple[int, int]]] = {}  # offset and length, by file
        # Values of items whose targets share memory: read and compared before all others.
        self._aliases: dict[ReadItem, Tensor] = {}

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Read and verify ``.metadata``; :meth:`set_up_storage_reader` raises its errors."""
        # dcp.load would replace an error of this method by an untyped one, so keep it.
        self._tables.clear()
        self._failure = None
        try:
            with typed():
                self.path = Path(self.path).absolute()
                self.manifest, self.metadata = open_checkpoint(self.path)
        except OffloadError as error:
            self._failure = error
            return Metadata({})
        return self.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Check arguments and, on the coordinator, all files.

        Raises:
            CheckpointCorruptError, CheckpointError, ConfigError: see the class.
        """
        check_count("threads", self._threads)
        if self._failure is not None:
            raise self._failure
        super().set_up_storage_reader(metadata, is_coordinator)
        if is_coordinator:
            check_files(Path(self.path), self.manifest, metadata)
        self._items.clear()
        self._aliases = {}
        for info in metadata.storage_data.values():
            self._items.setdefault(info.relative_path, []).append((info.offset, info.length))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of ``plan``.

        Raises:
            CheckpointCorruptError: a file is not as it was written.
            CheckpointError: the file system refused.
        """
        foreign: list[ReadItem] = []
        jobs: list[Job] = []
        targets = targets_of(plan, planner)
        aliases = self._aliases or self._read_aliases(plan, targets)
        with ExitStack() as files:
            opened = self._opener(files)
            for request in plan.items:
                info = self.storage_data[request.storage_index]
                if request in aliases:
                    continue
                file = opened(info.relative_path)
                if file is None:
                    foreign.append(request)
                    targets.pop(request, None)  # torch's reader commits this one
                elif request.type is LoadItemType.BYTE_IO:
                    data = bytearray(info.length)
                    file.read(info, 0, memoryview(data))
                    planner.load_bytes(request, io.BytesIO(data))
                else:
                    jobs += _tensor_jobs(file, info, self._box(request), targets[request])
            run_all(jobs, threads=self._threads, text="loading")
        for request, value in aliases.items():
            targets[request].detach().copy_(value)
        for request, target in targets.items():
            planner.commit_tensor(request, target)  # a caller's planner may act on it
        if foreign:
            self._read_foreign(replace(plan, items=foreign), planner)
        return done(None)

    def _compare_aliases(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        self._aliases = self._read_aliases(plan, targets_of(plan, planner))

    def _read_aliases(
        self, plan: LoadPlan, targets: Mapping[ReadItem, Tensor]
    ) -> dict[ReadItem, Tensor]:
        """Read items whose target shares memory with another key's: threads would mix them."""
        groups = _alias_groups(targets)
        items = [item for group in groups for item in group]
        values = {i: torch.empty(targets[i].shape, dtype=targets[i].dtype) for i in items}
        if values:
            self.read_data(replace(plan, items=items), _AliasPlanner(values))
        for group in groups:
            _check_equal(group, targets, values)
        return values

    def check_blocks(self) -> bool:
        """Compare every block with its checksum.

        Returns:
            False if another program wrote the files, without checksums.

        Raises:
            CheckpointCorruptError: a file is not as it was written.
            CheckpointError: the file system refused.
        """
        jobs: list[Job] = []
        with ExitStack() as files:
            opened = self._opener(files)
            for info in self.metadata.storage_data.values():
                file = opened(info.relative_path)
                if file is not None and file.checksums[info.offset].crcs:
                    jobs += [
                        functools.partial(_check_block, file, info, start)
                        for start in range(0, info.length, file.block_bytes)
                    ]
            run_all(jobs, threads=self._threads, text="comparing checksums")
        return bool(jobs)

    def _opener(self, files: ExitStack) -> Callable[[str], _File | None]:

        @functools.cache
        def opened(name: str) -> _File | None:
            path = Path(self.path) / name
            if name.endswith(SUFFIX):
                sizes = BLOCK_BYTES, {at: Checksums(0, ()) for at, _ in self._items[name]}
            elif (table := self._table(name)) is not None:
                sizes = table.block_bytes, table.of(self._items[name], path)
            else:
                return None
            # A file object closes its descriptor even if Ctrl-C comes before the next line.
            descriptor = files.enter_context(path.open("rb", buffering=0)).fileno()
            return _File(path, descriptor, *sizes)

        return opened

    def _table(self, name: str) -> Table | None:
        if name not in self._tables:
            path = Path(self.path) / name
            table = read_table(path)
            known = None if self.manifest is None else self.manifest.files.get(name)
            if known is not None and (table is None or table.crc != known[1]):
                raise corrupt(path, "it changed after it was written, or belongs to another save")
            self._tables[name] = table
        return self._tables[name]

    def _read_foreign(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        try:
            super().read_data(plan, planner)
        except OffloadError:
            raise
        except Exception as error:  # torch may raise anything for changed bytes
            raise corrupt(self.path, f"torch cannot read an item: {error!r}") from error

    def _box(self, request: ReadItem) -> Tensor:
        stored = self.metadata.state_dict_metadata[request.storage_index.fqn]
        assert isinstance(stored, TensorStorageMetadata)  # the planner asked for a tensor
        offsets = request.storage_index.offset
        sizes = next(c.sizes for c in stored.chunks if c.offsets == offsets)
        chunk = torch.empty(sizes, dtype=stored.properties.dtype, device="meta")
        box = zip(request.storage_offsets, request.lengths, strict=True)
        return chunk[tuple(slice(start, start + length) for start, length in box)]


class _AliasPlanner(DefaultLoadPlanner):
    """Reads items into separate tensors."""

    def __init__(self, values: Mapping[ReadItem, Tensor]) -> None:
        super().__init__()
        self._values = values

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self._values[read_item]


def targets_of(plan: LoadPlan, planner: LoadPlanner) -> dict[ReadItem, Tensor]:
    """Find the target of each item that is a tensor."""
    return {
        item: planner.resolve_tensor(item).detach()
        for item in plan.items
        if item.type is not LoadItemType.BYTE_IO
    }


def _span(tensor: Tensor) -> tuple[int, int]:
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (1 + steps) * tensor.element_size()


def _alias_groups(targets: Mapping[ReadItem, Tensor]) -> list[list[ReadItem]]:
    spans = [
        (*_span(target), item)
        for item, target in targets.items()
        if target.numel() and not target.is_meta
    ]
    groups: list[list[ReadItem]] = []
    reach = 0
    for low, high, item in sorted(spans, key=lambda each: each[:2]):
        if low >= reach:
            groups.append([])
        groups[-1].append(item)
        reach = max(reach, high)
    by_key = [sorted(group, key=lambda item: item.dest_index.fqn) for group in groups]
    return [group for group in by_key if group[0].dest_index.fqn != group[-1].dest_index.fqn]


def _check_equal(
    items: Sequence[ReadItem],
    targets: Mapping[ReadItem, Tensor],
    values: Mapping[ReadItem, Tensor],
) -> None:
    """Write the values one after the other into an image of the memory that their targets share.

    Raises:
        CheckpointError: a later value overwrote an earlier one with other bytes.
    """
    spans = [_span(targets[item]) for item in items]
    low = min(low for low, _ in spans) // 16 * 16  # which aligns any dtype
    n_bytes = align(max(high for _, high in spans) - low, ALIGNMENT_BYTES)
    image = torch.empty(n_bytes, dtype=torch.uint8)
    views: dict[ReadItem, Tensor] = {}
    for item in items:
        target = targets[item]
        at = (target.data_ptr() - low) // target.element_size()
        views[item] = image.view(target.dtype).as_strided(target.shape, target.stride(), at)
        views[item].copy_(values[item])
    for item, view in views.items():
        if not torch.equal(as_bytes(view.contiguous()), as_bytes(values[item])):
            raise tied_error(CheckpointError, item.dest_index.fqn, items[-1].dest_index.fqn)


@dataclass(frozen=True)
class _File:
    """An open file and the checksums of its items; none for safetensors."""

    path: Path
    descriptor: int
    block_bytes: int
    checksums: dict[int, Checksums]

    def read(self, info: _StorageInfo, start: int, into: memoryview) -> None:
        """Fill ``into`` with bytes of an item from ``start``, verified if it has checksums.

        Reads partly covered blocks whole, to compare their checksums.
        """
        crcs = self.checksums[info.offset].crcs
        if not crcs:
            read_bytes(self.descriptor, info.offset + start, into, self.path)
            return
        stop = start + len(into)
        for index in range(start // self.block_bytes, -(-stop // self.block_bytes)):
            first = index * self.block_bytes
            last = min(first + self.block_bytes, info.length)
            low, high = max(start, first), min(stop, last)
            wanted = into[low - start : high - start]
            buffers = (bytearray(low - first), wanted, bytearray(last - high))
            crc, at = 0, info.offset + first
            for buffer in buffers:
                read_bytes(self.descriptor, at, buffer, self.path)
                crc, at = zlib.crc32(buffer, crc), at + len(buffer)
            if crc != crcs[index]:
                raise corrupt(
                    self.path,
                    f"bytes {info.offset + first} to {at} have checksum {crc:08x}, "
                    f"but {crcs[index]:08x} was written",
                )


def _read_block(file: _File, info: _StorageInfo, start: int, block: Tensor) -> None:
    file.read(info, start, memory_of(block))


def _check_block(file: _File, info: _StorageInfo, start: int) -> None:
    _read_block(file, info, start, scratch(min(file.block_bytes, info.length - start)))


def _tensor_jobs(file: _File, info: _StorageInfo, box: Tensor, target: Tensor) -> Iterator[Job]:
    """Cut the reading of ``box``, a view of the chunk in an item, into ``target`` into jobs."""
    start, itemsize = file.checksums[info.offset].data_start, box.element_size()
    if start + box.untyped_storage().nbytes() > info.length:
        raise corrupt(file.path, f"its item at byte {info.offset} is too short")
    is_lazy = target.is_conj() or target.is_neg()  # its memory has other values
    if box.is_contiguous() and target.is_contiguous() and target.dtype == box.dtype and not is_lazy:
        first = start + int(box.storage_offset()) * itemsize
        yield from _block_jobs(file, info, first, as_bytes(target))
        return
    rows = max(1, SLICE_BYTES // (box.stride(0) * itemsize)) if box.dim() else 1
    pairs = zip(box.split(rows), target.split(rows), strict=True) if box.dim() else [(box, target)]
    for some, wanted in pairs:
        if some.numel():
            yield functools.partial(_read_rows, file, info, start, some, wanted)


def _read_rows(file: _File, info: _StorageInfo, start: int, box: Tensor, target: Tensor) -> None:
    steps = zip(box.shape, box.stride(), strict=True)
    flat = torch.empty(1 + sum((size - 1) * stride for size, stride in steps), dtype=box.dtype)
    first = start + int(box.storage_offset()) * box.element_size()
    file.read(info, first, memory_of(as_bytes(flat)))
    target.detach().copy_(flat.as_strided(box.shape, box.stride()))


def _block_jobs(file: _File, info: _StorageInfo, first: int, target: Tensor) -> Iterator[Job]:
    stop, size = first + target.numel(), file.block_bytes
    for edge in range(first // size * size, stop, size):
        low, high = max(first, edge), min(stop, edge + size)
        read = functools.partial(_read_block, file, info, low)
        yield functools.partial(fill, target[low - first : high - first], read)
