"""Which blocks move when storages leave, and where a storage's bytes are meanwhile."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from .. import shards
from ..config import TransferConfig
from ..device import Gateway
from ..errors import DeviceError, HostMemoryError, UnsupportedParameterError
from ..moving import (
    Block,
    FixedAddressRegion,
    Pages,
    Places,
    Seat,
    StorageBlock,
    is_whole,
    seats_of,
    settle_storages,
)
from ..storages import is_owned, is_tied, memory_of, owner_of, renew, untie
from .guard import do_nothing
from .policies import Policies

_log = logging.getLogger("fsdp_offload")

KINDS: Final = ("params", "grads", "state")
"""Of what leaves."""

Owned: TypeAlias = tuple[str, torch.UntypedStorage]
"""A storage, with its key, that somebody has moved into a region."""


class Seats:
    """Storages that lie where torch's allocator has put them: each is a block.

    Args:
        places: of the blocks.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self.on_loss: Callable[[], None] = do_nothing
        """Called when somebody else is going to move what this has moved: it lies elsewhere."""

    def take(
        self,
        found: Sequence[StorageBlock],
        gone: Sequence[StorageBlock] = (),
        owned: Sequence[Owned] = (),
    ) -> tuple[list[StorageBlock], list[Block]]:
        """Those of today's storages that can leave, and the blocks that move for them.

        Args:
            found: today's, but for ``gone`` and ``owned``.
            gone: what :meth:`still` gave of today's.
            owned: today's that somebody has moved into a region, this perhaps, with their keys.
        """
        storages = [*gone, *movable(found), *taken_over(owned)]
        return storages, list(storages)

    def still(
        self, storages: Sequence[StorageBlock], named: Iterable[tuple[str, Tensor]], n_bytes: int
    ) -> tuple[list[StorageBlock], list[Block]]:
        """Of what :meth:`take` found last, blocks of about ``n_bytes`` that leave again, and all
        storages in them. Looking at few of them is the point.

        Args:
            storages: of the last :meth:`take`, which nothing else has come to share.
            named: keys and tensors of today, as they were collected then.
        """
        known = {storage.storage._cdata: storage for storage in storages}
        found: list[StorageBlock] = []
        for key, tensor in named:
            if tensor.layout is not torch.strided:  # as collect() has it
                continue
            block = known.get(shards.storage_of(tensor)._cdata)
            if block is None or block.key != key or is_tied(block.storage):
                continue  # the last: another offloader has moved it
            if _can_leave(block, self._places):
                found.append(block)
                n_bytes -= block.n_bytes
                if n_bytes <= 0:
                    break
        return found, list(found)

    def place(self, storage: StorageBlock) -> Tensor:
        """The bytes of a storage in host memory: 1-D uint8. Its blocks have places."""
        return self._places.of(storage)

    def presence(self, storage: StorageBlock) -> Callable[[], bool] | None:
        """What tells whether the storage has its memory; None: its size does."""
        return None

    def release_unused(self, used: Collection[int]) -> None:
        """Others may have come in the place of storages here: keep none of those. All are present.

        Args:
            used: all of today's, by identity.
        """

    def pages(self) -> list[Pages]:
        """Those that lie at fixed addresses."""
        return []

    def close(self) -> None:
        """Nothing is going to leave any more; all of it is present. Idempotent."""


