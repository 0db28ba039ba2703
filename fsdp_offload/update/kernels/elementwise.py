"""Triton kernels (CUDA) for masters, and functions that kernels share.

Plain forms in torch operations: ``codec.*_plain``.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import Kernel

BLOCK: Final = 1024


@triton.jit
def row_of(program, table, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the row of a :class:`.launching.AddressTable`, one of up to eight, for a program."""
    which = 0
    for other in tl.static_range(1, 8):
        which += (program >= tl.load(table + other * WIDTH)).to(tl.int32)
    return which


@triton.jit
def pick(which, g0, g1, g2, g3, g4, g5, g6, g7):  # type: ignore[no-untyped-def]
    """Select one of eight numbers."""
    found = tl.where(which == 1, g1, g0)
    found = tl.where(which == 2, g2, found)
    found = tl.where(which == 3, g3, found)
    found = tl.where(which == 4, g4, found)
    found = tl.where(which == 5, g5, found)
    found = tl.where(which == 6, g6, found)
    return tl.where(which == 7, g7, found)


@triton.jit
def pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cast to a pointer to ``TYPE``; ``ALIGNED`` declares it aligned to 16 bytes."""
    found = address.to(tl.pointer_type(TYPE))
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def decoded(value, remainder):  # type: ignore[no-untyped-def]
    """Decode bits of bf16 values and remainders (int16) to bits of masters (int32): see
    codec.py."""
    high, low = value.to(tl.int32), remainder.to(tl.int32)
    low = tl.where((high & 0x7FFF) == 0, low & 0xFFFF, low)  # a zero stays a zero
    return (high << 16) + low


@triton.jit
def encoded(bits):  # type: ignore[no-untyped-def]
    """Encode bits of masters (int32) as bits of bf16 values and remainders (int16)."""
    low = (bits << 16) >> 16  # sign-extended low half
    high = bits >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    value = tl.where(is_nan, high | 0x40, high - (low >> 31))
    return value.to(tl.int16), low.to(tl.int16)


@triton.jit
def _decode(value, remainder, master, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    high = tl.load(value + at, mask=inside, other=0)
    low = tl.load(remainder + at, mask=inside, other=0)
    tl.store(master + at, decoded(high, low), mask=inside)


@triton.jit
def _encode(master, value, remainder, numel, KEEP: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    high, low = encoded(tl.load(master + at, mask=inside, other=0))
    tl.store(value + at, high, mask=inside)
    if KEEP:
        tl.store(remainder + at, low, mask=inside)


_DECODE, _ENCODE = Kernel(_decode), Kernel(_encode)


def _launch(kernel: Kernel, numel: int, *operands: Tensor, **flags: Any) -> None:
    kernel.launch(triton.cdiv(numel, BLOCK), operands, (numel,), **flags, BLOCK=BLOCK)


def decode(value: Tensor, remainder: Tensor, master: Tensor) -> None:
    """As :func:`..codec.decode`."""
    halves = (value.view(torch.int16), remainder.view(torch.int16))
    _launch(_DECODE, master.numel(), *halves, master.view(torch.int32))


def encode(master: Tensor, value: Tensor, remainder: Tensor) -> None:
    """As :func:`..codec.encode`."""
    halves = (value.view(torch.int16), remainder.view(torch.int16))
    _launch(_ENCODE, master.numel(), master.view(torch.int32), *halves, KEEP=True)


def round_to_value(master: Tensor, value: Tensor) -> None:
    """As :func:`..codec.round_to_value`."""
    bits = value.view(torch.int16)
    _launch(_ENCODE, master.numel(), master.view(torch.int32), bits, bits, KEEP=False)
