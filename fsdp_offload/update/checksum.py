"""A position-dependent checksum of tensor bits, to notice outside writes into shards.

``sum((2 i + 1) * bits[i])`` in wrapping int64: any one changed element changes it (an odd factor
times a nonzero difference below 2^32 is never 0 modulo 2^64), and so does any swap of two
different ones. One Triton kernel on CUDA, torch operations elsewhere; the same number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import triton_kernels

_CHUNK = 1 << 20  # elements per pass of the torch operations: 16 MiB of temporaries


def checksum(flat: Tensor) -> Tensor:
    """Checksum of a 1-D contiguous tensor of 2-, 4- or 8-byte elements: 0-dim int64."""
    kernels = triton_kernels() if flat.is_cuda else None
    if kernels is None:
        return checksum_plain(flat)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    kernels.checksum(as_bits(flat), total)
    return total


def checksum_plain(flat: Tensor) -> Tensor:
    """:func:`checksum` in torch operations."""
    bits = as_bits(flat)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        index = torch.arange(start, start + part.numel(), device=flat.device)
        total += (part * (2 * index + 1)).sum()
    return total


def as_bits(flat: Tensor) -> Tensor:
    """The tensor's bits as signed integers of at most 4 bytes."""
    return flat.view(torch.int16 if flat.itemsize == 2 else torch.int32)