class FixedSeats(Seats):
    """Storages that are moved into a region when they are first seen: its blocks move for them,
    and their addresses stay.

    Args:
        places: of the region's blocks.
        region: of this object alone.
        is_needed: False: where the device, torch or memory forbid it, from then on what is new
            stays where it is.
    """

    def __init__(
        self, places: Places, region: FixedAddressRegion, *, is_needed: bool = True
    ) -> None:
        super().__init__(places)
        self._region, self._is_needed, self._may_grow = region, is_needed, True
        self._storages: list[StorageBlock] = []  # which may have seats
        self._seats: dict[StorageBlock, Seat] = {}  # of all of them, once settled
        self._host: dict[StorageBlock, Tensor] = {}  # places of storages
        region.before_hand_over = self._forget

    def _forget(self) -> None:
        """Somebody else is going to move all of it."""
        self._storages, self._seats = [], {}
        self._host.clear()
        self.on_loss()

    def _seated(self) -> dict[StorageBlock, Seat]:
        if len(self._seats) < len(self._storages):
            self._seats = seats_of(self._storages, self._region)
            self._storages = list(self._seats)
        return self._seats

    def take(
        self,
        found: Sequence[StorageBlock],
        gone: Sequence[StorageBlock] = (),
        owned: Sequence[Owned] = (),
    ) -> tuple[list[StorageBlock], list[Block]]:
        """See :class:`Seats`."""
        self._recall(owned)
        strange = [each for each in owned if owner_of(each[1]) is not self._region]
        fresh = [*movable(found), *taken_over(strange)]
        if not gone:
            used = {block.storage._cdata for block in fresh} | {each._cdata for _, each in owned}
            released = self._release(used)
            known = {block.storage._cdata for block in released}
            fresh = [*released, *(b for b in fresh if b.storage._cdata not in known)]
        elif not self._storages:
            return super().take(fresh, gone)
        # What is half vacated may be cached by torch's allocator, without memory.
        if fresh and self._may_grow and not self._region.is_half_vacated:
            self._settle(fresh)
        seats = self._seated()
        others = [block for block in fresh if block not in seats]
        return [*seats, *others], [*self._region.blocks(), *others]

    def _recall(self, owned: Sequence[Owned]) -> None:
        """What lies here and was forgotten, by a :meth:`close` that could not be done."""
        known = {block.storage._cdata for block in self._storages}
        mine = (each for each in owned if owner_of(each[1]) is self._region)
        lost = [StorageBlock(*each) for each in mine if each[1]._cdata not in known]
        if lost:
            self._storages = [*self._storages, *lost]

    def _settle(self, fresh: Sequence[StorageBlock]) -> None:
        self._storages = [*self._storages, *fresh]  # first: whatever happens, some may move
        try:
            settle_storages(fresh, self._region)
        except (RuntimeError, HostMemoryError) as error:  # ours, or torch's of a version to come
            if self._is_needed:
                raise
            self._may_grow = False
            _log.info("what is new does not get fixed addresses: %r", error)

    def release_unused(self, used: Collection[int]) -> None:
        """See :class:`Seats`."""
        self._release(used)

    def _release(self, used: Collection[int]) -> list[StorageBlock]:
        """Where there is something unused, all move out, as far as there is memory; those that
        did, and are used."""
        if self._region.is_paused or not (self._region.is_half_vacated or self._is_outdated(used)):
            return []
        before = self._storages
        self._host.clear()
        self._seats = {}  # it keeps what moves out
        with contextlib.suppress(torch.OutOfMemoryError):
            self._region.vacate()
        seats = self._seated()
        return [b for b in before if b not in seats and b.storage._cdata in used]

    def _is_outdated(self, used: Collection[int]) -> bool:
        return not all(block.storage._cdata in used for block in self._seated())

    def still(
        self, storages: Sequence[StorageBlock], named: Iterable[tuple[str, Tensor]], n_bytes: int
    ) -> tuple[list[StorageBlock], list[Block]]:
        """See :class:`Seats`. Whatever has a seat keeps it, so all of the region leaves. Where a
        tensor has none yet, or a seat nobody, nothing may leave before that is set right: others
        lie beside it."""
        if not self._storages:
            return super().still(storages, named, n_bytes)
        blocks = self._region.blocks()
        if not all(_can_leave(block, self._places) for block in blocks):
            return [], []
        used: set[int] = set()
        for _, tensor in named:
            if tensor.layout is not torch.strided:  # as collect() has it
                continue
            storage = shards.storage_of(tensor)
            if storage.device == self._region.device and storage.nbytes() and not is_tied(storage):
                return [], []
            used.add(storage._cdata)
        if self._region.is_half_vacated or self._is_outdated(used):
            return [], []
        sizes = itertools.accumulate((block.n_bytes for block in blocks), initial=0)
        return list(storages), [
            b for b, before in zip(blocks, sizes, strict=False) if before < n_bytes
        ]

    def place(self, storage: StorageBlock) -> Tensor:
        """See :class:`Seats`."""
        if storage not in self._seats:
            return super().place(storage)
        if storage not in self._host:
            seat = self._seats[storage]
            whole = self._places.of(seat.block).untyped_storage()
            with torch.inference_mode(False):
                empty = torch.empty(0, dtype=torch.uint8)
                # A storage of its own, so that torch.save takes nothing else with it.
                part = empty.set_(whole[seat.start : seat.start + seat.n_bytes])
            self._host[storage] = part
        return self._host[storage]

    def presence(self, storage: StorageBlock) -> Callable[[], bool] | None:
        """See :class:`Seats`."""
        seat = self._seats.get(storage)
        return None if seat is None else functools.partial(is_whole, seat.block)

    def pages(self) -> list[Pages]:
        """See :class:`Seats`."""
        return [block.pages for block in self._region.blocks()]

    def close(self) -> None:
        """The storages get ordinary memory."""
        self._storages, self._seats = [], {}  # first: they keep ranges
        self._host.clear()
        self._region.close()


def _can_leave(block: Block, places: Places) -> bool:
    return block.n_bytes > 0 and is_whole(block) and places.has(block)


def make_seats(
    policies: Policies, gateway: Gateway, places: Places, transfer: TransferConfig
) -> dict[str, Seats]:
    """Seats by kind.

    Raises:
        DeviceError: ``fixed_address=True`` on a device that cannot do it.
    """
    is_needed = policies.fixed_address is True
    made: dict[str, Seats] = {}
    for kind in KINDS:
        made[kind] = Seats(places)
        if policies.are_fixed(kind):
            try:
                region = FixedAddressRegion(kind, gateway.device, transfer=transfer)
            except DeviceError:
                if is_needed:
                    raise
            else:
                made[kind] = FixedSeats(places, region, is_needed=is_needed)
    return made


def taken_over(owned: Sequence[Owned]) -> list[StorageBlock]:
    """Storages that somebody else has moved into a region get ordinary memory, all of those there:
    that offloader finds them elsewhere, or is gone. What it has away is left to it."""
    found = [each for each in owned if _is_mapped(each[1])]
    for _, storage in found:
        owner = owner_of(storage)
        if isinstance(owner, FixedAddressRegion):
            if not owner.is_paused:
                owner.hand_over()
        elif is_owned(storage):
            renew(storage)
            untie(storage)
    return [StorageBlock(key, storage) for key, storage in found if not is_owned(storage)]


def _is_mapped(storage: torch.UntypedStorage) -> bool:
    pages: Pages = memory_of(storage)
    return all(map(pages.is_mapped, range(len(pages.chunks))))


def movable(blocks: Sequence[StorageBlock]) -> list[StorageBlock]:
    """Blocks whose memory can be given up.

    In host memory, where there is nothing to win, others are left alone: ``torch.load`` makes them.

    Raises:
        UnsupportedParameterError: there is one in device memory.
    """
    for block in blocks:
        if not block.storage.resizable() and block.storage.device.type != "cpu":
            raise UnsupportedParameterError(
                f"{block.key} of {block.n_bytes} bytes",
                reason="torch does not own its memory (it came through DLPack or from another "
                "process), so it cannot be given up",
                remedy="clone() it once",
            )
    return [block for block in blocks if block.storage.resizable()]
