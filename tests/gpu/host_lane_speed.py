"""Speed of the host lane, transfers included, against torch's fused CPU kernel alone.

    python tests/gpu/host_lane_speed.py
    --gparams N    parameters in 10^9 (default 1.0)
    --threads N    host threads (default: all cores of the process)
    --iterations N per setting (default 8, after 3 of warm-up); medians are printed
    --dtype D      bf16 (default) or fp32 shards

One line per setting as soon as it is known: the ring's depth, elements per unit of work, bytes per
bucket, whether threads are bound to cores near the device, G parameters/s, share of the kernel.
First of all the kernel, and the same work one after the other, as FSDP2's CPUOffloadPolicy does it:
gradients to pinned memory, fused AdamW on all cores, weights back. About 3 minutes on 16 cores.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from fsdp_offload.bench.step import measure_cpu_adamw
from fsdp_offload.memory import HostArena
from fsdp_offload.pipeline import engine, host

WARM_UP = 3
PARAMETER_NUMEL = 50_000_000
DEPTHS = (6, 9, 12)
UNITS = (1 << 19, 1 << 20, 15 << 17)
BUCKETS = ("16MiB", "32MiB", "64MiB")


def seconds_of(step: Callable[[], None], iterations: int) -> float:
    for _ in range(WARM_UP):
        step()
    times = []
    for _ in range(iterations):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def lane(parameters: list[nn.Parameter], threads: int, bucket: str, bind: bool, n: int) -> float:
    transfer = TransferConfig(bucket_bytes=bucket, host_threads=threads, bind_threads=bind)
    optimizer = HybridDeviceOptimizer(
        torch.optim.AdamW(parameters, lr=1e-4), update_on="host", transfer=transfer
    )
    seconds = seconds_of(optimizer.step, n)
    optimizer.close()
    gc.collect()
    return seconds


def one_after_the_other(parameters: list[nn.Parameter], threads: int, n: int) -> float:
    numel = sum(p.numel() for p in parameters)
    itemsize = parameters[0].itemsize
    pinned = HostArena(
        2 * numel * itemsize, device=parameters[0].device, can_pin=True, transfer=TransferConfig()
    )
    at = 0
    shadows: list[nn.Parameter] = []
    received: list[Tensor] = []
    for p in parameters:
        weight, gradient = (
            pinned.tensor(at + i * p.numel() * itemsize, p.numel(), p.dtype) for i in range(2)
        )
        at += 2 * p.numel() * itemsize
        weight.copy_(p.detach().view(-1))
        shadows.append(nn.Parameter(weight))
        received.append(gradient)
    optimizer = torch.optim.AdamW(shadows, lr=1e-4, fused=True)
    torch.set_num_threads(threads)

    @torch.no_grad()
    def step() -> None:
        for p, shadow, gradient in zip(parameters, shadows, received, strict=True):
            assert p.grad is not None
            gradient.copy_(p.grad.view(-1), non_blocking=True)
            shadow.grad = gradient
        torch.cuda.synchronize()
        optimizer.step()
        for p, shadow in zip(parameters, shadows, strict=True):
            p.view(-1).copy_(shadow, non_blocking=True)

    seconds = seconds_of(step, n)
    pinned.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gparams", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    count = max(1, round(options.gparams * 1e9 / PARAMETER_NUMEL))
    parameters = []
    for _ in range(count):
        parameter = nn.Parameter(torch.randn(PARAMETER_NUMEL, device="cuda", dtype=dtype) * 0.02)
        parameter.grad = torch.full_like(parameter, 1e-3)
        parameters.append(parameter)
    numel = count * PARAMETER_NUMEL
    threads, n = options.threads, options.iterations
    kernel = measure_cpu_adamw(1 << 28, threads, n)["cpu_adamw_gparams"]
    print(f"torch's fused kernel, {threads} threads: {kernel:.2f} G parameters/s", flush=True)
    speed = numel / one_after_the_other(parameters, threads, n) / 1e9
    print(f"one after the other ({options.dtype} state): {speed:.2f}", flush=True)
    numel_of_bucket = 2 * (32 << 20) // 12
    usual = host.ring_depth(threads, bucket_numel=numel_of_bucket, buckets=99, least=6)
    base = (usual, host.UNIT_NUMEL, "32MiB", True)
    settings = [base, (*base[:3], False)]
    settings += [(d, u, b, True) for d, u, b in itertools.product(DEPTHS, UNITS, BUCKETS)]
    for depth, unit, bucket, bind in dict.fromkeys(settings):
        engine.ring_depth = lambda *_, depth=depth, **__: depth  # type: ignore[assignment]
        host.UNIT_NUMEL = unit  # type: ignore[misc]
        speed = numel / lane(parameters, threads, bucket, bind, n) / 1e9
        print(
            f"depth {depth:2d}, unit {unit / 2**20:5.2f} M, bucket {bucket}, "
            f"{'bound' if bind else 'free '}: {speed:.2f}, {speed / kernel:.0%} of the kernel",
            flush=True,
        )


if __name__ == "__main__":
    main()
