"""Defer Ctrl-C while memory, files or state are between two places."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal's functions take 10 us: they make enums
import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

_SIGINT: Final = int(signal.SIGINT)


class Note:
    """Replaces the handler of SIGINT, and only remembers that the signal came."""

    has_come = False

    def __init__(self, before: Any = None) -> None:
        self._before = before

    def put_back(self) -> None:
        """Restore the handler; call it if the signal came."""
        _signal.signal(_SIGINT, self._before)
        if not self.has_come:
            return
        self.has_come = False
        if callable(self._before):
            self._before(signal.SIGINT, None)
        else:  # the system's, which ends the process
            signal.raise_signal(signal.SIGINT)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.has_come = True


@contextlib.contextmanager
def defer_sigint() -> Iterator[Note]:
    """Defer SIGINT until the end of the context, where its handler runs once.

    Python's own handler raises KeyboardInterrupt there, with an exception in flight as its
    ``__context__``. Nested contexts, and threads other than the main one, where Python runs no
    signal handlers, change nothing. Works as a decorator, too. The :class:`Note` tells long work
    whether a signal is waiting.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = _signal.getsignal(_SIGINT) if is_main else None
    # None: a handler that was not installed from Python, which nothing could restore.
    note = Note(before)
    if before is None or before == signal.SIG_IGN or isinstance(before, Note):
        yield note
        return
    _signal.signal(_SIGINT, note)
    try:
        yield note
    finally:
        note.put_back()


@contextlib.contextmanager
def let_through() -> Iterator[None]:
    """Let Ctrl-C end a part of what :func:`defer_sigint` protects; a waiting one is raised here.

    Does nothing outside :func:`defer_sigint`, and in threads other than the main one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    note = _signal.getsignal(_SIGINT) if is_main else None
    if not isinstance(note, Note):
        yield
        return
    try:
        note.put_back()
        yield
    finally:
        _signal.signal(_SIGINT, note)
