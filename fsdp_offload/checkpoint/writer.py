"""A ``StorageWriter`` for ``dcp.save``: blocks of all items at once, and one rename at the end."""

from __future__ import annotations

import functools
import io
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..core.errors import ConfigError
from ..core.interrupts import held_back
from . import folder
from .files import (
    BLOCK_BYTES,
    Checksums,
    aligned,
    as_bytes,
    check_count,
    encode_table,
    envelope,
    fsync_folder,
    memory_of,
    new_file,
    on_host,
    run_all,
    write_bytes,
    write_whole,
)


class Writer(StorageWriter):
    """Writes a checkpoint, for ``dcp.save(state, storage_writer=Writer(path))``.

    Each rank writes one file, with several threads. The files stand in ``.{name}.writing`` beside
    ``path`` until all ranks are done; then one rename makes them the checkpoint, so that a killed
    job leaves ``path`` as it was. ``dcp.load`` reads it with torch's own reader, too.

    Args:
        path: the folder to make, on a file system that all ranks share.
        overwrite: replace a checkpoint at ``path``.
        keep_last: remove older complete checkpoints of this package beside ``path``, so that so
            many stay.
        threads: that write; ``None``: this rank's share of the cores, at most 16.
        optimizer_class: name of the optimizer's class, which a load compares; empty: unknown.

    Raises:
        CheckpointError: (in ``dcp.save``, inside a ``CheckpointException``) ``path`` exists, or the
            file system refused.
        ConfigError: (likewise) an argument is wrong.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        keep_last: int | None = None,
        threads: int | None = None,
        optimizer_class: str = "",
    ) -> None:
        self._path = Path(path)
        self._overwrite, self._keep_last, self._threads = overwrite, keep_last, threads
        self._optimizer_class = optimizer_class
        self._aside: Path | None = None  # the coordinator's, once it has been made

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """The next save goes to ``checkpoint_id``, if it is given."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check the arguments.

        Raises:
            CheckpointError, ConfigError: one of them is wrong.
        """
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "use_collectives=False",
                reason="without a common plan the checkpoint could be read by as many ranks only",
                remedy="leave it out",
            )
        check_count("keep_last", self._keep_last)
        check_count("threads", self._threads)
        self._path = folder.destination(self._path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make an empty folder, and tell each rank the name of its file.

        Raises:
            CheckpointError: ``path`` exists, or the file system refused.
        """
        self._aside = folder.prepare(self._path, overwrite=self._overwrite)
        return [replace(plan, storage_data=f"__{r}_0.distcp") for r, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file.

        Memory: what a thread holds is one block of 8 MiB, and that only of tensors which are not in
        host memory. The same state gives the same bytes.

        Raises:
            CheckpointError: the file system refused.
        """
        results: Future[list[WriteResult]] = Future()
        items: list[_Item] = []
        if plan.items:
            path = folder.aside(self._path) / plan.storage_data
            items = _layout(plan, planner)
            _write_file(path, items, self._threads)
        results.set_result(
            [
                WriteResult(
                    index=item.request.index,
                    size_in_bytes=item.data.numel(),
                    storage_data=_StorageInfo(plan.storage_data, item.offset, item.nbytes),
                )
                for item in items
            ]
        )
        return results

    @held_back()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata`` and the manifest, and put the checkpoint in its place."""
        assert self._aside is not None, "prepare_global_plan() first"
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {r.index: r.storage_data for rank in results for r in rank}
        metadata.storage_meta = StorageMeta()
        write_whole(self._aside / folder.METADATA, folder.encode_metadata(metadata))
        fsync_folder(self._aside)
        folder.publish(self._path, world_size=len(results), optimizer=self._optimizer_class)
        if self._keep_last is not None:
            folder.prune(self._path, self._keep_last)

    def discard(self) -> None:
        """After a save that failed: give the space back."""
        if self._aside is not None:
            folder.remove(self._aside)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path of a file system."""
        return "://" not in str(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """Nothing."""
        return None


@dataclass(frozen=True)
class _Item:
    """One item of a file: ``before``, ``data`` and ``after``, one behind the other."""

    request: WriteItem
    offset: int
    before: bytes
    data: Tensor  # 1-D uint8, on any device
    after: bytes

    @property
    def nbytes(self) -> int:
        """Of all three."""
        return len(self.before) + self.data.numel() + len(self.after)


def _layout(plan: SavePlan, planner: SavePlanner) -> list[_Item]:
    """The items in an order that does not depend on who plans, each at a multiple of 64 bytes."""
    items: list[_Item] = []
    offset = 0
    for request in sorted(plan.items, key=lambda i: (i.index.fqn, i.index.offset or ())):
        value = planner.resolve_data(request)
        if isinstance(value, io.BytesIO):
            before, data, after = value.getvalue(), torch.empty(0, dtype=torch.uint8), b""
        else:
            tensor = value.detach().resolve_conj().resolve_neg().contiguous()
            before, after = envelope(tensor.dtype, tuple(tensor.shape))
            data = as_bytes(tensor)
        items.append(_Item(request, offset, before, data, after))
        offset = aligned(offset + items[-1].nbytes)
    return items


def _write_file(path: Path, items: list[_Item], threads: int | None) -> None:
    """All blocks of all items by several threads, then the table of their checksums."""
    with new_file(path) as descriptor:
        jobs: list[Callable[[], int]] = [
            functools.partial(_write_block, descriptor, path, item, start)
            for item in items
            for start in range(0, item.nbytes, BLOCK_BYTES)
        ]
        crcs = iter(run_all(jobs, threads=threads, text="saving"))
        table = [
            Checksums(
                len(item.before) if item.after else 0,
                [next(crcs) for _ in range(0, item.nbytes, BLOCK_BYTES)],
            )
            for item in items
        ]
        end = items[-1].offset + items[-1].nbytes
        write_bytes(descriptor, end, encode_table(table, BLOCK_BYTES), path)


def _write_block(descriptor: int, path: Path, item: _Item, start: int) -> int:
    """Write the bytes of an item from ``start`` to the end of their block; their CRC-32."""
    stop = min(start + BLOCK_BYTES, item.nbytes)
    crc, at = 0, 0
    for source in (item.before, item.data, item.after):
        low, high = max(start - at, 0), min(stop - at, len(source))
        if low < high:
            if isinstance(source, Tensor):
                memory = memory_of(on_host(source[low:high]))
            else:
                memory = memoryview(source)[low:high]
            write_bytes(descriptor, item.offset + at + low, memory, path)
            crc = zlib.crc32(memory, crc)
        at += len(source)
    return crc
