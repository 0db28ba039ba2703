"""Claims, moves and releases against lists of Python; gpu/test_stash.py compares the kernels."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from fsdp_offload import TransferConfig
from fsdp_offload.activations import pages as plain
from fsdp_offload.activations.pages import (
    INVALID,
    INVALID_ROWS,
    MOST_FAR,
    MOST_NEAR,
    OVERFLOWS,
    PagePool,
    PageTable,
)
from fsdp_offload.core.devices import CpuBackend
from fsdp_offload.link import HostRange
from tests.activations.moe import CPU

PAGE = 128
CAPACITY = 64


def make_pool(near: int, far: int = 0) -> PagePool:
    arena = None
    if far:
        arena = HostRange(far * PAGE, device=CPU, can_pin=False, transfer=TransferConfig())
    memory = torch.zeros(near * PAGE // 8, dtype=torch.int64)
    return PagePool(CpuBackend(CPU), PAGE, memory, plain, arena)


def table_of(pool: PagePool) -> PageTable:
    return pool.take_table(1 << 20, to_capture=False)


def ids(table: PageTable) -> list[int]:
    return table.pages[: int(table.record[8])].tolist()


def claim(pool: PagePool, table: PageTable, rows: int, row_bytes: tuple[int, ...]) -> None:
    plain.claim(pool, table, torch.tensor(rows), CAPACITY, row_bytes)


class Expected:
    """The stacks as lists."""

    def __init__(self, near: int, far: int) -> None:
        self.near, self.far = list(range(near)), [near + i for i in range(far)]

    def claim(self, rows: int, row_bytes: tuple[int, ...]) -> list[int]:
        count = sum(-(-rows * each // PAGE) for each in row_bytes) if 0 <= rows <= CAPACITY else 0
        if count > len(self.near) + len(self.far):
            return []
        n_far = max(0, count - len(self.near))
        found = [self.near.pop() for _ in range(count - n_far)]
        return found + [self.far.pop() for _ in range(n_far)]

    def release(self, pages: list[int], near: int) -> None:
        mine = [page for page in pages if page < near]
        self.near += reversed(mine)
        self.far += reversed(pages[len(mine) :])


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_claims_and_releases(seed: int) -> None:
    """No page twice, none lost, all or nothing; and the same pages as lists give."""
    choose = random.Random(seed)
    near, far = 40, (0, 25)[seed % 2]
    pool, expected = make_pool(near, far), Expected(near, far)
    live: list[tuple[PageTable, list[int]]] = []
    for _ in range(60):
        if live and choose.random() < 0.45:
            table, pages = live.pop(choose.randrange(len(live)))
            plain.release(pool, table)
            pool.give_table(table)
            expected.release(pages, near)
        else:
            rows = choose.choice([0, 1, 7, 8, 9, 33, CAPACITY, -1, CAPACITY + 1])
            row_bytes = tuple(choose.choice([16, 64, 144]) for _ in range(choose.randint(1, 8)))
            table = table_of(pool)
            claim(pool, table, rows, row_bytes)
            live.append((table, expected.claim(rows, row_bytes)))
        assert all(ids(table) == pages for table, pages in live)
        tops = pool.tops.tolist()
        assert pool.free[: tops[0]].tolist() == expected.near
        assert pool.free[near : near + tops[1]].tolist() == expected.far
    for table, _ in [*live, *live]:  # the second time nothing
        plain.release(pool, table)
    assert pool.tops.tolist() == [near, far]


def test_flags() -> None:
    pool = make_pool(4, 2)
    table, other = table_of(pool), table_of(pool)
    claim(pool, table, 40, (16,))  # 5 pages
    claim(pool, other, 16, (16,))  # 2: too many
    assert ids(other) == []
    assert pool.flags[[OVERFLOWS, INVALID, MOST_NEAR, MOST_FAR]].tolist() == [1, 0, 4, 1]
    claim(pool, other, -7, (16,))
    assert pool.flags[[INVALID, INVALID_ROWS]].tolist() == [1, -7]
    claim(pool, other, 8, (16,))
    assert len(ids(other)) == 1


def test_a_claim_releases_what_its_table_still_holds() -> None:
    """As in a graph whose forward is replayed again without its backward."""
    pool = make_pool(6)
    table = table_of(pool)
    for rows in (40, 48, 8, 48):
        claim(pool, table, rows, (16,))
        assert len(set(ids(table))) == -(-rows * 16 // PAGE)
        assert int(pool.tops.sum()) + len(ids(table)) == 6
    assert int(pool.flags[OVERFLOWS]) == 0


def words(rows: int, row_bytes: int) -> Tensor:
    return torch.randint(-(1 << 62), 1 << 62, (rows * row_bytes // 8,))


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, CAPACITY])
@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
def test_rows_come_back_and_nothing_else_is_written(rows: int, far: bool) -> None:
    pool, row_bytes = make_pool(1 if far else 400, 700), (16, 112, 16, 48, 32, 16, 16, 64)
    for _ in range(2):  # two groups, so that pages of one begin within the pool
        table = table_of(pool)
        claim(pool, table, rows, row_bytes)
        memory = [words(CAPACITY, each) for each in row_bytes]
        plain.move(pool, table, memory, row_bytes, out=True)
        back = [torch.full_like(each, -1) for each in memory]
        plain.move(pool, table, back, row_bytes, out=False)
        for mine, original, each in zip(back, memory, row_bytes, strict=True):
            end = rows * each // 8
            assert torch.equal(mine[:end], original[:end])
            assert bool((mine[end:] == -1).all())
        if not far:
            assert pool.near.any() or not rows
        claim(pool, table, rows, row_bytes[:1])


def test_an_overflow_moves_nothing() -> None:
    pool = make_pool(1)
    table = table_of(pool)
    claim(pool, table, CAPACITY, (64,))
    memory = words(CAPACITY, 64)
    plain.move(pool, table, [memory], (64,), out=True)
    assert not pool.near.any()
    before = memory.clone()
    plain.move(pool, table, [memory], (64,), out=False)
    assert torch.equal(memory, before)


def test_a_table_of_a_capture_is_used_once() -> None:
    pool = make_pool(4)
    pool.add_tables(1, 4)
    table = pool.take_table(4, to_capture=True)
    pool.give_table(table)
    assert not pool._tables_to_capture
    assert pool.take_table(4, to_capture=False) is not table
