"""Gradients that leave the device when FSDP2 has reduced them, and come back for their updates.

The gradients of one FSDP2 group are copied to host memory together. Something without memory takes
the place of their shards: see ``core/recorded.py``. ``p.grad`` stays the same object. Before a
reduction adds to them, they are fetched, and those of the group that followed the last time, too.

FSDP2's reduce stream waits for the compute stream before it uses memory again. So a gradient may be
dropped when the compute stream has waited for its copy. It does so two groups later: the copy has
ended by then, unless the link is what the backward waits for.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core import dtensor
from ..core.backend import TURN_BYTES, Backend, Event, Stream
from ..core.config import OffloadConfig, align
from ..core.errors import DeviceError, DeviceMemoryError, check_open
from ..core.fsdp import Group
from ..core.recorded import ORDERS, Place, Record, RecordedShard
from ..core.storage import identity
from ..link import Block, HostPool, Link, Residence, allocating
from .gradient_slots import GradientSlots

HELD: Final = 2
"""Groups whose gradients are kept while they are copied."""
_ALIGNMENT: Final = 256
"""Bytes. Modulo this a gradient has the same address on the device, before and after, as in host
memory: kernels of norms add in an order that depends on it."""


class Fetched(NamedTuple):
    """Gradients of one group on their way to the device."""

    group: int
    values: dict[Record, Tensor]
    arrived: Event | None


NOTHING: Final = Fetched(-1, {}, None)


class Mover:
    """Copies gradients to host memory and back; what stands for them keeps it alive."""

    def __init__(self, backend: Backend, config: OffloadConfig) -> None:
        self.backend, self._pid = backend, os.getpid()
        self.pool = HostPool("HybridDeviceOptimizer: gradients", backend, config.transfer)
        self.link = Link(backend, "gradients", turn_bytes=TURN_BYTES)
        self.link.end_with(self, self.pool)

    def wait(self, event: Event | None) -> None:
        """Let the current stream wait."""
        if event is not None:
            self.backend.current_stream().wait(event)

    def fetch(self, record: Record) -> Tensor:
        """A copy of what a record's place has, for uses on the current stream."""
        fetched = self.start([record])
        self.wait(fetched.arrived)
        return fetched.values[record]

    @torch.inference_mode(False)
    @torch.no_grad()
    def start(self, records: Sequence[Record], group: int = -1) -> Fetched:
        """Enqueue one copy of what lies in host memory from the first record to the last.

        Raises:
            ClosedError: in a forked process, which has not got that memory.
            DeviceError: in a CUDA graph capture.
            DeviceMemoryError: there is no room.
        """
        check_open("a gradient in host memory", self._pid, is_closed=False)
        if self.backend.is_capturing():
            raise DeviceError(
                "a gradient in host memory, in a CUDA graph capture",
                reason="a replay would not fetch it",
                remedy='call zero_grad() before the capture, or use offload="state"',
            )
        places = sorted((record.place for record in records), key=lambda place: place.start)
        start, first = places[0].start, places[0].host.view(-1).view(torch.uint8)
        n_bytes = max(place.start + place.host.nbytes for place in places) - start
        shift = start % _ALIGNMENT
        with allocating(shift + n_bytes, "gradients", "call zero_grad()"):
            memory, arrived = self.backend.allocate(shift + n_bytes)[shift:], None
        if n_bytes and not all(record.is_zero for record in records):
            after = [self.backend.current_stream().record(), *{place.stored for place in places}]
            block = Block([first.as_strided((n_bytes,), (1,))], [memory])
            arrived = self.link.fetch(block, after=after)
            for place in places:
                place.read = arrived
        values = {}
        for record in records:
            at, host = record.place.start - start, record.place.host
            values[record] = memory[at : at + host.nbytes].view(host.dtype).view(host.shape)
        return Fetched(group, values, arrived)


