"""FSDP2's copies into and out of its communication buffers, without a table on the device.

[Note: tables]
FSDP2 packs a group's gradients with ``fsdp::chunk_cat`` and unpacks an all-gather with
``fsdp::split_with_sizes_copy``. On CUDA each of them sends a table of addresses to the device first
(``pack_vecs`` in torch's aten/src/ATen/native/cuda/TensorShape.cu), in the middle of forward and
backward, and the kernel that reads it waits for whatever bulk is ready on the same copy engine
(:mod:`.device`, "taking turns"). ``torch.cat`` and ``torch._foreach_copy_`` make the same copies
with addresses among a kernel's arguments.

FSDP2 looks both operations up in ``torch.ops.fsdp`` whenever it calls them (torch/distributed/fsdp/
_fully_shard/_fsdp_collectives.py, the same in 2.11 and 2.13). There a function stands before them,
from the first watched group on, that passes on what is not inside :func:`without_tables`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor

MOST: Final = 96
"""Rows above which to make views of them takes longer than the table."""
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
    fits = (
        dim == 0
        and out.dim() == 2
        and out.size(0) == num_chunks
        and _are_plain(tensors, out)
        and all(tensor.dim() and tensor.size(0) % num_chunks == 0 for tensor in tensors)
        and sum(tensor.numel() for tensor in tensors) == out.numel()
    )
    if not fits:
        return False
    parts = [tensor.view(num_chunks, -1) for tensor in tensors]
    if tensors[0].dtype == out.dtype:
        torch.cat(parts, dim=1, out=out)
        return True
    if tensors[0].dtype not in _WIDENED or out.dtype != torch.float32:
        return False
    return _copy_rows(parts, out.split([part.size(1) for part in parts], dim=1))


def split_with_sizes_copy(
    source: Tensor, sizes: Sequence[int], dim: int = 0, *, out: Sequence[Tensor]
) -> bool:
    """``fsdp::split_with_sizes_copy``, if there are few parts; False: nothing was done.

    Args:
        source: ``(ranks, elements of a rank)``.
        sizes: columns of each part.
        dim: 1.
        out: ``(ranks, size)`` for each of ``sizes``.
    """
    fits = (
        dim == 1
        and source.dim() == 2
        and len(out) == len(sizes)
        and _are_plain(out, source)
        and out[0].dtype == source.dtype
        and all(part.shape == (source.size(0), size) for part, size in zip(out, sizes, strict=True))
    )
    return fits and _copy_rows(source.split(list(sizes), dim=1), out)


def _copy_rows(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    """Copy matrices whose rows are contiguous, so that one kernel takes many; False: too many."""
    if len(sources) * sources[0].size(0) > MOST:
        return False
    rows = [row for target in targets for row in target.unbind(0)]
    torch._foreach_copy_(rows, [row for source in sources for row in source.unbind(0)])
    return True


def _are_plain(tensors: Sequence[Tensor], other: Tensor) -> bool:
    """Whether all are ordinary, contiguous tensors of one device; ``tensors``: of one dtype, and
    none of them empty."""
    return (
        len(tensors) > 0
        and type(other) is Tensor
        and other.is_contiguous()
        and all(
            type(tensor) is Tensor
            and tensor.dtype == tensors[0].dtype
            and tensor.device == other.device
            and tensor.numel() > 0
            and tensor.is_contiguous()
            for tensor in tensors
        )
    )
