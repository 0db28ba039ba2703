"""Markdown from a report: the table of a benchmark page, and the README's.

A page holds ``<!-- bench: FILE -->`` and ``<!-- bench end -->`` on lines of their own, with FILE
relative to the page; what stands between them is made from that file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError

GIB = 1 << 30
MIB = 1 << 20
Columns = Sequence[tuple[str, Callable[[Mapping[str, Any]], str]]]
"""Heads, and what a row has there: the empty text where it has nothing."""
_PLACE = re.compile(
    r"^(<!-- bench: (\S+) -->\n).*?^(<!-- bench end -->)$", re.DOTALL | re.MULTILINE
)


def _number(key: str, digits: int, unit: float = 1) -> Callable[[Mapping[str, Any]], str]:
    def read(row: Mapping[str, Any]) -> str:
        value = row.get(key)
        return "" if value is None else f"{value / unit:.{digits}f}"

    return read


def _peak(row: Mapping[str, Any]) -> str:
    peak, predicted = row.get("device_peak_bytes"), row.get("predicted_peak_bytes")
    if peak is None:
        return ""
    if predicted is None:
        return f"{peak / GIB:.2f}"
    return f"{peak / GIB:.2f} ({100 * (peak / predicted - 1):+.1f} %)"


def _steady(row: Mapping[str, Any]) -> str:
    parts = [str(row["device_allocations"])] if "device_allocations" in row else []
    if "rss_growth_bytes" in row:
        parts.append(f"{row['rss_growth_bytes'] / MIB:.0f}")
    return " / ".join(parts)


def _loss(row: Mapping[str, Any]) -> str:
    if "loss" not in row:
        return ""
    same = {True: " =", False: " differs", None: ""}[row.get("same_losses")]
    return f"{row['loss']:.4f}{same}"


COLUMNS: Columns = (
    ("iteration, ms", _number("iteration_ms", 1)),
    ("exposed, ms", _number("exposed_ms", 1)),
    ("bound, ms", _number("bound_ms", 1)),
    ("of bound", _number("of_bound", 3)),
    ("of on-device", _number("of_on_device", 3)),
    ("GB/s", _number("gbps", 1)),
    ("device peak, GiB (against prediction)", _peak),
    ("host, GiB", _number("host_bytes", 2, GIB)),
    ("allocations / RSS, MiB", _steady),
    ("loss", _loss),
)


def _both(first: str, second: str, digits: int) -> Callable[[Mapping[str, Any]], str]:
    one, other = _number(first, digits), _number(second, digits)

    def read(row: Mapping[str, Any]) -> str:
        return f"{one(row)} / {other(row)}" if first in row else ""

    return read


def _change(key: str) -> Callable[[Mapping[str, Any]], str]:
    one, other = (_number(f"{key}_{when}", 0, MIB) for when in ("first", "last"))

    def read(row: Mapping[str, Any]) -> str:
        return f"{one(row)} / {other(row)}" if f"{key}_first" in row else ""

    return read


def _pinning(row: Mapping[str, Any]) -> str:
    return f"{row['pin_s']:.2f} ({row['pin_s_per_gib']:.3f})" if "pin_s" in row else ""


def _bits(row: Mapping[str, Any]) -> str:
    return {True: "same", False: "differ", None: ""}[row.get("same_bits")]


PHASES: Columns = (
    ("GiB", _number("n_bytes", 2, GIB)),
    ("first cycle, s (out / back)", _both("first_out_s", "first_back_s", 3)),
    ("later, s", _both("out_s", "back_s", 3)),
    ("GB/s", _both("out_gbps", "back_gbps", 1)),
    ("of the link", _both("out_of_link", "back_of_link", 3)),
    ("first cycle", _both("first_out_of_link", "first_back_of_link", 3)),
    ("slowest cycle", _both("worst_out_of_link", "worst_back_of_link", 3)),
    ("freed / payload", _number("freed_share", 3)),
    ("host / payload", _number("host_over_payload", 4)),
    ("pinning, s (per GiB)", _pinning),
    ("bits", _bits),
)

ENDURANCE: Columns = (
    ("cycles", _number("cycles", 0)),
    ("RSS, MiB (second / last cycle)", _change("rss_bytes")),
    ("device free, MiB", _change("device_free_bytes")),
    ("reserved - allocated, MiB", _change("fragmented_bytes")),
    ("RSS after close, MiB", _number("rss_bytes_closed", 0, MIB)),
    ("bits", _bits),
)


def markdown_table(report: Mapping[str, Any]) -> str:
    """Two lines about the run, one row per optimizer or way, then what was not run and why."""
    if report.get("bench") == "phases":
        lines = [describe_phases(report), "", *_table(report["rows"], PHASES)]
        if report["endurance"]:
            lines += ["", *_table(report["endurance"], ENDURANCE)]
    else:
        lines = [describe(report), "", *_table(report["rows"], COLUMNS)]
    return "\n".join(lines)


def _table(
    rows: Sequence[Mapping[str, Any]],
    all_columns: Columns,
) -> list[str]:
    ran = [row for row in rows if row["status"] == "ok"]
    columns = [(head, read) for head, read in all_columns if any(read(row) for row in ran)]
    heads = ["row", *(head for head, _ in columns)]
    lines = [_line(heads), _line(["---"] * len(heads))]
    lines += [_line([row["name"], *(read(row) for _, read in columns)]) for row in ran]
    if rest := [row for row in rows if row["status"] != "ok"]:
        lines += ["", *(f"- {row['name']}: {row['status']}: {row['reason']}" for row in rest)]
    return lines


def describe(report: Mapping[str, Any]) -> str:
    """The job, the machine and its link in words."""
    job = report["job"]
    words = [
        f"{parameters_of(job) / 1e9:.2f} G parameters",
        f"{job['shards']} shards",
        f"{job['tokens']} tokens per rank",
    ]
    if (count := job.get("blocks_per_group", 1)) > 1:
        words.append(f"{count} blocks per group")
    return _described(report, words, f"medians of {job['iterations']} iterations.")


def describe_phases(report: Mapping[str, Any]) -> str:
    """The same of :mod:`.phases`."""
    job = report["job"]
    words = [
        f"{parameters_of(job) / job['ranks'] / 1e9:.3g} G parameters per rank",
        f"{job['shards']} shards, fp32 state",
    ]
    return _described(report, words, f"later cycles: medians of {job['repeats']}.")


def _described(report: Mapping[str, Any], job_words: Sequence[str], medians: str) -> str:
    job, machine, link = report["job"], report["environment"], report["link"]
    words = [
        f"{job['ranks']} rank{'s' if job['ranks'] > 1 else ''}",
        *job_words,
        machine.get("gpu", "CPU"),
        f"torch {machine['torch']}",
    ]
    if commit := machine.get("commit"):
        words.append(f"commit {commit}")
    words += [f"{name}={value}" for name, value in machine.get("variables", {}).items()]
    text = f"{', '.join(words)}; {medians}"
    if link:
        ways = (f"{link[key]:.1f}" for key in ("h2d_gbps", "d2h_gbps", "h2d+d2h_gbps"))
        text += f" Link, GB/s: {' / '.join(ways)} (in / out / both)."
    if link and "all_gather_gbps" in link:
        alone, beside = link["all_gather_gbps"], link["all_gather_beside_copies_gbps"]
        text += f" All-gather, GB/s received: {alone:.1f} alone, {beside:.1f} beside such copies."
    return text


def parameters_of(job: Mapping[str, Any]) -> int:
    """Parameters of the benchmark's GPT."""
    dim = int(job["dim"])
    return int(job["layers"]) * (12 * dim * dim + 2 * dim) + int(job["vocabulary"]) * dim + dim


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def line_of(
    row: Mapping[str, Any],
    columns: Columns = COLUMNS,
) -> str:
    """One row as one line of text, told as soon as it is done."""
    if row["status"] != "ok":
        return f"{row['name']}: {row['status']}: {row['reason']}"
    parts = [f"{name}_ms" for name in ("forward", "backward", "update", "host", "wall")]
    cells = [f"{head} {text}" for head, read in columns if (text := read(row))]
    cells += [f"{name} {row[name]:.1f}" for name in parts if name in row]
    return f"{row['name']}: " + "; ".join(cells)


def filled(page: Path) -> str:
    """The text of ``page`` with every marked table made anew.

    Raises:
        ConfigError: the page has no place for a table.
    """
    text = page.read_text()

    def fresh(match: re.Match[str]) -> str:
        report = json.loads((page.parent / match[2]).read_text())
        return f"{match[1]}{markdown_table(report)}\n{match[3]}"

    if not _PLACE.search(text):
        raise ConfigError(
            f"page {page}",
            reason="no place for a table",
            remedy="add the lines <!-- bench: FILE.json --> and <!-- bench end -->",
        )
    return _PLACE.sub(fresh, text)


def main(argv: list[str]) -> None:
    """``table FILE.json``: print it. ``table PAGE.md``: fill the page's places."""
    for name in argv:
        path = Path(name)
        if path.suffix == ".md":
            path.write_text(filled(path))
        else:
            print(markdown_table(json.loads(path.read_text())))
