"""The ranks of a job agree: on values, and on errors, which all of them raise together."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ..errors import CheckpointError, OffloadError
from . import objects

_Local = TypeVar("_Local")
_Result = TypeVar("_Result")
_Outcome = tuple[_Result | None, BaseException | None]

_log = logging.getLogger("fsdp_offload")
_background: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_groups: weakref.WeakKeyDictionary[object, dist.ProcessGroup] = weakref.WeakKeyDictionary()


class Team:
    """All ranks of the default process group, over gloo; or this process alone.

    The group is made at the first use and kept: it carries objects only, never leaves host
    memory, and does not meet the training's own collectives, so that a thread may use it. Every
    method is a collective: all ranks call it in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @classmethod
    def of_world(cls) -> Team:
        """The team of all ranks. Collective at its first use in a process group.

        Waits for what a :class:`Background` does: two collectives at once would be mixed up.
        """
        wait_for_background()
        if not (dist.is_available() and dist.is_initialized()):
            return cls(None)
        world = dist.distributed_c10d._get_default_group()
        if world not in _groups:
            _groups[world] = dist.new_group(backend="gloo")
        return cls(_groups[world])

    @property
    def is_lead(self) -> bool:
        """Whether this rank does what is done once."""
        return self.rank == 0

    def reduce_scatter(
        self,
        work: Callable[[], _Local],
        reduce: Callable[[list[_Local]], Sequence[_Result]],
    ) -> _Result:
        """This rank's of what the lead makes from every rank's result of ``work``.

        One gather and one scatter.

        Raises:
            OffloadError: on all ranks, if a rank's work or the lead's ``reduce`` raised.
        """
        mine = _attempt(work)
        outcome: _Outcome[Sequence[_Result]] = self._reduced(mine, reduce)
        if self._group is None:
            return _result(outcome)[0]
        results, error = _portable(outcome)
        shares = [(None if results is None else results[r], error) for r in range(self.size)]
        answer: _Outcome[_Result] = objects.scatter(shares if self.is_lead else None, self._group)
        return _result(answer, own=mine[1])

    def all_reduce(
        self, work: Callable[[], _Local], reduce: Callable[[list[_Local]], _Result]
    ) -> _Result:
        """What the lead makes from every rank's result of ``work``, on all ranks.

        One gather and one broadcast.

        Raises:
            OffloadError: on all ranks, if a rank's work or the lead's ``reduce`` raised.
        """
        mine = _attempt(work)
        outcome = self._reduced(mine, reduce)
        if self._group is None:
            return _result(outcome)
        answer: _Outcome[_Result] = objects.broadcast(_portable(outcome), self._group)
        return _result(answer, own=mine[1])

    def _reduced(
        self, mine: _Outcome[_Local], reduce: Callable[[list[_Local]], _Result]
    ) -> _Outcome[_Result]:
        """The lead's result of ``reduce``; elsewhere nothing."""
        gathered: list[Any] = [mine]
        if self._group is not None:
            gathered = objects.gather(_portable(mine), self._group)
        if not self.is_lead:
            return None, None
        for rank, (_, error) in enumerate(gathered):
            if error is not None:
                return None, mine[1] if rank == self.rank else of_rank(rank, error)
        return _attempt(lambda: reduce([result for result, _ in gathered]))

    def lead(self, work: Callable[[], _Result]) -> _Result:
        """The result of ``work``, done by the lead, on all ranks.

        Raises:
            OffloadError: on all ranks, if it raised.
        """
        mine = _attempt(work) if self.is_lead else (None, None)
        if self._group is None:
            return _result(mine)
        answer: _Outcome[_Result] = objects.broadcast(_portable(mine), self._group)
        return _result(answer, own=mine[1])

    def together(self, work: Callable[[], _Result]) -> _Result:
        """This rank's result of ``work``, once every rank's has succeeded. One all-gather.

        Raises:
            OffloadError: on all ranks, if a rank's work raised.
        """
        result, _ = self.share(lambda: (work(), None))
        return result

    def share(self, work: Callable[[], tuple[_Result, _Local]]) -> tuple[_Result, list[_Local]]:
        """What ``work`` gave this rank, and the second (small) part of every rank's result.

        One all-gather.

        Raises:
            OffloadError: on all ranks, if a rank's work raised.
        """
        mine = _attempt(work)
        if self._group is None:
            result, told = _result(mine)
            return result, [told]
        told_and_error = (None if mine[0] is None else mine[0][1], _portable(mine)[1])
        answers = objects.all_gather(told_and_error, self._group)
        for rank, (_, error) in enumerate(answers):
            if error is not None:
                _result((None, of_rank(rank, error)), own=mine[1])
        return _result(mine)[0], [told for told, _ in answers]


class Background:
    """A thread that waits for its work, which may use a team; the interpreter waits for it at exit.

    It is started before there is anything to do, so that a thread that cannot be had is an error
    before other ranks wait for what it would do.

    Raises:
        CheckpointError: the system gives no thread.
    """

    def __init__(self) -> None:
        self._inbox: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        thread = threading.Thread(target=self._serve, name="fsdp-offload-save")
        try:
            thread.start()
        except RuntimeError as error:
            raise CheckpointError(
                "a thread for async_save",
                reason=f"the system gives none: {error}",
                remedy="raise the limit of memory or processes (ulimit -v, -u), or call save",
            ) from error
        _background.add(thread)

    def run(self, work: Callable[[], None]) -> Future[None]:
        """Begin; the future tells its end. The last call."""
        future: Future[None] = Future()
        self._inbox.put((work, future))
        return future

    def dismiss(self) -> None:
        """There is nothing to do."""
        self._inbox.put(None)

    def _serve(self) -> None:
        order = self._inbox.get()
        if order is None:
            return
        work, future = order
        try:
            work()
        except BaseException as error:
            _log.error("saving in the background failed: %s", error)
            future.set_exception(error)
        else:
            future.set_result(None)


def wait_for_background() -> None:
    """Block until no :class:`Background` works; its error stays in its future."""
    for thread in list(_background):
        if thread is not threading.current_thread():
            thread.join()


def _attempt(work: Callable[[], _Result]) -> _Outcome[_Result]:
    # CheckpointException, torch's own, is not an Exception.
    try:
        return work(), None
    except (Exception, CheckpointException) as error:
        return None, error


def _portable(outcome: _Outcome[_Result]) -> _Outcome[_Result]:
    """With an error that can be sent to other ranks."""
    result, error = outcome
    return result, None if error is None else _typed(error)


def _typed(error: BaseException) -> OffloadError:
    if isinstance(error, OffloadError):
        return error
    return CheckpointError(
        type(error).__name__, reason=str(error), remedy="see its cause, in that rank's log"
    )


def of_rank(rank: int, error: OffloadError) -> OffloadError:
    """``error`` as other ranks raise it."""
    return type(error)(f"rank {rank}: {error.what}", reason=error.reason, remedy=error.remedy)


def _result(outcome: _Outcome[_Result], *, own: BaseException | None = None) -> _Result:
    """The result, or the error raised: where this rank has one of its own, that one."""
    result, error = outcome
    if error is None:
        return result  # type: ignore[return-value]
    error = own or error
    typed = _typed(error)
    if typed is error:
        raise typed
    raise typed from error
