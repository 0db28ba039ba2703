"""An optimizer as checkpoints see it: state to read, or to replace at once."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..update.state import check_names
from .lifecycle import SAVE
from .updates import Updates


class CheckpointView:
    """View of one optimizer for :mod:`fsdp_offload.checkpoint`. Reading sets no flag."""

    def __init__(self, optimizer: Optimizer, updates: Updates) -> None:
        self.optimizer = optimizer  # the wrapper, even if the caller holds what it wraps
        self._updates = updates

    @property
    def class_name(self) -> str:
        """Class name of the wrapped optimizer."""
        return type(self._updates.inner).__qualname__

    @property
    def steps_itself(self) -> bool:
        """Whether the class runs its own step, so that its state is not offloaded."""
        return self._updates.steps_itself

    def read(self) -> dict[Tensor, dict[str, Any]]:
        """Return the content of ``optimizer.state`` for a caller that does not write to it:
        prefetched state stays valid, and the next step looks for no writes."""
        with self._updates.life.turn("reading the state", within=SAVE):
            self._updates.finish(for_writing=False)
            return {**self._updates.view.shown, **self.read_at_once()}

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Keep the result of :meth:`read` unchanged inside."""
        return self._updates.life.turn(SAVE)

    def loading(self) -> contextlib.AbstractContextManager[None]:
        """Make other threads wait inside; hooks of the load may use the optimizer."""
        return self._updates.life.held("checkpoint.load()")

    def read_at_once(self) -> dict[Tensor, dict[str, Any]]:
        """Return offloaded state by parameter without waiting, even after a failure, for a load
        that overwrites all of it."""
        return self._updates.view.read(self._updates.reserved.params)

    def check_not_inherited(self) -> None:
        """Refuse an optimizer that a fork has inherited.

        Raises:
            ClosedError: it was built in another process.
        """
        if not self._updates.life.is_ours:
            self._updates.life.check()

    def check_loadable(self, what: str) -> None:
        """Refuse a load while offloaded or closed; a load may repair a failed optimizer.

        Raises:
            AwayError, ClosedError: the optimizer is offloaded, or closed.
        """
        self._updates.check_present(what, failed_ok=True)

    def check_fits(
        self, saved: Mapping[Tensor, Collection[str]], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Refuse a checkpoint whose state, given by names, lacks an entry, or whose options, one
        mapping per group, need other state.

        Raises:
            StateDictError: another class, or other options, saved it.
        """
        for param in self._updates.reserved.params:
            check_names(param, saved.get(param.parameter, ()))
        self._updates.reserved.checked_groups(groups)

    @contextlib.contextmanager
    def replacing_all(self, what: str, *, keep: type[Exception]) -> Iterator[None]:
        """Overwrite all state and weights inside; afterwards masters match the weights.

        Errors make the optimizer failed; those of class ``keep`` are raised unchanged.
        """
        self.check_loadable(what)
        with self._updates.life.turn(what), self._updates.replacing(what, keep):
            yield
            self._updates.view.expose(self._updates.reserved.params)

    def failing(
        self, what: str, *, keep: type[Exception]
    ) -> contextlib.AbstractContextManager[None]:
        """As :meth:`.Lifecycle.failing`."""
        return self._updates.life.failing(what, keep)
