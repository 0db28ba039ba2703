"""What an optimizer and the offloader of its device memory know of each other.

:class:`.PhaseOffloader` moves the memory of any :class:`Offloadable`; ``HybridDeviceOptimizer`` has
one. Neither imports the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from . import dtensor
from . import storage as storages
from .backend import Event


class HostCopies(Protocol):
    """Host memory of tensors that are offloaded."""

    def of(self, tensor: Tensor) -> Tensor | None:
        """A tensor like ``tensor`` (a DTensor of the same placements for a DTensor) over the copy
        of its storage; None if that is not offloaded. What is written there is reloaded."""
        ...

    def wait(self) -> None:
        """Block until the copies are complete."""
        ...


class Offloadable(Protocol):
    """An optimizer that lists its device memory, which an offloader copies out and in."""

    @property
    def is_away(self) -> bool:
        """Whether its device memory was given up."""
        ...

    def turn(self, what: str) -> AbstractContextManager[None]:
        """Inside, which an offload and a reload are as a whole, no other thread steps.

        Raises:
            BusyError: a signal handler called ``what`` in the middle of a step.
        """
        ...

    def prepare_offload(self) -> None:
        """Finish all work, so that memory may be given up.

        Raises:
            SpentGradientError: between a backward that updated parameters and ``step()``.
            LaneError: an earlier update failed.
        """
        ...

    def prepare_reload(self) -> None:
        """Take over what the caller has put into the state that it was shown while away."""
        ...

    def device_tensors(self) -> Sequence[tuple[str, Tensor]]:
        """State on the device, with a key that is the same at each call."""
        ...

    def staging_buffers(self) -> Sequence[Tensor]:
        """Device memory without content that lasts: it is given up, and taken, without a copy."""
        ...

    def set_away(self, copies: HostCopies) -> None:
        """The memory is about to be given up: refuse steps and loads, show ``copies``."""
        ...

    def set_present(self, arrival: Event | None) -> None:
        """All memory is there again; its content is, after ``arrival``, or already."""
        ...


def offloadable_of(optimizer: object) -> Offloadable | None:
    """What an optimizer of this package offers; None: it is another one."""
    found: Any = getattr(optimizer, "_offloadable", None)
    return found  # type: ignore[no-any-return]


def check_present(what: str, models: Iterable[nn.Module], optimizer: Optimizer | None) -> None:
    """For loads that write by other means than ``load_state_dict``, whose hooks refuse.

    Raises:
        AwayError: memory of a module, or of a plain optimizer's state, was given up.
    """
    tensors: list[object] = [t for m in models for t in (*m.parameters(), *m.buffers())]
    states = () if optimizer is None else optimizer.state.values()
    tensors += [value for state in states for value in state.values()]
    for tensor in tensors:
        for _, plain in dtensor.plain_tensors(tensor) if isinstance(tensor, Tensor) else ():
            storages.present(plain, what)
