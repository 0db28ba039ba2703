"""Whether an optimizer may still be used: open, in the process that built it, not failed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from ..core.errors import ClosedError, LaneError, OffloadError

_START_OVER = "load a checkpoint (model, then optimizer) or build both anew"


class Health:
    """Usable until closed; *failed* from an exception inside a lane on, until a load succeeds."""

    def __init__(self) -> None:
        self.closed = False
        self._pid = os.getpid()
        self._failure: BaseException | None = None

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that built the optimizer: forked ones lack its memory."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """From here on nothing but another ``close()`` is allowed."""
        self.closed = True
        self.recover()

    def recover(self) -> None:
        """A load starts, which writes everything. Drops the failure: its traceback holds views."""
        self._failure = None

    def check(self, *, failed_ok: bool = False) -> None:
        """Refuse use of an optimizer that is closed, inherited by a fork, or failed.

        Raises:
            ClosedError: the first two.
            LaneError: an earlier update failed; the original exception is its cause.
        """
        if self.closed:
            raise ClosedError(
                "a closed optimizer", reason="its memory was given back", remedy="wrap again"
            )
        if not self.is_ours:
            raise ClosedError(
                f"an optimizer of process {self._pid} used in process {os.getpid()}",
                reason="its memory is not inherited by forked processes",
                remedy="step, save and load in the process that built it",
            )
        if self._failure is not None and not failed_ok:
            raise LaneError(
                "an earlier update failed",
                reason=f"some parameters may be one step ahead of others ({self._failure!r})",
                remedy=_START_OVER,
            ) from self._failure

    @contextlib.contextmanager
    def failing(self, what: str, drain: Callable[[], None]) -> Iterator[None]:
        """An exception inside makes the optimizer failed.

        Args:
            what: the call, for the message.
            drain: waits for what is still under way; must not raise.

        Raises:
            LaneError: in place of the exception, which is its cause. KeyboardInterrupt and the
                like stay what they are.
        """
        try:
            yield
        except BaseException as error:
            self._failure = error
            drain()
            if not isinstance(error, Exception):
                raise
            reason = str(error) if isinstance(error, OffloadError) else repr(error)
            if isinstance(error, LaneError):  # of a lane's own threads: the remedy is the same
                reason = f"{error.what}: {error.reason}"
            raise LaneError(f"{what} failed", reason=reason, remedy=_START_OVER) from error
