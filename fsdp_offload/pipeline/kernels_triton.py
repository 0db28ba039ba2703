"""Triton kernels (CUDA). Their twins in torch operations: ``codec.*_plain``, ``checksum_plain``."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import Kernel

BLOCK: Final = 1024


@triton.jit
def _decode(value, remainder, master, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    high = tl.load(value + at, mask=inside, other=0).to(tl.int32)
    low = tl.load(remainder + at, mask=inside, other=0).to(tl.int32)
    low = tl.where((high & 0x7FFF) == 0, low & 0xFFFF, low)  # nothing is subtracted from a zero
    tl.store(master + at, (high << 16) + low, mask=inside)


@triton.jit
def _encode(master, value, remainder, numel, KEEP: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    bits = tl.load(master + at, mask=inside, other=0)
    low = (bits << 16) >> 16  # sign-extended low half
    high = bits >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = tl.where(is_nan, high | 0x40, high - (low >> 31))
    tl.store(value + at, rounded.to(tl.int16), mask=inside)
    if KEEP:
        tl.store(remainder + at, low.to(tl.int16), mask=inside)


@triton.jit
def _copy_scaled(source, scale, target, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    factor = tl.load(scale)
    product = tl.load(source + at, mask=inside, other=0).to(tl.float32) * factor.to(tl.float32)
    rounded = product.to(factor.dtype)
    tl.store(target + at, rounded.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _checksum(bits, total, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(bits + at, mask=at < numel, other=0).to(tl.int64)
    tl.atomic_add(total, tl.sum(values * (2 * at + 1)))


_DECODE, _ENCODE = Kernel(_decode), Kernel(_encode)
_COPY_SCALED, _CHECKSUM = Kernel(_copy_scaled), Kernel(_checksum)


def _launch(
    kernel: Kernel, numel: int, *operands: Tensor, block: int = BLOCK, **flags: Any
) -> None:
    kernel.launch(triton.cdiv(numel, block), operands, (numel,), **flags, BLOCK=block)


def decode(value: Tensor, remainder: Tensor, master: Tensor) -> None:
    """See :func:`.codec.decode`."""
    _launch(_DECODE, master.numel(), value.view(torch.int16), remainder, master.view(torch.int32))


def encode(master: Tensor, value: Tensor, remainder: Tensor) -> None:
    """See :func:`.codec.encode`."""
    bits = value.view(torch.int16)
    _launch(_ENCODE, master.numel(), master.view(torch.int32), bits, remainder, KEEP=True)


def round_to_value(master: Tensor, value: Tensor) -> None:
    """See :func:`.codec.round_to_value`."""
    bits = value.view(torch.int16)
    _launch(_ENCODE, master.numel(), master.view(torch.int32), bits, bits, KEEP=False)


def copy_scaled(source: Tensor, scale: Tensor, target: Tensor) -> None:
    """See :func:`.codec.copy_scaled`; rounds to the dtype of ``scale``."""
    _launch(_COPY_SCALED, source.numel(), source, scale, target)


def checksum(bits: Tensor, total: Tensor) -> None:
    """Add the checksum of ``bits`` (int16 or int32, 1-D) to ``total`` (0-dim int64)."""
    _launch(_CHECKSUM, bits.numel(), bits, total, block=8192)
