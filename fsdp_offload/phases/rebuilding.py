"""Parameters that are written from their masters, instead of being copied out and in."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import shards
from ..moving import Mover, StorageBlock
from .absences import Absences
from .optimizers import OptimizerState


class Rebuilding:
    """Blocks whose bytes the optimizer can write at any time.

    While they are away and somebody asks for their values, they get host memory like others, filled
    from the masters, and are saved blocks from then to the next offload: a load may have written.

    Args:
        state: of the optimizer that has the masters.
        mover: of the blocks.
        absences: of those blocks that are away, and of others.
        enabled: else nothing is ever taken.
    """

    def __init__(
        self, state: OptimizerState, mover: Mover, absences: Absences, *, enabled: bool
    ) -> None:
        self._state, self._mover, self._enabled = state, mover, enabled
        self._absences = absences
        self._parameters: dict[StorageBlock, Tensor] = {}
        self._filled: set[StorageBlock] = set()
        self._renewed: list[StorageBlock] = []
        self._lock = threading.RLock()

    @property
    def blocks(self) -> list[StorageBlock]:
        """Those that leave without a copy."""
        return list(self._parameters)

    def take(
        self, blocks: Sequence[StorageBlock], named: Sequence[tuple[str, Tensor]]
    ) -> list[StorageBlock]:
        """Take what can be rebuilt now; returns the others.

        A storage is one parameter's shard, with padding perhaps, and nothing else's.
        """
        self._parameters, self._filled = {}, set()
        if not self._enabled or not blocks:
            return list(blocks)
        able = self._state.optimizer.rebuildable()
        users: dict[int, list[Tensor]] = {}
        for _, tensor in named:
            if tensor.layout is not torch.strided:  # sparse buffers stay: there are no blocks
                continue
            users.setdefault(shards.storage_of(tensor)._cdata, []).append(tensor)
        saved = []
        for block in blocks:
            found = users[block.storage._cdata]
            if len(found) == 1 and found[0] in able:
                self._parameters[block] = found[0]
            else:
                saved.append(block)
        return saved

    def place(self, storage: StorageBlock) -> Callable[[], Tensor]:
        """What takes host memory for its bytes and writes them, when somebody asks."""
        return functools.partial(_fill, weakref.ref(self), storage)

    def presence(self, storage: StorageBlock) -> None:
        """Its size tells it."""

    def renew(self, make_room: Callable[[], bool] | None) -> None:
        """Memory for those that have none, of any content.

        Raises:
            torch.OutOfMemoryError: there is none; all are as before.
        """
        self._renewed = self._mover.renew(self.blocks, make_room=make_room)

    def write(self) -> None:
        """Fill what was renewed, on the device, in order of the current stream. Others may have
        been written to."""
        current = [(b, self._parameters[b]) for b in self._renewed if b not in self._filled]
        for block, parameter in current:
            shard = shards.local(parameter)
            if shard.numel() * shard.itemsize < block.n_bytes:
                block.view(0).zero_()  # FSDP2's padding
        if current:
            self._state.optimizer.rebuild([parameter for _, parameter in current])
        for block in self._renewed:
            if block in self._filled:
                place = self._mover.places.of(block)
                block.view(0).copy_(place, non_blocking=True)

    def fill_all(self) -> None:
        """Keep the bytes of all that is away: there will be no masters any more.

        Raises:
            HostMemoryError, PinningError: there is no room for them.
        """
        for block in self.blocks:
            if not block.is_present(0):
                self.fill(block)

    def fill(self, block: StorageBlock) -> Tensor:
        """Host memory with the block's bytes, which may be written."""
        with self._lock:
            if block not in self._filled:
                self._write_place(block)
            return self._mover.places.of(block)

    def _write_place(self, block: StorageBlock) -> None:
        try:
            self._mover.reserve([block])
            place = self._mover.places.of(block)
            place.zero_()
            self._absences.provide(block, place)  # where the optimizer writes
            with torch.no_grad():
                self._state.optimizer.rebuild([self._parameters[block]])
            self._filled.add(block)
        except BaseException:
            self._absences.provide(block, self.place(block))  # half of it is not for readers
            raise


def _fill(find: Callable[[], Rebuilding | None], block: StorageBlock) -> Tensor:
    rebuilding = find()
    assert rebuilding is not None, "it keeps the entry that calls this"
    return rebuilding.fill(block)
