"""FSDP2's copies into and out of its communication buffers, without a table on the device.

[Note: tables]
FSDP2 packs a group's gradients with ``fsdp::chunk_cat`` and unpacks an all-gather with
``fsdp::split_with_sizes_copy``. On CUDA each of them sends a table of addresses to the device first
(``pack_vecs`` in torch's aten/src/ATen/native/cuda/TensorShape.cu), in the middle of forward and
backward, and the kernel that reads it waits for whatever bulk is ready on the same copy engine
(:mod:`.device`, "taking turns"). A kernel of ours makes the same copies with addresses among its
arguments, in one launch for up to 16 tensors; where that cannot be used, ``torch.cat`` and
``copy_`` do.

The third of its copies, ``fsdp::all_gather_copy_in``, sends no table, but goes through torch's
dispatcher and back into Python: that kernel makes it, too, without that way.

FSDP2 looks these operations up in ``torch.ops.fsdp`` whenever it calls them (torch/distributed/
fsdp/_fully_shard/_fsdp_collectives.py, 2.11, 2.13, 2.15). An operation with other arguments is left
as it is, so is what torch 2.15 calls instead of ``chunk_cat``, ``chunk_cat_mixed_dtype``: it has
not been measured. Before the others there stands a function, from the first watched group on, that
passes on what is not inside :func:`without_tables`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor

from .launching import if_usable

_log = logging.getLogger("fsdp_offload")

_WIDENED: Final = frozenset((torch.bfloat16, torch.float16))


class _Here(threading.local, AbstractContextManager[None]):
    """How deep a thread is inside. Its own context manager: it is entered thrice per group."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


_here = _Here()


def without_tables() -> AbstractContextManager[None]:
    """Inside, on this thread, FSDP2 copies without tables where that gives the same bits."""
    _install()
    return _here


