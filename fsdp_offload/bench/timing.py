"""Iterations without a synchronisation in between, and what they did to memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .machine import resident_set_bytes, synchronize
from .trainers import Batch, Trainer

Row = dict[str, Any]
PARTS = ("forward", "backward", "update")
TRACED_ITERATIONS = 3
LEAD_IN = 4
"""Iterations between the last synchronisation and the timed ones: state that was fetched while the
device stood still would make the first of them too short."""


class Clock:
    """Points in the device's time (events on the current stream), or in the host's on a CPU."""

    def __init__(self, device: torch.device, points: int) -> None:
        self._is_cuda = device.type == "cuda"
        self._points: list[Any] = []
        if self._is_cuda:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(points)]

    def mark(self) -> None:
        """One more point; the host does not wait."""
        if self._is_cuda:
            event = self._events[len(self._points)]
            event.record()
            self._points.append(event)
        else:
            self._points.append(time.perf_counter())

    def spans_ms(self) -> list[float]:
        """Milliseconds between neighbouring points; the device must have passed them."""
        pairs = zip(self._points, self._points[1:], strict=False)
        if self._is_cuda:
            return [first.elapsed_time(second) for first, second in pairs]
        return [1e3 * (second - first) for first, second in pairs]


class Loop:
    """Trains on; keeps each iteration's loss on the device."""

    def __init__(self, trainer: Trainer, batches: Sequence[Batch], iterations: int) -> None:
        self._trainer, self._batches = trainer, batches
        device = batches[0][0].device
        self._losses = torch.zeros(iterations, device=device)  # so that none is allocated later
        self.done = 0

    def iterate(self, mark: Callable[[], None] = lambda: None) -> None:
        """One iteration; ``mark`` is called after each of :data:`PARTS`."""
        loss = self._trainer.forward(self._batches[self.done % len(self._batches)])
        mark()
        self._trainer.backward(loss)
        mark()
        if self.done < len(self._losses):
            self._losses[self.done].copy_(loss.detach())
        self._trainer.update()
        mark()
        self.done += 1

    def losses(self) -> list[float]:
        """All of them so far; waits for the device."""
        values: Tensor = self._losses[: self.done]
        return [float(value) for value in values.tolist()]


def measure(
    trainer: Trainer,
    batches: Sequence[Batch],
    *,
    warm_up: int,
    iterations: int,
    barrier: Callable[[], object],
    base_bytes: int = 0,
) -> Row:
    """Train ``warm_up`` iterations, then ``iterations`` timed ones; this rank's figures.

    Args:
        trainer: what is measured.
        batches: taken in turn.
        warm_up: iterations before anything is measured, at least one; ``LEAD_IN`` more follow.
        iterations: of which medians are taken.
        barrier: called before the timed part.
        base_bytes: device memory that was allocated before the row began, not counted in its peak.
    """
    device = batches[0][0].device
    loop = Loop(trainer, batches, max(1, warm_up) + LEAD_IN + iterations)
    clock = Clock(device, len(PARTS) * iterations + 1)
    for _ in range(max(1, warm_up)):
        loop.iterate()
    trainer.settle()
    synchronize(device)
    barrier()
    began = time.perf_counter()
    for _ in range(LEAD_IN):
        loop.iterate()
    before = _memory(device, reset=True)
    clock.mark()
    for _ in range(iterations):
        loop.iterate(clock.mark)
    enqueued = time.perf_counter()
    trainer.settle()
    synchronize(device)
    ended = time.perf_counter()
    after = _memory(device, reset=False)
    spans = clock.spans_ms()
    parts = {name: spans[i :: len(PARTS)] for i, name in enumerate(PARTS)}
    totals = [sum(span) for span in zip(*parts.values(), strict=True)]
    row: Row = {
        "iteration_ms": statistics.median(totals),
        "iteration_ms_min": min(totals),
        "iteration_ms_max": max(totals),
        "iterations_ms": [round(total, 2) for total in totals],
        "wall_ms": 1e3 * (ended - began) / (LEAD_IN + iterations),
        "host_ms": 1e3 * (enqueued - began) / (LEAD_IN + iterations),
        **{f"{name}_ms": statistics.median(span) for name, span in parts.items()},
        "rss_growth_bytes": after["rss"] - before["rss"],
        "losses": loop.losses(),
    }
    if device.type == "cuda":
        row["device_peak_bytes"] = after["peak"] - base_bytes
        row["device_allocations"] = after["allocations"] - before["allocations"]
    return row | held(trainer)


def _memory(device: torch.device, *, reset: bool) -> dict[str, int]:
    found = {"rss": resident_set_bytes()}
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        found["peak"] = torch.cuda.max_memory_allocated()
        found["allocations"] = torch.cuda.memory_stats()["num_device_alloc"]
    return found


def held(trainer: Trainer) -> Row:
    """Bytes of state on the device, and what :meth:`statistics` says of ours."""
    row: Row = {"device_state_bytes": trainer.device_state_bytes()}
    figures = trainer.statistics()
    if figures is None:
        return row
    on_link = "host" not in figures.parameters
    return row | {
        "host_bytes": figures.host_arena_bytes,
        "moved_bytes": figures.moved_bytes,
        "fetched_bytes": figures.fetched_bytes,
        # The state that has to travel, whatever the row made of it; the host lane moves gradients
        # and weights instead, so there it is what was moved.
        "link_bytes": figures.host_state_bytes if on_link else figures.moved_bytes,
        "staging_bytes": figures.staging_bytes,
        "buckets": figures.buckets,
        "lanes": figures.parameters,
    }


def trace(trainer: Trainer, batches: Sequence[Batch], path: Path | None) -> None:
    """Profile some iterations; the Chrome trace goes to ``path`` (``None``: a rank without one)."""
    device = batches[0][0].device
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    loop = Loop(trainer, batches, 0)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(TRACED_ITERATIONS):
            loop.iterate()
        synchronize(device)
    if path is not None:
        profiler.export_chrome_trace(str(path))
