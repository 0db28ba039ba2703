"""Data files: threads write bytes of tensors at known offsets, and a table of checksums.

``torch.distributed.checkpoint`` (DCP) reads each item with ``torch.load`` from its offset and
length, which ``.metadata`` holds. A table that only this package reads follows the last item::

    table   uint32 each; per item, in the order of the file: where in the item its elements begin,
            then the CRC-32 of every block of the item, the last one shorter
    tail    CRC-32 of the table, bytes of the table, bytes of a block, magic

So a reader detects a truncated file before it reads elements and changed bytes while it reads them,
and it reads only the blocks that it needs. Numbers are little-endian.

A thread moves one *block* at a time, large enough to hide Python's cost, and small enough to stay
in the cache for its checksum. A thread holds at most one block of a tensor in device memory; see
``link/link.py: scratch``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future as ConcurrentFuture
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from typing import Final, TypeVar

import torch
from torch import Tensor
from torch.futures import Future

from ..core.errors import (
    CheckpointCorruptError,
    CheckpointError,
    ConfigError,
    OffloadError,
    UnsupportedParameterError,
)
from ..core.interrupts import defer_sigint, let_through
from ..core.progress import Progress
from ..link import cores_per_rank
from ..link.link import buffers

BLOCK_BYTES: Final = 8 << 20
MAX_THREADS: Final = 16
MAGIC: Final = b"FSDPOFF3"
ALIGNMENT_BYTES: Final = 64
"""Items begin at its multiples, and torch lets elements begin at multiples of 64 within."""

TAIL: Final = struct.Struct("<IQI8s")
_Result = TypeVar("_Result")


# --------------------------------------------------------------------------- bytes


def without_class(tensor: Tensor) -> Tensor:
    """View a dense tensor as one of no subclass.

    Raises:
        UnsupportedParameterError: it has no memory, like a wrapper of other tensors.
    """
    plain = tensor.detach()
    if type(plain) is not Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            plain = plain.as_subclass(Tensor)
    if plain.numel() and not plain.is_meta and not plain.data_ptr():
        raise UnsupportedParameterError(
            f"a tensor of type {type(tensor).__name__} and shape {tuple(tensor.shape)}",
            reason="it has no memory of its own",
            remedy="leave it out, or save its values as a plain tensor",
        )
    return plain


def memory_of(block: Tensor) -> memoryview:
    """View the bytes of a contiguous CPU tensor, writable; the caller keeps the tensor alive."""
    nbytes = block.numel() * block.element_size()
    if not nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * nbytes).from_address(block.data_ptr())).cast("B")


def write_bytes(descriptor: int, offset: int, data: bytes | memoryview, path: object) -> None:
    """Write all of ``data`` at ``offset``; ``path``: for the error.

    Raises:
        CheckpointError: the file system refused.
    """
    rest = memoryview(data)
    with typed(path):
        while rest:
            written = os.pwrite(descriptor, rest, offset)
            rest, offset = rest[written:], offset + written


def read_bytes(descriptor: int, offset: int, into: memoryview | bytearray, path: object) -> None:
    """Fill ``into`` from ``offset``.

    Raises:
        CheckpointCorruptError: the file ends before.
        CheckpointError: the file system refused.
    """
    rest, position = memoryview(into), offset
    with typed(path):
        while rest:
            count = os.preadv(descriptor, [rest], position)
            if count == 0:
                raise corrupt(path, f"it ends at byte {position}, before byte {offset + len(into)}")
            rest, position = rest[count:], position + count


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[int]:
    """Open a new file, and flush it to the disk at the end of the ``with`` block.

    Raises:
        CheckpointError: the file system refused.
    """
    # A file object closes its descriptor even if Ctrl-C comes before the next line.
    with typed(path), path.open("xb", buffering=0) as file:
        yield file.fileno()
        os.fsync(file.fileno())


def write_whole(path: Path, data: bytes) -> None:
    """Write a new file and flush it to the disk."""
    with new_file(path) as descriptor:
        write_bytes(descriptor, 0, data, path)


@defer_sigint()
def fsync_folder(folder: Path) -> None:
    """Flush the names in ``folder`` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --------------------------------------------------------------------------- items and table


class _Sink:
    """A file that keeps everything that ``torch.save`` writes except the elements."""

    def __init__(self) -> None:
        self.written = [bytearray(), bytearray()]
        self._at = 0

    def write(self, data: memoryview) -> int:
        self.written[self._at] += data
        return len(data)

    def seek(self, nbytes: int, whence: int) -> None:
        assert whence == os.SEEK_CUR, (nbytes, whence)
        self._at = 1  # the elements would stand here

    def flush(self) -> None:
        pass


