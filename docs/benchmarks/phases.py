"""Everything leaves the device and comes back: time against the link, memory, bits.

Usage::

    python docs/benchmarks/phases.py [--params 1.33e9] [--cycles 6] [--json out.json]
    torchrun --nproc-per-node 2 docs/benchmarks/phases.py

Each rank holds the shards of ``--params`` bf16 parameters and their fp32 AdamW state (2.5 and
9.9 GiB with the default), a GPT's tensors under FSDP2. All ranks move at the same time; seconds are
those of the slowest; between offload and reload lie 0.1 s, in which a job would generate.
``offloader`` is :class:`PhaseOffloader`, ``fixed`` the same with ``keep_addresses=True``, ``swap``
two of these that take each other's place, ``loop`` what jobs write by hand: a loop over tensors and
page-locked buffers that are taken in the first cycle and kept.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_offload import PhaseOffloader, swap
from fsdp_offload.bench import machine
from fsdp_offload.bench.iteration import Columns, markdown_table
from fsdp_offload.bench.machine import Row, seconds_of, slowest
from fsdp_offload.bench.model import Job, layers_for, sharded_model
from fsdp_offload.core import dtensor
from fsdp_offload.core.config import GIB
from fsdp_offload.core.devices import free_bytes, release_cached
from fsdp_offload.core.errors import DeviceError

ROWS: Final = ("offloader", "fixed", "swap", "loop")
PHASES: Final[Columns] = (
    ("GiB", "gib", ".2f"),
    *(
        (f"{head}, {way}", key.format(way), form)
        for head, key, form in (
            ("first cycle, s", "first_{}_s", ".3f"),
            ("later, s", "{}_s", ".3f"),
            ("GB/s", "{}_gbps", ".1f"),
            ("of the link", "{}_of_link", ".3f"),
            ("slowest cycle", "worst_{}_of_link", ".3f"),
        )
        for way in ("out", "back")
    ),
    ("freed / payload", "freed_share", ".3f"),
    ("host / payload", "host_over_payload", ".4f"),
    ("same bits", "same_bits", ""),
    ("same addresses", "same_addresses", ""),
)
AWAY_S: Final = 0.1
"""After torch's allocator has given memory back, the first copies to new memory take longer for
about 20 ms (likely the driver clears what it got); a job is away for longer than that."""


def on_all_ranks(holds: bool) -> bool:
    """Whether it holds on each rank."""
    return not machine.slowest([float(not holds)])[0]


class PinnedLoop:
    """Copies each tensor to a buffer of its own and drops it; it comes back as another tensor."""

    def __init__(self, tensors: list[Tensor], device: torch.device) -> None:
        self.tensors, self.device = tensors, device
        self.buffers: list[Tensor] = []

    def offload(self) -> None:
        """All memory is the driver's when this returns."""
        if not self.buffers:
            pin = self.device.type == "cuda"
            self.buffers = [torch.empty_like(t, device="cpu", pin_memory=pin) for t in self.tensors]
        for buffer, tensor in zip(self.buffers, self.tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        machine.synchronize(self.device)
        self.tensors.clear()
        release_cached(self.device)

    def reload(self) -> None:
        """Tensors can be used when this returns."""
        self.tensors += [b.to(self.device, non_blocking=True, copy=True) for b in self.buffers]
        machine.synchronize(self.device)


def build(
    name: str, job: Job, device: torch.device
) -> tuple[PhaseOffloader | PinnedLoop, list[Tensor]]:
    """What moves a model and its AdamW, with fp32 state as large as after a step; their tensors."""
    model = sharded_model(job, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tensors: list[Tensor] = list(model.parameters())
    for parameter in model.parameters():
        state: dict[str, Any] = {"step": torch.tensor(1.0)}
        for moment in ("exp_avg", "exp_avg_sq"):
            state[moment] = torch.zeros_like(parameter, dtype=torch.float32)
            tensors.append(state[moment])
        optimizer.state[parameter] = state
    found = [local for t in tensors if (local := dtensor.local(t)).numel()]
    for words, wanted in random_words(found, device):
        words.copy_(wanted)
    if name == "loop":  # nothing else holds its tensors
        return PinnedLoop(found, device), found
    return PhaseOffloader(model, optimizer, keep_addresses=name == "fixed"), found


def random_words(tensors: list[Tensor], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor, and random bytes for it, NaNs among them, the same each time."""
    generator = torch.Generator(device).manual_seed(0)
    for tensor in tensors:
        flat = tensor.view(-1)
        words = flat.view(torch.int32 if flat.nbytes % 4 == 0 else torch.uint8)
        yield words, torch.empty_like(words).random_(generator=generator)


def measure(name: str, job: Job, device: torch.device, cycles: int, link: Row) -> Row:
    """The first cycle, the median and the slowest of the next ones, and what they leave behind."""
    mover, tensors = build(name, job, device)
    offload: Callable[[], object] = mover.offload
    reload: Callable[[], object] = mover.reload
    n_bytes = moved_bytes = sum(tensor.nbytes for tensor in tensors)
    addresses = [tensor.data_ptr() for tensor in tensors]
    other: Any = None
    if name == "swap":
        offload()
        other, _ = build(name, job, device)
        other.offload()
        reload()
        offload = partial(swap, out=cast(PhaseOffloader, mover), in_=other)
        reload = partial(swap, out=other, in_=cast(PhaseOffloader, mover))
        moved_bytes *= 2  # as much comes as leaves
    times: dict[str, list[float]] = {"out": [], "back": []}
    freed = []
    for _ in range(cycles):
        machine.free_everything(device)
        before = free_bytes(device) or 0
        times["out"].append(seconds_of(offload, device))
        freed.append(((free_bytes(device) or 0) - before) / n_bytes)
        if device.type == "cuda":
            time.sleep(AWAY_S)
        times["back"].append(seconds_of(reload, device))
    row: Row = {"name": name, "status": "ok", "gib": n_bytes / GIB, "cycles": cycles}
    for way, raw in (("out", "d2h"), ("back", "h2d")):
        first, *later = slowest(times[way])
        row |= {f"first_{way}_s": first, f"{way}_s": statistics.median(later)}
        row[f"{way}_gbps"] = moved_bytes / row[f"{way}_s"] / 1e9
        if link:
            gbps = link["h2d+d2h_gbps" if name == "swap" else f"{raw}_gbps"]
            row[f"{way}_of_link"] = row[f"{way}_gbps"] / gbps
            row[f"worst_{way}_of_link"] = moved_bytes / max(later) / 1e9 / gbps
    if device.type == "cuda" and name != "swap":
        row["freed_share"] = -max(slowest([-share for share in freed]))
    same = all(torch.equal(*pair) for pair in random_words(tensors, device))
    row["same_bits"] = on_all_ranks(same)
    stayed = [tensor.data_ptr() for tensor in tensors] == addresses
    row["same_addresses"] = on_all_ranks(stayed)
    if isinstance(mover, PhaseOffloader):
        row["host_over_payload"] = mover.statistics().host_bytes / n_bytes
    for each in (mover, other):
        if isinstance(each, PhaseOffloader):
            each.close()
    return row


def main(argv: Sequence[str] | None = None) -> Row:
    """Run all rows; rank 0 prints a table, and with ``--json`` writes everything."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--params", type=float, default=1.33e9, help="of each rank's shards")
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=60000)
    parser.add_argument("--cycles", type=int, default=6, help="the first and at least one more")
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=ROWS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    with machine.process_group(options.device) as device:
        params = options.params * dist.get_world_size()
        layers = layers_for(params, options.dim, options.vocabulary)
        job = Job(layers, options.dim, options.vocabulary)
        link: Row = machine.measure_link(device, 5) if device.type == "cuda" else {}
        rows: list[Row] = []
        for name in options.rows:
            machine.free_everything(device)
            try:
                rows.append(measure(name, job, device, options.cycles, link))
            except DeviceError as error:  # fixed addresses on a CPU, torch before 2.13
                rows.append({"name": name, "status": "not available", "reason": str(error)})
        report = machine.publish(device, job, rows, link, options.json)
        if dist.get_rank() == 0:
            print(markdown_table(report, PHASES))
    return report


if __name__ == "__main__":
    main()
