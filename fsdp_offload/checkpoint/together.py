"""Work that all ranks do together: each learns how it went elsewhere, and none waits in vain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from ..errors import CheckpointError, OffloadError

_Mine = TypeVar("_Mine")
_Told = TypeVar("_Told")


class Ranks:
    """The processes that save and load together."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self._alone else dist.get_rank(group)
        self.size = 1 if self._alone else dist.get_world_size(group)

    @property
    def file_name(self) -> str:
        """Of this rank's file."""
        return f"rank_{self.rank}_of_{self.size}.safetensors"

    def tell_each_other(self, work: Callable[[], tuple[_Mine, _Told]]) -> Outcome[_Mine, _Told]:
        """Run ``work`` here and on the other ranks; a rank whose work raises still takes part.

        Args:
            work: gives what stays here, and what all ranks are told (small).
        """
        mine = told = failure = None
        try:
            mine, told = work()
        except Exception as error:
            failure = error
        answers: list[Any] = [(told, _sendable(failure))]
        if not self._alone:
            answers = [None] * self.size
            dist.all_gather_object(answers, (told, _sendable(failure)), self._group)
        return Outcome(self.rank, mine, failure, answers)


@dataclass(frozen=True)
class Outcome(Generic[_Mine, _Told]):
    """What some work gave on every rank."""

    rank: int
    mine: _Mine | None
    failure: Exception | None
    answers: list[tuple[_Told, OffloadError | None]]  # per rank

    @property
    def failed(self) -> bool:
        """Whether any rank failed: the same on all."""
        return any(failure is not None for _, failure in self.answers)

    def checked(self) -> tuple[_Mine, list[_Told]]:
        """This rank's own result, and what every rank told.

        Raises:
            Exception: this rank's own failure, else that of the first rank that failed.
        """
        if self.failure is not None:
            raise self.failure
        for rank, (_, failure) in enumerate(self.answers):
            if failure is not None:
                raise of_rank(rank, failure)
        return self.mine, [told for told, _ in self.answers]  # type: ignore[return-value]


def _sendable(error: Exception | None) -> OffloadError | None:
    if error is None or isinstance(error, OffloadError):
        return error
    return CheckpointError(
        f"{type(error).__name__}", reason=str(error), remedy="see the traceback of that rank"
    )


def of_rank(rank: int, error: OffloadError) -> OffloadError:
    """The error of another rank, with its name."""
    return type(error)(f"rank {rank}: {error.what}", reason=error.reason, remedy=error.remedy)
