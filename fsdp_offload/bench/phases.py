"""Everything leaves the device and comes back: time against the link, memory, many cycles.

Usage::

    python -m fsdp_offload.bench.phases [--params 1.33e9] [--json out.json]
    torchrun --nproc-per-node 4 -m fsdp_offload.bench.phases
    python -m fsdp_offload.bench.phases --device cpu

Each rank holds the shards of ``--params`` bf16 parameters and their fp32 AdamW state (2.5 and
9.9 GiB with the default), a GPT's tensors under FSDP2. The link (pinned copies of 256 MiB, out, in
and both at once) is measured in the same run, then each way of :mod:`.ways`: its first cycle,
``--repeats`` later ones (medians), the device memory that the driver says is free meanwhile, bits.
All ranks move at the same time; seconds are those of the slowest; 0.1 s lie between leaving and
coming back. Then ``--cycles`` cycles in a row of the rows named by ``--endure``: memory after the
second and the last, bits after each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from ..device import free_bytes, release_cached
from ..errors import ConfigError
from .machine import (
    Row,
    environment,
    free_everything,
    measure_link,
    process_group,
    resident_set_bytes,
    synchronize,
)
from .model import Job, layers_for
from .table import GIB, PHASES, line_of, markdown_table
from .ways import Way, all_ways, fill, same_bits

SMALL: dict[str, Any] = {"dim": 128, "vocabulary": 512, "seq": 128, "tokens": 128}
DEFAULTS = {
    "cuda": {"params": 1.33e9, "repeats": 5, "cycles": 200},
    "cpu": {"params": 1e6, "repeats": 2, "cycles": 5},
}

AWAY_S: Final = 0.1
"""Seconds away, in which a job would generate. After torch's allocator has given memory back, the
first copies to new memory take longer for about 20 ms (likely the driver clears what it got):
``back_at_once_s`` is a cycle without the pause."""


class Run:
    """One run: the link, the rows, the cycles."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.has_driver = device.type == "cuda"
        sizes: dict[str, Any] = {} if self.has_driver else SMALL
        shape = Job(**sizes)
        layers = layers_for(options.params * dist.get_world_size(), shape.dim, shape.vocabulary)
        self.job = Job(layers=layers, **sizes)
        self.link = measure_link(device, options.repeats, dist.barrier) if self.has_driver else {}

    def report(self) -> Row:
        """Everything, as it goes into the JSON file."""
        rows = [self._row(name) for name in self.options.rows.split(",")]
        endured = [self._endure(name) for name in self.options.endure.split(",") if name]
        return {
            "bench": "phases",
            "environment": environment(self.device.type),
            "job": asdict(self.job)
            | {"ranks": dist.get_world_size(), "repeats": self.options.repeats},
            "link": self.link,
            "rows": rows,
            "endurance": endured,
        }

    def _row(self, name: str) -> Row:
        row = self._with_way(name, self._measure)
        if dist.get_rank() == 0:
            print(line_of(row, PHASES), flush=True)
        return row

    def _with_way(self, name: str, run: Callable[[Way], Row]) -> Row:
        """What ``run`` finds, if all ranks can make the way; a way that fails ends no run."""
        way, row = None, {"name": name}
        try:
            way = all_ways()[name](self.job, self.device)
        except Exception as error:  # a peer may raise anything
            row |= {"status": "not available", "reason": f"{type(error).__name__}: {error}"}
        failed = self._slowest([float(way is None)])[0] > 0
        if way is not None and failed:
            row |= {"status": "not available", "reason": "another rank could not make it"}
        elif way is not None:
            row |= {"status": "ok", **run(way)}
        if way is not None:
            way.close()
            del way
        free_everything(self.device)
        return row

    def _measure(self, way: Way) -> Row:
        """The first cycle, the next ones, and what they leave behind."""
        fill(way.tensors, self.device)
        n_bytes = sum(tensor.nbytes for tensor in way.tensors)
        out, back, freed = [], [], []
        for _ in range(1 + self.options.repeats):
            release_cached(self.device)
            before = self._free_bytes()
            out.append(self._seconds(way.leave))
            freed.append((self._free_bytes() - before) / n_bytes)
            self._generate()
            back.append(self._seconds(way.come_back))
        way.leave()
        at_once = self._seconds(way.come_back)
        out, back = self._slowest(out), self._slowest(back)
        row: Row = {
            "n_bytes": n_bytes,
            "first_out_s": out[0],
            "first_back_s": back[0],
            "out_s": statistics.median(out[1:]),
            "back_s": statistics.median(back[1:]),
            "all_out_s": out,
            "all_back_s": back,
            "back_at_once_s": self._slowest([at_once])[0],
            "construction_s": way.construction_s,
            "same_bits": self._all(same_bits(way.tensors, self.device)),
        }
        self._add_rates(row, n_bytes * way.directions, way.directions)
        if self.has_driver and way.directions == 1:
            row["freed_share"] = -max(self._slowest([-share for share in freed]))
        if host_bytes := way.host_bytes():
            row["host_over_payload"] = host_bytes / n_bytes
            row["pin_s"] = way.pin_seconds()
            row["pin_s_per_gib"] = way.pin_seconds() / (host_bytes / GIB)
        return row

    def _add_rates(self, row: Row, n_bytes: int, directions: int) -> None:
        """GB/s, and shares of the link in the same direction or directions."""
        for way, raw in (("out", "d2h"), ("back", "h2d")):
            row[f"{way}_gbps"] = n_bytes / row[f"{way}_s"] / 1e9
            if self.link:
                link = self.link["h2d+d2h_gbps" if directions == 2 else f"{raw}_gbps"]
                row[f"{way}_of_link"] = row[f"{way}_gbps"] / link
                row[f"first_{way}_of_link"] = n_bytes / row[f"first_{way}_s"] / 1e9 / link
                row[f"worst_{way}_of_link"] = n_bytes / max(row[f"all_{way}_s"]) / 1e9 / link

    def _endure(self, name: str) -> Row:
        """Many cycles: what the process and the device hold after the second and the last."""
        row = self._with_way(name, self._many)
        row["rss_bytes_closed"] = resident_set_bytes()
        return row

    def _many(self, way: Way) -> Row:
        row: Row = {"cycles": self.options.cycles, "same_bits": True}
        fill(way.tensors, self.device)
        held: list[Row] = []
        for _ in range(self.options.cycles):
            way.leave()
            way.come_back()
            row["same_bits"] &= same_bits(way.tensors, self.device)
            held.append(self._held())
        row["same_bits"] = self._all(row["same_bits"])
        first, last = held[min(1, len(held) - 1)], held[-1]
        row |= {f"{key}_first": value for key, value in first.items()}
        return row | {f"{key}_last": value for key, value in last.items()}

    def _held(self) -> Row:
        row: Row = {"rss_bytes": resident_set_bytes()}
        if self.has_driver:
            release_cached(self.device)
            allocated = torch.cuda.memory_allocated()
            row["device_free_bytes"] = self._free_bytes()
            row["fragmented_bytes"] = torch.cuda.memory_reserved() - allocated
        return row

    def _generate(self) -> None:
        """Stands for what happens meanwhile: see ``AWAY_S``."""
        if self.has_driver:
            time.sleep(AWAY_S)

    def _seconds(self, run: Callable[[], None]) -> float:
        synchronize(self.device)
        dist.barrier()
        began = time.perf_counter()
        run()
        synchronize(self.device)
        return time.perf_counter() - began

    def _free_bytes(self) -> int:
        """As the driver says: what another process could take."""
        return free_bytes(self.device) or 0

    def _all(self, holds: bool) -> bool:
        """Whether it holds on each rank."""
        return not self._slowest([float(not holds)])[0]

    def _slowest(self, values: list[float]) -> list[float]:
        """The largest of all ranks, per cycle."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        found: list[float] = tensor.tolist()
        return found


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Options; what is left out depends on the device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--params", type=float, help="of each rank's shards (1.33e9; CPU: 1e6)")
    parser.add_argument("--repeats", type=int, help="cycles after the first (5; CPU: 2)")
    parser.add_argument("--cycles", type=int, help="cycles in a row (200; CPU: 5)")
    parser.add_argument("--rows", default=",".join(all_ways()))
    parser.add_argument("--endure", default="offloader,fixed", help="rows; may be empty")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    for name, value in DEFAULTS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name in (*options.rows.split(","), *filter(None, options.endure.split(","))):
        if name not in all_ways():
            raise ConfigError(
                f"row {name!r}", reason="unknown", remedy=f"choose from {', '.join(all_ways())}"
            )
    for name in ("params", "repeats", "cycles"):
        if getattr(options, name) < 1:
            raise ConfigError(
                f"--{name} {getattr(options, name)}", reason="not positive", remedy="use 1 or more"
            )
    return options


def main(argv: list[str] | None = None) -> Row:
    """Run all rows; rank 0 prints them and a table, and with ``--json`` writes everything."""
    options = parse(argv)
    with process_group(options.device, with_host=True) as device:
        report = Run(options, device).report()
        if dist.get_rank() == 0:
            if options.json:
                options.json.write_text(json.dumps(report, indent=1) + "\n")
            print(markdown_table(report))
    return report


if __name__ == "__main__":
    main()
