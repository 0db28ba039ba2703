"""Where storages come to lie that are moved into a region one after the other, in rows.

With a torch that only resizes storages (its allocator modelled), and with one that swaps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_offload import storages
from fsdp_offload.errors import DeviceError, DeviceMemoryError
from fsdp_offload.moving import FixedAddressRegion, collect, settle_storages, settling
from fsdp_offload.moving.pages import HostPages
from fsdp_offload.storages import can_swap
from tests.pooling import (
    MIB,
    Block,
    Storage,
    allocator_in_place,
    region_in_place,
)

CPU = torch.device("cpu")
GIB = 1 << 30
SHARED = 20 * MIB + 4 * MIB  # the allocator's segment for less than 10 MiB, and of small ones


class Job:
    """A region, and storages that are moved there."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.allocator = allocator_in_place(patch)
        self.region, self.driver = region_in_place(patch)
        self.blocks: list[Any] = []

    def make(self, sizes: Sequence[int]) -> list[Any]:
        first = len(self.blocks)
        made = [Block(f"s{first + i}", Storage(self.allocator, n)) for i, n in enumerate(sizes)]
        self.blocks += made
        return made

    @property
    def payload_bytes(self) -> int:
        return sum(block.n_bytes for block in self.blocks)

    def check(self) -> None:
        """All lie in the region's memory, apart, where their seats say, and are the region's."""
        before = [block.storage.address for block in self.blocks]
        seats = settle_storages(self.blocks, self.region)
        assert [block.storage.address for block in self.blocks] == before
        stop = 0
        for block in sorted(self.blocks, key=lambda block: block.storage.address):
            address, seat = block.storage.address, seats[block]
            assert address >= stop
            assert address % 512 == 0
            stop = address + block.n_bytes
            assert address == seat.block.pages.address + seat.start
            assert seat.start + block.n_bytes <= seat.block.n_bytes
            assert storages.is_tied(block.storage)
        held = {id(block.storage) for block in self.blocks}
        assert {id(storage) for storage, _ in self.region._settled} == held
        assert len(self.region._settled) == len(held)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def mib(*sizes: float) -> list[int]:
    return [int(size * MIB) for size in sizes]


