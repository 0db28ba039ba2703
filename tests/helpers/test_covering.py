from __future__ import annotations

import itertools
from collections import Counter

from .covering import covering


def test_each_value_runs_by_default() -> None:
    cases = covering(itertools.product("abc", (1, 2), (len, None)))
    assert [case.values for case in cases] == [*itertools.product("abc", (1, 2), (len, None))]
    chosen = [case.values for case in cases if not case.marks]
    assert [set(values) for values in zip(*chosen, strict=True)] == [{*"abc"}, {1, 2}, {len, None}]
    assert len(chosen) == 3


def test_values_run_about_equally_often() -> None:
    cases = covering(itertools.product(range(9), "abc"))
    chosen = Counter(case.values[1] for case in cases if not case.marks)
    assert chosen == {"a": 3, "b": 3, "c": 3}
