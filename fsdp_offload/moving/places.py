"""Where blocks are while they are away: exact, page-locked host memory that is kept for them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ..config import TransferConfig
from ..device import Gateway
from ..memory import ArenaStatistics, HostArena, check_host_budget, local_ranks
from ..plan.layout import align
from .blocks import Block

ALIGNMENT_BYTES: Final = 64
"""Of each block in host memory; blocks that travel together lie side by side."""


def aligned(n_bytes: int) -> int:
    """What a block takes of a place or of a staging buffer."""
    return align(n_bytes, ALIGNMENT_BYTES)


@dataclass(frozen=True)
class _Place:
    arena: HostArena
    start: int
    n_bytes: int

    @functools.cached_property
    def tensor(self) -> Tensor:
        return self.arena.tensor(self.start, self.n_bytes, torch.uint8)


class Places:
    """Host memory by block key. Reserved once, given back by :meth:`close`.

    Args:
        gateway: of the device that blocks leave.
        transfer: how to obtain memory (``pin``, ``huge_pages``, ``numa``, ``host_budget``).
        taken_bytes: host memory that this rank has taken elsewhere and that ``host_budget``
            counts too.
        show_progress: show a bar when it takes longer than two seconds.
    """

    def __init__(
        self,
        gateway: Gateway,
        transfer: TransferConfig,
        *,
        taken_bytes: int = 0,
        show_progress: bool = False,
    ) -> None:
        self._gateway, self._transfer, self._show = gateway, transfer, show_progress
        self.taken_bytes = taken_bytes
        self._arenas: list[HostArena] = []
        self._by_key: dict[str, _Place] = {}

    def reserve(self, blocks: Iterable[Block]) -> None:
        """Take memory, in one piece, for the blocks that have no place of their size yet.

        Order matters: blocks that are packed (``mover.py``) are given side by side, in order.

        Raises:
            HostMemoryError: it does not fit; nothing was taken.
            PinningError: the driver refused; it was given back.
        """
        missing = [b for b in blocks if not self.has(b)]
        offsets, stop = [], 0
        for block in missing:
            offsets.append(stop)
            stop += aligned(block.n_bytes)
        if not stop:
            return
        budget, ranks = self._transfer.host_budget, local_ranks()
        taken = (self.taken_bytes + self.n_bytes) * ranks  # the budget is that of all ranks
        check_host_budget(
            stop,
            local_ranks=ranks,
            budget_bytes=None if budget is None else max(int(budget) - taken, 0),
        )
        arena = HostArena(
            stop,
            device=self._gateway.device,
            can_pin=self._gateway.can_pin,
            transfer=self._transfer,
            show_progress=self._show,
        )
        self._arenas.append(arena)
        for block, offset in zip(missing, offsets, strict=True):
            self._by_key[block.key] = _Place(arena, offset, block.n_bytes)

    def has(self, block: Block) -> bool:
        """Whether there is a place of the block's size under its key."""
        place = self._by_key.get(block.key)
        return place is not None and place.n_bytes == block.n_bytes

    def of(self, block: Block) -> Tensor:
        """The block's place: 1-D uint8, ``n_bytes`` long, a storage of its own."""
        assert self.has(block), block.key
        return self._by_key[block.key].tensor

    def joined(self, blocks: Sequence[Block]) -> Tensor | None:
        """The places of ``blocks``, each rounded up to ``ALIGNMENT_BYTES``, as one tensor; None
        where they do not lie side by side in this order."""
        places = [self._by_key[block.key] for block in blocks]
        start = stop = places[0].start
        for place in places:
            if place.arena is not places[0].arena or place.start != stop:
                return None
            stop += aligned(place.n_bytes)
        return places[0].arena.tensor(start, stop - start, torch.uint8)

    @property
    def n_bytes(self) -> int:
        """Host memory taken."""
        return sum(arena.statistics().n_bytes for arena in self._arenas)

    def statistics(self) -> Sequence[ArenaStatistics]:
        """Of each arena."""
        return [arena.statistics() for arena in self._arenas]

    def close(self) -> None:
        """Give all memory back; who still holds a view of it keeps it mapped. Idempotent."""
        self._by_key.clear()
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()
