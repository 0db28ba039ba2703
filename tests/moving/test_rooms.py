"""Rooms: how storages are divided, and what the allocator makes of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsdp_offload import storages
from fsdp_offload.config import TransferConfig
from fsdp_offload.moving import Mover, Places, StorageBlock, collect
from fsdp_offload.moving.rooms import Room, lay_out
from tests.caching import MIB, CachingModel, ModelGateway, storages_over

CPU = torch.device("cpu")


def test_rooms_are_of_about_equal_size_and_exact() -> None:
    rooms = lay_out([29 * MIB] * 430)
    assert [len(room.members) for room in rooms] == [34] * 12 + [22]
    assert [i for room in rooms for i in room.members] == list(range(430))
    assert all(room.n_bytes == 29 * MIB * len(room.members) for room in rooms)


def test_sizes_are_rounded_as_the_allocator_does() -> None:
    assert lay_out([7 * MIB + 1, 4 * MIB]) == [Room(11 * MIB + 512, (0, 1))]


def test_small_and_single_storages_have_no_room() -> None:
    sizes = [5, MIB, 2 * MIB, 1 << 30, 7 * MIB, 100, 4 * MIB, 3 << 30, 9 * MIB]
    assert lay_out(sizes) == [Room(11 * MIB, (4, 6))]
    assert lay_out([]) == lay_out([4 * MIB, 5 * MIB]) == []


def test_a_room_ends_where_its_segment_is_full() -> None:
    """Segments are multiples of 2 MiB: a rest of more than 1 MiB would be given to others."""
    sizes = [3 * MIB + MIB // 4] * 40  # 13 MiB for four of them; five would leave 1.75 MiB
    rooms = lay_out(sizes, 16 * MIB)
    assert all(storages.fills_segment(room.n_bytes) for room in rooms[:-1])


def test_a_short_end_joins_the_room_before() -> None:
    assert [len(r.members) for r in lay_out([10 * MIB] * 11, 50 * MIB)] == [4, 4, 3]
    assert [len(r.members) for r in lay_out([10 * MIB] * 13, 40 * MIB)] == [4, 4, 5]


sizes_in_bytes = st.one_of(
    st.integers(1, 40 * MIB),
    st.integers(1, 10).map(lambda n: n * MIB),
    st.sampled_from([1, 512, MIB, MIB + 1, 15 * MIB, 16 * MIB]),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(sizes_in_bytes, max_size=40))
def test_any_storages_lie_exactly_in_their_rooms(sizes: list[int]) -> None:
    rooms = lay_out(sizes, 16 * MIB)
    members = [i for room in rooms for i in room.members]
    assert members == sorted(set(members))
    first = {room.members[0]: room for room in rooms}
    room_of = {i: room for room in rooms for i in room.members}
    alone = [s for i, s in enumerate(sizes) if not storages.is_small(s) and i not in room_of]
    nothing_left = all(map(storages.fills_segment, [*(r.n_bytes for r in rooms), *alone]))
    model, starts, lies = CachingModel(), {}, []
    for index, size in enumerate(sizes):
        if storages.is_small(size):
            assert index not in room_of
            continue
        if room := first.get(index):
            assert room.n_bytes == sum(storages.block_bytes(sizes[i]) for i in room.members)
            assert 10 * MIB <= room.n_bytes < 2.75 * 16 * MIB
            starts[index] = model.malloc(room.n_bytes)
            model.release(starts[index])
        lies.append(model.malloc(size))
        if index in room_of and nothing_left:
            offset = lies[-1] - starts[room_of[index].members[0]]
            assert 0 <= offset <= room_of[index].n_bytes - size
    assert len(model.segments) <= len(rooms) + len(alone)
    if nothing_left:
        assert max(model.free.values(), default=0) <= MIB
    for address in lies:
        model.release(address)
    model.empty_cache()
    assert not model.segments


# ---------------------------------------------------------------------------- on the way back


def tensors() -> list[tuple[str, Tensor]]:
    """Eight of 11 MiB: alone each has a segment of 12 MiB, and three have a room of 33."""
    numel = 11 * MIB // 4
    return [(f"t{i}", torch.arange(i, numel + i, dtype=torch.float32)) for i in range(8)]


def moved(
    model: CachingModel, named: list[tuple[str, Tensor]] | None = None
) -> tuple[Mover, list[StorageBlock], list[tuple[str, Tensor]]]:
    """What has left: ``named``, or :func:`tensors`; the cache still holds their memory."""
    named, gateway = named or tensors(), ModelGateway(model)
    mover, blocks = Mover(gateway, Places(gateway, TransferConfig())), collect(named, CPU)
    mover.out(blocks).wait()
    return mover, blocks, named


def assert_same(named: list[tuple[str, Tensor]]) -> None:
    for (_, tensor), (_, old) in zip(named, tensors(), strict=True):
        assert torch.equal(tensor, old)


def test_what_comes_back_lies_in_few_segments() -> None:
    model = CachingModel()
    with storages_over(model):
        mover, blocks, named = moved(model)
        model.empty_cache()
        mover.back(blocks).wait()
        assert list(model.segments.values()) == [34 * MIB, 34 * MIB, 22 * MIB]
        assert not any(size > MIB for size in model.free.values())
        mover.out(blocks).wait()
        model.empty_cache()
        assert not model.segments
        mover.back(blocks, lasting=False).wait()
        assert len(model.segments) == 8
        assert_same(named)
        mover.out(blocks).wait()
        model.empty_cache()
        mover.renew(blocks)  # of any content
        assert len(model.segments) == 3


@pytest.mark.parametrize("is_renewed", [False, True])
def test_rooms_are_filled_although_smaller_blocks_are_cached(is_renewed: bool) -> None:
    """Beside others' memory, where what comes would be given back with that alone."""
    model = CachingModel()
    with storages_over(model):
        mover, blocks, named = moved(model)
        model.empty_cache()
        for address in [model.malloc(24 * MIB) for _ in range(8)]:
            model.release(address)
        for address in [model.malloc(12 * MIB) for _ in range(16)][::2]:
            model.release(address)
        beside = dict(model.segments)
        assert list(model.free.values()) == [12 * MIB] * 8
        for _ in range(2):
            (mover.renew if is_renewed else mover.back)(blocks)
            mover.wait()
            assert sorted(model.free.values())[-8:] == [12 * MIB] * 8  # as they were
            mover.out(blocks).wait()
            model.empty_cache()
            assert model.segments == beside
        model.capacity = sum(beside.values()) + 12 * MIB
        mover.back(blocks).wait()  # where there is no other room, there
        assert is_renewed or assert_same(named) is None


