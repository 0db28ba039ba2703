"""Expert layers whose buffers have the worst case's rows: memory and time of what they save.

Usage::

    python docs/benchmarks/studies/moe.py [--job narrow] [--layers 8] [--json out.json]

One GPU stands for one rank of eight that share experts: buffers have room for what all ranks could
send, and between 0.5 and 1.6 times the average comes, another number in each layer and iteration,
which only the device knows. Layers have attention, too. ``static`` keeps whole buffers;
``recompute`` computes the expert part again in backward; ``exact`` lets the host wait for each
count, its memory is the least there can be; ``paged`` is :class:`PagedStash`; ``graph`` replays one
graph of forward and backward; ``partial`` has graphs of the expert parts alone; ``save_on_cpu`` is
torch's, with few layers, because all rows of its buffers cross the link.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from moe_kernels import fold_rows, spread_rows, swiglu
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdp_offload.activations import PagedStash
from fsdp_offload.activations.pages import PagePool
from fsdp_offload.activations.pages_plain import page_kernels
from fsdp_offload.bench.machine import environment, free_everything
from fsdp_offload.core.config import GIB, MIB, TransferConfig
from fsdp_offload.core.devices import backend_for
from fsdp_offload.link import HostRange
from fsdp_offload.phases import FixedAddressRegion

PAGE_BYTES: Final = 256 << 10
FEW_LAYERS: Final = 2
WARM_UP: Final = 3
DEVICE: Final = torch.device("cuda", 0)


@dataclass(frozen=True)
class MoEJob:
    """What every row trains, from the same seed, with the same routing."""

    name: str
    dim: int
    width: int
    experts: int
    """Of this rank."""
    top: int
    """Experts per token."""
    tokens: int
    worst: int
    """Rows of a buffer, in averages."""
    layers: int = 8
    iterations: int = 10

    @property
    def capacity(self) -> int:
        """Rows of a buffer."""
        return self.worst * self.tokens * self.top


JOBS: Final = {
    "narrow": MoEJob("narrow", 2048, 768, 16, 8, 8192, 8),
    "wide": MoEJob("wide", 4096, 14336, 1, 2, 4096, 4),
}


class Experts(nn.Module):
    """Dispatch to combine; ``ends`` (experts,) int32 on the device says where experts' rows end."""

    def __init__(self, job: MoEJob) -> None:
        super().__init__()
        self.job = job
        self.stash: PagedStash | None = None
        self.norm = nn.RMSNorm(job.dim)
        self.up = nn.Parameter(torch.randn(job.experts, job.dim, 2 * job.width) * 0.02)
        self.down = nn.Parameter(torch.randn(job.experts, job.width, job.dim) * 0.02)
        self.ends = nn.Buffer(torch.zeros(job.experts, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, dim) to the same."""
        normed, count = self.norm(x), self.ends[-1:].clone()
        if self.stash is None:
            return x + self._routed(normed, count, None)
        with self.stash.group() as group:
            return x + self._routed(normed, count, group)

    def _routed(self, x: Tensor, count: Tensor, group: Any) -> Tensor:
        rows = spread_rows(x, count, self.job.capacity)
        if group is not None:
            group.rows(rows, count)
        hidden = swiglu(F.grouped_mm(rows, self.up, offs=self.ends), count)
        return fold_rows(F.grouped_mm(hidden, self.down, offs=self.ends), count, x.shape[0])


class Layer(nn.Module):
    """Attention, then experts."""

    def __init__(self, job: MoEJob) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(job.dim), nn.Linear(job.dim, 3 * job.dim, bias=False)
        self.out = nn.Linear(job.dim, job.dim, bias=False)
        self.experts = Experts(job)
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, dim) to the same, in sequences of 2048."""
        qkv = self.qkv(self.norm(x)).view(-1, 2048, 3, x.shape[1] // 128, 128)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        if self.recomputes:
            return checkpoint(self.experts, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.experts(x)  # type: ignore[no-any-return]


class Trainer:
    """A model, its routing per iteration, and one iteration."""

    def __init__(self, job: MoEJob, stash: PagedStash | None = None) -> None:
        torch.manual_seed(0)
        self.job = job
        with DEVICE:
            self.layers = [Layer(job).bfloat16() for _ in range(job.layers)]
            self.x = torch.randn(job.tokens, job.dim, dtype=torch.bfloat16)
            average = job.tokens * job.top
            shape = (64, job.layers)
            totals = (torch.empty(shape).uniform_(0.5, 1.6) * average).long()
            cuts = torch.rand(*shape, job.experts).sort(dim=-1).values
            cuts[..., -1] = 1.0
            self.routing = (cuts * totals[..., None]).to(torch.int32)
        self.experts = [layer.experts for layer in self.layers]
        for each in self.experts:
            each.stash = stash

    def route(self, iteration: int) -> None:
        """What comes in that iteration."""
        for each, ends in zip(self.experts, self.routing[iteration % 64], strict=True):
            each.ends.copy_(ends)

    def forward(self) -> Tensor:
        """A loss, 0-dim."""
        x = self.x
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()

    def zero(self) -> None:
        """Gradients keep their memory."""
        for layer in self.layers:
            for parameter in layer.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()

    def iteration(self) -> Tensor:
        """Forward and backward."""
        self.zero()
        loss = self.forward()
        loss.backward()
        return loss.detach()


def timed(run: Callable[[], object], repeat: int = 1) -> float:
    """Milliseconds on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeat):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / repeat


@contextmanager
def emptied() -> Iterator[None]:
    """No device memory of others before and after."""
    free_everything(DEVICE)
    torch.cuda.reset_peak_memory_stats()
    yield
    free_everything(DEVICE)


def figures_of(
    trainer: Trainer,
    run: Callable[[], Tensor],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Any]:
    """Milliseconds of an iteration (median), GiB after the forward and at most, the losses."""
    times, losses = [], []
    for i in range(WARM_UP + trainer.job.iterations):
        trainer.route(i)
        with context():
            times.append(timed(lambda: losses.append(run().clone())))
    row: dict[str, Any] = {"ms": statistics.median(times[WARM_UP:])}
    row["losses"] = [float(loss) for loss in losses]
    row["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    return row


def kept_gib(trainer: Trainer, look: Callable[[], object] = lambda: None) -> float:
    """What a forward leaves behind, beside the pool; ``look`` is called then."""
    trainer.route(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = trainer.forward()
    kept = float(torch.cuda.memory_allocated() - before)
    look()
    loss.backward()
    return kept / GIB


def static_row(job: MoEJob, recomputes: bool = False) -> dict[str, Any]:
    """Whole buffers, or the expert part computed again."""
    trainer = Trainer(job)
    for layer in trainer.layers:
        layer.recomputes = recomputes
    return figures_of(trainer, trainer.iteration) | {"kept_gib": kept_gib(trainer)}


def save_on_cpu_row(job: MoEJob) -> dict[str, Any]:
    """torch's hooks, page-locked."""
    trainer = Trainer(job)
    hooks = torch.autograd.graph.save_on_cpu
    return figures_of(trainer, trainer.iteration, lambda: hooks(pin_memory=True))


def paged_rows(job: MoEJob) -> Iterator[tuple[str, dict[str, Any]]]:
    """Exact, paged, paged with ``run``, and as one graph; one stash."""
    stash = PagedStash(DEVICE, page_bytes=PAGE_BYTES)
    trainer = Trainer(job, stash)
    yield "exact", figures_of(trainer, trainer.iteration) | {"kept_gib": kept_gib(trainer)}
    plan = stash.prepare()
    torch.cuda.reset_peak_memory_stats()
    row = figures_of(trainer, trainer.iteration)
    used: list[int] = []
    kept = kept_gib(trainer, lambda: used.append(stash.statistics().used_device_pages))
    pool = plan.device_bytes / GIB
    row |= {"kept_gib": kept + pool, "unused_gib": pool - used[0] * PAGE_BYTES / GIB}
    yield "paged", row

    def protocol() -> Tensor:
        trainer.zero()
        loss = stash.run(lambda retry: trainer.forward())
        loss.backward()
        return loss.detach()

    yield "paged, run()", figures_of(trainer, protocol)
    stash.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = trainer.iteration()
    torch.cuda.reset_peak_memory_stats()

    def replay() -> Tensor:
        graph.replay()
        return loss

    yield "paged, graph", figures_of(trainer, replay)
    stash.check()


def partial_row(job: MoEJob) -> dict[str, Any]:
    """Graphs of three expert parts, attention eager; against the same without graphs."""
    stash = PagedStash(DEVICE, page_bytes=PAGE_BYTES)
    trainer = Trainer(replace(job, layers=3), stash)
    trainer.route(0)
    trainer.iteration()
    stash.prepare(margin=4.0)
    eager = figures_of(trainer, trainer.iteration)
    samples = tuple((trainer.x.clone().requires_grad_(),) for _ in trainer.experts)
    torch.cuda.make_graphed_callables(tuple(trainer.experts), samples)
    row = figures_of(trainer, trainer.iteration)
    stash.check()
    return row | {"eager_ms": eager["ms"], "same": row["losses"] == eager["losses"]}


def region_row(job: MoEJob, gib: int) -> dict[str, Any]:
    """A pool of so many GiB is given up and taken again between replays."""
    region = FixedAddressRegion("stash", DEVICE)
    stash = PagedStash(DEVICE, f"{gib}GiB", page_bytes=PAGE_BYTES, region=region)
    trainer = Trainer(replace(job, layers=2), stash)
    trainer.route(0)
    trainer.iteration()
    stash.prepare()
    trainer.iteration()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = trainer.iteration()
    graph.replay()
    before, row = loss.clone(), dict[str, Any]()
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]

    def ms(call: Callable[[], object]) -> float:
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3

    row["pause_ms"] = ms(lambda: region.pause(save=False))
    row["back_gib"] = (torch.cuda.mem_get_info()[0] - free) / GIB
    row["resume_ms"] = ms(region.resume)
    graph.replay()
    row["same"] = bool(torch.equal(loss, before))
    return row


def captured(run: Callable[[], object], times: int = 1) -> Callable[[], None]:
    """A graph of so many runs."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    return graph.replay


def best(run: Callable[[], object], times: int = 1) -> float:
    """Milliseconds of one run, the best of a few."""
    return min(timed(run) for _ in range(5)) / times


def copies() -> Iterator[tuple[str, str, str]]:
    """Copies to and from pages against torch's, claims and releases: name, value, bound."""
    numel = GIB // 8
    source, target = (torch.zeros(numel, dtype=torch.int64, device=DEVICE) for _ in range(2))
    copy_ms = best(lambda: target.copy_(source))
    yield "copy_ on the device, 1 GiB", f"{2 * GIB / copy_ms / 1e6:.0f} GB/s", ""
    pool = pool_of(GIB // PAGE_BYTES, 0)
    for n_bytes, bound in ((64 * MIB, 0.6), (256 * MIB, 0.8), (GIB, 0.8)):
        for out in (True, False):
            ms = move_ms(pool, n_bytes, target if out else source, out, times=4)
            share = n_bytes / ms / (GIB / copy_ms)
            way = "out" if out else "back"
            name = f"M1 move {way}, {n_bytes // MIB} MiB"
            yield name, f"{2 * n_bytes / ms / 1e6:.0f} GB/s, {share:.2f} of copy_", f">= {bound}"
    table = pool.take_table(4096, to_capture=False)
    count = torch.tensor([4096], device=DEVICE)

    def claims() -> None:
        pool.claim(table, count, 4096, (PAGE_BYTES,), far=False)
        pool.release(table)

    us = best(captured(claims, 50), 50) * 1e3
    yield "M2 claim and release of 4096 pages", f"{us:.1f} us", "<= 15"
    n_bytes = 256 * MIB
    pinned = torch.zeros(n_bytes // 8, dtype=torch.int64, pin_memory=True)
    part, far = target[: n_bytes // 8], pool_of(1, n_bytes // PAGE_BYTES)
    for out, bound in ((True, 0.85), (False, 0.8)):
        to, of = (pinned, part) if out else (part, pinned)
        link = best(partial(to.copy_, of, non_blocking=True))
        ms = move_ms(far, n_bytes, part, out, far=True)
        text = f"{n_bytes / ms / 1e6:.1f} GB/s, {link / ms:.2f} of the copy engine"
        yield f"M7 host pages {'out' if out else 'back'}, 256 MiB", text, f">= {bound}"


def pool_of(near: int, far: int) -> PagePool:
    """So many pages."""
    arena = None
    if far:
        arena = HostRange(far * PAGE_BYTES, device=DEVICE, can_pin=True, transfer=TransferConfig())
    memory = torch.empty(near * PAGE_BYTES // 8, dtype=torch.int64, device=DEVICE)
    return PagePool(backend_for(DEVICE), PAGE_BYTES, memory, page_kernels(DEVICE), arena)


def move_ms(
    pool: PagePool, n_bytes: int, words: Tensor, out: bool, times: int = 1, far: bool = False
) -> float:
    """Of rows of 4096 bytes."""
    rows = n_bytes // 4096
    table = pool.take_table(n_bytes // PAGE_BYTES, to_capture=False)
    pool.claim(table, torch.tensor([rows], device=DEVICE), rows, (4096,), far=far)
    ms = best(captured(lambda: pool.move(table, [words], (4096,), out=out), times), times)
    pool.release(table)
    return ms


def host_ms() -> float:
    """What a group costs the host, forward and backward together."""
    stash = PagedStash(DEVICE, "64MiB", page_bytes=PAGE_BYTES)
    stash.prepare()
    x = torch.randn(1024, 1024, device=DEVICE, requires_grad=True)
    count = torch.tensor([100], device=DEVICE)

    def ms(grouped: bool) -> float:
        times = []
        for _ in range(300):
            began = time.perf_counter()
            with stash.group(x, count) if grouped else nullcontext():
                y = (x * x).sin()
            y.backward(y.detach())
            times.append(time.perf_counter() - began)
            torch.cuda.synchronize()
        return statistics.median(times) * 1e3

    ms(True)
    found = ms(True) - ms(False)
    stash.close()
    return found


def job_lines(job: MoEJob, rows: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """The rows of one job against their bounds."""
    static, exact, paged = rows["static"], rows["exact"], rows["paged"]
    is_narrow = job.name == "narrow"
    same = all(rows[name]["losses"] == static["losses"] for name in ("recompute", "exact", "paged"))
    yield "losses of all rows", "same bits" if same else "OTHER BITS", "same"
    graph = rows["paged, graph"]
    yield "M5 losses of the graph", str(graph["losses"] == static["losses"]), "True"
    used = paged["kept_gib"] - paged["unused_gib"]
    yield "M3 kept after the forward, of exact", f"{used / exact['kept_gib']:.3f}", "<= 1.10"
    bound = "<= 0.2" if is_narrow else "<= 0.33"
    attention = rows["recompute"]["kept_gib"]
    share = (used - attention) / (static["kept_gib"] - attention)
    yield "M3 of static, without attention's", f"{share:.3f}", bound
    yield "M3 peak, of exact", f"{paged['peak_gib'] / exact['peak_gib']:.3f}", "<= 1.15"
    bound = "<= 1.12" if is_narrow else "<= 1.06"
    yield "M4 iteration, of static", f"{paged['ms'] / static['ms']:.3f}", bound
    yield "M4 of full recompute", f"{paged['ms'] / rows['recompute']['ms']:.3f}", "<= 0.90"
    yield "M4 of exact", f"{paged['ms'] / exact['ms']:.3f}", ""
    yield "graph, of eager", f"{graph['ms'] / paged['ms']:.3f}", ""
    few = [rows[f"{way}, {FEW_LAYERS} layers"]["ms"] for way in ("save_on_cpu", "static")]
    yield "save_on_cpu, of static", f"{few[0] / few[1]:.2f}", ""
    extra = rows["paged, run()"]["ms"] - paged["ms"]
    yield "M12 run()", f"{extra:+.2f} ms, {extra / paged['ms']:+.3f}", "<= 1 ms, 0.01"
    yield "M14 partial graphs, same bits", str(rows["partial, 3 layers"]["same"]), "True"
    region = rows["region"]
    text = f"{region['pause_ms']:.0f} / {region['resume_ms']:.0f} ms, {region['back_gib']:.2f} GiB"
    yield f"M13 pause / resume, same bits: {region['same']}", text, "<= 150 ms each"


def attempt(rows: dict[str, dict[str, Any]], name: str, make: Callable[[], dict[str, Any]]) -> None:
    """One row; what it raises is its text."""
    with emptied():
        try:
            rows[name] = make()
        except Exception as error:
            rows[name] = {"failed": f"{error!r}"[:300]}
    print_row(name, rows[name])


def print_row(name: str, row: dict[str, Any]) -> None:
    """As soon as it is done."""
    shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items() if k != "losses"}
    print(f"{name}: {shown}", flush=True)


def measure(job: MoEJob, region_gib: int) -> dict[str, dict[str, Any]]:
    """All rows of one job."""
    rows: dict[str, dict[str, Any]] = {}
    attempt(rows, "static", lambda: static_row(job))
    attempt(rows, "recompute", lambda: static_row(job, recomputes=True))
    with emptied():
        try:
            for name, row in paged_rows(job):
                rows[name] = row
                print_row(name, row)
        except Exception as error:
            print_row("paged rows", {"failed": f"{error!r}"[:300]})
    few = replace(job, layers=FEW_LAYERS)
    attempt(rows, f"static, {FEW_LAYERS} layers", lambda: static_row(few))
    attempt(rows, f"save_on_cpu, {FEW_LAYERS} layers", lambda: save_on_cpu_row(few))
    attempt(rows, "partial, 3 layers", lambda: partial_row(job))
    attempt(rows, "region", lambda: region_row(job, region_gib))
    return rows


def lines_of(found: Iterator[tuple[str, str, str]]) -> Iterator[str]:
    """Of a table; a row that failed ends it."""
    try:
        for name, value, bound in found:
            yield f"| {name} | {value} | {bound} |"
    except Exception as error:
        yield f"| the rest | {error!r} | |"


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--job", choices=[*JOBS, "both"], default="both")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--region-gib", type=int, default=24)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(words)
    torch.cuda.set_device(DEVICE)
    where = environment(DEVICE)
    head = f"{where.get('gpu')}, torch {where['torch']}, commit {where.get('commit', 'unknown')}"
    lines = [head, "", "| what | found | bound |", "| --- | --- | --- |", *lines_of(copies())]
    lines.append(f"| M2 host, a group's forward and backward | {host_ms():.3f} ms | <= 0.25 |")
    report: dict[str, Any] = {"environment": where, "jobs": {}}
    for name in JOBS if given.job == "both" else [given.job]:
        job = replace(JOBS[name], layers=given.layers, iterations=given.iterations)
        rows = report["jobs"][name] = measure(job, given.region_gib)
        found = lines_of(job_lines(job, rows))
        lines += [line.replace("| ", f"| {name}: ", 1) for line in found]
    print("\n".join(lines))
    if given.json is not None:
        given.json.write_text(json.dumps(report | {"lines": lines}, indent=1))


if __name__ == "__main__":
    main()
