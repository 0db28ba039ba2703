"""Writing an export: boxes go straight into the byte ranges of files, block by block.

Files stand as ``*.tmp`` until every rank is done with all of them.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ..chunks import Box
from ..errors import CheckpointError
from ..pipeline import codec
from .blocks import memory_of, run_all, write_bytes
from .export_plan import INDEX, File, Found, Share, index_of
from .folder import fsync_folder

STEP_BYTES: Final = 1 << 20
"""Of a file, converted and written at once. With weight, remainder and the decoder's scratch a
thread holds about three times as much, so that eight of them stay below one bucket (32 MiB)."""

_TEMPORARY: Final = ".tmp"
_OUR_FILES: Final = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")

Read = Callable[[str, Box, Box], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Source:
    """Where weights come from.

    Args:
        found: the tensors, in the order of the files.
        read: of an FQN, one of its boxes and a part of that: the part of the weight as stored, and
            of its master (remainder, or whole) where that decides; on any device.
        part_numel: of what is read at once, at most.
        threads: that read; ``None``: this rank's share of the cores.
    """

    found: Sequence[Found]
    read: Read
    part_numel: int
    threads: int | None = None


class Output:
    """The files of an export, temporary until :meth:`publish`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: tuple[File, ...] = ()
        self._made: dict[Path, tuple[int, int]] = {}

    def create(self, files: tuple[File, ...]) -> None:
        """First rank: make the temporary files, of full size, with their headers.

        Raises:
            CheckpointError: the folder is a file, or the file system refused.
        """
        self._files = files
        if self._folder.exists() and not self._folder.is_dir():
            raise CheckpointError(
                f"{self._folder}",
                reason="it is a file, and a folder is needed",
                remedy="name a folder, which may not exist yet",
            )
        with _refusals(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            for file in files:
                self._make(file.name, file.header, file.nbytes)
            if len(files) > 1:
                content = index_of(files)
                self._make(INDEX, content, len(content))

    def _make(self, name: str, begin: bytes, nbytes: int) -> None:
        path = self._temporary(name)
        path.unlink(missing_ok=True)  # of an export that was killed
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            found = os.fstat(descriptor)
            self._made[path] = found.st_dev, found.st_ino
            os.ftruncate(descriptor, nbytes)
            write_bytes(descriptor, 0, begin, path)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def write(
        self, shares: Sequence[Share], source: Source, advance: Callable[[int], None]
    ) -> None:
        """Write this rank's shares, and make them permanent.

        Raises:
            CheckpointError: this rank does not see a file, or the file system refused.
        """
        for name, of_file in itertools.groupby(shares, key=lambda share: share.file):
            path = self._temporary(name)
            try:
                descriptor = os.open(path, os.O_WRONLY)
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"{path}",
                    reason="the first rank made it, but this one does not see it",
                    remedy="export to a folder that all ranks share",
                ) from error
            write = functools.partial(_write_part, descriptor, path, source.read, advance)
            jobs = (
                functools.partial(write, share, box, part)
                for share in of_file
                for box in share.boxes
                for part in split(box, source.part_numel)
            )
            try:
                run_all(jobs, threads=source.threads)
                with _refusals(path):
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def publish(self) -> tuple[Path, ...]:
        """First rank, when all files are complete: give them their names, remove an earlier export.

        The index goes first and comes last, so that at no time it names files of two exports.

        Returns:
            The files, the index last.

        Raises:
            CheckpointError: the file system refused, or another export wrote to the folder.
        """
        if others := [path for path in self._made if not self._is_ours(path)]:
            raise CheckpointError(
                f"{others[0]}",
                reason="it is not the file that was made: another export writes to this folder",
                remedy="export a checkpoint from one process only, into a folder of its own",
            )
        index = self._folder / INDEX
        named = [self._folder / file.name for file in self._files]
        done: list[Path] = []
        with _refusals(self._folder):
            try:
                index.unlink(missing_ok=True)
                for path in named:
                    self._temporary(path.name).rename(path)
                    done.append(path)
                for path in self._folder.iterdir():
                    if path not in named and _OUR_FILES.fullmatch(path.name):
                        path.unlink()
                if len(named) > 1:
                    self._temporary(INDEX).rename(index)
                    named.append(index)
            except OSError:
                for path in done:
                    path.unlink(missing_ok=True)
                raise
            fsync_folder(self._folder)
        return tuple(named)

    def discard(self) -> None:
        """Remove temporary files. Never raises: an error is on its way."""
        for path in self._made:
            if self._is_ours(path):
                with suppress(OSError):
                    path.unlink()

    def _is_ours(self, path: Path) -> bool:
        """Whether it is the file that was made, and no other export's."""
        try:
            found = path.stat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._made[path]

    def _temporary(self, name: str) -> Path:
        return self._folder / (name + _TEMPORARY)


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Errors of the file system, typed."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path}",
            reason=f"the file system refused: {error.strerror}",
            remedy="free space, or choose a folder that this process may write to",
        ) from error


