"""How a process ends after, beside and without a save; ranks that are absent."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

from fsdp_offload import CheckpointError, checkpoint
from fsdp_offload.checkpoint import api, files
from tests.checkpoint.jobs import Ranks
from tests.helpers.scripts import Launch

GROUPS = """
import sys, weakref, torch.distributed as dist
from fsdp_offload.checkpoint.api import coordination_group
from fsdp_offload.core.interrupts import Note

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.group.WORLD  # as a model's mesh keeps it
first = weakref.ref(coordination_group("save", Note()))
assert coordination_group("save", Note()) is first()
dist.destroy_process_group()
assert first() is None, "its threads live until the interpreter ends"
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
group = coordination_group("save", Note())
assert group is not None
dist.barrier(group)  # a rank that left now would close a connection that the other still makes
del group
dist.destroy_process_group()
"""

ALONE = """
import sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from fsdp_offload import checkpoint

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(40)))
fully_shard(model, mesh=mesh)
done = checkpoint.async_save(sys.argv[1], model)
dist.destroy_process_group()
done.result()
"""

READER = """
import sys, torch
from fsdp_offload import checkpoint
from fsdp_offload.checkpoint import files
from fsdp_offload.link.link import scratch

model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(40)))
jobs = [lambda: scratch(64 << 20).zero_()] * 40  # freed while the interpreter ends, it aborts
checkpoint.load(sys.argv[1], model, threads=8)
files.run_all(jobs, threads=8)
"""

LOST = """
import sys, torch, torch.distributed as dist
from fsdp_offload import checkpoint

dist.init_process_group("gloo")
model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(40)))
checkpoint.async_save(sys.argv[1], model)
if sys.argv[2] == "destroyed":
    dist.destroy_process_group()
"""


def test_the_group_of_saves_ends_with_those_of_torch(tmp_path: Path) -> None:
    assert Launch(GROUPS, tmp_path / "second", ranks=2).ended() == [(0, "")] * 2


def test_one_rank_alone_needs_no_group(tmp_path: Path) -> None:
    """Its save is complete also where the job's process group ends before it."""
    assert Launch(ALONE, tmp_path / "run" / "one").ended() == [(0, "")]
    assert checkpoint.latest(tmp_path / "run") == tmp_path / "run" / "one"


def test_no_thread_is_left_that_could_abort_the_process(tmp_path: Path) -> None:
    before = threading.active_count()
    files.run_all([lambda: time.sleep(0.01)] * 9, threads=4)
    assert threading.active_count() == before
    checkpoint.save(tmp_path / "one", nn.Sequential(*(nn.Linear(300, 300) for _ in range(40))))
    assert Launch(READER, tmp_path / "one").ended() == [(0, "")]


@pytest.mark.parametrize("group", ["kept", pytest.param("destroyed", marks=pytest.mark.long)])
def test_a_save_whose_result_nobody_took(tmp_path: Path, group: str) -> None:
    """It is finished when the interpreter ends; without its group an error names what is lost."""
    path = tmp_path / "run" / "one"
    told = Launch(LOST, path, group, ranks=2).ended()
    assert [code for code, _ in told] == [0, 0], told
    if group == "kept":
        assert checkpoint.latest(path.parent) == path
    else:
        assert all(f"{path}: its process group was destroyed" in said for _, said in told), told
        assert not list(path.parent.glob("*"))


def come_late(path: Path) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp_offload").addHandler(handler)
    model = nn.Linear(3, 3)
    with mock.patch.object(api, "_ABSENT_S", 0.2):
        for turn, late in enumerate((1, 0)):
            if dist.get_rank() == late:
                time.sleep(1)
            checkpoint.save(path / f"{turn}", model)
    logging.getLogger("fsdp_offload").removeHandler(handler)
    return told


