"""Checkpoints that tests of commands look into."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from fsdp_offload import HybridDeviceOptimizer, checkpoint


def save(path: Path, *, width: int = 3, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """One step of a linear layer of 4 to ``width``, saved; the layer."""
    torch.manual_seed(0)
    model = nn.Linear(4, width, dtype=dtype)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = HybridDeviceOptimizer(inner, model=model, overlap="step")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    extra = {"step": 7, "rates": [0.5, None], "seen": torch.zeros(2), "name": "a"}
    checkpoint.save(path, model, optimizer, extra=extra)
    optimizer.close()
    return model
