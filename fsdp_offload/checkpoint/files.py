"""Bytes of tensors to and from files: at known offsets, by several threads.

A *block* is what one thread moves at once: large enough that Python costs nothing, small enough to
be still in the cache when its checksum is taken, and the most that a thread holds of a tensor that
is not in host memory.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import torch
from torch import Tensor

from ..core.errors import CheckpointCorruptError, CheckpointError, ConfigError, OffloadError
from ..memory import local_ranks

BLOCK_BYTES: Final = 8 << 20
MAX_THREADS: Final = 16

_scratch = threading.local()
_Result = TypeVar("_Result")


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: 1-D uint8, shared."""
    # One element may have any stride, which view() to another dtype refuses.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def memory_of(block: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable; valid while the tensor lives."""
    nbytes = block.numel() * block.element_size()
    if not nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * nbytes).from_address(block.data_ptr())).cast("B")


def scratch(nbytes: int) -> Tensor:
    """This thread's own buffer, 1-D uint8 of ``nbytes``; the next call reuses it."""
    buffer = getattr(_scratch, "buffer", None)
    if buffer is None or buffer.numel() < nbytes:
        buffer = _scratch.buffer = torch.empty(nbytes, dtype=torch.uint8)
    return buffer[:nbytes]


def on_host(block: Tensor) -> Tensor:
    """``block`` (1-D uint8), or its copy in this thread's scratch if it is on a device."""
    return block if block.device.type == "cpu" else scratch(block.numel()).copy_(block)


def create(path: Path) -> int:
    """A descriptor of a new file."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)


def write_bytes(descriptor: int, offset: int, data: bytes | memoryview, path: object) -> None:
    """Write all of ``data`` at ``offset``.

    Raises:
        CheckpointError: the file system refused.
    """
    rest = memoryview(data)
    try:
        while rest:
            written = os.pwrite(descriptor, rest, offset)
            rest, offset = rest[written:], offset + written
    except OSError as error:
        raise refused(path, error) from error


def read_bytes(descriptor: int, offset: int, into: memoryview | bytearray, path: object) -> None:
    """Fill ``into`` from ``offset``.

    Raises:
        CheckpointCorruptError: the file ends before.
        CheckpointError: the file system refused.
    """
    rest, position = memoryview(into), offset
    try:
        while rest:
            count = os.preadv(descriptor, [rest], position)
            if count == 0:
                raise corrupt(path, f"it ends at byte {position}, before {offset + len(into)}")
            rest, position = rest[count:], position + count
    except OSError as error:
        raise refused(path, error) from error


def fsync(descriptor: int, path: Path) -> None:
    """Make what was written permanent.

    Raises:
        CheckpointError: the file system refused.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise refused(path, error) from error


def fsync_folder(folder: Path) -> None:
    """Make the names in ``folder`` permanent."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    """Make a file that does not exist yet, permanently."""
    descriptor = create(path)
    try:
        write_bytes(descriptor, 0, data, path)
        fsync(descriptor, path)
    finally:
        os.close(descriptor)


def refused(path: object, error: OSError) -> CheckpointError:
    """The error for a file that the file system refuses."""
    reason, remedy = "the file system refused", "free space, or choose a folder of your own"
    if error.errno in (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY):
        reason = "another job saves to the same path or removes it, or ranks see different folders"
        remedy = "give every job a path of its own, which all of its ranks share"
    return CheckpointError(f"{path}", reason=f"{reason}: {error.strerror}", remedy=remedy)


def typed_error(error: BaseException) -> OffloadError:
    """``error``, or the one that stands for an error of another type."""
    if isinstance(error, OffloadError):
        return error
    if isinstance(error, OSError):
        return refused(error.filename or "a file", error)
    return CheckpointError(
        type(error).__name__, reason=str(error), remedy="see its cause, in that rank's log"
    )


@contextlib.contextmanager
def typed() -> Iterator[None]:
    """Errors of other types are raised as those of this package, with the original as cause."""
    try:
        yield
    except Exception as error:
        found = typed_error(error)
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


def thread_count() -> int:
    """Threads that this rank may use for files: its share of the host's cores, at most 16."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MAX_THREADS, cores // local_ranks()))


def run_all(jobs: Iterable[Callable[[], _Result]], *, threads: int | None = None) -> list[_Result]:
    """Run ``jobs`` on ``threads`` threads, of which the caller's is one; their results in order.

    The first error is raised when no job runs any more; jobs not yet begun are dropped.
    """
    waiting = list(enumerate(jobs))[::-1]
    results: dict[int, _Result] = {}
    errors: list[BaseException] = []
    idle = threading.Condition()
    running = 0

    def work() -> None:
        nonlocal running
        while True:
            with idle:
                if errors or not waiting:
                    return
                index, job = waiting.pop()
                running += 1
            try:
                results[index] = job()
            except BaseException as error:
                errors.append(error)
            finally:
                with idle:
                    running -= 1
                    idle.notify_all()

    # No pool of concurrent.futures: it takes no work while the interpreter ends, which is when an
    # asynchronous save is completed; and threading.Thread.start() waits for a thread that has no
    # memory to begin. No job waits for these threads: the caller does what they do not.
    with contextlib.suppress(RuntimeError, MemoryError):
        for _ in range(min(threads or thread_count(), len(waiting)) - 1):
            _thread.start_new_thread(work, ())
    work()
    _scratch.__dict__.clear()  # of this thread, which lives on
    with idle:
        idle.wait_for(lambda: not running)
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(results))]
