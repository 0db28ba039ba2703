"""What a GPU was seen to do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def copies_to_device(run: Callable[[], object]) -> int:
    """How many ``run`` makes from host memory. Nothing else is under way."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        run()
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events()]
    assert names, "the profiler has seen nothing"
    return sum("HtoD" in name for name in names)
