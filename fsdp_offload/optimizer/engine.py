"""Build memory and buckets for parameters, and run iterations through them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.backend import Backend, Event, Stream
from ..core.config import OffloadConfig, brief
from ..core.errors import DeviceMemoryError
from ..core.storage import span
from ..link import HostPool, HostRange
from ..plan import Layout, make_layout
from ..plan.residency import LEAST_SLOTS
from ..update.bucket import BucketUpdate, Scratch
from ..update.one_kernel import StepPowers
from ..update.params import MasterForm, ParamState, Snapshot, Work
from ..update.schema import make_shadow, raw_step
from ..update.state import fill_initial, write_master
from .host import HostBucket, HostLane, host_buckets, thread_count
from .ring import Ring
from .ring_bucket import RingBucket
from .weight_slots import GatheredWeights

States = dict[Tensor, dict[str, Any]]


@dataclass(frozen=True)
class DtypeGroup:
    """Parameters with the same lane and dtypes, laid out together."""

    params: list[ParamState]
    layout: Layout

    @property
    def first(self) -> ParamState:
        """The first parameter, as a representative."""
        return self.params[0]


def make_dtype_groups(params: Sequence[ParamState], config: OffloadConfig) -> list[DtypeGroup]:
    """Group parameters by lane and dtypes (order kept) and lay each group out in one arena."""

    def key(param: ParamState) -> tuple[str, ...]:
        kinds = tuple(kind.name for kind, _ in param.kinds) if param.moments else ()
        parts = (param.lane, param.info.dtype, param.compute_dtype, param.form, kinds)
        return (*map(str, parts), str(param.schema.elementwise))

    alike: dict[tuple[str, ...], list[ParamState]] = {}
    for param in params:
        alike.setdefault(key(param), []).append(param)
    dtype_groups, stop = [], 0
    for group in alike.values():
        is_away = group[0].lane != "resident"
        layout = make_layout(
            [param.spec for param in group],
            bucket_bytes=config.bucket_bytes,
            arena_start=stop if is_away else 0,
        )
        stop = layout.arena_stop if is_away else stop
        dtype_groups.append(DtypeGroup(group, layout))
    return dtype_groups


class NativeUpdate:
    """Updates parameters like the class itself, whole, on the device, with the state that the class
    makes: for torch's classes whose state :mod:`..update.schema` does not declare (Adafactor,
    tensor subclasses). A shadow steps the parameters themselves.

    Args:
        optimizer: the wrapped optimizer.
        placed: (parameter, index of its param_group), in order.
        state: the optimizer's visible state; the class reads and writes it itself, so the caller's
            changes count as without wrapping.
    """

    def __init__(
        self, optimizer: Optimizer, placed: list[tuple[Tensor, int]], state: States
    ) -> None:
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
    """All memory and buckets of one optimizer, and an iteration through them.

    Args:
        config: the user's choices.
        backend: the device's.
        pool: gives host memory.
    """

    def __init__(self, config: OffloadConfig, backend: Backend, pool: HostPool) -> None:
        self.backend, self.config = backend, config
        self._pool = pool
        self.payload_bytes = 0  # state in host memory
        self.weight_bytes = 0  # part of device_memory for weights
        self.ring = Ring(backend, config.overlap or "step")
        self.update = self.ring.link.update
        self.host: HostLane | None = None
        self._natives: list[NativeUpdate] = []
        self._natives_updated: Event | None = None
        self._arenas: list[HostRange] = []
        self._scratches: list[Scratch] = []
        self._params: list[ParamState] = []
        self._without_scratch: list[BucketUpdate] = []  # one of each kind, while they need none
        # Per gate: whether it has the natives, and its buckets in the ring and on the host.
        self._gates: list[tuple[bool, list[int], list[HostBucket]]] = []

    @property
    def lanes(self) -> list[Ring | HostLane]:
        """The ring, and the host lane if used."""
        return [self.ring] if self.host is None else [self.ring, self.host]

    # ------------------------------------------------------------------ building

    def use(self, weights: GatheredWeights) -> None:
        """Let updates bring those along that are in host memory, before anything is appended."""
        self.weight_bytes = weights.staying_bytes + weights.slot_bytes
        self.ring.find_weights = weakref.ref(weights)

    @contextlib.contextmanager
    def appending(
        self,
        optimizer: Optimizer,
        params: list[ParamState],
        added: list[ParamState],
        natives: list[tuple[Tensor, int]],
        native_state: States,
    ) -> Iterator[None]:
        """Append buckets and zeroed state for ``added``; an error here or inside undoes it.

        Args:
            optimizer: the wrapped optimizer; not kept alive.
            params: all parameters, ``added`` among them.
            added: parameters that get buckets.
            natives: see :class:`NativeUpdate`, also for ``native_state``.

        Raises:
            HostMemoryError: the state does not fit; nothing was allocated.
            PinningError: the driver refused; everything was freed.
            torch.OutOfMemoryError: not enough device memory.
        """
        groups = make_dtype_groups(added, self.config)
        away = [group for group in groups if group.first.lane != "resident"]
        on_host = [group for group in groups if group.first.lane == "host"]
        state_bytes = max((group.layout.arena_stop for group in away), default=0)
        with contextlib.ExitStack() as undo:

            def take(n_bytes: int) -> HostRange:
                arena = self._pool.take(n_bytes)
                self._arenas.append(arena)
                undo.callback(self._give, arena)
                return arena

            arena = take(state_bytes)
            undo.callback(_clear, added)
            self._make_tensors(groups, arena)
            before = len(self.ring.buckets)
            undo.callback(self.ring.drop_from, before)
            scratch = self._fill_ring(optimizer, params, groups, arena)
            if on_host:
                if self.host is None:
                    self.host = HostLane(self.backend, thread_count(self.config), self.ring.overlap)
                undo.callback(self.host.drop_from, len(self.host.buckets))
                layouts = [group.layout for group in on_host]
                self.host.append(host_buckets(optimizer, params, layouts, take))
            yield
            self._keep_scratch(scratch, self.ring.buckets[before:])
            undo.pop_all()
        self._params += added
        self.payload_bytes += sum(group.layout.payload_bytes for group in away)
        if natives:
            self._natives.append(NativeUpdate(optimizer, natives, native_state))

    def _give(self, arena: HostRange) -> None:
        self._arenas.remove(arena)
        self._pool.give(arena)

    def _make_tensors(self, dtype_groups: list[DtypeGroup], arena: HostRange) -> None:
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

    def _fill_ring(
        self,
        optimizer: Optimizer,
        params: list[ParamState],
        dtype_groups: list[DtypeGroup],
        arena: HostRange,
    ) -> Scratch:
        groups = [group for group in dtype_groups if group.first.lane != "host"]
        sizes = [Scratch.bytes_of(group.first, group.layout.scratch_numel) for group in groups]
        memory = self.backend.allocate(max(sizes, default=0))
        slices = sum(len(each.slices) for group in groups for each in group.layout.buckets)
        scratch = Scratch(memory, StepPowers(slices, self.backend.device))
        buckets = [
            RingBucket(
                optimizer,
                group.layout,
                bucket,
                params,
                None if group.first.lane == "resident" else arena,
                scratch,
            )
            for group in groups
            for bucket in group.layout.buckets
        ]
        self.ring.append(buckets, self._allowed_bytes(buckets))
        return scratch

    def _keep_scratch(self, scratch: Scratch, buckets: Sequence[RingBucket]) -> None:
        """Keep the scratch, without its memory unless some update always needs it."""
        self._scratches.append(scratch)
        kinds = {bucket.update.groups_without_scratch: bucket.update for bucket in buckets}
        if buckets and frozenset() not in kinds:
            scratch.release()
            self._without_scratch += kinds.values()

    def _allowed_bytes(self, buckets: Sequence[RingBucket]) -> int:
        """Return the ring's bytes after adding these buckets. With ``device_memory="auto"``, only
        slots for them, until the next look at memory."""
        own, first = self.ring.own_bytes, self.config.first_device_bytes
        if self.config.device_memory != "auto":
            first = max(first - self.weight_bytes, 0)
        if self.config.device_memory != "auto" or not own or not buckets:
            return first
        return max(first, own + LEAST_SLOTS * max(each.device_bytes for each in buckets))

    # ------------------------------------------------------------------ running

    def prepare(self, snapshot: Snapshot) -> None:
        """Allocate scratch memory before an iteration if an update needs it now.

        Raises:
            DeviceMemoryError: not enough memory; nothing was updated.
        """
        if not any(update.needs_scratch(snapshot) for update in self._without_scratch):
            return
        try:
            for scratch in self._scratches:
                self.update.launch(scratch.fill)
        except torch.OutOfMemoryError as error:
            n_bytes = sum(scratch.memory.nbytes for scratch in self._scratches)
            raise DeviceMemoryError(
                f"an update by the optimizer's class on {self.backend.device}",
                reason=f"there is no room for {brief(n_bytes)} of scratch memory",
                remedy="free device memory and call step() again, or keep hyper-parameters as "
                "numbers and fused=True, which needs none",
            ) from error
        self._without_scratch = []

    def offer(self, work: Work) -> None:
        """Enqueue the buckets whose gradients are complete, in order. If weights travel, gradients
        are not to pile up meanwhile: the link is slower than the backward."""
        if self.host is not None:
            self.host.offer(work, complete=False)
        self.ring.run(work)
        self.ring.complete()
        if (weights := self.ring.find_weights()) is not None:
            self.ring.wait_for_updates(weights.ahead_bytes)

    def run(self, work: Work, start: Event) -> None:
        """Enqueue the rest of the iteration after ``start``, when all gradients are ready, without
        waiting."""
        if self.host is not None:
            self.host.offer(work, complete=True)
        if self._natives:
            self.update.wait(start)
        for native in self._natives:
            with span("update"):
                self.update.launch(native.run, work.snapshot)
            self._natives_updated = self.update.record()
        self.ring.run(work, start)

    def finish(self, stream: Stream) -> None:
        """Make ``stream`` wait for every update; the host waits for updates on the CPU."""
        self.ring.complete()
        if self.host is not None and self.host.last is not None:
            stream.wait(self.host.last)
        stream.wait(self.update.record())

    def watch_gates(self, gates: Sequence[frozenset[int]]) -> None:
        """Set the parameters of each gate, for :meth:`updated`; the last gate also has the native
        ones."""
        ring, on_host = self.ring.buckets, self.host.buckets if self.host else []
        self._gates = [
            (
                gate is gates[-1],
                [index for index, each in enumerate(ring) if not gate.isdisjoint(each.indices)],
                [each for each in on_host if not gate.isdisjoint(each.indices)],
            )
            for gate in gates
        ]

    def updated(self, gate: int) -> list[Event]:
        """Return events after which the last :meth:`run` has updated the shards of a gate."""
        has_natives, in_ring, on_host = self._gates[gate]
        events: list[Event | None] = [self._natives_updated] if has_natives else []
        events += [bucket.written for bucket in on_host]
        if in_ring:
            events.append(self.ring.updated(in_ring))
        return [event for event in events if event is not None]

    def has_enqueued(self, gate: int) -> bool:
        """Whether :meth:`updated` has nothing to enqueue first."""
        return self.ring.has_passed(self._gates[gate][1])

    def synchronize(self) -> None:
        """Block until every update has run, and moving state is back in host memory."""
        with contextlib.ExitStack() as waits:  # runs all waits, even if one raises
            for each in (*reversed(self.lanes), self.update):
                waits.callback(each.synchronize)
            waits.callback(self.ring.complete)  # first

    @property
    def uses_link(self) -> bool:
        """Whether updates move state or gradients between device and host memory."""
        return self.host is not None or bool(self.ring.slots)

    def abort(self) -> None:
        """Drop an iteration that began in backward, because everything will be overwritten."""
        for lane in self.lanes:
            lane.abort()

    def staging(self) -> list[Tensor]:
        """List slots, buckets that stay, and scratch: device memory that only holds copies of state
        after :meth:`.Ring.flush`."""
        return [*(each.memory for each in self._scratches), *self.ring.staging_buffers]

    @property
    def staging_bytes(self) -> int:
        """Bytes of :meth:`staging`."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.staging())

    def follow(self, *events: Event) -> None:
        """Make updates on the device wait for ``events``."""
        for event in events:
            self.update.wait(event)
        for lane in self.lanes:
            lane.link.follow(*events)

    def close(self) -> None:
        """Free host memory and end the thread. Idempotent; no other call may follow."""
        # Copies in flight still use the memory. Half built, failed, or in a forked child:
        with contextlib.suppress(Exception):
            self.synchronize()
        with contextlib.suppress(Exception):
            self.ring.finish_transfers()
        if self.host is not None:
            self.host.stop()
        # The last view unmaps it; slots and scratch are freed the same way.
        while self._arenas:
            self._pool.give(self._arenas.pop())
        _clear(self._params)
        self.ring.close()
        self.host, self._natives, self._scratches, self._params = None, [], [], []
        self._without_scratch, self._gates, self.payload_bytes = [], [], 0


def _clear(params: Sequence[ParamState]) -> None:
    for param in params:  # parameters and slices refer to each other
        param.tensors.clear()
        param.slices.clear()
