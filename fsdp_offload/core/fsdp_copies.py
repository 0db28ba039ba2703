"""FSDP2's copies into and out of its communication buffers, without a table on the device.

[Note: tables]
FSDP2 packs a group's gradients with ``fsdp::chunk_cat`` and unpacks an all-gather with
``fsdp::split_with_sizes_copy``. On CUDA each of them sends a table of addresses to the device first
(``pack_vecs`` in torch's aten/src/ATen/native/cuda/TensorShape.cu), in the middle of forward and
backward. The kernel that reads the table waits for the bulk copies that are ready on the same copy
engine (:mod:`.backend`, "taking turns"). ``torch.cat`` and ``torch._foreach_copy_`` make the same
copies with addresses among their kernels' arguments: 7 to 10 % of an iteration
(docs/benchmarks/iteration_h100_2026-11-23.md).

FSDP2 calls these operations as ``torch.ops.fsdp.NAME`` (torch/distributed/fsdp/_fully_shard/
_fsdp_collectives.py, 2.11, 2.13, 2.15), which a ``TorchFunctionMode`` sees, on the thread and in
the block that it is entered in. ``chunk_cat_mixed_dtype``, which torch 2.15 calls in place of
``chunk_cat``, is left to torch: it has not been measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_WIDENED: Final = frozenset((torch.bfloat16, torch.float16))


class CopyWithoutTables(TorchFunctionMode):
    """Inside, on this thread, FSDP2 copies without tables where that gives the same bits."""

    def __init__(self) -> None:
        super().__init__()
        # By the operation: FSDP2 may have another one in place of either by now.
        self._replaced: dict[Any, Callable[..., bool]] = {
            operation: copy
            for copy in (chunk_cat, split_with_sizes_copy)
            if (operation := getattr(torch.ops.fsdp, copy.__name__, None)) is not None
        }

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        copy = self._replaced.get(func)
        if copy is not None and copy(*args, **named):
            return None
        return func(*args, **named)


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
    if ranks == 1:  # contiguous: one kernel for all of them
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
