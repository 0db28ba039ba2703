"""Boxes of a tensor: which elements of a global tensor a rank holds. Pure arithmetic, no tensors.

A checkpoint describes what it holds of a tensor as a list of boxes (offsets and sizes per dim).
Where each rank's part is one box by construction (FSDP2), torch computes it from mesh and
placements. A *ragged* shard is any contiguous range ``[start, stop)`` of a block in row-major
order; it is described by the few boxes of :func:`flat_boxes`, again without asking other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Box", "covers", "flat_boxes"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A box of a tensor: per dim, where it starts and how far it extends, in elements."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        """Elements in it; a box of a 0-dim tensor has one."""
        return math.prod(self.sizes)

    def shifted(self, by: Sequence[int]) -> Box:
        """The same box in coordinates whose origin lies ``by`` before this one's."""
        moved = (offset + shift for offset, shift in zip(self.offsets, by, strict=True))
        return Box(tuple(moved), self.sizes)


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """The elements ``[start, stop)``, counted in row-major order, of a tensor of ``shape``.

    The boxes are disjoint, none is empty, and each is contiguous in that order, so that the range
    is their concatenation and each is a view of a flat slice. No fewer contiguous boxes do: one
    for whole rows, at most ``2 * dims - 1``, hence three for a matrix.
    """
    shape = tuple(shape)
    assert 0 <= start <= stop <= math.prod(shape), (shape, start, stop)
    if start == stop:
        return ()
    return tuple(_runs(shape, start, stop))


def _runs(shape: Shape, start: int, stop: int) -> list[Box]:
    """:func:`flat_boxes` of a range that is not empty."""
    if not shape:
        return [Box((), ())]
    row_numel = math.prod(shape[1:])
    first, head = divmod(start, row_numel)
    last, tail = divmod(stop, row_numel)
    if first == last:  # within one row
        return _within_row(shape, first, head, tail)
    boxes = []
    if head:
        boxes += _within_row(shape, first, head, row_numel)
        first += 1
    if first < last:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if tail:
        boxes += _within_row(shape, last, 0, tail)
    return boxes


def _within_row(shape: Shape, row: int, start: int, stop: int) -> list[Box]:
    inner = _runs(shape[1:], start, stop)
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in inner]


def covers(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Whether every element of a tensor of ``shape`` lies in a box; boxes may overlap.

    False too if a box sticks out or has other dims: such boxes are of another tensor. Takes time
    in proportion to the boxes where they differ in one dim only, and to the cells of the grid
    they span in general.
    """
    shape = tuple(shape)
    spans: set[Spans] = set()
    for box in boxes:
        if not len(box.offsets) == len(box.sizes) == len(shape):
            return False
        span = tuple((o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        if not all(0 <= a <= b <= n for (a, b), n in zip(span, shape, strict=True)):
            return False
        if box.numel:
            spans.add(span)
    return math.prod(shape) == 0 or _swept(shape, spans)


Spans = tuple[tuple[int, int], ...]
"""A box as (start, stop) per dim."""


def _swept(shape: Shape, spans: set[Spans]) -> bool:
    """Sweep dim 0: between neighbouring edges the same boxes are met, and the rest must cover."""
    if not spans or not shape:
        return bool(spans)
    edges: dict[int, tuple[list[Spans], list[Spans]]] = {0: ([], []), shape[0]: ([], [])}
    for span in spans:
        (start, stop), rest = span[0], span[1:]
        edges.setdefault(start, ([], []))[0].append(rest)
        edges.setdefault(stop, ([], []))[1].append(rest)
    met: dict[Spans, int] = {}  # how many boxes with this rest
    checked: set[Spans] | None = None
    for here, _ in pairwise(sorted(edges)):
        begin, end = edges[here]
        for rest in begin:
            met[rest] = met.get(rest, 0) + 1
        for rest in end:
            met[rest] -= 1
            if not met[rest]:
                del met[rest]
        rests = set(met)
        if rests != checked and not _swept(shape[1:], rests):
            return False
        checked = rests
    return True
