"""Blocks out and back: bytes, objects, order, packing, failures."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdp_offload.config import TransferConfig
from fsdp_offload.device import CpuGateway, copy_all
from fsdp_offload.moving import Block, FixedAddressRegion, Mover, Places, StorageBlock, collect
from fsdp_offload.moving import mover as mover_module
from fsdp_offload.testing import ADVERSARIES, StreamSimulator

CPU = torch.device("cpu")
NUMELS = (300_000, 5, 1, 0, 1 << 20, 77, 262_144, 262_143)


def tensors() -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(f"t{i}", torch.randn(n, generator=generator)) for i, n in enumerate(NUMELS)]


def mover(gateway: object | None = None) -> Mover:
    gateway = gateway or CpuGateway(CPU)
    return Mover(gateway, Places(gateway, TransferConfig()))  # type: ignore[arg-type]


def test_out_and_back_keep_objects_views_and_bits() -> None:
    named = tensors()
    before = [tensor.clone() for _, tensor in named]
    view = named[0][1][7:1000]
    blocks, move = collect(named, CPU), mover()
    assert len(blocks) == len(NUMELS) - 1  # not the empty one
    move.reserve(blocks)
    reserved = move.places.n_bytes
    for _ in range(3):
        trip = move.out(blocks)
        trip.wait()
        assert trip.n_bytes == sum(4 * n for n in NUMELS)
        assert all(tensor.untyped_storage().nbytes() == 0 for _, tensor in named)
        move.out(blocks).wait()  # nothing left to do
        move.back(blocks).wait()
        move.back(blocks).wait()
        for (_, tensor), old in zip(named, before, strict=True):
            assert torch.equal(tensor, old)
        assert torch.equal(view, before[0][7:1000])
    assert move.places.n_bytes == reserved < 1.01 * sum(4 * n for n in NUMELS)


class Halves:
    """A block of two pieces that keep their memory."""

    def __init__(self, memory: Tensor) -> None:
        self.key, self.n_bytes, self.memory = "halves", memory.numel(), memory
        self.pieces = ((0, 8), (8, memory.numel()))
        self.present = [True, True]

    def is_present(self, index: int) -> bool:
        return self.present[index]

    def view(self, index: int) -> Tensor:
        return self.memory[slice(*self.pieces[index])]

    def release(self, index: int) -> None:
        self.view(index).zero_()
        self.present[index] = False

    def restore(self, index: int) -> None:
        raise torch.OutOfMemoryError("no room")


def test_a_piece_that_never_left_stays_when_others_cannot_come_back() -> None:
    block, move = Halves(torch.full((64,), 7, dtype=torch.uint8)), mover()
    move.reserve([block])
    block.release(1)
    with pytest.raises(torch.OutOfMemoryError):
        move.back([block])
    assert block.present == [True, False]
    assert bool((block.view(0) == 7).all())


def test_a_storage_is_collected_once() -> None:
    weight = torch.randn(10)
    found = collect([("a", weight), ("b", weight[2:5]), ("c", weight.view(2, 5))], CPU)
    assert [block.key for block in found] == ["a"]


@pytest.mark.parametrize("policy", ADVERSARIES)
def test_copies_follow_and_precede_the_callers_work(policy: str) -> None:
    with StreamSimulator(policy) as simulator:
        a, b, out = torch.zeros(400_000), torch.zeros(50), torch.zeros(1)
        move = mover(simulator)
        blocks = collect([("a", a), ("b", b)], simulator.device)
        current = simulator.current_stream()
        current.launch(lambda x, y: (x.fill_(3), y.fill_(4), None)[-1], a, b)
        move.out(blocks).wait()
        trip = move.back(blocks)
        trip.follow(current)
        current.launch(lambda o, x, y: o.copy_(x.sum() + y.sum()), out, a, b)
        current.synchronize()
        assert float(out) == 3 * 400_000 + 4 * 50
        trip.wait()


class Full(StorageBlock):
    """There is no device memory for it, for now."""

    full = True

    def restore(self, index: int) -> None:
        if self.full:
            raise torch.OutOfMemoryError("full")
        super().restore(index)


def test_no_memory_on_the_way_back_leaves_all_in_place() -> None:
    named = tensors()
    before = [tensor.clone() for _, tensor in named]
    move = mover()
    blocks = collect(named, CPU)
    blocks[-1] = full = Full("last", blocks[-1].storage)
    move.out(blocks).wait()
    with pytest.raises(torch.OutOfMemoryError):
        move.back(blocks)
    assert all(tensor.untyped_storage().nbytes() == 0 for _, tensor in named)
    full.full = False
    move.back(blocks).wait()
    for (_, tensor), old in zip(named, before, strict=True):
        assert torch.equal(tensor, old)


def test_close_gives_memory_back() -> None:
    move = mover()
    move.reserve(collect(tensors(), CPU))
    assert move.places.n_bytes
    move.places.close()
    move.places.close()
    assert not move.places.n_bytes


# ---- trips in a row, packing, short memory


def add(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.add_(1)


def total(out: Tensor, tensors: list[Tensor]) -> None:
    out.copy_(torch.stack([tensor.double().sum() for tensor in tensors]).sum())


def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover_module, "PACK_BELOW_BYTES", 1 << 16)
    monkeypatch.setattr(mover_module, "PACK_BYTES", 1 << 13)
    monkeypatch.setattr(mover_module, "AHEAD_BYTES", 1 << 14)


def trips_in_a_row(policy: str, **skip: int) -> StreamSimulator:
    """Adds 1 to tensors between trips that nobody waits for; some travel while others return."""
    numels = (50_000, 900, 1000, 1000, 1001, 1000, 1000, 30_000)
    with StreamSimulator(policy, **skip) as simulator:
        current = simulator.current_stream()
        move = mover(simulator)  # first, so that policies know its streams by their numbers
        made = [torch.full((n,), 100.0 * i) for i, n in enumerate(numels)]
        region = FixedAddressRegion("r", CPU, chunk_bytes=1 << 14)
        made.append(region.empty(20_000, dtype=torch.float32).zero_())
        out = torch.zeros(1, dtype=torch.float64)
        named = [(f"t{i}", tensor) for i, tensor in enumerate(made)]
        blocks: list[Block] = [*collect(named, CPU), *region.blocks()]
        half = blocks[::2]
        for _ in range(2):
            current.launch(add, made)
            move.out(blocks)
            move.out(half)
            move.back(half)
            back = move.back(blocks)
            back.follow(current)
            current.launch(add, made)
            current.launch(total, out, made)
            move.out(blocks).wait()
            move.back(blocks)
            move.out(blocks).wait()
            move.back(blocks).follow(current)
        current.launch(total, out, made)
        current.synchronize()
        move.wait()
        simulator.synchronize()
    assert not simulator.late_uses
    values = zip(made, [*range(len(numels)), 0], strict=True)
    assert all(bool((tensor == 100 * i + 4).all()) for tensor, i in values)
    assert float(out) == sum(float(tensor.double().sum()) for tensor in made)
    return simulator


@pytest.mark.parametrize("policy", ADVERSARIES)
def test_trips_in_a_row_need_no_waits(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_packs(monkeypatch)
    trips_in_a_row(policy)


@pytest.mark.long
def test_every_kind_of_wait_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    small_packs(monkeypatch)
    log = trips_in_a_row("lazy").wait_log
    noticed = set()
    for index, kind in enumerate(log):
        for policy in ADVERSARIES if kind not in noticed else ():
            try:
                trips_in_a_row(policy, skip_wait=index)
            except AssertionError:
                noticed.add(kind)
                break
    assert noticed == set(log)


def test_the_copy_out_is_complete_before_what_stayed_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with StreamSimulator("lag:move_out") as simulator:
        tensor, move = torch.ones(1000), mover(simulator)
        blocks = collect([("t", tensor)], CPU)
        move.out(blocks)
        move.back(blocks).follow(simulator.current_stream())
        simulator.current_stream().launch(add, [tensor])
        simulator.synchronize()
        assert int(move.places.of(blocks[0]).view(torch.float32).sum()) == 1000
        assert int(tensor.sum()) == 2000


def test_packs_are_bounded_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    small_packs(monkeypatch)
    named = [(f"t{i}", torch.full((1000 + i % 2,), float(i))) for i in range(40)]
    gateway = CpuGateway(CPU)
    taken: list[int] = []
    monkeypatch.setattr(
        gateway, "allocate", lambda n: taken.append(n) or torch.empty(n, dtype=torch.uint8)
    )
    move = mover(gateway)
    blocks = collect(named, CPU)
    move.out(blocks).wait()
    move.back(blocks).wait()
    assert len(taken) == 4  # two buffers each way, however many packs
    assert max(taken) <= 1 << 13
    for value, (_, tensor) in enumerate(named):
        assert bool((tensor == value).all())


def test_kernels_that_pack_have_run_before_anything_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's first launch waits for all copies under way: CUDA loads it."""
    copied = list[set[torch.dtype]]()

    def copy(targets: list[Tensor], sources: list[Tensor]) -> None:
        copied.append({tensor.dtype for tensor in (*targets, *sources)})
        copy_all(targets, sources)

    monkeypatch.setattr(mover_module, "copy_all", copy)
    move, large = mover(), collect([("large", torch.zeros(1 << 20))], CPU)
    move.reserve(large)
    assert not copied, "nothing is packed"
    blocks = collect(tensors(), CPU)
    for _ in range(2):
        move.reserve(blocks)
        assert copied == [{torch.int64}, {torch.uint8}], "once"
    move.out(blocks).wait()
    move.back(blocks).wait()
    assert set().union(*copied) == {torch.int64, torch.uint8}


