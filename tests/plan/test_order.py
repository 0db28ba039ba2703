"""The order of buckets: properties of a pure function."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_offload.plan.residency import (
    SlotUse,
    assumed_ready_ms,
    deadline_order,
    fetched_first,
    ring_size,
    slot_use,
)

TIMES = st.integers(0, 20).map(float)
Visit = tuple[float, int, float]
"""When it is ready, its rank, and its cost."""
VISITS = st.lists(
    st.tuples(TIMES, st.integers(-1, 5), st.integers(0, 4).map(float)),
    max_size=12,
)


def services(visits: list[Visit], order: tuple[int, ...]) -> list[tuple[float, float]]:
    """When the service of each position begins and ends, if the link never waits needlessly."""
    now_ms, found = 0.0, []
    for index in order:
        start = max(now_ms, visits[index][0])
        now_ms = start + visits[index][2]
        found.append((start, now_ms))
    return found


@given(VISITS)
def test_whenever_the_link_is_free_it_serves_the_most_urgent_job_that_is_ready(
    visits: list[Visit],
) -> None:
    ready_ms, ranks, costs_ms = ([visit[i] for visit in visits] for i in range(3))
    order = deadline_order(ready_ms, ranks, costs_ms)
    assert sorted(order) == list(range(len(visits)))
    free = 0.0
    for position, (start, end) in enumerate(services(visits, order)):
        waiting = order[position:]
        assert start == max(free, min(ready_ms[i] for i in waiting)), "needlessly idle"
        ready = [i for i in waiting if ready_ms[i] <= start]
        assert order[position] == min(ready, key=lambda i: (ranks[i], i))
        free = end


@given(st.permutations(range(9)), st.sets(st.integers(0, 8)), st.integers(0, 5))
def test_the_first_updates_are_of_what_was_fetched_ahead(
    order: list[int], staying: set[int], slots: int
) -> None:
    traveling = [index for index in order if index not in staying]
    ahead, rest = traveling[:slots], [index for index in order if index not in traveling[:slots]]

    assert fetched_first(order, staying, slots) == ahead + rest


@given(st.integers(0, 500), st.integers(1, 64))
def test_a_ring_is_gone_round_in_as_few_rounds_as_with_all_slots(buckets: int, most: int) -> None:
    size = ring_size(buckets, most)

    assert 1 <= size <= most
    assert size <= max(buckets, 1)
    rounds = -(-buckets // most)
    assert -(-buckets // size) == rounds
    assert rounds * size - buckets < max(rounds, 1) or buckets == 0, "too many slots are left out"
    assert size == 1 or (size - 1) * rounds < buckets, "a smaller ring would do"


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 40))
def test_a_slot_is_filled_again_when_its_bucket_has_passed_and_not_later(
    staying: list[bool], slots: int
) -> None:
    use = slot_use(staying, slots)
    travelling = [slot for slot in use.slots if slot is not None]

    assert [slot is None for slot in use.slots] == staying
    assert travelling == [i % slots for i in range(len(travelling))]

    def is_free(position: int, head: int) -> bool:
        slot = use.slots[position]
        return slot is None or slot not in use.slots[head:position]

    assert len(use.reach) == len(staying) + 1
    for head, reach in enumerate(use.reach):
        assert head < reach or head == len(staying)
        assert all(is_free(position, head) for position in range(head, reach))
        assert reach == len(staying) or not is_free(reach, head)


def test_where_all_stay_no_slot_is_needed() -> None:
    assert slot_use([True, True], 0) == SlotUse((None, None), (2, 2, 2))


@given(st.lists(st.integers(0, 1000).map(float), max_size=20), st.floats(0.1, 1e4))
def test_assumed_times_fall_from_the_whole_backward_on(sizes: list[float], total: float) -> None:
    ready = assumed_ready_ms(sizes, total)

    assert len(ready) == len(sizes)
    assert ready == sorted(ready, reverse=True)
    assert all(time >= -1e-9 * total for time in ready)
    if sum(sizes):
        assert ready[0] == pytest.approx(total)
        assert ready[-1] == pytest.approx(total * sizes[-1] / sum(sizes), abs=1e-9 * total)
