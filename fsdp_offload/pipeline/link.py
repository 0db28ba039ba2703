"""Copies between device and page-locked host memory by a kernel instead of a copy engine.

[Note: copy engines]
A copy waits for everything in the same hardware queue before it, whichever stream that belongs to
(:mod:`..queues`), and an engine stays with a queue as long as that has copies ready. Behind what
the streamed lane has enqueued, buckets of the host lane waited for up to 150 ms (measured,
docs/how-it-works.md). A kernel reads and writes page-locked memory over the same link, and waits in
no such queue.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .kernels import triton_kernels

WORDS: Final = (torch.int32, torch.int16, torch.int8)
"""What a kernel may copy by; the last one of some divides any number of bytes."""


def copy_across(source: Tensor, target: Tensor, *, pinned: bool) -> None:
    """``target[:] = source``, one of them on the host, on the current stream.

    Args:
        source: 1-D, contiguous.
        target: likewise, of the same dtype; it does not overlap.
        pinned: the one on the host is page-locked. Else, without Triton, and where nothing is a
            device's, it is an ordinary copy.
    """
    is_cuda = source.is_cuda or target.is_cuda
    kernels = triton_kernels() if pinned and is_cuda else None
    if kernels is None:
        target.copy_(source, non_blocking=True)
        return
    n_bytes = source.numel() * source.itemsize
    word = next(w for w in WORDS if n_bytes % w.itemsize == 0)
    kernels.copy_across(source.view(word), target.view(word))
