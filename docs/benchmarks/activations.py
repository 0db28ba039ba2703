"""Activations of a dense GPT in host memory: time, memory and what crosses the link.

Usage::

    python docs/benchmarks/activations.py [--host-memory 40GiB] [--json out.json]

One job, each way in turn, in one run. ``none``: all activations on the device. ``all`` is
:class:`ActivationOffload`. ``checkpointed`` computes blocks again; with ``inputs`` their inputs are
in host memory. ``save_on_cpu`` is torch's, with page-locked memory; ``torchtune`` and ``trl`` are
their ``OffloadActivations``, where installed.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from fsdp_offload import ActivationOffload
from fsdp_offload.bench.iteration import measure
from fsdp_offload.bench.machine import (
    Row,
    environment,
    free_everything,
    measure_link,
    process_group,
    synchronize,
)
from fsdp_offload.bench.model import Job, layers_for, synthetic_batches
from fsdp_offload.bench.rows import Case, make_trainer
from fsdp_offload.core.config import GIB

WARM_UP: Final = 5
LINK: Final = ("h2d_gbps", "d2h_gbps", "h2d+d2h_gbps")


class Inside(nn.Module):
    """A model whose forward runs inside of a context."""

    def __init__(self, model: nn.Module, context: AbstractContextManager[Any]) -> None:
        super().__init__()
        self.model, self.context = model, context

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self.context:
            loss: Tensor = self.model(inputs, targets)
        return loss


class Way(NamedTuple):
    """One row."""

    name: str
    context: str = "none"
    checkpointed: bool = False


WAYS: Final = (
    Way("none"),
    Way("all", context="ours"),
    Way("checkpointed", checkpointed=True),
    Way("checkpointed, inputs", context="ours", checkpointed=True),
    Way("save_on_cpu", context="save_on_cpu"),
    Way("torchtune", context="torchtune.training"),
    Way("trl", context="trl.models.activation_offloading"),
    Way("none again"),
)


def context_of(way: Way, host_memory: str, device: torch.device) -> Any:
    """What forwards of a row run in."""
    if way.context == "none":
        return nullcontext()
    if way.context == "ours":
        return ActivationOffload(host_memory, device=device)
    if way.context == "save_on_cpu":
        return torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")
    peer = importlib.import_module(way.context).OffloadActivations
    return peer(use_pin_memory=True, use_streams=True)


def kept_gib(model: nn.Module, batch: tuple[Tensor, Tensor], context: Any) -> float:
    """Device memory that a forward leaves for its backward."""
    device = batch[0].device
    if device.type != "cuda":
        return 0.0
    synchronize(device)
    before = torch.cuda.memory_allocated()
    loss = model(*batch)
    synchronize(device)
    if isinstance(context, ActivationOffload):
        context.statistics()  # copies have ended
    found = (torch.cuda.memory_allocated() - before) / GIB
    loss.backward()
    return found


def torchtune_gb(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    """What torchtune 0.6.1 would move: each saved tensor of 1024 bytes that is no parameter itself,
    also if it was saved before, or views one (``_activation_offloading.py``)."""
    sizes = [0]

    def count(tensor: Tensor) -> None:  # a hook that gives the tensor back makes a cycle
        n_bytes = tensor.numel() * tensor.itemsize
        if n_bytes >= 1024 and not isinstance(tensor, nn.Parameter | nn.Buffer):
            sizes.append(n_bytes)

    with torch.autograd.graph.saved_tensors_hooks(count, lambda nothing: nothing):
        model(*batch)
    return sum(sizes) / 1e9


def run_way(way: Way, job: Job, given: argparse.Namespace, device: torch.device) -> Row:
    """Build, measure, free."""
    job = replace(job, checkpointed=way.checkpointed)
    batches = synthetic_batches(job, device)
    with ExitStack() as cleanup:
        trainer = make_trainer(Case.parse("plain"), job, device)
        context = context_of(way, given.host_memory, device)
        inside = trainer._replace(model=Inside(trainer.model, context))
        row = measure(inside, batches, WARM_UP, given.iterations)
        if isinstance(context, ActivationOffload):
            cleanup.callback(context.close)
            row |= traffic_of(context, inside.model, batches[0])
        row["kept_gib"] = kept_gib(inside.model, batches[0], context)
        if way.name == "none":
            row["torchtune_gb"] = torchtune_gb(inside.model, batches[0])
    return row


def traffic_of(offload: ActivationOffload, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Row:
    """Of one more forward: each moves as much."""
    before = offload.statistics().sent_bytes
    model(*batch)
    now = offload.statistics()
    return {
        "moved_gb": (now.sent_bytes - before) / 1e9,
        "statistics": vars(now),
    }


def lines_of(rows: dict[str, Row], link: Row) -> Iterator[str]:
    """A table of all, and one of what was promised."""
    yield "| way | iteration ms | forward | backward | peak GiB | kept GiB | moved GB each way |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, row in rows.items():
        if "failed" in row:
            yield f"| {name} | {row['failed']} | | | | | |"
            continue
        keys = ("iteration_ms", "forward_ms", "backward_ms", "device_peak_gib", "kept_gib")
        cells = [f"{row[key]:.2f}" if key in row else "" for key in (*keys, "moved_gb")]
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""
    yield "| what | found | bound |"
    yield "| --- | --- | --- |"
    for line in (
        lambda: bounded("M9 all", rows, "all", alone_ms(rows["all"], link), 1.08),
        lambda: ratio(
            "M9 inputs / checkpointed", rows, "checkpointed, inputs", "checkpointed", 1.02
        ),
        lambda: gone(rows),
        lambda: of_torchtune(rows),
        lambda: ratio("drift of the machine", rows, "none again", "none", 1.02),
    ):
        try:
            yield line()
        except (KeyError, ZeroDivisionError) as error:
            yield f"| not found: {error!r} | | |"


def ratio(what: str, rows: dict[str, Row], name: str, other: str, most: float) -> str:
    """Of two iterations."""
    found = rows[name]["iteration_ms"] / rows[other]["iteration_ms"]
    return f"| {what} | {found:.3f} | <= {most} |"


def bounded(what: str, rows: dict[str, Row], name: str, link_ms: float, most: float) -> str:
    """An iteration over the longer of compute alone and what the link takes."""
    found = rows[name]["iteration_ms"] / max(rows["none"]["iteration_ms"], link_ms)
    return f"| {what}: / max(compute, {link_ms:.0f} ms of link) | {found:.3f} | <= {most} |"


def alone_ms(row: Row, link: Row) -> float:
    """Of copies out in the forward, then back in the backward: never both at once."""
    return sum(1e3 * row["moved_gb"] / link[f"{way}_gbps"] for way in ("d2h", "h2d"))


def gone(rows: dict[str, Row]) -> str:
    """How much less a forward leaves on the device, over what was moved."""
    less = rows["none"]["kept_gib"] - rows["all"]["kept_gib"]
    moved = rows["all"]["moved_gb"] * 1e9 / GIB
    return f"| M9 all: memory gone after the forward / moved | {less / moved:.3f} | >= 0.95 |"


def of_torchtune(rows: dict[str, Row]) -> str:
    """Bytes that are moved."""
    found = rows["all"]["moved_gb"] / rows["none"]["torchtune_gb"]
    return f"| M9 all: moved, of what torchtune would move | {found:.3f} | <= 0.77 |"


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--params", type=float, default=1.33e9)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=60000)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--host-memory", default="40GiB")
    parser.add_argument("--ways", nargs="*", default=[way.name for way in WAYS])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(words)
    layers = layers_for(given.params, given.dim, given.vocabulary)
    job = Job(layers, given.dim, given.vocabulary, given.tokens, given.seq)
    rows: dict[str, Row] = {}
    with process_group(given.device) as device:
        where = environment(device)
        link = measure_link(device, 3) if device.type == "cuda" else dict.fromkeys(LINK, 1.0)
        for way in (way for way in WAYS if way.name in given.ways):
            free_everything(device)
            try:
                rows[way.name] = run_way(way, job, given, device)
            except Exception as error:  # a peer that is not installed, or out of memory
                rows[way.name] = {"failed": f"{error!r}"[:200]}
            shown = {
                k: v for k, v in rows[way.name].items() if not k.startswith(("loss", "iterations"))
            }
            print(f"{way.name}: {shown}", flush=True)
    commit = where.get("commit", "unknown")
    lines = [
        f"{where.get('gpu', 'CPU')}, torch {where['torch']}, commit {commit}",
        f"{job.params / 1e9:.2f}B parameters, {job.tokens} tokens; link, GB/s: {link}",
        "",
        *lines_of(rows, link),
    ]
    print("\n".join(lines))
    if given.json is not None:
        report = {"environment": where, "link": link, "rows": rows, "lines": lines}
        given.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
