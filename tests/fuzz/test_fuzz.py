"""Wrapped and plain optimizers side by side: random classes, lanes, dtypes and events.

``python -m tests.fuzz --help`` runs more of it, or a single sequence again.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.ranks import RankPool

from .plants import PLANTS, planted
from .runner import Outcome, run_again, run_seeds

Ranks = Callable[..., RankPool]
LONG_FROM = 10_000


def check(outcome: Outcome) -> None:
    """Nothing differs."""
    assert not outcome.failures, "\n\n".join(map(str, outcome.failures))


def test_sequences_in_one_process() -> None:
    check(run_seeds(range(40), 1))


@pytest.mark.parametrize(("size", "count"), [(2, 8), pytest.param(3, 40, marks=pytest.mark.long)])
def test_sequences_on_ranks(ranks: Ranks, size: int, count: int) -> None:
    check(ranks(size).run(run_seeds, range(count), size)[0])


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_many_sequences_in_one_process(part: int) -> None:
    first = LONG_FROM + 1000 * part
    check(run_seeds(range(first, first + 1000), 1))


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("size", [2, 4])
def test_many_sequences_on_ranks(ranks: Ranks, size: int, part: int) -> None:
    first = LONG_FROM + 200 * part
    check(ranks(size).run(run_seeds, range(first, first + 200), size, timeout_s=540)[0])


@pytest.mark.long
@pytest.mark.parametrize("name", PLANTS)
def test_planted_faults_are_found(name: str) -> None:
    with planted(name):
        found = run_seeds(range(6000)).failures
    assert found
    assert run_again(found[0].seed, 1, found[0].kept) is None
