"""Makes the tables of these pages anew, from the JSON beside them.

python docs/benchmarks/tables.py

In README.md: one table per kind of figures, with a row for each row of each file. In any page:
between ``<!-- bench: FILE.json -->`` and ``<!-- bench end -->`` stands what the benchmark printed.
To add a run, put its JSON here, ``{iteration,phases,checkpoint}_MACHINE_DATE_JOB.json``.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fsdp_offload.bench.iteration import ITERATIONS, markdown_table

FOLDER = Path(__file__).resolve().parent
PHASES = runpy.run_path(str(FOLDER / "studies" / "phases.py"))["PHASES"]
COLUMNS = {"iteration": ITERATIONS, "phases": PHASES}
SPECIAL = ("deterministic", "settings")  # for losses, and for a chart: on a page of their own
HEADS = {
    "iteration": "GPU, date | link, GB/s | parameters, G | tokens | what | clips | ms | tokens/s "
    "| of plain | GPU peak, GiB | host, GiB",
    "phases": "GPU, date | link, GB/s | GiB | what | out, s | back, s | out, of the link "
    "| back, of the link",
    "checkpoint": "GPU, date | GB | what | s | GB/s",
}
WHAT = {
    r"plain": "plain AdamW, no fp32 master",
    r"step-f0": "fp32 masters and all state on the device",
    r"default": "this package",
    r"default-d0": r"this package, `device_memory=0`",
    r"default-d(\w+)": r'this package, `device_memory="\1"`',
    r"backward-d(\w+?)": r'`overlap="backward"`, `device_memory="\1"`',
    r"backward-d(\w+?)-(bf16|int8)": r'`overlap="backward"`, `device_memory="\1"`, `moments="\2"`',
    r"cpuoffload": "FSDP2 `CPUOffloadPolicy`, no fp32 master",
    r"torchao": "torchao, no fp32 master, no FSDP2",
    r"offloader": "`PhaseOffloader`",
    r"fixed": "the same, `keep_addresses=True`",
    r"swap": "`swap`, both ways at once",
    r"loop": "by hand, kept page-locked buffers",
    r"(?:ours )?((?:async_)?save|load)(, .*)?": r"`checkpoint.\1`\2",
    r"torch (.*)": r"\1, AdamW on the device",
}
"""Names of rows, and what a reader is told."""
GONE = re.compile(r"(save|load)_local")  # functions that there are no more


def reports(kind: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Files of one kind, the newest day first; of an earlier form those of iterations are not."""
    files = [f for f in FOLDER.glob(f"{kind}_*.json") if not f.stem.endswith(SPECIAL)]
    for file in sorted(sorted(files), key=date, reverse=True):
        report = json.loads(file.read_text())
        if kind == "checkpoint" or "params" in report:
            yield file, report


def date(file: Path) -> str:
    """The day of a file."""
    return re.findall(r"\d{4}-\d\d-\d\d", file.name)[0]


def row_of(kind: str, report: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """Cells, but for those of the machine."""
    job = report["job"]
    whole = row.get("name") or row["what"]
    name = whole.removesuffix("-again")
    base = re.sub(r"-(torch)?clip$", "", name)
    found = ((re.fullmatch(pattern, base), text) for pattern, text in WHAT.items())
    what = next((match.expand(text) for match, text in found if match), name)
    if name != whole:
        what += ", again"
    if "expandable_segments:True" in report["environment"].get("variables", {}).values():
        what += ", `expandable_segments`"
    if kind == "phases":
        ways = [f"{row[f'{way}_s']:.3f}" for way in ("out", "back")]
        shares = [f"{row[f'{way}_of_link']:.3f}" for way in ("out", "back")]
        return [f"{row['gib']:.1f}", what, *ways, *shares]
    if kind == "checkpoint":
        n_bytes = row["s"] * row["gbps"]
        return [f"{n_bytes:.1f}", what, f"{row['s']:.2f}", f"{row['gbps']:.2f}"]
    if job["checkpointed"]:
        what += ", `--checkpointed`"
    speed = 1e3 * job["tokens"] * job["ranks"] / row["iteration_ms"]
    plain = any(each["name"].startswith("plain") for each in report["rows"])
    return [
        f"{report['params'] / 1e9:.2f}",
        str(job["tokens"]),
        what,
        "yes" if name != base else "no",
        f"{row['iteration_ms']:.1f}",
        f"{speed:.0f}",
        f"{row['of_on_device']:.3f}" if plain and "of_on_device" in row else "",
        f"{row['device_peak_gib']:.1f}",
        f"{row['host_gib']:.1f}" if "host_gib" in row else "",
    ]


def table(kind: str) -> str:
    """All of one kind."""
    lines = [f"| {HEADS[kind]} |", "| --- " * HEADS[kind].count("|") + "| --- |"]
    for file, report in reports(kind):
        ranks = report["job"].get("ranks", 1)
        gpu = report["environment"]["gpu"].removeprefix("NVIDIA ").partition(" 80GB")[0]
        first = f"[{f'{ranks} x ' if ranks > 1 else ''}{gpu}, {date(file)}]({file.name})"
        if link := report.get("link"):
            first += f" | {link['h2d+d2h_gbps']:.1f}"
        for row in report["rows"]:
            if row.get("status", "ok") == "ok" and not GONE.match(row.get("what", "")):
                lines.append(f"| {first} | {' | '.join(row_of(kind, report, row))} |")
                first = " |" if link else ""
    return "\n".join(lines)


def filled(page: str) -> str:
    """A page with its tables made anew."""

    def printed(match: re.Match[str]) -> str:
        report = json.loads((FOLDER / match[2]).read_text())
        made = markdown_table(report, COLUMNS[match[2].partition("_")[0]])
        made = re.sub(
            r"\n\n- .*\Z", "", made, flags=re.DOTALL
        )  # what was not run: the page says it
        return f"{match[1]}\n{made}\n<!-- bench end -->"

    page = re.sub(
        r"(<!-- bench: (\S+) -->)\n.*?\n<!-- bench end -->", printed, page, flags=re.DOTALL
    )
    return re.sub(
        r"(<!-- table: (\w+) -->)\n.*?<!-- table end -->",
        lambda match: f"{match[1]}\n{table(match[2])}\n<!-- table end -->",
        page,
        flags=re.DOTALL,
    )


def main() -> int:
    """Write each page that changes; the number of those."""
    changed = 0
    for path in sorted(FOLDER.glob("*.md")):
        page = path.read_text()
        if (new := filled(page)) != page:
            path.write_text(new)
            print(f"{path.name}: written")
            changed += 1
    return changed


if __name__ == "__main__":
    main()
    sys.exit(0)
