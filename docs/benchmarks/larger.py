"""A model that a GPU cannot hold: from a folder of safetensors to training.

Usage::

    python docs/benchmarks/larger.py FOLDER --cap 24GiB [--moments bf16] [--json out.json]

A GPT (``--layers``, ``--dim``) is made on the meta device, sharded, and loaded from ``FOLDER``,
which the script fills if it is empty. Then it trains with torch's clipping. ``--cap`` limits
torch's allocator before anything is on the GPU. The row has seconds to load and to wrap, and the
peaks of device memory and of the process's own memory, page-locked memory included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_offload import HybridDeviceOptimizer, checkpoint, shard
from fsdp_offload.bench import machine
from fsdp_offload.bench.iteration import Columns, markdown_table, measure
from fsdp_offload.bench.machine import Row, seconds_of
from fsdp_offload.bench.model import Job, meta_model, synthetic_batches
from fsdp_offload.bench.rows import MAX_NORM, Trainer
from fsdp_offload.core.config import GIB, parse_bytes
from fsdp_offload.core.progress import Progress

COLUMNS: Final[Columns] = (
    ("load, s", "load_s", ".1f"),
    ("wrap, s", "wrap_s", ".1f"),
    ("iteration, ms", "iteration_ms", ".1f"),
    ("device peak until wrapped, GiB", "wrapped_peak_gib", ".2f"),
    ("device peak, GiB", "device_peak_gib", ".2f"),
    ("payload, GiB", "host_gib", ".2f"),
    ("process peak, GiB", "process_peak_gib", ".2f"),
    ("loss", "loss", ".4f"),
)


def write_weights(folder: Path, job: Job, device: torch.device) -> None:
    """Write a file per block and one for the rest, as Hugging Face's libraries do."""
    files: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, parameter in meta_model(job).named_parameters():
        block = re.match(r"blocks\.(\d+)\.", name)
        files[f"model-{block[1] if block else 'rest'}.safetensors"][name] = parameter
    generator, where = torch.Generator(device).manual_seed(0), {}
    with Progress(len(files), "writing weights", unit=" files") as bar:
        for file, parameters in files.items():
            tensors = {}
            for name, parameter in parameters.items():
                tensor = torch.ones(parameter.shape, dtype=parameter.dtype, device=device)
                if tensor.dim() > 1:
                    tensor.normal_(std=0.02 / (2 * job.layers) ** 0.5, generator=generator)
                tensors[name], where[name] = tensor.cpu(), file
            save_file(tensors, folder / file)
            bar.advance()
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def own_bytes() -> int:
    """Memory of this process without the files that it maps."""
    text = Path("/proc/self/status").read_text()
    return 1024 * sum(int(kib) for kib in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", text, re.M))


@contextlib.contextmanager
def watching() -> Iterator[list[int]]:
    """The largest :func:`own_bytes` inside, looked at every 20 ms, as the only element."""
    most, ended = [own_bytes()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            most[0] = max(most[0], own_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


def run(job: Job, device: torch.device, options: argparse.Namespace) -> Row:
    """Load, wrap and train."""
    model = meta_model(job)
    shard(model, model.blocks, offload_policy=CPUOffloadPolicy(pin_memory=False))
    row: Row = {"name": f"larger-{options.moments}", "kind": "forward", "clip": "torch"}
    before, wrapped = own_bytes(), list[HybridDeviceOptimizer]()

    def wrap() -> None:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        how: dict[str, Any] = {"moments": options.moments, "device_memory": options.device_memory}
        wrapped.append(HybridDeviceOptimizer(inner, model, offload="all", **how))

    with watching() as most:
        row["load_s"] = seconds_of(partial(checkpoint.load, options.folder, model), device)
        row["wrap_s"] = seconds_of(wrap, device)
        if device.type == "cuda":
            row["wrapped_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        clip = partial(nn.utils.clip_grad_norm_, [*model.parameters()], MAX_NORM)
        trainer = Trainer(model, wrapped[0], clip)
        batches = synthetic_batches(job, device)
        row |= measure(trainer, batches, options.warm_up, options.iterations)
    figures = wrapped[0].statistics()
    names = "host_arena_bytes", "host_weight_bytes", "host_gradient_bytes"
    row["host_gib"] = sum(getattr(figures, name) for name in names) / GIB
    row["process_peak_gib"] = (most[0] - before) / GIB
    row |= {"moved_bytes": figures.moved_bytes, "fetched_bytes": figures.fetched_bytes}
    return machine.merged(row) | {"status": "ok"}


def main(argv: Sequence[str] | None = None) -> Row:
    """Run the row; rank 0 prints it, and with ``--json`` writes it."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    for name in ("layers", "dim", "vocabulary", "tokens", "seq"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--moments", choices=["fp32", "bf16", "int8"], default="fp32")
    parser.add_argument("--device-memory", default="auto")
    parser.add_argument("--cap", type=parse_bytes, help="for torch's allocator")
    parser.add_argument("--warm-up", type=int, default=14)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    with machine.process_group(options.device) as device:
        job = Job.of(argparse.Namespace(**vars(options), checkpointed=True))
        link: Row = machine.measure_link(device, 5) if device.type == "cuda" else {}
        if dist.get_rank() == 0 and not any(options.folder.iterdir()):
            write_weights(options.folder, job, device)
        dist.barrier()
        machine.free_everything(device)
        if options.cap:
            total_bytes = torch.cuda.mem_get_info(device)[1]
            torch.cuda.set_per_process_memory_fraction(min(1.0, options.cap / total_bytes))
        report = machine.publish(device, job, [run(job, device, options)], link, options.json)
        if dist.get_rank() == 0:
            print(markdown_table(report, COLUMNS))
    return report


if __name__ == "__main__":
    main()