def test_staging_is_not_cut_from_a_room() -> None:
    model = CachingModel()
    with storages_over(model):
        mixed = [*tensors()[:6], *[(f"s{i}", torch.zeros(400_000)) for i in range(6)]]
        mover, blocks, _ = moved(model, mixed)
        model.empty_cache()
        mover.back(blocks).wait()
        lies = [block.address() for block in blocks]
        assert lies == sorted(lies)  # one after the other
        mover.out(blocks).wait()
        model.empty_cache()
        assert not model.segments


def test_without_memory_for_rooms_storages_come_back_one_by_one() -> None:
    model = CachingModel()
    with storages_over(model):
        mover, blocks, named = moved(model)
        model.empty_cache()
        model.capacity = 80 * MIB  # for two rooms and one storage
        with pytest.raises(torch.OutOfMemoryError):
            mover.back(blocks)
        assert all(tensor.untyped_storage().nbytes() == 0 for _, tensor in named)
        model.empty_cache()
        model.capacity = 8 * 12 * MIB
        for address in [model.malloc(12 * MIB) for _ in range(8)]:
            model.release(address)
        mover.back(blocks).wait()  # asking for a room would have emptied the cache
        assert list(model.segments.values()) == [12 * MIB] * 8
    assert_same(named)


def test_where_the_allocator_does_not_cut_rooms_are_taken_in_vain() -> None:
    model = CachingModel()
    with storages_over(model):
        mover, blocks, named = moved(model)
        model.empty_cache()
        model.cuts = False
        before = len(model.taken)
        mover.back(blocks).wait()
        assert model.taken[before:] == [34 * MIB, 34 * MIB, 22 * MIB, *[12 * MIB] * 8]
    assert_same(named)


def test_a_refused_room_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CachingModel()
    with storages_over(model):
        mover, blocks, named = moved(model)

        def refuse(n_bytes: int) -> Tensor:
            raise torch.OutOfMemoryError("another process was faster")

        monkeypatch.setattr(mover._gateway, "allocate", refuse)
        mover.back(blocks).wait()
    assert_same(named)
