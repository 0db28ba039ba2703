"""What all benchmarks share: the process group, the machine, its link, and medians."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from ..config import TransferConfig
from ..memory import HostArena

Row = dict[str, Any]
COPY_BYTES = 256 << 20
COPIES = 8


@contextlib.contextmanager
def process_group(
    device: str, *, with_host: bool = False, timeout_s: float = 600.0
) -> Iterator[torch.device]:
    """The group of torchrun, or one of this process alone; gives this rank's device.

    Args:
        device: ``"cuda"`` (NCCL) or ``"cpu"`` (gloo).
        with_host: also gloo for CPU tensors and Python objects beside NCCL.
        timeout_s: seconds after which a collective that not all ranks reach fails.
    """
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl" if with_host else "nccl"
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda":
        torch.cuda.set_device(index)
    timeout = timedelta(seconds=timeout_s)
    with tempfile.TemporaryDirectory() as folder:
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = FileStore(f"{folder}/store", 1)
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        try:
            yield torch.device(device, index) if device == "cuda" else torch.device("cpu")
        finally:
            dist.destroy_process_group()


def local_ranks() -> int:
    """Ranks of this job on this host, as torchrun says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cores_per_rank() -> int:
    """Cores of this process over the ranks that share them."""
    return max(1, len(os.sched_getaffinity(0)) // local_ranks())


VARIABLES: Final = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
"""Of the environment, what changes times; and all of NCCL's but for paths."""


def environment(device: str = "cuda") -> Row:
    """Hardware, versions, commit (where git knows it), command, and variables that change times."""
    row: Row = {"cores": len(os.sched_getaffinity(0))}
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if (name in VARIABLES or name.startswith("NCCL_")) and "/" not in value
    }
    if variables:
        row["variables"] = variables
    if device == "cuda":
        row["gpu"] = torch.cuda.get_device_properties(0).name
        row["cuda"] = torch.version.cuda
    if commit := _commit():
        row["commit"] = commit
    return row | {
        "torch": torch.__version__, "python": platform.python_version(), "command": _command()
    }  # fmt: skip


def _command() -> str:
    """How this process was started; of files only the names, because folders differ."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = "" if spec is None else spec.name.removesuffix(".__main__")
    words = (re.sub(r"[^=\s]*/", "", word) for word in sys.argv[1:])
    return " ".join([f"python -m {module}", *words])


def _commit() -> str:
    folder = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


def resident_set_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def synchronize(device: torch.device) -> None:
    """Wait for everything that the device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_everything(device: torch.device) -> None:
    """Collect garbage and give cached device and page-locked memory back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        if hasattr(torch._C, "_host_emptyCache"):
            torch._C._host_emptyCache()


def median_ms(fn: Callable[[], object], iterations: int) -> float:
    """Median wall milliseconds of ``fn`` with the device idle before and after."""
    times = []
    for _ in range(iterations):
        torch.cuda.synchronize()
        began = time.perf_counter()
        fn()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def measure_link(
    device: torch.device, iterations: int, barrier: Callable[[], object] = lambda: None
) -> Row:
    """GB/s of pinned copies: to the device, from it, and both at once (sum of both ways).

    Args:
        device: an accelerator.
        iterations: of 2 GiB each way; the median counts.
        barrier: called before each direction, so that all ranks copy at the same time.
    """
    transfer = TransferConfig()
    arenas = [
        HostArena(COPY_BYTES, device=device, can_pin=True, transfer=transfer) for _ in range(2)
    ]
    up, down = (arena.tensor(0, COPY_BYTES, torch.uint8) for arena in arenas)
    up_device, down_device = (torch.empty_like(up, device=device) for _ in range(2))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def run(directions: str) -> None:
        for _ in range(COPIES):
            if "h2d" in directions:
                with torch.cuda.stream(streams[0]):
                    up_device.copy_(up, non_blocking=True)
            if "d2h" in directions:
                with torch.cuda.stream(streams[1]):
                    down.copy_(down_device, non_blocking=True)

    row: Row = {}
    for directions in ("h2d", "d2h", "h2d+d2h"):
        barrier()
        run(directions)
        ms = median_ms(lambda d=directions: run(d), iterations)  # type: ignore[misc]
        n_bytes = COPIES * COPY_BYTES * directions.count("2")
        row[f"{directions}_gbps"] = n_bytes / ms / 1e6
    barrier()
    for arena in arenas:
        arena.close()
    return row


def measure_collectives(
    device: torch.device, iterations: int, barrier: Callable[[], object] = lambda: None
) -> Row:
    """GB/s that a rank receives in all-gathers of 256 MiB: alone, and while pinned copies run both
    ways. Where ranks talk over the link to the host, the second is much less; {} for one rank.

    Args:
        device: an accelerator.
        iterations: of 2 GiB; the median counts.
        barrier: called before each measurement.
    """
    ranks = dist.get_world_size()
    if ranks == 1:
        return {}
    part = torch.empty(COPY_BYTES // ranks, dtype=torch.uint8, device=device)
    whole = torch.empty(part.numel() * ranks, dtype=torch.uint8, device=device)
    arena = HostArena(2 * COPY_BYTES, device=device, can_pin=True, transfer=TransferConfig())
    host = arena.tensor(0, 2 * COPY_BYTES, torch.uint8).chunk(2)
    beside = torch.empty_like(host[0], device=device), torch.empty_like(host[1], device=device)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def gather() -> None:
        for _ in range(COPIES):
            dist.all_gather_into_tensor(whole, part)

    def gather_beside_copies() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        ends = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(4 * COPIES):  # outlast the collectives
            with torch.cuda.stream(streams[0]):
                beside[0].copy_(host[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                host[1].copy_(beside[1], non_blocking=True)
        ends[0].record()
        gather()
        ends[1].record()
        return ends

    n_bytes = COPIES * part.numel() * (ranks - 1)
    barrier()
    gather()
    alone_ms = median_ms(gather, iterations)
    beside_ms = []
    for _ in range(iterations):
        barrier()
        ends = gather_beside_copies()
        torch.cuda.synchronize()
        beside_ms.append(ends[0].elapsed_time(ends[1]))
    arena.close()
    return {
        "all_gather_gbps": n_bytes / alone_ms / 1e6,
        "all_gather_beside_copies_gbps": n_bytes / statistics.median(beside_ms) / 1e6,
    }


def show(report: dict[str, Any]) -> None:
    """The report as text, one number per line."""
    lines = []
    for name, part in report.items():
        for row in part if isinstance(part, list) else [part]:
            cells = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
            lines.append(f"{name}: " + "  ".join(cells))
    print("\n".join(lines))
