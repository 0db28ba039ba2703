"""Where blocks are while they are away: exact, page-locked host memory that is kept for them.

[Note: sizes that change]
What a key stands for may have another size at each departure: FSDP2 reduces the gradients of a
group in one buffer, and its size depends on which parameters took part. A place serves whatever
fits into it, cut to its size. One that is outgrown is replaced, and an arena whose places were all
outgrown is given back. Large places that replace others have arenas of their own. So large ones
take at most what was taken when their keys were new, and beside it what each has needed at most.
"""

from __future__ import annotations

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

OWN_ARENA_BYTES: Final = 2 << 20
"""Places from this size on that replace others get an arena of their own: blocks below it travel
together (``mover.py``), so they lie side by side."""


def aligned(n_bytes: int) -> int:
    """What a block takes of a place or of a staging buffer."""
    return align(n_bytes, ALIGNMENT_BYTES)


@dataclass
class _Place:
    arena: HostArena
    start: int
    capacity_bytes: int
    n_bytes: int
    """Of the block that it was reserved for last, and that alone may read it."""
    _tensor: Tensor | None = None

    def tensor(self) -> Tensor:
        if self._tensor is None or self._tensor.numel() != self.n_bytes:
            self._tensor = self.arena.tensor(self.start, self.n_bytes, torch.uint8)
        return self._tensor


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
        """Let each block have a place of its size: its key's, or new memory where that is smaller.

        Order matters: blocks that are packed (``mover.py``) are given side by side, in order. What
        other blocks had under these keys is lost, so copies of it have ended.

        Raises:
            HostMemoryError: it does not fit; nothing was taken.
            PinningError: the driver refused; it was given back.
        """
        fitting: list[Block] = []
        missing: list[Block] = []
        for block in blocks:
            place = self._by_key.get(block.key)
            fits = place is not None and block.n_bytes <= place.capacity_bytes
            (fitting if fits else missing).append(block)
        taken = self._take(missing)
        for block in fitting:
            self._by_key[block.key].n_bytes = block.n_bytes
        self._by_key |= taken
        self._give_back_unused()

    def _take(self, blocks: Sequence[Block]) -> dict[str, _Place]:
        """Memory for blocks by key: in one piece, but for the large ones of keys that have some."""
        rows: list[list[Block]] = [[]]
        for block in blocks:
            if block.key in self._by_key and block.n_bytes >= OWN_ARENA_BYTES:
                rows.append([block])
            else:
                rows[0].append(block)
        sizes = [sum(aligned(block.n_bytes) for block in row) for row in rows]
        if not sum(sizes):
            return {}
        self._check_budget(sum(sizes))
        taken: dict[str, _Place] = {}
        arenas: list[HostArena] = []
        try:
            for row, row_bytes in zip(rows, sizes, strict=True):
                if not row_bytes:
                    continue
                arenas.append(self._arena(row_bytes))
                start = 0
                for block in row:
                    taken[block.key] = _Place(
                        arenas[-1], start, aligned(block.n_bytes), block.n_bytes
                    )
                    start += aligned(block.n_bytes)
        except BaseException:
            for arena in arenas:
                arena.close()
            raise
        self._arenas += arenas
        return taken

    def _check_budget(self, n_bytes: int) -> None:
        budget, ranks = self._transfer.host_budget, local_ranks()
        taken = (self.taken_bytes + self.n_bytes) * ranks  # the budget is that of all ranks
        check_host_budget(
            n_bytes,
            local_ranks=ranks,
            budget_bytes=None if budget is None else max(int(budget) - taken, 0),
        )

    def _arena(self, n_bytes: int) -> HostArena:
        return HostArena(
            n_bytes,
            device=self._gateway.device,
            can_pin=self._gateway.can_pin,
            transfer=self._transfer,
            show_progress=self._show,
        )

    def _give_back_unused(self) -> None:
        """Close arenas whose places were all outgrown; who still holds a view keeps one mapped."""
        used = {id(place.arena) for place in self._by_key.values()}
        for arena in [arena for arena in self._arenas if id(arena) not in used]:
            self._arenas.remove(arena)
            arena.close()

    def has(self, block: Block) -> bool:
        """Whether the place under the block's key was reserved, last, for one of its size."""
        place = self._by_key.get(block.key)
        return place is not None and place.n_bytes == block.n_bytes

    def of(self, block: Block) -> Tensor:
        """The block's place: 1-D uint8, ``n_bytes`` long, a storage of its own."""
        assert self.has(block), block.key
        return self._by_key[block.key].tensor()

    def joined(self, blocks: Sequence[Block]) -> Tensor | None:
        """The places of ``blocks``, each rounded up to ``ALIGNMENT_BYTES``, as one tensor; None
        where they do not lie side by side in this order."""
        places = [self._by_key[block.key] for block in blocks]
        start = stop = places[0].start
        for place in places:
            if place.arena is not places[0].arena or place.start != stop:
                return None
            stop += aligned(place.n_bytes)  # not its capacity: staging has no gaps
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
