"""Choose the order in which buckets move: a pure function of times.

The link is one server. When it becomes free, it takes the bucket that the forward needs first among
those with gradients, or waits for the next gradients. So buckets of the first layers, whose
gradients come last, overtake as soon as they can, and the forward needs the remaining ones late.
That keeps the idle time between the last update and the next gradients shortest.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Visit:
    """One bucket as the order sees it."""

    ready_ms: float
    """When its last gradient is ready, counted from the first of the backward."""
    rank: int
    """Position in which the forward needs it; the lowest first."""
    cost_ms: float
    """How long it keeps the link busy, in each direction."""


def deadline_order(visits: Sequence[Visit]) -> tuple[int, ...]:
    """Return indices of ``visits`` in the order of service; the index breaks ties."""
    arrivals = sorted(range(len(visits)), key=lambda index: (visits[index].ready_ms, index))
    waiting: list[tuple[int, int]] = []
    order: list[int] = []
    now_ms, arrived = 0.0, 0  # the link's clock, and how many of `arrivals` are in `waiting`
    while len(order) < len(visits):
        while arrived < len(visits) and visits[arrivals[arrived]].ready_ms <= now_ms:
            index = arrivals[arrived]
            heapq.heappush(waiting, (visits[index].rank, index))
            arrived += 1
        if not waiting:  # idle until the next gradients
            now_ms = visits[arrivals[arrived]].ready_ms
            continue
        _, index = heapq.heappop(waiting)
        order.append(index)
        now_ms += visits[index].cost_ms
    return tuple(order)


def fetched_first(order: Sequence[int], staying: Collection[int], slots: int) -> list[int]:
    """Reorder if all gradients are ready before the first update: buckets whose state is already in
    ``slots`` go first, because the link is idle until these become free."""
    ahead = [index for index in order if index not in staying][:slots]
    first = set(ahead)
    return [*ahead, *(index for index in order if index not in first)]


def ring_size(buckets: int, most: int) -> int:
    """Choose how many of at most ``most`` slots a ring uses for ``buckets`` buckets.

    The next iteration starts at slot 0 again. If the last round skipped slots, its first buckets
    would wait for a slot that becomes free late.
    """
    if buckets <= most:
        return max(buckets, 1)
    rounds = -(-buckets // most)
    return -(-buckets // rounds)


@dataclass(frozen=True)
class SlotUse:
    """Slot of the bucket at each position of an order, and how far ahead slots are filled."""

    slots: tuple[int | None, ...]  # per position; None: the bucket stays in its own memory
    reach: tuple[int, ...]
    """For each number of finished positions, 0 to all: the position, exclusive, up to which slots
    are free."""


def slot_use(staying: Sequence[bool], slots: int) -> SlotUse:
    """Assign slots (at least 1, unless all stay) to the positions of an order: buckets that do not
    stay use them in turn."""
    used: list[int | None] = []
    travelling: list[int] = []  # positions
    for position, stays in enumerate(staying):
        used.append(None if stays else len(travelling) % slots)
        if not stays:
            travelling.append(position)
    reach, passed = [], 0
    for stays in (*staying, True):
        ahead = passed + slots  # the first travelling bucket without a free slot
        reach.append(travelling[ahead] if ahead < len(travelling) else len(staying))
        passed += not stays
    return SlotUse(tuple(used), tuple(reach))


def assumed_ready_ms(sizes: Sequence[float], backward_ms: float) -> list[float]:
    """Assume when gradients are ready, before any measurement: the backward takes time in
    proportion to ``sizes``, given in forward order."""
    whole = sum(sizes) or 1.0
    ready, left = [], whole
    for size in sizes:
        ready.append(left / whole * backward_ms)
        left -= size
    return ready
