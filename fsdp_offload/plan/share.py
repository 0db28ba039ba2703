"""Which saved activations are moved for free: the link in both directions, simulated. Pure.

[Note: spread]
A link is several times slower than a dense model saves. What is moved must be spread over the
forward: the first batches in a row would queue up, and be needed in a row at backward's end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from ..core.config import GIB

ALLOWED_SHARE: Final = 0.0025
"""Of an iteration, that the device may wait for copies. With 0.01 as much is moved, within 3 %."""
AHEAD: Final = 2
"""Batches that are brought back before they are needed."""


@dataclass(frozen=True)
class SavedBatch:
    """Times are since the iteration began, without waits for copies."""

    n_bytes: int
    saved_ms: float
    needed_ms: float


@dataclass(frozen=True)
class Link:
    """Between the device and the host's memory, both directions busy."""

    out_gbps: float
    back_gbps: float
    optimizer_out_bytes: int = 0
    """That the optimizer moves in an iteration."""
    optimizer_back_bytes: int = 0
    overlap: str = "backward"
    """The optimizer's: it begins there, and what takes longer is moved in the other half."""

    def shares(self, forward_ms: float, backward_ms: float) -> tuple[float, float]:
        """That the optimizer takes out in forward and back in backward, at most 1."""
        out_ms = self.optimizer_out_bytes / max(1e6 * self.out_gbps, 1.0)
        back_ms = self.optimizer_back_bytes / max(1e6 * self.back_gbps, 1.0)
        if self.overlap == "backward":
            out_ms -= min(out_ms, backward_ms)
        else:
            back_ms -= min(back_ms, forward_ms)
        return min(1.0, out_ms / (forward_ms or 1.0)), min(1.0, back_ms / (backward_ms or 1.0))


@dataclass(frozen=True)
class OffloadPlan:
    """Which batches are moved."""

    batches: tuple[SavedBatch, ...]
    iteration_ms: float
    link: Link
    moved: frozenset[int]
    waits_ms: float
    """That the device is expected to wait for copies."""
    host_bytes: int

    @property
    def moved_bytes(self) -> int:
        """In each direction and iteration."""
        return sum(self.batches[index].n_bytes for index in self.moved)

    def explain(self) -> str:
        """The choice in words, one line each."""
        total = sum(each.n_bytes for each in self.batches)
        out, back = self.link.shares(*_halves(self.batches, self.iteration_ms))
        lines = [
            f"moved: {len(self.moved)} of {len(self.batches)} batches, "
            f"{self.moved_bytes / GIB:.2f} of {total / GIB:.2f} GiB that could be",
            f"link: {self.link.out_gbps:.1f} GB/s out, {self.link.back_gbps:.1f} back, both at "
            f"once; the optimizer takes {out:.0%} of it in forward, {back:.0%} in backward",
            f"waits for copies: {self.waits_ms:.2f} ms of an iteration of "
            f"{self.iteration_ms:.1f} ms, of which {ALLOWED_SHARE:.2%} are allowed",
        ]
        stay = [each.n_bytes for i, each in enumerate(self.batches) if i not in self.moved]
        if stay:
            by_memory = min(stay) > self.host_bytes - self.moved_bytes
            limit = "host memory is full" if by_memory else "the device would wait for longer"
            lines.append(f"no more, because {limit}")
        return "\n".join(lines)


def choose_share(
    batches: Sequence[SavedBatch],
    iteration_ms: float,
    link: Link,
    *,
    host_bytes: int,
    inflight_bytes: int,
) -> OffloadPlan:
    """Batches, the earliest first, as long as waits stay within :data:`ALLOWED_SHARE`.

    Args:
        batches: of one iteration, as they were saved.
        iteration_ms: without waits for copies.
        link: of this rank, while the others of this host copy, too.
        host_bytes: that there are for them.
        inflight_bytes: device memory that may be held for copies out.
    """
    moved: frozenset[int] = frozenset()
    waits = 0.0
    room = host_bytes
    for index, batch in enumerate(batches):
        if batch.n_bytes <= room:
            more = moved | {index}
            found = waits_ms(batches, more, iteration_ms, link, inflight_bytes)
            if found <= ALLOWED_SHARE * iteration_ms:
                moved, waits, room = more, found, room - batch.n_bytes
    return OffloadPlan(tuple(batches), iteration_ms, link, moved, waits, host_bytes)


def waits_ms(
    batches: Sequence[SavedBatch],
    moved: Set[int],
    iteration_ms: float,
    link: Link,
    inflight_bytes: int,
) -> float:
    """How long the device waits, if these batches are moved as ``BatchCopies`` does."""
    taken = link.shares(*_halves(batches, iteration_ms))
    out, back = (
        max(1e6 * gbps * (1 - share), 1.0)  # bytes per ms
        for gbps, share in zip((link.out_gbps, link.back_gbps), taken, strict=True)
    )
    order = sorted(moved)
    events = [(batches[index].saved_ms, 0, index) for index in order]
    events += [(b.needed_ms, 1, index) for index, b in enumerate(batches)]
    waited = out_free = back_free = 0.0
    sent: dict[int, float] = {}  # when the copy out ends
    here: dict[int, float] = {}  # when it is on the device again
    sending: deque[int] = deque()
    held = 0
    for at_ms, is_needed, index in sorted(events):
        now = at_ms + waited
        if not is_needed:
            out_free = sent[index] = max(now, out_free) + batches[index].n_bytes / out
            sending.append(index)
            held += batches[index].n_bytes
            while sending and (sent[sending[0]] <= now or held > inflight_bytes):
                oldest = sending.popleft()
                held -= batches[oldest].n_bytes
                waited += max(0.0, sent[oldest] - now)
                now = max(now, sent[oldest])
            continue
        upto = bisect_right(order, index)
        first = upto - AHEAD - (index in moved)
        for other in reversed(order[max(first, 0) : upto]):
            if other not in here and sent.get(other, now) > now:
                here[other] = 0.0  # it is on its way out still, so it stays
            elif other not in here and other in sent:
                back_free = here[other] = max(now, back_free) + batches[other].n_bytes / back
        waited += max(0.0, here.get(index, now) - now)
    return waited


def _halves(batches: Sequence[SavedBatch], iteration_ms: float) -> tuple[float, float]:
    """Forward, until the last batch is saved, and the rest."""
    forward_ms = max((each.saved_ms for each in batches), default=0.0)
    return forward_ms, max(0.0, iteration_ms - forward_ms)


def times_of(
    marks: Iterable[tuple[str, int, float]], sizes: Mapping[int, int], end_ms: float
) -> tuple[list[SavedBatch], float]:
    """Batches and the iteration's time as they would be without waits for copies.

    Args:
        marks: in order: what happened, to which batch, when. The device began to ``"wait"`` and
            went ``"on"``; a batch was ``"saved"``, or ``"needed"`` for the first time.
        sizes: bytes by batch, in the order in which they were saved.
        end_ms: of the iteration; what nobody has needed is needed then.
    """
    waited = began = 0.0
    saved: dict[int, float] = {}
    needed: dict[int, float] = {}
    for kind, index, at_ms in marks:
        if kind == "wait":
            began = at_ms
        elif kind == "on":
            waited += at_ms - began
        else:
            (saved if kind == "saved" else needed).setdefault(index, at_ms - waited)
    end_ms -= waited
    found = [
        SavedBatch(size, saved[index], max(needed.get(index, end_ms), saved[index]))
        for index, size in sizes.items()
    ]
    return found, end_ms
