"""A ``StorageWriter`` for ``dcp.save``: blocks of all items at once, and one rename at the end."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
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

from ..core.config import align
from ..core.errors import CheckpointError, ConfigError
from ..core.interrupts import defer_sigint, let_through
from ..core.progress import report
from ..core.storage import as_bytes
from ..link.link import on_host
from . import folder
from .files import (
    ALIGNMENT_BYTES,
    BLOCK_BYTES,
    TAIL,
    Checksums,
    check_count,
    done,
    encode_table,
    envelope,
    memory_of,
    new_file,
    run_all,
    without_class,
    write_bytes,
    write_whole,
)
from .manifest import METADATA, encode_metadata


class Writer(StorageWriter):
    """Writes a checkpoint, for ``dcp.save(state, storage_writer=Writer(path))``.

    Each rank writes one file, with several threads, in the save's own folder beside ``path``. When
    all ranks are done, that folder becomes the checkpoint in one step: a killed job leaves ``path``
    unchanged. torch's own reader for ``dcp.load`` reads it, too.

    Args:
        path: see :func:`.save`, also for ``overwrite``, ``keep_last`` and ``threads``; a relative
            path starts at the current folder.
        optimizer_class: name of the optimizer's class, for a load to compare; empty: unknown.

    Raises:
        ConfigError: no checkpoint can be at ``path``; or (in ``dcp.save``, inside a
            ``CheckpointException``) another argument is wrong.
        CheckpointError: (likewise) ``path`` exists, or the file system refused.
    """

    _aside: Path | None = None  # the coordinator's working folder, during a save
    _made_parents: Sequence[Path] = ()
    # Number of ranks, if known: DCP saves one rank's state if the process group is gone by then.
    _ranks: int | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        keep_last: int | None = None,
        threads: int | None = None,
        optimizer_class: str = "",
    ) -> None:
        self.path = folder.checked(path)
        self._overwrite, self._keep_last, self._threads = overwrite, keep_last, threads
        self._optimizer_class = optimizer_class
        self._pid, self._start = os.getpid(), time.perf_counter()
        self._ended = threading.Event()

    def __del__(self) -> None:
        """Discard the folder of a failed ``dcp.save``: DCP tells no writer of a failure."""
        if self._aside is not None:
            self.discard()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Send the next save to ``checkpoint_id``, if given."""
        if checkpoint_id is not None:
            self.path = folder.checked(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check the arguments.

        Raises:
            CheckpointError, ConfigError: an argument is wrong.
        """
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "use_collectives=False",
                reason="without a common plan, only the same number of ranks could load the "
                "checkpoint",
                remedy="leave it out",
            )
        check_count("keep_last", self._keep_last)
        check_count("threads", self._threads)
        self._start = time.perf_counter()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    @defer_sigint()
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make an empty folder, and tell each rank the name of its file.

        Raises:
            CheckpointError: ``path`` exists, or the file system refused.
        """
        self.discard()
        if self._ranks not in (None, len(plans)):
            raise without_group(self.path)
        self._made_parents = [each for each in self.path.parents if not each.exists()]
        self._aside = folder.prepare(self.path, overwrite=self._overwrite)
        self._ended = threading.Event()
        with contextlib.suppress(RuntimeError):  # an ending interpreter starts no thread
            life = (self._aside, self._ended)
            threading.Thread(target=folder.show_life, args=life, daemon=True).start()
        files = (f"{self._aside.name}/__{rank}_0.distcp" for rank in range(len(plans)))
        return [replace(plan, storage_data=file) for plan, file in zip(plans, files, strict=True)]

    @let_through()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file.

        A thread holds one block of 8 MiB, and only for tensors in device memory. The same state
        gives the same bytes.

        Raises:
            CheckpointError: the file system refused.
        """
        items: list[_Item] = []
        if plan.items:
            path = self.path.parent / plan.storage_data
            items = _layout(plan, planner)
            file = _write_file(path, items, self._threads)
        return done(
            [
                _Written(
                    index=item.request.index,
                    size_in_bytes=item.data.numel(),
                    storage_data=_StorageInfo(path.name, item.offset, item.nbytes),
                    file=file,
                )
                for item in items
            ]
        )

    @defer_sigint()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata`` and the manifest, and publish the checkpoint.

        Raises:
            CheckpointError: the folder holds files that the ranks did not write, ``path`` exists by
                now, or the file system refused.
        """
        assert self._aside is not None, "prepare_global_plan() first"
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {r.index: r.storage_data for rank in results for r in rank}
        metadata.storage_meta = StorageMeta()
        data = encode_metadata(metadata)
        write_whole(self._aside / METADATA, data)
        written = {r.storage_data.relative_path: r.file for rank in results for r in rank}  # type: ignore[attr-defined]
        written[METADATA] = len(data), zlib.crc32(data)
        folder.publish(
            self._aside,
            self.path,
            written,
            overwrite=self._overwrite,
            world_size=len(results),
            optimizer=self._optimizer_class,
        )
        self._complete("saved", sum(n_bytes for n_bytes, _ in written.values()))
        if self._keep_last is not None:
            folder.prune(self.path, self._keep_last)

    def _complete(self, verb: str, n_bytes: int) -> None:
        self._ended.set()
        self._aside = None
        report(f"{verb} {self.path}", n_bytes, time.perf_counter() - self._start)

    @defer_sigint()
    def discard(self) -> None:
        """Remove the folder of a failed save."""
        self._ended.set()
        # A forked child inherits the writer of a save that its parent still runs.
        if self._aside is not None and self._pid == os.getpid():
            folder.discard(self._aside)
            for made in self._made_parents:
                with contextlib.suppress(OSError):  # another job may use it by now
                    made.rmdir()
        self._aside = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path of a file system."""
        return "://" not in str(checkpoint_id)


def without_group(path: Path) -> CheckpointError:
    """Build the error for a save whose process group is gone."""
    return CheckpointError(
        f"{path}",
        reason="its process group was destroyed before the save was complete",
        remedy="before destroy_process_group(), call result() of the future that "
        "async_save() returned",
    )


@dataclass(frozen=True)
class _Written(WriteResult):
    """One item, with the bytes and the CRC-32 of its file."""

    file: tuple[int, int]


@dataclass(frozen=True)
class _Item:
    """One item of a file: ``before``, ``data`` and ``after``, in this order."""

    request: WriteItem
    offset: int
    before: bytes
    data: Tensor  # 1-D uint8, on any device
    after: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all three."""
        return len(self.before) + self.data.numel() + len(self.after)


def _layout(plan: SavePlan, planner: SavePlanner) -> list[_Item]:
    """Order the items by key and offset, each at a multiple of 64 bytes."""
    items: list[_Item] = []
    offset = 0
    for request in sorted(plan.items, key=lambda i: (i.index.fqn, i.index.offset or ())):
        value = planner.resolve_data(request)
        if isinstance(value, io.BytesIO):
            before, data, after = value.getvalue(), torch.empty(0, dtype=torch.uint8), b""
        else:
            tensor = without_class(value).resolve_conj().resolve_neg().contiguous()
            before, after = envelope(tensor.dtype, tuple(tensor.shape))
            data = as_bytes(tensor)
        items.append(_Item(request, offset, before, data, after))
        offset = align(offset + items[-1].nbytes, ALIGNMENT_BYTES)
    return items


def _write_file(path: Path, items: list[_Item], threads: int | None) -> tuple[int, int]:
    """Write all blocks, then the table of their checksums.

    Returns the bytes of the file, and the table's CRC-32.
    """
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
        text = encode_table(table, BLOCK_BYTES)
        write_bytes(descriptor, end, text, path)
    return end + len(text), zlib.crc32(text[: -TAIL.size])


def _write_block(descriptor: int, path: Path, item: _Item, start: int) -> int:
    """Write one block of an item, from ``start``; return its CRC-32."""
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
