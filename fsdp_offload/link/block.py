"""Blocks of bytes that move between host and device, and their residence."""

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
    """Only in host memory. :meth:`.Link.fetch` makes it FETCHING."""
    FETCHING = enum.auto()
    """In host memory, and on the device after ``arrived``. :meth:`Block.changed` makes it DIRTY,
    :meth:`Block.ended` DEVICE, :meth:`Block.forget` HOST."""
    DEVICE = enum.auto()
    """Equal on both sides. :meth:`Block.changed` makes it DIRTY, :meth:`Block.forget` HOST."""
    DIRTY = enum.auto()
    """Only on the device, after ``updated``. :meth:`.Link.store` makes it STORING."""
    STORING = enum.auto()
    """On the device, and in host memory after ``stored``. :meth:`Block.ended` makes it DEVICE,
    :meth:`Block.forget` HOST; it may be fetched again, behind ``stored``."""


class Block:
    """Bytes that move together, as spans of equal lengths on both sides.

    Args:
        host: 1-D uint8 tensors in host memory; empty without host memory.
        device: 1-D uint8 tensors on the device; empty without device memory.
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
        self.arrived: Event | None = None  # link -> readers of the device: fetched
        self.updated: Event | None = None  # writer of the device -> link: may be stored
        self.stored: Event | None = None  # link -> readers of the host, next users of the device
        self.stores = 0  # so far
        self._turns: tuple[Turns, Turns] | None = None

    def place(self, device: Sequence[Tensor]) -> None:
        """Use other device memory from now on; no copy is running, and the host has the bytes."""
        assert self.residence is not Residence.DIRTY, "the bytes are on the device alone"
        self.device, self._turns, self.residence = device, None, Residence.HOST

    def changed(self, updated: Event | None) -> None:
        """Mark the device's bytes as newer than the host's, after ``updated``."""
        self.updated, self.residence = updated, Residence.DIRTY

    def ended(self) -> None:
        """Mark the copy as completed: both sides have the bytes."""
        assert self.residence in (Residence.FETCHING, Residence.STORING), self.residence
        self.residence = Residence.DEVICE

    def forget(self) -> None:
        """Discard the device's bytes."""
        self.residence = Residence.HOST

    def turns(self, turn_bytes: int) -> tuple[Turns, Turns]:
        """Return device and host spans, in turns of ``turn_bytes``."""
        if self._turns is None:
            self._turns = in_turns(self.device, turn_bytes), in_turns(self.host, turn_bytes)
        return self._turns


# --------------------------------------------------------------------------- what transfers move


class OwnedBlock(Block):
    """A block of one span that can free its device memory and allocate it again."""

    __slots__ = ("key", "storages")

    def __init__(
        self, key: str, n_bytes: int, storages: Sequence[tuple[torch.UntypedStorage, int]]
    ) -> None:
        super().__init__(residence=Residence.DIRTY)
        self.key = key  # the same at each offload, so that it gets the same host memory
        self.n_bytes = n_bytes  # above 0
        # Storages that begin in the block, with their first byte; one may end in a later block.
        self.storages = storages

    def view(self) -> Tensor:
        """Return its bytes as 1-D uint8 on the device. It must be present."""
        raise NotImplementedError

    def release(self) -> None:
        """Free its device memory. All work on it has completed."""
        raise NotImplementedError

    def restore(self) -> None:
        """Allocate device memory again, with any content, in order of the current stream.

        Raises:
            torch.OutOfMemoryError: not enough memory; the block has not changed.
        """
        raise NotImplementedError


class StorageBlock(OwnedBlock):
    """A storage of torch's that is resized to 0 and back, so its address changes.

    All of its bytes move once. Views, tied weights and the padding of FSDP2's shards keep working,
    because the storage object stays and only its memory is freed.
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
    """Sort blocks for transfer, large ones first: the host enqueues small ones while the link is
    busy."""
    return sorted(blocks, key=lambda block: block.n_bytes < _SMALL_BYTES)


def collect(named: Iterable[tuple[str, Tensor]]) -> list[StorageBlock]:
    """Collect the storages of plain tensors, each once, that torch can free and nothing else
    moves."""
    found: dict[int, StorageBlock] = {}
    for key, tensor in named:
        storage = tensor.untyped_storage()
        is_own = storage.resizable() and storages.owner_of(storage) is None
        if storage.nbytes() and is_own:
            found.setdefault(storages.identity(storage), StorageBlock(key, storage))
    return in_order(found.values())
