"""Builds lanes, arena and slots for a list of parameters, and runs a step through them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.backend import Backend, Event, Stream
from ..core.config import OffloadConfig, align
from ..core.errors import DeviceMemoryError
from ..core.progress import warn
from ..core.storage import span
from ..link import HostPool, HostRange, local_ranks
from ..plan import Kind, Layout, Slice, make_layout
from ..plan.residency import choose
from ..update.bucket import BucketUpdate, Scratch
from ..update.one_kernel import StepPowers
from ..update.params import MasterForm, ParamState, Snapshot, Work
from ..update.schema import is_torch_class, make_shadow, raw_step
from ..update.state import fill_initial, write_master
from .host import HostBucket, HostStaging, HostStagingSizes, ring_depth
from .host_lane import HostLane
from .link import copier
from .streamed import StreamedBucket, StreamedLane, device_bytes_of, preferred
from .worker import InlineWorker, ThreadPool, Worker, thread_count, thread_setup

States = dict[Tensor, dict[str, Any]]

HOST_DEPTH = 6
"""Least number of gradient buffers of the host lane in host memory."""
HOST_BUCKET_FACTOR = 2
"""Host buckets are that much larger with ``overlap="step"``: each costs a hand-over between
threads. With the others all buckets are large."""


@dataclass(frozen=True)
class DtypeGroup:
    """Parameters that share a lane and every dtype, laid out together."""

    params: list[ParamState]
    layout: Layout

    @property
    def first(self) -> ParamState:
        """A representative."""
        return self.params[0]


def make_dtype_groups(params: Sequence[ParamState], config: OffloadConfig) -> list[DtypeGroup]:
    """Group parameters by lane and dtypes (order kept) and lay each group out in one arena."""
    host_factor = HOST_BUCKET_FACTOR if config.overlap == "step" else 1

    def key(param: ParamState) -> tuple[str, ...]:
        kinds = tuple(kind.name for kind, _ in param.kinds) if param.moments else ()
        parts = (param.lane, param.info.dtype, param.compute_dtype, param.form, kinds)
        return (*map(str, parts), str(param.schema.elementwise))

    order = {k: i for i, k in reversed(list(enumerate(map(key, params))))}
    ordered = sorted(params, key=lambda param: order[key(param)])  # stable
    dtype_groups, stop = [], 0
    for _, group in groupby(ordered, key=key):
        params = list(group)
        start = 0 if params[0].lane == "resident" else stop
        layout = make_layout(
            [r.spec for r in params],
            bucket_bytes=config.bucket_bytes * (host_factor if params[0].lane == "host" else 1),
            arena_start=start,
        )
        if params[0].lane != "resident":
            stop = layout.arena_stop
        dtype_groups.append(DtypeGroup(params, layout))
    return dtype_groups


class NativeUpdate:
    """What is updated as the class does it, on the device, with the state that the class makes:
    parameters of torch's classes whose state :mod:`..update.schema` does not declare (of a tensor
    subclass, Adafactor's). A shadow steps the parameters themselves, whole.

    Args:
        optimizer: the wrapped optimizer.
        placed: (parameter, index of its param_group), in order.
        state: what the optimizer shows as its state; the class reads and writes it itself, so
            what the caller puts there or deletes counts as it does without wrapping.
    """

    def __init__(
        self, optimizer: Optimizer, placed: list[tuple[Tensor, int]], state: States
    ) -> None:
        self.parameters = [parameter for parameter, _ in placed]
        self._indices = sorted({group for _, group in placed})
        groups: list[dict[str, Any]] = [
            {"params": [p for p, group in placed if group == index]} for index in self._indices
        ]
        self._shadow = make_shadow(optimizer, groups)
        self._step = raw_step(type(optimizer))
        self._shadow.__dict__["state"] = state

    def run(self, snapshot: Snapshot) -> None:
        """Step every parameter that has a gradient."""
        for group, index in zip(self._shadow.param_groups, self._indices, strict=True):
            group.update(snapshot.groups[index])
        with torch.no_grad():
            self._step(self._shadow)


class Engine:
    """Memory and lanes of the parameters that were added together.

    Raises:
        HostMemoryError: the state does not fit; nothing was allocated.
        PinningError: the driver refused; everything is given back.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: list[ParamState],
        added: Sequence[ParamState],
        natives: list[tuple[Tensor, int]],
        config: OffloadConfig,
        backend: Backend,
        *,
        device_bytes: int,
        pool: HostPool,
        native_state: States,
    ) -> None:
        self.backend, self.config, self._added = backend, config, list(added)
        dtype_groups = make_dtype_groups(added, config)
        away = [s for s in dtype_groups if s.first.lane != "resident"]
        state_bytes = max((s.layout.arena_stop for s in away), default=0)
        self.payload_bytes = sum(s.layout.payload_bytes for s in away)
        host = [s for s in dtype_groups if s.first.lane == "host"]
        threads = host_threads(config) if host else 1
        # A class of the user's own may keep what its instances share: one thread at a time.
        threads_of = (threads, 1) if is_torch_class(optimizer) else (1, threads)
        sizes = _host_staging_sizes(host, threads_of[0], start=align(state_bytes, 256))
        self._pool = pool
        # State, and behind it the gradient ring of the host lane.
        self._arena = arena = pool.take(sizes.host_stop if host else state_bytes)
        self.worker: Worker | None = None
        self.streamed: StreamedLane | None = None
        self.host: HostLane | None = None
        self.update = backend.stream("update")
        self._resident_updated: Event | None = None
        self._host_written: Event | None = None
        self._without_scratch: list[BucketUpdate] = []  # one of each kind, while there is none
        # Of each gate: whether it is in the resident lane, and its buckets of the two others.
        self._gates: list[tuple[bool, list[HostBucket], list[int]]] = []
        try:
            self._make_tensors(dtype_groups, arena)
            self.scratch = self._scratch(dtype_groups)
            self.resident = self._resident(optimizer, dtype_groups, params)
            self.streamed = self._streamed(optimizer, dtype_groups, params, arena, device_bytes)
            self._release_scratch()
            if host:
                across = copier(backend.device, pinned=arena.pinned)
                staging = HostStaging(backend, arena, sizes, across)
                self.host = self._host(optimizer, host, params, arena, staging, threads_of)
            self.native = NativeUpdate(optimizer, natives, native_state) if natives else None
            # Slots and scratch may be memory that pending work of the caller's stream still
            # uses: the allocator orders reuse on that stream only.
            backend.current_stream().synchronize()
        except BaseException:
            self.close()
            raise

    @property
    def lanes(self) -> list[StreamedLane | HostLane]:
        """Those through which buckets travel, as far as there are some."""
        return [lane for lane in (self.streamed, self.host) if lane is not None]

    # ------------------------------------------------------------------ building

    def _make_tensors(self, dtype_groups: list[DtypeGroup], arena: HostRange) -> None:
        """The authoritative state tensors: flat, own storage, offset 0."""
        for group in dtype_groups:
            for param in group.params:
                for kind, numel in param.kinds:
                    if param.lane == "resident":
                        tensor = torch.zeros(numel, dtype=kind.dtype, device=self.backend.device)
                    else:
                        offset = group.layout.offsets[param.index, kind.name]
                        tensor = arena.tensor(offset, numel, kind.dtype)
                    param.tensors[kind.name] = tensor
                fill_initial(param, only_shown=True)
                if param.form is MasterForm.WHOLE:
                    write_master(param, {})

    def _scratch(self, dtype_groups: list[DtypeGroup]) -> Scratch:
        groups = [group for group in dtype_groups if group.first.lane != "host"]
        sizes = [Scratch.bytes_of(group.first, group.layout.scratch_numel) for group in groups]
        slices = sum(len(bucket.slices) for group in groups for bucket in group.layout.buckets)
        memory = self.backend.allocate(max(sizes, default=0))
        return Scratch(memory, StepPowers(slices, self.backend.device))

    def _resident(
        self, optimizer: Optimizer, dtype_groups: list[DtypeGroup], params: list[ParamState]
    ) -> list[BucketUpdate]:
        def view(slice_: Slice, kind: Kind, numel: int) -> Tensor:
            tensor = params[slice_.spec.index].tensors[kind.name]
            if not slice_.spec.cuttable:
                return tensor
            step = kind.block_numel
            return tensor[slice_.start // step : -(-slice_.stop // step)]

        return [
            BucketUpdate(optimizer, bucket, params, view, self.scratch)
            for group in dtype_groups
            if group.first.lane == "resident"
            for bucket in group.layout.buckets
        ]

    def _streamed(
        self,
        optimizer: Optimizer,
        dtype_groups: list[DtypeGroup],
        params: list[ParamState],
        arena: HostRange,
        device_bytes: int,
    ) -> StreamedLane | None:
        pairs = [
            (group.layout, bucket)
            for group in dtype_groups
            if group.first.lane == "streamed"
            for bucket in group.layout.buckets
        ]
        if not pairs:
            return None
        sizes = [device_bytes_of(bucket) for _, bucket in pairs]
        slot_bytes = max(sizes)
        overlap = self.config.overlap or "step"
        count, staying = choose(sizes, preferred(range(len(sizes)), overlap), device_bytes)
        slots = [self.backend.allocate(slot_bytes) for _ in range(count)]
        own = {i: self.backend.allocate(sizes[i]) for i in sorted(staying)}
        lane = StreamedLane(self.backend, self.update, slots, own, overlap)
        lane.use(
            [
                StreamedBucket(
                    optimizer,
                    layout,
                    bucket,
                    params,
                    arena,
                    own[i] if i in own else slots[i % count],
                    self.scratch,
                )
                for i, (layout, bucket) in enumerate(pairs)
            ]
        )
        return lane

    def _release_scratch(self) -> None:
        """Unless an update needs it every time."""
        streamed = self.streamed.buckets if self.streamed is not None else []
        updates = [*self.resident, *(bucket.update for bucket in streamed)]
        kinds = {update.groups_without_scratch: update for update in updates}
        if updates and frozenset() not in kinds:
            self.scratch.release()
            self._without_scratch = list(kinds.values())

    def _host(
        self,
        optimizer: Optimizer,
        dtype_groups: list[DtypeGroup],
        params: list[ParamState],
        arena: HostRange,
        staging: HostStaging,
        threads: tuple[int, int],
    ) -> HostLane:
        setup = thread_setup(self.backend)
        self.worker = ThreadPool(*threads, setup) if self.backend.has_threads else InlineWorker()
        lane = HostLane(self.backend, staging, self.worker, setup)
        pairs = [(s.layout, bucket) for s in dtype_groups for bucket in s.layout.buckets]
        lane.buckets = [
            HostBucket(optimizer, layout, bucket, params, arena, staging, i)
            for i, (layout, bucket) in enumerate(pairs)
        ]
        return lane

    # ------------------------------------------------------------------ running

    def prepare(self, snapshot: Snapshot) -> None:
        """Before an iteration: scratch memory, if an update needs it now and there is none.

        Raises:
            DeviceMemoryError: there is no room for it; nothing was updated.
        """
        if not any(update.needs_scratch(snapshot) for update in self._without_scratch):
            return
        try:
            self.update.launch(self.scratch.fill)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"an update by the optimizer's class on {self.backend.device}",
                reason=f"there is no room for {self.scratch.memory.nbytes} bytes of scratch memory",
                remedy="free device memory and call step() again, or keep hyper-parameters as "
                "numbers and fused=True, which needs none",
            ) from error
        self._without_scratch = []

    def offer(self, work: Work) -> None:
        """More gradients are there: enqueue the buckets that have all of theirs, in order."""
        if self.host is not None:
            self.host.offer(work, complete=False)
        if self.streamed is not None:
            self.streamed.run(work, complete=False)

    def run(self, work: Work, start: Event) -> None:
        """Enqueue the rest of the iteration after ``start``, where all gradients are ready.

        With ``overlap="step"`` the host waits for the host lane's threads, else for nothing.
        """
        self.update.wait(start)

        def on_device() -> None:
            if self.native is not None:
                with span("update"):
                    self.update.launch(self.native.run, work.snapshot)
            for bucket in self.resident:
                gradients = work.of(bucket.bucket.slices)
                if any(gradient is not None for gradient in gradients):
                    with span("update"):
                        self.update.launch(bucket.run, gradients, work.snapshot)
            if self.native is not None or self.resident:
                self._resident_updated = self.update.record()
            if self.streamed is not None:
                self.streamed.run(work, complete=True)

        self._host_written = None
        if self.host is None:
            on_device()
        elif self.config.overlap != "step" or self.streamed is not None:
            self.host.offer(work, complete=True)
            on_device()  # meanwhile the lane's own thread enqueues what host threads have updated
        else:
            self._host_written = self.host.run(work, start, on_device)

    def finish(self, stream: Stream) -> None:
        """Make ``stream`` wait for every update that was enqueued."""
        if self._host_written is not None:
            stream.wait(self._host_written)
        for bucket in self.host.buckets if self.host is not None else ():
            if bucket.written is not None:
                stream.wait(bucket.written)
        stream.wait(self.update.record())

    def watch_gates(self, gates: Sequence[frozenset[int]]) -> None:
        """``gates``: sets of parameters whose updates are asked for by :meth:`updated`; the last
        one has the native parameters besides."""
        resident = {s.spec.index for bucket in self.resident for s in bucket.bucket.slices}
        native = gates[-1] if self.native is not None else None
        host = self.host.buckets if self.host else []
        streamed = self.streamed.buckets if self.streamed else []
        self._gates = [
            (
                gate is native or not gate.isdisjoint(resident),
                [bucket for bucket in host if not gate.isdisjoint(bucket.indices)],
                [i for i, bucket in enumerate(streamed) if not gate.isdisjoint(bucket.indices)],
            )
            for gate in gates
        ]

    def updated(self, gate: int) -> list[Event]:
        """Events after which the shards of a gate are as the last :meth:`run` leaves them."""
        is_resident, on_host, streamed = self._gates[gate]
        events: list[Event | None] = [self._resident_updated] if is_resident else []
        events += [bucket.written for bucket in on_host]
        if streamed and self.streamed is not None:
            events.append(self.streamed.updated(streamed))
        return [event for event in events if event is not None]

    def synchronize(self) -> None:
        """Block until every update has run, and what travels is back in host memory."""
        with contextlib.ExitStack() as waits:  # runs all of them, even if one raises
            for lane in (self.host, self.streamed, self.update):
                if lane is not None:
                    waits.callback(lane.synchronize)

    def prefetch(self) -> None:
        """Fetch state for the next iteration, as far as there are slots for it."""
        if self.streamed is not None:
            self.streamed.prefetch()

    def flush(self) -> None:
        """Block until host memory has all state; updates have been waited for."""
        if self.streamed is not None:
            self.streamed.flush()

    # ------------------------------------------------------------------ device memory

    @property
    def staying(self) -> frozenset[int]:
        """Buckets that stay on the device."""
        return frozenset() if self.streamed is None else frozenset(self.streamed.staying)

    @property
    def uses_link(self) -> bool:
        """Whether updates move state or gradients between device and host memory."""
        return self.host is not None or (self.streamed is not None and bool(self.streamed.slots))

    @property
    def own_bytes(self) -> int:
        """Device memory of slots and of buckets that stay."""
        return 0 if self.streamed is None else self.streamed.own_bytes

    def discard(self) -> None:
        """Forget state that is on the device: the arena may be written into."""
        if self.streamed is not None:
            self.streamed.discard()

    def abort(self) -> None:
        """Forget an iteration that has begun in backward: everything is written anew."""
        for lane in self.lanes:
            lane.abort()

    def staging(self) -> list[Tensor]:
        """Slots, buckets that stay, scratch, staging rings: device memory that holds but copies of
        state after :meth:`flush`."""
        return [self.scratch.memory, *(t for lane in self.lanes for t in lane.staging_buffers)]

    @property
    def staging_bytes(self) -> int:
        """Device memory of :meth:`staging`, as much as there is."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.staging())

    def idle(self) -> None:
        """Block until nothing reads or writes :meth:`staging` any more: what was fetched ahead, and
        discarded, may be under way. Updates have been waited for."""
        if self.streamed is not None:
            self.streamed.finish_transfers()

    def follow(self, *events: Event) -> None:
        """Use device memory, and state there, only after ``events``."""
        for stream in (self.update, *(self.host.streams if self.host is not None else ())):
            for event in events:
                stream.wait(event)
        if self.streamed is not None:
            self.streamed.link.follow(*events)

    def close(self) -> None:
        """Give host memory back and end the thread. Idempotent."""
        # Copies in flight still use the memory. Half built, failed, or in a forked child:
        with contextlib.suppress(Exception):
            self.synchronize()
        with contextlib.suppress(Exception):
            self.idle()
        if self.host is not None:
            self.host.stop()
        if self.worker is not None:
            self.worker.stop()
        self._pool.give(self._arena)
        # It is unmapped when the last view of it is gone; slots and scratch are freed likewise.
        for param in self._added:  # parameters and slices refer to each other
            param.tensors.clear()
            param.slices.clear()
        self.resident, self.streamed, self.host, self.native = [], None, None, None
        self._without_scratch, self._gates = [], []
        self.scratch = Scratch(
            torch.empty(0, dtype=torch.uint8), StepPowers(0, torch.device("cpu"))
        )


def _host_staging_sizes(
    dtype_groups: list[DtypeGroup], threads: int, *, start: int
) -> HostStagingSizes:
    """What the buffers of the host lane, whose groups these are, have to hold."""
    layouts = [(s.layout, s.first) for s in dtype_groups]
    numel_bytes = [x.scratch_numel * param.compute_dtype.itemsize for x, param in layouts]
    shard_bytes = [x.scratch_numel * param.info.dtype.itemsize for x, param in layouts]
    return HostStagingSizes(
        start,
        align(max(numel_bytes, default=0), 256),
        align(max(shard_bytes, default=0), 256),
        ring_depth(
            threads,
            bucket_numel=min((x.scratch_numel for x, _ in layouts), default=0),
            buckets=sum(len(x.buckets) for x, _ in layouts),
            least=HOST_DEPTH,
        ),
    )


def host_threads(config: OffloadConfig) -> int:
    """Threads of the host lane; a single one is worth a warning."""
    threads = thread_count(config.transfer.host_threads)
    if threads == 1:
        warn(
            "the host lane has 1 thread (%d cores, %d local ranks): expect about a tenth of the "
            "speed of 16; set TransferConfig(host_threads=...)",
            len(os.sched_getaffinity(0)),
            local_ranks(),
        )
    return threads
