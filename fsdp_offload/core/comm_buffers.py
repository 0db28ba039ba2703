"""Copies in and out of FSDP2's collectives without address tables.

FSDP2 packs a group's gradients with ``fsdp::chunk_cat`` and unpacks an all-gather with
``fsdp::split_with_sizes_copy``. On CUDA each of them sends a table of addresses to the device first
(``pack_vecs`` in torch's aten/src/ATen/native/cuda/TensorShape.cu), in the middle of forward and
backward. The kernel that reads the table waits for the bulk copies that are ready on the same copy
engine (:mod:`.devices`, "taking turns"). ``torch.cat`` and ``torch._foreach_copy_`` make the same
copies with addresses among their kernels' arguments: 7 to 10 % of an iteration
of 1.33B parameters on one H100.

FSDP2 calls these operations as ``torch.ops.fsdp.NAME``, with the buffer of the collective, which it
allocates by ``_all_gather_comm`` or ``_reduce_scatter_comm`` of the group (torch/distributed/fsdp/
_fully_shard/_fsdp_collectives.py, 2.11, 2.13, 2.15). So that buffer gets a class that implements
them differently. A ``TorchFunctionMode`` would see every call of FSDP2: 12,000 in an iteration of
60 layers. ``chunk_cat_mixed_dtype``, which torch 2.15 calls instead of ``chunk_cat``, stays with
torch, unmeasured. While no state travels, no bulk copies are in the way, and torch's own operations
take less host time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

_WIDENED: Final = frozenset((torch.bfloat16, torch.float16))


class CommBuffer(Tensor):
    """A buffer of FSDP2's collectives that copies without address tables if the bits are the same.
    Results are plain tensors."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            copy = _replaced().get(func)
            if copy is not None and copy(*args, **named):
                return None
            found = func(*args, **named)
            if func is Tensor.view and found.dim() == 2:  # as FSDP2 cuts it for the copy
                return found.as_subclass(cls)
            return found


@functools.cache
def _replaced() -> dict[Any, Callable[..., bool]]:
    """Replacements by operation; later versions of FSDP2 may lack either operation."""
    return {
        operation: copy
        for copy in (chunk_cat, split_with_sizes_copy)
        if (operation := getattr(torch.ops.fsdp, copy.__name__, None)) is not None
    }


class _FirstBuffer:
    """Wraps a ``comm`` of FSDP2, which allocates the copied side of the collective first."""

    def __init__(self, comm: Any) -> None:
        self._comm, self._is_first = comm, True

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        buffer: Tensor = self._comm.allocate(*args, **kwargs)
        is_first, self._is_first = self._is_first, False
        return buffer.as_subclass(CommBuffer) if is_first and type(buffer) is Tensor else buffer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._comm(*args, **kwargs)


@contextlib.contextmanager
def copies_without_tables(raw: Any, name: str) -> Iterator[None]:
    """Give a collective of an FSDP2 group a :class:`CommBuffer` inside the context.

    Args:
        raw: the group.
        name: its attribute with the collective, which FSDP2's public setters replace.
    """
    comm = getattr(raw, name)
    setattr(raw, name, _FirstBuffer(comm))
    try:
        yield
    finally:
        setattr(raw, name, comm)


def chunk_cat(tensors: Sequence[Tensor], dim: int, num_chunks: int, *, out: Tensor) -> bool:
    """Run ``fsdp::chunk_cat`` if nothing needs padding; else return False.

    Args:
        tensors: gradients of any shape, in the dtype of ``out``, or 16-bit for fp32.
        dim: 0.
        num_chunks: number of ranks; cuts each tensor's first dimension.
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
    """Run ``fsdp::split_with_sizes_copy`` on plain tensors; else return False.

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
    if ranks == 1:  # contiguous: one kernel for all of them
        torch._foreach_copy_([part.view(-1) for part in out], source.view(-1).split([*sizes]))
        return True
    source, *targets = _as_words(source, *out)
    # The rows are apart, so kernels copy them, not a copy engine.
    torch._foreach_copy_(targets, source.split([target.size(1) for target in targets], dim=1))
    return True


def _as_words(*matrices: Tensor) -> Sequence[Tensor]:
    """View the matrices as int64 for copy kernels; unchanged if a row is not a multiple of 8 bytes.

    All are contiguous and of one dtype.
    """
    count = 8 // matrices[0].itemsize  # 0 of complex128
    if count == 0 or any(
        matrix.size(1) % count or matrix.storage_offset() % count for matrix in matrices
    ):
        return matrices
    return [matrix.view(torch.int64) for matrix in matrices]


def _are_plain(tensors: Sequence[Tensor], dtype: torch.dtype) -> bool:
    return all(
        type(tensor) in (Tensor, CommBuffer) and tensor.dtype == dtype and tensor.is_contiguous()
        for tensor in tensors
    )
