"""Makes the tables of README.md in this folder anew, from the JSON beside it.

    python docs/benchmarks/tables.py

To add a run, put its JSON here: ``{whole,iteration,phases,checkpoint,activations,moe}_*.json``. Of
a row that several files have for one job, the newest is shown.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fsdp_offload.bench.rows import Case
from fsdp_offload.core.config import GIB, parse_bytes

FOLDER = Path(__file__).resolve().parent
HEADS = {
    "iteration": "job | what | ms | tokens/s | GPU peak, GiB | CPU memory, GiB",
    "moves": "job | what | GiB | out or save, s | back or load, s",
    "activations": "job | what | ms | kept after the forward, GiB | GPU peak, GiB",
}
PEERS = {
    "plain": "AdamW, no fp32 master",
    "cpuoffload": "FSDP2 `CPUOffloadPolicy`, no fp32 master",
    "torchao": "torchao `CPUOffloadOptimizer`, no fp32 master, no FSDP2",
    "compute": "forward and backward alone",
    "zero3": "DeepSpeed 0.19.8 ZeRO-3, parameters and state on the CPU",
}
PHASES = {
    "offloader": "`PhaseOffloader`",
    "fixed": "`PhaseOffloader(keep_addresses=True)`",
    "swap": "`swap`, both ways at once",
    "loop": "a loop over tensors with page-locked buffers",
}
CHECKPOINTS = {
    "`checkpoint.save`, `checkpoint.load`": ("save", "load"),
    "`dcp.save`, `dcp.load`, AdamW on the GPU": ("torch dcp.save, 1 threads", "torch dcp.load"),
    "`checkpoint.async_save`: training waits": ("async_save, stall", None),
    "`dcp.async_save`, AdamW on the GPU: training waits": ("torch dcp.async_save, stall", None),
    "a plain file, written and read": ("plain file, write", "plain file, read"),
}
DENSE = {
    "none": "nothing moved",
    "all": "`ActivationOffload`",
    "save_on_cpu": "torch `save_on_cpu`",
    "torchtune": "torchtune 0.6.1",
    "trl": "TRL 1.16.0",
    "checkpointed": "blocks checkpointed",
    "checkpointed, inputs": "blocks checkpointed, the rest `ActivationOffload`",
}
EXPERTS = {
    "static": "whole buffers",
    "recompute": "expert part computed again",
    "exact": "the CPU waits for each count",
    "paged": "`PagedStash`",
    "paged, graph": "`PagedStash`, one CUDA graph",
}


def date(file: Path) -> str:
    """The day of a file."""
    return re.findall(r"\d{4}-\d\d-\d\d", file.name)[0]


def reports(*kinds: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Files of some kinds, the newest first."""
    files = [file for kind in kinds for file in FOLDER.glob(f"{kind}_*.json")]
    for file in sorted(sorted(files), key=date, reverse=True):
        yield file, json.loads(file.read_text())


def told(row: dict[str, Any], environment: dict[str, Any]) -> str:
    """What a row of the benchmark, or of zero3.py, trains with."""
    if row["kind"] == "zero3":
        case = Case(row["name"], "zero3", row["clip"], {})
    else:
        case = Case.parse(row["name"])
    words = [PEERS.get(case.kind, "this package")]
    options = dict(case.options)
    if case.kind in ("step", "backward"):
        words.append(f'`overlap="{case.kind}"`')
    if options.get("offload_fraction") == 0:
        words = ["AdamW with an fp32 master"]
        options.clear()
    for option, value in options.items():
        if option == "cap_bytes":
            words.append(f"allocator capped at {value / GIB:g} GiB")
            continue
        if option in ("device_memory", "bucket_bytes"):
            size = parse_bytes(value) / GIB
            value = f"{size:g}GiB" if size else 0
        text = str(value).removeprefix("torch.").replace("bfloat16", "bf16")
        words.append(f'`{option}="{text}"`' if value else f"`{option}=0`")
    segments = "expandable_segments:True" in environment.get("variables", {}).values()
    if segments and case.kind not in PEERS:
        words.append("`expandable_segments`")
    if case.clip == "none" and case.kind not in ("torchao", "compute"):
        words.append("no clipping")
    return ", ".join(words)


