"""Draws the chart of README.md and fills in its first figures, from JSON of ``fsdp-offload bench``.

    python docs/benchmarks/chart.py

The job is the one of 7.9B parameters. Of a row that several files have, the newest counts.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "pictures"))
from svg import WIDTH, Picture

FOLDER = Path(__file__).resolve().parent
README = FOLDER.parents[1] / "README.md"
PATTERNS = ("whole_h[12]00_*.json", "iteration_h100_*_7.9G_*.json")
OURS = r"(default|forward|step|backward)(-(torchclip|clip|bf16|all|d\w+|c\d\w+|again))*"
LEAST_GBPS = 82
"""Both ways at once. Times of machines with slower links are not comparable."""
CURVES = {
    "clip": ("this package, clipping; 14 to 37 GiB: on an H200", "blue"),
    "none": ("this package, no clipping", "green"),
    "bf16": ('this package, moments="bf16", no clipping', "violet"),
}
PEERS = {
    "plain": ("AdamW, no fp32 master", "grey"),
    "torchao": ("torchao CPUOffloadOptimizer, no fp32 master, no clipping", "orange"),
    "cpuoffload": ("FSDP2 CPUOffloadPolicy, no fp32 master", "red"),
}
BYTES_OF_ADAMW, BYTES_ON_HOST = 16, 14
"""Weight and gradient in bf16, master and two moments in fp32; weight and master share two."""
CARD_GIB = 79.2
LEFT, RIGHT, BOTTOM, PLOT = 44, 12, 44, 200


class Point(NamedTuple):
    """One row."""

    gib: float
    ms: float
    name: str


def reports(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Of the job, the oldest first."""
    files = [file for pattern in PATTERNS for file in folder.glob(pattern)]
    files.sort(key=lambda file: re.findall(r"\d{4}-[\d-]+", file.name))
    found = [json.loads(file.read_text()) for file in files]
    return [each for each in found if each["link"]["h2d+d2h_gbps"] >= LEAST_GBPS]


def points(found: list[dict[str, Any]]) -> dict[str, list[Point]]:
    """By curve or peer, by memory."""
    rows = {row["name"]: row for report in found for row in report["rows"]}
    by_key: dict[str, list[Point]] = {}
    for name, row in rows.items():
        if row.get("status", "ok") != "ok" or "device_peak_gib" not in row:
            continue
        key = name.partition("-")[0]
        if re.fullmatch(OURS, name):
            key = next((word for word in ("clip", "bf16") if word in name), "none")
        elif key not in PEERS:
            continue
        point = Point(row["device_peak_gib"], row["iteration_ms"], name)
        by_key.setdefault(key, []).append(point)
    return {key: sorted(some) for key, some in by_key.items() if some}


def chart(found: list[dict[str, Any]], theme: str) -> str:
    """The SVG."""
    job, params = found[-1]["job"], found[-1]["params"]
    by_key = points(found)
    need_gib = BYTES_OF_ADAMW * params / 2**30
    most_gib = 10 * (1 + int(1.04 * need_gib / 10))
    most_ms = 500 * (1 + int(max(p.ms for some in by_key.values() for p in some) / 470))
    keys = {key: each for key, each in (CURVES | PEERS).items() if key in by_key}
    top = 66 + 17 * len(keys)
    height = top + PLOT + BOTTOM
    picture = Picture(height, f"Time of an iteration by GPU memory, {params / 1e9:.1f}B", theme)

    def at(gib: float, ms: float) -> tuple[float, float]:
        x = LEFT + gib / most_gib * (WIDTH - LEFT - RIGHT)
        return x, height - BOTTOM - ms / most_ms * PLOT

    picture.text(12, 20, f"{params / 1e9:.1f}B parameters on one H100 of 80 GB", 14,
                 font_weight="bold")  # fmt: skip
    x, y = at(CARD_GIB, most_ms)
    picture.box(x, y, WIDTH - RIGHT - x, PLOT, "no")
    picture.text(WIDTH - RIGHT - 4, y + 16, "more than 80 GB", fill="red", anchor="end")
    for gib in range(0, most_gib + 1, 20):
        picture.text(at(gib, 0)[0], height - BOTTOM + 15, str(gib), fill="faint", anchor="middle")
    for ms in range(0, most_ms + 1, 500 if most_ms <= 3000 else 1000):
        y = at(0, ms)[1]
        picture.line([(LEFT, y), (WIDTH - RIGHT, y)], "grid")
        picture.text(LEFT - 5, y + 4, str(ms), fill="faint", anchor="end")
    picture.text(12, top - 10, f"ms per iteration of {job['tokens']} tokens", fill="faint")
    picture.text((LEFT + WIDTH) / 2, height - 10, "GPU peak, GiB", fill="faint", anchor="middle")
    x, y = at(need_gib, 0)
    for sign in (1, -1):
        picture.line([(x - 6, y + 6 * sign), (x + 6, y - 6 * sign)], "red", stroke_width=3)
    for row, text in enumerate(("AdamW with an", "fp32 master:", f"{need_gib:.0f} GiB,")):
        picture.text(WIDTH - RIGHT - 4, y - 64 + 15 * row, text, fill="red", anchor="end")
    picture.text(WIDTH - RIGHT - 4, y - 17, "does not fit", fill="red", anchor="end",
                 font_weight="bold")  # fmt: skip
    for row, (key, (label, colour)) in enumerate(keys.items()):
        places = [at(point.gib, point.ms) for point in by_key[key]]
        if key in CURVES:
            picture.line(places, colour, stroke_width=2.5)
        y = 40 + 17 * row
        for x_, y_ in [*places, (17, y - 4)]:
            picture.add("circle", cx=x_, cy=y_, r=4.5, fill=colour)
        picture.text(27, y, label)
    return picture.svg()


def gain(found: list[dict[str, Any]]) -> str:
    """README's sentences with the two figures: of the row that clips with ``device_memory=0``."""
    job, params = found[-1]["job"], found[-1]["params"]
    least = next(point for point in points(found)["clip"] if "-d0" in point.name)
    speed = 1e3 * job["tokens"] * job["ranks"] / least.ms
    need_gib = BYTES_OF_ADAMW * params / 2**30
    host_gib = BYTES_ON_HOST * params / 2**30
    return (
        f"To train {params / 1e9:.1f}B bf16 parameters, AdamW with fp32 masters needs "
        f"{need_gib:.0f} GiB of GPU memory, without activations.\nThis package needs "
        f"{least.gib:.0f} GiB, with activations (`device_memory=0`), and {host_gib:.0f} GiB of CPU "
        f"memory. One H100 then trains {round(speed, -2):,.0f} tokens per second, at "
        f"{job['tokens']:,} tokens per step with activation checkpointing."
    )


def filled(readme: str) -> str:
    """README with the figures of the JSON."""
    mark = r"(<!-- gain -->\n).*?(\n<!-- gain end -->)"
    return re.sub(mark, lambda m: m[1] + gain(reports()) + m[2], readme, flags=re.DOTALL)


def pictures() -> dict[Path, str]:
    """Files and what they hold."""
    return {FOLDER / f"chart-{theme}.svg": chart(reports(), theme) for theme in ("light", "dark")}


if __name__ == "__main__":
    for path, text in (pictures() | {README: filled(README.read_text())}).items():
        path.write_text(text)