def test_without_room_for_those_kernels_blocks_leave_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(gateway: CpuGateway, n_bytes: int) -> Tensor:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(CpuGateway, "allocate", full)
    named, move = tensors(), mover()
    before = [tensor.clone() for _, tensor in named]
    blocks = collect(named, CPU)
    move.reserve(blocks)
    move.out(blocks).wait()
    move.back(blocks).wait()
    assert all(torch.equal(tensor, old) for (_, tensor), old in zip(named, before, strict=True))


def test_without_room_for_staging_blocks_travel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    named = tensors()
    before = [tensor.clone() for _, tensor in named]
    gateway = CpuGateway(CPU)

    def refuse(n_bytes: int) -> Tensor:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(gateway, "allocate", refuse)
    move, blocks = mover(gateway), collect(named, CPU)
    move.out(blocks).wait()
    move.back(blocks).wait()
    for (_, tensor), old in zip(named, before, strict=True):
        assert torch.equal(tensor, old)


def test_a_failed_way_back_releases_only_what_it_restored() -> None:
    named = tensors()
    before = [tensor.clone() for _, tensor in named]
    move, blocks = mover(), collect(named, CPU)
    blocks[-1] = full = Full("last", blocks[-1].storage)
    move.out(blocks).wait()
    move.back(blocks[:1]).wait()
    named[0][1].add_(1)  # newer than its place
    with pytest.raises(torch.OutOfMemoryError):
        move.back(blocks)
    assert torch.equal(named[0][1], before[0] + 1)
    full.full = False
    move.back(blocks).wait()
    assert torch.equal(named[0][1], before[0] + 1)
    assert torch.equal(named[7][1], before[7])


