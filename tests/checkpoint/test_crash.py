"""Processes killed with SIGKILL in a save: the latest checkpoint is complete and right.

A child writes known values into weights and state, saves, and starts over with the next step; it
is killed at a file operation. The parent, one process without a process group, then loads what
``latest()`` finds. ``test_folder.py`` ends a save at each of its operations, without a process.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_offload import checkpoint
from fsdp_offload.checkpoint import writer
from tests.checkpoint.known import check_is, job, set_to

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.long]

OPERATIONS = ("open", "pwrite", "fsync", "rename", "unlink", "rmdir", "mkdir")
PRELOAD = ["torch.distributed.fsdp", "fsdp_offload.checkpoint", "pytest"]
START_S = 60.0


@dataclass(frozen=True)
class Life:
    """What one job does, and when it ends.

    Args:
        asynchronous: with ``async_save``.
        same_path: each save replaces the one before.
        operation: it is killed at this one. A save of one rank has about 25, with the removal of an
            old one 35.
        rank: that is killed.
    """

    asynchronous: bool
    same_path: bool
    operation: int
    rank: int = 0


def kill_at(operation: int) -> None:
    """End this process at its next but so many-th file operation."""
    left = itertools.count(operation, -1)

    def counted(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if next(left) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    for name in OPERATIONS:
        setattr(os, name, functools.partial(counted, getattr(os, name)))


def child(rank: int, world: int, root: Path, life: Life, told: Connection) -> None:
    """Load the latest checkpoint, if any, and save until killed."""
    torch.set_num_threads(1)
    writer.BLOCK_BYTES = 16 << 10  # so that there are many blocks
    if world > 1:
        store = dist.FileStore(str(root / f"store-{life.operation}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    made, start = job(), 0
    if found := checkpoint.latest(root / "run"):
        start = checkpoint.load(found, *made)["step"]
    acknowledge = functools.partial(os.open, flags=os.O_CREAT | os.O_WRONLY)
    if world > 1:
        dist.barrier()
    told.send("ready")
    if rank == life.rank:
        kill_at(life.operation)
    for step in itertools.count(start + 1):
        set_to(made, step)
        options: dict[str, Any] = {"extra": {"step": step}, "keep_last": 3}
        path = root / "run" / f"step-{step}"
        if life.same_path:
            path, options = root / "run" / "same", {**options, "overwrite": True}
        if life.asynchronous:
            future = checkpoint.async_save(path, *made, **options)
            set_to(made, -step)  # training goes on
            future.result()
        else:
            checkpoint.save(path, *made, **options)
        if rank == 0:
            acknowledge(root / "saved" / str(step))


def guarded(rank: int, *args: Any) -> None:
    """A rank whose peer was killed cannot go on: it says why, and goes without clean-up."""
    try:
        child(rank, *args)
    except BaseException as error:
        sys.stderr.write(f"rank {rank}: {error!r}\n")
        os._exit(3)


def live(root: Path, world: int, life: Life) -> None:
    """Run a job until one rank is killed, then kill the others."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    for rank in range(world):
        ours, theirs = context.Pipe()
        pipes.append(ours)
        args = (rank, world, root, life, theirs)
        processes.append(context.Process(target=guarded, args=args, daemon=True))
        processes[-1].start()
        theirs.close()
    try:
        assert all(pipe.poll(START_S) for pipe in pipes), "a child did not start"
        processes[life.rank].join(START_S)
        assert processes[life.rank].exitcode == -signal.SIGKILL, "it ended by itself"
    finally:
        for process in processes:
            process.kill()
            process.join()


def check_latest(root: Path, before: int) -> int:
    """What was acknowledged is there, or something newer; returns its step.

    ``before``: that of the checkpoint that the last life began with, acknowledged or not.
    """
    saved = max((int(path.name) for path in (root / "saved").iterdir()), default=0)
    found = checkpoint.latest(root / "run")
    if found is None:
        assert saved == before == 0
        return 0
    made = job()
    step = checkpoint.load(found, *made)["step"]
    assert isinstance(step, int)
    assert max(saved, before) <= step <= max(saved, before) + 1
    check_is(made, step)
    return step


@pytest.mark.parametrize(
    ("world", "lives"),
    [
        (1, [Life(bool(n % 2), bool(n // 2 % 2), 3 + 7 * n) for n in range(12)]),
        (2, [Life(bool(n % 2), bool(n // 2 % 2), 5 + 6 * n, rank=n % 2) for n in range(9)]),
    ],
    ids=["one", "two"],
)
def test_a_killed_save_leaves_a_complete_checkpoint(
    tmp_path: Path, world: int, lives: list[Life]
) -> None:
    (tmp_path / "saved").mkdir()
    step = 0
    for life in lives:
        live(tmp_path, world, life)
        step = check_latest(tmp_path, step)
    # No leftover is in the way, and none stays at a path that is saved again.
    run, made = tmp_path / "run", job()
    for name in ("same", f"step-{step + 1}"):
        set_to(made, step + 1)
        checkpoint.save(run / name, *made, extra={"step": step + 1}, overwrite=True)
        assert checkpoint.latest(run) == run / name
        left = {path.name for path in run.iterdir()}
        assert not left & {f".{name}.writing", f".{name}.fsdp_offload.removed"}
