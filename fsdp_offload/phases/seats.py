"""Which blocks move when storages leave, and where a storage's bytes are meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

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
from .policies import Policies


class Seats:
    """Storages that lie where torch's allocator has put them: each is a block.

    Args:
        places: of the blocks.
    """

    def __init__(self, places: Places) -> None:
        self._places = places

    def take(self, found: Sequence[StorageBlock]) -> tuple[list[StorageBlock], list[Block]]:
        """Those of ``found`` that can leave, and the blocks that move for them."""
        storages = movable(found)
        return storages, list(storages)

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

    def take(self, found: Sequence[StorageBlock]) -> tuple[list[StorageBlock], list[Block]]:
        """See :class:`Seats`. ``found`` are new, because those here are nobody's to collect."""
        fresh = movable(found)
        seats = settle_storages(fresh, self._region)
        self._seats |= {block: seats[block.key] for block in fresh}
        return list(self._seats), list(self._region.blocks())

    def place(self, storage: StorageBlock) -> Tensor:
        """See :class:`Seats`."""
        seat = self._seats[storage]
        whole = self._places.of(seat.block).untyped_storage()
        with torch.inference_mode(False):
            empty = torch.empty(0, dtype=torch.uint8)
            # A storage of its own, so that torch.save takes nothing else with it.
            return empty.set_(whole[seat.start : seat.start + seat.n_bytes])

    def presence(self, storage: StorageBlock) -> Callable[[], bool] | None:
        """See :class:`Seats`."""
        return functools.partial(is_whole, self._seats[storage].block)

    def close(self) -> None:
        """The storages get ordinary memory."""
        self._region.close()


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
    kinds = ("params", "grads", "state")
    if not fixed_address:
        return {kind: Seats(places) for kind in kinds}
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
        for kind in kinds
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
