"""The streamed lane: state comes from the arena, is updated on the device, and goes back.

[Note: streams of the streamed lane]
Three streams, each in order; an arrow is an event that the right side waits for::

    h2d:     [state of b -> slot] --copied--> update
    update:  [unpack, step, pack] --done----> d2h
    d2h:     [slot -> arena]      --free----> h2d, for the next bucket of the same slot

``h2d`` and ``d2h`` overlap each other (the link is full duplex) and everything else. ``update``
first waits for the caller's stream (gradients), and the caller's stream waits for ``update`` at
the end of the step. A bucket always uses the same slot, so the ``free`` event also orders this
step's read of a bucket's arena range after the last step's write of it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..device import Event, Gateway, Stream
from ..memory import HostArena
from ..plan import Bucket, Kind, Layout, Slice
from ..plan.layout import kind_range
from .bucket import BucketUpdate, Scratch
from .records import REMAINDER_KIND, MasterForm, Record, Work


class StreamedBucket:
    """A bucket with its place in the arena and its slot."""

    def __init__(
        self,
        optimizer: Optimizer,
        layout: Layout,
        bucket: Bucket,
        records: list[Record],
        arena: HostArena,
        slot: Tensor,  # uint8, 1-D
        scratch: Scratch,
    ) -> None:
        self.spans = [
            (
                arena.tensor(span.arena_start, span.n_bytes, torch.uint8),
                slot[span.slot_start : span.slot_start + span.n_bytes],
            )
            for span in bucket.spans
            if span.n_bytes
        ]
        by_kind = {span.kind: span for span in bucket.spans}

        def view(piece: Slice, kind: Kind, numel: int) -> Tensor:
            span = by_kind[kind]
            start, stop = kind_range(piece, kind, numel, layout.offsets)
            shift = span.slot_start - span.arena_start
            return slot[start + shift : stop + shift].view(kind.dtype)

        remainder = None
        if records[bucket.slices[0].entry.index].form is MasterForm.REMAINDER:
            span = by_kind[REMAINDER_KIND]
            remainder = slot[span.slot_start : span.slot_start + span.n_bytes].view(span.kind.dtype)
        self.update = BucketUpdate(
            optimizer, bucket, records, view, scratch, flat_remainder=remainder
        )


class StreamedLane:
    """All streamed buckets, in order, over a fixed ring of slots."""

    def __init__(self, gateway: Gateway, update: Stream, slots: list[Tensor]) -> None:
        self.slots = slots
        self.buckets: list[StreamedBucket] = []
        self._h2d = gateway.stream("h2d")
        self._update = update
        self._d2h = gateway.stream("d2h")
        self._free: list[Event | None] = [None] * len(slots)
        self.moved_bytes = 0  # per direction, in the last step

    def run(self, work: Work) -> None:
        """Enqueue every bucket that has a gradient; returns without waiting for any."""
        self.moved_bytes = 0
        for index, bucket in enumerate(self.buckets):
            gradients = work.of(bucket.update.pieces)
            if all(gradient is None for gradient in gradients):
                continue
            slot = index % len(self.slots)
            if (free := self._free[slot]) is not None:
                self._h2d.wait(free)
            self._h2d.launch(_copy_in, bucket.spans)
            self._update.wait(self._h2d.record())
            self._update.launch(bucket.update.run, gradients, work.snapshot)
            self._d2h.wait(self._update.record())
            self._d2h.launch(_copy_out, bucket.spans)
            self._free[slot] = self._d2h.record()
            self.moved_bytes += bucket.update.bucket.state_bytes

    def synchronize(self) -> None:
        """Block until all state is back in the arena."""
        self._d2h.synchronize()


def _copy_in(spans: list[tuple[Tensor, Tensor]]) -> None:
    for arena, slot in spans:
        slot.copy_(arena, non_blocking=True)


def _copy_out(spans: list[tuple[Tensor, Tensor]]) -> None:
    for arena, slot in spans:
        arena.copy_(slot, non_blocking=True)
