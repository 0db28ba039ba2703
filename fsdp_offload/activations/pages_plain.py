"""As kernels_pages.py, in torch operations: the host waits for each count."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

from ..update.kernels import triton_kernels
from .pages import NEAR, ROWS, TOTAL, PagePool, PageTable

CAN_CAPTURE: Final = False


def page_kernels(device: torch.device) -> ModuleType:
    """Return the module with ``claim``, ``move`` and ``release``: Triton's on CUDA, else this."""
    if device.type != "cuda" or triton_kernels() is None:
        return sys.modules[__name__]
    from . import kernels_pages

    return kernels_pages


def claim(
    pool: PagePool,
    table: PageTable,
    count: Tensor,
    capacity: int,
    row_bytes: Sequence[int],
) -> None:
    """Claim pages for rows of several ranges, near ones first: all, or none with a flag set.

    Args:
        pool: that has them.
        table: first releases the pages that it still holds.
        count: integer tensor with one element on the device: rows in use. Below 0 or above
            ``capacity``, it claims none and sets the flag for that.
        capacity: the most rows.
        row_bytes: bytes per row of each range; up to :data:`.MOST_RANGES`.
    """
    release(pool, table)
    rows, page_bytes = int(count), pool.page_bytes
    near_free, far_free = pool.tops.tolist()
    is_invalid = not 0 <= rows <= capacity
    counts = [-(-(0 if is_invalid else rows) * each // page_bytes) for each in row_bytes]
    total = sum(counts)
    near = min(total, near_free)
    is_short = total > near_free + far_free
    flags = pool.flags.tolist()
    if is_short:
        total = near = rows = 0
        counts = [0] * len(counts)
    far = total - near
    ends = torch.tensor(counts).cumsum(0).tolist()
    starts = [0, *ends[:-1]] + [total] * (8 - len(counts))
    record = [*starts, total, near, 0 if is_invalid else rows]
    table.record[: len(record)] = torch.tensor(record)
    near_ids = pool.free[near_free - near : near_free].flip(0)
    at = pool.n_near + far_free
    table.pages[:total] = torch.cat([near_ids, pool.free[at - far : at].flip(0)])
    left = torch.tensor([near_free - near, far_free - far])
    pool.tops.copy_(left)
    flags[0] += is_short
    flags[1] += is_invalid
    flags[2] = rows if is_invalid else flags[2]
    flags[3] = max(flags[3], pool.n_near - near_free + near)
    flags[4] = max(flags[4], pool.n_far - far_free + far)
    pool.flags.copy_(torch.tensor(flags))


def release(pool: PagePool, table: PageTable) -> None:
    """Return a table's pages to the pool. Idempotent."""
    total, near = table.record[TOTAL : NEAR + 1].tolist()
    near_free, far_free = pool.tops.tolist()
    ids, far_at = table.pages[:total], pool.n_near + far_free
    pool.free[near_free : near_free + near] = ids[:near].flip(0)
    pool.free[far_at : far_at + total - near] = ids[near:].flip(0)
    pool.tops += torch.tensor([near, total - near], device=pool.device)
    table.record[TOTAL : NEAR + 1] = 0


def move(
    pool: PagePool,
    table: PageTable,
    words: Sequence[Tensor],
    row_bytes: Sequence[int],
    out: bool,
) -> None:
    """Copy the rows in use into the pages (``out``), or back.

    Args:
        pool: that has them.
        table: with claimed pages.
        words: int64, one per range, with all rows.
        row_bytes: bytes per row of each range.
        out: direction.
    """
    for inside, page in _places(pool, table, words, row_bytes):
        if out:
            page.copy_(inside)
        else:
            inside.copy_(page)


def _places(
    pool: PagePool, table: PageTable, words: Sequence[Tensor], row_bytes: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    record = table.record.tolist()
    ids = table.pages[: record[TOTAL]].tolist()
    for index, (memory, each) in enumerate(zip(words, row_bytes, strict=True)):
        end = record[index + 1] if index + 1 < 8 else record[TOTAL]
        rows = memory[: record[ROWS] * each // 8]
        pages = ids[record[index] : end]
        for page, inside in zip(pages, rows.split(pool.page_words) if pages else (), strict=True):
            is_near = page < pool.n_near
            slot = page if is_near else page - pool.n_near
            start = slot * pool.page_words
            yield inside, (pool.near if is_near else pool.far)[start : start + inside.numel()]
