"""When an optimizer takes device memory, and how much: jobs that are played to the decision."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fsdp_offload.core.backend import AllocatorFigures
from fsdp_offload.core.config import GIB
from fsdp_offload.plan.residency import (
    AWAY_STEPS,
    FIRST_LOOK,
    FIRST_STEPS,
    MemoryWatch,
    margin_bytes,
)

TOTAL = 80 * GIB
FIRST_MARGIN, MARGIN = margin_bytes(TOTAL, 1), margin_bytes(TOTAL)
JOB = 40 * GIB
Curve = Callable[[int], float]


class Played:
    """torch's allocator on a device of 80 GiB, under a job and a :class:`MemoryWatch`.

    ``demand``, ``fragments`` and ``others`` give GiB by step: what the job has allocated at its
    peak, what is lost between that, and what other processes hold.
    """

    def __init__(self, demand: Curve, fragments: Curve, others: Curve) -> None:
        self.demand, self.fragments, self.others = demand, fragments, others
        self.watch, self.own, self.steps = MemoryWatch(), GIB, 0
        self.reserved = self.peak = self.retries = 0
        self.history: list[int] = []

    def figures(self) -> AllocatorFigures:
        return AllocatorFigures(self.reserved, self.peak, 0, self.retries)

    def step(self) -> None:
        self.steps = n = self.steps + 1
        limit = TOTAL - int(self.others(n) * GIB)
        allocated = int(self.demand(n) * GIB) + self.own
        assert allocated <= limit, f"out of memory in step {n}"
        wanted = allocated + int(self.fragments(n) * GIB)
        if wanted > limit:
            self.retries += 1  # cached memory goes to the driver
            self.reserved = allocated
        else:
            self.reserved = max(self.reserved, wanted)
        self.peak = max(self.peak, allocated)
        if self.watch.observe(n, self.figures(), self.own):
            free = max(0, limit - self.reserved)
            allowed = self.watch.decide(n, free, TOTAL, self.own)
            if allowed is not None and allowed != self.own:
                # Half of what the job has allocated at its peak is cached between steps.
                cached = max(0, self.reserved - self.own - int(self.demand(n) * GIB) // 2)
                self.reserved += max(0, allowed - self.own - cached)
                self.own = allowed
                self.watch.changed(n, self.figures())
        self.history.append(self.own)


def played(
    steps: int,
    demand: Curve = lambda n: JOB / GIB,
    fragments: Curve = lambda n: 0,
    others: Curve = lambda n: 0,
) -> Played:
    job = Played(demand, fragments, others)
    for _ in range(steps):
        job.step()
    return job


def after(job: Played, step: int) -> int:
    """What the optimizer had from that step on."""
    return job.history[step - 1]


def test_iterations_that_are_alike_settle_after_twelve() -> None:
    own = played(AWAY_STEPS + 1).history
    assert own[: FIRST_LOOK - 1] == [GIB] * (FIRST_LOOK - 1)
    assert set(own[FIRST_LOOK - 1 : FIRST_STEPS - 1]) == {TOTAL - JOB - FIRST_MARGIN}
    assert set(own[FIRST_STEPS - 1 :]) == {TOTAL - JOB - MARGIN}


@pytest.mark.parametrize("steps", [(4, 5, 8, 14, 20), (5, 9, 13, 14, 18, 27)])
def test_fragmentation_that_creeps_up_does_not_restart_the_wait(steps: tuple[int, ...]) -> None:
    """Each time by 0.6 GiB, as with expandable segments: all but that is taken after step 12."""
    job = played(100, fragments=lambda n: 0.6 * sum(n >= step for step in steps))
    rest = TOTAL - JOB - MARGIN - int(0.6 * len(steps) * GIB)
    assert job.retries == 0
    assert all(own >= 0.95 * rest for own in job.history[FIRST_STEPS - 1 :])
    assert job.history[30:] == [job.history[-1]] * 70


def test_fragmentation_that_just_came_leaves_twice_as_much_alone() -> None:
    job = played(20, fragments=lambda n: 2 * (n >= 11))
    assert after(job, 12) == TOTAL - JOB - 2 * GIB - 4 * GIB
    assert after(job, 20) == TOTAL - JOB - 2 * GIB - MARGIN


def test_growth_after_memory_was_given_back_counts_once() -> None:
    """The job does not find what was given back: each growth costs what it is, and no more."""
    watch, own, reserved = MemoryWatch(), 38 * GIB, 78 * GIB
    watch.observe(1, AllocatorFigures(reserved, reserved, 0, 0), own)
    for step in (20, 30, 41):
        reserved += 3 * GIB // 5
        assert watch.observe(step, AllocatorFigures(reserved, 78 * GIB, 0, 0), own)
        allowed = watch.decide(step, MARGIN + 78 * GIB - reserved, TOTAL, own)
        assert allowed == own - 3 * GIB // 5
        own = allowed
        watch.changed(step, AllocatorFigures(reserved, 78 * GIB, 0, 0))


def test_a_job_that_grows_keeps_the_first_margin_for_three_quarters_of_all_steps() -> None:
    grown = 1.5
    job = played(200, lambda n: JOB / GIB + grown * (n >= 40))
    rest = TOTAL - JOB - int(grown * GIB)
    assert after(job, 39) == TOTAL - JOB - MARGIN
    assert job.retries == 0
    assert {after(job, n) for n in range(40, 140)} == {rest - FIRST_MARGIN}
    # All that was given back is in the allocator; what the driver has counts for more.
    assert after(job, 200) >= rest - FIRST_MARGIN


@pytest.mark.parametrize(("grown", "rest"), [(0.25, GIB // 4 + MARGIN), (0.5, FIRST_MARGIN)])
def test_the_first_margin_holds_while_demand_grows(grown: float, rest: int) -> None:
    """So little more than 256 MiB is not worth giving anything back, either."""
    job = played(12, lambda n: JOB / GIB + grown * (n >= 6))
    assert job.own == TOTAL - JOB - rest


def test_what_is_taken_anew_is_no_growth() -> None:
    """In the iteration after a change the job finds its cached memory taken, and more is lost."""
    job = played(20, fragments=lambda n: 1.9 * (n >= 13))
    assert job.own >= TOTAL - JOB - MARGIN - int(1.9 * GIB)


def test_a_retry_halves_and_the_first_margin_comes_back() -> None:
    job = played(110, lambda n: 10, fragments=lambda n: 9 * (n == 30))
    rest = TOTAL - 10 * GIB
    assert job.retries == 1
    assert after(job, 29) == rest - MARGIN
    assert after(job, 30) == (rest - MARGIN) // 2
    for step, margin in ((111, FIRST_MARGIN), (131, MARGIN)):  # as if others had left
        job.watch.observe(step, job.figures(), job.own)
        assert job.watch.decide(step, 25 * GIB, TOTAL, job.own) == job.own + 25 * GIB - margin


def test_memory_that_another_process_takes_is_left_to_it() -> None:
    job = played(AWAY_STEPS, others=lambda n: 1.5 * (n > 20))
    assert after(job, AWAY_STEPS - 1) == TOTAL - JOB - MARGIN
    assert job.own == TOTAL - JOB - MARGIN - 3 * GIB // 2
