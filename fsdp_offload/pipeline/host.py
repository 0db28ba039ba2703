"""Buckets of the host lane: gradients come to the host, CPU cores update arena memory, parameters
go back. How they pass through the lane: ``host_lane.py``.

[Note: outside writes]
The arena's master is authoritative here, so a weight that other code wrote into a shard must
be noticed, or the next update would revert it. Version counters do not see such writes. A
checksum of the bucket's shards, taken on the device after our own write, is compared before the
next update; where it differs, masters are re-seeded from the shards, element by element.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core import dtensor
from ..core.backend import Backend, Event, PendingEvent
from ..core.storage import present
from ..link import HostRange
from ..plan import Bucket, Kind, Layout, Slice
from ..plan.layout import kind_range, split
from ..update import codec
from ..update.bucket import copy_present, slice_state
from ..update.checksum import checksum
from ..update.params import MasterForm, ParamState, Work
from ..update.schema import FUSED_ON_CPU, host_flags, torch_class
from ..update.shadow import Shadow
from .link import Copy
from .worker import Calls, Outcome

UNIT_NUMEL: Final = 15 << 17
"""Elements that one host thread updates in one call, about 2 M: 6 to 8 ms of fused AdamW on one
core. Half of it costs a fifth of the speed, because the calls themselves take turns (the
interpreter lock); twice as much leaves cores without work. A third of a default bucket of
``overlap="step"``."""
FLAG_DTYPE: Final = torch.int64
"""Of the difference between two checksums."""
FLAG_STRIDE: Final = 2
"""Flags per slot, of which one is used: Triton's launches are cheap where 16 bytes are aligned."""


@dataclass(frozen=True)
class HostStagingSizes:
    """How large the host lane's buffers are."""

    host_start: int  # of what lies in host memory, a multiple of 256 bytes
    numel_bytes: int  # the masters, or gradients, of the largest bucket
    shard_bytes: int  # its shards
    depth: int  # gradient buffers in host memory

    @property
    def host_stop(self) -> int:
        """End of what lies in host memory."""
        return self.host_start + self.depth * (self.numel_bytes + FLAG_STRIDE * FLAG_DTYPE.itemsize)


