"""Chooses which cases of a table run by default; ``make test-long`` runs all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from _pytest.mark.structures import ParameterSet


def covering(cases: Iterable[tuple[Any, ...]]) -> list[ParameterSet]:
    """For ``parametrize``: of the cases that run by default, each value of each argument has one at
    least, and all about as many; the others are marked ``long``."""
    table = [(case, {(at, _name(value)) for at, value in enumerate(case)}) for case in cases]
    unseen = set[tuple[int, str]]().union(*(values for _, values in table))
    uses = Counter[tuple[int, str]]()
    chosen = set[int]()

    def gain(index: int) -> tuple[int, int]:
        values = table[index][1]
        return len(values & unseen), -sum(uses[value] for value in values)

    while unseen:
        best = max(range(len(table)), key=gain)
        chosen.add(best)
        unseen -= table[best][1]
        uses.update(table[best][1])
    return [
        pytest.param(*case, marks=() if index in chosen else pytest.mark.long)
        for index, (case, _) in enumerate(table)
    ]


def _name(value: object) -> str:
    return getattr(value, "__name__", None) or repr(value)