def test_the_log_names_ranks_that_do_not_come(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(come_late, tmp_path)
    (waits,) = (line for line in first if "has waited" in line)
    assert "checkpoint.save" in waits
    assert "1 of 2 ranks that have not called it: 1." in waits
    assert any("called it: 0." in line for line in second)


def leave(path: Path, where: str) -> Any:
    """Rank 0 leaves a save half-way; the next one is a good one, on both ranks."""
    model, rank = nn.Linear(3, 3), dist.get_rank()
    checkpoint.save(path / "first", model)

    def gone(*_: Any, **__: Any) -> None:
        if where == "meeting":
            os.kill(os.getpid(), signal.SIGINT)
        else:
            raise KeyboardInterrupt

    owner, name = (dist, "scatter_object_list") if where == "collective" else (time, "sleep")
    patched = mock.patch.object(owner, name, gone if rank == 0 else getattr(owner, name))
    kind: Any = KeyboardInterrupt if rank == 0 else CheckpointError
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if where != "collective":
        if rank == 0:
            with patched, pytest.raises(KeyboardInterrupt):
                checkpoint.save(path / "second", model)
        dist.barrier()
    else:
        with patched, pytest.raises(kind):
            checkpoint.save(path / "second", model)
        gc.collect()  # the error's frames hold the group, and so its connections
    checkpoint.save(path / "third", model)
    checkpoint.load(path / "third", model)
    dist.barrier()
    return sorted(each.name for each in path.iterdir())


@pytest.mark.parametrize("where", ["meeting", "handler", "collective"])
def test_a_rank_that_leaves_a_save_is_in_the_next(ranks: Ranks, tmp_path: Path, where: str) -> None:
    for left in ranks(2).run(leave, tmp_path, where):
        assert left == ["first", "third"]


def interrupt_at(line: int, call: Callable[[], Any]) -> str:
    """``call``, with Ctrl-C so many lines of the package after all ranks have met, and what came
    out of it. Before that, the others wait until this one calls again."""
    left, met = line, False

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left, met
        if event == "return" and frame.f_code.co_name == "coordination_group":
            met = True
        if "fsdp_offload/" not in frame.f_code.co_filename:
            return None
        left -= met and event == "line"
        if left == 0:
            left = -1
            os.kill(os.getpid(), signal.SIGINT)
        return trace

    sys.settrace(trace if line else None)
    try:
        call()
    except (KeyboardInterrupt, CheckpointError) as error:
        return type(error).__name__
    finally:
        sys.settrace(None)
    return "lost" if left < 0 else "done"


def interrupt(path: Path, who: str) -> Counter[str]:
    """Each time the next save and the next load are good ones."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model, seen, chance = nn.Linear(3, 3), Counter[str](), random.Random(0)
    save = partial(checkpoint.save, path / "one", model, overwrite=True)
    calls: dict[str, tuple[int, Callable[[], Any]]] = {
        "save": (600, save),
        "async_save": (
            200,
            lambda: checkpoint.async_save(path / "one", model, overwrite=True).result(),
        ),
        "load": (700, partial(checkpoint.load, path / "one", model)),
    }
    save()
    for name, (lines, call) in calls.items():
        for _ in range(12):
            line, one = chance.randint(1, lines), chance.randrange(2)
            came = interrupt_at(line if who == "all" or dist.get_rank() == one else 0, call)
            seen[came] += 1
            assert came != "lost", (name, line)
            save()
            checkpoint.load(path / "one", model)
    assert [each.name for each in path.iterdir()] == ["one"]
    return seen


@pytest.mark.parametrize("who", [pytest.param("all", marks=pytest.mark.long), "one"])
def test_ctrl_c_on_ranks_leaves_no_rank_waiting(ranks: Ranks, tmp_path: Path, who: str) -> None:
    for seen in ranks(2).run(interrupt, tmp_path, who):
        print(seen)
        assert seen["KeyboardInterrupt"] > 8
        assert who == "all" or seen["CheckpointError"] > 1