def iterations() -> Iterator[tuple[tuple[str, ...], str, list[str]]]:
    """Job, row, cells."""
    for file, report in reports("whole", "iteration"):
        job, environment = report["job"], report["environment"]
        gpu = environment["gpu"].removeprefix("NVIDIA ").partition(" 80GB")[0]
        where = f"{job['ranks']} {gpu}" + "s" * (job["ranks"] > 1)
        size = (f"{report['params'] / 1e9:.2f}B", f"{job['tokens']} tokens", where)
        size += ("checkpointed",) * job["checkpointed"]
        for row in report["rows"]:
            if row.get("status", "ok") != "ok" or "-again" in row["name"]:
                continue
            what = f"[{told(row, environment)}]({file.name})"
            speed = 1e3 * job["tokens"] * job["ranks"] / row["iteration_ms"]
            host = f"{row['host_gib']:.1f}" if row.get("host_gib") else ""
            peak = f"{row['device_peak_gib']:.1f}"
            yield size, what, [f"{row['iteration_ms']:.0f}", f"{speed:,.0f}", peak, host]


def moves() -> Iterator[tuple[tuple[str, ...], str, list[str]]]:
    """Job, row, cells."""
    for file, report in reports("phases"):
        job = (f"[leave one H100, {report['params'] / 1e9:.2f}B]({file.name})",)
        for row in report["rows"]:
            seconds = [f"{row[f'{way}_s']:.2f}" for way in ("out", "back")]
            yield job, PHASES[row["name"]], [f"{row['gib']:.1f}", *seconds]
    for file, report in reports("checkpoint"):
        job = (f"[checkpoint of one H200, {report['job']['params'] / 1e9:.2f}B]({file.name})",)
        gib = f"{report['job']['gb_per_rank'] * 1e9 / GIB:.1f}"
        rows = {row.get("what") or row["name"]: row["s"] for row in report["rows"]}
        for what, names in CHECKPOINTS.items():
            yield job, what, [gib, *(f"{rows[n]:.2f}" if n else "" for n in names)]


def activations() -> Iterator[tuple[tuple[str, ...], str, list[str]]]:
    """Job, row, cells."""
    for file, report in reports("activations"):
        for name, what in DENSE.items():
            if row := report["rows"].get(name):
                kept = f"{max(row.get('kept_gib', 0), 0):.1f}"
                cells = [f"{row['iteration_ms']:.0f}", kept, f"{row['device_peak_gib']:.1f}"]
                yield ("1.33B, 16384 tokens",), f"[{what}]({file.name})", cells
    for file, report in reports("moe"):
        for size, rows in report["jobs"].items():
            for name, what in EXPERTS.items():
                kept = f"{rows[name]['kept_gib']:.1f}" if "kept_gib" in rows[name] else ""
                cells = [f"{rows[name]['ms']:.0f}", kept, f"{rows[name]['peak_gib']:.1f}"]
                yield (f"[8 layers of experts, {size}]({file.name})",), what, cells


def table(kind: str) -> str:
    """The newest of each row, by job."""
    rows = {"iteration": iterations, "moves": moves, "activations": activations}[kind]()
    jobs: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for job, what, cells in rows:
        of_job = jobs.setdefault(job, {})
        text = re.sub(r"\]\(.*", "", what)
        if not any(re.sub(r"\]\(.*", "", seen) == text for seen in of_job):
            of_job[what] = cells
    lines = [f"| {HEADS[kind]} |", "| --- " * HEADS[kind].count("|") + "| --- |"]
    if kind == "iteration":  # the largest job, and the row with the most GPU memory, come first
        by_size = sorted(jobs.items(), key=lambda item: item[0], reverse=True)
        jobs = {j: dict(sorted(of.items(), key=lambda row: -float(row[1][2]))) for j, of in by_size}
    for job, of_job in jobs.items():
        first = ", ".join(job)
        for what, cells in of_job.items():
            lines.append(f"| {first} | {what} | {' | '.join(cells)} |")
            first = ""
    return "\n".join(lines)


def filled(page: str) -> str:
    """The page with its tables made anew."""
    mark = r"(<!-- table: (\w+) -->)\n.*?<!-- table end -->"
    return re.sub(
        mark, lambda m: f"{m[1]}\n{table(m[2])}\n<!-- table end -->", page, flags=re.DOTALL
    )


if __name__ == "__main__":
    path = FOLDER / "README.md"
    path.write_text(filled(path.read_text()))
