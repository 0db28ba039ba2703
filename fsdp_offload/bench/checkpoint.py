"""Checkpoints of a job against ``torch.distributed.checkpoint`` with plain AdamW on the device.

Usage::

    python -m fsdp_offload.bench.checkpoint FOLDER [--layers 24] [--repeats 2] [--json out.json]

One process (or several under torchrun), one model of 1.33 G parameters with FSDP2, first with
plain fused AdamW saved by torch's functions, then with all state offloaded. Per row the best of
``--repeats``: seconds, GB/s of what is saved, growth of device memory above what the job holds,
growth of the process above what it held. *plain file*: as many bytes in blocks of 8 MiB by the
same threads. Every write ends with fsync; files stay in the page cache.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from .. import checkpoint
from ..checkpoint.files import (
    BLOCK_BYTES,
    memory_of,
    read_bytes,
    run_all,
    thread_count,
    write_bytes,
)
from ..optimizer import HybridDeviceOptimizer
from .machine import Row, environment, process_group, resident_set_bytes, show
from .model import gpt_shapes

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Job(nn.Module):
    """Parameters of a GPT with a gradient each; nothing is computed."""

    def __init__(self, layers: int, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.randn(shape, device=device, dtype=dtype) * 0.02 for shape in gpt_shapes(layers)
        )

    def set_gradients(self) -> None:
        """Random ones."""
        for parameter in self.parameters():
            parameter.grad = torch.randn_like(parameter) * 1e-3


@contextlib.contextmanager
def measured(row: Row, device: str) -> Iterator[None]:
    """Seconds of what is inside, and by how much memory grew meanwhile."""
    grown, done = [0], threading.Event()
    base = resident_set_bytes()

    def watch() -> None:
        while not done.wait(0.005):
            grown.append(resident_set_bytes() - base)

    held = 0
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        done.set()
        watcher.join()
    if seconds < row.get("s", float("inf")):
        row["s"] = seconds
        row["host_growth_mib"] = max(grown) / (1 << 20)
        if device == "cuda":
            row["device_growth_mib"] = (torch.cuda.max_memory_allocated() - held) / (1 << 20)


class Bench:
    """Rows of one run."""

    def __init__(self, folder: Path, device: str, repeats: int) -> None:
        self.folder, self.device, self.repeats = folder, device, repeats
        self.rows: dict[str, Row] = {}

    def time(self, name: str, n_bytes: int, run: Callable[[], Any]) -> Any:
        """One more measurement of ``run``; its result."""
        dist.barrier()
        row = self.rows.setdefault(name, {"what": name})
        with measured(row, self.device):
            result = run()
        row["gbps"] = n_bytes / row["s"] / 1e9
        return result

    def clear(self) -> None:
        """Remove what was saved."""
        dist.barrier()
        if dist.get_rank() == 0:
            for path in self.folder.iterdir():
                shutil.rmtree(path)
        dist.barrier()


def plain_write(path: Path, memory: Tensor) -> None:
    """Blocks by threads, then fsync."""
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    starts = range(0, memory.numel(), BLOCK_BYTES)
    run_all(
        functools.partial(
            write_bytes, descriptor, at, memory_of(memory[at : at + BLOCK_BYTES]), path
        )
        for at in starts
    )
    os.fsync(descriptor)
    os.close(descriptor)


def plain_read(path: Path, memory: Tensor) -> None:
    """Blocks by threads, into memory that exists."""
    descriptor = os.open(path, os.O_RDONLY)
    starts = range(0, memory.numel(), BLOCK_BYTES)
    run_all(
        functools.partial(
            read_bytes, descriptor, at, memory_of(memory[at : at + BLOCK_BYTES]), path
        )
        for at in starts
    )
    os.close(descriptor)


def measure_plain_file(bench: Bench, n_bytes: int) -> None:
    """What the file system gives."""
    memory = torch.zeros(n_bytes, dtype=torch.uint8)
    path = bench.folder / f"plain{dist.get_rank()}" / "file"
    for _ in range(bench.repeats):
        bench.time("plain file, write", n_bytes, lambda: plain_write(path, memory))
        bench.time("plain file, read", n_bytes, lambda: plain_read(path, memory))
        bench.clear()


def measure_torch(bench: Bench, model: Job, optimizer: Optimizer, n_bytes: int) -> None:
    """torch's functions with the plain optimizer."""
    group = dist.new_group(backend="gloo")

    def state() -> dict[str, Any]:
        optim = get_optimizer_state_dict(model, optimizer, options=FLAT)
        return {"model": get_model_state_dict(model), "optim": optim}

    def load(path: Path) -> None:
        loaded = state()
        dcp_load(loaded, storage_reader=FileSystemReader(path))
        set_model_state_dict(model, loaded["model"])
        set_optimizer_state_dict(model, optimizer, loaded["optim"], options=FLAT)

    for _ in range(bench.repeats):
        for threads in (1, thread_count()):
            path = bench.folder / f"torch{threads}"
            writer = FileSystemWriter(path, thread_count=threads)
            name = f"torch dcp.save, {threads} threads"
            bench.time(name, n_bytes, lambda w=writer: dcp_save(state(), storage_writer=w))  # type: ignore[misc]
        bench.time("torch dcp.load", n_bytes, lambda p=path: load(p))  # type: ignore[misc]
        bench.clear()
        path = bench.folder / "async"
        rest = bench.time(
            "torch dcp.async_save, stall",
            n_bytes,
            lambda p=path: dcp_async_save(state(), checkpoint_id=p, process_group=group),  # type: ignore[misc]
        )
        bench.time("torch dcp.async_save, rest", n_bytes, rest.result)
        bench.clear()