def test_what_leaves_makes_room_for_what_comes() -> None:
    """Device memory for one of two sets: the way back waits for pieces under way out."""
    with StreamSimulator("lazy") as simulator:
        move, room = mover(simulator), [0]

        class Counted(StorageBlock):
            def release(self, index: int) -> None:
                super().release(index)
                room[0] += 1

            def restore(self, index: int) -> None:
                if not room[0]:
                    raise torch.OutOfMemoryError("full")
                room[0] -= 1
                super().restore(index)

        made = [torch.full((1000,), float(i)) for i in range(8)]
        blocks = [Counted(f"t{i}", t.untyped_storage()) for i, t in enumerate(made)]
        inside, outside = blocks[:4], blocks[4:]
        for block in outside:
            move.out([block]).wait()
        room[0] = 0
        for _ in range(3):
            out, back = move.out(inside), move.back(outside)
            back.wait()
            out.wait()
            assert out.n_bytes == back.n_bytes == 4 * 4000
            inside, outside = outside, inside
        room[0] = 4
        move.back(blocks).wait()
        for value, tensor in enumerate(made):
            assert bool((tensor == value).all())


def test_memory_of_a_region_is_not_collected() -> None:
    made = FixedAddressRegion("r", CPU).empty(10)
    assert not collect([("a", made), ("b", made[2:])], CPU)


def test_without_a_copy_places_are_left_alone() -> None:
    named = tensors()
    move, blocks = mover(), collect(named, CPU)
    trip = move.drop(blocks)
    trip.wait()
    assert trip.n_bytes == sum(4 * n for n in NUMELS)
    assert not move.places.n_bytes
    assert all(tensor.untyped_storage().nbytes() == 0 for _, tensor in named)
    move.renew(blocks)
    assert all(t.untyped_storage().nbytes() == 4 * t.numel() for _, t in named)
