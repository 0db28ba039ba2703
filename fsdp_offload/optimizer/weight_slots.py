"""Device memory for weights that live in host memory: which groups are there, and which come next.

Slots are a cache: a group that is needed takes a free one, or that of the group which was fetched
first. What follows is looked up by the last *two* gathers, which tells a forward from a backward. A
wrong guess costs a transfer. A step counts as a gather, because it changes most groups: none is
fetched past it before it has come.

With updates in backward, the groups that were gathered last keep their slots: their updates read
the weights there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, Protocol

from torch import Tensor

from ..core.backend import Event, Stream
from ..link import Block

SLOTS: Final = 3
"""One that is read, and two that are fetched meanwhile."""
KEPT: Final = 2
"""Groups that keep their slots in backward: the one whose gradients are computed, and the one that
FSDP2 gathers meanwhile."""
STEP: Final = -1
"""Stands for a step among the indices of groups."""


def slot_count(overlap: str | None) -> int:
    """Return how many slots a model with many groups uses."""
    return SLOTS + 1 if overlap == "backward" else SLOTS


class Slot:
    """Device memory for one group at a time."""

    def __init__(self, number: int, memory: Tensor) -> None:
        self.number, self.memory = number, memory
        self.arrived: Event  # after it, the memory may be read
        self.missing = set[Block]()  # updates bring them, before the group is there
        self.age = -1  # of the group, when it was fetched or brought
        self.free: Event | None = None  # after it, the memory may be written into
        self.blocks: list[Block] = []  # one per group


class GatheredWeights(Protocol):
    """The slots of weights in host memory: see :class:`.Weights`."""

    staying_bytes: int

    @property
    def slot_bytes(self) -> int: ...

    @property
    def ahead_bytes(self) -> int: ...

    @property
    def ahead_share(self) -> float: ...

    # Whether slots have all weights of a block as they are now.
    def has(self, block: Block) -> bool: ...

    # Copy them on ``update`` to its device memory.
    def lend(self, block: Block, update: Stream) -> None: ...

    # Copy them back, once they are updated, to slots that may be read after what comes next.
    def bring(self, block: Block, update: Stream) -> Sequence[Slot]: ...


class WeightSlots:
    """Which group has which slot.

    Args:
        slots: all of them.
        kept: how many groups that were gathered last keep theirs.
    """

    def __init__(self, slots: Sequence[Slot], kept: int) -> None:
        self.all, self._kept = list(slots), kept
        self._free = list(slots)
        self.held: dict[int, Slot] = {}
        """By group; the one that was fetched first comes first."""
        self.lent = set[int]()  # groups that FSDP2 gathers now
        self._follows: dict[tuple[int, int], int] = {}  # gathers: which came after which two
        self._last = (STEP, STEP)

    def passed(self, index: int) -> None:
        """Note a gather, or a step."""
        self._follows[self._last] = index
        self._last = (self._last[1], index)

    def following(self) -> dict[int, None]:
        """Return the groups that are gathered next, as many as have slots, up to a step."""
        before, found = self._last, dict[int, None]()
        for _ in range(max(len(self.all) - self._kept, 1)):
            if (index := self._follows.get(before, STEP)) == STEP:
                break
            found[index] = None
            before = (before[1], index)
        return found

    def take(self, index: int, wanted: Collection[int]) -> Slot | None:
        """Give the group a free slot, or the oldest one whose group is neither wanted nor used.
        Returns None if all others are wanted or used."""
        if not self._free:
            used = {*wanted, *self.lent, *(self._last if self._kept else ())}
            other = next((each for each in self.held if each not in used), None)
            if other is None:
                return None
            self.evict(other)
        slot = self._free.pop()
        slot.age = -1  # none, if Ctrl-C prevents the fetch
        slot.missing.clear()
        self.held[index] = slot
        return slot

    def force(self, index: int) -> Slot:
        """:meth:`take`, for a gather that begins: another group loses its slot if need be."""
        if (slot := self.take(index, ())) is None:
            self.evict(next(each for each in self.held if each not in self.lent))
            slot = self.take(index, ())
        assert slot is not None
        return slot

    def evict(self, index: int) -> None:
        """Forget a group: its slot is needed, or host memory has changed."""
        if index in self.lent:  # another thread writes while it is gathered
            self.held[index].age = -1
        elif (slot := self.held.pop(index, None)) is not None:
            self._free.append(slot)

    def drop_incomplete(self) -> None:
        """Forget groups that no more updates will complete."""
        for index in [index for index, slot in self.held.items() if slot.missing]:
            self.evict(index)

    def clear(self) -> None:
        """Release all memory."""
        self.all, self._free, self.held = [], [], {}
