"""What checkpoints need of an optimizer: state to read, and all of it replaced at once."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..update.state import check_names
from .lifecycle import SAVE

if TYPE_CHECKING:
    from .hybrid import HybridDeviceOptimizer


class CheckpointView:
    """One optimizer, for :mod:`fsdp_offload.checkpoint`. No flag is raised by reading."""

    def __init__(self, optimizer: HybridDeviceOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def optimizer(self) -> HybridDeviceOptimizer:
        """The wrapper, also where the caller has the optimizer that it wraps."""
        return self._optimizer

    @property
    def class_name(self) -> str:
        """Of the wrapped optimizer."""
        return type(self._optimizer._inner).__qualname__

    @property
    def steps_itself(self) -> bool:
        """Whether the class runs its own step: then nothing of its state is offloaded."""
        return self._optimizer._steps_itself

    def read(self) -> dict[Tensor, dict[str, Any]]:
        """What ``optimizer.state`` shows, for a caller who does not write into it: what was fetched
        ahead stays, and the next step looks for no writes."""
        optimizer = self._optimizer
        with optimizer._life.turn("reading the state", within=SAVE):
            optimizer._finish(for_writing=False)
            return {**optimizer._view.shown, **self.read_at_once()}

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Inside, nothing changes what :meth:`read` has returned."""
        return self._optimizer._life.turn(SAVE)

    def loading(self) -> contextlib.AbstractContextManager[None]:
        """Inside, other threads wait; hooks of the load may use the optimizer."""
        return self._optimizer._life.held("checkpoint.load()")

    def read_at_once(self) -> dict[Tensor, dict[str, Any]]:
        """State that is offloaded, by parameter, as its memory is now: without waiting, also after
        a failure, for a load that writes all of it."""
        return self._optimizer._view.read(self._optimizer._reserved.params)

    def check_not_inherited(self) -> None:
        """Refuse an optimizer that a fork has inherited.

        Raises:
            ClosedError: it was built in another process.
        """
        if not self._optimizer._life.is_ours:
            self._optimizer._life.check()

    def check_loadable(self, what: str) -> None:
        """Refuse a load while away or closed; a failed optimizer is what a load is for.

        Raises:
            AwayError, ClosedError: it is.
        """
        self._optimizer._life.check(failed_ok=True)
        self._optimizer._device_state.check(what)

    def check_names(self, saved: Mapping[Tensor, Collection[str]]) -> None:
        """Refuse state of a checkpoint, given by the names of its entries, that lacks one.

        Raises:
            StateDictError: it was saved by another class, or by one with other flags.
        """
        for param in self._optimizer._reserved.params:
            check_names(param, saved.get(param.parameter, ()))

    def check_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Refuse options of a checkpoint, one mapping per group, that need other state.

        Raises:
            StateDictError: such as ``amsgrad`` where it was off when the optimizer was built.
        """
        self._optimizer._checked_groups([dict(group) for group in groups])

    @contextlib.contextmanager
    def replacing_all(self, what: str, *, keep: type[Exception]) -> Iterator[None]:
        """Inside, all state and weights are overwritten; masters belong to the weights then.

        Errors make the optimizer failed; those of class ``keep`` stay what they are.
        """
        optimizer = self._optimizer
        self.check_loadable(what)
        with optimizer._life.turn(what):
            optimizer._start_over()
            with self.failing(what, keep=keep), torch.no_grad():
                yield
                optimizer._view.expose(optimizer._reserved.params)
                optimizer._masters.trust_shards()
            optimizer._masters.come_with_weights = True

    def failing(
        self, what: str, *, keep: type[Exception]
    ) -> contextlib.AbstractContextManager[None]:
        """See :meth:`.Lifecycle.failing`."""
        return self._optimizer._failing(what, keep)
