"""A move under way, and figures of those that have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..interrupts import held_back
from ..moving import Trip


@dataclass(frozen=True)
class Transfer:
    """What one kind of memory took in one direction."""

    n_bytes: int
    """Copied."""

    seconds: float
    """From its first copy's start to its last one's end, as the device saw it."""

    @property
    def gb_per_second(self) -> float:
        """10**9 bytes per second; 0 where nothing was copied."""
        return self.n_bytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True)
class PhaseStatistics:
    """Figures of the last offload and the last reload that were waited for."""

    offloaded: Mapping[str, Transfer]
    """By kind: ``params``, ``grads``, ``state``."""

    reloaded: Mapping[str, Transfer]
    """The same, back."""

    offload_seconds: float
    """From the call to its end, as the host saw it."""

    reload_seconds: float
    """The same, back."""

    freed_bytes: int
    """Device memory that the last offload gave back, as the driver saw it; 0 on a CPU."""

    host_bytes: int
    """Host memory held for parameters, gradients and plain optimizers' state. What a
    ``HybridDeviceOptimizer`` holds is in its own statistics."""

    pinned_bytes: int
    """Page-locked part of ``host_bytes``."""

    pin_seconds: float
    """To obtain and page-lock it."""

    cycles: int
    """Reloads that have ended."""


class Handle:
    """A move under way; made by ``offload`` and ``reload``. Any thread may use it."""

    def __init__(
        self,
        trips: Mapping[str, Trip],
        finish: Callable[[Handle], None] | None = None,
        *,
        finish_blocks: bool = False,
    ) -> None:
        self.n_bytes = sum(trip.n_bytes for trip in trips.values())
        """Bytes that are copied."""
        self.seconds = 0.0
        """From the call to its end, as the host saw it; 0 before :meth:`wait` returns."""
        self._by_kind, self._finish = dict(trips), finish
        self._trips = list(trips.values())
        self._finish_blocks = finish_blocks
        self._began, self._lock = time.perf_counter(), threading.RLock()

    def is_done(self) -> bool:
        """Whether everything has arrived. Does not block; what has left so far is given up, to
        torch's allocator (:meth:`wait` gives it to the driver, for which CUDA waits for all work).
        """
        if not self._lock.acquire(blocking=False):
            return False  # another thread waits for it
        try:
            with held_back():
                done = all([trip.advance() for trip in self._trips])
                if done and not self._finish_blocks:
                    self.wait()
                return done
        finally:
            self._lock.release()

    def wait(self) -> None:
        """Block until everything has arrived, and what left is the driver's again. Idempotent."""
        with self._lock, held_back():
            for trip in self._trips:
                trip.wait()
            finish, self._finish = self._finish, None
            if finish is not None:
                self.seconds = time.perf_counter() - self._began
                finish(self)

    def transfers(self) -> dict[str, Transfer]:
        """Figures by kind; wait first."""
        return {k: Transfer(t.n_bytes, t.copy_seconds) for k, t in self._by_kind.items()}

    def _release_next(self) -> bool:
        """Wait for the next memory that leaves; False if none is left to leave."""
        with self._lock:
            return any(trip.release_next() for trip in self._trips)
