"""What torch's profiler calls things on a GPU: ``tests/optimizer/test_timeline.py`` assumes it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_offload import HybridDeviceOptimizer
from fsdp_offload.optimizer.timeline import STEP, Span, spans_of

STEPS = 4


def recorded(cls: type[torch.optim.Optimizer], path: Path) -> list[Span]:
    """Iterations whose state travels, and whose host runs ahead."""
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).cuda()
    settings = {"momentum": 0.9} if cls is torch.optim.SGD else {}
    optimizer = HybridDeviceOptimizer(
        cls(model.parameters(), lr=1e-3, **settings), model, device_memory=0
    )
    batch = torch.randn(4096, 2048, device="cuda")

    def iterate() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    iterate()
    with optimizer.timeline(path):
        for _ in range(STEPS):
            iterate()
    optimizer.close()
    return spans_of(json.loads(path.read_text()))


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD])
def test_every_row_is_busy_and_steps_begin_on_the_device(
    cls: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    spans = recorded(cls, tmp_path / "a.json")
    assert {span.row for span in spans} == {"compute", "updates", "H2D", "D2H", STEP}
    steps = [span.start_ms for span in spans if span.row == STEP]
    assert len(steps) == STEPS
    # What follows a mark on the caller's stream is the next forward: no update comes before the
    # first mark, and between two marks there is compute.
    assert min(span.start_ms for span in spans if span.row == "updates") >= steps[0]
    compute = [span.start_ms for span in spans if span.row == "compute"]
    for before, after in pairwise(steps):
        assert any(before < start < after for start in compute)


def test_marks_are_those_of_the_device(tmp_path: Path) -> None:
    recorded(torch.optim.AdamW, tmp_path / "a.json")
    trace = json.loads((tmp_path / "a.json").read_text())
    kinds = [e.get("cat") for e in trace["traceEvents"] if e["name"] == "fsdp_offload.step"]
    assert kinds.count("gpu_user_annotation") == kinds.count("user_annotation") == STEPS