@functools.lru_cache(maxsize=1024)
def envelope(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return the bytes that ``torch.save`` writes before and after the elements of a tensor.

    The archive's own CRC-32 of the elements is 0; torch does not compare it.
    """
    sink = _Sink()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype, device="cpu"), sink)  # type: ignore[arg-type]
    before, after = sink.written
    return bytes(before), bytes(after)


@dataclass(frozen=True)
class Checksums:
    """The checksums of one item."""

    data_start: int  # byte of the item where its elements begin; 0 for other values
    crcs: Sequence[int]  # CRC-32 of every block of the item


@dataclass(frozen=True)
class Table:
    """The checksums of a file's items, in the order of their offsets."""

    block_bytes: int
    crc: int
    words: Sequence[int]

    def of(self, items: Iterable[tuple[int, int]], path: Path) -> dict[int, Checksums]:
        """Find checksums by offset; ``items``: offset and length of each, from ``.metadata``."""
        found, at = {}, 0
        for offset, length in sorted(set(items)):
            count = -(-length // self.block_bytes)
            words = self.words[at : at + 1 + count]
            if len(words) != 1 + count or words[0] > length:
                raise corrupt(path, f"its checksum table lacks the item at byte {offset}")
            found[offset] = Checksums(words[0], words[1:])
            at += 1 + count
        if at != len(self.words):
            raise corrupt(path, "its checksum table and .metadata list different items")
        return found


def encode_table(items: Iterable[Checksums], block_bytes: int) -> bytes:
    """Encode the table and the tail."""
    words = [word for item in items for word in (item.data_start, *item.crcs)]
    text = struct.pack(f"<{len(words)}I", *words)
    return text + TAIL.pack(zlib.crc32(text), len(text), block_bytes, MAGIC)


def read_table(path: Path) -> Table | None:
    """Read the table of a file; ``None``: another program wrote the file.

    Raises:
        CheckpointCorruptError: the file is missing, or its table changed.
    """
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END) - TAIL.size
            file.seek(max(0, end))
            tail = file.read()
            if end < 0 or not tail.endswith(MAGIC):
                return None
            crc, nbytes, block_bytes, _ = TAIL.unpack(tail)
            file.seek(max(0, end - nbytes))
            text = file.read(min(nbytes, end))
    except OSError as error:
        raise corrupt(path, f"it cannot be read: {error.strerror}") from error
    if len(text) != nbytes or zlib.crc32(text) != crc or nbytes % 4 or not block_bytes:
        raise corrupt(path, "its checksum table changed after it was written")
    return Table(block_bytes, crc, struct.unpack(f"<{nbytes // 4}I", text))


# --------------------------------------------------------------------------- errors


def typed_error(error: BaseException, path: object = "a file") -> OffloadError:
    """Return ``error``, or for another type an error of this package."""
    if isinstance(error, OffloadError):
        return error
    if isinstance(error, OSError):
        reason, remedy = (
            "the file system refused",
            "free disk space, or choose a folder of your own",
        )
        if error.errno in (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY):
            reason = "another program creates or removes it, or the ranks do not share the folder"
            remedy = "choose a folder that all ranks share and no other program writes to"
        what, reason = f"{error.filename or path}", f"{reason}: {error.strerror or error}"
        return CheckpointError(what, reason=reason, remedy=remedy)
    # Other ranks see the text only: the traceback stays where the error was raised.
    at = "".join(
        f" ({f.name} in {f.filename}:{f.lineno})" for f in extract_tb(error.__traceback__, -1)
    )
    what, reason = type(error).__name__, (str(error) or "the error has no text") + at
    return CheckpointError(what, reason=reason, remedy="read the cause of this error")


@contextlib.contextmanager
def typed(path: object = "a file") -> Iterator[None]:
    """Raise errors of other types as errors of this package, with the original as cause."""
    try:
        yield
    except Exception as error:
        found = typed_error(error, path)
        if found is error:
            raise
        raise found from error


def corrupt(path: object, reason: str) -> CheckpointCorruptError:
    """Build the error for a file that is damaged."""
    return CheckpointCorruptError(
        f"{path}", reason=reason, remedy="load another checkpoint; this one cannot be repaired"
    )


def check_count(name: str, value: object) -> None:
    """Refuse a value that is neither None nor a whole number of at least 1."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value is not None and not is_count:
        raise ConfigError(
            f"{name}={value!r}",
            reason="it must be an integer of at least 1",
            remedy="use 1 or more, or leave it out",
        )


# --------------------------------------------------------------------------- threads


def done(value: _Result) -> Future[_Result]:
    """Return a completed future, for DCP."""
    future: Future[_Result] = Future()
    future.set_result(value)
    return future


def run_all(
    jobs: Iterable[Callable[[], _Result]], *, threads: int | None = None, text: str = ""
) -> list[_Result]:
    """Run ``jobs`` on ``threads`` threads; returns their results in order.

    With ``text``, a bar shows it and the number of finished jobs.

    All threads have ended when it returns or raises, because the caller closes files that jobs use,
    and a thread that outlives the interpreter would abort the process. After the first error, and
    after Ctrl-C, no further job begins.
    """
    listed, turns, is_over = list(jobs), itertools.count(), threading.Event()
    results: dict[int, _Result] = {}
    count = max(1, min(threads or min(MAX_THREADS, cores_per_rank()), len(listed)))
    pool, futures = ThreadPoolExecutor(count), list[ConcurrentFuture[None]]()
    with Progress(len(listed) if text else 0, text, unit=" blocks") as bar, defer_sigint():

        def work() -> None:  # a future per job would cost as much as copying a block
            try:
                while (turn := next(turns)) < len(listed) and not is_over.is_set():
                    results[turn] = listed[turn]()
                    bar.advance()
            except BaseException:
                is_over.set()
                raise

        try:
            with contextlib.suppress(RuntimeError):  # an ending interpreter starts no thread
                futures.extend(pool.submit(work) for _ in range(count))
            if len(futures) < count:
                work()
            is_done = False
            while not is_done:
                wait(futures, timeout=0.1)
                # Raises KeyboardInterrupt after Ctrl-C. Around a mere ``pass``, CPython 3.11 would
                # raise it at an instruction that no ``finally`` protects.
                with let_through():
                    is_done = all(future.done() for future in futures)
            for future in futures:
                future.result()
        finally:
            is_over.set()
            pool.shutdown(cancel_futures=True)
            buffers.__dict__.clear()
    return [results[turn] for turn in range(len(listed))]
