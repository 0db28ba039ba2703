"""Draws peak device memory by time of an iteration, as an SVG, from JSON of the benchmark.

python docs/benchmarks/chart.py docs/benchmarks/iteration_h100_2026-11-24.json chart.svg
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 30, 56, 52
CURVES = {
    r"default(-d\w+)?-torchclip": ("this package, clipping", "#1f77b4"),
    r"backward(-d\w+)?": ('this package, overlap="backward", no clipping', "#2ca02c"),
}
POINTS = {
    "plain-torchclip": ("plain AdamW, no fp32 master", "#444444"),
    "torchao": ("torchao, no fp32 master, no clipping", "#d62728"),
    "cpuoffload-torchclip": ("FSDP2 CPUOffloadPolicy, no fp32 master", "#ff7f0e"),
}


class Point(NamedTuple):
    """One row."""

    gib: float
    ms: float
    label: str


def points_of(rows: list[dict[str, Any]], pattern: str) -> list[Point]:
    """Rows whose whole name matches and that were measured, by memory."""
    return sorted(
        Point(row["device_peak_gib"], row["iteration_ms"], row["name"])
        for row in rows
        if re.fullmatch(pattern, row["name"]) and "device_peak_gib" in row
    )


def chart(report: dict[str, Any]) -> str:
    """The SVG."""
    curves = {p: points_of(report["rows"], p) for p in (*CURVES, *POINTS)}
    found = [point for points in curves.values() for point in points]
    most_gib = 5 * (1 + int(max(point.gib for point in found) / 5))
    most_ms = 100 * (1 + int(max(point.ms for point in found) / 100))

    def at(point: Point) -> tuple[float, float]:
        x = LEFT + point.gib / most_gib * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - point.ms / most_ms * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    job, environment = report["job"], report["environment"]
    title = (
        f"{report['params'] / 1e9:.2f} G {job['shards']} parameters, {job['tokens']} tokens, "
        f"{environment['gpu']}, torch {environment['torch']}, commit {environment['commit']}"
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#333333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="13">{escape(title)}</text>',
    ]
    for gib in range(0, most_gib + 1, 5):
        x, y = at(Point(gib, 0, ""))
        out.append(f'<path d="M{x} {y}V{TOP}" stroke="#e5e5e5"/>')
        out.append(f'<text x="{x}" y="{y + 18}" text-anchor="middle">{gib}</text>')
    for ms in range(0, most_ms + 1, 200):
        x, y = at(Point(0, ms, ""))
        out.append(f'<path d="M{x} {y}H{WIDTH - RIGHT}" stroke="#e5e5e5"/>')
        out.append(f'<text x="{x - 8}" y="{y + 4}" text-anchor="end">{ms}</text>')
    out.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 12}" text-anchor="middle">'
               "GPU peak of torch's allocator, GiB</text>")  # fmt: skip
    out.append(f'<text x="{LEFT}" y="{TOP - 12}">ms per iteration</text>')
    for pattern, (label, colour) in (CURVES | POINTS).items():
        places = [at(point) for point in curves[pattern]]
        if not places:
            continue
        line = "L".join(f"{x} {y}" for x, y in places)
        out.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>' for x, y in places]
        row = len([text for text in out if "<!--key-->" in text])
        y = TOP + 16 + 18 * row
        out.append(f'<!--key--><circle cx="{LEFT + 14}" cy="{y - 4}" r="4" fill="{colour}"/>')
        out.append(f'<text x="{LEFT + 24}" y="{y}">{escape(label)}</text>')
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(chart(json.loads(source.read_text())))
