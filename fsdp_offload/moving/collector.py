"""Python's garbage collector, kept from what moves memory."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Final

_lock: Final = threading.RLock()  # a signal may find this thread holding it
_under_way: Final[set[object]] = set()  # of all threads
_was_enabled = False


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Python's collector has no turn inside: objects are made for each module and storage, and a
    full collection (0.1 s and more) would come between copies. It comes while they run.

    Of several threads the last one to end lets the collector be as it was.
    """
    pause = object()
    try:
        _begin(pause)
        yield
    finally:
        _end(pause)


def _begin(pause: object) -> None:
    global _was_enabled
    with _lock:
        if not _under_way:
            _was_enabled = gc.isenabled()
        _under_way.add(pause)  # before it is disabled: from here on an interrupt undoes it
        gc.disable()


def _end(pause: object) -> None:
    with _lock:
        if pause in _under_way:
            _under_way.remove(pause)
            if not _under_way and _was_enabled:
                gc.enable()
