"""One bucket of the ring: its bytes on both sides of the link, and its update."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.backend import Event
from ..core.config import align
from ..link import Block, HostRange, Residence
from ..plan import Bucket, Kind, Layout, Slice
from ..plan.layout import SLOT_ALIGN_BYTES, kind_range
from ..update.bucket import BucketUpdate, Scratch, StateView
from ..update.params import REMAINDER_KIND, MasterForm, ParamState


class RingBucket:
    """A bucket that is updated on the device.

    Args:
        optimizer: the wrapped optimizer.
        layout: the layout of its dtype group.
        bucket: slices of the parameters.
        params: all parameters.
        arena: host memory of its state; None: it has no host copy, and its state is in the
            parameters' state tensors on the device.
        scratch: see :class:`BucketUpdate`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        layout: Layout,
        bucket: Bucket,
        params: list[ParamState],
        arena: HostRange | None,
        scratch: Scratch,
    ) -> None:
        first = params[bucket.slices[0].spec.index]
        self.indices = sorted({s.spec.index for s in bucket.slices})
        self.has_host_copy = arena is not None
        self.bucket, self._layout = bucket, layout
        self._state = state_of(params)
        self._spans = [span for span in bucket.spans if span.n_bytes]
        self._has_remainder = first.form is MasterForm.REMAINDER
        self._by_kind = {span.kind: span for span in bucket.spans}
        self._slot: Tensor | None = None
        self._update: BucketUpdate | None = None
        self._make_update: Callable[..., BucketUpdate] | None = functools.partial(
            BucketUpdate, optimizer, bucket, params, scratch=scratch
        )
        # All parameters of a bucket have one dtype, and so have their gradients.
        self.gradient_bytes = first.info.dtype.itemsize * sum(s.numel for s in bucket.slices)
        self.is_gathered = False
        """Whether its weights were in slots of gathers at its last update: they need no fetch."""
        self.updated: Event | None = None
        """After it, the last iteration has updated the shards; None: it skipped them."""
        self.passed_at = 0  # the position in the order at which it did
        if arena is not None:
            spans = self._spans
            self.block = Block([arena.tensor(s.arena_start, s.n_bytes, torch.uint8) for s in spans])
        else:
            state = [tensor for index in self.indices for tensor in params[index].tensors.values()]
            self.block = Block((), state, Residence.DEVICE)
        self._place_weights(params)
        self.blocks = [self.block, self.weights] if self.weights.host else [self.block]

    def _place_weights(self, params: list[ParamState]) -> None:
        hosts, at = list[Tensor](), align(self.bucket.slot_bytes, SLOT_ALIGN_BYTES)
        self._shards_at: list[tuple[int, int, torch.dtype] | None] = []  # bytes of the slot
        for slice_ in self.bucket.slices:
            host = params[slice_.spec.index].host_shard
            if host is None:
                self._shards_at.append(None)
                continue
            hosts.append(host[slice_.start : slice_.stop].view(torch.uint8))
            self._shards_at.append((at, at + hosts[-1].nbytes, host.dtype))
            at = align(at + hosts[-1].nbytes, SLOT_ALIGN_BYTES)
        self.weights = Block(hosts)
        self.device_bytes = max(at, SLOT_ALIGN_BYTES)
        """Bytes on the device; more than 0, even without state."""
        self.n_bytes = self.block.n_bytes + self.weights.n_bytes

    @property
    def update(self) -> BucketUpdate:
        """Return its update, once it has a slot, or needs none."""
        assert self._update is not None
        return self._update

    def move_to(self, slot: Tensor | None) -> None:
        """Use another slot (1-D uint8) from now on; nothing of this bucket may be in flight. None
        if it has no host copy."""
        is_same = slot is None or (
            self._slot is not None and slot.data_ptr() == self._slot.data_ptr()
        )
        if self._update is not None and is_same:
            return
        self._slot = slot
        if slot is not None:
            self.block.place([slot[s.slot_start : s.slot_start + s.n_bytes] for s in self._spans])
            self.weights.place([slot[at[0] : at[1]] for at in self._shards_at if at is not None])
        view = self._state if slot is None else self._view
        shards = [
            None if slot is None or at is None else slot[at[0] : at[1]].view(at[2])
            for at in self._shards_at
        ]
        if self._update is not None:
            self._update.bind(view, self._remainder(), shards)
        elif self._make_update is not None:
            self._update = self._make_update(
                view=view, flat_remainder=self._remainder(), shards=shards
            )
            self._make_update = None  # it keeps the optimizer alive

    def forget(self) -> None:
        """Discard its device copy."""
        for block in self.blocks:
            block.forget()

    def _view(self, slice_: Slice, kind: Kind, numel: int) -> Tensor:
        assert self._slot is not None
        span = self._by_kind[kind]
        start, stop = kind_range(slice_, kind, numel, self._layout.offsets)
        shift = span.slot_start - span.arena_start
        return self._slot[start + shift : stop + shift].view(kind.dtype)

    def _remainder(self) -> Tensor | None:
        if self._slot is None or not self._has_remainder:
            return None
        span = self._by_kind[REMAINDER_KIND]
        flat = self._slot[span.slot_start : span.slot_start + span.n_bytes]
        return flat.view(span.kind.dtype)


def state_of(params: Sequence[ParamState]) -> StateView:
    """Make views of the parameters' own state tensors."""

    def view(slice_: Slice, kind: Kind, numel: int) -> Tensor:
        index = slice_.spec.index
        start, stop = kind_range(slice_, kind, numel, {(index, kind.name): 0})
        state = params[index].tensors[kind.name].detach()  # a view would keep the tensor alive
        return state[start // kind.itemsize : stop // kind.itemsize]

    return view
