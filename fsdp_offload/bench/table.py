"""A report as Markdown: a line about the run, one row per optimizer or way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

Columns = Sequence[tuple[str, str, str]]
"""Head, key of the figure, format."""

ITERATIONS: Final[Columns] = (
    ("iteration, ms", "iteration_ms", ".1f"),
    ("update, ms", "update_ms", ".1f"),
    ("exposed, ms", "exposed_ms", ".1f"),
    ("of on-device", "of_on_device", ".3f"),
    ("GB/s", "gbps", ".1f"),
    ("device peak, GiB", "device_peak_gib", ".2f"),
    ("host, GiB", "host_gib", ".2f"),
    ("loss", "loss", ".4f"),
)


def _cell(row: Mapping[str, Any], key: str, form: str) -> str:
    return "" if row.get(key) is None else format(row[key], form)


def markdown_table(report: Mapping[str, Any], all_columns: Columns) -> str:
    """The run, a line per row, then what was not run and why."""
    ran = [row for row in report["rows"] if row["status"] == "ok"]
    columns = [column for column in all_columns if any(_cell(row, *column[1:]) for row in ran)]
    cells = [["row", *(head for head, _, _ in columns)], ["---"] * (1 + len(columns))]
    cells += [[row["name"], *(_cell(row, *column[1:]) for column in columns)] for row in ran]
    lines = [describe(report), "", *(f"| {' | '.join(line)} |" for line in cells)]
    if rest := [row for row in report["rows"] if row["status"] != "ok"]:
        lines += ["", *(f"- {row['name']}: {row['status']}: {row['reason']}" for row in rest)]
    return "\n".join(lines)


def describe(report: Mapping[str, Any]) -> str:
    """The job, the machine and its link in words."""
    job, machine, link = report["job"], report["environment"], report.get("link")
    words = [
        f"{job['ranks']} rank{'s' if job['ranks'] > 1 else ''}",
        f"{report['params'] / 1e9:.2f} G parameters",
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
    """One row as one line of text, printed as soon as it is done."""
    if row["status"] != "ok":
        return f"{row['name']}: {row['status']}: {row['reason']}"
    cells = [(head, _cell(row, key, form)) for head, key, form in columns]
    return f"{row['name']}: " + "; ".join(f"{head} {text}" for head, text in cells if text)
