"""What a transfer moves: device memory that is given up and taken back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from ..core import storage as storages
from .block import Block, Residence

_SMALL_BYTES: Final = 2 << 20


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
