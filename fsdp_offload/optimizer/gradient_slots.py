"""Gradients that come from host memory for the updates of a ring's buckets.

They have slots and streams of their own, because they are there later than the state, which is
fetched ahead across the end of an iteration. What was noted of a gradient while it was away is done
to it in its slot, right before the update.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..core.backend import Backend, Event, Stream
from ..core.config import align
from ..core.recorded import Operations, Taken, apply_all
from ..link import Block, Link
from ..plan import Bucket
from ..update.params import Work

COUNT: Final = 4
"""Two that are fetched, one that is read, and one that absorbs jitter."""
_ALIGNMENT: Final = 16  # bytes, of each slice in a slot


class _Slot:
    def __init__(self, memory: Tensor, free: Event) -> None:
        self.memory, self.free = memory, free


class _Fetched(NamedTuple):
    slot: _Slot
    gradients: list[Tensor | None]  # of the bucket's slices
    noted: list[tuple[list[Tensor], Operations]]
    arrived: Event


class GradientSlots:
    """Device memory that gradients are fetched into.

    Args:
        backend: of the device.
        link: what fetches them.
    """

    def __init__(self, backend: Backend, link: Link) -> None:
        self._backend, self._link = backend, link
        self._slots: list[_Slot] = []
        self._free = deque[_Slot]()
        self._buckets = deque[Bucket]()  # that are still to be fetched for
        self._fetched = deque[_Fetched]()

    @property
    def n_bytes(self) -> int:
        """Device memory of them."""
        return sum(slot.memory.nbytes for slot in self._slots)

    def begin(self, buckets: Iterable[Bucket], work: Work, update: Stream) -> None:
        """These are updated on ``update`` now, in order."""
        self._buckets = deque(each for each in buckets if _taken(each, work))
        most = max((_slot_bytes(each, work) for each in self._buckets), default=-1)
        if most > (self._slots[0].memory.nbytes if self._slots else -1):
            update.synchronize()  # nothing reads those that go
            memory = [self._backend.allocate(most) for _ in range(COUNT)]
            free = self._backend.current_stream().record()
            self._slots = [_Slot(each, free) for each in memory]
        self._free, self._fetched = deque(self._slots), deque()

    @contextlib.contextmanager
    def lending(
        self, bucket: Bucket, gradients: list[Tensor | None], work: Work, update: Stream
    ) -> Iterator[list[Tensor | None]]:
        """Inside, ``update`` may read what is given in place of ``gradients``."""
        if not work.taken or not _taken(bucket, work):
            yield gradients
            return
        while self._buckets and self._free:
            self._fetched.append(self._fetch(self._buckets.popleft(), work, self._free.popleft()))
        fetched = self._fetched.popleft()
        update.wait(fetched.arrived)
        if fetched.noted:
            update.launch(apply_all, fetched.noted)
        yield fetched.gradients
        fetched.slot.free = update.record()
        self._free.append(fetched.slot)

    def _fetch(self, bucket: Bucket, work: Work, slot: _Slot) -> _Fetched:
        gradients, taken, at = work.of(bucket.slices), _taken(bucket, work), 0
        hosts, devices, noted = list[Tensor](), list[Tensor](), dict[Operations, list[Tensor]]()
        for index, slice_ in enumerate(bucket.slices):
            host, of = gradients[index], taken.get(slice_.spec.index)
            if host is None or of is None:
                continue
            hosts.append(host.view(torch.uint8))
            devices.append(slot.memory[at : at + host.nbytes])
            at += align(host.nbytes, _ALIGNMENT)
            gradients[index] = gradient = devices[-1].view(host.dtype)
            noted.setdefault(of.operations, []).append(gradient)
        stored = {each.place.stored for each in taken.values()}
        arrived = self._link.fetch(Block(hosts, devices), after=[slot.free, *stored])
        for each in taken.values():
            each.place.read = arrived
        pending = [(tensors, operations) for operations, tensors in noted.items() if operations]
        return _Fetched(slot, gradients, pending, arrived)


def _taken(bucket: Bucket, work: Work) -> dict[int, Taken]:
    """Of a bucket's parameters, those whose gradients are in host memory."""
    indices = (slice_.spec.index for slice_ in bucket.slices)
    return {index: taken for index in indices if (taken := work.taken.get(index)) is not None}


def _slot_bytes(bucket: Bucket, work: Work) -> int:
    gradients = (gradient for gradient in work.of(bucket.slices) if gradient is not None)
    return sum(align(gradient.nbytes, _ALIGNMENT) for gradient in gradients)
