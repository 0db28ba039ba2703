"""Tracks whether an optimizer may be used: built, not failed, not closed, in its own process, and
not in the middle of another call."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Final

from ..core.errors import BusyError, LaneError, OffloadError, check_open
from ..core.interrupts import defer_sigint

SAVE: Final = "checkpoint.save()"
"""Turn of a save, which reads state and weights inside."""
_START_OVER = "load a checkpoint (model, then optimizer) or build both anew"


class Stage(Enum):
    """Stage of an optimizer's life."""

    BUILDING = "building"  # in the constructor: torch's part of it must not touch state
    OPEN = "open"  # after the constructor, and again when a load begins
    FAILED = "failed"  # an exception left state half updated: only a load or close() is allowed
    CLOSED = "closed"  # close() freed its memory: only close() is allowed, and does nothing


class Lifecycle:
    """The stage of one optimizer.

    ``drain``: waits for running work before a failure; must not raise.
    """

    def __init__(self, drain: Callable[[], None]) -> None:
        self.drain = drain
        self._stage = Stage.BUILDING
        self._pid = os.getpid()
        self._failure: BaseException | None = None
        self._running = ""  # the call that has the turn
        self._thread = 0  # where it runs
        self._lock = threading.RLock()

    @property
    def is_built(self) -> bool:
        """Whether the constructor has ended."""
        return self._stage is not Stage.BUILDING

    @property
    def closed(self) -> bool:
        """Whether close() has freed memory."""
        return self._stage is Stage.CLOSED

    @property
    def is_ours(self) -> bool:
        """Whether this process built the optimizer; forked ones lack its memory."""
        return os.getpid() == self._pid

    def open(self) -> None:
        """Enter OPEN: the optimizer is built, or a load begins, which overwrites everything."""
        self._stage = Stage.OPEN
        self._failure = None  # its traceback keeps views alive

    def close(self) -> None:
        """Enter CLOSED: only another ``close()`` is allowed."""
        self._stage = Stage.CLOSED
        self._failure = None

    def check(self, *, failed_ok: bool = False) -> None:
        """Refuse use of an optimizer that is closed, inherited by a fork, or failed.

        Raises:
            ClosedError: it is closed or inherited.
            LaneError: an earlier update failed; the original exception is its cause.
        """
        check_open("HybridDeviceOptimizer", self._pid, is_closed=self.closed)
        if self._stage is Stage.FAILED and not failed_ok:
            raise LaneError(
                "an earlier update failed",
                reason=f"some parameters may be one step ahead of others ({self._failure!r})",
                remedy=_START_OVER,
            ) from self._failure

    @contextlib.contextmanager
    def turn(self, what: str, *, within: str = "") -> Iterator[None]:
        """Hold the optimizer for one call: other threads wait, and Ctrl-C takes effect at the end,
        or inside ``let_through()``.

        Args:
            what: the call.
            within: a call that may hold the turn and use this one.

        Raises:
            BusyError: a signal handler or callback interrupted another call of this thread that
                holds the turn, so waiting would never end.
        """
        if not self.is_ours:  # a fork's lock may stay taken
            yield
            return
        with self._lock:  # outside defer_sigint(), so that Ctrl-C ends this wait
            pass
        with defer_sigint(), self._lock:
            if self._running != within:
                self.check_free(what)
            self._thread = threading.get_ident()
            before, self._running = self._running, what
            try:
                yield
            finally:
                self._running = before

    def inner_turn(self, what: str) -> contextlib.AbstractContextManager[None]:
        """:meth:`turn`, or a part of the call on this thread that has it."""
        is_part = self._running and self._thread == threading.get_ident()
        return contextlib.nullcontext() if is_part else self.turn(what)

    @contextlib.contextmanager
    def held(self, what: str) -> Iterator[None]:
        """Make other threads wait as for a :meth:`turn`, while this thread may call the optimizer.

        Raises:
            BusyError: see :meth:`turn`.
        """
        with self._lock:
            self.check_free(what)
            yield

    def check_free(self, what: str) -> None:
        """Refuse what a signal handler or a callback calls in the middle of another call.

        Raises:
            BusyError: a call of this thread has the turn.
        """
        if self._running and self._thread == threading.get_ident():
            raise BusyError(
                f"{what} in the middle of {self._running}",
                reason="a signal handler or callback called it while some parameters are a "
                "step ahead of others",
                remedy="let the handler set a flag, and read the flag after step()",
            )

    def outside(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap ``call``, for use inside a turn, so that it runs without the turn."""

        def run() -> Any:
            running, self._running = self._running, ""
            self._lock.release()
            try:
                return call()
            finally:
                self._lock.acquire()
                self._thread, self._running = threading.get_ident(), running

        return run

    @contextlib.contextmanager
    def failing(self, what: str, *keep: type[Exception]) -> Iterator[None]:
        """Mark the optimizer failed if an exception is raised inside.

        Args:
            what: the call, for the message.
            keep: classes of exceptions to raise unchanged, like KeyboardInterrupt.

        Raises:
            LaneError: wraps any other exception, as its cause.
        """
        try:
            yield
        except BaseException as error:
            self._stage, self._failure = Stage.FAILED, error
            self.drain()
            if isinstance(error, keep) or not isinstance(error, Exception):
                raise
            reason = str(error) if isinstance(error, OffloadError) else repr(error)
            cause: BaseException = error
            if isinstance(error, LaneError):  # of the thread that updates on the CPU
                reason, cause = f"{error.what}: {error.reason}", error.__cause__ or error
                self._failure = cause
            raise LaneError(f"{what} failed", reason=reason, remedy=_START_OVER) from cause