def _write_part(
    descriptor: int,
    path: Path,
    read: Read,
    advance: Callable[[int], None],
    share: Share,
    box: Box,
    part: Box,
) -> None:
    """Read a part of a box, and write it to its byte ranges, step by step."""
    entry, size = share.entry, share.entry.dtype.itemsize
    weight, master = read(entry.fqn, box, part)
    for step in split(part, STEP_BYTES // size):
        piece = None if master is None else narrow(master, part, step)
        block = value(narrow(weight, part, step), piece, entry.dtype)
        memory = memory_of(block)
        numel, starts = runs(entry.shape, step)
        for index, start in enumerate(starts):
            data = memory[index * numel * size : (index + 1) * numel * size]
            write_bytes(descriptor, share.offset + start * size, data, path)
        advance(len(memory))


def narrow(tensor: Tensor, whole: Box, box: Box) -> Tensor:
    """``box`` of a tensor that holds ``whole``: a view."""
    for dim, start in enumerate(box.offsets):
        tensor = tensor.narrow(dim, start - whole.offsets[dim], box.sizes[dim])
    return tensor


def split(box: Box, max_numel: int) -> Iterator[Box]:
    """Parts of ``box`` of at most ``max_numel`` elements, in row-major order.

    Each is contiguous where the box is.
    """
    if box.numel <= max_numel:
        if box.numel:
            yield box
        return
    row_numel = math.prod(box.sizes[1:])
    first, rows = box.offsets[0], box.sizes[0]
    if row_numel <= max_numel:
        step = max_numel // row_numel
        for start in range(0, rows, step):
            count = min(step, rows - start)
            yield Box((first + start, *box.offsets[1:]), (count, *box.sizes[1:]))
        return
    for row in range(first, first + rows):
        for inner in split(Box(box.offsets[1:], box.sizes[1:]), max_numel):
            yield Box((row, *inner.offsets), (1, *inner.sizes))


def runs(shape: Sequence[int], box: Box) -> tuple[int, Iterator[int]]:
    """A box as stretches of the row-major tensor: elements of each, and where they begin."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    dim, numel = len(shape), 1
    while dim:
        dim -= 1
        numel *= box.sizes[dim]
        if box.sizes[dim] != shape[dim]:
            break
    base = sum(o * s for o, s in zip(box.offsets[dim:], strides[dim:], strict=True))
    outer = [
        range(offset * stride, (offset + size) * stride, stride)
        for offset, size, stride in zip(
            box.offsets[:dim], box.sizes[:dim], strides[:dim], strict=True
        )
    ]
    return numel, (base + sum(position) for position in itertools.product(*outer))


def value(weight: Tensor, master: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A block as it is written: contiguous, on the CPU, of ``dtype``.

    Args:
        weight: of any shape, as stored.
        master: of the same shape: the remainder (bf16), or the whole master; ``None``: none.
        dtype: another than the weight's only where masters count.
    """
    weight = weight.cpu().contiguous()
    if master is None or dtype == weight.dtype:
        return weight.to(dtype)
    flat, master = weight.reshape(-1), master.cpu().contiguous().reshape(-1)
    if master.dtype == torch.bfloat16:
        whole = torch.empty(flat.numel(), dtype=torch.float32, device="cpu")
        codec.decode(flat, master, whole)
    else:
        whole = _unless_overwritten(flat, master)
    return whole.to(dtype).view(weight.shape)


def _unless_overwritten(weight: Tensor, master: Tensor) -> Tensor:
    """``master``, but the weight where the two differ by more than rounding: it was written from
    outside, and the next step would take it over."""
    rounded = master.to(weight.dtype)
    same = rounded.view(torch.int16) == weight.view(torch.int16)
    if weight.dtype == torch.bfloat16:
        codec.round_to_value(master, rounded)  # ties differ from torch's
        same |= rounded.view(torch.int16) == weight.view(torch.int16)
    return torch.where(same, master, weight.to(master.dtype))