def measure_ours(bench: Bench, model: Job, optimizer: HybridDeviceOptimizer, n_bytes: int) -> None:
    """The same with all state in host memory."""
    path = bench.folder / "ours"
    for repeat in range(bench.repeats + 1):
        if repeat:  # the first async_save reserves the arena
            bench.time("save", n_bytes, lambda: checkpoint.save(path, model, optimizer))
            bench.time("load", n_bytes, lambda: checkpoint.load(path, model, optimizer))
            bench.clear()
        when = "" if repeat else ", first"
        name = f"async_save, stall{when}"
        rest = bench.time(name, n_bytes, lambda: checkpoint.async_save(path, model, optimizer))
        bench.time(f"async_save, rest{when}", n_bytes, rest.result)
        bench.clear()


def make_job(options: argparse.Namespace) -> Job:
    """A sharded model with gradients."""
    model = Job(options.layers, options.device, getattr(torch, options.dtype))
    fully_shard(model)
    model.set_gradients()
    return model


def local_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """What this rank saves of it."""
    values = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    tensors = [v for v in values if isinstance(v, Tensor)]
    locals_ = [getattr(v, "_local_tensor", v) for v in tensors]
    return sum(v.numel() * v.element_size() for v in locals_)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run all rows; rank 0 prints them, and with ``--json`` writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    with process_group(options.device):
        folder = options.folder / "bench_checkpoint"
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder, options.device, options.repeats)
        model = make_job(options)
        plain = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        plain.step()
        n_bytes = local_bytes(model, plain)
        measure_plain_file(bench, n_bytes)
        measure_torch(bench, model, plain, n_bytes)
        ours = HybridDeviceOptimizer(plain, model=model)
        measure_ours(bench, model, ours, local_bytes(model, ours))
        report = {
            "environment": environment() if options.device == "cuda" else {},
            "job": {
                "params": sum(p.numel() for p in model.parameters()),
                "ranks": dist.get_world_size(),
                "dtype": options.dtype,
                "gb_per_rank_torch": n_bytes / 1e9,
                "gb_per_rank": local_bytes(model, ours) / 1e9,
                "threads": thread_count(),
            },
            "rows": list(bench.rows.values()),
        }
        if dist.get_rank() == 0:
            if options.json:
                options.json.write_text(json.dumps(report, indent=1) + "\n")
            show(report)
        ours.close()
        shutil.rmtree(folder, ignore_errors=True)
    return report


if __name__ == "__main__":
    main()
