"""Which bytes of an arena are taken: first fit. Pure."""

from __future__ import annotations


class Intervals:
    """Of ``n_bytes``, all free at first."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.used_bytes = self.most_used_bytes = 0
        self._free = [(0, n_bytes)] if n_bytes else []  # in order, no two of them side by side
        self._taken: dict[int, int] = {}  # end by start

    def take(self, n_bytes: int) -> int | None:
        """The start of an interval; None: no gap is as large."""
        for index, (start, end) in enumerate(self._free):
            if end - start < n_bytes:
                continue
            rest = (start + n_bytes, end)
            self._free[index : index + 1] = [rest] if rest[0] < end else []
            self._taken[start] = start + n_bytes
            self.used_bytes += n_bytes
            self.most_used_bytes = max(self.most_used_bytes, self.used_bytes)
            return start
        return None

    def give(self, start: int) -> None:
        """Free the interval that begins there."""
        end = self._taken.pop(start)
        self.used_bytes -= end - start
        index = sum(other < start for other, _ in self._free)
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end))
