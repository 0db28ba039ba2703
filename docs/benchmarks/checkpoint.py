"""Checkpoints of a job against ``torch.distributed.checkpoint`` with plain AdamW on the device.

    PYTHONPATH=. python docs/benchmarks/checkpoint.py FOLDER [--repeats 2] [--json out.json]

One process (or several under torchrun), one GPT with FSDP2, first with plain fused AdamW saved by
torch's functions, then with all state offloaded. Per row the best of ``--repeats``; of several
ranks the slowest. Files stay in the page cache. ``stall`` is the call of ``async_save`` alone,
``rest`` the time from there until the checkpoint is complete. torch writes with one thread, its
default, which was faster than eight; its collectives need numpy.
"""

from __future__ import annotations

import shutil
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer

from fsdp_offload import HybridDeviceOptimizer, checkpoint
from fsdp_offload.bench import machine
from fsdp_offload.bench.iteration import markdown_table
from fsdp_offload.bench.machine import Row, seconds_of, slowest
from fsdp_offload.bench.model import Job, sharded_model
from fsdp_offload.core import dtensor

Calls = tuple[Callable[[], object], Callable[[], object], Callable[[], Any]]
FLAT = torch_state.StateDictOptions(flatten_optimizer_state_dict=True)
COLUMNS = (("s", "s", ".2f"), ("GB/s", "gbps", ".2f"))


def torch_calls(model: nn.Module, optimizer: Optimizer, path: Path) -> Calls:
    """torch's functions: save, load, begin to save."""
    group = dist.new_group(backend="gloo")

    def state() -> dict[str, Any]:
        optim = torch_state.get_optimizer_state_dict(model, optimizer, options=FLAT)
        return {"model": torch_state.get_model_state_dict(model), "optim": optim}

    def load() -> None:
        loaded = state()
        dcp_load(loaded, storage_reader=FileSystemReader(path))
        torch_state.set_model_state_dict(model, loaded["model"])
        torch_state.set_optimizer_state_dict(model, optimizer, loaded["optim"], options=FLAT)

    return (
        lambda: dcp_save(state(), storage_writer=FileSystemWriter(path)),
        load,
        lambda: dcp_async_save(state(), checkpoint_id=path, process_group=group),
    )


def measure(
    name: str, calls: Calls, n_bytes: int, path: Path, device: torch.device, repeats: int
) -> list[Row]:
    """Rows of one way; ``n_bytes`` are this rank's."""
    save, load, begin_save = calls
    seconds: dict[str, list[float]] = {}

    def timed(what: str, run: Callable[[], Any]) -> Any:
        found = []
        took = seconds_of(lambda: found.append(run()), device)
        seconds.setdefault(what, []).append(slowest([took])[0])
        return found[0]

    def clear() -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()

    for _ in range(repeats):
        clear()
        timed("save", save)
        timed("load", load)
        clear()
        pending = timed("async_save, stall", begin_save)
        timed("async_save, rest", pending.result)
    total = n_bytes * dist.get_world_size()
    return [
        {"name": f"{name} {what}", "status": "ok", "s": min(s), "gbps": total / min(s) / 1e9}
        for what, s in seconds.items()
    ]


def local_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """What this rank saves of it."""
    values = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    return sum(dtensor.local(v).nbytes for v in values if isinstance(v, Tensor))


def main(argv: Sequence[str] | None = None) -> Row:
    """Run all rows; rank 0 prints them, and with ``--json`` writes them."""
    parser = ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("folder", type=Path, help="on the disk to measure; a folder in it is made and removed")
    add("--layers", type=int, help="of the GPT; default: 24, on the CPU 2")
    add("--repeats", type=int, default=2, help="of which the best counts")
    add("--shards", choices=("bf16", "fp32"), default="fp32", help="dtype of the parameters")
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    add("--json", type=Path, help="file for all figures")
    options = parser.parse_args(argv)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with machine.process_group(options.device) as device:
        folder = options.folder / "bench_checkpoint"
        folder.mkdir(parents=True, exist_ok=True)
        path, repeats = folder / "checkpoint", options.repeats
        job = Job.of(options)
        model = sharded_model(job, device)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) * 1e-3
        plain = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        plain.step()
        calls = torch_calls(model, plain, path)
        rows = measure("torch", calls, local_bytes(model, plain), path, device, repeats)
        ours = HybridDeviceOptimizer(plain, model=model)
        calls = (
            lambda: checkpoint.save(path, model, ours),
            lambda: checkpoint.load(path, model, ours),
            lambda: checkpoint.async_save(path, model, ours),
        )
        rows += measure("ours", calls, local_bytes(model, ours), path, device, repeats)
        ours.close()
        shutil.rmtree(folder, ignore_errors=True)
        report = machine.publish(device, job, rows, {}, options.json)
        if dist.get_rank() == 0:
            print(markdown_table(report, COLUMNS))
    return report


if __name__ == "__main__":
    main()
