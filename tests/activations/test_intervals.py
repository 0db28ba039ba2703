"""Intervals: disjoint, first fit, and whole again when all are free."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fsdp_offload.activations.batches import Intervals

SIZE = 64


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_any_order(events: list[tuple[bool, int]]) -> None:
    found, taken, most = Intervals(SIZE), dict[int, int](), 0
    for is_taken, number in events:
        if is_taken:
            free = [all(not s <= at < e for s, e in taken.items()) for at in range(SIZE)]
            fits = [at for at in range(SIZE - number + 1) if all(free[at : at + number])]
            start = found.take(number)
            assert start == (fits[0] if fits else None)
            if start is not None:
                taken[start] = start + number
        elif taken:
            start = sorted(taken)[number % len(taken)]
            del taken[start]
            found.give(start)
        used = sum(end - start for start, end in taken.items())
        most = max(most, used)
        assert (found.used_bytes, found.most_used_bytes) == (used, most)
    for start in taken:
        found.give(start)
    assert found.take(SIZE) == 0


def test_no_bytes() -> None:
    assert Intervals(0).take(1) is None
