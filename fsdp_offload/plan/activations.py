"""Sizes of a paged stash: pages on the device and in host memory. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.config import brief


@dataclass(frozen=True)
class GroupRows:
    """Recorded sizes of the group at one position: the largest of all iterations."""

    rows: int
    """The most rows in use."""
    capacity: int
    row_bytes: tuple[int, ...]
    """Bytes per row of each memory range."""

    def pages(self, page_bytes: int, rows: int | None = None) -> int:
        """Return the pages for so many rows; ``None``: for the recorded ones."""
        count = self.rows if rows is None else rows
        return sum(-(-count * each // page_bytes) for each in self.row_bytes)


@dataclass(frozen=True)
class StashPlan:
    """Sizes that ``prepare()`` allocates."""

    groups: tuple[GroupRows, ...]
    """Recorded groups, in the order in which they were saved."""
    page_bytes: int
    margin: float
    most_pages: int
    """The most pages in use at once, as recorded; 0: nothing recorded."""
    device_pages: int
    host_pages: int

    @property
    def device_bytes(self) -> int:
        """Bytes of the pool in device memory."""
        return self.device_pages * self.page_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the pool in host memory."""
        return self.host_pages * self.page_bytes

    @property
    def is_full(self) -> bool:
        """Whether every buffer was full, so that pages save nothing."""
        return bool(self.groups) and all(each.rows == each.capacity for each in self.groups)

    def explain(self) -> str:
        """Explain the sizes, one line each."""
        used = sum(each.rows * sum(each.row_bytes) for each in self.groups)
        worst = sum(each.capacity * sum(each.row_bytes) for each in self.groups)
        lines = [
            f"pool: {brief(self.device_bytes)} on the device, {brief(self.host_bytes)} on the "
            f"host, in pages of {self.page_bytes} bytes"
        ]
        if not self.groups:
            return lines[0] + "; no group recorded yet"
        need = self.most_pages * self.page_bytes
        lines += [
            f"groups: {len(self.groups)}, buffers {brief(worst)}, rows in use {brief(used)}",
            f"in use at once: {brief(need)}, with a margin of {self.margin:g}: "
            f"{brief(math.ceil(need * self.margin))}",
        ]
        if self.is_full:
            lines.append("every buffer was full, so pages save no memory")
        return "\n".join(lines)


def make_plan(
    groups: Sequence[GroupRows],
    most_pages: int,
    *,
    page_bytes: int,
    device_bytes: int | None,
    host_bytes: int,
    margin: float,
) -> StashPlan:
    """Choose the number of pages.

    Args:
        groups: recorded groups; empty if ``device_bytes`` is given instead.
        most_pages: recorded pages in use at once.
        page_bytes: bytes of one page.
        device_bytes: bytes of the pool on the device; ``None``: the recorded need with the margin,
            at most all rows of all buffers.
        host_bytes: bytes of the pool on the host.
        margin: factor to the recorded need, at least 1.
    """
    wanted = math.ceil(most_pages * margin)
    if device_bytes is None:
        worst = sum(each.pages(page_bytes, each.capacity) for each in groups)
        device_pages = max(1, min(wanted, max(worst, most_pages)))
    else:
        device_pages = max(1, device_bytes // page_bytes)
    host_pages = host_bytes // page_bytes
    return StashPlan(tuple(groups), page_bytes, margin, most_pages, device_pages, host_pages)
