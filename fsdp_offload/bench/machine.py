"""Shared parts of benchmarks: process group, machine, link, figures of all ranks."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from ..core.config import TransferConfig
from ..core.devices import backend_for
from ..link import Block, HostPool, Link
from .model import Job

Row = dict[str, Any]
COPY_BYTES: Final = 256 << 20
COPIES: Final = 8
VARIABLES: Final = ("CUDA_", "NCCL_", "PYTORCH_")  # environment variables that change times


@contextlib.contextmanager
def process_group(device: str, *, alone: bool = False) -> Iterator[torch.device]:
    """Join torchrun's group, or make one of this process alone; yields this rank's device."""
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda":
        torch.cuda.set_device(index)
    timeout = timedelta(minutes=10)  # for a collective that not all ranks reach
    alone = alone or "RANK" not in os.environ
    ranks: Row = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}  # type: ignore[attr-defined]
    dist.init_process_group(backend, timeout=timeout, **ranks)
    try:
        yield torch.device(device, index) if device == "cuda" else torch.device("cpu")
    finally:
        dist.destroy_process_group()


def slowest(values: Sequence[float]) -> list[float]:
    """Return the element-wise largest values of all ranks, which pass equally many."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def merged(row: Row) -> Row:
    """Merge all ranks' rows: figures of the slowest or largest; the rest is this rank's."""
    names = [name for name, value in row.items() if type(value) in (int, float)]
    found = slowest([row[name] for name in names])
    return row | {name: type(row[name])(n) for name, n in zip(names, found, strict=True)}


def environment(device: torch.device) -> Row:
    """Collect hardware, versions, commit (if git knows it), command, and variables that change
    times."""
    chosen = sorted(name for name in os.environ if name.startswith(VARIABLES))
    variables = {name: os.environ[name] for name in chosen if "/" not in os.environ[name]}
    row: Row = {"cores": len(os.sched_getaffinity(0)), "variables": variables}
    if device.type == "cuda":
        row |= {"gpu": torch.cuda.get_device_properties(0).name, "cuda": torch.version.cuda}
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        row["commit"] = subprocess.check_output(git, text=True, stderr=subprocess.DEVNULL).strip()
    words = (re.sub(r"[^=\s]*/", "", word) for word in sys.orig_argv)  # folders differ
    row |= {"torch": torch.__version__, "python": platform.python_version()}
    return row | {"command": " ".join(words)}


def synchronize(device: torch.device) -> None:
    """Wait for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_everything(device: torch.device) -> None:
    """Collect garbage, and free cached device and page-locked memory."""
    gc.collect()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        if hasattr(torch.accelerator, "empty_host_cache"):  # torch 2.13
            torch.accelerator.empty_host_cache()


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Measure wall seconds of ``run``; all ranks begin together, with idle devices."""
    synchronize(device)
    dist.barrier()
    began = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began


def measure_link(device: torch.device, iterations: int) -> Row:
    """Measure GB/s of pinned copies: to a CUDA device, from it, and both at once (summed).

    An iteration is 2 GiB each way, all ranks at the same time; the median of the slowest counts.
    """
    backend = backend_for(device)
    pool = HostPool("bench", backend, TransferConfig())
    link = Link(backend, "bench", turn_bytes=None)
    hosts = [pool.take(COPY_BYTES).tensor(0, COPY_BYTES, torch.uint8) for _ in range(2)]
    up, down = (Block([host], [torch.empty_like(host, device=device)]) for host in hosts)

    def copy(directions: str) -> None:
        for _ in range(COPIES):
            if "h2d" in directions:
                up.forget()
                link.fetch(up)
            if "d2h" in directions:
                down.changed(None)
                link.store(down)

    row: Row = {}
    for directions in ("h2d", "d2h", "h2d+d2h"):
        copy(directions)
        times = [seconds_of(partial(copy, directions), device) for _ in range(iterations)]
        n_bytes = COPIES * COPY_BYTES * directions.count("2")
        row[f"{directions}_gbps"] = n_bytes / slowest([statistics.median(times)])[0] / 1e9
    pool.close()
    return row


def publish(device: torch.device, job: Job, rows: list[Row], link: Row, path: Path | None) -> Row:
    """Build the report of a run, or of its rows so far; rank 0 writes it to ``path``."""
    report: Row = {
        "environment": environment(device),
        "job": asdict(job) | {"ranks": dist.get_world_size()},
        "params": job.params,
        "link": link,
        "rows": rows,
    }
    if dist.get_rank() == 0 and path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")
    return report
