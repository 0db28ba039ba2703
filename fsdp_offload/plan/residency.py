"""How much device memory an optimizer may have, and which buckets stay in it: pure functions.

[Note: what is to spare]
torch's allocator keeps what it once took from the driver, so what was *reserved* when it last grew,
less the optimizer's own memory, is what the job needs at some point of an iteration. What driver
and allocator have beyond that, less a margin, is to spare. What the optimizer gives back stays in
the allocator, where the job finds it: the job's need does not change by that. Others on the device
count as they are now.
State leaves between steps only, so the margin is what an iteration may take beyond all before it: a
quarter of the device, until the peak has not grown for most of the steps so far.

[Note: what it goes into]
First into slots, so that the link is not idle while nothing can be updated, then into buckets that
stay, which need no link. A bucket that had to leave stays away for a while: memory that is short
now and then would else be filled and given back in turns.

[Note: which buckets stay]
With ``overlap="backward"`` those that the forward needs first: their gradients come last, and what
travels has the rest of the backward. Else all updates begin together, when the forward does, and
those that stay are spread evenly over its order. The link then works from the first layer to the
last; if the first layers stayed, it would wait until all of them had been updated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..core.config import GIB
from .order import ring_size

LEAST_MARGIN_BYTES: Final = GIB
MARGIN_SHARE: Final = 0.025
UNSTEADY_MARGIN_SHARE: Final = 0.25
FIRST_STEPS: Final = 12
"""In which no peak is steady."""
MOST_STEADY_STEPS: Final = 100
"""After so many without growth it is, whatever was before."""
LEAST_SLOTS: Final = 4
"""Three keep both directions of the link busy; the fourth absorbs jitter. :func:`.ring_size` may
leave one out."""
MOST_SLOT_BYTES: Final = 4 * GIB
"""What is allowed beyond that is for buckets that stay."""
AWAY_STEPS: Final = 50
"""For so long a bucket that had to leave does not come back."""


@dataclass(frozen=True)
class Reading:
    """Device memory of one rank, between two steps; all in bytes."""

    total_bytes: int
    free_bytes: int
    """What the driver could give out now."""
    reserved_bytes: int
    """What torch's allocator has of the driver now."""
    job_bytes: int
    """What the job needs of it at most: see the note."""
    own_bytes: int
    """What of it the optimizer has: slots and buckets that stay."""
    is_steady: bool = True
    """See :func:`is_steady`."""


def is_steady(step: int, grown_at: int) -> bool:
    """Whether the job's peak, which grew last after step ``grown_at``, will hardly grow again."""
    steps = min(MOST_STEADY_STEPS, 3 * step // 4)
    return step >= FIRST_STEPS and step - grown_at >= steps


def margin_bytes(total_bytes: int, is_steady: bool = True) -> int:
    """What is left alone."""
    share = MARGIN_SHARE if is_steady else UNSTEADY_MARGIN_SHARE
    return max(LEAST_MARGIN_BYTES, int(total_bytes * share))


def allowed_bytes(reading: Reading) -> int:
    """What the optimizer may have in all."""
    margin = margin_bytes(reading.total_bytes, reading.is_steady)
    unused = reading.reserved_bytes - reading.own_bytes - reading.job_bytes
    spare = reading.free_bytes + unused - margin
    if spare > 0:  # what is unused in the allocator may not fit a bucket: only the driver's counts
        spare = min(spare, max(0, reading.free_bytes - margin))
    return max(0, reading.own_bytes + spare)


def spread(order: Sequence[int]) -> list[int]:
    """The same buckets, so that however many of the first are taken, they lie evenly in ``order``.

    By multiples of the golden ratio: https://en.wikipedia.org/wiki/Low-discrepancy_sequence.
    """
    golden = (5**0.5 - 1) / 2
    return [order[i] for i in sorted(range(len(order)), key=lambda i: i * golden % 1)]


def most_slots(allowed: int, slot_bytes: int) -> int:
    """How many slots ``allowed`` bytes are good for, while buckets travel."""
    return max(LEAST_SLOTS, min(allowed // 2, MOST_SLOT_BYTES) // slot_bytes)


def choose(
    sizes: Sequence[int],
    preferred: Sequence[int],
    allowed: int,
    *,
    staying: Collection[int] = (),
    away_until: Mapping[int, int] | None = None,
    step: int = 0,
) -> tuple[int, frozenset[int]]:
    """How many slots, and which buckets stay, for so many bytes.

    Args:
        sizes: bytes of each bucket.
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
    if sum(sizes) <= allowed and not away:
        return 0, frozenset(range(len(sizes)))
    slot_bytes = max(sizes)
    slots = min(most_slots(allowed, slot_bytes), len(sizes))
    room = allowed - slots * slot_bytes
    chosen: set[int] = set()
    for index in sorted(preferred, key=lambda index: index not in staying):  # stable
        if index not in away and sizes[index] <= room:
            chosen.add(index)
            room -= sizes[index]
    left = len(sizes) - len(chosen)
    return ring_size(left, slots) if left else 0, frozenset(chosen)
