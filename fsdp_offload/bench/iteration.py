"""One job, each optimizer in turn, in one run: see :mod:`fsdp_offload.bench`."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.errors import OffloadError
from ..core.progress import progress
from ..optimizer.hybrid import HybridDeviceOptimizer
from . import arguments, machine
from .machine import GIB, Row, on_all_ranks
from .model import Job, layers_for, synthetic_batches
from .rows import Case, Trainer, make_trainer
from .table import ITERATIONS, line_of, markdown_table

PARTS: Final = ("forward", "backward", "update")
LEAD_IN: Final = 4
"""Iterations between the last synchronisation and the timed ones: state that was fetched while the
device stood still would make the first of them too short."""


class Loop:
    """Trains on; keeps each iteration's loss on the device, and points of its time.

    Args:
        trainer: what is measured.
        batches: taken in turn.
        iterations: all of them, timed or not.
    """

    def __init__(
        self, trainer: Trainer, batches: Sequence[tuple[Tensor, Tensor]], iterations: int
    ) -> None:
        self._trainer, self._batches = trainer, batches
        self._device = batches[0][0].device
        self._losses = torch.zeros(iterations, device=self._device)  # none is allocated later
        self._done = 0
        self._points: list[Any] = []

    def run(self, iterations: int, *, timed: bool = False) -> None:
        """That many iterations."""
        for _ in range(iterations):
            loss = self._trainer.model(*self._batches[self._done % len(self._batches)])
            self.mark(timed)
            loss.backward()
            self.mark(timed)
            self._losses[self._done].copy_(loss.detach())
            self._trainer.clip()
            self._trainer.optimizer.step()
            self._trainer.optimizer.zero_grad()
            self.mark(timed)
            self._done += 1

    def mark(self, timed: bool = True) -> None:
        """One more point: an event on the current stream, or of the host's clock on a CPU."""
        if timed and self._device.type == "cuda":
            self._points.append(torch.cuda.Event(enable_timing=True))
            self._points[-1].record()
        elif timed:
            self._points.append(time.perf_counter())

    def times_ms(self) -> Row:
        """Medians of iterations and their parts; the device must have passed all points."""
        pairs = zip(self._points, self._points[1:], strict=False)
        is_cuda = self._device.type == "cuda"
        spans = [a.elapsed_time(b) if is_cuda else 1e3 * (b - a) for a, b in pairs]
        parts = {name: spans[i :: len(PARTS)] for i, name in enumerate(PARTS)}
        totals = [sum(span) for span in zip(*parts.values(), strict=True)]
        row: Row = {f"{name}_ms": statistics.median(span) for name, span in parts.items()}
        row["iterations_ms"] = [round(total, 2) for total in totals]
        return {"iteration_ms": statistics.median(totals)} | row

    def losses(self) -> list[float]:
        """All of them; waits for the device."""
        found: list[float] = self._losses.tolist()
        return found


def finish(trainer: Trainer, device: torch.device) -> None:
    """Wait for updates under way, those on the CPU too, and for the device."""
    if isinstance(trainer.optimizer, HybridDeviceOptimizer):
        trainer.optimizer.synchronize()
    machine.synchronize(device)


