"""Processes killed with SIGKILL anywhere in a save: the latest checkpoint is complete and right.

A child writes known values into weights and state, saves, and starts over with the next step; it
is killed after a random time, or at a random file operation, which falls into every gap between
two of them. The parent, one process without a process group, then loads what ``latest()`` finds.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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

pytestmark = pytest.mark.usefixtures("one_thread")

OPERATIONS = ("open", "pwrite", "fsync", "rename", "unlink", "rmdir", "mkdir")
PRELOAD = ["torch.distributed.fsdp", "fsdp_offload.checkpoint", "pytest"]
START_S = 60.0
CLOCK_S = 0.15


# --------------------------------------------------------------------------- the children


@dataclass(frozen=True)
class Life:
    """What one child does, and when it ends."""

    asynchronous: bool
    same_path: bool
    operations: int | None  # killed at this one; None: by the clock
    rank: int  # that is killed first


@dataclass
class Clock:
    """Counts file operations, and kills its process at one of them."""

    left: int
    real: dict[str, Callable[..., Any]] = field(
        default_factory=lambda: {name: getattr(os, name) for name in OPERATIONS}
    )

    def start(self) -> None:
        for name, call in self.real.items():
            setattr(os, name, functools.partial(self._counted, call))

    def _counted(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)


def child(rank: int, world: int, root: Path, store: Path, life: Life, told: Connection) -> None:
    """Load the latest checkpoint, if any, and save until killed."""
    torch.set_num_threads(1)
    writer.BLOCK_BYTES = 16 << 10  # so that there are many blocks
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank,
                                world_size=world)  # fmt: skip
    made, start = job(), 0
    if found := checkpoint.latest(root / "run"):
        start = checkpoint.load(found, *made)["step"]
    acknowledge = functools.partial(os.open, flags=os.O_CREAT | os.O_WRONLY)
    if world > 1:
        dist.barrier()
    told.send("ready")
    if life.operations is not None and rank == life.rank:
        Clock(life.operations).start()
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


# --------------------------------------------------------------------------- the parent


class Story:
    """Lives that follow each other in one folder."""

    def __init__(self, root: Path, world: int, seed: int) -> None:
        self.root, self.world = root, world
        self.random = random.Random(seed)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        self.made = job()
        (root / "saved").mkdir(parents=True)

    def life(self, index: int) -> Life:
        timed = self.random.random() < 0.3
        # A save of one rank is about 25 operations, with the removal of an old one 35.
        operations = None if timed else self.random.randrange(1, 90)
        kinds = index + self.random.randrange(4)
        return Life(bool(kinds & 1), bool(kinds & 2), operations, self.random.randrange(self.world))

    def live(self, index: int) -> None:
        """Run children until one is killed, then kill the others."""
        life = self.life(index)
        print(life)  # shown where the test fails
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        store = self.root / f"store-{index}"
        for rank in range(self.world):
            ours, theirs = self.context.Pipe()
            args = (rank, self.world, self.root, store, life, theirs)
            process = self.context.Process(target=guarded, args=args, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            for pipe in pipes:
                assert pipe.poll(START_S), "a child did not start"
                assert pipe.recv() == "ready"
            if life.operations is None:
                time.sleep(self.random.random() * CLOCK_S)
                processes[life.rank].kill()
            processes[life.rank].join(START_S)
            assert processes[life.rank].exitcode == -signal.SIGKILL, "it ended by itself"
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()

    def check(self, before: int) -> int:
        """What was acknowledged is there, or something newer; returns its step.

        ``before``: that of the checkpoint that the last life began with, acknowledged or not.
        """
        saved = max((int(path.name) for path in (self.root / "saved").iterdir()), default=0)
        found = checkpoint.latest(self.root / "run")
        if found is None:
            assert saved == before == 0
            return 0
        set_to(self.made, 1 << 20)
        step = checkpoint.load(found, *self.made)["step"]
        assert isinstance(step, int)
        assert max(saved, before) <= step <= max(saved, before) + 1
        check_is(self.made, step)
        return step

    def save_over_everything(self, step: int) -> None:
        """No leftover is in the way, and none stays at a path that is saved again."""
        run = self.root / "run"
        for name in ("same", f"step-{step + 1}"):
            set_to(self.made, step + 1)
            checkpoint.save(run / name, *self.made, extra={"step": step + 1}, overwrite=True)
            assert checkpoint.latest(run) == run / name
            left = {path.name for path in run.iterdir()}
            assert not left & {f".{name}.writing", f".{name}.removed"}
            set_to(self.made, 0)
            checkpoint.load(run / name, *self.made)
            check_is(self.made, step + 1)


def tell(root: Path, world: int, seed: int, kills: int) -> None:
    story = Story(root, world, seed)
    step = 0
    for index in range(kills):
        story.live(index)
        step = story.check(step)
    story.save_over_everything(step)


@pytest.mark.parametrize(("world", "seed", "kills"), [(1, 1, 2), (2, 2, 1)])
def test_a_killed_save_leaves_a_complete_checkpoint(
    tmp_path: Path, world: int, seed: int, kills: int
) -> None:
    tell(tmp_path, world, seed, kills)
