"""Copies of which one would overwrite what another one has yet to read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from torch import Tensor


def kept_apart(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> list[Tensor]:
    """Sources for copies that are made one after the other, in any order, but for those that
    :func:`is_same` calls needless.

    A source that lies in a target, but for one that is its own, is a clone: state that has changed
    places within a state dict of live tensors, say.

    Args:
        targets: plain tensors, contiguous, in memory that they do not share.
        sources: as many plain tensors.
    """
    result = list(sources)
    foreign = [i for i, pair in enumerate(zip(targets, sources, strict=True)) if not is_same(*pair)]
    if foreign:
        ranges = sorted(_range(target) for target in targets if target.numel())
        starts = [start for start, _ in ranges]
        for index in foreign:
            first, stop = _range(sources[index])
            before = bisect_left(starts, stop) - 1  # the last target that begins before its end
            if before >= 0 and ranges[before][1] > first:
                result[index] = sources[index].clone()
    return result


def is_same(target: Tensor, source: Tensor) -> bool:
    """Whether a copy would change nothing: they are the same memory, as the same dtype."""
    where = (target.data_ptr(), target.dtype, target.device)
    return source.is_contiguous() and where == (source.data_ptr(), source.dtype, source.device)


def _range(tensor: Tensor) -> tuple[int, int]:
    """Addresses of its first byte and behind its last one; an empty range for what has none."""
    start = tensor.data_ptr()
    if not start or not tensor.numel():
        return 0, 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize
