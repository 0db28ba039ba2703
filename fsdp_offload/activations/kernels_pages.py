"""Triton kernels for pages: claim, move, release. pages.py has them in torch operations.

Capacity, row bytes, addresses and grids are the same at each launch of a group; the kernels read
the numbers of rows and pages on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from ..update.kernels.elementwise import pick, row_of
from ..update.kernels.launching import Kernel
from .pages import MOST_RANGES, NEAR, ROWS, TOTAL, PagePool, PageTable

CAN_CAPTURE: Final = True

# Two per multiprocessor: 92 % of the speed of ``copy_`` on an H200; 132 reach 80 %.
PROGRAMS: Final = 264
TILE: Final = 2048  # words that a program moves at a time: four accesses of 16 bytes per thread
BLOCK: Final = 1024
_TOTAL: tl.constexpr = tl.constexpr(TOTAL)
_NEAR: tl.constexpr = tl.constexpr(NEAR)
_ROWS: tl.constexpr = tl.constexpr(ROWS)


@triton.jit
def _push(free, pages, total, near, near_free, far_free, n_near, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    for start in range(0, total, BLOCK):
        j = start + tl.arange(0, BLOCK)
        far_at = n_near + far_free + (total - near) - 1 - (j - near)
        at = tl.where(j < near, near_free + near - 1 - j, far_at)
        tl.store(free + at, tl.load(pages + j, mask=j < total), mask=j < total)


@triton.jit
def _claim(  # type: ignore[no-untyped-def]
    count, tops, free, pages, record, flags, capacity, n_near, n_far,
    r0, r1, r2, r3, r4, r5, r6, r7,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    near_free, far_free = tl.load(tops), tl.load(tops + 1)
    held, held_near = tl.load(record + _TOTAL), tl.load(record + _NEAR)
    rows = tl.load(count).to(tl.int64)
    tl.debug_barrier()  # until every warp has read what is overwritten below
    _push(free, pages, held, held_near, near_free, far_free, n_near, BLOCK)
    near_free += held_near
    far_free += held - held_near
    tl.debug_barrier()
    invalid = (rows < 0) | (rows > capacity)  # a dispatcher's error: no rows, and a flag
    rows_valid = tl.where(invalid, 0, rows)
    # Ends of the eight ranges in the list of pages; each range begins a page of its own.
    e0 = (rows_valid * r0 + PAGE - 1) // PAGE
    e1 = e0 + (rows_valid * r1 + PAGE - 1) // PAGE
    e2 = e1 + (rows_valid * r2 + PAGE - 1) // PAGE
    e3 = e2 + (rows_valid * r3 + PAGE - 1) // PAGE
    e4 = e3 + (rows_valid * r4 + PAGE - 1) // PAGE
    e5 = e4 + (rows_valid * r5 + PAGE - 1) // PAGE
    e6 = e5 + (rows_valid * r6 + PAGE - 1) // PAGE
    total = e6 + (rows_valid * r7 + PAGE - 1) // PAGE
    # All or none: a group without enough pages claims none, and raises a flag.
    short = total > near_free + far_free
    all_or_none = tl.where(short, 0, 1)
    near = tl.minimum(total, near_free) * all_or_none
    total = total * all_or_none
    far = total - near
    tl.store(record, 0 * total)
    tl.store(record + 1, e0 * all_or_none)
    tl.store(record + 2, e1 * all_or_none)
    tl.store(record + 3, e2 * all_or_none)
    tl.store(record + 4, e3 * all_or_none)
    tl.store(record + 5, e4 * all_or_none)
    tl.store(record + 6, e5 * all_or_none)
    tl.store(record + 7, e6 * all_or_none)
    tl.store(record + _TOTAL, total)
    tl.store(record + _NEAR, near)
    tl.store(record + _ROWS, rows_valid * all_or_none)
    for start in range(0, total, BLOCK):
        j = start + tl.arange(0, BLOCK)
        at = tl.where(j < near, near_free - 1 - j, n_near + far_free - 1 - (j - near))
        tl.store(pages + j, tl.load(free + at, mask=j < total), mask=j < total)
    tl.store(tops, near_free - near)
    tl.store(tops + 1, far_free - far)
    most_near, most_far = tl.load(flags + 3), tl.load(flags + 4)
    overflows, invalids = tl.load(flags), tl.load(flags + 1)
    invalid_rows = tl.load(flags + 2)
    tl.debug_barrier()
    tl.store(flags, overflows + 1 - all_or_none)
    tl.store(flags + 1, invalids + invalid.to(tl.int64))
    tl.store(flags + 2, tl.where(invalid, rows, invalid_rows))
    tl.store(flags + 3, tl.maximum(most_near, n_near - near_free + near))
    tl.store(flags + 4, tl.maximum(most_far, n_far - far_free + far))


@triton.jit
def _release(tops, free, pages, record, n_near, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    near_free, far_free = tl.load(tops), tl.load(tops + 1)
    total, near = tl.load(record + _TOTAL), tl.load(record + _NEAR)
    tl.debug_barrier()
    _push(free, pages, total, near, near_free, far_free, n_near, BLOCK)
    tl.store(tops, near_free + near)
    tl.store(tops + 1, far_free + total - near)
    tl.store(record + _TOTAL, 0 * total)
    tl.store(record + _NEAR, 0 * near)


@triton.jit
def _move(  # type: ignore[no-untyped-def]
    w0, w1, w2, w3, w4, w5, w6, w7, near_pool, far_pool, pages, record, n_near,
    r0, r1, r2, r3, r4, r5, r6, r7,
    OUT: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Move tiles of pages, assigned to programs in turn; a page has WORDS words of 8 bytes."""
    total, rows = tl.load(record + _TOTAL), tl.load(record + _ROWS)
    TILES: tl.constexpr = WORDS // TILE
    for unit in range(tl.program_id(0), total * TILES, tl.num_programs(0)):
        page = unit // TILES
        which = row_of(page, record, 1)
        memory = pick(which, w0, w1, w2, w3, w4, w5, w6, w7)
        row_bytes = pick(which, r0, r1, r2, r3, r4, r5, r6, r7)
        slot = tl.load(pages + page).to(tl.int64)
        pool = tl.where(slot < n_near, near_pool, far_pool)
        slot = tl.where(slot < n_near, slot, slot - n_near)
        in_page = (unit % TILES) * TILE + tl.arange(0, TILE)
        at = (page - tl.load(record + which)).to(tl.int64) * WORDS + in_page
        # The last page of a range is rarely full.
        inside = at < rows * row_bytes // 8
        if OUT:
            tl.store(pool + slot * WORDS + in_page, tl.load(memory + at, mask=inside), mask=inside)
        else:
            tl.store(memory + at, tl.load(pool + slot * WORDS + in_page, mask=inside), mask=inside)


