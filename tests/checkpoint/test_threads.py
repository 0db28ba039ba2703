"""Threads that cannot be had, and processes that inherit none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fsdp_offload import checkpoint
from fsdp_offload.checkpoint import files

SCRIPT = """
import resource, sys
import torch
from torch import nn
from fsdp_offload import HybridDeviceOptimizer, OffloadError, TransferConfig, checkpoint

model = nn.Linear(300, 300)
inner = torch.optim.AdamW(model.parameters())
optimizer = HybridDeviceOptimizer(
    inner, model=model, update_on=["streamed"] * 2, transfer=TransferConfig(host_threads=1)
)
with open("/proc/self/statm") as file:
    pages = int(file.read().split()[0])
free = int(sys.argv[2]) << 10
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + free,) * 2)
try:
    checkpoint.save(sys.argv[1], model, optimizer, threads=4)
    print("saved")
except OffloadError:
    print("typed")
"""


@pytest.mark.parametrize(
    "free_kib", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (64, 8 << 10))]
)
def test_a_save_without_memory_for_threads_ends(tmp_path: Path, free_kib: int) -> None:
    """Saved by the thread that there is, or a typed error."""
    path, root = tmp_path / "one", Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), str(free_kib)],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() in (["saved"], ["typed"]), done.stderr
    assert checkpoint.latest(tmp_path) == (path if done.stdout.strip() == "saved" else None)


@pytest.mark.parametrize("how", [{"side_effect": RuntimeError("no thread")}, {"return_value": 0}])
def test_the_caller_does_what_no_thread_does(how: dict[str, Any]) -> None:
    """None can be had, or one dies for want of memory before its first line."""
    with mock.patch.object(files._thread, "start_new_thread", **how):
        assert files.run_all([lambda i=i: i for i in range(50)], threads=8) == list(range(50))  # type: ignore[misc]


ENDED = """
import weakref, torch.distributed as dist
from fsdp_offload.checkpoint.api import coordination_group

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
world = dist.group.WORLD  # as a model's mesh keeps it
first = weakref.ref(coordination_group())
assert coordination_group() is first()
dist.destroy_process_group()
assert first() is None, "its threads live until the interpreter ends"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert coordination_group() is not None
dist.destroy_process_group()
"""


def test_the_group_of_saves_ends_with_those_of_torch() -> None:
    done = subprocess.run([sys.executable, "-c", ENDED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
