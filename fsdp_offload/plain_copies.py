"""FSDP2's copies into and out of its communication buffers, without a table on the device.

[Note: tables]
FSDP2 packs a group's gradients with ``fsdp::chunk_cat`` and unpacks an all-gather with
``fsdp::split_with_sizes_copy``. On CUDA each of them sends a table of addresses to the device first
(``pack_vecs`` in torch's aten/src/ATen/native/cuda/TensorShape.cu), in the middle of forward and
backward, and the kernel that reads it waits for whatever bulk is ready on the same copy engine
(:mod:`.device`, "taking turns"). ``torch.cat`` and ``copy_`` make the same copies with addresses
among a kernel's arguments.

FSDP2 looks both operations up in ``torch.ops.fsdp`` whenever it calls them (torch/distributed/fsdp/
_fully_shard/_fsdp_collectives.py of torch 2.13; a version that does not is left as it is). There a
function stands before them, from the first watched group on, that passes on what is not inside
:func:`without_tables`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor

_WIDENED: Final = frozenset((torch.bfloat16, torch.float16))


class _Here(threading.local, AbstractContextManager[None]):
    """How deep a thread is inside. Its own context manager: it is entered twice per group."""

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

    def __init__(self, original: Any, plain: Callable[..., bool]) -> None:
        self._original, self._plain = original, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _here.depth and not torch.compiler.is_compiling() and self._plain(*args, **kwargs):
            return None
        return self._original(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


@functools.cache
def _install() -> None:
    for name, plain in (("chunk_cat", chunk_cat), ("split_with_sizes_copy", split_with_sizes_copy)):
        original = getattr(torch.ops.fsdp, name, None)
        if original is not None:  # else FSDP2 does it in another way by now
            setattr(torch.ops.fsdp, name, _Before(original, plain))


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
    if ranks == 1:
        torch._foreach_copy_([part.view(-1) for part in out], source.view(-1).split([*sizes]))
        return True
    source, *targets = _as_words(source, *out)
    # Rows apart from each other: by kernels, not by a copy engine.
    torch._foreach_copy_(targets, source.split([target.size(1) for target in targets], dim=1))
    return True


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
