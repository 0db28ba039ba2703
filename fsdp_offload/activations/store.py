"""Rows of closed groups, in pages or in exact copies; records and counters."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from ..core.backend import Backend
from ..core.errors import (
    ActivationError,
    AwayError,
    DeviceError,
    StashOverflowError,
    check_open,
)
from ..plan.activations import GroupRows
from .pages import MOST_RANGES, PagePool, PageTable

if TYPE_CHECKING:
    from ..phases import FixedAddressRegion

TAILS: Final[dict[str, int | None]] = {"undefined": None, "nan": -1, "zero": 0}
"""Values of 8-byte words beyond the count. All bits set is a NaN in every format."""


class ExactRows:
    """The used rows of one group, in their own memory; ``n_pages``: pages that they would take."""

    def __init__(self, words: Sequence[Tensor], counts: Sequence[int], n_pages: int) -> None:
        self.n_pages = n_pages
        self._copies = [_copy(all_rows[:n]) for all_rows, n in zip(words, counts, strict=True)]

    def restore(self, words: Sequence[Tensor]) -> None:
        """Copy them into full buffers, on the current stream, and free their memory."""
        for copy, all_rows in zip(self._copies, words, strict=True):
            all_rows[: copy.numel()].copy_(copy)
        self.drop()

    def drop(self) -> None:
        """Free their memory."""
        self._copies = []


def _copy(rows: Tensor) -> Tensor:
    try:
        return rows.clone()
    except torch.OutOfMemoryError:
        return rows.cpu()


class PagedRows:
    """Rows in pages of a pool; each table has up to eight ranges."""

    def __init__(
        self, pool: PagePool, tables: Sequence[tuple[PageTable, Sequence[int]]], n_pages: int
    ) -> None:
        self.n_pages, self._pool, self._tables = n_pages, pool, tables

    def restore(self, words: Sequence[Tensor]) -> None:
        """As :meth:`ExactRows.restore`."""
        is_captured = self._tables[0][0].is_captured
        if self._pool.backend.is_capturing() != is_captured:
            raise DeviceError(
                f"backward {'outside' if is_captured else 'inside'} a CUDA graph capture",
                reason=f"its forward was {'captured' if is_captured else 'not captured'}, "
                "and pages can be released only once",
                remedy="capture forward and backward, or neither",
            )
        first = 0
        for table, row_bytes in self._tables:
            mine = words[first : first + len(row_bytes)]
            self._pool.kernels.move(self._pool, table, mine, row_bytes, out=False)
            first += len(row_bytes)
        self.drop()

    def drop(self) -> None:
        """As :meth:`ExactRows.drop`."""
        pool = self._pool
        for table, _ in reversed(self._tables):
            # If a graph never reaches its backward, the claim of its next replay releases them.
            if pool.backend.is_capturing() == table.is_captured:
                pool.kernels.release(pool, table)
            pool.give_table(table)


Held = ExactRows | PagedRows


class RowStore:
    """State that the groups of one stash share: see :class:`.PagedStash`."""

    def __init__(
        self, backend: Backend, page_bytes: int, tail: str, region: FixedAddressRegion | None
    ) -> None:
        self.backend, self.device, self.page_bytes = backend, backend.device, page_bytes
        self.fill = TAILS[tail]
        self.pool: PagePool | None = None
        self.region = region
        self.asked_exact, self.is_closed, self.is_open = False, False, False
        self.dropped: list[Held] = []  # by finalizers, in any thread
        self.n_live = 0
        self.counts: Counter[str] = Counter()
        self.kept_bytes: Counter[str] = Counter()  # by reason
        self.recorded: list[GroupRows] = []
        self.recorded_groups = self.most_pages = self._pages = 0
        self._pid, self._thread = os.getpid(), 0

    @property
    def _is_paused(self) -> bool:
        return self.region is not None and self.region.is_paused

    @property
    def is_exact(self) -> bool:
        """Whether the host waits for each count: without pages, or inside exact()."""
        return self.pool is None or self.asked_exact

    # ------------------------------------------------------------------ groups

    def open(self) -> None:
        """Check that a group may begin.

        Raises:
            ActivationError: another group is open, or the first group was in another thread.
            ClosedError: the stash is closed, or of another process.
            DeviceError: the stream is being captured, and pages are missing or must not be used.
        """
        self.check_usable("group()")
        self._thread = self._thread or threading.get_ident()
        if self._thread != threading.get_ident():
            raise ActivationError(
                "a group in a second thread",
                reason="groups take and return pages in the order of one stream",
                remedy="use one PagedStash per thread",
            )
        if self.is_open:
            raise ActivationError(
                "a group inside another group of the same stash",
                reason="a saved tensor would belong to both",
                remedy="close the outer group first, or use one group for both",
            )
        if self.backend.is_capturing():
            if self.pool is None or self.is_exact or not self.pool.can_capture:
                raise DeviceError(
                    "a group inside a CUDA graph capture without pages",
                    reason="the host would have to wait for the row count",
                    remedy="install Triton, call prepare() before the capture, and capture "
                    "outside exact()",
                )
        self.collect()
        self.is_open = True

    def check_usable(self, what: str) -> None:
        """Refuse ``what`` if the stash is closed, or of another process."""
        check_open(f"{what} of a PagedStash", self._pid, is_closed=self.is_closed)

    def collect(self) -> None:
        """Free rows of dropped graphs; inside a capture, later."""
        if self.backend.is_capturing():
            return
        while self.dropped:
            held = self.dropped.pop()
            held.drop()
            self._ended(held)

    def _ended(self, held: Held) -> None:
        self.n_live -= 1
        self._pages -= held.n_pages

    def hold(
        self, count: Tensor, capacity: int, row_bytes: Sequence[int], words: Sequence[Tensor]
    ) -> Held:
        """Copy the used rows, on the current stream.

        Args:
            words: int64, all rows of each range, used or not.

        Raises:
            StashOverflowError: the host knows the count, and it is above the capacity.
            ActivationError: no page table is left for a capture.
        """
        pool, n_pages = self.pool, 0
        if self.is_exact:
            rows = int(count)
            if not 0 <= rows <= capacity:
                raise StashOverflowError(
                    f"{rows} rows of {capacity}",
                    reason="the buffer is too small, so the dispatcher dropped rows",
                    remedy="enlarge the buffer, or dispatch again at the true size",
                )
            n_pages = self._record(GroupRows(rows, capacity, tuple(row_bytes)))
            if pool is None or self._is_paused or int(pool.tops.sum()) < n_pages:
                self.counts["exact_groups"] += 1
                numbers = [rows * each // 8 for each in row_bytes]  # words
                return self._began(ExactRows(words, numbers, n_pages))
        assert pool is not None
        self.check_present()
        capturing, tables = self.backend.is_capturing(), []
        for first in range(0, len(words), MOST_RANGES):
            some = tuple(row_bytes[first : first + MOST_RANGES])
            # The host does not know the count, so the table lists pages for a full buffer.
            worst = GroupRows(capacity, capacity, some).pages(self.page_bytes)
            table = pool.take_table(worst, to_capture=capturing)
            pool.kernels.claim(pool, table, count, capacity, some)
            pool.kernels.move(pool, table, words[first : first + MOST_RANGES], some, out=True)
            tables.append((table, some))
        return self._began(PagedRows(pool, tables, n_pages))

    def _began(self, held: Held) -> Held:
        self.n_live += 1
        self._pages += held.n_pages
        self.most_pages = max(self.most_pages, self._pages)
        return held

    def _record(self, rows: GroupRows) -> int:
        """Record the largest group at this position; returns its pages."""
        # The backward ends groups in reverse order, so their number is the position.
        self.recorded_groups += 1
        found, n_pages = self.recorded, rows.pages(self.page_bytes)
        if self.n_live >= len(found):
            found.append(rows)
        elif found[self.n_live].pages(self.page_bytes) <= n_pages:
            found[self.n_live] = rows
        return n_pages

    def restore(self, held: Held, capacity: int, row_bytes: Sequence[int]) -> list[Tensor]:
        """Make new buffers with the rows, on the current stream.

        Raises:
            ClosedError: the pages were freed.
            AwayError: their region is paused.
            DeviceError: one of forward and backward is captured, the other is not.
        """
        if isinstance(held, PagedRows):
            self.check_usable("backward()")
            self.check_present()
        words = [
            torch.empty(capacity * each // 8, dtype=torch.int64, device=self.device)
            for each in row_bytes
        ]
        if self.fill is not None:
            for memory in words:
                memory.fill_(self.fill)
        held.restore(words)
        self._ended(held)
        return words

    def check_present(self) -> None:
        """Refuse to use pages while their region is paused."""
        if self._is_paused:
            raise AwayError(
                "a group of a PagedStash", reason="its region is paused", remedy="call resume()"
            )
