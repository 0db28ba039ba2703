"""Whether an optimizer may be used: it is built, not failed, not closed, in its own process, and
not in the middle of another call."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Final

from ..core.errors import BusyError, LaneError, OffloadError, check_open
from ..core.interrupts import held_back

SAVE: Final = "checkpoint.save()"
"""The turn of a save, which reads state and weights inside."""
_START_OVER = "load a checkpoint (model, then optimizer) or build both anew"


class Stage(Enum):
    """Of an optimizer's life."""

    BUILDING = "building"  # in the constructor: torch's own part of it may not touch state
    OPEN = "open"  # from the end of the constructor on, and again when a load begins
    FAILED = "failed"  # an exception left state half updated: only a load or close() is allowed
    CLOSED = "closed"  # close() gave its memory back: only close() is allowed, and does nothing


class Lifecycle:
    """The stage that one optimizer is in.

    ``drain``: waits for what is under way, before it fails; must not raise.
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
        """Whether memory was given back."""
        return self._stage is Stage.CLOSED

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that built the optimizer: forked ones lack its memory."""
        return os.getpid() == self._pid

    def open(self) -> None:
        """It is built, or a load begins, which writes everything: a failure counts no more."""
        self._stage = Stage.OPEN
        self._failure = None  # its traceback holds views

    def close(self) -> None:
        """From here on nothing but another ``close()`` is allowed."""
        self._stage = Stage.CLOSED
        self._failure = None

    def check(self, *, failed_ok: bool = False) -> None:
        """Refuse use of an optimizer that is closed, inherited by a fork, or failed.

        Raises:
            ClosedError: the first two.
            LaneError: an earlier update failed; the original exception is its cause.
        """
        check_open("an optimizer", self._pid, is_closed=self.closed)
        if self._stage is Stage.FAILED and not failed_ok:
            raise LaneError(
                "an earlier update failed",
                reason=f"some parameters may be one step ahead of others ({self._failure!r})",
                remedy=_START_OVER,
            ) from self._failure

    @contextlib.contextmanager
    def turn(self, what: str, *, within: str = "") -> Iterator[None]:
        """Inside, no other call has the optimizer: other threads wait, and Ctrl-C arrives at the
        end, or where ``let_through()`` says so.

        Args:
            what: the call.
            within: a call that may have the turn, and uses this one.

        Raises:
            BusyError: another call on this thread has the turn, which a signal handler or a
                callback interrupted. Waiting would never end.
        """
        if not self.is_ours:  # the lock of a fork may stay taken
            yield
            return
        with self._lock:  # first without held_back(): Ctrl-C ends this wait
            pass
        with held_back(), self._lock:
            if self._running != within:
                self.check_free(what)
            before, self._running = self._running, what
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                self._running = before

    def part(self, what: str) -> contextlib.AbstractContextManager[None]:
        """:meth:`turn`, or a part of the call on this thread that has it."""
        is_part = self._running and self._thread == threading.get_ident()
        return contextlib.nullcontext() if is_part else self.turn(what)

    @contextlib.contextmanager
    def held(self, what: str) -> Iterator[None]:
        """Inside, other threads wait as at a :meth:`turn`, and this one's calls go on.

        Raises:
            BusyError: as of :meth:`turn`.
        """
        with self._lock:
            self.check_free(what)
            yield

    def check_free(self, what: str) -> None:
        """Refuse what a signal handler or a callback calls in the middle of another call.

        Raises:
            BusyError: a call has the turn.
        """
        if self._running:
            raise BusyError(
                f"{what} in the middle of {self._running}",
                reason="a signal handler or a callback called it on the same thread, while some "
                "parameters are a step ahead of others",
                remedy="let the handler set a flag, and look at the flag after step()",
            )

    def outside(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """``call``, to be called inside of a turn, with the turn given up meanwhile."""

        def run() -> Any:
            running, self._running = self._running, ""
            self._lock.release()
            try:
                return call()
            finally:
                self._lock.acquire()
                self._running = running

        return run

    @contextlib.contextmanager
    def failing(self, what: str, *keep: type[Exception]) -> Iterator[None]:
        """An exception inside makes the optimizer failed.

        Args:
            what: the call, for the message.
            keep: exceptions of these classes stay what they are, as KeyboardInterrupt does.

        Raises:
            LaneError: in place of another exception, which is its cause.
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
            if isinstance(error, LaneError):  # of the host lane's thread: the remedy is the same
                reason, cause = f"{error.what}: {error.reason}", error.__cause__ or error
                self._failure = cause
            raise LaneError(f"{what} failed", reason=reason, remedy=_START_OVER) from cause
