"""Persistent worker processes, one per rank, that run functions inside a process group.

Starting a process, importing torch and meeting at a rendezvous takes seconds; a collective on a
small tensor takes less than a millisecond. The pool pays the first once and keeps the ranks::

    def total(value):                       # at module level: it is sent to the ranks by its name
        tensor = torch.tensor([value + dist.get_rank()])
        dist.all_reduce(tensor)
        return tensor

    with RankPool(2) as pool:
        assert pool.run(total, 10) == [torch.tensor([21])] * 2

What the pool promises:

* Ranks meet through a file in a temporary directory, never through a port.
* Each call starts with ``random`` and torch seeded with 0, on every rank, and one torch thread.
* A rank that raises, dies or does not answer in time becomes a :class:`RankError` that names it.
  The other ranks may be stuck in a collective by then, so all of them are killed, and the next
  call starts new ones.

Limits: the process group, and every group made from it, lives as long as the ranks do; what a
function leaves in module globals is seen by the next one. Results come back as plain values on the
host: a DTensor does not travel, send its local tensor. A pool belongs to one thread.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

__all__ = ["RankError", "RankPool", "forks"]

R = TypeVar("R")

# Imported once by the fork server. None of these initialises a GPU: a context made there could
# not be used by the forked ranks.
PRELOAD = [
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
]
# FSDP2 imports torch._dynamo in its first forward, 2.5 s. These may look at a GPU.
PRELOAD_ON_CPU = ["fsdp_offload.checkpoint", "pytest", "torch._dynamo"]
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
_START_TIMEOUT_S = 120.0
# After one rank has failed, how long the others get to report a failure of their own.
_GRACE_S = 0.5
_STOP_TIMEOUT_S = 5.0
_NO_TASK = b""


def forks() -> ForkServerContext:
    """For processes forked where torch is imported. The first call in a process settles what is."""
    context = multiprocessing.get_context("forkserver")
    on_cpu = [] if torch.cuda.is_available() else PRELOAD_ON_CPU
    context.set_forkserver_preload([*PRELOAD, *on_cpu])
    return context


class RankError(RuntimeError):
    """One or more ranks raised, died, or did not answer in time: which, and where they stood."""


class RankPool:
    """``world_size`` worker processes that share one default process group.

    ``device_type`` is "cpu" or "cuda"; with "cuda", rank ``i`` has GPU ``i`` as its current device.
    The group is one of gloo, and on GPUs of NCCL too. The ranks start at the first :meth:`run` and
    end with :meth:`close`, with the ``with`` block, when the pool is collected, or when the
    interpreter exits.
    """

    def __init__(self, world_size: int, *, device_type: str = "cpu") -> None:
        self.world_size, self.device_type = world_size, device_type
        self._crew: _Crew | None = None

    def run(
        self, fn: Callable[..., R], /, *args: Any, timeout_s: float = 120.0, **kwargs: Any
    ) -> list[R]:
        """Call ``fn(*args, **kwargs)`` on every rank and return the results in rank order.

        ``fn`` must be importable by its module and name. Arguments and results are copied.
        ``timeout_s`` counts from the call, the start of the ranks not included.

        Raises :class:`RankError` when a rank raises, dies, or has not answered in ``timeout_s``.
        """
        # Serialised first: what cannot be sent is the caller's mistake and costs no rank.
        task = _Task(list(sys.path), os.getcwd(), _dump((fn, args, kwargs)))
        crew = self._started()
        try:
            crew.send(pickle.dumps(task))
            answers = crew.gather(timeout_s)
        except BaseException:
            # Also on KeyboardInterrupt: a late answer must never be taken for the next call's.
            self._crew = None
            crew.kill()
            raise
        return [_load(answer) for answer in answers]

    def close(self) -> None:
        """End the ranks and remove their files. The pool can be used again afterwards."""
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.stop()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self) -> _Crew:
        if self._crew is None:
            crew = _Crew(self.world_size, self.device_type)
            try:
                crew.gather(_START_TIMEOUT_S)
            except BaseException:
                crew.kill()
                raise
            self._crew = crew
            # For a pool that is dropped without close(); stopping a crew twice does nothing.
            weakref.finalize(self, crew.stop).atexit = False
        return self._crew


class _Task(NamedTuple):
    """One call, as it travels to a rank."""

    sys_path: list[str]  # the caller's, which may have grown since the ranks started
    cwd: str
    call: bytes  # (fn, args, kwargs)


class _Answer(NamedTuple):
    """What a rank sends back: exactly one of the two is set."""

    result: bytes | None
    failure: str | None


class _Crew:
    """One generation of worker processes: started once, and never used again after a failure."""

    def __init__(self, world_size: int, device_type: str) -> None:
        self._owner_pid = os.getpid()
        self._directory = Path(tempfile.mkdtemp(prefix="fsdp-offload-ranks-"))
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        # Not left to weakref.finalize: this must come before the exit handler of multiprocessing,
        # which waits for the ranks, and handlers run in the reverse order of registration.
        atexit.register(self.stop)
        context = forks()
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            seat = _Seat(rank, world_size, device_type, str(self._directory))
            process = context.Process(target=_serve, args=(seat, theirs), name=f"rank {rank}")
            process.start()
            theirs.close()  # the rank holds the only other end now, so its death reads as EOF
            self._processes.append(process)
            self._connections.append(ours)

    def send(self, message: bytes) -> None:
        for connection in self._connections:
            # A rank that has died in between is found, with its exit status, by gather().
            with contextlib.suppress(OSError):
                connection.send_bytes(message)

    def gather(self, timeout_s: float) -> list[bytes]:
        """One answer per rank, in rank order; raises RankError when any is a failure or missing."""
        deadline = time.monotonic() + timeout_s
        rank_of = {connection: rank for rank, connection in enumerate(self._connections)}
        results: dict[int, bytes] = {}
        tracebacks: dict[int, str] = {}
        while rank_of:
            left_s = deadline - time.monotonic()
            ready = wait(list(rank_of), timeout=max(0.0, left_s))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = rank_of.pop(connection)
                answer = self._receive(rank, connection)
                if answer.result is not None:
                    results[rank] = answer.result
                else:
                    tracebacks[rank] = str(answer.failure)
            if tracebacks:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        # Next to a failure, the ranks still out are waiting for it: they are not at fault.
        silent = () if tracebacks else tuple(sorted(rank_of.values()))
        if tracebacks or silent:
            raise self._error(tracebacks, silent, timeout_s)
        return [results[rank] for rank in range(len(self._processes))]

    def stop(self) -> None:
        """Let the ranks leave their process group and exit; kill those that do not."""
        if os.getpid() != self._owner_pid:
            return  # a forked child inherited this object: the ranks are not its own
        self.send(_NO_TASK)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        if os.getpid() != self._owner_pid:
            return
        atexit.unregister(self.stop)
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join()
            connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _receive(self, rank: int, connection: Connection) -> _Answer:
        try:
            result, failure = pickle.loads(connection.recv_bytes())
            return _Answer(result, failure)
        except (EOFError, ConnectionResetError):
            process = self._processes[rank]
            process.join(_STOP_TIMEOUT_S)
            return _Answer(None, f"its process ended with exit code {process.exitcode}\n")

    def _error(
        self, tracebacks: dict[int, str], silent: tuple[int, ...], timeout_s: float
    ) -> RankError:
        parts = [f"rank {rank} failed:\n{text}" for rank, text in sorted(tracebacks.items())]
        if silent:
            parts.append(f"ranks {list(silent)} did not answer in {timeout_s:g} s")
            parts += [f"rank {rank} stood at:\n{self._stack(rank)}" for rank in silent]
        return RankError("\n".join(parts))

    def _stack(self, rank: int) -> str:
        """Every Python stack of a silent rank, or a word on why there is none."""
        pid = self._processes[rank].pid
        path = _stack_file(str(self._directory), rank)
        if pid is None or not path.exists():
            return "(unknown: it had not finished starting)"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + _GRACE_S
        seen, text = "", ""
        while time.monotonic() < deadline:
            time.sleep(0.02)
            seen, text = text, path.read_text(errors="replace")
            if text and text == seen:  # written, and no longer growing
                return text
        return text or "(unknown: its signal handler did not run)"


class _Seat(NamedTuple):
    """What one worker process is told when it starts."""

    rank: int
    world_size: int
    device_type: str
    directory: str


def _stack_file(directory: str, rank: int) -> Path:
    return Path(directory) / f"stack-{rank}"


def _serve(seat: _Seat, connection: Connection) -> NoReturn:
    """The life of a worker: join the group, then answer one task after another."""
    # Ctrl-C reaches the whole foreground group; the parent decides what becomes of the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # what is imported stays: a collection need not look at it again
    try:
        _join_group(seat)
    except BaseException:
        connection.send_bytes(pickle.dumps((None, traceback.format_exc())))
        _leave(1)
    connection.send_bytes(pickle.dumps((_dump(None), None)))
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:  # the parent is gone
            _leave(1)
        if message == _NO_TASK:
            dist.destroy_process_group()
            _leave(0)
        answer = _perform(_Task(*pickle.loads(message)))
        connection.send_bytes(pickle.dumps(tuple(answer)))


def _join_group(seat: _Seat) -> None:
    threading.Thread(target=_follow_parent, args=(seat.directory,), daemon=True).start()
    stack_file = _stack_file(seat.directory, seat.rank).open("w")
    faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(seat.rank), LOCAL_RANK=str(seat.rank), WORLD_SIZE=str(seat.world_size)
    )
    if sys.platform == "linux":
        # Otherwise gloo resolves this machine's host name, which not every machine can do.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device: torch.device | None = None
    if seat.device_type == "cuda":
        device = torch.device("cuda", seat.rank)
        torch.cuda.set_device(device)
    rendezvous = str(Path(seat.directory) / "rendezvous")
    # Public in torch's documentation, but not marked as exported.
    store = dist.FileStore(rendezvous, seat.world_size)  # type: ignore[attr-defined]
    dist.init_process_group(
        _BACKENDS[seat.device_type],
        store=store,
        rank=seat.rank,
        world_size=seat.world_size,
        # Longer than any run: a hang is noticed, and named, by the parent.
        timeout=datetime.timedelta(days=1),
        device_id=device,
    )


def _follow_parent(directory: str) -> None:
    """End with the parent, also from inside a task: a killed parent leaves no busy ranks behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def _perform(task: _Task) -> _Answer:
    try:
        sys.path[:] = task.sys_path
        os.chdir(task.cwd)
        random.seed(0)
        torch.manual_seed(0)
        fn, args, kwargs = _load(task.call)
        return _Answer(_dump(fn(*args, **kwargs)), None)
    # Checkpoint and test outcome exceptions derive from BaseException; all of them are reported.
    except BaseException:
        return _Answer(None, traceback.format_exc())


def _leave(status: int) -> NoReturn:
    """Exit without finalizers: gloo's threads sometimes abort while the interpreter comes down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _dump(value: object) -> bytes:
    # torch.save and not the connection's own pickler, which would pass tensors as shared memory
    # and keep one file descriptor open for each.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(data: bytes) -> Any:
    # Bytes from a process of this pool, never from a file: no need to restrict the types.
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