def measure(
    trainer: Trainer, batches: Sequence[tuple[Tensor, Tensor]], warm_up: int, iterations: int
) -> Row:
    """Train ``warm_up`` and ``LEAD_IN`` iterations, then ``iterations`` timed ones."""
    device = batches[0][0].device
    loop = Loop(trainer, batches, warm_up + LEAD_IN + iterations)
    with progress(warm_up, "warming up", unit=" iterations") as bar:
        for _ in range(warm_up):
            loop.run(1)
            bar.advance()
    finish(trainer, device)
    dist.barrier()
    began = time.perf_counter()
    loop.run(LEAD_IN)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    loop.mark()
    loop.run(iterations, timed=True)
    enqueued = time.perf_counter()
    finish(trainer, device)
    row = loop.times_ms() | {"host_ms": 1e3 * (enqueued - began) / (LEAD_IN + iterations)}
    if device.type == "cuda":
        row["device_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    losses = loop.losses()
    return row | {"losses": losses, "loss": losses[-1]}


def traffic_of(optimizer: HybridDeviceOptimizer) -> Row:
    """What ``statistics()`` says of ours."""
    figures = optimizer.statistics()
    return {
        "host_gib": figures.host_arena_bytes / GIB,
        "device_state_gib": figures.device_state_bytes / GIB,
        "moved_bytes": figures.moved_bytes,
        "fetched_bytes": figures.fetched_bytes,
        "lanes": figures.parameters,
    }


def derived(row: Row, rows: Sequence[Row]) -> Row:
    """A measured row beside the on-device row of the same run, which clips if the row does."""
    if row["status"] != "ok":
        return {}
    found: Row = {}
    ms = row["iteration_ms"]
    if row.get("moved_bytes"):
        found["gbps"] = (row["moved_bytes"] + row["fetched_bytes"]) / ms / 1e6
    plain = [r for r in rows if r["kind"] == "plain" and r["status"] == "ok"]
    plain.sort(key=lambda r: (r["clip"] == "none") != (row["clip"] == "none"))
    if plain:
        base_ms = plain[0]["iteration_ms"]
        found |= {"exposed_ms": ms - base_ms, "of_on_device": ms / base_ms}
    return found


def run_row(
    case: Case, job: Job, batches: Sequence[tuple[Tensor, Tensor]], options: argparse.Namespace
) -> Row:
    """Build, measure, free; a row that fails on one rank has failed on all of them."""
    made: list[Trainer] = []
    # torchrun's default is one; updates on the CPU need what there is.
    threads = torch.get_num_threads()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))

    def build() -> Row:
        began = time.perf_counter()
        made.append(make_trainer(case, job, batches[0][0].device))
        return {"construction_s": time.perf_counter() - began}

    def train() -> Row:
        row = measure(made[0], batches, options.warm_up, options.iterations)
        return row | (traffic_of(made[0].optimizer) if case.is_ours else {})

    row = _attempt(build, "not available")
    if row["status"] == "ok":
        row |= _attempt(train, "failed")
    if row["status"] == "ok":
        row = machine.merged(row)
    if made and case.is_ours:
        with contextlib.suppress(OffloadError):  # the row says it already
            made[0].optimizer.close()
    torch.set_num_threads(threads)
    return {"name": case.name, "kind": case.kind, "clip": case.clip} | row


def _attempt(run: Callable[[], Row], failure: str) -> Row:
    """``run()`` with status "ok", or why not; if it fails on one rank, it failed on all."""
    row: Row
    try:
        row = run() | {"status": "ok"}
    except Exception as error:  # a row that fails must not end the run
        text = " ".join(str(error).split())[:300]
        row = {"status": failure, "reason": f"{type(error).__name__}: {text}"}
        traceback.clear_frames(error.__traceback__)  # they hold the model
    if not on_all_ranks(row["status"] == "ok") and row["status"] == "ok":
        row = {"status": failure, "reason": "on another rank"}
    return row


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    options = arguments.iterations().parse_args(argv)
    options.device = options.device or machine.default_device()
    sizes = arguments.with_sizes(options, is_small=options.device == "cpu")
    vars(options).update(sizes)
    if options.params is not None:
        options.layers = layers_for(options.params, options.dim, options.vocabulary)
    for name in options.rows.split(","):
        Case.parse(name)  # a wrong name ends the run before anything is built
    return options


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run all rows; rank 0 prints each as it is done, then the table."""
    options = parse(argv)
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    with machine.process_group(options.device, timeout_s=300) as device:
        sizes = ("layers", "dim", "vocabulary", "tokens", "seq", "shards", "checkpointed")
        job = Job(**{name: getattr(options, name) for name in sizes})
        batches = synthetic_batches(job, device)
        link = machine.measure_link(device, 10) if device.type == "cuda" else {}
        rows: list[Row] = []
        report: Row = {}
        for name in options.rows.split(","):
            machine.free_everything(device)
            rows.append(run_row(Case.parse(name), job, batches, options))
            found = [row | derived(row, rows) for row in rows]
            report = machine.publish(device, job, found, link, options.json)
            if dist.get_rank() == 0:
                print(line_of(found[-1], ITERATIONS), flush=True)
        if dist.get_rank() == 0:
            print(markdown_table(report, ITERATIONS), flush=True)
    return report
