"""Triton functions that find a program's piece in a :class:`.piece_table.PieceTable`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def piece_of(program, table, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which of up to eight pieces a program belongs to."""
    piece = 0
    for other in tl.static_range(1, 8):
        piece += (program >= tl.load(table + other * WIDTH)).to(tl.int32)
    return piece


@triton.jit
def pick(piece, g0, g1, g2, g3, g4, g5, g6, g7):  # type: ignore[no-untyped-def]
    """The piece's own of eight numbers."""
    found = tl.where(piece == 1, g1, g0)
    found = tl.where(piece == 2, g2, found)
    found = tl.where(piece == 3, g3, found)
    found = tl.where(piece == 4, g4, found)
    found = tl.where(piece == 5, g5, found)
    found = tl.where(piece == 6, g6, found)
    return tl.where(piece == 7, g7, found)


@triton.jit
def aligned(address, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A pointer to ``TYPE``, of which the compiler knows that it is aligned to 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)
