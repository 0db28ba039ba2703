"""The host lane's own thread, with its own number of intra-op threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..errors import LaneError

JOIN_SECONDS = 10.0


class Ticket:
    """The outcome of one submitted call."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        """Called once, by the worker."""
        self._error = error
        self._done.set()

    def wait(self, alive: Callable[[], bool] = lambda: True) -> None:
        """Block until the call has ended; raises what it raised.

        Raises:
            LaneError: the worker thread is gone and will never end the call.
        """
        while not self._done.wait(timeout=1.0):
            if not alive() and not self._done.is_set():
                raise LaneError(
                    "host lane thread",
                    reason="it ended before its work did (interpreter shutdown or a fork)",
                    remedy="build the optimizer in the process that steps it",
                )
        if self._error is not None:
            raise self._error


class Worker(Protocol):
    """Runs calls one after another."""

    def submit(self, fn: Callable[..., None], *args: Any) -> Ticket:
        """Run ``fn(*args)`` after everything submitted before."""
        ...

    def alive(self) -> bool:
        """Whether submitted calls will still run."""
        ...

    def stop(self) -> None:
        """Let pending calls end, then end the thread; waits at most ``JOIN_SECONDS``."""
        ...


class InlineWorker:
    """Runs each call at once, on the caller's thread (the stream simulator needs that)."""

    def submit(self, fn: Callable[..., None], *args: Any) -> Ticket:
        """See :class:`Worker`."""
        ticket = Ticket()
        try:
            fn(*args)
        except Exception as error:  # surfaces from ticket.wait(), as from a thread
            ticket.finish(error)
        else:
            ticket.finish(None)
        return ticket

    def alive(self) -> bool:
        """See :class:`Worker`."""
        return True

    def stop(self) -> None:
        """See :class:`Worker`."""


class ThreadWorker:
    """A daemon thread that keeps no reference to the optimizer between calls.

    Args:
        threads: intra-op threads of torch kernels that run on it. torchrun exports
            ``OMP_NUM_THREADS=1``, which would make the host lane about ten times slower, so the
            thread sets its own number; other threads keep theirs.
    """

    def __init__(self, threads: int) -> None:
        self._queue: queue.SimpleQueue[tuple[Ticket, Callable[..., None], tuple[Any, ...]] | None]
        self._queue = queue.SimpleQueue()
        inherited = torch.get_num_threads()
        self._thread = threading.Thread(
            target=_serve, args=(self._queue, threads, inherited), name="fsdp_offload-host",
            daemon=True,
        )  # fmt: skip
        self._thread.start()
        self.submit(lambda: None).wait(self.alive)  # it has set up its own number of threads

    def submit(self, fn: Callable[..., None], *args: Any) -> Ticket:
        """See :class:`Worker`."""
        ticket = Ticket()
        self._queue.put((ticket, fn, args))
        return ticket

    def alive(self) -> bool:
        """See :class:`Worker`."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """See :class:`Worker`."""
        self._queue.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)


def _serve(work: queue.SimpleQueue[Any], threads: int, inherited: int) -> None:
    torch.set_num_threads(threads)
    # set_num_threads also becomes the default of threads that are created later. A thread that
    # lives only for this line puts that default back and leaves this thread's own number alone.
    restore = threading.Thread(target=torch.set_num_threads, args=(inherited,))
    restore.start()
    restore.join()
    while (item := work.get()) is not None:
        ticket, fn, args = item
        try:
            fn(*args)
        except BaseException as error:
            ticket.finish(error)
        else:
            ticket.finish(None)
        del item, ticket, fn, args
