"""Which blocks move when storages leave, and where a storage's bytes are meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..device import Gateway
from ..errors import ConfigError, UnsupportedParameterError
from ..moving import Block, Places, StorageBlock
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

    def close(self) -> None:
        """Nothing is going to leave any more; all of it is present. Idempotent."""


def make_seats(
    policies: Policies, gateway: Gateway, places: Places, *, fixed_address: bool
) -> dict[str, Seats]:
    """Seats by kind.

    Raises:
        ConfigError: ``fixed_address``, which needs memory that can be put at an address.
    """
    if fixed_address:
        raise ConfigError(
            "fixed_address=True",
            reason="storages of existing tensors have no fixed-address form yet",
            remedy="leave it out; addresses then change with each reload",
        )
    return {kind: Seats(places) for kind in ("params", "grads", "state")}


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
