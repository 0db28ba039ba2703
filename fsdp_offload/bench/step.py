"""``step()`` alone on one GPU: time against the link, memory against the prediction.

Usage::

    python -m fsdp_offload.bench.step [--layers 24] [--iterations 10] [--json out.json]

Everything is measured in one process: the link (pinned copies of 256 MiB, each way and both ways
at once), torch's fused CPU AdamW on the host lane's threads, and ``step()`` of the streamed and of
the host lane on a GPT-shaped list of parameters (1.33 G with the defaults). Times are medians
over ``--iterations`` after three warm-up steps, with a device synchronisation around each.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import TransferConfig
from ..device import gateway_for
from ..memory import HostArena
from ..optimizer import HybridDeviceOptimizer
from .machine import Row, environment, measure_link, median_ms, resident_set_bytes, show
from .model import gpt_shapes

WARM_UP = 3


def measure_cpu_adamw(numel: int, threads: int, iterations: int) -> Row:
    """G parameters/s of torch's fused CPU AdamW (fp32) over ``numel`` elements."""
    arena = HostArena(
        16 * numel,
        device=torch.device("cpu"),
        can_pin=False,
        transfer=TransferConfig(host_threads=threads),
    )
    parameter, gradient, first, second = (
        arena.tensor(4 * numel * i, numel, torch.float32) for i in range(4)
    )
    gradient.fill_(1e-3)
    result: list[float] = []

    def run() -> None:
        torch.set_num_threads(threads)
        shadow = nn.Parameter(parameter)
        shadow.grad = gradient
        optimizer = torch.optim.AdamW([shadow], lr=1e-3, fused=True)
        optimizer.state[shadow] = {
            "step": torch.tensor(1.0), "exp_avg": first, "exp_avg_sq": second
        }  # fmt: skip
        optimizer.step()
        for _ in range(iterations):
            began = time.perf_counter()
            optimizer.step()
            result.append(time.perf_counter() - began)

    worker = threading.Thread(target=run)
    worker.start()
    worker.join()
    arena.close()
    seconds = statistics.median(result)
    return {"cpu_adamw_gparams": numel / seconds / 1e9, "cpu_adamw_threads": threads}


def make_parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    """Random parameters with random gradients on the GPU."""
    parameters = []
    for shape in shapes:
        parameter = nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype) * 0.02)
        parameter.grad = torch.randn(shape, device="cuda", dtype=dtype) * 1e-3
        parameters.append(parameter)
    return parameters


def measure_step(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, update_on: str, options: argparse.Namespace
) -> Row:
    """One optimizer: time of ``step()``, allocations after the first step, memory."""
    parameters = make_parameters(shapes, dtype)
    numel = sum(p.numel() for p in parameters)
    base = torch.cuda.memory_allocated()
    resident = resident_set_bytes()
    began = time.perf_counter()
    transfer = TransferConfig(bucket_bytes=options.bucket_bytes, slots=options.slots)
    optimizer = HybridDeviceOptimizer(
        torch.optim.AdamW(parameters, lr=1e-4, fused=True), update_on=update_on, transfer=transfer
    ) if update_on == "device" else HybridDeviceOptimizer(
        torch.optim.AdamW(parameters, lr=1e-4), update_on=update_on, transfer=transfer
    )  # fmt: skip
    torch.cuda.synchronize()
    built_s = time.perf_counter() - began
    held = optimizer.statistics()
    predicted = base + held.staging_bytes + 512 * sum(1 for _ in shapes)
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    optimizer.synchronize()
    first_peak = torch.cuda.max_memory_allocated()
    segments = torch.cuda.memory_stats()["num_device_alloc"]
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP - 1):
        optimizer.step()
    host_ms: list[float] = []

    def step(optimizer: HybridDeviceOptimizer = optimizer) -> None:
        optimizer.step()
        host_ms.append(optimizer.statistics().step_ms)
        optimizer.synchronize()

    ms = median_ms(step, options.iterations)
    row = {
        "lane": update_on,
        "dtype": str(dtype).removeprefix("torch."),
        "params": numel,
        "step_ms": ms,
        "host_call_ms": statistics.median(host_ms),
        "gparams_per_s": numel / ms / 1e6,
        "moved_bytes_per_param": held_bytes(optimizer) / numel,
        "construction_s": built_s,
        "pin_s_per_gib": optimizer.statistics().pin_seconds / (held.host_arena_bytes / (1 << 30)),
        "buckets": held.buckets,
        "staging_mib": held.staging_bytes / (1 << 20),
        "predicted_peak_gib": predicted / (1 << 30),
        "first_step_peak_gib": first_peak / (1 << 30),
        "peak_gib": torch.cuda.max_memory_allocated() / (1 << 30),
        "device_allocations_after_first": torch.cuda.memory_stats()["num_device_alloc"] - segments,
        "host_payload_gib": held.host_state_bytes / (1 << 30),
        "host_arena_over_payload": held.host_arena_bytes / held.host_state_bytes,
        "rss_growth_over_payload": (resident_set_bytes() - resident) / held.host_state_bytes,
    }
    optimizer.close()
    del optimizer, step, parameters
    gc.collect()
    torch.cuda.empty_cache()
    return row


def held_bytes(optimizer: HybridDeviceOptimizer) -> int:
    """Bytes both ways in the last step."""
    return 2 * optimizer.statistics().moved_bytes


def measure_on_device(shapes: list[tuple[int, ...]], options: argparse.Namespace) -> Row:
    """Plain fused AdamW on the device, bf16 without master, for scale."""
    parameters = make_parameters(shapes, torch.bfloat16)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    for _ in range(WARM_UP):
        optimizer.step()
    ms = median_ms(optimizer.step, options.iterations)
    del optimizer, parameters
    gc.collect()
    torch.cuda.empty_cache()
    return {"lane": "plain on device", "dtype": "bfloat16", "step_ms": ms}


def add_ratios(rows: list[Row], link: Row, cpu: Row) -> None:
    """Each step over the bound that the same run's link (or CPU kernel) sets."""
    for row in rows:
        if row["lane"] == "device":
            bound = row["params"] * row["moved_bytes_per_param"] / link["h2d+d2h_gbps"] / 1e6
            row |= {"link_bound_ms": bound, "of_bound": bound / row["step_ms"]}
        elif row["lane"] == "host":
            row["of_cpu_kernel"] = row["gparams_per_s"] / cpu["cpu_adamw_gparams"]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run all cases and print a table; with ``--json`` also write everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--bucket-bytes", default="32MiB")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--lanes", default="device:bf16,device:fp32,host:bf16,host:fp32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    device = gateway_for(torch.device("cuda")).device
    shapes = gpt_shapes(options.layers)
    link = measure_link(device, options.iterations)
    cpu = measure_cpu_adamw(1 << 28, len(os.sched_getaffinity(0)), options.iterations)
    rows = [measure_on_device(shapes, options)]
    for case in options.lanes.split(","):
        lane, _, name = case.partition(":")
        dtype = torch.bfloat16 if name == "bf16" else torch.float32
        rows.append(measure_step(shapes, dtype, lane, options))
    add_ratios(rows, link, cpu)
    report = {"environment": environment(), "link": link, "cpu": cpu, "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    return report


if __name__ == "__main__":
    main()
