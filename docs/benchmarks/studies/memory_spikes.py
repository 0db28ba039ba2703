"""Training beside allocations of the user's own, on a device with little to spare.

    PYTORCH_ALLOC_CONF=expandable_segments:True python docs/benchmarks/studies/memory_spikes.py

Each step has 1, 2, 3 or 4 quarters of ``--tokens``. Before one forward in four, and after one
``step()`` in four, the user takes 0.5 to 8 GiB and frees them at once. Another process holds so
much of the device that 1.15 times the peak of plain AdamW is left. Rows: ``device_memory=0`` and
``"auto"`` with spikes, ``"auto"`` without. They have to end without ``OutOfMemoryError``, with the
same losses.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from typing import Any

import torch

from fsdp_offload.bench import machine
from fsdp_offload.bench.model import Job, sharded_model, synthetic_batches
from fsdp_offload.bench.rows import LEARNING_RATE, MAX_NORM
from fsdp_offload.optimizer.hybrid import HybridDeviceOptimizer

GIB = 2**30
HOLD = """
import sys, torch
held = torch.zeros(1, device="cuda")
free = torch.cuda.mem_get_info()[0]
held = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


def train(row: str, steps: int, job: Job, spikes: bool) -> dict[str, Any]:
    """Losses, or the step at which memory ran out."""
    device = torch.device("cuda")
    model = sharded_model(job, device)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    if row != "plain":
        memory = 0 if row == "0" else "auto"
        optimizer = HybridDeviceOptimizer(optimizer, model, device_memory=memory)
    batches = synthetic_batches(job, device)
    draw = random.Random(0)
    losses = torch.zeros(steps, device=device)
    found: dict[str, Any] = {"row": row, "spikes": spikes, "ran_out_at": None}
    changes: list[str] = []

    def spike() -> None:
        chance, size = draw.random(), draw.uniform(0.5, 8)  # drawn in every row
        if spikes and chance < 0.25:
            torch.empty(int(size * GIB), dtype=torch.uint8, device=device)

    began = time.perf_counter()
    for step in range(steps):
        length = job.seq * draw.choice((1, 2, 3, 4)) // 4
        if row == "plain":
            length = job.seq  # its peak
        inputs, targets = (t[:, :length].contiguous() for t in batches[step % len(batches)])
        try:
            spike()
            loss = model(inputs, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            losses[step].copy_(loss.detach())
            spike()
        except torch.OutOfMemoryError as error:
            found |= {"ran_out_at": step, "error": str(error)[:300]}
            break
        if row == "auto":
            change = optimizer.statistics().memory_change
            if change and change not in changes[-1:]:
                changes.append(change)
    torch.cuda.synchronize()
    found["ms_per_step"] = 1e3 * (time.perf_counter() - began) / steps
    found["losses"] = losses.tolist()
    found["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    found["changes"] = changes
    return found


def child(options: argparse.Namespace) -> None:
    """One row in a process of its own: nothing of the one before is left."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    with machine.process_group("cuda") as device:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        holder = None
        if options.limit_bytes:
            command = [sys.executable, "-c", HOLD, str(options.limit_bytes)]
            holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
        try:
            job = Job(layers=options.layers, tokens=options.tokens)
            row = train(options.row, options.steps, job, options.spikes)
        finally:
            if holder is not None:
                holder.kill()
    print("ROW", json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--spikes", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limit-bytes", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        child(options)
        return

    def run(row: str, steps: int, *, spikes: bool = False, limit_bytes: int = 0) -> dict[str, Any]:
        command = [sys.executable, __file__, "--row", row, "--steps", str(steps)]
        command += ["--layers", str(options.layers), "--tokens", str(options.tokens)]
        command += ["--limit-bytes", str(limit_bytes)] + ["--spikes"] * spikes
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        line = next(line for line in output.splitlines() if line.startswith("ROW "))
        found: dict[str, Any] = json.loads(line[4:])
        short = {k: v for k, v in found.items() if k != "losses"}
        print(json.dumps(short, indent=1), flush=True)
        return found

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    plain = run("plain", 4)
    limit = int(1.15 * plain["peak_gib"] * GIB)
    print(f"limit: {limit / GIB:.2f} GiB", flush=True)
    rows = [
        run("0", options.steps, spikes=True, limit_bytes=limit),
        run("auto", options.steps, spikes=True, limit_bytes=limit),
        run("auto", options.steps, limit_bytes=limit),
    ]
    for row in rows[1:]:
        same = sum(a == b for a, b in zip(rows[0]["losses"], row["losses"], strict=True))
        print(f"{row['row']}, spikes {row['spikes']}: {same} of {options.steps} losses the same")


if __name__ == "__main__":
    main()
