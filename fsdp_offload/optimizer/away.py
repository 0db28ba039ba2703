"""One weight that lives in host memory: what its stand-in asks for, and what FSDP2 finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from ..core import dtensor
from ..core import storage as storages
from ..core.backend import Backend, Event
from ..core.fsdp import GroupShard
from ..core.gated import GatedShard
from ..link import Block
from .weight_slots import Slot, WeightSlots


class WeightOwner(Protocol):
    """All weights of a model that live in host memory: see :class:`.Weights`."""

    backend: Backend
    slots: WeightSlots
    away: list[list[Away]]
    trained: dict[Tensor, Away]

    def turn(self, reads: int | None = None) -> AbstractContextManager[None]: ...
    def flush(self, index: int) -> None: ...
    def fetch(self, away: Away, host: Tensor, device: Tensor) -> Event | None: ...
    def replace(self, away: Away, device: Tensor) -> None: ...
    def catch_up(self, away: Away) -> None: ...
    def bring_back(self, shards: Sequence[Away]) -> None: ...


class Away:
    """One shard in host memory; the :class:`.Keeper` of what stands for it."""

    def __init__(
        self, weights: WeightOwner, index: int, held: GroupShard, host: Tensor, views: list[Tensor]
    ) -> None:
        shard = dtensor.with_history(held.parameter)
        self.index, self.held, self._weights = index, held, weights
        self.host = host  # padded, 1-D, of the shard's dtype
        self._values = host[: shard.numel()].view(shard.shape)
        self._views = views  # of each slot
        self.blocks: list[Block] = []  # by which updates read and write host memory
        self.past = 0  # stores of blocks before
        self.kept: Tensor | None = None  # a copy that has been, or may be, written into
        self._age = 0  # of the shard, when the copy was fetched
        self._version = 0  # of a copy that has not been
        self._arrived: Event | None = None
        self._nothing = held.padded.new_empty(0, device=weights.backend.device)
        self._end: Callable[[], None] | None = None

    def lend(self, slot: int | None) -> None:
        """Let FSDP2 gather from this slot; None: from none."""
        self.held.padded = self._nothing if slot is None else self._views[slot]

    def view(self, slot: Slot, start: int, stop: int) -> Tensor:
        """Elements of the shard in a slot: 1-D uint8."""
        return self._views[slot.number][start:stop].view(torch.uint8)

    def leave(self) -> None:
        """Let a stand-in take the place of the shard, which is in host memory by now."""
        parameter = self.held.parameter
        dtensor.put(parameter, GatedShard(dtensor.with_history(parameter), keeper=self))
        self.lend(None)
        self._end = self.held.lend(self._adopts)

    def _adopts(self, parameter: Tensor) -> bool:
        """Take the values of what FSDP2 finds in the module; False: it keeps them itself."""
        weights, shard = self._weights, dtensor.with_history(parameter)
        with weights.turn():
            if type(shard) is GatedShard:
                weights.flush(self.index)
                return True
            looks = (shard.shape, shard.dtype, shard.device)
            expected = (self._values.shape, self.host.dtype, weights.backend.device)
            if type(shard) is not Tensor or looks != expected or not shard.is_contiguous():
                self._stay()
                return False
            self.kept = None  # older than what was assigned
            weights.replace(self, shard.detach())
            dtensor.put(parameter, GatedShard(shard, keeper=self))
            return True

    def _stay(self) -> None:
        self._weights.slots.evict(self.index)
        self._weights.away[self.index].remove(self)
        self._weights.trained.pop(self.held.parameter, None)
        if self._end is not None:
            self._end()
        self._end = self.kept = None

    @property
    def shard(self) -> Tensor:
        """The values in host memory, 1-D."""
        return self._values.view(-1)

    def flush(self) -> None:
        """Let host memory have what was written into a copy, or the copy what updates wrote since
        into host memory. Neither while a phase has the copy's memory: it is as it was then."""
        if (kept := self.kept) is not None and not storages.is_empty(kept):
            if self._age != age([self]):
                self._fill(kept)
            else:
                self._weights.replace(self, kept.detach())
            if not storages.is_shared(kept):
                self.kept = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def _fill(self, copy: Tensor) -> None:
        """Fetch the values; the current stream waits for them."""
        self._arrived = self._weights.fetch(self, self._values, copy)
        if self._arrived is not None:
            self._weights.backend.current_stream().wait(self._arrived)
        self._age, self._version = age([self]), copy._version

    # ------------------------------------------------------------------ Keeper

    @torch.inference_mode(False)
    @torch.no_grad()
    def take(self) -> Tensor:
        """See :class:`.Keeper`."""
        with self._weights.turn(self.index):
            return self._copy()

    def _copy(self) -> Tensor:
        kept, backend = self.kept, self._weights.backend
        copy = torch.empty_like(self._values, device=backend.device) if kept is None else kept
        if copy is not self.kept or self._age != age([self]):
            self._fill(copy)
        elif self._arrived is not None:
            backend.current_stream().wait(self._arrived)
        return copy

    def used(self, shard: Tensor, *, is_shared: bool, is_written: bool = False) -> None:
        """See :class:`.Keeper`."""
        if is_shared or is_written or shard._version != self._version:
            self.kept = shard
            if not is_shared:  # a loop over all weights would fill the device
                with self._weights.turn():
                    self.flush()

    def local(self) -> Tensor:
        """See :class:`.Keeper`."""
        with self._weights.turn(self.index):
            self.flush()
            if self.kept is not None:  # what has the same memory sees what is written now
                return self._copy()
            self._weights.catch_up(self)
            return self._values

    def bring_back(self) -> None:
        """See :class:`.Keeper`."""
        self._weights.bring_back([self])

    def come_back(self, memory: Tensor) -> Event | None:
        """Have this device memory for good, with the values after this event."""
        with torch.inference_mode(False):
            self.flush()
            padded = memory.view(self.host.dtype)
            arrived = self._weights.fetch(self, self.host, padded)
            self._stay()
            self.held.padded = padded
            shard = padded[: self._values.numel()].view(self._values.shape)
            dtensor.put(self.held.parameter, shard)
        return arrived


def stored(shards: Iterable[Away]) -> Iterable[Event | None]:
    """The events after which host memory has what updates so far have made of shards."""
    return dict.fromkeys(block.stored for each in shards for block in each.blocks)


def age(shards: Iterable[Away]) -> int:
    """A number that grows with each update of one of the shards."""
    return sum(each.past + sum(block.stores for block in each.blocks) for each in shards)
