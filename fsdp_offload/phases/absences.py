"""What is away, or about to be, as whoever reads it outside of a step is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

from ..moving import Absence, Settle, StorageBlock, is_whole
from ..patching import weakly


class Holder(Protocol):
    """Who knows where the bytes of some storages are while they are away."""

    def place(self, storage: StorageBlock) -> Tensor:
        """Its bytes in host memory."""
        ...

    def presence(self, storage: StorageBlock) -> Callable[[], bool] | None:
        """What tells whether it has its memory; None: its size does."""
        ...


class Absences:
    """The absence of each storage of one offloader.

    Args:
        settle: a bound method that returns when all bytes are in their places. Its object is not
            kept alive.
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = Settle(weakly(settle))
        self._by_storage: dict[int, Absence] = {}  # by identity

    def enter(self, held: Iterable[tuple[Holder, Iterable[StorageBlock]]]) -> None:
        """They leave now. What is absent already stays so."""
        for holder, storages in held:
            for each in storages:
                if each.storage._cdata not in self._by_storage:
                    self._by_storage[each.storage._cdata] = Absence(
                        each.storage, holder.place(each), self._settle, holder.presence(each)
                    )

    def match(self, held: Iterable[tuple[Holder, Iterable[StorageBlock]]]) -> None:
        """Let absent be what has no memory, and nothing else: others need not have places."""
        self._by_storage = {k: each for k, each in self._by_storage.items() if not each.is_over()}
        self.enter((h, [s for s in storages if not _is_present(s, h)]) for h, storages in held)

    def end(self) -> None:
        """All are, or are about to be, back."""
        for absence in self._by_storage.values():
            absence.end()
        self._by_storage.clear()


def _is_present(storage: StorageBlock, holder: Holder) -> bool:
    tell = holder.presence(storage)
    return is_whole(storage) if tell is None else tell()
