"""What an optimizer and the offloader of its device memory know of each other.

:class:`.PhaseOffloader` moves the memory of any :class:`Offloadable`; ``HybridDeviceOptimizer`` is
one. Neither imports the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from .backend import Event


class HostCopies(Protocol):
    """Host memory of tensors that are offloaded."""

    def of(self, tensor: Tensor) -> Tensor | None:
        """A tensor like ``tensor`` (a DTensor of the same placements for a DTensor) over the copy
        of its storage; None if that is not offloaded. What is written there comes back."""
        ...

    def wait(self) -> None:
        """Block until the copies are complete."""
        ...


@runtime_checkable
class Offloadable(Protocol):
    """An optimizer that lists its device memory, which an offloader copies out and in."""

    @property
    def is_away(self) -> bool:
        """Whether its device memory was given up."""
        ...

    def prepare_offload(self) -> None:
        """Finish all work, so that memory may leave.

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


class LoadHook:
    """A pre-hook of ``load_state_dict`` that refuses the load of what is offloaded.

    Args:
        check: raises AwayError, if there is reason to; None: in a copy of what was hooked.
    """

    def __init__(self, check: Callable[[str], None] | None = None) -> None:
        self._check = check

    def __call__(self, *_: object) -> None:
        self.check("load_state_dict()")

    def check(self, what: str) -> None:
        """Refuse ``what``, if there is reason to."""
        if self._check is not None:
            self._check(what)

    def __reduce__(self) -> tuple[type[LoadHook], tuple[()]]:
        return LoadHook, ()


def check_loadable(what: str, models: Iterable[nn.Module], optimizer: Optimizer | None) -> None:
    """Ask the hooks that ``load_state_dict`` would call, for loads that write by other means.

    Raises:
        AwayError: a module or the optimizer is offloaded.
    """
    found = [h for m in models for each in m.modules() for h in _hooks(each)]
    found += getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", {}).values()
    for hook in found:
        hook = getattr(hook, "hook", hook)  # torch wraps those of modules
        if isinstance(hook, LoadHook):
            hook.check(what)


def _hooks(module: nn.Module) -> list[Any]:
    return list(module._load_state_dict_pre_hooks.values())
