"""Layout of state in the arena and its division into buckets. Pure functions.

A *dtype group* is a list of parameters in one fixed order that share a lane, a shard dtype and a
compute dtype. Its part of the arena is *kind-major*: all ``exp_avg``, then all ``exp_avg_sq``, ...
Within a kind, parameters follow the group's order, each starting at a multiple of 64 elements.
So each parameter's state of a kind is one contiguous run, and a *bucket*, a contiguous range of
the order, is one contiguous range per kind: one copy each way.

Parameters are cut only at multiples of ``ParamSpec.cut_numel`` elements, because the compiler may
contract multiplications and additions differently in each unrolled copy of a kernel's body, and an
element must stay in its copy. Fused CPU kernels process vectors and then a scalar tail: 64
elements. CUDA's multi-tensor kernels (ATen/native/cuda/MultiTensorApply.cuh) walk a tensor in tiles
of 512 threads times 4: 2048 elements. They also choose one of two bodies for a whole tensor, by
whether its numel is a multiple of 4, so on CUDA a parameter whose numel is not is never cut.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from ..core.config import Lane, OffloadConfig, align
from ..core.errors import ConfigError

ALIGN_NUMEL: Final = 64
"""Cuts and parameter starts are multiples of this."""
SLOT_ALIGN_BYTES: Final = 256
CUDA_TILE_NUMEL: Final = 2048
"""Elements per turn of a block of a CUDA multi-tensor kernel."""


@dataclass(frozen=True)
class Kind:
    """One state tensor per parameter, such as ``exp_avg``."""

    name: str
    dtype: torch.dtype
    block_numel: int = 1  # elements of the parameter per element of the kind; divides ALIGN_NUMEL

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize


@dataclass(frozen=True)
class ParamSpec:
    """One parameter as plans see it: sizes, no tensor.

    The second half decides the choice of lanes, and is the same on all ranks.
    """

    index: int = -1  # position in the optimizer; -1 until it has one
    numel: int = 0  # elements of its shard
    kinds: tuple[tuple[Kind, int], ...] = ()  # (kind, elements): numel, or less if factored
    cuttable: bool = True
    cut_numel: int = ALIGN_NUMEL  # cuts lie at multiples of this
    fqn: str = ""
    global_bytes: int = 0  # state bytes of the whole parameter
    must_stay: bool = False  # tensor subclasses, state of unknown shape, coupled parameters
    whole: bool = False  # updated as a whole matrix: not on the CPU

    @property
    def state_bytes(self) -> int:
        """Payload bytes of all kinds."""
        return sum(kind.itemsize * numel for kind, numel in self.kinds)


@dataclass(frozen=True)
class Slice:
    """Elements ``[start, stop)`` of one parameter's shard."""

    spec: ParamSpec
    start: int
    stop: int
    scratch_start: int  # first element in the bucket's scratch memory

    @functools.cached_property
    def cut(self) -> slice | None:
        """The slice of a 1-D tensor of the whole shard; None: all of it."""
        return None if self.numel == self.spec.numel else slice(self.start, self.stop)

    @property
    def numel(self) -> int:
        """Elements in this slice."""
        return self.stop - self.start


@dataclass(frozen=True)
class Span:
    """Bytes of one kind that a bucket moves: range in the arena and in the slot."""

    kind: Kind
    arena_start: int
    slot_start: int
    n_bytes: int


@dataclass(frozen=True)
class Bucket:
    """A contiguous range of a group's order."""

    slices: tuple[Slice, ...]
    spans: tuple[Span, ...]
    scratch_numel: int
    slot_bytes: int

    @property
    def state_bytes(self) -> int:
        """Bytes that move in each direction."""
        return sum(span.n_bytes for span in self.spans)


@dataclass(frozen=True)
class Layout:
    """The place of a dtype group in the arena, and its buckets."""

    buckets: tuple[Bucket, ...]
    offsets: dict[tuple[int, str], int] = field(hash=False)  # (parameter, kind) -> arena byte
    arena_stop: int
    payload_bytes: int

    @property
    def scratch_numel(self) -> int:
        """Scratch elements that suffice for every bucket."""
        return max((bucket.scratch_numel for bucket in self.buckets), default=0)


def make_layout(specs: Sequence[ParamSpec], *, bucket_bytes: int, arena_start: int = 0) -> Layout:
    """Lay ``specs`` out from byte ``arena_start`` on and cut them into buckets.

    Args:
        specs: parameters in the group's order.
        bucket_bytes: state bytes that a bucket may hold; a parameter that cannot be cut may
            exceed it.
        arena_start: first byte; rounded up to the slot alignment.
    """
    offsets, arena_stop = _place(specs, align(arena_start, SLOT_ALIGN_BYTES))
    buckets = [_finish(slices, offsets) for slices in _cut(specs, bucket_bytes)]
    return Layout(
        buckets=tuple(buckets),
        offsets=offsets,
        arena_stop=arena_stop,
        payload_bytes=sum(spec.state_bytes for spec in specs),
    )


