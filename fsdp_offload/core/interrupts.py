"""Ctrl-C held back while memory, files or state are between two places."""

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
    """In the place of the handler of SIGINT: only remembers that the signal came."""

    has_come = False

    def __init__(self, before: Any = None) -> None:
        self._before = before

    def put_back(self) -> None:
        """Install the handler again; call it if the signal came."""
        _signal.signal(_SIGINT, self._before)
        if not self.has_come:
            return
        self.has_come = False
        if callable(self._before):
            self._before(signal.SIGINT, None)
        else:  # the system's own: it ends the process
            signal.raise_signal(signal.SIGINT)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.has_come = True


@contextlib.contextmanager
def held_back() -> Iterator[Note]:
    """A SIGINT that comes inside reaches its handler at the end, once, however often it came.

    With Python's own handler, KeyboardInterrupt is raised there; an exception that was on its way
    is then its ``__context__``. Inside of another one, and in threads other than the main one,
    where Python runs no signal handlers, this does nothing. It is a decorator, too. What it gives
    tells long work whether a signal waits for the end of this one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = _signal.getsignal(_SIGINT) if is_main else None
    # None: a handler that was not installed from Python, and could not be put back.
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
    """A part of what :func:`held_back` protects that Ctrl-C may end; one that waits does so here.

    Outside of :func:`held_back`, and in threads other than the main one, this does nothing.
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
