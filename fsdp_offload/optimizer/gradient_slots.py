"""Slots for gradients that come from host memory for a ring's updates.

Gradients have their own slots and streams, because they arrive later than state, which is
prefetched across the end of an iteration. Recorded operations are applied in the slot, right before
the update.
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
from ..link import Block, Link, allocating
from ..plan import Bucket
from ..update.params import Work

COUNT: Final = 4
"""Two being fetched, one being read, and one to absorb jitter."""
_WHAT: Final = "gradients", 'pass bucket_bytes="16MiB" in TransferConfig'
_ALIGNMENT: Final = 16  # bytes, for each slice in a slot


class _Fetched(NamedTuple):
    slot: Tensor
    gradients: list[Tensor | None]  # per slice of the bucket
    noted: list[tuple[list[Tensor], Operations]]
    arrived: Event


class GradientSlots:
    """Device memory for fetched gradients.

    Args:
        backend: of the device.
        link: fetches them.
    """

    def __init__(self, backend: Backend, link: Link) -> None:
        self._backend, self._link = backend, link
        self._slots: list[Tensor] = []
        self._free = deque[tuple[Tensor, Event]]()  # each usable after its event
        self._buckets = deque[Bucket]()  # waiting for a fetch
        self._fetched = deque[_Fetched]()

    @property
    def n_bytes(self) -> int:
        """Bytes of device memory."""
        return sum(slot.nbytes for slot in self._slots)

    def begin(self, buckets: Iterable[Bucket], work: Work, update: Stream) -> None:
        """Expect updates of ``buckets``, in order, on ``update``. Makes slots as large as the
        largest bucket's gradients.

        Raises:
            DeviceMemoryError: there is no room; nothing has changed.
        """
        self._free.extend((each.slot, each.arrived) for each in self._fetched)  # after a failure
        self._fetched.clear()
        self._buckets = deque(each for each in buckets if _taken(each, work))
        most = max((_slot_bytes(each, work) for each in self._buckets), default=-1)
        if most > (self._slots[0].nbytes if self._slots else -1):
            update.synchronize()  # so that nothing reads freed slots
            with allocating(COUNT * most, *_WHAT):
                self._slots = [self._backend.allocate(most) for _ in range(COUNT)]
            free = self._backend.current_stream().record()
            self._free = deque((slot, free) for slot in self._slots)

    @contextlib.contextmanager
    def lending(
        self, bucket: Bucket, gradients: list[Tensor | None], work: Work, update: Stream
    ) -> Iterator[list[Tensor | None]]:
        """Lend fetched gradients that ``update`` may read inside, instead of ``gradients``."""
        if not work.taken or not _taken(bucket, work):
            yield gradients
            return
        while self._buckets and self._free:
            self._fetched.append(self._fetch(self._buckets.popleft(), work, *self._free.popleft()))
        fetched = self._fetched.popleft()
        update.wait(fetched.arrived)
        if fetched.noted:
            update.launch(apply_all, fetched.noted)
        try:
            yield fetched.gradients
        finally:
            self._free.append((fetched.slot, update.record()))

    def _fetch(self, bucket: Bucket, work: Work, slot: Tensor, free: Event) -> _Fetched:
        gradients, taken, at, end = work.of(bucket.slices), _taken(bucket, work), 0, -1
        spans = list[tuple[Tensor, int, int]]()  # source, target offset, and bytes
        noted = dict[Operations, list[Tensor]]()
        for index, slice_ in enumerate(bucket.slices):
            host, of = gradients[index], taken.get(slice_.spec.index)
            if host is None or of is None:
                continue
            if host.data_ptr() == end and spans[-1][1] + spans[-1][2] == at:
                spans[-1] = (*spans[-1][:2], spans[-1][2] + host.nbytes)
            else:
                spans.append((host.view(torch.uint8), at, host.nbytes))
            end = host.data_ptr() + host.nbytes
            gradients[index] = gradient = slot[at : at + host.nbytes].view(host.dtype)
            noted.setdefault(of.operations, []).append(gradient)
            at += align(host.nbytes, _ALIGNMENT)
        hosts = [host.as_strided((n_bytes,), (1,)) for host, _, n_bytes in spans]
        block = Block(hosts, [slot[at : at + n_bytes] for _, at, n_bytes in spans])
        stored = {each.place.stored for each in taken.values()}
        arrived = self._link.fetch(block, after=[free, *stored])
        for each in taken.values():
            each.place.read = arrived
        pending = [(tensors, operations) for operations, tensors in noted.items() if operations]
        return _Fetched(slot, gradients, pending, arrived)


def _taken(bucket: Bucket, work: Work) -> dict[int, Taken]:
    indices = (slice_.spec.index for slice_ in bucket.slices)
    return {index: taken for index in indices if (taken := work.taken.get(index)) is not None}


def _slot_bytes(bucket: Bucket, work: Work) -> int:
    gradients = (gradient for gradient in work.of(bucket.slices) if gradient is not None)
    return sum(align(gradient.nbytes, _ALIGNMENT) for gradient in gradients)