def ring_depth(threads: int, *, bucket_numel: int, buckets: int, least: int) -> int:
    """Gradient buffers such that host threads never run out of work; ``least`` for the transfers.

    One arrives. The others hold one and a half times as many units as there are threads: units
    end at different times, and a buffer is free only when all of its units have ended.
    """
    units = max(1, -(-bucket_numel // UNIT_NUMEL))
    wanted = 1 + -(-3 * threads // (2 * units))
    return max(2, min(max(least, wanted), buckets))


class HostStaging:
    """Buffers between device and host, shared by all host buckets; what is in them, and masters,
    cross the link by ``across``."""

    def __init__(
        self, backend: Backend, host: HostRange, sizes: HostStagingSizes, across: Copy
    ) -> None:
        start, numel_bytes, depth = sizes.host_start, sizes.numel_bytes, sizes.depth
        self.depth = depth
        # On the device, each used by one stream and of no content between steps: on the way out
        # gradients and copies of the shards, on the way back masters and what goes into shards.
        self.gradients = backend.allocate(numel_bytes)
        self.observed = backend.allocate(sizes.shard_bytes)
        self.masters = backend.allocate(numel_bytes)
        self.rounded = backend.allocate(sizes.shard_bytes)
        self.on_device = [self.gradients, self.observed, self.masters, self.rounded]
        self.across = across
        self.flag_memory = host.tensor(start + depth * numel_bytes, depth * FLAG_STRIDE, FLAG_DTYPE)
        self.host_gradients = [
            host.tensor(start + i * numel_bytes, numel_bytes, torch.uint8) for i in range(depth)
        ]
        self.host_user: list[Outcome | None] = [None] * depth  # last update of a host buffer


@dataclass(frozen=True)
class HostUnit:
    """Pieces that one thread updates in one call."""

    shadow: Shadow
    received: list[Tensor]  # gradients in host memory, per slice

    def update(self, work: Work) -> None:
        """Step the arena in place."""
        gradients = [
            None if work.gradients[sliced.param.index] is None else received
            for sliced, received in zip(self.shadow.slices, self.received, strict=True)
        ]
        self.shadow.step(gradients, work.snapshot)


class HostBucket:
    """One bucket of the host lane: its arena views, shards and staging views."""

    def __init__(
        self,
        optimizer: Optimizer,
        layout: Layout,
        bucket: Bucket,
        params: list[ParamState],
        arena: HostRange,
        staging: HostStaging,
        index: int,
    ) -> None:
        self.index, self.bucket = index, bucket
        self.indices = sorted({s.spec.index for s in bucket.slices})
        own = [params[s.spec.index] for s in bucket.slices]
        compute, shard = own[0].compute_dtype, own[0].info.dtype
        self._rounds_by_codec = shard == torch.bfloat16 and compute == torch.float32
        self._master_kind = Kind(MasterForm.WHOLE.value, compute)
        span = next(s for s in bucket.spans if s.kind == self._master_kind)
        self.sent_bytes = span.n_bytes
        self.shards = [
            dtensor.local(r.parameter).view(-1)[s.start : s.stop]
            for r, s in zip(own, bucket.slices, strict=True)
        ]
        self.master = arena.tensor(span.arena_start, span.n_bytes // compute.itemsize, compute)
        self.master_slices = self._cut(self.master)
        self._across = staging.across
        self._use_staging(staging, compute, shard)
        self.expected = self._observe()  # checksum of the shards as we last wrote them: 0-dim
        self.written: PendingEvent | None = None
        """After it, the shards are as the last iteration leaves them; None: it left them alone."""
        self.units = self._make_units(optimizer, layout, params, arena)

    def _cut(self, flat: Tensor) -> list[Tensor]:
        """Each slice's part of memory that is laid out like the masters."""
        return [flat[s.scratch_start : s.scratch_start + s.numel] for s in self.bucket.slices]

    def _use_staging(self, staging: HostStaging, compute: torch.dtype, shard: torch.dtype) -> None:
        """Views of the buffers that the bucket passes through."""
        numel, slot = self.master.numel(), self.index % staging.depth

        def flat(memory: Tensor, dtype: torch.dtype) -> Tensor:
            return memory[: numel * dtype.itemsize].view(dtype)

        self.sent = flat(staging.gradients, compute)
        self.sent_slices = self._cut(self.sent)
        self.observed = flat(staging.observed, shard)
        self.observed_slices = self._cut(self.observed)
        self.received = flat(staging.host_gradients[slot], compute)
        self.returned = flat(staging.masters, compute)
        self.rounded = flat(staging.rounded, shard)
        self.rounded_slices = self._cut(self.rounded)
        self.flag = torch.zeros(1, dtype=FLAG_DTYPE, device=self.sent.device)
        self.host_flag = staging.flag_memory[slot * FLAG_STRIDE :][:1]

    def _make_units(
        self, optimizer: Optimizer, layout: Layout, params: list[ParamState], arena: HostRange
    ) -> list[HostUnit]:
        def view(slice_: Slice, kind: Kind, numel: int) -> Tensor:
            start, stop = kind_range(slice_, kind, numel, layout.offsets)
            return arena.tensor(start, (stop - start) // kind.itemsize, kind.dtype)

        overrides = {
            index: host_overrides(optimizer, optimizer.param_groups[index], self.master.dtype)
            for index in {params[s.spec.index].group for s in self.bucket.slices}
        }
        units = []
        for slices in split(self.bucket, UNIT_NUMEL):
            states = [
                slice_state(params[s.spec.index], s, view(s, self._master_kind, s.spec.numel), view)
                for s in slices
            ]
            received = [self.received[s.scratch_start : s.scratch_start + s.numel] for s in slices]
            shadow = Shadow(optimizer, states, overrides, on_host=True)
            units.append(HostUnit(shadow, received))
        return units

    # -- on the stream out

    def send_gradients(self, gradients: list[Tensor | None]) -> None:
        """Cast gradients into host memory; tell whether the shards are as we last wrote them."""
        copy_present(self.sent_slices, gradients, gradients)
        torch.sub(self._observe(), self.expected, out=self.flag[0])
        self._across(self.sent, self.received)
        self._across(self.flag, self.host_flag)

    def _observe(self) -> Tensor:
        self.observed.zero_()  # gaps between parameters are zero, as in the arena
        torch._foreach_copy_(self.observed_slices, self.shards)
        return checksum(self.observed)

    # -- on the stream back

    def write_shards(self, gradients: list[Tensor | None]) -> None:
        """Round the masters into the shards of parameters that had a gradient."""
        self._across(self.master, self.returned)
        if self._rounds_by_codec:
            codec.round_to_value(self.returned, self.rounded)
        else:
            self.rounded.copy_(self.returned)
        copy_present(self.shards, self.rounded_slices, gradients)
        self.expected = checksum(self.rounded)

    # -- on the host threads

    def update(self, arrived: Event, work: Work) -> Calls:
        """Wait for the gradients; the updates of the units, to be run in any order."""
        arrived.synchronize()
        if int(self.host_flag[0]):
            self.reseed()
        return [functools.partial(unit.update, work) for unit in self.units]

    def trust_shards(self) -> None:
        """Take the shards as they are for what was last written; the device must be idle."""
        self.expected = self.observe()

    def observe(self) -> Tensor:
        """The shards' checksum; the device must be idle."""
        for shard in self.shards:
            present(shard)
        return self._observe()

    def reseed(self) -> None:
        """Take the shards' values over where a master does not round to its shard."""
        for master, shard in zip(self.master_slices, self.shards, strict=True):
            codec.reseed_where_changed(present(shard).cpu(), master)


def host_overrides(
    optimizer: Optimizer, group: dict[str, Any], compute: torch.dtype
) -> dict[str, Any]:
    """The fused CPU kernel where the class has one and the user left the choice open.

    Half precision is left out: fused SGD on the CPU skips elements there (pytorch #191763).
    """
    overrides: dict[str, Any] = {**host_flags(group)}
    left_open = group.get("fused") is None and group.get("foreach") is None
    is_fused = torch_class(optimizer) in FUSED_ON_CPU
    has_kernel = is_fused and compute in (torch.float32, torch.float64)
    if left_open and has_kernel:
        overrides["fused"] = True
    return overrides
