"""One job, each optimizer in turn, in one run: see :mod:`fsdp_offload.bench`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ConfigError
from .bound import baseline_of, derived
from .cases import DEFAULT_ROWS, OURS, Case
from .machine import (
    Row,
    environment,
    free_everything,
    measure_collectives,
    measure_link,
    process_group,
)
from .model import Job, layers_for, synthetic_batches
from .table import line_of, markdown_table
from .timing import measure, trace
from .trainers import Trainer, make_trainer

# What rows of several ranks are merged by; every other figure is rank 0's.
SLOWEST = (
    "iteration_ms",
    "iteration_ms_min",
    "iteration_ms_max",
    "wall_ms",
    "host_ms",
    "forward_ms",
    "backward_ms",
    "update_ms",
    "device_peak_bytes",
    "device_allocations",
    "rss_growth_bytes",
    "moved_bytes",
    "fetched_bytes",
    "link_bytes",
    "host_bytes",
    "construction_s",
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_offload.bench", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("--rows", default=",".join(DEFAULT_ROWS), help="names joined by commas; default: all")
    add("--iterations", type=int, default=10, help="timed ones per row")
    add("--warm-up", type=int, default=14, help="iterations before them; order changes after 12")
    add("--layers", type=int, default=24)
    add("--params", type=float, help="choose --layers for this many parameters, such as 3.14e9")
    add("--dim", type=int, default=2048)
    add("--vocabulary", type=int, default=60000)
    add("--tokens", type=int, default=8192, help="per iteration and rank")
    add("--seq", type=int, default=2048)
    add("--blocks-per-group", type=int, default=1, help="blocks that FSDP2 gathers together")
    add("--shards", choices=("bf16", "fp32"), default="bf16")
    add("--seed", type=int, default=0)
    add("--prefetch-bytes", help="for rows that do not say p4GiB or the like")
    add("--bucket-bytes", help="for rows that do not say b64MiB or the like")
    add("--slots", type=int, help="for rows that do not say s6 or the like")
    add("--deterministic", action="store_true", help="kernels whose bits repeat, to compare losses")
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--time-limit-s", type=float, help="no row begins after that")
    add("--json", type=Path, help="all figures; written after each row")
    add("--plot", type=Path, help="a picture of the iterations; needs matplotlib")
    add("--trace", type=Path, help="Chrome trace of three more iterations of one row")
    add("--trace-row", help="which; default: the last row of ours")
    options = parser.parse_args(argv)
    if options.params is not None:
        options.layers = layers_for(options.params, options.dim, options.vocabulary)
    return options


def cases_of(options: argparse.Namespace) -> list[Case]:
    """What ``--rows`` names, with the sizes of the command line.

    Raises:
        ConfigError: a name is not understood, or comes twice.
    """
    names = [name for name in options.rows.split(",") if name]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"--rows {options.rows}", reason=f"{twice[0]} comes twice", remedy="name it once"
        )
    sizes = {"prefetch_bytes": options.prefetch_bytes, "bucket_bytes": options.bucket_bytes}
    given: dict[str, Any] = {k: v for k, v in sizes.items() if v is not None}
    if options.slots is not None:
        given["slots"] = options.slots
    return [Case.parse(n, **(given if n.split("-")[0] in OURS else {})) for n in names]


class Run:
    """Rows of one run on one machine, and what they are compared with."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._options, self._device = options, device
        self._began = time.perf_counter()
        sizes = ("layers", "dim", "vocabulary", "tokens", "seq", "blocks_per_group")
        self.job = Job(**{name: getattr(options, name) for name in (*sizes, "shards", "seed")})
        self.cases = cases_of(options)
        ours = [case.name for case in self.cases if case.is_ours]
        self._traced = options.trace_row or next(reversed(ours), None)
        self._batches = synthetic_batches(self.job, device)
        self._environment = environment(device.type)
        self._link: Row | None = None
        self._rows: list[Row] = []
        self._losses: dict[tuple[object, ...], list[float]] = {}  # of the first row per promise

    def report(self) -> dict[str, Any]:
        """Everything so far."""
        job = {name: getattr(self.job, name) for name in self.job.__dataclass_fields__}
        sizes = {
            "ranks": dist.get_world_size(),
            "warm_up": self._options.warm_up,
            "iterations": self._options.iterations,
            "deterministic": self._options.deterministic,
        }
        return {
            "environment": self._environment,
            "job": job | sizes,
            "link": self._link,
            "rows": [row | self._derived(row) for row in self._rows],
        }

    def all(self) -> dict[str, Any]:
        """Measure the link, then every row until the time is over."""
        if self._device.type == "cuda":
            self._link = measure_link(self._device, 10, self._barrier)
            self._link |= measure_collectives(self._device, 3, self._barrier)
            self._link = _merged(_gathered(self._link), smallest=True)
            free_everything(self._device)
        for case in self.cases:
            if self._is_late():
                row: Row = {"status": "not run", "reason": "the time limit was reached"}
            else:
                row = self._row(case)
            self._rows.append(_named(case) | row)
            self._tell()
        if self._options.trace and self._traced not in {r["name"] for r in self._ok()}:
            print(f"no trace: the row {self._traced} was not run", file=sys.stderr)
        return self.report()

    def _ok(self) -> list[Row]:
        return [row for row in self._rows if row["status"] == "ok"]

    def _row(self, case: Case) -> Row:
        """Build, measure, free; an error becomes the row's reason, the same on all ranks."""
        free_everything(self._device)
        base = torch.cuda.memory_allocated() if self._device.type == "cuda" else 0
        made: list[Trainer] = []

        def build() -> Row:
            began = time.perf_counter()
            made.append(make_trainer(case, self.job, self._device))
            return {"construction_s": time.perf_counter() - began}

        row = _attempt(build, "not available")
        if row["status"] == "ok":
            row |= _attempt(lambda: self._measured(case, made[0], base), "failed")
        if row["status"] == "ok":
            row = _merged(_gathered(row))
        for trainer in made:
            with contextlib.suppress(Exception):
                trainer.close()
        made.clear()
        free_everything(self._device)
        if self._device.type == "cuda":
            row["left_bytes"] = torch.cuda.memory_allocated() - base
        return row

    def _measured(self, case: Case, trainer: Trainer, base: int) -> Row:
        options = self._options
        row = measure(
            trainer,
            self._batches,
            warm_up=options.warm_up,
            iterations=options.iterations,
            barrier=self._barrier,
            base_bytes=base,
        )
        if case.is_ours and (plan := trainer.plan()):
            row["plan"] = plan
        if options.trace and case.name == self._traced:
            trace(trainer, self._batches, options.trace if dist.get_rank() == 0 else None)
        losses = row.pop("losses")
        key = case.same_bits_as(self.job.shards)
        first = self._losses.setdefault(key, losses) if key else None
        if first is not None and first is not losses:
            # By repr: NaN is equal to itself here, since both runs broke in the same place.
            row["same_losses"] = repr(losses) == repr(first)
        return row | {"losses": losses, "loss": losses[-1]}

    def _derived(self, row: Row) -> Row:
        return derived(row, baseline_of(row, self._rows), self._link)

    def _tell(self) -> None:
        if dist.get_rank() != 0:
            return
        row = self._rows[-1] | self._derived(self._rows[-1])
        print(line_of(row), flush=True)
        if self._options.json:
            self._options.json.parent.mkdir(parents=True, exist_ok=True)
            self._options.json.write_text(json.dumps(self.report(), indent=1) + "\n")

    def _is_late(self) -> bool:
        limit = self._options.time_limit_s
        late = limit is not None and time.perf_counter() - self._began > limit
        return bool(_gathered(late)[0])

    def _barrier(self) -> None:
        _gathered(None)


