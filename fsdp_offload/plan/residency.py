"""How much device memory an optimizer may have, and which buckets stay in it.

Everything here is decided by figures alone; nothing asks a device.

torch's allocator keeps what it once took from the driver. So what is *reserved* when it has just
grown, less the optimizer's own memory, is what the job needs of it at some point of an iteration.
Driver and allocator have the rest; all of that but a margin is to spare. Memory that the optimizer
gives back stays in the allocator, where the job finds it. Others on the device count as they are.

State leaves between steps only, so the margin is what an iteration may take beyond all before it.
For the first twelve steps it is a quarter of the device. Then it follows the growth that was seen:

* *Demand* is the peak of allocated memory without the optimizer's. Where all iterations are alike
  it does not grow, however fragmented memory becomes. If it grew in the last three quarters of the
  steps, iterations are not alike, and the first margin holds; so it does after a retry of the
  allocator.
* What the job needs of reserved memory grows by fragmentation, too. For growth in the last quarter
  of the steps, twice as much is left alone. In the two iterations after a take the job takes
  anew what the optimizer found in the allocator's cache: that does not count.

First into slots, so that the link is not idle while nothing can be updated, then into buckets that
stay, which need no link. A bucket that had to leave stays away for a while: memory that is short
now and then would else be filled and given back in turns.

With ``overlap="backward"`` those that the forward needs first: their gradients come last, and what
travels has the rest of the backward. Else all updates begin together, when the forward does, and
those that stay are spread evenly over its order. The link then works from the first layer to the
last; if the first layers stayed, it would wait until all of them had been updated.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from ..core.backend import AllocatorFigures
from ..core.config import GIB
from .order import ring_size

LEAST_MARGIN_BYTES: Final = GIB
MARGIN_SHARE: Final = 0.025
FIRST_MARGIN_SHARE: Final = 0.25
FIRST_LOOK: Final = 3
"""Steps after which a job whose iterations are alike has been through its peak."""
FIRST_STEPS: Final = 12
"""Until then the margin is the larger one."""
MOST_STEPS: Final = 100
"""After so many, growth is forgotten, however many steps there were."""
SMALL_GROWTH_BYTES: Final = GIB // 4
"""Of demand: it depends a little on how far the host is ahead."""
FRAGMENTS_FACTOR: Final = 2
LEAST_SLOTS: Final = 4
"""Three keep both directions of the link busy; the fourth absorbs jitter. :func:`.ring_size` may
leave one out."""
MOST_SLOT_BYTES: Final = 4 * GIB
"""What is allowed beyond that is for buckets that stay."""
AWAY_STEPS: Final = 50
"""For so long a bucket that had to leave does not come back."""


def margin_bytes(total_bytes: int, step: int = FIRST_STEPS, grown_bytes: int = 0) -> int:
    """What is left alone after that step, at least ``grown_bytes``, but no more than at first."""
    most = max(LEAST_MARGIN_BYTES, int(total_bytes * FIRST_MARGIN_SHARE))
    least = max(LEAST_MARGIN_BYTES, int(total_bytes * MARGIN_SHARE))
    return most if step < FIRST_STEPS else min(most, max(least, grown_bytes))


def allowed_bytes(free: int, reserved: int, job: int, own: int, margin: int) -> int:
    """What the optimizer may have in all.

    Args:
        free: bytes that the driver could give out now.
        reserved: what torch's allocator has of the driver now.
        job: what the job needs of that at most: see the note.
        own: what the optimizer has of it: slots and buckets that stay.
        margin: what is left alone.
    """
    spare = free + reserved - own - job - margin
    if spare > 0:  # what is unused in the allocator may not fit a bucket: only the driver's counts
        spare = min(spare, max(0, free - margin))
    return max(0, own + spare)


def _raise(history: list[tuple[int, int]], step: int, value: int) -> None:
    """Of a figure that never falls: the steps after which it had grown."""
    if value > history[-1][1]:
        history.append((step, value))


def _growth(history: list[tuple[int, int]], since: int) -> int:
    """After that step; earlier ones are not asked for again."""
    while len(history) > 1 and history[1][0] <= since:
        del history[0]
    return history[-1][1] - history[0][1]


class MemoryWatch:
    """Decides after each step whether memory is taken or given back, by the figures of all steps.

    It changes by its arguments alone, so that a recorded job can be played to it.
    """

    def __init__(self) -> None:
        self._job, self._demand, self._retries = [(0, 0)], [(0, 0)], [(0, 0)]
        self._last: AllocatorFigures | None = None
        self._reserved_bytes = self._taken_at = self._grown_bytes = 0
        self._is_short = self._takes = False

    def is_due(self, step: int) -> bool:
        """Whether there is something to decide although no figure has changed."""
        grown = abs(self._left_alone(step) - self._grown_bytes)
        is_first = step in (FIRST_LOOK, FIRST_STEPS)
        return is_first or step % AWAY_STEPS == 0 or grown >= LEAST_MARGIN_BYTES // 2

    def observe(self, step: int, now: AllocatorFigures, own_bytes: int) -> str:
        """Take in the figures after that step, which is 1 or more, and what the optimizer has.
        Returns why something is to be decided, or ``""``."""
        last, self._last = self._last, now
        self._is_short = last is not None and now.retries > last.retries
        _raise(self._retries, step, now.retries)
        demand = self._demand[-1][1]
        if last is None or now.allocated_peak_bytes > last.allocated_peak_bytes:
            _raise(self._demand, step, now.allocated_peak_bytes - own_bytes)
        grown = now.reserved_bytes - self._reserved_bytes
        if grown > 0:
            # It may have grown into memory that was given back, but by its demand only.
            most = self._job[-1][1] + grown + self._demand[-1][1] - demand
            _raise(self._job, step, min(now.reserved_bytes - own_bytes, most))
            self._reserved_bytes = now.reserved_bytes
        if self._is_short:
            return "torch's allocator was short"
        if grown > 0 and step > FIRST_LOOK:
            return "the peak has grown"
        return "to spare" if self.is_due(step) else ""

    def decide(self, step: int, free_bytes: int, total_bytes: int, own_bytes: int) -> int | None:
        """Bytes that the optimizer may have from now on; None where a change is not worth it."""
        assert self._last is not None
        self._grown_bytes = self._left_alone(step)
        margin = margin_bytes(total_bytes, step, self._grown_bytes)
        reserved, job = self._last.reserved_bytes, self._job[-1][1]
        allowed = allowed_bytes(free_bytes, reserved, job, own_bytes, margin)
        if self._is_short:
            allowed = min(allowed, own_bytes // 2)
        self._takes = allowed > own_bytes
        is_little = 0 < own_bytes - allowed <= min(margin // 4, own_bytes // 8)
        return None if is_little and not self._is_short else allowed

    def changed(self, step: int, now: AllocatorFigures) -> None:
        """Memory was taken or given back after that step: what that did is no growth of the job."""
        self._last = now
        if self._takes:
            self._taken_at = step
        self._reserved_bytes = max(self._reserved_bytes, now.reserved_bytes)

    def _left_alone(self, step: int) -> int:
        """Bytes, for growth."""
        if step < FIRST_STEPS:
            return 0
        since = step - min(MOST_STEPS, 3 * step // 4)
        if _growth(self._retries, since) or _growth(self._demand, since) > SMALL_GROWTH_BYTES:
            return sys.maxsize
        fragments = _growth(self._job, max(step - min(MOST_STEPS, step) // 4, self._taken_at + 2))
        return FRAGMENTS_FACTOR * fragments


def spread(order: Sequence[int]) -> list[int]:
    """The same buckets, so that however many of the first are taken, they lie evenly in ``order``.

    By multiples of the golden ratio: https://en.wikipedia.org/wiki/Low-discrepancy_sequence.
    """
    golden = (5**0.5 - 1) / 2
    return [order[i] for i in sorted(range(len(order)), key=lambda i: i * golden % 1)]


def bytes_for_weights(
    device_memory: int | str, total_bytes: int, *, gradient_bytes: int, ring_bytes: int
) -> int:
    """Device memory for weights that may leave, slots for those that do included. They leave last:
    a weight that stays saves more traffic than as many bytes of state.

    Args:
        device_memory: the caller's figure; "auto": half of the device is left to the job.
        total_bytes: of the device.
        gradient_bytes: of all that is trained.
        ring_bytes: the least that state needs to travel.
    """
    if isinstance(device_memory, int):
        return max(device_memory - ring_bytes, 0)
    return max(total_bytes // 2 - gradient_bytes - ring_bytes, 0)


def choose_travelling(sizes: Sequence[int], allowed: int, slots: int) -> set[int]:
    """Which groups of weights leave a device that has ``allowed`` bytes for them and ``slots``.

    Each slot is as large as the largest group. No slots where all of them stay.
    """
    left = allowed - (slots * max(sizes) if sum(sizes) > allowed else 0)
    travelling = set[int]()
    for index in spread([index for index, size in enumerate(sizes) if size]):
        if sizes[index] <= left:
            left -= sizes[index]
        else:
            travelling.add(index)
    return travelling


def gradients_fit(state: int, weights: int, allowed: int | None, total: int) -> bool:
    """Whether gradients, as large as the weights, stay on a device of ``total`` bytes.

    Args:
        state: bytes of the optimizer's state.
        weights: bytes of what it trains.
        allowed: bytes for all of it; None: what is to spare. State gives way to gradients then, and
            half of the device is for activations.
    """
    gradients = weights
    if allowed is None:
        return 2 * (weights + gradients) <= total
    return state + weights + gradients <= allowed


def most_slots(allowed: int, slot_bytes: int) -> int:
    """How many slots ``allowed`` bytes are good for, while buckets travel."""
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
    """How many slots, and which buckets stay, for so many bytes.

    Args:
        sizes: bytes of each bucket, by its index.
        preferred: all buckets, those first that shall stay.
        allowed: bytes for all of it. About ``LEAST_SLOTS`` are taken in any case, while
            buckets travel.
        staying: buckets that stay now; they go on to as long as there is room.
        away_until: steps before which buckets do not come back.
        step: the number of this one.
    """
    if not sizes:
        return 0, frozenset()
    away = {i for i, until in (away_until or {}).items() if step < until and i not in staying}
    if sum(sizes.values()) <= allowed and not away:
        return 0, frozenset(sizes)
    slot_bytes = max(sizes.values())
    slots = min(most_slots(allowed, slot_bytes), len(sizes))
    room = allowed - slots * slot_bytes
    chosen: set[int] = set()
    for index in sorted(preferred, key=lambda index: index not in staying):  # stable
        if index not in away and sizes[index] <= room:
            chosen.add(index)
            room -= sizes[index]
    left = len(sizes) - len(chosen)
    return ring_size(left, slots) if left else 0, frozenset(chosen)
