"""A Triton kernel (CUDA) that cuts the rows of a matrix into parts, or puts them together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernels_table import aligned
from .launching import Kernel

MOST: Final = 16
"""Parts of one launch."""
BLOCK_WORDS: Final = 2048
"""Of 4 bytes, that one program copies."""
_ARGUMENTS: Final = [f"{letter}{i}" for letter in "aw" for i in range(MOST)]


@triton.jit
def _look(tile, tiles, start, a, w, address, width, first, begin, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One more part (``a``, ``w``) begins at ``tiles`` and ``start``: it is the program's, unless a
    later one is. Gives where the next one begins, and the program's part so far."""
    is_here = tile >= tiles
    address, width = tl.where(is_here, a, address), tl.where(is_here, w, width)
    first, begin = tl.where(is_here, tiles, first), tl.where(is_here, start, begin)
    return tiles + tl.cdiv(w, BLOCK), start + w, address, width, first, begin


@triton.jit(do_not_specialize=["row_words", "start", "row_tiles", *_ARGUMENTS])
def _copy_rows(  # type: ignore[no-untyped-def]
    matrix, row_words: tl.int64, start: tl.int64, row_tiles: tl.int32,
    a0: tl.int64, a1: tl.int64, a2: tl.int64, a3: tl.int64,
    a4: tl.int64, a5: tl.int64, a6: tl.int64, a7: tl.int64,
    a8: tl.int64, a9: tl.int64, a10: tl.int64, a11: tl.int64,
    a12: tl.int64, a13: tl.int64, a14: tl.int64, a15: tl.int64,
    w0: tl.int64, w1: tl.int64, w2: tl.int64, w3: tl.int64,
    w4: tl.int64, w5: tl.int64, w6: tl.int64, w7: tl.int64,
    w8: tl.int64, w9: tl.int64, w10: tl.int64, w11: tl.int64,
    w12: tl.int64, w13: tl.int64, w14: tl.int64, w15: tl.int64,
    INTO_MATRIX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program ``p`` copies a tile of row ``p // row_tiles``: of a part, no two parts share one."""
    program = tl.program_id(0)
    row, tile = (program // row_tiles).to(tl.int64), (program % row_tiles).to(tl.int64)
    nothing = row * 0
    t, s, a, w, first, begin = _look(tile, nothing, start, a0, w0, a0, w0, nothing, start, BLOCK)
    t, s, a, w, first, begin = _look(tile, t, s, a1, w1, a, w, first, begin, BLOCK)
    t, s, a, w, first, begin = _look(tile, t, s, a2, w2, a, w, first, begin, BLOCK)
    t, s, a, w, first, begin = _look(tile, t, s, a3, w3, a, w, first, begin, BLOCK)
    t, s, a, w, first, begin = _look(tile, t, s, a4, w4, a, w, first, begin, BLOCK)
    t, s, a, w, first, begin = _look(tile, t, s, a5, w5, a, w, first, begin, BLOCK)
    t, s, a, w, first, begin = _look(tile, t, s, a6, w6, a, w, first, begin, BLOCK)
    t, s, a, w, first, begin = _look(tile, t, s, a7, w7, a, w, first, begin, BLOCK)
    t, s, a, w, first, begin = _look(tile, t, s, a8, w8, a, w, first, begin, BLOCK)
    t, s, a, w, first, begin = _look(tile, t, s, a9, w9, a, w, first, begin, BLOCK)
    t, s, a, w, first, begin = _look(tile, t, s, a10, w10, a, w, first, begin, BLOCK)
    t, s, a, w, first, begin = _look(tile, t, s, a11, w11, a, w, first, begin, BLOCK)
    t, s, a, w, first, begin = _look(tile, t, s, a12, w12, a, w, first, begin, BLOCK)
    t, s, a, w, first, begin = _look(tile, t, s, a13, w13, a, w, first, begin, BLOCK)
    t, s, a, w, first, begin = _look(tile, t, s, a14, w14, a, w, first, begin, BLOCK)
    t, s, a, w, first, begin = _look(tile, t, s, a15, w15, a, w, first, begin, BLOCK)
    width = w // 4 * 4  # it is; a hint on what a call gives is lost, and with it loads of 16 bytes
    at = (tile - first) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    in_matrix = matrix + tl.multiple_of(row * row_words + begin, 4) + at
    in_part = aligned(a, tl.int32) + row * width + at
    if INTO_MATRIX:
        tl.store(in_matrix, tl.load(in_part, mask=inside), mask=inside)
    else:
        tl.store(in_part, tl.load(in_matrix, mask=inside), mask=inside)


_COPY_ROWS = Kernel(_copy_rows, ignores_integers=True)


def copy_rows(matrix: Tensor, parts: Sequence[Tensor], *, into_matrix: bool) -> bool:
    """Copy between the columns of ``matrix`` and ``parts``, which follow each other there.

    Args:
        matrix: ``(rows, columns)``, contiguous.
        parts: ``(rows, width)`` each, contiguous, of the same dtype and device, none of them empty;
            their widths add up to the columns.
        into_matrix: put parts together, else cut into parts.

    Returns:
        False, and nothing was done: an address, or the bytes in a row of one of them, is not
        divisible by 16.
    """
    addresses = [part.data_ptr() for part in parts]
    words = [part.size(1) * part.itemsize // 4 for part in parts]
    bits = matrix.data_ptr()
    for address, part in zip(addresses, parts, strict=True):
        bits |= address | part.size(1) * part.itemsize
    if bits & 15:
        return False
    flat, rows, row_words = matrix.view(-1).view(torch.int32), matrix.size(0), sum(words)
    starts = list(accumulate(words, initial=0))
    for at in range(0, len(parts), MOST):
        widths = words[at : at + MOST]
        row_tiles = sum(-(-width // BLOCK_WORDS) for width in widths)
        rest = [0] * (MOST - len(widths))
        _COPY_ROWS.launch(
            rows * row_tiles,
            (flat,),
            (row_words, starts[at], row_tiles, *addresses[at : at + MOST], *rest, *widths, *rest),
            INTO_MATRIX=into_matrix,
            BLOCK=BLOCK_WORDS,
        )
    return True