class Store:
    """Host memory of one group's gradients.

    Args:
        group: FSDP2's.
        leaves: of its parameters, whether their gradients leave.
        device: where the gradients are reduced.
    """

    def __init__(self, group: Group, leaves: Sequence[bool], device: torch.device) -> None:
        self.group, self._leaves = group, leaves
        parameters, self._starts, at = group.parameters, list[int](), _ALIGNMENT
        for numel, parameter in zip(group.padded_numels, parameters, strict=True):
            self._starts.append(at)
            at += align(numel * parameter.itemsize, _ALIGNMENT) + _ALIGNMENT
        self.n_bytes = at
        self.host: Tensor  # 1-D uint8, of so many bytes
        shape = (len(parameters), len(ORDERS))
        self.norms = torch.zeros(shape, dtype=parameters[0].dtype, device=device)
        self.places: list[Place] = []  # of what it has
        self.records: list[weakref.ref[Record]] = []
        self.returned: dict[int, Record] = {}  # by the identities of shards that were fetched

    def recorded(self) -> list[tuple[DTensor, Record]]:
        """Gradients that have left; others may be another optimizer's."""
        pairs = zip(self._leaves, self.group.parameters, strict=True)
        gradients = (parameter.grad for leaves, parameter in pairs if leaves)
        known = ((g, dtensor.record(g)) for g in gradients if isinstance(g, DTensor))
        return [(gradient, record) for gradient, record in known if record is not None]

    def reduced(self) -> dict[int, tuple[DTensor, Tensor]]:
        """Gradients that are to leave, each with its shard, by position in the group."""
        found = {}
        for index, parameter in enumerate(self.group.parameters):
            gradient = parameter.grad
            if not self._leaves[index] or not isinstance(gradient, DTensor):
                continue
            shard, norms = dtensor.with_history(gradient), self.norms
            is_plain = type(shard) is Tensor and shard.is_contiguous() and not shard.requires_grad
            if is_plain and (shard.dtype, shard.device) == (norms.dtype, norms.device):
                found[index] = gradient, shard
        return found

    def bring_back(self) -> None:
        """To the device, what is about to be overwritten."""
        for find in self.records:
            if (record := find()) is not None:
                record.bring_back()

    def place(self, shards: dict[int, Tensor]) -> tuple[list[int], Block]:
        """Where shards begin in host memory, and what is copied: all at once where they lie side by
        side on the device."""
        held = [shard for shard in shards.values() if shard.numel()]
        low = min((shard.data_ptr() for shard in held), default=0)
        high = max((shard.data_ptr() + shard.nbytes for shard in held), default=0)
        shift = low % _ALIGNMENT
        is_one = len({identity(shard.untyped_storage()) for shard in held}) == 1
        if is_one and shift + high - low <= self.n_bytes:
            first = min(held, key=Tensor.data_ptr).view(-1).view(torch.uint8)
            starts = [shift + max(shard.data_ptr() - low, 0) for shard in shards.values()]
            hosts = [self.host[shift : shift + high - low]]
            devices = [first.as_strided((high - low,), (1,))]
        else:
            starts = [self._starts[i] + each.data_ptr() % _ALIGNMENT for i, each in shards.items()]
            devices = [shard.view(-1).view(torch.uint8) for shard in shards.values()]
            pairs = zip(starts, devices, strict=True)
            hosts = [self.host[start : start + each.nbytes] for start, each in pairs]
        return starts, Block(hosts, devices, Residence.DEVICE)


