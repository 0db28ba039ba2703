"""The kill matrix: real processes, killed, and two on one path.

``python -m pytest tests/checkpoint/test_kills.py -m long -s`` does all of it and prints counts: 100
kills of one process and 50 of one of two ranks with SIGKILL at a seeded file operation of ``save``,
``async_save``, overwrite and ``keep_last``; two processes that save to one path for 60 s.
``test_folder.py`` ends a save at each of its operations, without a process.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_offload import CheckpointError, checkpoint
from fsdp_offload.checkpoint import folder, writer
from tests.checkpoint.known import Job, check_is, job, set_to
from tests.helpers.ranks import forks

pytestmark = pytest.mark.long

OPERATIONS = ("open", "pwrite", "fsync", "rename", "unlink", "rmdir", "mkdir", "utime", "scandir")
START_S = 60.0
SILENT_S = 2.0


@dataclass(frozen=True)
class Life:
    """What one job does, and when it ends.

    Args:
        asynchronous: with ``async_save``.
        same_path: each save replaces the one before; else ``keep_last=2``.
        operation: it is killed at this one. A save has about 80.
        rank: that is killed.
        swaps: whether folders can be exchanged, which not all file systems can do.
        host: on which it runs, as it believes.
        away: its weights are in host memory, too, if it is sharded.
    """

    asynchronous: bool
    same_path: bool
    operation: int
    rank: int
    swaps: bool
    host: str
    away: bool = False

    @classmethod
    def drawn(cls, chance: random.Random, world: int) -> Life:
        """At a moment of the first saves."""
        flags = [chance.random() < 0.5 for _ in range(3)]
        host = chance.choice(["here", "here", "there"])
        moment = chance.randrange(2, 400), chance.randrange(world)
        return cls(*flags[:2], *moment, flags[2], host, away=chance.random() < 0.5)


def kill_at(operation: int) -> None:
    """End this process at its next but so many-th file operation."""
    left = itertools.count(operation, -1)

    def counted(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if next(left) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    for name in OPERATIONS:
        setattr(os, name, functools.partial(counted, getattr(os, name)))
    folder._exchange = functools.partial(counted, folder._exchange)


def save(root: Path, made: Job, step: int, life: Life) -> None:
    """All state is that of ``step``."""
    set_to(made, step)
    options: dict[str, Any] = {"extra": {"step": step}, "keep_last": 2}
    path = root / "run" / f"step-{step}"
    if life.same_path:
        path, options = root / "run" / "same", {"extra": {"step": step}, "overwrite": True}
    if life.asynchronous:
        future = checkpoint.async_save(path, *made, **options)
        set_to(made, -step)  # training goes on
        future.result()
    else:
        checkpoint.save(path, *made, **options)


def child(rank: int, world: int, root: Path, turn: int, life: Life, told: Connection) -> None:
    """Load the latest checkpoint, if any, and save until killed."""
    torch.set_num_threads(1)
    writer.BLOCK_BYTES = 16 << 10  # so that there are many blocks
    folder.SILENT_S = SILENT_S
    folder._host = lambda: life.host
    if not life.swaps:
        folder._exchange = lambda *_: False
    if world > 1:
        store = dist.FileStore(str(root / f"store-{turn}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    made, start = job(away=life.away and world > 1), 0
    if found := checkpoint.latest(root / "run"):
        start = checkpoint.load(found, *made)["step"]
    if world > 1:
        dist.barrier()
    acknowledge = functools.partial(os.open, flags=os.O_CREAT | os.O_WRONLY)
    told.send("ready")
    if rank == life.rank:
        kill_at(life.operation)
    for step in itertools.count(start + 1):
        save(root, made, step, life)
        if rank == 0:
            acknowledge(root / "saved" / str(step))


def guarded(work: Callable[..., None], rank: int, *args: Any) -> None:
    """A rank whose peer was killed cannot go on: it says why, and goes without clean-up."""
    try:
        work(rank, *args)
    except BaseException as error:
        sys.stderr.write(f"rank {rank}: {error!r}\n")
        os._exit(3)


@contextlib.contextmanager
def running(work: Callable[..., None], world: int, *args: Any) -> Iterator[list[BaseProcess]]:
    """Processes that have told that they are ready; killed at the end."""
    context = forks()
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    for rank in range(world):
        ours, theirs = context.Pipe()
        pipes.append(ours)
        all_args = (work, rank, world, *args, theirs)
        processes.append(context.Process(target=guarded, args=all_args, daemon=True))
        processes[-1].start()
        theirs.close()
    try:
        assert all(pipe.poll(START_S) for pipe in pipes), "a child did not start"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def step_of(found: Path | None, made: Job) -> int:
    """That of a checkpoint, all of which is compared; 0: there is none."""
    if found is None:
        return 0
    step = checkpoint.load(found, *made)["step"]
    check_is(made, step)
    assert isinstance(step, int)
    return step


@pytest.mark.parametrize(("world", "kills"), [(1, 100), (2, 50)], ids=["one", "two"])
def test_a_killed_save_loses_nothing_and_leaves_nothing(
    tmp_path: Path, world: int, kills: int
) -> None:
    """What was acknowledged is there, or something newer; the next good save clears the rest."""
    chance, run, step, made = random.Random(world), tmp_path / "run", 0, job()
    (tmp_path / "saved").mkdir()
    counts: collections.Counter[str] = collections.Counter()
    for turn in range(kills):
        life = Life.drawn(chance, world)
        with running(child, world, tmp_path, turn, life) as processes:
            processes[life.rank].join(START_S)
            assert processes[life.rank].exitcode == -signal.SIGKILL, "it ended by itself"
        saved = max((int(path.name) for path in (tmp_path / "saved").iterdir()), default=0)
        found = step_of(checkpoint.latest(run), made)
        assert max(saved, step) <= found <= max(saved, step) + 1, life
        left = {name for name in os.listdir(run) if name.startswith(".")} if run.exists() else set()
        counts["async_save" if life.asynchronous else "save"] += 1
        counts["overwrite" if life.same_path else "keep_last"] += 1
        counts["left something"] += bool(left)
        counts["between saves and loads"] += not left and found == saved
        step = found + 1
        if life.host == "there" and left:
            time.sleep(SILENT_S + 0.5)
        with mock.patch.object(folder, "_host", return_value="here"):
            with mock.patch.object(folder, "SILENT_S", SILENT_S):
                save(tmp_path, made, step, Life(False, life.same_path, 0, 0, True, "here"))
        assert step_of(checkpoint.latest(run), made) == step
        assert not [name for name in os.listdir(run) if name.startswith(".")], (life, left)
    print(f"\nkills, {world} processes: {kills}, {dict(counts)}")


def rival(rank: int, world: int, root: Path, told: Connection) -> None:
    """One of several jobs that save to one path."""
    torch.set_num_threads(1)
    folder.SILENT_S = SILENT_S
    if rank % 2:
        folder._host = lambda: "there"
    made, saved = job(31), 0
    told.send("ready")
    while not (root / "stop").exists():
        set_to(made, saved % 7 + 1)
        saved += 1
        checkpoint.save(root / "run" / "same", *made, overwrite=True, extra={"rank": rank})
        (root / f"count-{rank}").write_text(str(saved))


@pytest.mark.parametrize("seconds", [60])
def test_two_jobs_on_one_path(tmp_path: Path, seconds: int) -> None:
    """Each save succeeds, and a reader always finds a whole one."""
    (tmp_path / "run").mkdir()
    made, looks, loads = job(31), 0, 0
    checkpoint.save(tmp_path / "run" / "same", *made)
    with running(rival, 2, tmp_path) as processes:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = checkpoint.latest(tmp_path / "run")
            assert found == tmp_path / "run" / "same"
            looks += 1
            with contextlib.suppress(CheckpointError):  # replaced while it is read
                checkpoint.load(found, *made)
                loads += 1
        assert all(process.is_alive() for process in processes), "a save was refused"
        (tmp_path / "stop").touch()
        for process in processes:
            process.join(START_S)
            assert process.exitcode == 0
    assert os.listdir(tmp_path / "run") == ["same"]
    checkpoint.load(tmp_path / "run" / "same", *made)
    saves = [int((tmp_path / f"count-{rank}").read_text()) for rank in range(2)]
    print(f"\ntwo jobs, {seconds} s: {saves} saves, latest() {looks} times, {loads} whole loads")
    assert min(saves) > 20
