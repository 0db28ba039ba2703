"""Triton functions that find a program's slice in a :class:`.address_table.AddressTable`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_of(program, table, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which of up to eight slices a program belongs to."""
    which = 0
    for other in tl.static_range(1, 8):
        which += (program >= tl.load(table + other * WIDTH)).to(tl.int32)
    return which


@triton.jit
def pick(which, g0, g1, g2, g3, g4, g5, g6, g7):  # type: ignore[no-untyped-def]
    """The slice's own of eight numbers."""
    found = tl.where(which == 1, g1, g0)
    found = tl.where(which == 2, g2, found)
    found = tl.where(which == 3, g3, found)
    found = tl.where(which == 4, g4, found)
    found = tl.where(which == 5, g5, found)
    found = tl.where(which == 6, g6, found)
    return tl.where(which == 7, g7, found)


@triton.jit
def aligned(address, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A pointer to ``TYPE``, of which the compiler knows that it is aligned to 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)
