"""``timeline()``: a picture of what device and links did during a few iterations.

``record`` runs torch's profiler, ``spans_of`` reads its Chrome trace and ``svg_of`` makes an SVG of
what was read. The last two are pure.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple
from xml.sax.saxutils import escape

import torch
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from ..core.errors import ConfigError
from ..core.storage import is_profiling

STEP: Final = "step"
MARK: Final = "fsdp_offload.step"
COLOURS: Final = {
    "compute": "#1f77b4",
    "collectives": "#8c564b",
    "updates": "#d62728",
    "H2D": "#2ca02c",
    "D2H": "#ff7f0e",
    "host lane": "#9467bd",
}
"""Rows, from top to bottom. *host lane*: its copies are kernels, whose names have no direction."""

_BY_NAME: Final = {
    "H2D": "HtoD|HostToDevice",
    "D2H": "DtoH|DeviceToHost",
    "host lane": "^_copy_across",
    "collectives": "^(nccl|rccl)",
    "updates": "^_(adam|update|decode|encode|pack|unpack|key)(_|$)|Fused(Adam|Sgd|Adagrad)",
}
_ON_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_OF_STEP: Final = "Optimizer.step#"  # torch's own annotation around the step of any optimizer
_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 1200, 90, 20, 40, 30  # pixels


class Span(NamedTuple):
    """Something was busy; in row :data:`STEP`, where ``step()`` began, without an end."""

    row: str
    start_ms: float
    end_ms: float


@contextlib.contextmanager
def record(optimizer: Optimizer, device: torch.device, path: Path) -> Iterator[None]:
    """See :meth:`.HybridDeviceOptimizer.timeline`."""
    _check(path)
    flag = torch.zeros((), device=device)

    def mark(*_: object) -> None:
        """The caller's stream gets here when it has done all that comes before ``step()``."""
        with record_function(MARK):
            flag.zero_()

    activities = {ProfilerActivity.CPU}
    if device.type != "cpu":
        activities |= supported_activities()
        torch.accelerator.synchronize(device)  # what came before is not of the picture
    hook = optimizer.register_step_pre_hook(mark)
    try:
        with profile(activities=activities, acc_events=True) as profiled:  # else torch warns
            yield
            is_whole = is_profiling()
    finally:
        hook.remove()
    if not is_whole:
        raise _refused(path, "a profiler that was used inside ended the recording")
    if path.suffix == ".json":
        profiled.export_chrome_trace(str(path))
        return
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        spans = spans_of(json.loads(trace.read_text(encoding="utf-8", errors="replace")))
    path.write_text(svg_of(spans), encoding="utf-8")


def _check(path: Path) -> None:
    """Raises ``ConfigError`` if no picture can be recorded and written to ``path``."""
    if path.suffix not in (".json", ".svg"):
        remedy = "end it with .svg for a picture, or .json for a Chrome trace"
        raise _refused(path, f"the suffix {path.suffix!r} says neither of the two forms", remedy)
    if path.is_dir() or not path.parent.is_dir():
        reason = "it is a folder" if path.is_dir() else "its folder does not exist"
        raise _refused(path, reason, "make the folder first, and name a file in it")
    if is_profiling():
        raise _refused(path, "a profiler of torch, or another timeline, is recording already")


def _refused(path: Path, reason: str, remedy: str = "use one at a time") -> ConfigError:
    return ConfigError(f"timeline({str(path)!r})", reason=reason, remedy=remedy)


def spans_of(trace: dict[str, Any]) -> list[Span]:
    """What a Chrome trace of torch's profiler says; ms since the first of it.

    Without events of a device: operators inside of any optimizer's ``step()`` are updates, and
    the others compute.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    has_device = any(event.get("cat") in _ON_DEVICE for event in events)
    rows = _rows_of_device(events) if has_device else _rows_of_host(events)
    marks = _annotations(events, "gpu_user_annotation", MARK)
    host_marks = _annotations(events, "user_annotation", MARK)
    if len(marks) != len(host_marks):
        marks = host_marks
    found = [(row, event["ts"], event["ts"] + event["dur"]) for row, event in rows]
    found += [(STEP, event["ts"], event["ts"]) for event in marks]
    zero = min((start for _, start, _ in found), default=0.0)
    return sorted(Span(row, (start - zero) / 1e3, (end - zero) / 1e3) for row, start, end in found)


def _annotations(events: Sequence[dict[str, Any]], kind: str, prefix: str) -> list[dict[str, Any]]:
    return [e for e in events if e.get("cat") == kind and e["name"].startswith(prefix)]


def _rows_of_device(events: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """With the row of each. ``tid`` is the stream. Whatever class updates, its kernels are on a
    stream of their own, or were launched by a ``step()`` on the caller's."""
    steps = _annotations(events, "gpu_user_annotation", _OF_STEP)
    callers = {event["tid"] for event in _annotations(events, "gpu_user_annotation", MARK)}
    found: list[tuple[str, dict[str, Any]]] = []
    for event in (e for e in events if e.get("cat") in _ON_DEVICE):
        names = (row for row, pattern in _BY_NAME.items() if re.search(pattern, event["name"]))
        found.append((next(names, "compute"), event))
    updating = {e["tid"] for e in (*steps, *(e for row, e in found if row == "updates"))} - callers
    for row, event in found:
        is_update = event["tid"] in updating or _is_inside(event, steps)
        yield "updates" if row == "compute" and is_update else row, event