class HostGradients:
    """Moves gradients of one model; a :class:`..core.fsdp.Watcher`.

    Args:
        groups: FSDP2's.
        backend: of the device.
        config: how host memory is obtained.
        leaves: of each group's parameters, whether their gradients leave.

    Raises:
        HostMemoryError: they do not fit into host memory.
        PinningError: the driver refused to page-lock it.
    """

    uses_link = True

    def __init__(
        self,
        groups: Sequence[Group],
        backend: Backend,
        config: OffloadConfig,
        leaves: Sequence[Sequence[bool]],
    ) -> None:
        self.mover = Mover(backend, config)
        self.mover.link.end_with(self)  # before gradients that are being copied go
        self.slots = GradientSlots(backend, self.mover.link)
        self._held: deque[tuple[Event, list[Tensor]]] = deque()
        self._follows: dict[int, int] = {}  # reductions: which came after which
        self._last, self._seen = -1, set[int]()  # of this backward
        self._ahead = NOTHING
        self._stores = [
            Store(group, of, backend.device)
            for group, of in zip(groups, leaves, strict=True)
            if any(of)
        ]
        arena, at = self.mover.pool.take(sum(store.n_bytes for store in self._stores)), 0
        self._unwatch: list[Callable[[], object]] = []
        for index, store in enumerate(self._stores):
            store.host = arena.tensor(at, store.n_bytes, torch.uint8)
            at += store.n_bytes
            ends = store.group.watch(index, self, backend)
            self._unwatch.append(weakref.finalize(self, ends))

    @property
    def host_bytes(self) -> int:
        """Host memory for gradients."""
        return self.mover.pool.n_bytes

    # ------------------------------------------------------------------ Watcher

    def before_gather(self, index: int, stream: Stream) -> None:
        """See :class:`..core.fsdp.Watcher`."""
        if self._held and not self.mover.backend.is_capturing():
            self._drop(len(self._held))

    def after_gather(self, index: int) -> None:
        """See :class:`..core.fsdp.Watcher`."""

    def before_reduce(self, index: int) -> None:
        """See :class:`..core.fsdp.Watcher`. Fetch what is about to be added to."""
        store = self._stores[index]
        if not store.group.reduces:
            return
        values, store.returned = self._take_ahead(index), {}
        for gradient, record in store.recorded():
            if record.real is None:
                record.keep(values[record] if record in values else self.mover.fetch(record))
            dtensor.put(gradient, record.local())
            store.returned[id(record.real)] = record
        if index in self._seen:  # the next backward: whether there is one is not known before
            self.begin()
        self._follows[self._last] = self._last = index
        self._seen.add(index)
        if (following := self._follows.get(index)) is not None:
            with contextlib.suppress(DeviceMemoryError):  # there may be room when it is needed
                self._ahead = self._start(following)

    def _start(self, index: int) -> Fetched:
        records = [r for _, r in self._stores[index].recorded() if r.real is None]
        return self.mover.start(records, index) if records else NOTHING

    def _take_ahead(self, index: int) -> dict[Record, Tensor]:
        """A group's gradients, fetched ahead or now; the compute stream may drop others."""
        ahead, self._ahead = self._ahead, NOTHING
        self.mover.wait(ahead.arrived)
        if ahead.group != index and index >= 0:
            ahead = self._start(index)
            self.mover.wait(ahead.arrived)
        return ahead.values

    def after_reduce(
        self, index: int, reduced: Event, stream: Stream, *, is_last: bool = True
    ) -> None:
        """See :class:`..core.fsdp.Watcher`. Let the group's gradients leave."""
        store, mover = self._stores[index], self.mover
        returned, store.returned = store.returned, {}
        found = store.reduced()
        if not found or mover.backend.is_capturing():
            return
        store.bring_back()  # what others have of the last iteration
        shards = {index: shard for index, (_, shard) in found.items()}
        norms = [store.norms[index] for index in shards]
        stream.launch(compute_norms, norms, list(shards.values()))
        normed = stream.record()
        starts, block = store.place(shards)
        stored = mover.link.store(block, after=[normed, *{place.read for place in store.places}])
        self._held.append((stored, list(shards.values())))
        store.places, store.records = [], []
        for start, each, (gradient, shard) in zip(starts, norms, found.values(), strict=True):
            host = store.host[start : start + shard.nbytes].view(shard.dtype).view(shard.shape)
            place = Place(host, start, each, normed, stored)
            record = returned.get(id(shard)) or Record(mover.fetch, mover.wait, place)
            record.store(place)
            dtensor.put(gradient, RecordedShard(shard, keeper=record))
            store.places.append(place)
            store.records.append(weakref.ref(record))
        del shard, shards, found, block
        self._drop(HELD)

    def _drop(self, most: int) -> None:
        """Let go of gradients that were copied, and of all but so many that are being copied."""
        while self._held and (len(self._held) > most or self._held[0][0].query()):
            self.mover.wait(self._held[0][0])
            self._held.popleft()

    # ------------------------------------------------------------------ of the optimizer

    def begin(self) -> None:
        """The next reduction follows none."""
        self._take_ahead(-1)
        self._last, self._seen = -1, set()

    def finish(self) -> None:
        """Block until all gradients have left, and nothing of them is on the device."""
        self.begin()
        self.mover.link.synchronize()
        self._held.clear()
        for store in self._stores:
            store.returned = {}  # of a reduction that failed

    def close(self) -> None:
        """Bring all gradients back, and give host memory back. Idempotent.

        Raises:
            DeviceMemoryError: there is no room; those that have none stay in host memory.
        """
        for store in self._stores:
            store.bring_back()
            for gradient, record in store.recorded():
                dtensor.put(gradient, record.local())
        self.finish()
        for unwatch in self._unwatch:
            unwatch()
        self.mover.pool.close()


@torch.no_grad()
def compute_norms(norms: list[Tensor], gradients: list[Tensor]) -> None:
    """Write a norm of each of :data:`ORDERS` into each of ``norms``, which are 1-D."""
    for index, order in enumerate(ORDERS):
        # torch has no infinity norm of an empty tensor.
        pairs = zip(norms, gradients, strict=True)
        held = [(norm[index], each) for norm, each in pairs if each.numel() or order == 2.0]
        if held:
            computed = torch._foreach_norm([each for _, each in held], order)
            torch._foreach_copy_([norm for norm, _ in held], computed)
