"""One bucket on the device: masters are unpacked, the shadow steps, masters are packed.

Serves the resident lane (state views on the device) and the streamed lane (views of a slot).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import shards
from ..plan import Bucket, Kind, Slice
from . import codec
from .records import REMAINDER_KIND, MasterForm, Piece, Record, Snapshot
from .shadow import Shadow

StateView = Callable[[Slice, Kind, int], Tensor]
"""(slice, kind, elements of the kind in the whole parameter) -> 1-D view of the slice's state."""


@dataclass(frozen=True)
class Scratch:
    """Device memory that one bucket's update works in; updates run one after another."""

    memory: Tensor  # uint8, 1-D

    @staticmethod
    def bytes_for(numel: int, compute: torch.dtype, shard: torch.dtype) -> int:
        """Bytes for a bucket of ``numel`` elements that keeps masters by remainder."""
        return numel * (2 * compute.itemsize + shard.itemsize)

    def cut(self, numel: int, compute: torch.dtype, shard: torch.dtype) -> list[Tensor]:
        """Masters, gradients (compute dtype) and gathered shards (shard dtype), 1-D each."""
        sizes = [numel * compute.itemsize, numel * compute.itemsize, numel * shard.itemsize]
        views, at = [], 0
        for size, dtype in zip(sizes, (compute, compute, shard), strict=True):
            views.append(self.memory[at : at + size].view(dtype))
            at += size
        return views


def make_piece(record: Record, piece: Slice, tensor: Tensor, view: StateView) -> Piece:
    """A piece whose like kinds are views and whose scalars are its own.

    Whole parameters (not cuttable) keep their own shape and placement.
    """
    numels = {kind.name: (kind, numel) for kind, numel in record.kinds}
    state: dict[str, Any] = {}
    for entry in record.schema.kinds:
        if entry.role == "number":
            state[entry.name] = 0
        elif entry.role == "scalar":
            device = tensor.device if entry.on_device else torch.device("cpu")
            state[entry.name] = torch.full((), entry.initial, dtype=entry.dtype, device=device)
        else:
            kind, numel = numels[entry.name]
            state[entry.name] = shaped(record, view(piece, kind, numel))
    tensor = shaped(record, tensor)
    made = Piece(record, piece.start, piece.stop, tensor, state, stepped=record.schema.eager)
    record.pieces.append(made)
    return made


def shaped(record: Record, flat: Tensor) -> Tensor:
    """A flat view in the form that the class sees: whole parameters in shape and placement."""
    if record.schema.elementwise:
        return flat
    return shards.like(record.parameter, flat.view(record.info.local_shape))


def copy_present(
    targets: Sequence[Tensor], sources: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
) -> None:
    """Copy (and cast) each source into its target where the piece has a gradient."""
    pairs = [
        (target, source)
        for target, source, gradient in zip(targets, sources, gradients, strict=True)
        if gradient is not None and source is not None
    ]
    torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


