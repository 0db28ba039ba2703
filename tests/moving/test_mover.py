"""Blocks out and back: bytes, objects, order, packing, failures."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdp_offload.config import TransferConfig
from fsdp_offload.device import CpuGateway
from fsdp_offload.moving import Mover, Places, StorageBlock, collect
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


def test_room_is_made_where_device_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ([(f"{n}{i}", torch.randn(300_000)) for i in range(3)] for n in "ab")
    before = [tensor.clone() for _, tensor in second]
    move = mover()
    coming = collect(second, CPU)
    move.out(coming).wait()
    leaving = move.out(collect(first, CPU))
    restore = StorageBlock.restore

    def short(block: StorageBlock, index: int) -> None:
        held = sum(t.untyped_storage().nbytes() for _, t in (*first, *second))
        if held + block.n_bytes > 3 * 1_200_000:
            raise torch.OutOfMemoryError("short")
        restore(block, index)

    monkeypatch.setattr(StorageBlock, "restore", short)
    with pytest.raises(torch.OutOfMemoryError):
        move.back(coming)
    assert not any(tensor.untyped_storage().nbytes() for _, tensor in second)
    move.back(coming, make_room=leaving.release_next).wait()
    assert all(torch.equal(t, old) for (_, t), old in zip(second, before, strict=True))
