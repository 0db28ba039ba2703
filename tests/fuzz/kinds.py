"""The table of events. Each draws what it needs from its own generator.

An event that makes no sense when its turn comes (nothing was saved yet, all is frozen) does
nothing: so events can be left out of a sequence, and the others stay what they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from .cases import Case
from .pair import Pair

Run = Callable[[Pair, random.Random], None]


@dataclass(frozen=True)
class Kind:
    """An event that can be drawn."""

    run: Run
    weight: float
    before_wrapping: bool = False
    needs: Callable[[Case], bool] = lambda case: True


EVENTS: Final[dict[str, Kind]] = {}


def event(weight: float, **options: Any) -> Callable[[Run], Run]:
    """Enter a function into :data:`EVENTS` under its own name."""

    def enter(run: Run) -> Run:
        EVENTS[run.__name__] = Kind(run, weight, **options)
        return run

    return enter


def generator_of(rng: random.Random) -> torch.Generator:
    """For tensors."""
    return torch.Generator().manual_seed(rng.getrandbits(31))