def _rows_of_host(events: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """With the row of each."""
    steps = _annotations(events, "user_annotation", _OF_STEP)
    for event in (e for e in events if e.get("cat") == "cpu_op"):
        yield "updates" if _is_inside(event, steps) else "compute", event


def _is_inside(event: dict[str, Any], spans: Sequence[dict[str, Any]]) -> bool:
    """Of one that has the same stream or thread."""
    same = [span for span in spans if span["tid"] == event["tid"]]
    return any(0 <= event["ts"] - s["ts"] <= s["dur"] - event["dur"] for s in same)


def merged(spans: Sequence[Span], *, gap_ms: float = 0.0) -> list[tuple[float, float]]:
    """When any of them was busy: sorted, and apart by more than ``gap_ms``."""
    found: list[tuple[float, float]] = []
    for _, start, end in sorted(spans, key=lambda span: span.start_ms):
        if found and start <= found[-1][1] + gap_ms:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def legend(spans: Sequence[Span]) -> list[str]:
    """Two lines: how long each row was busy, and how long each whole iteration took."""
    busy = [
        f"{row} {sum(end - start for start, end in merged(found)):.1f}"
        for row in COLOURS
        if (found := [span for span in spans if span.row == row])
    ]
    marks = sorted(span.start_ms for span in spans if span.row == STEP)
    whole = [f"{after - before:.1f}" for before, after in pairwise(marks)]
    return [
        f"busy, ms: {', '.join(busy) or 'nothing was recorded'}",
        f"from step to step, ms: {', '.join(whole) or 'fewer than two steps were recorded'}",
    ]


def svg_of(spans: Sequence[Span]) -> str:
    """An SVG: a row for each kind of work, a line where each step began, the legend."""
    rows = [row for row in COLOURS if any(span.row == row for span in spans)]
    most_ms = max((span.end_ms for span in spans), default=0.0) or 1.0
    per_ms = (_WIDTH - _LEFT - _RIGHT) / most_ms
    lines = [line for text in legend(spans) for line in textwrap.wrap(text, 170)]
    bottom = _TOP + _ROW * len(rows)
    height = bottom + 48 + 18 * len(lines)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12" fill="#333333">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]

    def write(x: float, y: float, anchor: str, text: str) -> None:
        out.append(f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>')

    digit = 10.0 ** math.floor(math.log10(most_ms / 5))
    every_ms = digit * (1 if most_ms < 10 * digit else 2 if most_ms < 20 * digit else 5)
    for tick in range(int(most_ms / every_ms) + 1):
        x = _LEFT + tick * every_ms * per_ms
        out.append(f'<path d="M{x:.1f} {bottom}V{_TOP}" stroke="#e5e5e5"/>')
        write(x, bottom + 16, "middle", f"{tick * every_ms:.6g}")
    write(_LEFT - 20, bottom + 16, "end", "ms")
    for index, row in enumerate(rows):
        y = _TOP + _ROW * index
        path = ""
        for start, end in merged([s for s in spans if s.row == row], gap_ms=0.25 / per_ms):
            x, width = _LEFT + start * per_ms, max((end - start) * per_ms, 0.25)
            path += f"M{x:.2f} {y + 4}h{width:.2f}v{_ROW - 8}h-{width:.2f}z"
        write(_LEFT - 8, y + 19, "end", row)
        out.append(f'<path d="{path}" fill="{COLOURS[row]}"/>')
    for x in [_LEFT + span.start_ms * per_ms for span in spans if span.row == STEP]:
        out.append(f'<path d="M{x:.1f} {bottom}V{_TOP - 8}" stroke="#333333"/>')
        write(x, _TOP - 12, "middle", "step()")
    for index, text in enumerate(lines):
        write(_LEFT, bottom + 40 + 18 * index, "start", text)
    return "\n".join([*out, "</svg>", ""])
