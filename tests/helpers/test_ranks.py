"""The rank pool: what it returns, how failures arrive, and that it recovers from each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import RankError, RankPool

# Some tests make pools of their own; all stay together on one xdist worker.
pytestmark = pytest.mark.ranks

Ranks = Callable[..., RankPool]


@pytest.fixture(scope="module")
def fragile() -> Iterator[RankPool]:
    """A pool for the tests that break it, so that the session's pools stay warm."""
    with RankPool(2) as pool:
        yield pool


def process_facts() -> tuple[int, int, float, float, str]:
    draw = torch.rand(()).item()
    return os.getpid(), torch.get_num_threads(), draw, torch.rand(()).item(), os.getcwd()


def test_ranks_are_kept_and_each_call_starts_from_the_same_state(ranks: Ranks) -> None:
    first = ranks(2).run(process_facts)
    second = ranks(2).run(process_facts)

    assert first == second
    assert len({pid for pid, *_ in first}) == 2
    assert os.getpid() not in {pid for pid, *_ in first}
    for _, threads, draw, next_draw, cwd in first:
        assert threads == 1
        assert draw != next_draw
        assert cwd == os.getcwd()
    assert len({draw for _, _, draw, *_ in first}) == 1


class Complaint(Exception):
    def __init__(self, first: int, second: int) -> None:  # such exceptions cannot be unpickled
        super().__init__(f"complaint {first} {second}")


def complain_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise Complaint(1, 2)
    dist.barrier()


def pid() -> int:
    return os.getpid()


def test_failing_rank_is_named_with_its_traceback(fragile: RankPool) -> None:
    before = fragile.run(pid)

    with pytest.raises(RankError, match="complaint 1 2") as caught:
        fragile.run(complain_on, 1)

    text = str(caught.value)
    assert text.startswith("rank 1 failed:\nTraceback")
    assert "in complain_on" in text
    assert "raise Complaint(1, 2)" in text
    # Rank 0 was left inside the barrier: both ranks are new now.
    assert not set(before) & set(fragile.run(pid))


def hang_on(rank: int) -> int:
    while dist.get_rank() == rank:
        time.sleep(0.05)
    return dist.get_rank()


def test_hung_rank_is_named_killed_and_replaced(fragile: RankPool) -> None:
    before = fragile.run(pid)

    with pytest.raises(RankError, match=r"ranks \[0\] did not answer in 3 s") as caught:
        fragile.run(hang_on, 0, timeout_s=3)

    assert "in hang_on" in str(caught.value)
    for old in before:
        assert not is_running(old)
    assert fragile.run(hang_on, -1) == [0, 1]


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def test_dead_rank_is_named_with_its_exit_code(fragile: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 failed:\nits process ended with exit code 7"):
        fragile.run(die_on, 1)

    assert len(fragile.run(pid)) == 2


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
