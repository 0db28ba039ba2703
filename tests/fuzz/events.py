"""All events, and the sequence of a seed."""

from __future__ import annotations

import random

from . import events_interrupts, events_phases  # noqa: F401  (they fill EVENTS, as those they use)
from .cases import Case, Event, draw_case
from .kinds import EVENTS
from .pair import Pair


def draw(seed: int, ranks: int = 1, without: frozenset[str] = frozenset()) -> Case:
    """The case of ``seed`` with its events. Leaving out a kind leaves all others as they are."""
    case = draw_case(seed, ranks)
    rng = random.Random(f"{seed} of {ranks}")
    known = {n: k for n, k in EVENTS.items() if k.needs(case)}
    first = [n for n, kind in known.items() if kind.before_wrapping]
    others = [n for n, kind in known.items() if not kind.before_wrapping]
    weights = [known[name].weight for name in others]
    names = [rng.choice(first) for _ in range(rng.choice((0, 0, 0, 1, 2)))]
    names.append("wrap")
    names += rng.choices(others, weights, k=rng.randint(3, 14))
    case.events.extend(Event(name, rng.getrandbits(32)) for name in names)
    return case.without({i for i, e in enumerate(case.events) if e.name in without})


def happen(pair: Pair, event: Event) -> None:
    """Run one event; wrapping is always there, and never left out."""
    if event.name == "wrap":
        pair.wrap()
    else:
        EVENTS[event.name].run(pair, random.Random(event.seed))
