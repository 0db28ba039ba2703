"""What travels between host and device: bytes with a place on both sides, and where they are."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from ..core import storage as storages
from ..core.backend import Event, Turns, in_turns

_SMALL_BYTES: Final = 2 << 20


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


# --------------------------------------------------------------------------- what transfers move


class OwnedBlock(Block):
    """A block of one span that can give its device memory up and take it again."""

    __slots__ = ("key", "storages")

    def __init__(
        self, key: str, n_bytes: int, storages: Sequence[tuple[torch.UntypedStorage, int]]
    ) -> None:
        super().__init__(residence=Residence.DIRTY)
        self.key = key  # the same at each offload: it gets the host memory that it had
        self.n_bytes = n_bytes  # above 0
        # Those that begin in it, with their first byte there; one may end in a block behind it.
        self.storages = storages

    def view(self) -> Tensor:
        """Its bytes: 1-D uint8 on the device. It must be present."""
        raise NotImplementedError

    def release(self) -> None:
        """Give its device memory up. All work on it has completed."""
        raise NotImplementedError

    def restore(self) -> None:
        """Take device memory again, with any content, in order of the current stream.

        Raises:
            torch.OutOfMemoryError: there is none; it is as before.
        """
        raise NotImplementedError


class StorageBlock(OwnedBlock):
    """A storage of torch's, resized to 0 and back, so its address changes.

    It moves once, with all of its bytes: views, tied weights and the padding of FSDP2's shards
    stay what they are, because the storage object stays and only its memory goes.
    """

    __slots__ = ("_storage",)

    def __init__(self, key: str, storage: torch.UntypedStorage) -> None:
        super().__init__(key, storage.nbytes(), ((storage, 0),))
        self._storage = storage

    @torch.inference_mode(False)
    def view(self) -> Tensor:
        empty = torch.empty(0, dtype=torch.uint8, device=self._storage.device)
        return empty.set_(self._storage)

    def release(self) -> None:
        self._storage.resize_(0)

    def restore(self) -> None:
        self._storage.resize_(self.n_bytes)


def in_order(blocks: Iterable[StorageBlock]) -> list[StorageBlock]:
    """As they travel: the host enqueues small ones while the link is busy with large ones."""
    return sorted(blocks, key=lambda block: block.n_bytes < _SMALL_BYTES)


def collect(named: Iterable[tuple[str, Tensor]]) -> list[StorageBlock]:
    """Storages of plain tensors, each once, that torch can give up and that nothing else moves."""
    found: dict[int, StorageBlock] = {}
    for key, tensor in named:
        storage = tensor.untyped_storage()
        is_own = storage.resizable() and storages.owner_of(storage) is None
        if storage.nbytes() and is_own:
            found.setdefault(storages.identity(storage), StorageBlock(key, storage))
    return in_order(found.values())
