"""The host lane's own threads.

Many threads that each run single-threaded kernels on small pieces, instead of one thread that
runs kernels on all cores: no kernel waits at its end for the slowest core. Measured on 16 cores:
4.8 against 3.9 G parameters/s for fused AdamW (``docs/internals/pipeline.md``).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.errors import LaneError

JOIN_SECONDS = 10.0


Calls = Sequence[Callable[[], None]]
"""What a submitted call may return: calls to run after it."""


class Outcome:
    """The outcome of one submitted call and of the calls that it returned."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._open = 1
        self._error: BaseException | None = None
        self._then: Callable[[], object] | None = None

    def expect(self, calls: int) -> None:
        """Add that many calls, before the current one ends."""
        with self._lock:
            self._open += calls

    def finish(self, error: BaseException | None) -> None:
        """End one call; the first error is kept."""
        with self._lock:
            self._open -= 1
            self._error = self._error or error
            then = None
            if self._open == 0:
                self._done.set()
                then, self._then = self._then, None
        if then is not None:
            then()

    def is_done(self) -> bool:
        """Whether the call has ended."""
        return self._done.is_set()

    def when_done(self, then: Callable[[], object]) -> None:
        """Call ``then``, which must neither wait nor raise, on the thread where the call ends."""
        with self._lock:
            if not self._done.is_set():
                self._then = then
                return
        then()

    def wait(self, alive: Callable[[], bool] = lambda: True) -> None:
        """Block until the call has ended; raises what it raised, or what :meth:`join` does."""
        self.join(alive)
        if self._error is not None:
            raise self._error

    def join(self, alive: Callable[[], bool] = lambda: True) -> None:
        """Block until the call has ended, even if it failed.

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


_Item = tuple[Outcome, Callable[..., Calls | None], tuple[Any, ...]]


class InlineWorker:
    """A :class:`ThreadPool` without threads: runs each call at once, on the caller's (the stream
    simulator needs that)."""

    def submit(self, fn: Callable[..., Calls | None], *args: Any) -> Outcome:
        """See :meth:`.ThreadPool.submit`."""
        outcome = Outcome()
        try:
            for call in fn(*args) or ():
                call()
        except Exception as error:  # surfaces from outcome.wait(), as from a thread
            outcome.finish(error)
        else:
            outcome.finish(None)
        return outcome

    def alive(self) -> bool:
        """Always."""
        return True

    def stop(self) -> None:
        """Nothing is pending."""


class ThreadPool:
    """Daemon threads that keep no reference to the optimizer between calls.

    Args:
        threads: how many.
        kernel_threads: intra-op threads of torch kernels that run on each. Other threads of the
            process keep their number, and so do threads that are created later.
        prepare: called on each thread before its first call; must not raise.
        name: of the threads, with a number behind it.
    """

    def __init__(
        self,
        threads: int,
        kernel_threads: int,
        prepare: Callable[[], None] = lambda: None,
        name: str = "host",
    ) -> None:
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        inherited, ready = torch.get_num_threads(), threading.Semaphore(0)
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(self._queue, kernel_threads, inherited, ready, prepare),
                name=f"fsdp_offload-{name}-{i}",
                daemon=True,
            )
            for i in range(threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.stop()
            raise
        for _ in self._threads:
            ready.acquire()  # all have set up their number of kernel threads

    def submit(self, fn: Callable[..., Calls | None], *args: Any) -> Outcome:
        """Run ``fn(*args)``, then, in any order and beside each other, the calls it returns."""
        outcome = Outcome()
        self._queue.put((outcome, fn, args))
        return outcome

    def alive(self) -> bool:
        """Whether submitted calls will still run."""
        return all(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Let pending calls end, then end the threads; waits at most ``JOIN_SECONDS``."""
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + JOIN_SECONDS
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


Worker = InlineWorker | ThreadPool


def _serve(
    work: queue.SimpleQueue[_Item | None],
    kernel_threads: int,
    inherited: int,
    ready: threading.Semaphore,
    prepare: Callable[[], None],
) -> None:
    try:
        prepare()
        torch.get_num_threads()  # else this thread's first kernel would take the default once more
        torch.set_num_threads(kernel_threads)
        # set_num_threads also becomes the default of threads that are created later. A thread
        # that lives only for this line puts that default back and leaves this thread's own alone.
        restore = threading.Thread(target=torch.set_num_threads, args=(inherited,))
        restore.start()
        restore.join()
    finally:
        ready.release()
    while (item := work.get()) is not None:
        outcome, fn, args = item
        more: Calls | None = None
        call: Callable[[], None] | None = None
        try:
            more = fn(*args)
            outcome.expect(len(more or ()))
            for call in more or ():
                work.put((outcome, call, ()))
        except BaseException as error:
            outcome.finish(error)
        else:
            outcome.finish(None)
        # Nothing of a step may outlive it here: its gradients would.
        del item, outcome, fn, args, more, call
