"""Host memory by holder: one ledger of the process, one check, one bound.

What takes host memory has a :class:`HostPool`. The open pools of a process are its ledger: it says
who holds how much, and whatever is taken is checked against the sum. ``host_memory=`` bounds that
sum, times the ranks of the host, from the first pool that was given it to the last one. So it does
not matter which of them it was given to, and two values cannot both hold.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import os
import threading
import weakref
from collections import Counter

from ..core.backend import Backend
from ..core.config import TransferConfig, sized
from ..core.errors import ConfigError, HostMemoryError
from ..core.interrupts import held_back
from .budget import check_host_memory, local_ranks
from .host_memory import HostRange

# The ledger, by id: a finalizer may close a pool at any line, while a WeakSet is iterated, too.
_open: weakref.WeakValueDictionary[int, HostPool] = weakref.WeakValueDictionary()
# Around the ledger; reentrant, because finalizers close pools. Always inside held_back(): Ctrl-C
# at the end of a with statement would leave it taken.
_lock = threading.RLock()


def _forget_in_child() -> None:
    """A forked child does not get the memory, and another thread may have had the lock."""
    global _lock
    _lock = threading.RLock()
    _open.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def _pools() -> list[HostPool]:
    return [pool for find in _open.valuerefs() if (pool := find()) is not None]


def held_bytes() -> dict[str, int]:
    """Host memory that this process holds, by holder, the largest first."""
    found = Counter[str]()
    with held_back(), _lock:
        for pool in _pools():
            found[pool.holder] += pool.n_bytes
    return dict((+found).most_common())


class HostPool:
    """Page-locked memory that one holder takes for the transfers of one device.

    Memory goes back with :meth:`give`, with :meth:`close`, or with the pool.

    Args:
        holder: in the user's words, for errors and statistics.
        backend: of the device.
        transfer: how to obtain memory (``pin``), and the bound (``host_memory``).

    Raises:
        ConfigError: an open pool was given another ``host_memory``.
    """

    def __init__(self, holder: str, backend: Backend, transfer: TransferConfig) -> None:
        self.holder = holder
        self.n_bytes = 0  # taken, or being taken
        self._backend, self._transfer = backend, transfer
        self._bound_bytes = sized(transfer.host_memory)
        self._ranges: list[HostRange] = []
        self._insist(0)

    @property
    def pinned_bytes(self) -> int:
        """What is page-locked of :attr:`n_bytes`."""
        return sum(each.n_bytes for each in self._ranges if each.pinned)

    @property
    def seconds(self) -> float:
        """That it took to have every page in place, and to page-lock it."""
        return sum(each.seconds for each in self._ranges)

    def take(self, n_bytes: int) -> HostRange:
        """Zeroed memory of this size, which may be 0.

        Raises:
            HostMemoryError: ``host_memory``, or the host, has no room for it; nothing was taken.
            PinningError: the driver refused; it was given back.
            ConfigError: see :class:`HostPool`; of a pool that was closed.
        """
        try:
            self._insist(n_bytes)
            taken = HostRange(
                n_bytes,
                device=self._backend.device,
                can_pin=self._backend.can_pin,
                transfer=self._transfer,
            )
        except BaseException:
            self.n_bytes = sum(each.n_bytes for each in self._ranges)
            if not self._ranges:
                self.close()  # a bound that was too small must not stay
            raise
        self._ranges.append(taken)
        return taken

    def give(self, taken: HostRange) -> None:
        """Unregister a range; the last tensor over it unmaps it. All transfers have ended."""
        if taken in self._ranges:
            self._ranges.remove(taken)
            self.n_bytes -= taken.n_bytes
            taken.close()

    def close(self) -> None:
        """Give everything back, and the bound up. Idempotent; the pool may be used again."""
        for taken in list(self._ranges):
            self.give(taken)
        with held_back(), _lock:
            _open.pop(id(self), None)

    def _insist(self, n_bytes: int) -> None:
        """Reserve; before that fails, let go of pools that reference cycles alone keep."""
        with contextlib.suppress(ConfigError, HostMemoryError):
            return self._reserve(n_bytes)
        gc.collect()
        return self._reserve(n_bytes)

    def _reserve(self, n_bytes: int) -> None:
        """Be in the ledger, with so many bytes more, if they fit."""
        with held_back(), _lock:
            known = next((pool for pool in _pools() if pool._bound_bytes is not None), self)
            if self._bound_bytes not in (None, known._bound_bytes):
                raise ConfigError(
                    f"host_memory={self._transfer.host_memory!r} of {self.holder}",
                    reason=f"{known.holder} has {known._transfer.host_memory!r}, and one value "
                    "bounds all holders and ranks of this host",
                    remedy="pass the same value to both, leave it out here, or close the other one",
                )
            check_host_memory(
                n_bytes,
                self.holder,
                held=held_bytes(),
                bound_bytes=known._bound_bytes,
                local_ranks=local_ranks(),
            )
            _open[id(self)] = self
            self.n_bytes += n_bytes


class Intervals:
    """Which bytes of ``n_bytes`` are taken, first fit; all are free at first. Pure."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.used_bytes = self.most_used_bytes = 0
        self._taken: list[tuple[int, int]] = []  # starts and ends, in order

    def take(self, n_bytes: int) -> int | None:
        """The start of an interval; None: no gap is as large."""
        start = 0
        for index, (begin, end) in enumerate([*self._taken, (self.n_bytes, 0)]):
            if begin - start >= n_bytes:
                self._taken.insert(index, (start, start + n_bytes))
                self.used_bytes += n_bytes
                self.most_used_bytes = max(self.most_used_bytes, self.used_bytes)
                return start
            start = end
        return None

    def give(self, start: int) -> None:
        """Free the interval that begins there."""
        begin, end = self._taken.pop(bisect.bisect_left(self._taken, (start, 0)))
        assert begin == start, (begin, start)
        self.used_bytes -= end - begin
