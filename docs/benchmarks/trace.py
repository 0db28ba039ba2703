"""One iteration as torch's profiler sees it, drawn: who works when, on the host and on the device.

    python docs/benchmarks/trace.py --row backward-d2GiB --svg docs/internals/profile.svg

Needs a GPU. The job is the benchmarks' (1.33B parameters, unless options say another), the row one
of theirs. Prints for how long each lane was busy in the iteration that it draws.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.append(str(Path(__file__).resolve().parents[1] / "pictures"))
from svg import WIDTH, Picture

from fsdp_offload.bench import machine
from fsdp_offload.bench.model import Job, synthetic_batches
from fsdp_offload.bench.rows import Case, make_trainer

LEFT, LANE, TOP = 98, 22, 42
SHOWN = {
    "kernels: model": ("GPU: model", "grey"),
    "kernels: updates": ("GPU: update", "violet"),
    "copies HtoD": ("to the GPU", "green"),
    "copies DtoH": ("to the CPU", "green"),
    "host: fetch": ("calls: fetch", "blue"),
    "host: update": ("calls: update", "blue"),
    "host: store": ("calls: store", "blue"),
    "host: wait": ("calls: wait", "red"),
}
SPANS = ("fetch", "update", "store", "wait")


def recorded(job: Job, row: str, warm_up: int) -> list[dict[str, Any]]:
    """The profiler's events of three iterations after ``warm_up``; the second is whole."""
    with machine.process_group("cuda") as device:
        trainer = make_trainer(Case.parse(row), job, device)
        batches = synthetic_batches(job, device)

        def iterate(index: int) -> None:
            with record_function("iteration"):
                trainer.model(*batches[index % len(batches)]).backward()
                trainer.clip()
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()

        for index in range(warm_up):
            iterate(index)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for index in range(3):
                iterate(index)
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            return json.loads(path.read_text())["traceEvents"]  # type: ignore[no-any-return]


def rows(events: Iterable[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """By row of the picture: start and length of each event, in microseconds."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    kernels: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event.get("ph") != "X":
            continue
        name, category = event["name"], event.get("cat", "")
        when = float(event["ts"]), float(event["dur"])
        if category == "gpu_memcpy":
            for way in ("HtoD", "DtoH"):
                if way in name:
                    found[f"copies {way}"].append(when)
        elif category == "kernel":
            kernels[event["args"]["stream"]].append(when)
        elif name.startswith("fsdp_offload::") and category != "gpu_user_annotation":
            span = name.removeprefix("fsdp_offload::")
            if span in SPANS:
                found[f"host: {span}"].append(when)
    busiest = sorted(kernels.values(), key=lambda some: -sum(length for _, length in some))
    return {**found, **dict(zip(("kernels: model", "kernels: updates"), busiest, strict=False))}


def merged(some: list[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Those with less than ``gap`` between them as one."""
    joined: list[tuple[float, float]] = []
    for begin, length in sorted(some):
        if joined and begin - sum(joined[-1]) < gap:
            first = joined[-1][0]
            joined[-1] = first, max(sum(joined[-1]), begin + length) - first
        else:
            joined.append((begin, length))
    return joined


def drawn(found: dict[str, list[tuple[float, float]]], start: float, stop: float) -> str:
    """The picture of ``start`` to ``stop`` as SVG."""
    scale = (WIDTH - LEFT - 14) / (stop - start)
    names = [name for name in SHOWN if name in found]
    bottom = TOP + len(names) * LANE
    picture = Picture(bottom + 22, "One iteration, as torch's profiler saw it")
    picture.text(12, 20, "One iteration, as torch's profiler saw it", 14, font_weight="bold")
    for tick in range(0, int((stop - start) / 1e3) + 1, 50 if stop - start < 1e6 else 500):
        x = LEFT + tick * 1e3 * scale
        picture.line([(x, TOP - 4), (x, bottom)], "grid")
        text = f"{tick} ms" if not tick else str(tick)
        picture.text(x, bottom + 14, text, fill="faint", anchor="middle")
    for index, name in enumerate(names):
        label, colour = SHOWN[name]
        top = TOP + index * LANE
        picture.text(12, top + 13, label)
        # Gaps of less than half a unit cannot be seen.
        for begin, length in merged(found[name], 0.5 / scale):
            first, last = max(begin, start), min(begin + length, stop)
            if first < last:  # a lane that is never idle is one span, from before the picture
                width = max((last - first) * scale, 0.3)
                picture.box(LEFT + (first - start) * scale, top, width, LANE - 6, colour)
    return picture.svg()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", default="backward-d2GiB")
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--svg", type=Path, required=True)
    for name in ("--layers", "--dim", "--tokens"):
        parser.add_argument(name, type=int)
    parser.add_argument("--checkpointed", action="store_true")
    parser.set_defaults(device="cuda")
    options = parser.parse_args()
    found = rows(recorded(Job.of(options), options.row, options.warm_up))
    model = sorted(found["kernels: model"])
    # Three iterations are alike: the middle third of the device's time is one of them.
    begin, end = model[0][0], model[-1][0]
    third = (end - begin) / 3
    start, stop = begin + third, begin + 2 * third
    options.svg.write_text(drawn(found, start, stop))
    print(f"one iteration of {third / 1e3:.1f} ms")
    for name, some in sorted(found.items()):
        inside = [min(sum(each), stop) - max(each[0], start) for each in merged(some, 0.0)]
        busy_ms = sum(length for length in inside if length > 0) / 1e3
        print(f"{name:18} {len(some):6} events in three, busy for {busy_ms:8.1f} ms of one")


if __name__ == "__main__":
    main()
