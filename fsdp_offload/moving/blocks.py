"""What can leave the device: whole blocks of its memory, whoever looks at them.

[Note: storages, not tensors]
A storage is moved once, with all of its bytes: views, tied weights and the padding of FSDP2's
shards (the local tensor shows a part of a padded one) stay what they are, because the storage
object stays and only its memory goes. An emptied storage has size 0 and address 0: reading a
tensor over it is an error of the caller that torch does not catch (a kernel would read address 0).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from .. import shards, storages


class Block(Protocol):
    """Bytes of device memory that leave and come back together.

    A block has *pieces*, byte ranges that are released and restored one by one, so that memory
    returns while others are still being copied.
    """

    key: str
    """What it is, the same at each departure: a block with a known key gets its old place."""
    n_bytes: int
    pieces: Sequence[tuple[int, int]]
    """``(start, stop)`` in bytes, ascending, without gaps."""

    def is_present(self, index: int) -> bool:
        """Whether the piece has its memory."""
        ...

    def view(self, index: int) -> Tensor:
        """The piece's bytes: 1-D uint8 on the device. It must be present."""
        ...

    def release(self, index: int) -> None:
        """Give the piece's memory up. All work on it has completed."""
        ...

    def restore(self, index: int) -> None:
        """Get memory for it again, with any content, in order of the current stream.

        Raises:
            torch.OutOfMemoryError: there is none; the block is as before.
        """
        ...


def is_whole(block: Block) -> bool:
    """Whether all of a block has its memory."""
    return all(map(block.is_present, range(len(block.pieces))))


class StorageBlock:
    """A storage of torch's: one piece, resized to 0 and back. Its address changes."""

    def __init__(self, key: str, storage: torch.UntypedStorage) -> None:
        self.key, self.storage = key, storage
        self.n_bytes = storage.nbytes()
        self.pieces: Sequence[tuple[int, int]] = ((0, self.n_bytes),)
        with torch.inference_mode(False):  # made once: for small blocks it costs more than the copy
            empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
            self._bytes: Tensor = empty.set_(storage)

    def address(self) -> int:
        """Where it lies, while it is present."""
        return self.storage.data_ptr()

    def is_present(self, index: int) -> bool:
        """See :class:`Block`."""
        return self.storage.nbytes() == self.n_bytes

    def view(self, index: int) -> Tensor:
        """See :class:`Block`."""
        return self._bytes

    def release(self, index: int) -> None:
        """See :class:`Block`."""
        self.storage.resize_(0)

    def restore(self, index: int) -> None:
        """See :class:`Block`."""
        self.storage.resize_(self.n_bytes)


def collect(
    named: Iterable[tuple[str, Tensor]],
    device: torch.device,
    *,
    known: set[int] | None = None,
    owned: list[tuple[str, torch.UntypedStorage]] | None = None,
    earlier: Mapping[int, StorageBlock] = MappingProxyType({}),
) -> list[StorageBlock]:
    """The storages of tensors, or of DTensors' shards, that lie on ``device``: each once.

    Args:
        named: a key per tensor, the same at each call; the first tensor of a storage names it.
        device: others are left alone, and so is what lies in a region.
        known: storages that were found before, by ``_cdata``; extended, also by those in a region.
        owned: extended by those that somebody has moved into a region, with their keys.
        earlier: blocks of earlier calls, by their storages' ``_cdata``: used again where they fit.
    """
    known = set() if known is None else known
    blocks = []
    for key, tensor in named:
        if tensor.layout is not torch.strided:  # sparse gradients stay
            continue
        storage = shards.storage_of(tensor)
        identity, n_bytes = storage._cdata, storage.nbytes()
        if storage.device != device or n_bytes == 0 or identity in known:
            continue
        known.add(identity)
        if storages.is_tied(storage):
            if owned is not None and storages.is_owned(storage):
                owned.append((key, storage))
            continue
        block = earlier.get(identity)
        if block is None or block.key != key or block.n_bytes != n_bytes:
            block = StorageBlock(key, storage)
        blocks.append(block)
    return blocks