@pytest.mark.parametrize(
    "size", [1500, 400, 29, 14.5, 10, 6.8, 2.1, 1.001, 0.99, 0.75, 0.672, 0.3, 0.01]
)
def test_a_thousand_storages_take_hardly_more_than_they_are(job: Job, size: float) -> None:
    settle_storages(job.make(mib(size) * 1000), job.region)
    job.check()
    payload_bytes = job.payload_bytes
    if size <= 1:  # as many as fit into each of the allocator's segments
        in_segment = 2 * MIB // storages.block_bytes(mib(size)[0])
        payload_bytes = -(-1000 // in_segment) * 2 * MIB
    assert job.region.n_bytes <= 1.005 * payload_bytes + 4 * MIB
    ranges = [(b.pages.address, b.pages.address + b.n_bytes) for b in job.region.blocks()]
    for start, stop in job.allocator.segments:
        assert any(first <= start and stop <= last for first, last in ranges)
    assert max(job.driver.given) <= max(mib(size)[0] + 2 * MIB, 1.6 * GIB)


sizes_in_bytes = st.one_of(
    st.integers(1, 40 * MIB),
    st.integers(1, 3 * MIB),
    st.integers(1, 10).map(lambda n: n * MIB),
    st.sampled_from([1, 512, MIB, MIB + 1, 64 * MIB, 65 * MIB]),
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(sizes_in_bytes, max_size=60), st.lists(sizes_in_bytes, max_size=20))
def test_any_storages_in_two_calls(sizes: list[int], more: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settling, "ROOM_BYTES", 64 * MIB)
        job = Job(patch)
        for part in (sizes, more):
            settle_storages(job.make(part), job.region)
            job.check()
        ranges = len(job.region.blocks())
        small = [size for size in (*sizes, *more) if size <= MIB]
        assert job.region.n_bytes <= job.payload_bytes + 512 * len(job.blocks) + (
            2 * SHARED + 2 * MIB * ranges + sum(small)
        )
        inside = [block.storage.address for block in job.blocks]
        job.region.close()
        assert not job.region.blocks()
        for block, address in zip(job.blocks, inside, strict=True):
            assert block.storage.address != address
            assert not storages.is_tied(block.storage)


def test_later_storages_use_what_is_left(job: Job) -> None:
    for _ in range(6):
        settle_storages(job.make(mib(3, 0.2)), job.region)
    job.check()
    assert job.region.n_bytes == 22 * MIB


def assert_no_vain_memory(job: Job) -> None:
    used = {settling.find_seat(block.storage, job.region).block.key for block in job.blocks}
    assert used == {block.key for block in job.region.blocks()}


def test_an_allocator_that_does_not_cut(job: Job) -> None:
    """Rooms are taken in vain and given back; each storage is moved alone."""
    job.allocator.cuts = False
    settle_storages(job.make(mib(*[29] * 30, *[0.67, 0.3, 0.9] * 30)), job.region)
    assert job.driver.peak_bytes <= job.region.n_bytes
    settle_storages(job.make(mib(30 * 29, 0.1)), job.region)  # as much as a room was
    job.check()
    assert_no_vain_memory(job)


def test_an_allocator_that_rounds_up(job: Job) -> None:
    """None lies over another."""
    job.allocator.rounds = True
    settle_storages(job.make(mib(*[0.9] * 30, *[0.67, 0.3, 0.9] * 30)), job.region)
    job.check()
    assert_no_vain_memory(job)


def test_an_allocator_with_other_segments(job: Job) -> None:
    job.allocator.small_segment = 4 * MIB
    blocks = job.make(mib(*[29, 6.8] * 40, *[0.67, 0.3, 0.9] * 30))
    with pytest.raises(DeviceError, match="PYTORCH_ALLOC_CONF"):
        settle_storages(blocks, job.region)
    assert not any(storages.is_tied(block.storage) for block in blocks[80:])
    job.blocks = blocks[:80]
    job.check()
    assert_no_vain_memory(job)


def test_an_allocator_that_is_known_to_do_otherwise_is_not_asked(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storages, "cuts_segments", lambda device: False)
    settle_storages(job.make(mib(*[29] * 4)), job.region)
    job.check()
    assert job.driver.given == [30 * MIB] * 4


def test_where_memory_is_short_rows_are_halved(job: Job) -> None:
    job.driver.left_bytes = 300 * MIB
    settle_storages(job.make(mib(*[29] * 60, *[0.3] * 20)), job.region)
    job.check()
    assert job.region.n_bytes <= 1.03 * job.payload_bytes


def test_no_memory_leaves_the_rest_where_it_was(job: Job) -> None:
    blocks = job.make(mib(*[29] * 8, 400, *[0.3] * 20))
    first, rest = blocks[:8], blocks[8:]
    before = {block.key: block.storage.address for block in rest}
    settle_storages(first, job.region)
    job.driver.left_bytes = 0
    held = job.region.n_bytes
    with pytest.raises(DeviceMemoryError):
        settle_storages(blocks, job.region)
    assert job.region.n_bytes == held
    assert {block.key: block.storage.address for block in rest} == before
    assert not any(storages.is_tied(block.storage) for block in rest)
    job.driver.left_bytes = GIB
    settle_storages(blocks, job.region)
    job.check()


def test_an_error_midway_leaves_each_whole(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = job.make(mib(*[29] * 8, *[0.3] * 20))
    resize, left = Storage.resize_, [5]

    def fail(self: Storage, n_bytes: int) -> None:
        if not left[0]:
            raise RuntimeError("broken")
        left[0] -= 1
        resize(self, n_bytes)

    monkeypatch.setattr(Storage, "resize_", fail)
    for _ in range(4):
        left[0] = 5
        with pytest.raises(RuntimeError, match="broken"):
            settle_storages(blocks, job.region)
    left[0] = 100
    settle_storages(blocks, job.region)
    job.check()


def test_an_error_when_a_room_is_taken(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator may have cached the room: nothing is cut from it after it is given back."""
    blocks = job.make(mib(*[29] * 8, *[0.3] * 20))
    take = job.allocator.take_and_drop

    def fail(n_bytes: int, device: torch.device) -> int:
        take(n_bytes, device)
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(storages, "_allocate_and_drop", fail)
        with pytest.raises(RuntimeError, match="broken"):
            settle_storages(blocks, job.region)
    assert job.region.n_bytes == 0
    settle_storages(blocks, job.region)
    job.check()


# ---- a torch that swaps

swaps = pytest.mark.skipif(not can_swap(), reason="this torch cannot swap CPU storages")


@swaps
@pytest.mark.parametrize("n_bytes", [3, 4100, 70_000])
def test_swapped_storages_share_pages(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    monkeypatch.setattr(settling, "ROOM_BYTES", 1 << 18)
    region = FixedAddressRegion("seats", CPU)
    made = [torch.full((n_bytes,), i, dtype=torch.uint8) for i in range(100)]
    first = collect([(f"t{i}", t) for i, t in enumerate(made[:60])], CPU)
    settle_storages(first, region)
    settle_storages(collect([(f"t{i}", t) for i, t in enumerate(made)], CPU), region)
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(made))
    payload = sum(storages.block_bytes(n_bytes) for _ in made)
    assert payload <= region.n_bytes <= payload + 4096 * len(region.blocks())
    assert len(region.blocks()) <= 2 + payload // (1 << 17)
    region.pause()
    region.resume()
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(made))
    region.close()
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(made))


@swaps
def test_swapped_storages_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    region = FixedAddressRegion("seats", CPU)
    named = [(f"t{i}", torch.full((1 << 16,), i, dtype=torch.uint8)) for i in range(16)]
    init, most = HostPages.__init__, 1 << 18

    def short(self: HostPages, n_bytes: int, chunk_bytes: int) -> None:
        if n_bytes > most:
            raise torch.OutOfMemoryError("full")
        init(self, n_bytes, chunk_bytes)

    monkeypatch.setattr(HostPages, "__init__", short)
    settle_storages(collect(named, CPU), region)
    assert [block.n_bytes for block in region.blocks()] == [1 << 18] * 4
    most = 0
    blocks = collect([("late", torch.ones(1 << 10))], CPU)
    with pytest.raises(DeviceMemoryError):
        settle_storages(blocks, region)
    assert all(bool((tensor == i).all()) for i, (_, tensor) in enumerate(named))
