"""Host memory of what is offloaded: exact, page-locked, kept by key.

[Note: sizes that change]
What a key stands for may have another size at each offload: FSDP2 reduces the gradients of a group
in one buffer, and its size depends on which parameters took part. A buffer serves whatever fits.
One that is outgrown is replaced, and an arena of which no buffer is in use is given back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.backend import Backend
from ..core.config import TransferConfig, align
from .budget import check_host_budget, local_ranks
from .host_memory import ArenaStatistics, HostRange

_ALIGNMENT_BYTES: Final = 64


class Block(Protocol):
    """Bytes of device memory that are copied, given up and taken together."""

    key: str  # the same at each offload: it gets the host buffer that it had
    n_bytes: int  # above 0
    # Those that begin in it, with their first byte there; one may end in a block behind it.
    storages: Sequence[tuple[torch.UntypedStorage, int]]

    def view(self) -> Tensor:
        """Its bytes: 1-D uint8 on the device. It must be present."""
        ...

    def release(self) -> None:
        """Give its memory up. All work on it has completed."""
        ...

    def restore(self) -> None:
        """Take memory for it again, with any content, in order of the current stream.

        Raises:
            torch.OutOfMemoryError: there is none; it is as before.
        """
        ...


class _Buffer(NamedTuple):
    arena: HostRange
    start: int  # bytes
    capacity_bytes: int


class HostBuffers:
    """Host memory by key. Taken by :meth:`reserve`, given back by :meth:`close`.

    Args:
        backend: of the device that is copied from.
        transfer: how to obtain memory (``pin``, ``huge_pages``, ``numa``, ``host_memory``).
    """

    def __init__(self, backend: Backend, transfer: TransferConfig) -> None:
        self._backend, self._transfer = backend, transfer
        self._by_key: dict[str, _Buffer] = {}
        self._arenas: list[HostRange] = []

    def reserve(self, items: Iterable[Block], taken_bytes: int = 0) -> None:
        """Have a buffer for each item; new ones lie side by side, in order.

        Args:
            items: with different keys.
            taken_bytes: host memory of this rank that ``host_memory`` counts besides.

        Raises:
            HostMemoryError: it does not fit; nothing was taken.
            PinningError: the driver refused; it was given back.
        """
        missing = [item for item in items if not self._fits(item)]
        n_bytes = sum(align(item.n_bytes, _ALIGNMENT_BYTES) for item in missing)
        if not n_bytes:
            return
        budget = self._transfer.host_memory
        check_host_budget(
            n_bytes,
            local_ranks=local_ranks(),
            budget_bytes=None if budget is None else int(budget),
            taken_bytes=taken_bytes + self.n_bytes,
        )
        arena = HostRange(
            n_bytes,
            device=self._backend.device,
            can_pin=self._backend.can_pin,
            transfer=self._transfer,
        )
        start = 0
        for item in missing:
            capacity = align(item.n_bytes, _ALIGNMENT_BYTES)
            self._by_key[item.key] = _Buffer(arena, start, capacity)
            start += capacity
        self._arenas.append(arena)
        # A tensor over an arena without a buffer in use keeps its memory mapped.
        used = {id(buffer.arena) for buffer in self._by_key.values()}
        for unused in [arena for arena in self._arenas if id(arena) not in used]:
            self._arenas.remove(unused)
            unused.close()

    def _fits(self, item: Block) -> bool:
        buffer = self._by_key.get(item.key)
        return buffer is not None and item.n_bytes <= buffer.capacity_bytes

    def of(self, item: Block) -> Tensor:
        """The item's buffer: 1-D uint8, ``n_bytes`` long, a storage of its own."""
        return self.span(item.key, 0, item.n_bytes)

    def span(self, key: str, start: int, n_bytes: int) -> Tensor:
        """1-D uint8 from byte ``start`` of a buffer on, also over buffers that lie behind it."""
        buffer = self._by_key[key]
        return buffer.arena.tensor(buffer.start + start, n_bytes, torch.uint8)

    @property
    def n_bytes(self) -> int:
        """Host memory taken."""
        return sum(arena.n_bytes for arena in self.statistics())

    def statistics(self) -> Sequence[ArenaStatistics]:
        """Of each arena."""
        return [arena.statistics() for arena in self._arenas]

    def close(self) -> None:
        """Give all memory back; a tensor over it keeps it mapped. Idempotent."""
        self._by_key.clear()
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()
