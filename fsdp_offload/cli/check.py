"""One finding of ``doctor``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

State = Literal["ok", "warning", "error"]


class Check(NamedTuple):
    """One line: what was checked, and its effect on offload."""

    name: str
    state: State  # "warning": slower, or not known; "error": offload fails here
    found: str
    remedy: str = ""  # the user's action; empty if none is needed

    def line(self, width: int) -> str:
        """Format the check for people, with names padded to ``width``."""
        text = f"{self.state:<7}  {self.name:<{width}}  {self.found}"
        return f"{text}. Remedy: {self.remedy}" if self.remedy else text


def attempt(name: str, look: Callable[[], Check]) -> Check:
    """Call ``look``; its error becomes a warning, so that the other checks still run."""
    try:
        return look()
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return Check(name, "warning", f"the check failed: {text}", "read this error")


def worst(checks: Sequence[Check]) -> State:
    """Return the worst state."""
    return max((check.state for check in checks), key=get_args(State).index)
