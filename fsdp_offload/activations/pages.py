"""Track the free pages of one pool, and the pages of each group, on the device.

The number of rows in use is known only on the device. So kernels (kernels_pages.py) whose arguments
never change claim, fill, read and release a group's pages, and a CUDA graph replays them. Without
Triton, torch operations here do the same. Free
pages are two stacks of ids, one for device memory (near) and one for host memory (far). If groups
are restored in reverse order, the stacks end as they began, bit for bit.

A claim first releases the pages that its table still holds, so a graph whose forward is replayed
without its backward loses no pages. A table that a capture has used belongs to that graph for good:
if others used it, a replay would release pages of a live group. Tables for captures are made before
any capture, because memory that a capture allocates has arbitrary content at each replay. Other
tables are made on first use, and reused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

from ..core.backend import Backend
from ..core.errors import ActivationError
from ..link import HostRange

MOST_RANGES: Final = 8  # memory ranges per table
RECORD_NUMEL: Final = 16  # the first page number of each range, then the places below
TOTAL, NEAR, ROWS = 8, 9, 10  # places in a record: all pages, near pages, rows
OVERFLOWS, INVALID, INVALID_ROWS, MOST_NEAR, MOST_FAR = range(5)
"""Places in the flags: overflows, invalid counts, the rows of one, and the most pages in use."""
FLAGS_NUMEL: Final = 8
CAN_CAPTURE: Final = False  # below, the host waits for each count


@dataclass(frozen=True, eq=False)
class PageTable:
    """Device memory that lists a group's pages."""

    record: Tensor
    """int64 of :data:`RECORD_NUMEL`."""
    pages: Tensor
    """int32: ids of pages; ids below the number of near pages are near."""
    is_captured: bool


class PagePool:
    """Pages and their tables.

    Args:
        near: int64, 1-D, contiguous, on the device: at least one whole page.
        kernels: see :func:`.stash.page_kernels`.
        arena: memory of the far pages.
    """

    def __init__(
        self,
        backend: Backend,
        page_bytes: int,
        near: Tensor,
        kernels: ModuleType,
        arena: HostRange | None = None,
    ) -> None:
        self.page_bytes, self.page_words = page_bytes, page_bytes // 8
        self.near, self.far = near, near[:0]
        self._arena = arena  # a tensor over it keeps it mapped, but not page-locked
        if arena is not None:
            self.far = arena.tensor(0, arena.n_bytes // 8, torch.int64)
        self.n_near, self.n_far = (
            memory.numel() // self.page_words for memory in (self.near, self.far)
        )
        self.backend, self.device = backend, backend.device
        self.free = torch.arange(self.n_near + self.n_far, dtype=torch.int32, device=self.device)
        self.tops = torch.tensor([self.n_near, self.n_far], device=self.device)
        self.flags = torch.zeros(FLAGS_NUMEL, dtype=torch.int64, device=self.device)
        self.kernels = kernels
        self._tables: list[PageTable] = []
        self._tables_to_capture: list[PageTable] = []
        self._captured: list[PageTable] = []

    @property
    def can_capture(self) -> bool:
        """Whether a CUDA graph can replay its work."""
        return bool(self.kernels.CAN_CAPTURE)

    def add_tables(self, count: int, n_pages: int) -> None:
        """Make tables of up to ``n_pages`` pages for captures."""
        self._tables_to_capture += [self._new_table(n_pages, True) for _ in range(count)]

    def _new_table(self, n_pages: int, is_captured: bool = False) -> PageTable:
        record = torch.zeros(RECORD_NUMEL, dtype=torch.int64, device=self.device)
        length = max(1, min(n_pages, self.n_near + self.n_far))
        pages = torch.zeros(length, dtype=torch.int32, device=self.device)
        return PageTable(record, pages, is_captured)

    def take_table(self, n_pages: int, *, to_capture: bool) -> PageTable:
        """Take a table for up to ``n_pages`` pages.

        Raises:
            ActivationError: no table for captures is left.
        """
        n_pages = min(n_pages, self.n_near + self.n_far)
        if not to_capture:
            found = next((t for t in reversed(self._tables) if t.pages.numel() >= n_pages), None)
            if found is None:
                return self._new_table(n_pages)
            self._tables.remove(found)
            return found
        if not self._tables_to_capture or self._tables_to_capture[-1].pages.numel() < n_pages:
            raise ActivationError(
                f"a group of up to {n_pages} pages inside a CUDA graph capture",
                reason="the prepared page tables are used up, and a capture cannot allocate one",
                remedy="run an iteration with the largest buffers, then "
                "prepare(captured_groups=...) for the groups of all captures",
            )
        table = self._tables_to_capture.pop()
        self._captured.append(table)  # replays keep using its memory
        return table

    def give_table(self, table: PageTable) -> None:
        """Return a table whose pages were released."""
        if not table.is_captured:
            self._tables.append(table)

    def try_out(self, capacity: int, row_bytes: Sequence[int]) -> None:
        """Launch each kernel for such a group without rows, so that it is compiled."""
        table, words = self._new_table(1), [self.near] * len(row_bytes)
        for dtype in (torch.int64, torch.int32):
            count = torch.zeros(1, dtype=dtype, device=self.device)
            self.kernels.claim(self, table, count, capacity, row_bytes)
        for out in (True, False):
            self.kernels.move(self, table, words, row_bytes, out)
        self.kernels.release(self, table)


# --------------------------------------------------------------------------- in torch operations


def claim(
    pool: PagePool, table: PageTable, count: Tensor, capacity: int, row_bytes: Sequence[int]
) -> None:
    """Claim pages for rows of several ranges, near ones first: all, or none with a flag set.

    Args:
        table: first releases the pages that it still holds.
        count: integer tensor with one element on the device: rows in use. Below 0 or above
            ``capacity``, it claims none and sets the flag for that.
        capacity: the most rows.
        row_bytes: of each range; up to :data:`.MOST_RANGES`.
    """
    release(pool, table)
    rows, page_bytes = int(count), pool.page_bytes
    near_free, far_free = pool.tops.tolist()
    is_invalid = not 0 <= rows <= capacity
    counts = [-(-(0 if is_invalid else rows) * each // page_bytes) for each in row_bytes]
    total = sum(counts)
    near = min(total, near_free)  # device memory first
    is_short = total > near_free + far_free
    flags = pool.flags.tolist()
    if is_short:
        total = near = rows = 0
        counts = [0] * len(counts)
    far = total - near
    ends = torch.tensor(counts).cumsum(0).tolist()
    starts = [0, *ends[:-1]] + [total] * (8 - len(counts))  # ranges that are missing are empty
    record = [*starts, total, near, 0 if is_invalid else rows]
    table.record[: len(record)] = torch.tensor(record)
    # From the top of each stack down; release() pushes them back in reverse.
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
    pool: PagePool, table: PageTable, words: Sequence[Tensor], row_bytes: Sequence[int], out: bool
) -> None:
    """Copy the rows in use into the pages (``out``), or back.

    Args:
        words: int64, one per range, with all rows.
        row_bytes: of each range.
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
