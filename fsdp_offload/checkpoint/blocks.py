"""Bytes of tensors to and from files: in blocks, each with a CRC-32, by several threads.

A block is what one thread moves at once: large enough that Python costs nothing, small enough to
be still in the cache when its checksum is taken, and the most that a thread holds of a tensor that
is not in host memory.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import threading
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar

import torch
from torch import Tensor

from ..errors import CheckpointCorruptError, CheckpointError
from ..memory import local_ranks

BLOCK_BYTES: Final = 8 << 20
MAX_THREADS: Final = 16

_scratch = threading.local()
_Result = TypeVar("_Result")


class TensorSource:
    """Bytes that are to be written: the elements of a dense tensor, row-major."""

    def __init__(self, tensor: Tensor) -> None:
        flat = tensor.detach().resolve_conj().resolve_neg()
        if not flat.is_contiguous():
            flat = flat.contiguous()
        self._bytes = as_bytes(flat)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._bytes.numel()

    def block(self, start: int, stop: int) -> Tensor:
        """Bytes ``[start, stop)``: 1-D uint8, contiguous, on any device."""
        return self._bytes[start:stop]


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


def write_block(descriptor: int, offset: int, block: Tensor, path: object) -> int:
    """Write a block (1-D uint8) at ``offset``; returns its CRC-32.

    Raises:
        CheckpointError: the file system refused.
    """
    if block.device.type != "cpu":
        block = scratch(block.numel()).copy_(block)
    memory = memory_of(block)
    write_bytes(descriptor, offset, memory, path)
    return zlib.crc32(memory)


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
        raise CheckpointError(
            f"{path}",
            reason=f"writing at byte {offset} failed: {error.strerror}",
            remedy="free space or choose another folder, and save again",
        ) from error


def write_whole(path: Path, data: bytes) -> None:
    """Make a file that does not exist yet, permanently.

    Raises:
        CheckpointError: the file system refused.
    """
    descriptor = create(path)
    try:
        write_bytes(descriptor, 0, data, path)
        fsync(descriptor, path)
    finally:
        os.close(descriptor)


def create(path: Path) -> int:
    """A descriptor of a new file; errors as of :func:`write_whole`."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except (FileExistsError, FileNotFoundError) as error:
        raise contested(path, error) from error
    except OSError as error:
        raise CheckpointError(
            f"{path}",
            reason=f"it cannot be created: {error.strerror}",
            remedy="choose a folder that this process may write to",
        ) from error


def contested(path: Path, error: OSError) -> CheckpointError:
    """The error for files of a save that come or go while it writes."""
    return CheckpointError(
        f"{path}",
        reason=f"another job saves to the same path, or removes it: {error.strerror}",
        remedy="give every job a path of its own",
    )


def fsync(descriptor: int, path: Path) -> None:
    """Make what was written permanent; errors as of :func:`write_whole`."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise CheckpointError(
            f"{path}",
            reason=f"it could not be made permanent: {error.strerror}",
            remedy="free space or choose another folder, and save again",
        ) from error


def read_block(descriptor: int, offset: int, block: Tensor, crc: int | None, path: object) -> None:
    """Fill a block (1-D uint8, CPU) from ``offset`` and compare its CRC-32 with ``crc``.

    Raises:
        CheckpointCorruptError: the file ends before, or the checksum differs.
        CheckpointError: the file system refused.
    """
    memory = memory_of(block)
    read_bytes(descriptor, offset, memory, path)
    if crc is not None and (found := zlib.crc32(memory)) != crc:
        raise corrupt(
            path,
            f"bytes {offset} to {offset + len(memory)} have checksum {found:08x}, "
            f"but {crc:08x} was written",
        )


def read_bytes(descriptor: int, offset: int, into: memoryview, path: object) -> None:
    """Fill ``into`` from ``offset``; errors as of :func:`read_block`."""
    rest, position = into, offset
    try:
        while rest:
            count = os.preadv(descriptor, [rest], position)
            if count == 0:
                raise corrupt(path, f"it ends at byte {position}, before {offset + len(into)}")
            rest, position = rest[count:], position + count
    except OSError as error:
        raise CheckpointError(
            f"{path}",
            reason=f"reading at byte {position} failed: {error.strerror}",
            remedy="check the file system, and load again",
        ) from error


def corrupt(path: object, reason: str) -> CheckpointCorruptError:
    """The error for a file that is not as it was written."""
    return CheckpointCorruptError(
        f"{path}", reason=reason, remedy="load another checkpoint; this one cannot be repaired"
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

    # Not threading.Thread, whose start() waits for ever for a thread that has no memory to begin.
    # No thread waits for these to begin: the caller does what they do not.
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
