"""What travels between host and device: bytes with a place on both sides, and where they are."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from torch import Tensor

from ..core.backend import Event, Turns, in_turns


class Residence(enum.Enum):
    """Where the bytes of a block are."""

    HOST = enum.auto()
    """In host memory alone. :meth:`.Link.fetch` makes it FETCHING."""
    FETCHING = enum.auto()
    """In host memory, and on the device after ``arrived``. :meth:`Block.changed` makes it DIRTY,
    :meth:`Block.ended` DEVICE, :meth:`Block.forget` HOST."""
    DEVICE = enum.auto()
    """The same on both sides. :meth:`Block.changed` makes it DIRTY, :meth:`Block.forget` HOST."""
    DIRTY = enum.auto()
    """On the device alone, after ``updated``. :meth:`.Link.store` makes it STORING."""
    STORING = enum.auto()
    """On the device, and in host memory after ``stored``. :meth:`Block.ended` makes it DEVICE,
    :meth:`Block.forget` HOST; it may be fetched again, behind ``stored``."""


class Block:
    """Bytes that travel together, as spans of equal lengths on both sides.

    Args:
        host: 1-D uint8 tensors in host memory; empty while the block has none.
        device: 1-D uint8 tensors on the device; empty while it has none.
        residence: where the bytes are.
    """

    __slots__ = (
        *("_turns", "arrived", "device", "host", "n_bytes", "residence"),
        *("stored", "stores", "updated"),
    )

    def __init__(
        self,
        host: Sequence[Tensor] = (),
        device: Sequence[Tensor] = (),
        residence: Residence = Residence.HOST,
    ) -> None:
        self.host, self.device, self.residence = host, device, residence
        self.n_bytes = sum(each.nbytes for each in host or device)
        self.arrived: Event | None = None  # link -> who reads the device: fetched
        self.updated: Event | None = None  # who writes the device -> link: may be stored
        self.stored: Event | None = None  # link -> who reads the host, or reuses the device
        self.stores = 0  # so far
        self._turns: tuple[Turns, Turns] | None = None

    def place(self, device: Sequence[Tensor]) -> None:
        """Use other device memory from now on; nothing is under way, and the host has the bytes."""
        assert self.residence is not Residence.DIRTY, "the bytes are on the device alone"
        self.device, self._turns, self.residence = device, None, Residence.HOST

    def changed(self, updated: Event | None) -> None:
        """The device memory has other bytes than the host, after ``updated``."""
        self.updated, self.residence = updated, Residence.DIRTY

    def ended(self) -> None:
        """The copy under way has been waited for: both sides have the bytes."""
        assert self.residence in (Residence.FETCHING, Residence.STORING), self.residence
        self.residence = Residence.DEVICE

    def forget(self) -> None:
        """What the device has is of no use any more."""
        self.residence = Residence.HOST

    def turns(self, turn_bytes: int) -> tuple[Turns, Turns]:
        """Device and host spans, in turns of so many bytes."""
        if self._turns is None:
            self._turns = in_turns(self.device, turn_bytes), in_turns(self.host, turn_bytes)
        return self._turns
