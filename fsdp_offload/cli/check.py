"""One finding of ``doctor``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

State = Literal["ok", "warning", "error"]


class Check(NamedTuple):
    """What was looked at, and what it means for offload."""

    name: str
    state: State  # "warning": slower, or not known; "error": offload fails here
    found: str
    remedy: str = ""  # what the user can do about it; empty if nothing has to be done

    def line(self, width: int) -> str:
        """For people; names are padded to ``width``."""
        text = f"{self.state:<7}  {self.name:<{width}}  {self.found}"
        return f"{text}. Remedy: {self.remedy}" if self.remedy else text


def attempt(name: str, look: Callable[[], Check]) -> Check:
    """``look()``; a warning if it cannot look, so that the other checks are still made."""
    try:
        return look()
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return Check(name, "warning", f"not known: {text}", "see the error it gives")


def worst(checks: Sequence[Check]) -> State:
    """Of all states."""
    states: tuple[State, ...] = ("ok", "warning", "error")
    return max((check.state for check in checks), key=states.index)
