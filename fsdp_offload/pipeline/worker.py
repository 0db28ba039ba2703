"""The host lane's own threads.

Many threads that each run single-threaded kernels on small pieces, instead of one thread that
runs kernels on all cores: no kernel waits at its end for the slowest core. Measured on 16 cores:
4.8 against 3.9 G parameters/s for fused AdamW (``docs/internals/pipeline.md``).

They run on cores near the device, and on none that another rank has. Only threads of this package
are bound, each by itself and to a set of cores, not to one: the caller's own threads may run there
too, and the system moves ours out of their way.

[Note: whose cores]
Memory of the arena lies next to the device, so do the cores. Several ranks of a host may find the
same ones. Where the process may use every core of the machine, they were not divided, and each
rank takes its share of those near its device, whole physical cores at a time. Where it may not, a
launcher or a container has decided, and all near cores that it left are used.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..core.backend import Backend, cores_near, parse_cpu_list
from ..core.errors import LaneError
from ..link import local_ranks

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
        kernel_threads: intra-op threads of torch kernels on each. Other threads keep their number.
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


# --------------------------------------------------------------------------- their cores


def thread_count(wanted: int | None) -> int:
    """Threads of the host lane: as ``wanted``, else cores of this process / ranks on this host."""
    return wanted or max(1, len(os.sched_getaffinity(0)) // local_ranks())


def thread_setup(backend: Backend) -> Callable[[], None]:
    """What each new thread of the host lane does first: it goes to :func:`cores_of_rank`. Never
    raises for want of permission."""
    cores = cores_of_rank(backend.device)

    def setup() -> None:
        backend.enter_thread()
        with contextlib.suppress(OSError):  # a sandbox that forbids it: slower, not wrong
            os.sched_setaffinity(0, cores)  # 0: this thread alone

    return setup


def cores_of_rank(device: torch.device) -> frozenset[int]:
    """Cores for the host lane's threads of this rank; never empty."""
    near = cores_near(device)
    ranks, rank = local_ranks(), _local_rank()
    if ranks == 1 or rank is None or len(os.sched_getaffinity(0)) < (os.cpu_count() or 1):
        return near
    sharing = _ranks_near(device, near, ranks, rank)
    if rank not in sharing:
        return near
    return share(sibling_groups(near), sharing.index(rank), len(sharing))


def _local_rank() -> int | None:
    """``LOCAL_RANK`` as torchrun sets it, if it is one."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdecimal() and int(text) < local_ranks() else None


def _ranks_near(device: torch.device, near: frozenset[int], ranks: int, rank: int) -> list[int]:
    """Local ranks whose devices are next to the same cores; empty where that is unknown."""
    if near == frozenset(os.sched_getaffinity(0)):  # there is but one set
        return list(range(ranks))
    if device.index != rank or torch.cuda.device_count() < ranks:
        return []  # each rank sees devices of its own, or does not use the one of its number
    return [i for i in range(ranks) if cores_near(torch.device(device.type, i)) == near]


def share(groups: Sequence[tuple[int, ...]], index: int, count: int) -> frozenset[int]:
    """Part ``index`` of ``count`` of the groups, sizes differing by one group at most.

    Of fewer groups than parts, all of them: then parts have to be shared.
    """
    start, stop = len(groups) * index // count, len(groups) * (index + 1) // count
    mine = groups[start:stop] if len(groups) >= count else groups
    return frozenset(core for group in mine for core in group)


def sibling_groups(
    cores: Iterable[int], root: Path = Path("/sys/devices/system/cpu")
) -> list[tuple[int, ...]]:
    """``cores`` by physical core, ascending; each alone where that is unknown.

    Source: Linux ``/sys/devices/system/cpu/cpu<n>/topology/thread_siblings_list``.
    """
    allowed = frozenset(cores)
    groups: set[tuple[int, ...]] = set()
    for core in allowed:
        try:
            text = (root / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()
        except OSError:
            text = str(core)
        siblings = parse_cpu_list(text) | {core}
        groups.add(tuple(sorted(siblings & allowed)))
    return sorted(groups)
