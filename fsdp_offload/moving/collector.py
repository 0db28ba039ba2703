"""Python's garbage collector, kept from what moves memory."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator


class _Pauses:
    """Those under way, of all threads: the last one to end lets the collector be as it was."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal may find this thread holding it
        self._count = 0
        self._was_enabled = False

    def enter(self) -> None:
        with self._lock:
            if self._count == 0:
                self._was_enabled = gc.isenabled()
            self._count += 1
            gc.disable()

    def leave(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._was_enabled:
                gc.enable()


_pauses = _Pauses()


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Python's collector has no turn inside: objects are made for each module and storage, and a
    full collection (0.1 s and more) would come between copies. It comes while they run."""
    _pauses.enter()
    try:
        yield
    finally:
        _pauses.leave()