class BucketUpdate:
    """The update of one bucket on the device.

    All records of the bucket share shard dtype, compute dtype and :class:`MasterForm`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        bucket: Bucket,
        records: list[Record],
        view: StateView,
        scratch: Scratch,
        *,
        flat_remainder: Tensor | None = None,
    ) -> None:
        first = records[bucket.slices[0].entry.index]
        self.bucket = bucket
        self._form = first.form
        self._shards = [
            shards.local(records[s.entry.index].parameter).view(-1)[s.start : s.stop]
            for s in bucket.slices
        ]
        self._masters: list[Tensor] = self._shards
        self._gradients: list[Tensor] | None = None
        self._gathered: list[Tensor] | None = None
        self._codes: list[tuple[Tensor, Tensor, Tensor]] = []  # (bf16, int16, fp32) each 1-D
        if self._form is not MasterForm.SHARD:
            self._use_masters(bucket, records, view, scratch, flat_remainder)
        self.pieces = [
            make_piece(records[s.entry.index], s, master, view)
            for s, master in zip(bucket.slices, self._masters, strict=True)
        ]
        self._shadow = Shadow(optimizer, self.pieces, {})

    def _use_masters(
        self,
        bucket: Bucket,
        records: list[Record],
        view: StateView,
        scratch: Scratch,
        flat_remainder: Tensor | None,
    ) -> None:
        """Point masters and gradients at scratch memory (or masters at whole fp32 state)."""
        first = records[bucket.slices[0].entry.index]
        compute, shard = first.compute_dtype, first.info.dtype
        masters, gradients, gathered = scratch.cut(bucket.scratch_numel, compute, shard)

        def cut(flat: Tensor) -> list[Tensor]:
            return [flat[s.scratch_start : s.scratch_start + s.numel] for s in bucket.slices]

        self._gradients = cut(gradients)
        if self._form is MasterForm.WHOLE:
            kind = Kind(MasterForm.WHOLE.value, compute)
            self._masters = [view(s, kind, s.entry.numel) for s in bucket.slices]
            return
        self._masters = cut(masters)
        if flat_remainder is not None and len(bucket.slices) > 1:
            # Many small shards: one gather, one kernel, one scatter.
            self._gathered = cut(gathered)
            numel = flat_remainder.numel()
            self._codes = [(gathered[:numel], flat_remainder, masters[:numel])]
        else:
            remainders = [view(s, REMAINDER_KIND, s.entry.numel) for s in bucket.slices]
            self._codes = list(zip(self._shards, remainders, self._masters, strict=True))

    def bind(self, view: StateView, flat_remainder: Tensor | None = None) -> None:
        """Temporary."""
        for piece, s in zip(self.pieces, self.bucket.slices, strict=True):
            for kind, numel in piece.record.kinds:
                if kind.name in piece.state:
                    piece.state[kind.name] = shaped(piece.record, view(s, kind, numel))
        if self._form is MasterForm.REMAINDER:
            if flat_remainder is not None and len(self.bucket.slices) > 1:
                self._codes = [(self._codes[0][0], flat_remainder, self._codes[0][2])]
            else:
                rem = [view(s, REMAINDER_KIND, s.entry.numel) for s in self.bucket.slices]
                self._codes = list(zip(self._shards, rem, self._masters, strict=True))

    def run(self, gradients: list[Tensor | None], snapshot: Snapshot) -> None:
        """Update the bucket's parameters and state. ``gradients``: per piece, 1-D or None."""
        self._unpack()
        self._shadow.step(self._shape(self._cast(gradients)), snapshot)
        self._pack(gradients)

    def _unpack(self) -> None:
        if self._form is MasterForm.WHOLE:
            for shard, master in zip(self._shards, self._masters, strict=True):
                codec.reseed_where_changed(shard, master)
            return
        if self._gathered is not None:
            torch._foreach_copy_(self._gathered, self._shards)
        for value, remainder, master in self._codes:
            codec.decode(value, remainder, master)

    def _cast(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Gradients in the compute dtype."""
        if self._gradients is None:
            return gradients
        copy_present(self._gradients, gradients, gradients)
        return [
            None if gradient is None else cast
            for gradient, cast in zip(gradients, self._gradients, strict=True)
        ]

    def _shape(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Gradients of whole parameters in the parameter's shape and placement."""
        return [
            None if g is None else shaped(piece.record, g)
            for g, piece in zip(gradients, self.pieces, strict=True)
        ]

    def _pack(self, gradients: list[Tensor | None]) -> None:
        """Write the shards back: only of parameters that had a gradient."""
        if self._form is MasterForm.SHARD:
            return
        for (value, remainder, master), gradient in zip(
            self._codes, gradients if self._gathered is None else [True], strict=False
        ):
            if gradient is not None:
                codec.encode(master, value, remainder)
        source = self._masters if self._form is MasterForm.WHOLE else self._gathered
        if source is not None:
            copy_present(self._shards, source, gradients)
