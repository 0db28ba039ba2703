"""Run one job with each optimizer in turn: see :mod:`fsdp_offload.bench`."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.backend import TimedEvent
from ..core.config import GIB
from ..core.devices import backend_for
from ..core.errors import ConfigError, OffloadError
from ..core.progress import Progress
from ..link import cores_per_rank
from ..optimizer.hybrid import HybridDeviceOptimizer
from . import machine
from .machine import Row
from .model import Job, synthetic_batches
from .rows import OURS, Case, Trainer, make_trainer

LEAD_IN: Final = 4
"""Untimed iterations after a synchronisation, during which prefetches ran early."""


def measure(
    trainer: Trainer,
    batches: Sequence[tuple[Tensor, Tensor]],
    warm_up: int,
    iterations: int,
    micro_batches: int = 1,
) -> Row:
    """Train ``warm_up`` and ``LEAD_IN`` iterations, then ``iterations`` timed ones."""
    device = batches[0][0].device
    stream = backend_for(device).current_stream()
    first = warm_up + LEAD_IN  # of the timed ones
    losses = torch.zeros(first + iterations, device=device)  # allocated once, before timing
    points: list[TimedEvent] = []
    accumulate = getattr(trainer.optimizer, "accumulate", contextlib.nullcontext)

    def train(index: int) -> None:
        def mark() -> None:
            if index >= first:
                points.append(stream.record_timed())

        for micro in range(micro_batches):
            loss = trainer.model(*batches[(index * micro_batches + micro) % len(batches)])
            mark()
            with accumulate() if micro + 1 < micro_batches else contextlib.nullcontext():
                loss.backward()
            mark()
        losses[index].copy_(loss.detach())
        trainer.clip()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        mark()

    with Progress(warm_up, "warming up", unit=" iterations") as bar:
        for index in range(warm_up):
            train(index)
            bar.advance()
    finish(trainer, device)
    dist.barrier()
    began = time.perf_counter()
    for index in range(warm_up, first):
        train(index)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    points.append(stream.record_timed())
    for index in range(first, first + iterations):
        train(index)
    enqueued = time.perf_counter()
    finish(trainer, device)
    row = times_ms(points, micro_batches) | {
        "host_ms": 1e3 * (enqueued - began) / (LEAD_IN + iterations)
    }
    if device.type == "cuda":
        row["device_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        row["device_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        row["alloc_retries"] = torch.cuda.memory_stats()["num_alloc_retries"]  # of the process
    return row | {"losses": losses.tolist(), "loss": losses[-1].item()}


def finish(trainer: Trainer, device: torch.device) -> None:
    """Wait for running updates, those on the CPU too, and for the device."""
    if isinstance(trainer.optimizer, HybridDeviceOptimizer):
        trainer.optimizer.synchronize()
    machine.synchronize(device)


def times_ms(points: Sequence[TimedEvent], micro_batches: int = 1) -> Row:
    """Compute medians of iterations and their parts; the device has passed all points."""
    spans = [one.elapsed_time(other) for one, other in pairwise(points)]
    size = 2 * micro_batches + 1
    whole = [spans[start : start + size] for start in range(0, len(spans), size)]
    totals = [sum(span) for span in whole]
    parts = {
        "iteration": totals,
        "forward": [sum(each[:-1:2]) for each in whole],
        "backward": [sum(each[1:-1:2]) for each in whole],
        "update": [each[-1] for each in whole],
    }
    row: Row = {f"{name}_ms": statistics.median(span) for name, span in parts.items()}
    return row | {"iterations_ms": [round(total, 2) for total in totals]}


def derived(row: Row, rows: Sequence[Row]) -> Row:
    """Compare a row with the first on-device row of the run that clips alike."""
    if row["status"] != "ok":
        return {}
    found: Row = {}
    ms = row["iteration_ms"]
    if row.get("moved_bytes"):
        found["gbps"] = (row["moved_bytes"] + row["fetched_bytes"]) / ms / 1e6
    for base in rows:
        clips_alike = (base["clip"] == "none") == (row["clip"] == "none")
        if base["kind"] == "plain" and base["status"] == "ok" and clips_alike:
            base_ms = base["iteration_ms"]
            return found | {"exposed_ms": ms - base_ms, "of_on_device": ms / base_ms}
    return found


def run_row(
    case: Case, job: Job, batches: Sequence[tuple[Tensor, Tensor]], options: argparse.Namespace
) -> Row:
    """Build, measure and free one row. A failure becomes a row, and does not end the run."""
    row: Row = {"name": case.name, "kind": case.kind, "clip": case.clip}
    trainer = None
    try:
        trainer = make_trainer(case, job, batches[0][0].device)
        row |= measure(trainer, batches, options.warm_up, options.iterations, options.micro_batches)
        if case.kind in OURS:
            figures = trainer.optimizer.statistics()
            names = "host_arena_bytes", "host_weight_bytes", "host_gradient_bytes"
            row |= {
                "host_gib": sum(getattr(figures, name) for name in names) / GIB,
                "moved_bytes": figures.moved_bytes,
                "fetched_bytes": figures.fetched_bytes,
                "lanes": figures.parameters,
            }
        row = machine.merged(row) | {"status": "ok"}
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        status = "not available" if isinstance(error, ImportError) else "failed"
        row |= {"status": status, "reason": f"{type(error).__name__}: {text}"}
    if trainer is not None and case.kind in OURS:
        with contextlib.suppress(OffloadError):  # the row reports it already
            trainer.optimizer.close()
    if "cap_bytes" in case.options:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return row


def run(options: argparse.Namespace) -> int:
    """Run the command ``bench``."""
    run_rows(options)
    sys.stdout.flush()
    os._exit(0)  # threads of gloo and of peers can abort the interpreter while it shuts down


def run_rows(options: argparse.Namespace, kind: type[Job] = Job) -> Row:
    """Run all rows of a ``kind`` of job; rank 0 prints each as it is done, then the table."""
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda", reason="torch sees no CUDA device", remedy="--device cpu"
        )
    # A wrong name ends the run before anything else.
    cases = [Case.parse(name) for name in options.rows.split(",")]
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # torchrun's default is one; updates on the CPU need all cores.
    torch.set_num_threads(cores_per_rank())
    with machine.process_group(options.device) as device:
        job = kind.of(options)
        batches = synthetic_batches(job, device)
        link = machine.measure_link(device, 10) if device.type == "cuda" else {}
        rows: list[Row] = []
        report: Row = {}
        for case in cases:
            machine.free_everything(device)
            rows.append(run_row(case, job, batches, options))
            found = [row | derived(row, rows) for row in rows]
            report = machine.publish(device, job, found, link, options.json)
            if dist.get_rank() == 0:
                print(line_of(found[-1], ITERATIONS), flush=True)
        if dist.get_rank() == 0:
            note = "\nA run on the CPU shows that rows work, not their speed."
            print(markdown_table(report, ITERATIONS) + note * (device.type == "cpu"), flush=True)
    return report


# --------------------------------------------------------------------------- the report

Columns = Sequence[tuple[str, str, str]]  # head, key of the figure, format

ITERATIONS: Final[Columns] = (
    ("iteration, ms", "iteration_ms", ".1f"),
    ("update, ms", "update_ms", ".1f"),
    ("exposed, ms", "exposed_ms", ".1f"),
    ("of on-device", "of_on_device", ".3f"),
    ("GB/s", "gbps", ".1f"),
    ("device peak, GiB", "device_peak_gib", ".2f"),
    ("reserved, GiB", "device_reserved_gib", ".2f"),
    ("host, GiB", "host_gib", ".2f"),
    ("loss", "loss", ".4f"),
)


def _cell(row: Mapping[str, Any], key: str, form: str) -> str:
    return "" if row.get(key) is None else format(row[key], form)


def markdown_table(report: Mapping[str, Any], all_columns: Columns) -> str:
    """Format the run, a line per row, then the rows that failed and why."""
    ran = [row for row in report["rows"] if row["status"] == "ok"]
    columns = [column for column in all_columns if any(_cell(row, *column[1:]) for row in ran)]
    cells = [["row", *(head for head, _, _ in columns)], ["---"] * (1 + len(columns))]
    cells += [[row["name"], *(_cell(row, *column[1:]) for column in columns)] for row in ran]
    lines = [describe(report), "", *(f"| {' | '.join(line)} |" for line in cells)]
    if rest := [row for row in report["rows"] if row["status"] != "ok"]:
        lines += ["", *(f"- {row['name']}: {row['status']}: {row['reason']}" for row in rest)]
    return "\n".join(lines)


def describe(report: Mapping[str, Any]) -> str:
    """Describe the job, the machine and its link."""
    job, machine, link = report["job"], report["environment"], report.get("link")
    unit, size = ("B", 1e9) if report["params"] >= 5e8 else ("M", 1e6)
    words = [
        f"{job['ranks']} rank{'s' if job['ranks'] > 1 else ''}",
        f"{report['params'] / size:.3g}{unit} parameters",
        f"{job['shards']} shards",
        f"{job['tokens']} tokens per rank",
        machine.get("gpu", "CPU"),
        f"torch {machine['torch']}",
        f"commit {machine.get('commit', 'unknown')}",
        *(f"{name}={value}" for name, value in machine["variables"].items()),
    ]
    if not link:
        return f"{', '.join(words)}."
    ways = (f"{link[key]:.1f}" for key in ("h2d_gbps", "d2h_gbps", "h2d+d2h_gbps"))
    return f"{', '.join(words)}. Link, GB/s: {' / '.join(ways)} (in / out / both)."


def line_of(row: Mapping[str, Any], columns: Columns) -> str:
    """Format one row as a line, printed as soon as it is done."""
    if row["status"] != "ok":
        return f"{row['name']}: {row['status']}: {row['reason']}"
    cells = [(head, _cell(row, key, form)) for head, key, form in columns]
    return f"{row['name']}: " + "; ".join(f"{head} {text}" for head, text in cells if text)
