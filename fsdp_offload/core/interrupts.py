"""Ctrl-C held back while memory, files or state are between two places."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class _Note:
    """In the place of the handler of SIGINT: only remembers that the signal came."""

    has_come = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.has_come = True


@contextlib.contextmanager
def held_back() -> Iterator[_Note]:
    """A SIGINT that comes inside reaches its handler at the end, once, however often it came.

    With Python's own handler, KeyboardInterrupt is raised there; an exception that was on its way
    is then its ``__context__``. Inside of another one, and in threads other than the main one,
    where Python runs no signal handlers, this does nothing. It is a decorator, too. What it gives
    tells long work whether a signal waits for its end.
    """
    note = _Note()
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    # None: a handler that was not installed from Python, and could not be put back.
    if not is_main or before is None or before == signal.SIG_IGN or isinstance(before, _Note):
        yield note
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield note
    finally:
        signal.signal(signal.SIGINT, before)
        if note.has_come:
            if callable(before):
                before(signal.SIGINT, None)
            else:  # the system's own: it ends the process
                signal.raise_signal(signal.SIGINT)
