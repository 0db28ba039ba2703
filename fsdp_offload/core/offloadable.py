"""Protocols between optimizers and :class:`.PhaseOffloader`.

:class:`.PhaseOffloader` moves the memory of any :class:`Offloadable`; ``HybridDeviceOptimizer`` has
one. Neither imports the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from . import dtensor
from . import storage as storages
from .backend import Event


class HostCopies(Protocol):
    """Host memory of tensors that are offloaded."""

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor like ``tensor`` (a DTensor for a DTensor) over the copy of its storage;
        None if it is not offloaded. A reload copies what the caller writes there."""

    def wait(self) -> None:
        """Block until the copies are complete."""


class Offloadable(Protocol):
    """An optimizer that lists its device memory, which an offloader copies out and in."""

    @property
    def is_away(self) -> bool:
        """Whether its device memory is offloaded."""

    def turn(self, what: str) -> AbstractContextManager[None]:
        """Keep other threads from stepping; an offload or a reload runs inside as a whole.

        Raises:
            BusyError: a signal handler called ``what`` in the middle of a step.
        """

    def prepare_offload(self) -> None:
        """Finish all work, so that memory may be freed.

        Raises:
            SpentGradientError: called between a backward that updated parameters and ``step()``.
            LaneError: an earlier update failed.
        """

    def prepare_reload(self) -> None:
        """Adopt what the caller has written into the state while it was away."""

    def device_tensors(self) -> Sequence[tuple[str, Tensor]]:
        """List state on the device, with keys that are the same at each call."""

    def staging_buffers(self) -> Sequence[Tensor]:
        """List device memory whose content does not matter: freed and allocated without a copy."""

    def set_away(self, copies: HostCopies) -> None:
        """Refuse steps and loads from now on, and show ``copies``: the memory is about to be
        freed."""

    def set_present(self, arrival: Event | None) -> None:
        """Resume: all memory is back, and its content is valid after ``arrival``."""


def offloadable_of(optimizer: object) -> Offloadable | None:
    """Return the :class:`Offloadable` of an optimizer of this package; else None."""
    found: Any = getattr(optimizer, "_offloadable", None)
    return found  # type: ignore[no-any-return]


def check_present(what: str, models: Iterable[nn.Module], optimizer: Optimizer | None) -> None:
    """Refuse loads into offloaded memory that bypass the hooks of ``load_state_dict``.

    Raises:
        AwayError: memory of a module, or of a plain optimizer's state, is offloaded.
    """
    states = () if optimizer is None else optimizer.state.values()
    check_tensors(what, (t for m in models for t in (*m.parameters(), *m.buffers())))
    check_tensors(what, (value for state in states for value in state.values()))


def check_tensors(what: str, tensors: Iterable[object]) -> None:
    """Refuse writes into offloaded memory; skips other objects.

    Raises:
        AwayError: the memory of one is offloaded.
    """
    for tensor in tensors:
        for _, plain in dtensor.plain_tensors(tensor) if isinstance(tensor, Tensor) else ():
            storages.present(plain, what)


def remove_all(handles: list[RemovableHandle]) -> None:
    """Remove these hooks. Idempotent."""
    while handles:
        handles.pop().remove()
