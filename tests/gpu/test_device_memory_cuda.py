"""``device_memory="auto"`` with torch's own allocator: what bounds a process bounds it, too."""

from __future__ import annotations

import gc

import torch
from torch import nn

from fsdp_offload import HybridDeviceOptimizer

GIB = 1 << 30


def test_auto_keeps_to_the_fraction_of_the_process() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    # Weights and gradients are 2.25 GiB, the state is as much again: not all of it may stay.
    limit = torch.cuda.memory_reserved() + int(4.2 * GIB)
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        parameters = [nn.Parameter(torch.zeros(16 << 20, device="cuda")) for _ in range(18)]
        optimizer = HybridDeviceOptimizer(torch.optim.AdamW(parameters, fused=True))
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        for _ in range(16):
            optimizer.step()
        found = optimizer.statistics()
        assert 0 < found.staying_buckets < found.buckets
        assert torch.cuda.memory_stats()["num_alloc_retries"] == retries
        assert torch.cuda.memory_reserved() <= limit
        optimizer.close()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
