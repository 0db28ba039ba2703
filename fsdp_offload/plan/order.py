"""In which order buckets travel: a pure function of times.

The link is one server. Each time it falls free it takes the most urgent bucket, by the order in
which the forward needs parameters, among those whose gradients are there; if there is none, it
waits for the next. So what the head of the model needs first overtakes as soon as its gradients,
which come last, are there, and what remains for the end of the forward is needed late: the time
in which nothing is left to do, between the last update and the next gradients, is shortest.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Visit:
    """One bucket as the order sees it."""

    ready_ms: float
    """When its last gradient is there, since the backward's first."""
    rank: int
    """When the forward needs it, compared with others; the first is needed soonest."""
    cost_ms: float
    """How long the link is busy with it, in each direction."""


def deadline_order(visits: Sequence[Visit]) -> tuple[int, ...]:
    """Indices of ``visits`` in the order of service; ties are broken by the index."""
    arrivals = sorted(range(len(visits)), key=lambda index: (visits[index].ready_ms, index))
    waiting: list[tuple[int, int]] = []
    order: list[int] = []
    now_ms, arrived = 0.0, 0
    while len(order) < len(visits):
        while arrived < len(visits) and visits[arrivals[arrived]].ready_ms <= now_ms:
            index = arrivals[arrived]
            heapq.heappush(waiting, (visits[index].rank, index))
            arrived += 1
        if not waiting:
            now_ms = visits[arrivals[arrived]].ready_ms
            continue
        _, index = heapq.heappop(waiting)
        order.append(index)
        now_ms += visits[index].cost_ms
    return tuple(order)


def fetched_first(order: Sequence[int], staying: Collection[int], slots: int) -> list[int]:
    """``order`` where all gradients are there before the first update: first the buckets whose
    state was fetched ahead, into ``slots``, since the link can do nothing until these fall free."""
    ahead = [index for index in order if index not in staying][:slots]
    first = set(ahead)
    return [*ahead, *(index for index in order if index not in first)]


def ring_size(buckets: int, most: int) -> int:
    """How many of at most ``most`` slots a ring uses that is gone round for ``buckets`` buckets.

    The next iteration starts at slot 0 again, so a last round that leaves slots out would let
    its first buckets wait for a slot that falls free late.
    """
    if buckets <= most:
        return max(buckets, 1)
    rounds = -(-buckets // most)
    return -(-buckets // rounds)


@dataclass(frozen=True)
class SlotUse:
    """Which slot the bucket at each position of an order uses, and how far ahead that is filled."""

    slots: tuple[int | None, ...]  # per position; None: the bucket stays in memory of its own
    reach: tuple[int, ...]
    """Per number of positions that have been passed, none to all: up to which position, exclusive,
    the slots are free for the buckets that come."""


def slot_use(staying: Sequence[bool], slots: int) -> SlotUse:
    """Slots (at least 1, unless all stay) for the positions of an order: buckets that do not stay
    go round through them."""
    used: list[int | None] = []
    travelling: list[int] = []  # positions
    for position, stays in enumerate(staying):
        used.append(None if stays else len(travelling) % slots)
        if not stays:
            travelling.append(position)
    reach, passed = [], 0
    for stays in (*staying, True):
        ahead = passed + slots
        reach.append(travelling[ahead] if ahead < len(travelling) else len(staying))
        passed += not stays
    return SlotUse(tuple(used), tuple(reach))


def assumed_ready_ms(sizes: Sequence[float], backward_ms: float) -> list[float]:
    """When gradients come before anything was measured: the backward takes time in proportion to
    ``sizes``, which are in the order of the forward."""
    whole = sum(sizes) or 1.0
    ready, left = [], whole
    for size in sizes:
        ready.append(left / whole * backward_ms)
        left -= size
    return ready
