"""Device memory in the course of one iteration, with and without this package.

    python docs/benchmarks/memory_over_time.py measure FIGURES.json      # on a machine with a GPU
    python docs/benchmarks/memory_over_time.py draw FIGURES.json PICTURE.svg

What torch's allocator has given out is read after each block's forward, before each block's
backward, and around ``step()``: in the order of the host's calls, which is the allocator's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from fsdp_offload.bench import machine
from fsdp_offload.bench.model import Job, synthetic_batches
from fsdp_offload.bench.rows import Case, Trainer, make_trainer

GIB = 2**30
ROWS = {
    "step-f0-torchclip": ("AdamW and its state on the device", "#444444"),
    "default-d2GiB-torchclip": ('this package, device_memory="2GiB"', "#1f77b4"),
    "default-d0-torchclip": ("this package, device_memory=0", "#2ca02c"),
}
WARM_UP = 6
WIDTH, HEIGHT = 760, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 40, 48


def sample(trainer: Trainer, batch: tuple[torch.Tensor, torch.Tensor]) -> list[list[Any]]:
    """``[what, GiB]`` through one iteration."""
    found: list[list[Any]] = []

    def note(what: str) -> None:
        found.append([what, torch.cuda.memory_allocated() / GIB])

    hooks = []
    for block in trainer.model.blocks:  # type: ignore[union-attr]
        hooks.append(block.register_forward_hook(lambda *_: note("forward")))
        hooks.append(block.register_full_backward_pre_hook(lambda *_: note("backward")))
    note("forward")
    loss = trainer.model(*batch)
    note("forward")
    loss.backward()
    note("backward")
    trainer.clip()
    trainer.optimizer.step()
    note("step")
    trainer.optimizer.zero_grad()
    note("step")
    for hook in hooks:
        hook.remove()
    return found


def measure(path: Path) -> None:
    """Each row in turn."""
    with machine.process_group("cuda") as device:
        job = Job()
        batches = synthetic_batches(job, device)
        rows = []
        for name in ROWS:
            machine.free_everything(device)
            trainer = make_trainer(Case.parse(name), job, device)
            for step in range(WARM_UP):
                sample(trainer, batches[step % len(batches)])
            rows.append({"name": name, "samples": sample(trainer, batches[0])})
            trainer.optimizer.close()
            del trainer
        machine.publish(device, job, rows, {}, path)


def draw(report: dict[str, Any]) -> str:
    """The SVG: one curve for each row."""
    most = max(gib for row in report["rows"] for _, gib in row["samples"])
    ticks = range(0, int(most) + 6, 5)
    count = len(report["rows"][0]["samples"])

    def at(index: int, gib: float) -> str:
        x = LEFT + index / (count - 1) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - gib / ticks[-1] * (HEIGHT - TOP - BOTTOM)
        return f"{x:.1f} {y:.1f}"

    machine_, job = report["environment"], report["job"]
    title = (
        f"{report['params'] / 1e9:.2f} G {job['shards']} parameters, {job['tokens']} tokens, "
        f"{machine_['gpu']}, torch {machine_['torch']}, commit {machine_['commit']}"
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#333333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18" font-size="13">{title}</text>',
        f'<text x="{LEFT}" y="34">GiB that torch\'s allocator has given out</text>',
    ]
    for gib in ticks:
        x, y = at(0, gib).split()
        out.append(f'<path d="M{x} {y}H{WIDTH - RIGHT}" stroke="#e5e5e5"/>')
        out.append(f'<text x="{LEFT - 8}" y="{float(y) + 4}" text-anchor="end">{gib}</text>')
    parts = [what for what, _ in report["rows"][0]["samples"]]
    for part in dict.fromkeys(parts):
        first, last = parts.index(part), count - 1 - parts[::-1].index(part)
        x = at(first, 0).split()[0]
        out.append(f'<path d="M{x} {TOP}V{HEIGHT - BOTTOM}" stroke="#cccccc"/>')
        middle = at((first + last) // 2, 0).split()[0]
        anchor = "end" if part == parts[-1] else "middle"
        out.append(
            f'<text x="{middle}" y="{HEIGHT - BOTTOM + 18}" text-anchor="{anchor}">{part}</text>'
        )
    for index, row in enumerate(report["rows"]):
        label, colour = ROWS[row["name"]]
        line = "L".join(at(i, gib) for i, (_, gib) in enumerate(row["samples"]))
        out.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x = LEFT + 10 + 245 * index
        out.append(f'<circle cx="{x}" cy="{HEIGHT - 10}" r="4" fill="{colour}"/>')
        out.append(f'<text x="{x + 8}" y="{HEIGHT - 6}" font-size="11">{label}</text>')
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    what, source, *target = sys.argv[1:]
    if what == "measure":
        measure(Path(source))
    else:
        Path(target[0]).write_text(draw(json.loads(Path(source).read_text())))
