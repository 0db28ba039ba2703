"""torch's profiler shows what the package does, by name."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fsdp_offload import HybridDeviceOptimizer, PhaseOffloader, checkpoint


def test_the_profiler_shows_a_span_for_everything_that_moves(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    inner = torch.optim.AdamW(model.parameters())
    optimizer = HybridDeviceOptimizer(inner, model, device_memory=0)
    phases = PhaseOffloader(model, optimizer)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with phases.away():
            checkpoint.save(tmp_path / "a", model, optimizer)
        checkpoint.load(tmp_path / "a", model, optimizer)
    found = {event.name for event in recorded.events() if event.name.startswith("fsdp_offload::")}
    names = ("fetch", "update", "store", "offload", "reload", "save", "load")
    assert found == {f"fsdp_offload::{name}" for name in names}
    optimizer.close()