class _Before:
    """Stands before an operation of ``torch.ops.fsdp``, for which it passes in all else."""

    def __init__(self, original: Any, plain: Callable[..., Any]) -> None:
        self._original, self._plain = original, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _here.depth and not torch.compiler.is_compiling():
            done = self._plain(*args, **kwargs)
            if done:
                return None if done is True else done
        return self._original(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


@functools.cache
def _install() -> None:
    for plain in (chunk_cat, split_with_sizes_copy, all_gather_copy_in):
        original = getattr(torch.ops.fsdp, plain.__name__, None)
        if original is None:  # FSDP2 does it in another way by now
            continue
        takes = len(original.default._schema.arguments)
        if takes == len(inspect.signature(plain).parameters):
            setattr(torch.ops.fsdp, plain.__name__, _Before(original, plain))
    if hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype"):
        _log.info("torch %s packs gradients with a table on the device", torch.__version__)


def prepare(device: torch.device) -> None:
    """Do what the first copies on ``device`` would have to do: compile the kernel, and try it."""
    _install()
    if device.type == "cuda":
        _row_kernel(device)


def chunk_cat(tensors: Sequence[Tensor], dim: int, num_chunks: int, *, out: Tensor) -> bool:
    """``fsdp::chunk_cat``, if nothing has to be padded; False: nothing was done.

    Args:
        tensors: gradients, each of any shape; of the dtype of ``out``, or of 16 bits for fp32.
        dim: 0.
        num_chunks: ranks, which each tensor's first dimension is cut for.
        out: ``(num_chunks, elements of a rank)``: row ``i`` becomes part ``i`` of each tensor.
    """
    if not tensors or dim != 0 or out.dim() != 2 or out.size(0) != num_chunks:
        return False
    dtype = tensors[0].dtype
    if not _are_plain((out,), out.dtype) or not _are_plain(tensors, dtype):
        return False
    numels = [tensor.numel() for tensor in tensors]
    if sum(numels) != out.numel() or not all(numels):
        return False
    if any(not tensor.dim() or tensor.size(0) % num_chunks for tensor in tensors):
        return False
    parts = [tensor.view(num_chunks, -1) for tensor in tensors]
    if dtype == out.dtype:
        if not _by_kernel(out, parts, into_matrix=True):
            torch.cat(parts, dim=1, out=out)
        return True
    if dtype in _WIDENED and out.dtype == torch.float32:
        torch._foreach_copy_(out.split([numel // num_chunks for numel in numels], dim=1), parts)
        return True
    return False


def split_with_sizes_copy(
    source: Tensor, sizes: Sequence[int], dim: int = 0, *, out: Sequence[Tensor]
) -> bool:
    """``fsdp::split_with_sizes_copy``, of plain tensors; False: nothing was done.

    Args:
        source: ``(ranks, elements of a rank)``.
        sizes: columns of each part.
        dim: 1.
        out: ``(ranks, size)`` for each of ``sizes``.
    """
    if not out or dim != 1 or source.dim() != 2:
        return False
    if not _are_plain((source, *out), source.dtype):
        return False
    ranks = source.size(0)
    if not all(sizes) or [part.shape for part in out] != [(ranks, size) for size in sizes]:
        return False
    if _by_kernel(source, out, into_matrix=False):
        return True
    if ranks == 1:
        torch._foreach_copy_([part.view(-1) for part in out], source.view(-1).split([*sizes]))
        return True
    source, *targets = _as_words(source, *out)
    # Rows apart from each other: by kernels, not by a copy engine.
    torch._foreach_copy_(targets, source.split([target.size(1) for target in targets], dim=1))
    return True


def all_gather_copy_in(
    tensors: Sequence[Tensor], gathered: Tensor, sizes: Sequence[int], numel: int, rank: int
) -> tuple[Tensor, Tensor] | bool:
    """``fsdp::all_gather_copy_in``; False: nothing was done.

    Args:
        tensors: shards, 1-D.
        gathered: 1-D, elements of all ranks; of the same dtype.
        sizes: elements of each of ``tensors``.
        numel: their sum.
        rank: this one.

    Returns:
        This rank's part of ``gathered``, which becomes the shards, and ``gathered``.
    """
    if not tensors or not _are_plain((gathered, *tensors), gathered.dtype):
        return False
    if [tensor.shape for tensor in tensors] != [(size,) for size in sizes]:
        return False
    mine = gathered.narrow(0, numel * rank, numel)
    parts = [tensor.view(1, -1) for tensor in tensors]
    if not all(sizes) or not _by_kernel(mine.view(1, -1), parts, into_matrix=True):
        torch._foreach_copy_(mine.split([*sizes]), [*tensors])
    return mine, gathered


def _by_kernel(matrix: Tensor, parts: Sequence[Tensor], *, into_matrix: bool) -> bool:
    """:func:`.kernels_rows.copy_rows`; False, and nothing was done, where that cannot be used."""
    if not matrix.is_cuda or any(part.device != matrix.device for part in parts):
        return False
    if any(tensor.is_conj() or tensor.is_neg() for tensor in (matrix, *parts)):
        return False  # memory does not say what the values are
    copy_rows = _row_kernel(matrix.device)
    return copy_rows is not None and copy_rows(matrix, parts, into_matrix=into_matrix)


@functools.cache
def _row_kernel(device: torch.device) -> Callable[..., bool] | None:
    """None as of :func:`.launching.if_usable`, and with AMD's, where no launch is remembered."""
    if torch.version.hip is not None:
        return None
    return if_usable(functools.partial(_tried_row_kernel, device))


def _tried_row_kernel(device: torch.device) -> Callable[..., bool]:
    from .kernels_rows import copy_rows

    parts = [torch.arange(4 * width, device=device).view(2, -1) for width in (4, 6)]
    matrix, cut = torch.cat(parts, dim=1), [torch.zeros_like(part) for part in parts]
    for _ in range(2):  # the second launch is of a variant that is known (launching.py)
        made = torch.zeros_like(matrix)
        done = copy_rows(made, parts, into_matrix=True), copy_rows(matrix, cut, into_matrix=False)
        if not all(done) or not torch.equal(made, matrix) or not all(map(torch.equal, cut, parts)):
            raise RuntimeError("a copy has other words than its source")
    return copy_rows


def _as_words(*matrices: Tensor) -> Sequence[Tensor]:
    """The same as int64, for kernels that move elements; as they are where one has parts of words.

    All are contiguous and of one dtype.
    """
    count = 8 // matrices[0].itemsize  # 0 of complex128
    if count == 0 or any(
        matrix.size(1) % count or matrix.storage_offset() % count for matrix in matrices
    ):
        return matrices
    return [matrix.view(torch.int64) for matrix in matrices]


def _are_plain(tensors: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether all are ordinary tensors, contiguous, of that dtype."""
    return all(
        type(tensor) is Tensor and tensor.dtype == dtype and tensor.is_contiguous()
        for tensor in tensors
    )