_CLAIM, _RELEASE = Kernel(_claim, num_warps=8), Kernel(_release, num_warps=8)
_MOVE = Kernel(_move, num_warps=8)


def _eight(row_bytes: Sequence[int]) -> tuple[int, ...]:
    return (*row_bytes, *(0,) * (MOST_RANGES - len(row_bytes)))


def claim(
    pool: PagePool, table: PageTable, count: Tensor, capacity: int, row_bytes: Sequence[int]
) -> None:
    """As :func:`.pages.claim`."""
    operands = (count, pool.tops, pool.free, table.pages, table.record, pool.flags)
    integers = (capacity, pool.n_near, pool.n_far, *_eight(row_bytes))
    _CLAIM.launch(1, operands, integers, PAGE=pool.page_bytes, BLOCK=BLOCK)


def release(pool: PagePool, table: PageTable) -> None:
    """As :func:`.pages.release`."""
    operands = (pool.tops, pool.free, table.pages, table.record)
    _RELEASE.launch(1, operands, (pool.n_near,), BLOCK=BLOCK)


def move(
    pool: PagePool, table: PageTable, words: Sequence[Tensor], row_bytes: Sequence[int], out: bool
) -> None:
    """As :func:`.pages.move`."""
    memories = (*words, *(words[0],) * (MOST_RANGES - len(words)))
    far = pool.far if pool.n_far else pool.near
    operands = (*memories, pool.near, far, table.pages, table.record)
    integers = (pool.n_near, *_eight(row_bytes))
    page_words = pool.page_words
    _MOVE.launch(
        PROGRAMS, operands, integers, OUT=out, WORDS=page_words, TILE=min(TILE, page_words)
    )
