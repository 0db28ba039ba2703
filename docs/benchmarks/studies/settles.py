"""How soon ``device_memory="auto"`` has taken what it takes, for several jobs.

    python docs/benchmarks/studies/settles.py --jobs 1.33,6.69,7.9 --iterations 30 --json out.json

Each job (G parameters) is trained by the default of the package in a process of its own, once for
each allocator setting. A job settles in the first iteration from which on the median of five stays
within 3 % of the last one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from fsdp_offload.bench import machine
from fsdp_offload.bench.model import Job, synthetic_batches
from fsdp_offload.bench.rows import Case, make_trainer

GIB = 2**30
JOBS = {
    "0.01": Job(layers=2, dim=256, vocabulary=1000, tokens=2048, seq=512),  # does it run?
    "1.33": Job(),
    "6.69": Job(layers=32, dim=4096, tokens=16384, checkpointed=True),
    "7.9": Job(layers=38, dim=4096, tokens=16384, checkpointed=True),
}
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
SETTINGS: dict[str, dict[str, str]] = {"default": {}, "expandable": EXPANDABLE}
SPAN, WITHIN, DUE = 5, 0.03, 13


def train(job: Job, iterations: int) -> dict[str, Any]:
    """Milliseconds of all iterations, GiB after each, and what was taken or given back."""
    found: dict[str, Any] = {"params": job.params, "out_of_memory": "", "changes": []}
    gib: dict[str, list[float]] = {"own": [], "reserved": [], "peak": []}
    with machine.process_group("cuda") as device:
        trainer = make_trainer(Case.parse("default-torchclip"), job, device)
        batches = synthetic_batches(job, device)
        points = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
        points[0].record()
        try:
            for index, point in enumerate(points[1:]):
                trainer.model(*batches[index % len(batches)]).backward()
                trainer.clip()
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()
                point.record()
                now = trainer.optimizer.statistics()
                if now.memory_change not in ("", *found["changes"][-1:]):
                    found["changes"].append(now.memory_change)
                gib["own"].append(now.staging_bytes / GIB)
                gib["reserved"].append(torch.cuda.memory_reserved() / GIB)
                gib["peak"].append(torch.cuda.max_memory_allocated() / GIB)
        except torch.OutOfMemoryError as error:
            found["out_of_memory"] = f"in iteration {len(gib['own']) + 1}: {str(error)[:200]}"
        torch.cuda.synchronize()
        done = pairwise(points[: len(gib["own"]) + 1])
        found["ms"] = [round(one.elapsed_time(other), 1) for one, other in done]
        free, total = torch.cuda.mem_get_info()
        found["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
        found["used_gib"], found["total_gib"] = (total - free) / GIB, total / GIB
        trainer.optimizer.close()
    return found | {f"{name}_gib": [round(x, 2) for x in values] for name, values in gib.items()}


def settles_in(ms: list[float]) -> int | None:
    """The first iteration, from 1 on, from which on medians of five stay near the last one."""
    medians = [statistics.median(ms[i : i + SPAN]) for i in range(len(ms) - SPAN + 1)]
    far = [i for i, ms in enumerate(medians) if abs(ms / medians[-1] - 1) > WITHIN]
    return None if not medians else far[-1] + 2 if far else 1


def show(name: str, row: dict[str, Any]) -> None:
    ms, settled = row["ms"], settles_in(row["ms"])
    medians = [f"{statistics.median(ms[i : i + SPAN]):.0f}" for i in range(0, len(ms), SPAN)]
    verdict = "PASS" if settled and settled <= DUE and not row["out_of_memory"] else "FAIL"
    print(f"\n{name}: {verdict}, settles in iteration {settled}, {row['used_gib']:.1f} of", end=" ")
    print(f"{row['total_gib']:.1f} GiB in use, {row['retries']} retries {row['out_of_memory']}")
    print("  ms, medians of five one after the other:", *medians)
    for kind in ("own", "reserved", "peak"):
        print(f"  {kind}, GiB:", *(f"{x:.1f}" for x in row[f"{kind}_gib"]))
    print(*(f"  {change}" for change in row["changes"]), sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", default="1.33,6.69,7.9")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print("ROW", json.dumps(train(JOBS[options.child], options.iterations)), flush=True)
        return
    rows: dict[str, Any] = {}
    for job in options.jobs.split(","):
        for setting in options.settings.split(","):
            command = [sys.executable, __file__, "--child", job]
            command += ["--iterations", str(options.iterations)]
            environment = os.environ | SETTINGS[setting]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
            if not (lines := [x for x in done.stdout.splitlines() if x.startswith("ROW ")]):
                print(f"\n{job} G, {setting}: FAIL, ended with {done.returncode}", flush=True)
                continue
            rows[f"{job} G, {setting}"] = json.loads(lines[0][4:])
            show(f"{job} G, {setting}", rows[f"{job} G, {setting}"])
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
