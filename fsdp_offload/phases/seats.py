"""Which blocks move when storages leave, and where a storage's bytes are meanwhile."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from .. import shards
from ..config import TransferConfig
from ..device import Gateway
from ..errors import ConfigError, UnsupportedParameterError
from ..moving import (
    Block,
    FixedAddressRegion,
    Places,
    Seat,
    StorageBlock,
    is_whole,
    settle_storages,
)
from ..storages import is_tied
from .policies import Policies

KINDS: Final = ("params", "grads", "state")
"""Of what leaves."""


class Seats:
    """Storages that lie where torch's allocator has put them: each is a block.

    Args:
        places: of the blocks.
    """

    def __init__(self, places: Places) -> None:
        self._places = places

    def take(
        self, found: Sequence[StorageBlock], gone: Sequence[StorageBlock] = ()
    ) -> tuple[list[StorageBlock], list[Block]]:
        """Those of ``found`` that can leave, and the blocks that move for them.

        Args:
            found: today's.
            gone: what :meth:`still` gave of today's, not among ``found``.
        """
        storages = [*gone, *movable(found)]
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
            if block is not None and block.key == key and _can_leave(block, self._places):
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

    def close(self) -> None:
        """Nothing is going to leave any more; all of it is present. Idempotent."""


class FixedSeats(Seats):
    """Storages that are moved into a region when they are first seen: its blocks move for them,
    and their addresses stay.

    Args:
        places: of the region's blocks.
        region: of this object alone.
    """

    def __init__(self, places: Places, region: FixedAddressRegion) -> None:
        super().__init__(places)
        self._region = region
        self._seats: dict[StorageBlock, Seat] = {}
        self._host: dict[StorageBlock, Tensor] = {}  # places of storages

    def take(
        self, found: Sequence[StorageBlock], gone: Sequence[StorageBlock] = ()
    ) -> tuple[list[StorageBlock], list[Block]]:
        """See :class:`Seats`. ``found`` are new, because those here are nobody's to collect."""
        fresh = movable(found)
        seats = settle_storages(fresh, self._region)
        self._seats |= {block: seats[block.key] for block in fresh}
        return list(self._seats), list(self._region.blocks())

    def still(
        self, storages: Sequence[StorageBlock], named: Iterable[tuple[str, Tensor]], n_bytes: int
    ) -> tuple[list[StorageBlock], list[Block]]:
        """See :class:`Seats`. Whatever has a seat keeps it, so all of the region leaves. Where a
        tensor has none yet, nothing may leave before it has: it may get one beside others."""
        blocks = self._region.blocks()
        if not all(_can_leave(block, self._places) for block in blocks):
            return [], []
        if not all(_is_seated(tensor, self._region.device) for _, tensor in named):
            return [], []
        sizes = itertools.accumulate((block.n_bytes for block in blocks), initial=0)
        return list(storages), [
            b for b, before in zip(blocks, sizes, strict=False) if before < n_bytes
        ]

    def place(self, storage: StorageBlock) -> Tensor:
        """See :class:`Seats`."""
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
        return functools.partial(is_whole, self._seats[storage].block)

    def close(self) -> None:
        """The storages get ordinary memory."""
        self._host.clear()
        self._region.close()


def _is_seated(tensor: Tensor, device: torch.device) -> bool:
    """Whether a region is not going to take the tensor's storage."""
    if tensor.layout is not torch.strided:
        return True
    storage = shards.storage_of(tensor)
    return storage.device != device or storage.nbytes() == 0 or is_tied(storage)


def _can_leave(block: Block, places: Places) -> bool:
    return block.n_bytes > 0 and is_whole(block) and places.has(block)


def make_seats(
    policies: Policies,
    gateway: Gateway,
    places: Places,
    transfer: TransferConfig,
    *,
    fixed_address: bool,
) -> dict[str, Seats]:
    """Seats by kind. Gradients are new in each iteration, so their addresses are nobody's business.

    Raises:
        ConfigError: ``fixed_address`` with rebuilt parameters.
        DeviceError: ``fixed_address`` on a device that cannot do it.
    """
    if not fixed_address:
        return {kind: Seats(places) for kind in KINDS}
    if policies.params == "rebuild":
        raise ConfigError(
            'fixed_address=True with params="rebuild"',
            reason="memory that is dropped and rebuilt comes back elsewhere",
            remedy='use params="save"',
        )
    return {
        kind: Seats(places)
        if kind == "grads" or getattr(policies, kind) == "keep"
        else FixedSeats(places, FixedAddressRegion(kind, gateway.device, transfer=transfer))
        for kind in KINDS
    }


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
