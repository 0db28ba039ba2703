"""Data files: bytes of tensors at known offsets, by several threads, with a table of checksums.

``torch.distributed.checkpoint`` (DCP) wants each item to be readable by ``torch.load`` from its
offset and length, which ``.metadata`` holds. Behind the last item stands what only this package
reads::

    table   uint32 each; per item, in the order of the file: where in the item its elements begin,
            then the CRC-32 of every block of the item, the last one shorter
    tail    CRC-32 of the table, bytes of the table, bytes of a block, magic

so that a reader knows of a truncated file before, and of changed bytes while, it reads them, and
reads only the blocks that it needs. Numbers are little-endian.

A *block* is what one thread moves at once: large enough that Python costs nothing, small enough to
be still in the cache when its checksum is taken, and the most that a thread holds of a tensor that
is not in host memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from ..core.interrupts import held_back
from ..core.progress import progress
from ..link import local_ranks
from ..link.link import buffers

BLOCK_BYTES: Final = 8 << 20
MAX_THREADS: Final = 16
MAGIC: Final = b"FSDPOFF3"
ALIGNMENT_BYTES: Final = 64
"""Items begin at multiples of it, and torch lets elements begin at multiples of 64 within."""

TAIL: Final = struct.Struct("<IQI8s")
_Result = TypeVar("_Result")


# --------------------------------------------------------------------------- bytes


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: 1-D uint8, shared."""
    # One element may have any stride, which view() to another dtype refuses.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def without_class(tensor: Tensor) -> Tensor:
    """A dense tensor as one of no subclass: shares its memory.

    Raises:
        UnsupportedParameterError: it has none, such as a tensor that others stand for.
    """
    plain = tensor.detach()
    if type(plain) is not Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            plain = plain.as_subclass(Tensor)
    if plain.numel() and not plain.is_meta and not plain.data_ptr():
        raise UnsupportedParameterError(
            f"a tensor of type {type(tensor).__name__} and shape {tuple(tensor.shape)}",
            reason="it has no memory of its own that could be copied",
            remedy="leave it out of what is saved, or save a tensor with its values",
        )
    return plain


def memory_of(block: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable; valid while the tensor lives."""
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
                raise corrupt(path, f"it ends at byte {position}, before {offset + len(into)}")
            rest, position = rest[count:], position + count


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[int]:
    """A descriptor of a new file; what was written is permanent when the block ends.

    Raises:
        CheckpointError: the file system refused.
    """
    # An object, which closes it wherever Ctrl-C comes.
    with typed(path), path.open("xb", buffering=0) as file:
        yield file.fileno()
        os.fsync(file.fileno())


def write_whole(path: Path, data: bytes) -> None:
    """Make a file that does not exist yet, permanently."""
    with new_file(path) as descriptor:
        write_bytes(descriptor, 0, data, path)


@held_back()
def fsync_folder(folder: Path) -> None:
    """Make the names in ``folder`` permanent."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --------------------------------------------------------------------------- items and table


def aligned(nbytes: int) -> int:
    """``nbytes``, up to a multiple of the alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class _Sink:
    """A file that keeps what ``torch.save`` writes, but for the elements, which it skips."""

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
    """What ``torch.save`` writes before and behind the elements of a tensor, whatever they are.

    The archive's own CRC-32 of the elements is left out (0), which torch does not compare.
    """
    sink = _Sink()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype, device="cpu"), sink)  # type: ignore[arg-type]
    before, after = sink.written
    return bytes(before), bytes(after)


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
    return text + TAIL.pack(zlib.crc32(text), len(text), block_bytes, MAGIC)


def read_table(path: Path) -> Table | None:
    """The table of a file, or ``None`` if another program wrote the file.

    Raises:
        CheckpointCorruptError: it is missing, or not as it was written.
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
        raise corrupt(path, "its table of checksums is not as it was written")
    return Table(block_bytes, crc, struct.unpack(f"<{nbytes // 4}I", text))


# --------------------------------------------------------------------------- errors


def refused(path: object, error: OSError) -> CheckpointError:
    """The error for a file that the file system refuses."""
    reason, remedy = "the file system refused", "free space, or choose a folder of your own"
    if error.errno in (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY):
        reason = "another program removes or makes it, or ranks see different folders"
        remedy = "choose a folder that all ranks share and that nobody else writes to"
    return CheckpointError(f"{path}", reason=f"{reason}: {error.strerror or error}", remedy=remedy)


def typed_error(error: BaseException, path: object = "a file") -> OffloadError:
    """``error``, or the one that stands for an error of another type."""
    if isinstance(error, OffloadError):
        return error
    if isinstance(error, OSError):
        return refused(error.filename or path, error)
    # Its traceback stays on the rank where it was raised.
    at = "".join(
        f" ({f.name} in {f.filename}:{f.lineno})" for f in extract_tb(error.__traceback__, -1)
    )
    reason = (str(error) or "it has no text of its own") + at
    return CheckpointError(type(error).__name__, reason=reason, remedy="see its cause")


@contextlib.contextmanager
def typed(path: object = "a file") -> Iterator[None]:
    """Errors of other types are raised as those of this package, with the original as cause."""
    try:
        yield
    except Exception as error:
        found = typed_error(error, path)
        if found is error:
            raise
        raise found from error


def corrupt(path: object, reason: str) -> CheckpointCorruptError:
    """The error for a file that is not as it was written."""
    return CheckpointCorruptError(
        f"{path}", reason=reason, remedy="load another checkpoint; this one cannot be repaired"
    )


def check_count(name: str, value: object) -> None:
    """Refuse what is neither None nor a number of things.

    Raises:
        ConfigError: it is not.
    """
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value is not None and not is_count:
        raise ConfigError(
            f"{name}={value!r}",
            reason="a whole number of at least 1 is expected",
            remedy="use 1 or more, or leave it out",
        )


# --------------------------------------------------------------------------- threads


def done(value: _Result) -> Future[_Result]:
    """A future for DCP of what has been done."""
    future: Future[_Result] = Future()
    future.set_result(value)
    return future


def thread_count() -> int:
    """Threads that this rank may use for files: its share of the host's cores, at most 16."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MAX_THREADS, cores // local_ranks()))


def run_all(
    jobs: Iterable[Callable[[], _Result]], *, threads: int | None = None, text: str = ""
) -> list[_Result]:
    """Run ``jobs`` on ``threads`` threads, of which the caller's is one; their results in order.

    With ``text`` a bar says so, and how many of them are done.

    All threads have ended when it returns or raises: the caller closes files that jobs use, and a
    thread that ends beside the interpreter would abort the process. After the first error, and
    after Ctrl-C, no further job begins.
    """
    listed = list(jobs)
    waiting = enumerate(listed)  # for all threads: each takes the next
    results: dict[int, _Result] = {}
    errors: list[BaseException] = []
    others = min(threads or thread_count(), len(listed)) - 1
    with progress(len(listed) if text else 0, text, unit=" blocks") as bar:

        def work() -> None:
            try:
                while not (errors or interrupt.has_come) and (item := next(waiting, None)):
                    results[item[0]] = item[1]()
                    bar.advance()
            except BaseException as error:
                errors.append(error)
            finally:
                buffers.__dict__.clear()

        while len(results) < len(listed) and not errors:  # again if a handler did not raise
            with held_back() as interrupt:
                helpers = [threading.Thread(target=work) for _ in range(others)]
                # While the interpreter ends, none can be started (Python 3.12).
                with contextlib.suppress(RuntimeError):
                    for helper in helpers:
                        helper.start()
                work()
                for helper in helpers:
                    if helper.ident is not None:
                        helper.join()
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(results))]