def _named(case: Case) -> Row:
    return {"name": case.name, "kind": case.kind, "clip": case.clip}


def _gathered(value: Any) -> list[Any]:
    """``value`` of every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _merged(rows: list[Row], *, smallest: bool = False) -> Row:
    """One row of all ranks' rows: the slowest, the largest, all of them alike."""
    merged = dict(rows[0])
    for name in merged:
        values = [row[name] for row in rows]
        if smallest:
            merged[name] = min(values)
        elif name in SLOWEST:
            merged[name] = max(values)
        elif name == "same_losses":
            merged[name] = all(values)
    return merged


def _attempt(run: Callable[[], Row], failure: str) -> Row:
    """``run()`` with status "ok", or why not; if it fails on one rank, it failed on all."""
    row: Row
    try:
        row = run() | {"status": "ok"}
    except Exception as error:  # a row that fails must not end the run
        if failure == "failed":
            traceback.print_exc()
        text = " ".join(str(error).split())[:300]
        row = {"status": failure, "reason": f"{type(error).__name__}: {text}"}
        traceback.clear_frames(error.__traceback__)  # they hold the model
    bad = [other for other in _gathered((row["status"], row.get("reason"))) if other[0] != "ok"]
    if bad and row["status"] == "ok":
        row = {"status": failure, "reason": f"on another rank: {bad[0][1]}"}
    return row


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run all rows; rank 0 prints each as it is done, then the table."""
    options = parse(argv)
    cases_of(options)  # a wrong name is told before anything is built
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    with process_group(options.device, with_host=True, timeout_s=300) as device:
        run = Run(options, device)
        report = run.all()
        if dist.get_rank() == 0:
            print(markdown_table(report), flush=True)
            if options.plot:
                _plot(report, options.plot)
    return report


def _plot(report: dict[str, Any], path: Path) -> None:
    from .plot import plot_iterations

    try:
        plot_iterations(report, path)
    except ImportError as error:
        print(f"no plot: {error}", file=sys.stderr)
