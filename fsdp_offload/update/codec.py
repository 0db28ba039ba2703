"""Split an fp32 master exactly into a bf16 value and a 16-bit remainder.

``value = (bits + 0x8000) >> 16`` and ``remainder = int16(bits - (value << 16))``: rounding half
away from zero in magnitude, because with ties to even 65537 masters would share an even value and
an int16 could not tell them apart. Decoding is ``(value << 16) + remainder`` in wrapping 32-bit
integers. In halves of the fp32 word: ``remainder`` is the low half, and ``value`` is the high half
plus one if the low half is negative. This holds for all 2^32 patterns, except that adding one can
turn a NaN into another pattern, so the codec sets the quiet bit of every NaN.

No master encodes to a zero with a negative remainder, but a weight that the caller set to zero
keeps its old remainder. Subtracting would give a NaN, so decoding subtracts nothing from a zero.

The int16 is stored as the bf16 tensor of the same bits, because neither NCCL nor gloo supports
int16. Its bf16 values mean nothing, and many are NaN: code may copy, cut and send it, but not cast
it or compute with it. Only this module and the kernels read it as an integer.

Two implementations give the same bits: torch operations (any device), and one Triton kernel each
way (CUDA), see :mod:`.kernels.elementwise`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .kernels import triton_kernels

QUIET_BIT: Final = 0x40  # of a bf16 NaN


def decode(value: Tensor, remainder: Tensor, master: Tensor) -> None:
    """``master[:] = (value, remainder)``. 1-D, same numel: bf16, bf16, fp32; contiguous."""
    kernels = triton_kernels() if master.is_cuda else None
    (decode_plain if kernels is None else kernels.decode)(value, remainder, master)


def decoded(value: Tensor, remainder: Tensor) -> Tensor:
    """As :func:`decode`, into a new master of the shape of ``value``, which is contiguous."""
    master = torch.empty(value.shape, dtype=torch.float32, device=value.device)
    decode(value.view(-1), remainder.reshape(-1), master.view(-1))
    return master


def encode(master: Tensor, value: Tensor, remainder: Tensor) -> None:
    """``(value, remainder)[:] = master``. 1-D, same numel: fp32, bf16, bf16; contiguous."""
    kernels = triton_kernels() if master.is_cuda else None
    (encode_plain if kernels is None else kernels.encode)(master, value, remainder)


def round_to_value(master: Tensor, value: Tensor) -> None:
    """As :func:`encode`, without the remainder."""
    if master.is_cuda and (kernels := triton_kernels()) is not None:
        kernels.round_to_value(master, value)
    else:
        value.view(torch.int16).copy_(_rounded(master))


def decode_plain(value: Tensor, remainder: Tensor, master: Tensor) -> None:
    """As :func:`decode`, in torch operations."""
    halves = master.view(torch.int16).view(-1, 2)  # (numel, 2): low, high (little endian)
    low = remainder.view(torch.int16)
    borrow = (low >> 15).masked_fill_(value == 0, 0)
    torch.add(value.view(torch.int16), borrow, out=halves[:, 1])
    halves[:, 0] = low


def encode_plain(master: Tensor, value: Tensor, remainder: Tensor) -> None:
    """As :func:`encode`, in torch operations."""
    value.view(torch.int16).copy_(_rounded(master))
    remainder.view(torch.int16).copy_(master.view(torch.int16).view(-1, 2)[:, 0])


def _rounded(master: Tensor) -> Tensor:
    halves = master.view(torch.int16).view(-1, 2)  # (numel, 2): low, high
    low, high = halves[:, 0], halves[:, 1]
    return torch.where(master.isnan(), high | QUIET_BIT, high - (low >> 15))


def reseed_where_changed(shard: Tensor, master: Tensor) -> None:
    """Adopt weights that the caller wrote: ``master = shard`` where ``master`` does not round to
    ``shard``. 1-D, same numel, one device. Compares bits, so NaNs count as changed.

    Args:
        shard: bf16, fp16, or of the master's dtype.
        master: in the compute dtype.
    """
    if shard.dtype == master.dtype:
        master.copy_(shard)
        return
    rounded = torch.empty_like(shard)
    if shard.dtype == torch.bfloat16:
        round_to_value(master, rounded)
    else:
        rounded.copy_(master)
    unchanged = rounded.view(torch.int16) == shard.view(torch.int16)
    torch.where(unchanged, master, shard.to(master.dtype), out=master)
