"""What a sync-free expert layer needs beside grouped products: operations that stop at the count.

Buffers have the worst case's rows; those from the count on are neither read nor written.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS: Final = 2048
BLOCK: Final = 1024


@triton.jit
def _spread(x, out, count, tokens, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.load(count).to(tl.int64)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(x + (row % tokens) * width + at, mask=at < width)
            tl.store(out + row * width + at, value, mask=at < width)


@triton.jit
def _fold(x, out, count, tokens, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.load(count).to(tl.int64)
    for token in range(tl.program_id(0).to(tl.int64), tokens, tl.num_programs(0)):
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            total = tl.zeros([BLOCK], dtype=tl.float32)
            for row in range(token, rows, tokens):
                total += tl.load(x + row * width + at, mask=at < width, other=0).to(tl.float32)
            tl.store(out + token * width + at, total.to(out.dtype.element_ty), mask=at < width)


@triton.jit
def _swiglu(gate_up, out, count, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.load(count).to(tl.int64)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            gate = tl.load(gate_up + row * 2 * width + at, mask=at < width, other=0).to(tl.float32)
            up = tl.load(gate_up + row * 2 * width + width + at, mask=at < width, other=0)
            value = gate * tl.sigmoid(gate) * up.to(tl.float32)
            tl.store(out + row * width + at, value.to(out.dtype.element_ty), mask=at < width)


@triton.jit
def _swiglu_back(gate_up, gradient, out, count, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.load(count).to(tl.int64)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < width
            first = row * 2 * width + at
            gate = tl.load(gate_up + first, mask=inside, other=0).to(tl.float32)
            up = tl.load(gate_up + first + width, mask=inside, other=0).to(tl.float32)
            above = tl.load(gradient + row * width + at, mask=inside, other=0).to(tl.float32)
            s = tl.sigmoid(gate)
            d_gate, d_up = above * up * s * (1 + gate * (1 - s)), above * gate * s
            tl.store(out + first, d_gate.to(out.dtype.element_ty), mask=inside)
            tl.store(out + first + width, d_up.to(out.dtype.element_ty), mask=inside)


def spread(x: Tensor, count: Tensor, rows: int) -> Tensor:
    """Row ``r`` of ``rows`` is token ``r % tokens``."""
    out = x.new_empty(rows, x.shape[1])
    _spread[(PROGRAMS,)](x.contiguous(), out, count, *x.shape, BLOCK=BLOCK)
    return out


def fold(x: Tensor, count: Tensor, tokens: int) -> Tensor:
    """The sum of each token's rows."""
    out = x.new_empty(tokens, x.shape[1])
    _fold[(PROGRAMS,)](x.contiguous(), out, count, *out.shape, BLOCK=BLOCK)
    return out


class Spread(torch.autograd.Function):
    """See :func:`spread`; (tokens, dim) to (rows, dim)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor, rows: int) -> Tensor:
        """See :func:`spread`."""
        ctx.count, ctx.tokens = count, x.shape[0]
        return spread(x, count, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Its gradient."""
        return fold(gradient, ctx.count, ctx.tokens), None, None


class Fold(torch.autograd.Function):
    """See :func:`fold`; (rows, dim) to (tokens, dim)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor, tokens: int) -> Tensor:
        """See :func:`fold`."""
        ctx.count, ctx.rows = count, x.shape[0]
        return fold(x, count, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Its gradient."""
        return spread(gradient, ctx.count, ctx.rows), None, None


class SwiGLU(torch.autograd.Function):
    """``silu(gate) * up`` of (rows, 2 * width)."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, count: Tensor) -> Tensor:
        """The product."""
        ctx.count = count
        ctx.save_for_backward(gate_up)
        width = gate_up.shape[1] // 2
        out = gate_up.new_empty(gate_up.shape[0], width)
        _swiglu[(PROGRAMS,)](gate_up, out, count, width, BLOCK=BLOCK)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Its gradient."""
        (gate_up,) = ctx.saved_tensors
        out = torch.empty_like(gate_up)
        width = gate_up.shape[1] // 2
        operands = (gate_up, gradient.contiguous(), out, ctx.count, width)
        _swiglu_back[(PROGRAMS,)](*operands, BLOCK=BLOCK)
        return out, None


def spread_rows(x: Tensor, count: Tensor, rows: int) -> Tensor:
    """See :class:`Spread`."""
    return Spread.apply(x, count, rows)  # type: ignore[no-untyped-call,no-any-return]


def fold_rows(x: Tensor, count: Tensor, tokens: int) -> Tensor:
    """See :class:`Fold`."""
    return Fold.apply(x, count, tokens)  # type: ignore[no-untyped-call,no-any-return]


def swiglu(gate_up: Tensor, count: Tensor) -> Tensor:
    """See :class:`SwiGLU`."""
    return SwiGLU.apply(gate_up, count)  # type: ignore[no-untyped-call,no-any-return]
