from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fsdp_offload.core.config import GIB
from fsdp_offload.plan.residency import (
    AWAY_STEPS,
    LEAST_SLOTS,
    allowed_bytes,
    choose,
    choose_travelling,
    gradients_fit,
    margin_bytes,
    preferred_to_stay,
    spread,
)

SIZES = st.lists(st.integers(1, 1 << 28), max_size=40).map(lambda sizes: dict(enumerate(sizes)))


def taken(sizes: dict[int, int], slots: int, staying: frozenset[int]) -> int:
    return slots * max(sizes.values(), default=0) + sum(sizes[i] for i in staying)


@given(st.data(), SIZES, st.integers(0, 16 * GIB))
def test_no_more_is_taken_than_is_allowed_or_least(
    data: st.DataObject, sizes: dict[int, int], allowed: int
) -> None:
    preferred = data.draw(st.permutations(range(len(sizes))))
    slots, staying = choose(sizes, preferred, allowed)

    travelling = len(sizes) - len(staying)
    assert slots <= travelling
    assert slots >= min(3, travelling)
    least_bytes = min(LEAST_SLOTS, len(sizes)) * max(sizes.values(), default=0)
    assert taken(sizes, slots, staying) <= max(allowed, least_bytes)
    if allowed >= sum(sizes.values()):
        assert not travelling


@given(st.data(), SIZES, st.integers(0, 16 * GIB))
def test_what_stays_goes_on_to_where_nothing_changes(
    data: st.DataObject, sizes: dict[int, int], allowed: int
) -> None:
    _, first = choose(sizes, data.draw(st.permutations(range(len(sizes)))), allowed)
    preferred = data.draw(st.permutations(range(len(sizes))))  # the order has changed meanwhile
    _, again = choose(sizes, preferred, allowed, staying=first)
    assert again >= first


@given(st.data(), SIZES.filter(bool), st.integers(0, 16 * GIB), st.integers(0, 200))
def test_what_had_to_leave_stays_away_for_a_while(
    data: st.DataObject, sizes: dict[int, int], allowed: int, step: int
) -> None:
    left = data.draw(st.integers(0, len(sizes) - 1))
    away_until = {left: step + AWAY_STEPS}
    preferred = list(range(len(sizes)))
    for now in (step, step + AWAY_STEPS - 1):
        _, staying = choose(sizes, preferred, allowed, away_until=away_until, step=now)
        assert left not in staying
    later = step + AWAY_STEPS
    assert choose(sizes, preferred, allowed, away_until=away_until, step=later) == choose(
        sizes, preferred, allowed
    )


@given(
    st.integers(8 * GIB, 200 * GIB), st.integers(0, 200 * GIB), st.integers(0, 200 * GIB),
    st.integers(0, 200 * GIB), st.integers(0, 200 * GIB),
)  # fmt: skip
def test_what_is_allowed_leaves_the_margin_at_the_peak(
    total: int, free: int, reserved: int, job: int, own: int
) -> None:
    free = min(free, total)
    reserved = min(reserved, total - free)
    own = min(own, reserved)
    allowed = allowed_bytes(free, reserved, job, own, margin_bytes(total))
    if allowed > own:
        assert free - (allowed - own) >= margin_bytes(total)
        assert free + reserved - job - allowed >= margin_bytes(total)
    if free + reserved - job - own < margin_bytes(total):
        assert allowed < own or own == 0


@given(st.integers(0, 4 * GIB), st.integers(0, 60 * GIB), st.integers(0, 8 * GIB))
def test_what_was_given_back_once_is_not_asked_for_again(free: int, job: int, own: int) -> None:
    """It stays in the allocator: neither the driver's free memory nor what is reserved changes."""
    total, reserved = free + job + own, job + own
    allowed = allowed_bytes(free, reserved, job, own, margin_bytes(total))
    if allowed < own:
        assert allowed_bytes(free, reserved, job, allowed, margin_bytes(total)) == allowed


@given(st.integers(1, 600), st.integers(0, 600), st.integers(0, 600), st.integers(1, 600))
def test_however_many_stay_they_lie_evenly(count: int, stay: int, start: int, width: int) -> None:
    order = list(range(count, 0, -1))
    preferred = spread(order)
    assert sorted(preferred) == sorted(order)

    stay, window = min(stay, count), order[start : start + width]
    found = len(set(window) & set(preferred[:stay]))
    assert abs(found - len(window) * stay / count) < 4


@given(st.integers(0, 100), st.floats(0, 1))
def test_a_share_of_the_first_is_preferred_and_the_rest_spread(count: int, first: float) -> None:
    order = list(range(count, 0, -1))
    ahead = round(first * count)
    assert preferred_to_stay(order, first) == order[:ahead] + spread(order[ahead:])


def test_the_preferred_stay_first() -> None:
    assert choose(dict.fromkeys(range(8), 10), [5, 3, 1, 0, 2, 4, 6, 7], 70) == (
        3,
        {5, 3, 1},
    )  # two rounds of five
    assert choose(dict.fromkeys(range(8), 10), [5, 3, 1, 0, 2, 4, 6, 7], 80) == (0, set(range(8)))
    assert choose({}, [], 60) == (0, frozenset())


def test_weights_stay_as_far_as_device_memory_goes_beside_slots() -> None:
    sizes = [3, 0, 5, 4, 3]
    assert choose_travelling(sizes, 15, 3) == set()  # no slots are needed
    assert choose_travelling(sizes, 14, 3) == {0, 2, 3, 4}  # they take 15
    for allowed in range(14):
        leaving = choose_travelling(sizes, allowed, 1)
        kept = sum(size for i, size in enumerate(sizes) if i not in leaving)
        assert 1 not in leaving
        assert kept <= max(allowed - 5, 0)
        assert all(kept + sizes[i] > allowed - 5 for i in leaving)
    assert choose_travelling([], 0, 3) == set()


def test_a_large_group_stays_rather_than_making_all_slots_large() -> None:
    blocks = [4 * GIB] * 30
    # Less than three slots of 21 GiB.
    assert choose_travelling([21 * GIB, *blocks], 0, 3) == set(range(1, 31))
    assert len(choose_travelling([21 * GIB, *blocks], (21 + 3 * 4 + 8) * GIB, 3)) == 28
    # More than three slots of 5 GiB.
    assert choose_travelling([5 * GIB, *blocks], 0, 3) == set(range(31))
    # Three slots of 42 bytes are no memory to speak of.
    assert choose_travelling([42, 8, 8, 8], 0, 3) == set(range(4))


def test_gradients_stay_where_everything_fits() -> None:
    assert gradients_fit(12, 2, 16, 80)
    assert not gradients_fit(12, 2, 15, 80)
    assert gradients_fit(240, 20, None, 80)  # state leaves first
    assert not gradients_fit(240, 21, None, 80)
