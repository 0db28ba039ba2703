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

sys.path.append(str(Path(__file__).resolve().parents[1] / "pictures"))
from svg import WIDTH, Picture

from fsdp_offload.bench import machine
from fsdp_offload.bench.model import Job, synthetic_batches
from fsdp_offload.bench.rows import Case, Trainer, make_trainer

GIB = 2**30
ROWS = {
    "step-f0-torchclip": ("AdamW with an fp32 master, all on the GPU", "grey"),
    "default-d2GiB-torchclip": ('this package, device_memory="2GiB"', "blue"),
    "default-d0-torchclip": ("this package, device_memory=0", "green"),
}
WARM_UP = 6
HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 330, 34, 14, 110, 30


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
    job = report["job"]
    picture = Picture(HEIGHT, "GPU memory during one iteration")

    def at(index: int, gib: float) -> tuple[float, float]:
        x = LEFT + index / (count - 1) * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - gib / ticks[-1] * (HEIGHT - TOP - BOTTOM)

    title = f"One iteration: {report['params'] / 1e9:.2f}B parameters, {job['tokens']} tokens"
    picture.text(12, 20, title, 14, font_weight="bold")
    picture.text(12, TOP - 8, "GPU memory, GiB", fill="faint")
    for gib in ticks:
        y = at(0, gib)[1]
        picture.line([(LEFT, y), (WIDTH - RIGHT, y)], "grid")
        picture.text(LEFT - 5, y + 4, str(gib), fill="faint", anchor="end")
    parts = [what for what, _ in report["rows"][0]["samples"]]
    for part in dict.fromkeys(parts):
        first, last = parts.index(part), count - 1 - parts[::-1].index(part)
        x = at(first, 0)[0]
        picture.line([(x, TOP), (x, HEIGHT - BOTTOM)], "grid")
        x, anchor = at((first + last) // 2, 0)[0], "middle"
        if part == parts[-1]:
            x, anchor = WIDTH - RIGHT, "end"
        picture.text(x, HEIGHT - BOTTOM + 16, part, fill="faint", anchor=anchor)
    for index, row in enumerate(report["rows"]):
        label, colour = ROWS[row["name"]]
        points = [at(i, gib) for i, (_, gib) in enumerate(row["samples"])]
        picture.line(points, colour, stroke_width=2.5)
        y = 40 + 17 * index
        picture.add("circle", cx=17, cy=y - 4, r=4.5, fill=colour)
        picture.text(27, y, label)
    return picture.svg()


if __name__ == "__main__":
    what, source, *target = sys.argv[1:]
    if what == "measure":
        measure(Path(source))
    else:
        Path(target[0]).write_text(draw(json.loads(Path(source).read_text())))
