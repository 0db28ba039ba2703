"""Everything leaves the device and comes back: time against the link, memory, bits.

Usage::

    python -m fsdp_offload.bench.phases [--params 1.33e9] [--cycles 6] [--json out.json]
    torchrun --nproc-per-node 2 -m fsdp_offload.bench.phases
    python -m fsdp_offload.bench.phases --device cpu

Each rank holds the shards of ``--params`` bf16 parameters and their fp32 AdamW state (2.5 and
9.9 GiB with the default), a GPT's tensors under FSDP2. All ranks move at the same time; seconds are
those of the slowest; between offload and reload lie 0.1 s, in which a job would generate.
``offloader`` is :class:`PhaseOffloader`, ``fixed`` the same with ``keep_addresses=True``, ``swap``
two of these that take each other's place, ``loop`` what jobs write by hand: a loop over tensors and
page-locked buffers that are taken in the first cycle and kept.

Where the time out goes: ``out_copies_s`` is from the first copy's start to the last one's end, as
the device saw it (of ``loop``, as the host saw it). What is missing to ``out_s`` is what comes
before the first copy, and the ``freed_segments`` calls of ``cudaFree`` behind the last one;
``free_ms_per_gib`` of the report says what these take for segments of several sizes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core.backend import release_cached
from ..core.errors import ConfigError, DeviceError
from ..core.progress import progress
from ..phases import PhaseOffloader, swap
from . import arguments, machine
from .machine import GIB, Row, seconds_of, slowest
from .model import Job, layers_for, sharded_model
from .table import PHASES, markdown_table

AWAY_S: Final = 0.1
"""After torch's allocator has given memory back, the first copies to new memory take longer for
about 20 ms (likely the driver clears what it got); a job is away for longer than that."""


class Payload:
    """A model, its AdamW with fp32 state as large as after a step, and what moves them."""

    def __init__(self, job: Job, device: torch.device, name: str) -> None:
        self.device = device
        model = sharded_model(job, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        tensors: list[Tensor] = list(model.parameters())
        for parameter in model.parameters():
            state: dict[str, Any] = {"step": torch.tensor(1.0)}
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.zeros_like(parameter, dtype=torch.float32)
                tensors.append(state[moment])
            optimizer.state[parameter] = state
        # The loop's tensors are held by nothing else.
        self.phases = (
            None
            if name == "loop"
            else PhaseOffloader(model, optimizer, keep_addresses=name == "fixed")
        )
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        self.tensors = [t.detach() for t in local if t.numel()]

    def fill(self) -> None:
        """Random bytes, NaNs among them, the same each time."""
        for words, wanted in self._words():
            words.copy_(wanted)

    def is_filled(self) -> bool:
        """Whether each byte is what :meth:`fill` wrote."""
        return all(torch.equal(words, wanted) for words, wanted in self._words())

    def _words(self) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator(self.device).manual_seed(0)
        found = []
        for tensor in self.tensors:
            flat = tensor.view(-1)
            words = flat.view(torch.int32 if flat.nbytes % 4 == 0 else torch.uint8)
            found.append((words, torch.empty_like(words).random_(generator=generator)))
        return found


class PinnedLoop:
    """Copies each tensor to a buffer of its own and drops it; it comes back as another tensor."""

    def __init__(self, payload: Payload) -> None:
        self.payload, self.buffers = payload, list[Tensor]()
        self.copies_s = 0.0

    def offload(self) -> None:
        """All memory is the driver's when this returns."""
        tensors, pin = self.payload.tensors, self.payload.device.type == "cuda"
        if not self.buffers:
            self.buffers = [torch.empty_like(t, device="cpu", pin_memory=pin) for t in tensors]
        began = time.perf_counter()
        for buffer, tensor in zip(self.buffers, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        machine.synchronize(self.payload.device)
        self.copies_s = time.perf_counter() - began
        tensors.clear()
        release_cached(self.payload.device)

    def reload(self) -> None:
        """Tensors can be used when this returns."""
        device = self.payload.device
        self.payload.tensors += [b.to(device, non_blocking=True, copy=True) for b in self.buffers]
        machine.synchronize(device)


def measure(name: str, job: Job, device: torch.device, cycles: int, link: Row) -> Row:
    """The first cycle, the median and the slowest of the next ones, and what they leave behind."""
    one = Payload(job, device, name)
    one.fill()
    payloads = [one]
    loop = PinnedLoop(one)
    if one.phases is None:
        offload: Callable[[], object] = loop.offload
        reload: Callable[[], object] = loop.reload
    elif name == "swap":
        one.phases.offload()
        payloads.append(other := Payload(job, device, name))
        assert other.phases is not None
        other.phases.offload()
        one.phases.reload()
        offload = partial(swap, out=one.phases, in_=other.phases)
        reload = partial(swap, out=other.phases, in_=one.phases)
    else:
        offload, reload = one.phases.offload, one.phases.reload
    n_bytes = sum(tensor.nbytes for tensor in one.tensors)
    addresses = [tensor.data_ptr() for tensor in one.tensors]
    times: dict[str, list[float]] = {"out": [], "back": []}
    copies: dict[str, list[float]] = {"out": [], "back": []}
    freed, segments = [], []
    for _ in range(cycles):
        machine.free_everything(device)
        before, count = _free_bytes(device), _freed_segments(device)
        times["out"].append(seconds_of(offload, device))
        freed.append((_free_bytes(device) - before) / n_bytes)
        segments.append(_freed_segments(device) - count)
        if device.type == "cuda":
            time.sleep(AWAY_S)
        times["back"].append(seconds_of(reload, device))
        for way, seconds in _copy_seconds(one, loop).items():
            copies[way].append(seconds)
    row: Row = {"name": name, "status": "ok", "gib": n_bytes / GIB, "cycles": cycles}
    for way, raw in (("out", "d2h"), ("back", "h2d")):
        first, *later = slowest(times[way])
        moved = n_bytes * len(payloads)  # in a swap as much comes as leaves
        row |= {f"first_{way}_s": first, f"{way}_s": statistics.median(later)}
        row[f"{way}_copies_s"] = statistics.median(slowest(copies[way])[1:])
        row[f"{way}_gbps"] = moved / row[f"{way}_s"] / 1e9
        if link:
            gbps = link["h2d+d2h_gbps" if name == "swap" else f"{raw}_gbps"]
            row[f"{way}_of_link"] = row[f"{way}_gbps"] / gbps
            row[f"worst_{way}_of_link"] = moved / max(later) / 1e9 / gbps
    if device.type == "cuda" and name != "swap":
        row["freed_share"] = -max(slowest([-share for share in freed]))
        row["freed_segments"] = statistics.median(segments[1:])
    if one.phases is not None:
        row["host_over_payload"] = one.phases.statistics().host_bytes / n_bytes
    row["same_bits"] = machine.on_all_ranks(one.is_filled())
    stayed = [tensor.data_ptr() for tensor in one.tensors] == addresses
    row["same_addresses"] = machine.on_all_ranks(stayed)
    for payload in payloads:
        if payload.phases is not None:
            payload.phases.close()
    return row


def _copy_seconds(payload: Payload, loop: PinnedLoop) -> dict[str, float]:
    """Of the last cycle's copies; the loop allocates between its copies back."""
    if payload.phases is None:
        return {"out": loop.copies_s, "back": 0.0}
    figures = payload.phases.statistics()
    return {
        way: sum(kind.seconds for kind in kinds.values())
        for way, kinds in (("out", figures.offloaded), ("back", figures.reloaded))
    }


def _freed_segments(device: torch.device) -> int:
    """How often torch's allocator has called ``cudaFree``."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device)["segment.all.freed"])


def measure_frees(device: torch.device) -> dict[int, float]:
    """Milliseconds per GiB that torch's allocator takes to give segments back to the driver, by
    their size in MiB: 4 GiB, all ranks at the same time."""
    found = {}
    for mib in (16, 64, 256, 1024):
        held = [
            torch.empty(mib << 20, dtype=torch.uint8, device=device) for _ in range(4096 // mib)
        ]
        machine.synchronize(device)
        held.clear()
        seconds = seconds_of(partial(release_cached, device), device)
        found[mib] = slowest([seconds])[0] * 1e3 / 4
    return found


def _free_bytes(device: torch.device) -> int:
    """As the driver says: what another process could take."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def main(argv: Sequence[str] | None = None) -> Row:
    """Run all rows; rank 0 prints a table, and with ``--json`` writes everything."""
    options = arguments.phases().parse_args(argv)
    options.device = options.device or machine.default_device()
    names = options.rows.split(",")
    if unknown := [name for name in names if name not in arguments.PHASES_ROWS]:
        raise ConfigError(
            f"row {unknown[0]!r}",
            reason="it is not measured",
            remedy=f"use {', '.join(arguments.PHASES_ROWS)}",
        )
    with machine.process_group(options.device) as device:
        sizes = arguments.with_sizes(options, is_small=options.device == "cpu")
        params = options.params or (1e6 if options.device == "cpu" else 1.33e9)
        params *= dist.get_world_size()
        sizes["layers"] = layers_for(params, sizes["dim"], sizes["vocabulary"])
        job = Job(**sizes)
        link: Row = machine.measure_link(device, 5) if device.type == "cuda" else {}
        if link:
            machine.free_everything(device)
            link["free_ms_per_gib"] = measure_frees(device)
        rows = []
        with progress(len(names), "measuring", unit=" rows") as bar:
            for name in names:
                machine.free_everything(device)
                try:
                    rows.append(measure(name, job, device, options.cycles, link))
                except DeviceError as error:  # fixed addresses on a CPU, torch before 2.13
                    rows.append({"name": name, "status": "not available", "reason": str(error)})
                bar.advance()
        report = machine.publish(device, job, rows, link, options.json)
        if dist.get_rank() == 0:
            print(markdown_table(report, PHASES))
    return report


if __name__ == "__main__":
    main()
