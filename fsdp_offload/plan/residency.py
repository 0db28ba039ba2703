"""Choose how much device memory an optimizer takes, which buckets stay in it, and in which order
the others move.

Pure functions of figures; nothing queries a device.

torch's allocator keeps what it once took from the driver. So the *reserved* memory just after it
grew, minus the optimizer's own, is what the job needs at some point of an iteration. The optimizer
may take the rest except for a margin. Memory that it gives back stays in the allocator, where the
job finds it. Memory of other processes counts as it is.

State leaves only between steps, so the margin covers what an iteration takes beyond all earlier
ones. For the first twelve steps it is a quarter of the device. Then it follows the observed growth:

* *Demand* is the peak of allocated memory without the optimizer's. If all iterations are alike, it
  does not grow, even if memory fragments. If it grew in the last three quarters of the steps,
  iterations differ, and the first margin holds; the same after a retry of the allocator.
* Reserved memory also grows by fragmentation. The margin is twice the growth in the last quarter of
  the steps. In the two iterations after the optimizer took memory, the job takes again what the
  optimizer found in the allocator's cache, which does not count.

Memory goes to slots first, so that the link is busy while nothing can be updated, then to buckets
that stay, which need no link. An evicted bucket stays evicted for a while; otherwise memory that is
short now and then would be taken and given back in turns.

With ``overlap="backward"``, the buckets that the forward needs first stay: their gradients come
last, and the others have the rest of the backward to move. If weights travel too, the backward is
ahead of the updates by about two groups at most. So only that share of the first buckets stays, and
the others that stay are spread evenly; if all stayed at one end, the link would have no work there.
Without ``"backward"`` all updates begin when the forward does, and all buckets that stay are
spread: the link then works from the first layer to the last.

The link is one server. When it becomes free, it takes the bucket that the forward needs first among
those with gradients, or waits for the next gradients. So buckets of the first layers, whose
gradients come last, overtake as soon as they can, and the forward needs the remaining ones late.
That keeps the idle time between the last update and the next gradients shortest.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..core.backend import AllocatorFigures
from ..core.config import GIB, MIB

LEAST_MARGIN_BYTES: Final = GIB
MARGIN_SHARE: Final = 0.025
FIRST_MARGIN_SHARE: Final = 0.25
FIRST_LOOK: Final = 3
"""Steps after which a job with equal iterations has seen its peak."""
FIRST_STEPS: Final = 12
"""Steps with the larger margin."""
MOST_STEPS: Final = 100
"""Steps after which growth is forgotten."""
SMALL_GROWTH_BYTES: Final = GIB // 4
"""Tolerated growth of demand, which depends a little on how far the host is ahead."""
FRAGMENTS_FACTOR: Final = 2
LEAST_SLOTS: Final = 4
"""Three keep both directions of the link busy; the fourth absorbs jitter. :func:`.ring_size` may
leave one out."""
MOST_SLOT_BYTES: Final = 4 * GIB
"""Memory beyond that goes to buckets that stay."""
LEAST_SAVING_BYTES: Final = 64 * MIB
"""Of device memory, for which a large group of weights stays that was to leave."""
AWAY_STEPS: Final = 50
"""Steps for which an evicted bucket stays evicted."""


def margin_bytes(total_bytes: int, step: int = FIRST_STEPS, grown_bytes: int = 0) -> int:
    """Return the margin after that step: at least ``grown_bytes``, at most the first margin."""
    most = max(LEAST_MARGIN_BYTES, int(total_bytes * FIRST_MARGIN_SHARE))
    least = max(LEAST_MARGIN_BYTES, int(total_bytes * MARGIN_SHARE))
    return most if step < FIRST_STEPS else min(most, max(least, grown_bytes))


def allowed_bytes(free: int, reserved: int, job: int, own: int, margin: int) -> int:
    """Return all bytes that the optimizer may hold.

    Args:
        free: the driver's free bytes.
        reserved: bytes that torch's allocator holds now.
        job: the most that the job needs of them: see the module's docstring.
        own: the optimizer's part of them: slots and buckets that stay.
        margin: bytes to leave free.
    """
    spare = free + reserved - own - job - margin
    if spare > 0:  # unused blocks of the allocator may not fit a bucket, so only the driver's count
        spare = min(spare, max(0, free - margin))
    return max(0, own + spare)


def _raise(history: list[tuple[int, int]], step: int, value: int) -> None:
    """Record growth of a figure that never falls, with its step."""
    if value > history[-1][1]:
        history.append((step, value))


def _growth(history: list[tuple[int, int]], since: int) -> int:
    """Return the growth since that step, and drop earlier entries."""
    while len(history) > 1 and history[1][0] <= since:
        del history[0]
    return history[-1][1] - history[0][1]


class MemoryWatch:
    """Decides after each step whether to take or give back memory, from the figures of all steps.

    It depends on its arguments alone, so that tests can replay a recorded job.
    """

    def __init__(self) -> None:
        self._job, self._demand, self._retries = [(0, 0)], [(0, 0)], [(0, 0)]  # steps and values
        self._last: AllocatorFigures | None = None
        self._reserved_bytes = self._taken_at = self._grown_bytes = 0
        self._is_short = self._takes = False  # in the last step; in the last decision

    def is_due(self, step: int) -> bool:
        """Whether a decision is due although no figure has changed."""
        grown = abs(self._left_alone(step) - self._grown_bytes)
        is_first = step in (FIRST_LOOK, FIRST_STEPS)
        return is_first or step % AWAY_STEPS == 0 or grown >= LEAST_MARGIN_BYTES // 2

    def observe(self, step: int, now: AllocatorFigures, own_bytes: int) -> str:
        """Record the figures after that step, from 1 on, and the optimizer's bytes. Returns the
        reason to decide anything, or ``""``."""
        last, self._last = self._last, now
        self._is_short = last is not None and now.retries > last.retries
        _raise(self._retries, step, now.retries)
        demand = self._demand[-1][1]
        if last is None or now.allocated_peak_bytes > last.allocated_peak_bytes:
            _raise(self._demand, step, now.allocated_peak_bytes - own_bytes)
        grown = now.reserved_bytes - self._reserved_bytes
        if grown > 0:
            # Only demand may have grown into memory that was given back.
            most = self._job[-1][1] + grown + self._demand[-1][1] - demand
            _raise(self._job, step, min(now.reserved_bytes - own_bytes, most))
            self._reserved_bytes = now.reserved_bytes
        if self._is_short:
            return "torch's allocator was short"
        if grown > 0 and step > FIRST_LOOK:
            return "the peak has grown"
        return "spare memory" if self.is_due(step) else ""

    def decide(self, step: int, free_bytes: int, total_bytes: int, own_bytes: int) -> int | None:
        """Return the bytes that the optimizer may hold from now on; None if a change is not worth
        it."""
        assert self._last is not None
        self._grown_bytes = self._left_alone(step)
        margin = margin_bytes(total_bytes, step, self._grown_bytes)
        reserved, job = self._last.reserved_bytes, self._job[-1][1]
        allowed = allowed_bytes(free_bytes, reserved, job, own_bytes, margin)
        if self._is_short:  # after a retry, fragmentation makes the free bytes look too good
            allowed = min(allowed, own_bytes // 2)
        self._takes = allowed > own_bytes
        # Evicting buckets costs transfers in every later step; the margin bears a little less.
        is_little = 0 < own_bytes - allowed <= min(margin // 4, own_bytes // 8)
        return None if is_little and not self._is_short else allowed

    def changed(self, step: int, now: AllocatorFigures) -> None:
        """Record that the optimizer changed its memory after that step, which is no growth of the
        job."""
        self._last = now
        if self._takes:
            self._taken_at = step
        self._reserved_bytes = max(self._reserved_bytes, now.reserved_bytes)

    def _left_alone(self, step: int) -> int:
        if step < FIRST_STEPS:
            return 0
        since = step - min(MOST_STEPS, 3 * step // 4)
        if _growth(self._retries, since) or _growth(self._demand, since) > SMALL_GROWTH_BYTES:
            return sys.maxsize
        fragments = _growth(self._job, max(step - min(MOST_STEPS, step) // 4, self._taken_at + 2))
        return FRAGMENTS_FACTOR * fragments


def spread(order: Sequence[int]) -> list[int]:
    """Reorder buckets so that every prefix lies evenly spread over ``order``.

    Uses multiples of the golden ratio: https://en.wikipedia.org/wiki/Low-discrepancy_sequence.
    """
    golden = (5**0.5 - 1) / 2
    return [order[i] for i in sorted(range(len(order)), key=lambda i: i * golden % 1)]


def preferred_to_stay(order: Sequence[int], first: float) -> list[int]:
    """Reorder buckets, given in the forward's order, by preference to stay: the ``first`` share of
    them, from 0 to 1, and then the rest, spread."""
    count = round(first * len(order))
    return [*order[:count], *spread(order[count:])]


def bytes_for_weights(
    device_memory: int | str, total_bytes: int, *, gradient_bytes: int, ring_bytes: int
) -> int:
    """Return device bytes for weights, including slots for those that leave. Weights leave last:
    one that stays saves more traffic than as many bytes of state.

    Args:
        device_memory: the caller's figure; "auto" leaves half of the device to the job.
        total_bytes: memory of the device.
        gradient_bytes: gradients of all trained parameters.
        ring_bytes: the least that state needs to move.
    """
    if isinstance(device_memory, int):
        return max(device_memory - ring_bytes, 0)
    return max(total_bytes // 2 - gradient_bytes - ring_bytes, 0)


def choose_travelling(sizes: Sequence[int], allowed: int, slots: int) -> set[int]:
    """Choose the groups of weights that leave if the device has ``allowed`` bytes for them and
    ``slots``.

    Each slot is as large as the largest group that leaves. A much larger one, such as a large
    vocabulary, stays: slots of its size would take more. If all stay, no slots are needed.
    """
    if sum(sizes) <= allowed:
        return set()
    largest = sorted((index for index, size in enumerate(sizes) if size), key=lambda i: -sizes[i])

    def needed(count: int) -> int:
        return sum(sizes[i] for i in largest[:count]) + slots * sizes[largest[count]]

    count = min(range(len(largest)), key=lambda n: needed(n) + LEAST_SAVING_BYTES * bool(n))
    left, travelling = allowed - needed(count), set[int]()
    for index in spread(sorted(largest[count:])):
        if sizes[index] <= left:
            left -= sizes[index]
        else:
            travelling.add(index)
    return travelling


def gradients_fit(state: int, weights: int, allowed: int | None, total: int) -> bool:
    """Whether gradients, as large as the weights, stay on a device of ``total`` bytes.

    Args:
        state: bytes of optimizer state.
        weights: bytes of trained weights.
        allowed: bytes for all of it; None: state gives way to gradients, and activations get half
            of the device.
    """
    both = 2 * weights
    return 2 * both <= total if allowed is None else state + both <= allowed


def most_slots(allowed: int, slot_bytes: int) -> int:
    """Return how many slots ``allowed`` bytes can hold while buckets move."""
    return max(LEAST_SLOTS, min(allowed // 2, MOST_SLOT_BYTES) // slot_bytes)


def choose(
    sizes: Mapping[int, int],
    preferred: Sequence[int],
    allowed: int,
    *,
    staying: Collection[int] = (),
    away_until: Mapping[int, int] | None = None,
    step: int = 0,
) -> tuple[int, frozenset[int]]:
    """Choose the number of slots and the buckets that stay, for ``allowed`` bytes.

    Args:
        sizes: bytes of each bucket, by index.
        preferred: all buckets, in the order in which they should stay.
        allowed: bytes for all of it. While buckets move, about ``LEAST_SLOTS`` are taken in any
            case.
        staying: buckets that stay now, and continue to while they fit.
        away_until: steps before which buckets do not come back.
        step: number of this step.
    """
    if not sizes:
        return 0, frozenset()
    away = {i for i, until in (away_until or {}).items() if step < until and i not in staying}
    if sum(sizes.values()) <= allowed and not away:
        return 0, frozenset(sizes)
    slot_bytes = max(sizes.values())  # any bucket may use any slot
    slots = min(most_slots(allowed, slot_bytes), len(sizes))
    room = allowed - slots * slot_bytes
    chosen: set[int] = set()
    for index in sorted(preferred, key=lambda index: index not in staying):  # stable
        if index not in away and sizes[index] <= room:
            chosen.add(index)
            room -= sizes[index]
    left = len(sizes) - len(chosen)
    return ring_size(left, slots) if left else 0, frozenset(chosen)


# --------------------------------------------------------------------------- order and slots


def deadline_order(
    ready_ms: Sequence[float], ranks: Sequence[int], costs_ms: Sequence[float]
) -> tuple[int, ...]:
    """Return indices of buckets in the order of service; the index breaks ties.

    Args:
        ready_ms: when the last gradient of each is ready, counted from the first of the backward.
        ranks: positions in which the forward needs them; the lowest first.
        costs_ms: how long each keeps the link busy, in each direction.
    """
    arrivals = sorted(range(len(ready_ms)), key=lambda index: (ready_ms[index], index))
    waiting: list[tuple[int, int]] = []
    order: list[int] = []
    now_ms, arrived = 0.0, 0  # the link's clock, and how many of `arrivals` are in `waiting`
    while len(order) < len(arrivals):
        while arrived < len(arrivals) and ready_ms[arrivals[arrived]] <= now_ms:
            index = arrivals[arrived]
            heapq.heappush(waiting, (ranks[index], index))
            arrived += 1
        if not waiting:  # idle until the next gradients
            now_ms = ready_ms[arrivals[arrived]]
            continue
        _, index = heapq.heappop(waiting)
        order.append(index)
        now_ms += costs_ms[index]
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
