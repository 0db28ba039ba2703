"""How many activations are moved: what the device waits for, and the most that is free."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_offload.plan.share import (
    ALLOWED_SHARE,
    Link,
    SavedBatch,
    choose_share,
    times_of,
    waits_ms,
)

MB = 10**6
LINK = Link(50.0, 50.0)  # 1 MB in 0.02 ms


def nested(count: int, n_bytes: int, every_ms: float, twice: float = 2.0) -> list[SavedBatch]:
    """A forward, and a backward of ``twice`` its time in opposite order."""
    middle = count * every_ms
    return [
        SavedBatch(n_bytes, i * every_ms, middle + (count - 1 - i) * every_ms * twice)
        for i in range(count)
    ]


def range_set(count: int) -> frozenset[int]:
    return frozenset(range(count))


def waits(batches: list[SavedBatch], moved: int, link: Link = LINK, room: int = 10**10) -> float:
    return waits_ms(batches, range_set(moved), 1000.0, link, room)


def test_a_quick_link_is_waited_for_by_nobody() -> None:
    batches = nested(10, 50 * MB, every_ms=2.0)  # 1 ms each
    assert waits(batches, 10) == 1  # for the last, whose backward comes at once
    assert waits(batches, 9) == waits(batches, 5) == 0


def test_a_slow_link_is_waited_for() -> None:
    batches = nested(10, 500 * MB, every_ms=2.0)  # 10 ms each: backward has 4 ms for one
    assert waits(batches, 10) == pytest.approx(14)  # the other seven are still on their way out
    # Copies out end at 10, 20, 30. Backward begins at 20: the third is still there, the second
    # comes back. The first comes when the third is needed, from 48 to 58; it is needed at 56.
    assert waits(batches, 3) == pytest.approx(58 - 56)


def test_what_is_still_on_its_way_out_is_not_waited_for() -> None:
    assert waits([SavedBatch(500 * MB, 0.0, 5.0)], 1) == 0


def test_what_is_held_for_copies_is_bounded() -> None:
    batches = nested(4, 50 * MB, every_ms=0.5, twice=100.0)
    assert waits(batches, 4, room=200 * MB) == 0
    assert waits(batches, 4, room=50 * MB) == pytest.approx(3 * (1 - 0.5))


def test_the_optimizer_comes_first() -> None:
    full = Link(50.0, 50.0, 50 * 1000 * MB, 0)  # 994 ms of it in backward, 6 in forward
    plan = choose_share(nested(4, 50 * MB, 2.0), 1000.0, full, host_bytes=10**9, inflight_bytes=0)
    assert not plan.moved
    assert "the optimizer takes 100% of it in forward, 0% in backward" in plan.explain()
    assert "wait for longer" in plan.explain()


@pytest.mark.parametrize(
    ("overlap", "busy_ms", "shares"),
    [
        ("backward", 60, (0.0, 0.3)),
        ("backward", 250, (0.5, 1.0)),
        ("forward", 60, (0.6, 0.0)),
        ("forward", 200, (1.0, 0.5)),
        ("forward", 900, (1.0, 1.0)),
    ],
)
def test_the_optimizer_begins_in_one_half(
    overlap: str, busy_ms: int, shares: tuple[float, float]
) -> None:
    link = Link(50.0, 25.0, busy_ms * 50 * MB, busy_ms * 25 * MB, overlap)
    assert link.shares(100.0, 200.0) == pytest.approx(shares)
    assert link.shares(0.0, 0.0) == (1.0, 1.0)


def test_host_memory_bounds_it_and_the_text_says_so() -> None:
    plan = choose_share(
        nested(4, 50 * MB, 2.0), 24.0, LINK, host_bytes=120 * MB, inflight_bytes=10**9
    )
    assert (plan.moved, plan.moved_bytes, plan.waits_ms) == ({0, 1}, 100 * MB, 0.0)
    assert plan.explain().splitlines() == [
        "moved: 2 of 4 batches, 0.09 of 0.19 GiB that could be",
        "link: 50.0 GB/s out, 50.0 back, both at once; "
        "the optimizer takes 0% of it in forward, 0% in backward",
        "waits for copies: 0.00 ms of an iteration of 24.0 ms, of which 0.25% are allowed",
        "no more, because host memory is full",
    ]


def test_waits_of_the_recorded_iteration_are_left_out() -> None:
    marks = [
        ("saved", 5, 1.0),
        ("wait", 5, 2.0),
        ("on", 5, 4.0),
        ("saved", 6, 5.0),
        ("needed", 6, 6.0),
        ("wait", 6, 6.0),
        ("on", 6, 9.0),
    ]
    batches, iteration_ms = times_of(marks, {5: 10, 6: 20}, 12.0)
    assert batches == [SavedBatch(10, 1.0, 7.0), SavedBatch(20, 3.0, 4.0)]
    assert iteration_ms == 7.0


def test_a_slow_link_is_filled_by_what_is_spread_over_the_forward() -> None:
    batches = nested(450, 67 * MB, every_ms=0.26)  # 1.34 ms each: a fifth has time in 117 ms
    plan = choose_share(batches, 351.0, LINK, host_bytes=10**11, inflight_bytes=512 * MB)
    assert 80 <= len(plan.moved) <= 100
    assert max(plan.moved) > 400


TIMES = st.floats(0, 100, allow_nan=False)
BATCHES = st.lists(
    st.tuples(st.integers(1, 600 * MB), TIMES, TIMES).map(
        lambda t: SavedBatch(t[0], min(t[1:]), max(t[1:]))
    ),
    max_size=12,
).map(lambda found: sorted(found, key=lambda each: each.saved_ms))
LINKS = st.builds(
    Link,
    st.floats(1, 100),
    st.floats(1, 100),
    st.integers(0, 10**10),
    st.integers(0, 10**10),
    st.sampled_from(["forward", "backward"]),
)


@given(BATCHES, LINKS, st.integers(0, 4 * 10**9), st.integers(0, 10**9))
def test_the_most_that_is_allowed(
    batches: list[SavedBatch], link: Link, host_bytes: int, room: int
) -> None:
    plan = choose_share(batches, 100.0, link, host_bytes=host_bytes, inflight_bytes=room)
    assert plan.waits_ms == waits_ms(batches, plan.moved, 100.0, link, room)
    assert plan.waits_ms <= ALLOWED_SHARE * 100.0
    for index, batch in enumerate(batches):  # none of those that stay could have gone, too
        before = {other for other in plan.moved if other < index}
        if index not in plan.moved:
            rest = host_bytes - sum(batches[other].n_bytes for other in before)
            waits = waits_ms(batches, before | {index}, 100.0, link, room)
            assert batch.n_bytes > rest or waits > ALLOWED_SHARE * 100.0
    assert plan.moved_bytes <= host_bytes
    assert plan.explain()


@given(BATCHES, LINKS, st.integers(0, 12))
def test_a_faster_link_finishes_a_copy_out_no_later(
    batches: list[SavedBatch], link: Link, moved: int
) -> None:
    """With all held that is on its way, nothing but copies back is waited for: once each."""
    moved = min(moved, len(batches))
    waited = waits_ms(batches, range_set(moved), 100.0, link, 10**12)
    forward_ms = max((each.saved_ms for each in batches), default=0.0)
    back = 1e6 * link.back_gbps * (1 - link.shares(forward_ms, 100.0 - forward_ms)[1])
    assert waited <= sum(b.n_bytes for b in batches[:moved]) / max(back, 1.0) * (1 + 1e-9) + 1e-9
