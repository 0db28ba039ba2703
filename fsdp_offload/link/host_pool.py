"""Host memory by holder, with one ledger, one check and one bound per process.

Each holder of host memory has a :class:`HostPool`. The open pools of a process are its ledger: it
lists holders and bytes, and checks every request against the sum. ``host_memory=`` bounds that sum,
times the ranks of the host, while any pool with that option is open. So any holder may pass it, and
two values conflict.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections import Counter

from ..core.backend import Backend
from ..core.config import TransferConfig, checked_transfer, sized
from ..core.errors import ConfigError, HostMemoryError
from ..core.interrupts import defer_sigint
from .budget import check_host_memory, local_ranks
from .host_memory import HostRange

# The ledger, by id, because a finalizer may close a pool at any line, even inside an iteration.
_open: weakref.WeakValueDictionary[int, HostPool] = weakref.WeakValueDictionary()
# Guards the ledger; reentrant, because finalizers close pools. Always taken inside defer_sigint():
# Ctrl-C at the end of a with statement would leave it locked.
_lock = threading.RLock()


def _forget_in_child() -> None:
    """Reset the ledger in a forked child, which lacks the memory and may have inherited a taken
    lock."""
    global _lock
    _lock = threading.RLock()
    _open.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def _pools() -> list[HostPool]:
    return [pool for find in _open.valuerefs() if (pool := find()) is not None]


def held_bytes() -> dict[str, int]:
    """Return this process's host memory by holder, the largest first."""
    found = Counter[str]()
    with defer_sigint(), _lock:
        for pool in _pools():
            found[pool.holder] += pool.n_bytes
    return dict((+found).most_common())


class HostPool:
    """Page-locked memory of one holder, for transfers of one device.

    :meth:`give`, :meth:`close` and the end of the pool free memory.

    Args:
        holder: name for errors and statistics.
        backend: the device's.
        transfer: how to allocate memory (``pin``), and the bound (``host_memory``).

    Raises:
        ConfigError: ``transfer`` is something else, or an open pool has another ``host_memory``.
    """

    def __init__(self, holder: str, backend: Backend, transfer: TransferConfig | None) -> None:
        self.holder = holder
        self.n_bytes = 0  # includes requests in progress
        self._backend, self._transfer = backend, checked_transfer(transfer)
        self._bound_bytes = sized(self._transfer.host_memory)
        self._ranges: list[HostRange] = []
        self._insist(0)

    @property
    def pinned_bytes(self) -> int:
        """Page-locked part of :attr:`n_bytes`."""
        return sum(each.n_bytes for each in self._ranges if each.pinned)

    @property
    def seconds(self) -> float:
        """Seconds that allocating and page-locking took."""
        return sum(each.seconds for each in self._ranges)

    def take(self, n_bytes: int) -> HostRange:
        """Take zeroed memory of this size, which may be 0.

        Raises:
            HostMemoryError: ``host_memory``, or the host, has no room for it; nothing was taken.
            PinningError: the driver refused; the memory was freed.
            ConfigError: see :class:`HostPool`; only after the pool was closed.
        """
        try:
            self._insist(n_bytes)
            taken = HostRange(
                n_bytes,
                device=self._backend.device,
                can_pin=self._backend.can_pin,
                transfer=self._transfer,
                holder=self.holder,
            )
        except BaseException:
            self.n_bytes = sum(each.n_bytes for each in self._ranges)
            if not self._ranges:
                self.close()  # a bound that was too small must not stay
            raise
        self._ranges.append(taken)
        return taken

    def give(self, taken: HostRange) -> None:
        """Free a range after all transfers; the last tensor over it unmaps it."""
        if taken in self._ranges:
            self._ranges.remove(taken)
            self.n_bytes -= taken.n_bytes
            taken.close()

    def close(self) -> None:
        """Free everything and drop the bound. Idempotent; the pool may be used again."""
        for taken in list(self._ranges):
            self.give(taken)
        with defer_sigint(), _lock:
            _open.pop(id(self), None)

    def _insist(self, n_bytes: int) -> None:
        """Reserve bytes; before that fails, collect pools that only reference cycles keep alive."""
        with contextlib.suppress(ConfigError, HostMemoryError):
            return self._reserve(n_bytes)
        gc.collect()
        return self._reserve(n_bytes)

    def _reserve(self, n_bytes: int) -> None:
        with defer_sigint(), _lock:
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
