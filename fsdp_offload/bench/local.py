"""Local snapshots against ``torch.distributed.checkpoint`` and against the file system itself.

Usage::

    python -m fsdp_offload.bench.local FOLDER [--mib 1024] [--repeats 5] [--drop-cache]
        [--device cuda]

One rank, AdamW, all state streamed. Per row the best of ``--repeats`` (rows take turns) in GB/s of
what the snapshot holds: weights and two moments. *plain* is the same bytes in blocks of 8 MiB by
the same threads without checksums; every write ends with fsync, DCP's too. ``--drop-cache``: the
files leave the page cache before each read.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ..checkpoint import blocks
from ..checkpoint.local import load_local, save_local
from ..checkpoint.local_file import block_ranges
from ..optimizer import HybridDeviceOptimizer


def seconds_of(run: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def drop_from_cache(folder: Path) -> None:
    """Let the kernel forget the files' pages (they are on disk already)."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def plain_write(path: Path, memory: Tensor) -> None:
    """Blocks by threads, then fsync."""
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    ranges = block_ranges(memory.numel(), blocks.BLOCK_BYTES)
    write = functools.partial(blocks.write_bytes, descriptor, path=path)
    blocks.run_all(
        functools.partial(write, start, blocks.memory_of(memory[start:stop]))
        for start, stop in ranges
    )
    os.fsync(descriptor)
    os.close(descriptor)


def plain_read(path: Path, memory: Tensor) -> None:
    """Blocks by threads, into memory that exists."""
    descriptor = os.open(path, os.O_RDONLY)
    ranges = block_ranges(memory.numel(), blocks.BLOCK_BYTES)
    read = functools.partial(blocks.read_bytes, descriptor, path=path)
    blocks.run_all(
        functools.partial(read, start, blocks.memory_of(memory[start:stop]))
        for start, stop in ranges
    )
    os.close(descriptor)


def with_dcp(
    model: nn.Module, optimizer: HybridDeviceOptimizer, folder: Path, threads: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Save and load of the same state with DCP's own file system writer."""

    def state() -> dict[str, object]:
        return {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }

    def save() -> None:
        writer = FileSystemWriter(folder, thread_count=threads, overwrite=True)
        dcp_save(state(), storage_writer=writer)

    def load() -> None:
        loaded = state()
        dcp_load(loaded, storage_reader=FileSystemReader(folder))
        set_model_state_dict(model, loaded["model"])  # type: ignore[arg-type]
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"])  # type: ignore[arg-type]

    return save, load


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--drop-cache", action="store_true")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    layers = max(1, arguments.mib // 48)  # 2048 x 2048 fp32, thrice
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(layers)))
    model.to(arguments.device)
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW(model.parameters()), model=model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    n_bytes = 3 * sum(p.numel() * p.itemsize for p in model.parameters())
    base = Path(tempfile.mkdtemp(prefix="bench_local_", dir=arguments.folder))
    memory = torch.zeros(n_bytes, dtype=torch.uint8)
    file = base / "plain" / "file"
    (own := base / "own").mkdir()
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "plain": (lambda: plain_write(file, memory), lambda: plain_read(file, memory)),
        "dcp, 1 thread": with_dcp(model, optimizer, base / "dcp1", 1),
        "dcp, 2 threads": with_dcp(model, optimizer, base / "dcp2", 2),
        "local": (
            lambda: save_local(own, model, optimizer),
            lambda: load_local(own, model, optimizer),
        ),
    }
    saved: dict[str, list[float]] = {name: [] for name in pairs}
    loaded: dict[str, list[float]] = {name: [] for name in pairs}
    try:
        for _ in range(arguments.repeats):
            for name, (save, load) in pairs.items():
                saved[name].append(seconds_of(save))
                if arguments.drop_cache:
                    drop_from_cache(base)
                loaded[name].append(seconds_of(load))
        for name in pairs:
            row = {
                "what": name,
                "save_gbps": round(n_bytes / min(saved[name]) / 1e9, 2),
                "load_gbps": round(n_bytes / min(loaded[name]) / 1e9, 2),
                "gb": round(n_bytes / 1e9, 2),
                "threads": blocks.thread_count(),
            }
            print(json.dumps(row))
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