def _place(specs: Sequence[ParamSpec], start: int) -> tuple[dict[tuple[int, str], int], int]:
    kinds: dict[Kind, list[tuple[int, int]]] = {}
    for spec in specs:
        for kind, numel in spec.kinds:
            kinds.setdefault(kind, []).append((spec.index, numel))
    offsets: dict[tuple[int, str], int] = {}
    stop = start
    for kind, numels in kinds.items():
        cursor = align(stop, SLOT_ALIGN_BYTES)
        for index, numel in numels:
            offsets[index, kind.name] = cursor
            stop = cursor + numel * kind.itemsize
            cursor += align(numel, ALIGN_NUMEL // kind.block_numel) * kind.itemsize
    return offsets, stop


def _cut(specs: Sequence[ParamSpec], bucket_bytes: int) -> list[list[Slice]]:
    """Fill buckets with slices in order, and cut large parameters at a bucket's end."""
    buckets: list[list[Slice]] = [[]]
    free, scratch = bucket_bytes, 0
    for spec in specs:
        # An element counts as at least 4 bytes, so that scratch memory stays small for optimizers
        # with little or no state.
        per_numel = max(4, -(-spec.state_bytes // max(spec.numel, 1)))
        start = 0
        while True:  # once for an empty parameter, too: it keeps its slice and its step count
            room = free // per_numel // spec.cut_numel * spec.cut_numel
            rest = spec.numel - start
            if rest > room and buckets[-1] and (room <= 0 or not spec.cuttable):
                buckets.append([])
                free, scratch = bucket_bytes, 0
                continue
            # The first slice of a bucket may exceed it: nothing smaller can be cut.
            take = min(rest, max(room, spec.cut_numel)) if spec.cuttable else rest
            buckets[-1].append(Slice(spec, start, start + take, scratch))
            scratch += align(take, ALIGN_NUMEL)
            free -= align(take, ALIGN_NUMEL) * per_numel
            start += take
            if start >= spec.numel:
                break
    return [bucket for bucket in buckets if bucket]


def _finish(slices: list[Slice], offsets: dict[tuple[int, str], int]) -> Bucket:
    """Add the spans: per kind, from the first slice that has it to the end of the last one."""
    bounds: dict[Kind, tuple[int, int]] = {}
    for slice_ in slices:
        for kind, numel in slice_.spec.kinds:
            start, stop = kind_range(slice_, kind, numel, offsets)
            first, _ = bounds.get(kind, (start, stop))
            bounds[kind] = (first, stop)
    spans, slot = [], 0
    for kind, (start, stop) in bounds.items():
        spans.append(Span(kind, start, slot, stop - start))
        slot = align(slot + stop - start, SLOT_ALIGN_BYTES)
    last = slices[-1]
    return Bucket(
        slices=tuple(slices),
        spans=tuple(spans),
        scratch_numel=last.scratch_start + align(last.numel, ALIGN_NUMEL),
        slot_bytes=slot,
    )


def kind_range(
    slice_: Slice, kind: Kind, numel: int, offsets: dict[tuple[int, str], int]
) -> tuple[int, int]:
    """Return the arena bytes ``[start, stop)`` of one kind of a slice's state (``numel`` of the
    spec)."""
    base = offsets[slice_.spec.index, kind.name]
    if not slice_.spec.cuttable:  # its state may have fewer elements than the parameter
        return base, base + numel * kind.itemsize
    start, stop = slice_.start // kind.block_numel, -(-slice_.stop // kind.block_numel)
    return base + start * kind.itemsize, base + stop * kind.itemsize


def choose_lanes(specs: Sequence[ParamSpec], config: OffloadConfig) -> tuple[Lane, ...]:
    """Choose a lane per spec, in update order, from global sizes alone, so that all ranks agree.

    Parameters stay on the device in the given order while they fit the share that may stay; one
    that does not fit is offloaded, and later, smaller ones still get a chance. So the offloaded
    share is at least the requested one, and exceeds it by less than the largest parameter.

    Raises:
        ConfigError: ``update_on="host"``, and the optimizer updates whole matrices.
    """
    sizes = [c.global_bytes for c in specs]
    allowance = (1.0 - config.offload_fraction) * sum(sizes)
    away: Lane = "host" if config.update_on == "host" else "streamed"
    lanes: list[Lane] = []
    allowance -= sum(size for c, size in zip(specs, sizes, strict=True) if c.must_stay)
    for spec, size in zip(specs, sizes, strict=True):
        if spec.must_stay:
            lanes.append("resident")
        elif size > 0 and size <= allowance:
            lanes.append("resident")
            allowance -= size
        else:
            # With a fraction of 0 everything is resident, even empty parameters.
            keep = size == 0 and config.offload_fraction == 0
            if spec.whole and away == "host" and not keep:
                raise ConfigError(
                    f"update_on='host' for {spec.fqn}",
                    reason="its optimizer updates whole matrices, and may communicate on the "
                    "device",
                    remedy='use update_on="device"',
                )
            lanes.append("resident" if keep else away)
    return tuple(lanes)
