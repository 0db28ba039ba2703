"""What checkpoints need of an optimizer: state to read, and all of it replaced at once."""

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
    """One optimizer, for :mod:`fsdp_offload.checkpoint`. No flag is raised by reading."""

    def __init__(self, optimizer: Optimizer, updates: Updates) -> None:
        self.optimizer = optimizer
        """The wrapper, also where the caller has the optimizer that it wraps."""
        self._updates = updates

    @property
    def class_name(self) -> str:
        """Of the wrapped optimizer."""
        return type(self._updates.inner).__qualname__

    @property
    def steps_itself(self) -> bool:
        """Whether the class runs its own step: then nothing of its state is offloaded."""
        return self._updates.steps_itself

    def read(self) -> dict[Tensor, dict[str, Any]]:
        """What ``optimizer.state`` shows, for a caller who does not write into it: what was fetched
        ahead stays, and the next step looks for no writes."""
        with self._updates.life.turn("reading the state", within=SAVE):
            self._updates.finish(for_writing=False)
            return {**self._updates.view.shown, **self.read_at_once()}

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Inside, nothing changes what :meth:`read` has returned."""
        return self._updates.life.turn(SAVE)

    def loading(self) -> contextlib.AbstractContextManager[None]:
        """Inside, other threads wait; hooks of the load may use the optimizer."""
        return self._updates.life.held("checkpoint.load()")

    def read_at_once(self) -> dict[Tensor, dict[str, Any]]:
        """State that is offloaded, by parameter, as its memory is now: without waiting, also after
        a failure, for a load that writes all of it."""
        return self._updates.view.read(self._updates.reserved.params)

    def check_not_inherited(self) -> None:
        """Refuse an optimizer that a fork has inherited.

        Raises:
            ClosedError: it was built in another process.
        """
        if not self._updates.life.is_ours:
            self._updates.life.check()

    def check_loadable(self, what: str) -> None:
        """Refuse a load while away or closed; a failed optimizer is what a load is for.

        Raises:
            AwayError, ClosedError: it is.
        """
        self._updates.check_present(what, failed_ok=True)

    def check_fits(
        self, saved: Mapping[Tensor, Collection[str]], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Refuse state of a checkpoint, given by the names of its entries, that lacks one, and
        options, one mapping per group, that need other state.

        Raises:
            StateDictError: it was saved by another class, or by one with other flags.
        """
        for param in self._updates.reserved.params:
            check_names(param, saved.get(param.parameter, ()))
        self._updates.reserved.checked_groups(groups)

    @contextlib.contextmanager
    def replacing_all(self, what: str, *, keep: type[Exception]) -> Iterator[None]:
        """Inside, all state and weights are overwritten; masters belong to the weights then.

        Errors make the optimizer failed; those of class ``keep`` stay what they are.
        """
        self.check_loadable(what)
        with self._updates.life.turn(what), self._updates.replacing(what, keep):
            yield
            self._updates.view.expose(self._updates.reserved.params)

    def failing(
        self, what: str, *, keep: type[Exception]
    ) -> contextlib.AbstractContextManager[None]:
        """See :meth:`.Lifecycle.failing`."""
        return self._updates.life.failing(what, keep)
