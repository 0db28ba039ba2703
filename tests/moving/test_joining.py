"""Storages that were allocated one by one get common rooms: bytes, segments, failures."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import AwayError, HybridDeviceOptimizer, PhaseOffloader
from fsdp_offload.config import TransferConfig
from fsdp_offload.device import use_gateway
from fsdp_offload.errors import DeviceMemoryError
from fsdp_offload.moving import Mover, Places, StorageBlock, collect, join
from fsdp_offload.phases import moves
from tests.caching import MIB, CachingModel, ModelGateway, storages_over

CPU = torch.device("cpu")


@pytest.fixture
def model() -> Iterator[CachingModel]:
    made = CachingModel()
    with storages_over(made), use_gateway(ModelGateway(made)):
        yield made


def layers() -> nn.ParameterList:
    """Eight of 11 MiB, which have segments of 12 MiB each, and a small one."""
    made = [torch.arange(i, 11 * MIB // 4 + i, dtype=torch.float32) for i in range(8)]
    return nn.ParameterList([nn.Parameter(t, False) for t in [*made, torch.ones(5)]])


def allocated(tensors: Any, model: CachingModel) -> list[StorageBlock]:
    blocks = collect([(f"t{i}", t.detach()) for i, t in enumerate(tensors)], CPU)
    assert all(block.address() for block in blocks)
    return blocks


def assert_same(found: nn.ParameterList) -> None:
    for parameter, old in zip(found, layers(), strict=True):
        assert torch.equal(parameter, old)


def test_storages_are_joined_a_room_at_a_time(model: CachingModel) -> None:
    net = layers()
    view, gateway = net[3].detach()[5:], ModelGateway(model)
    blocks, mover = allocated(net, model), Mover(gateway, Places(gateway, TransferConfig()))
    assert list(model.segments.values()) == [12 * MIB] * 8
    mover.reserve(blocks)
    most = [0]
    take = model._segment

    def watched(size: int) -> tuple[int, int]:
        found = take(size)
        most[0] = max(most[0], sum(model.segments.values()))
        return found

    model._segment = watched  # type: ignore[method-assign]
    join(blocks, mover, gateway)
    assert list(model.segments.values()) == [34 * MIB, 34 * MIB, 22 * MIB]
    assert most[0] == 8 * 12 * MIB + 34 * MIB  # one room beside
    assert_same(net)
    assert torch.equal(view, net[3][5:])
    taken = len(model.taken)
    join(blocks, mover, gateway)
    assert len(model.taken) == taken  # they lie together already


@pytest.fixture
def shared(model: CachingModel) -> tuple[list[Tensor], list[StorageBlock], Mover, ModelGateway]:
    """Eight of 12 MiB in four segments: shards are cut from those of whole parameters, where state
    comes to lie beside them."""
    for address in [model.malloc(24 * MIB) for _ in range(4)]:
        model.release(address)
    net, gateway = [torch.full((3 * MIB,), float(i)) for i in range(8)], ModelGateway(model)
    blocks, mover = allocated(net, model), Mover(gateway, Places(gateway, TransferConfig()))
    assert list(model.segments.values()) == [24 * MIB] * 4
    mover.reserve(blocks)
    return net, blocks, mover, gateway


def test_what_lies_in_segments_of_others_is_joined(model: CachingModel, shared: Any) -> None:
    net, blocks, mover, gateway = shared
    parameters, state = blocks[::2], blocks[1::2]  # one of each in every segment
    join(parameters, mover, gateway)
    join(state, mover, gateway)
    model.empty_cache()
    assert not model.free
    for some in (parameters, state):
        lie = sorted(block.address() for block in some)
        segments = {a for a, n in model.segments.items() for b in lie if a <= b < a + n}
        assert sum(model.segments[a] for a in segments) == 4 * 12 * MIB
    for value, tensor in enumerate(net):
        assert bool((tensor == value).all())


def test_what_is_cached_beside_others_is_room_after_all(
    model: CachingModel, shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver has nothing left when the room is lost: they come back to where they lay."""
    net, blocks, mover, gateway = shared
    model.capacity = 4 * 24 * MIB + 24 * MIB
    back, lost = mover.back, []

    def lose_the_room(members: Any, *, held: Any = None, **options: Any) -> Any:
        if held:
            held.clear()
            model.empty_cache()
            lost.append(model.malloc(24 * MIB))
            raise torch.OutOfMemoryError("somebody else took the room")
        return back(members, **options)

    monkeypatch.setattr(mover, "back", lose_the_room)
    with pytest.raises(torch.OutOfMemoryError, match="took the room"):
        join(blocks[::2], mover, gateway)
    assert len(lost) == 1
    assert all(block.is_present(0) for block in blocks)
    for value, tensor in enumerate(net):
        assert bool((tensor == value).all())


def test_segments_side_by_side_are_joined(model: CachingModel) -> None:
    """Addresses are those of one room already."""
    net, gateway = [torch.full((3 * MIB,), float(i)) for i in range(4)], ModelGateway(model)
    blocks, mover = allocated(net, model), Mover(gateway, Places(gateway, TransferConfig()))
    assert list(model.segments.values()) == [12 * MIB] * 4
    mover.reserve(blocks)
    join(blocks, mover, gateway)
    assert list(model.segments.values()) == [24 * MIB] * 2
    assert [float(t[0]) for t in net] == [0.0, 1.0, 2.0, 3.0]


def test_a_room_is_not_cut_from_what_is_cached(model: CachingModel) -> None:
    """What is left of it would keep the whole segment from the driver."""
    net, gateway = layers(), ModelGateway(model)
    blocks, mover = allocated(net, model), Mover(gateway, Places(gateway, TransferConfig()))
    mover.reserve(blocks)
    model.release(model.malloc(100 * MIB))
    join(blocks, mover, gateway)
    assert list(model.segments.values()) == [34 * MIB, 34 * MIB, 22 * MIB]
    assert_same(net)


def test_nor_from_what_is_cached_beside_others(model: CachingModel) -> None:
    """As where an earlier job has left segments, of which this one's storages take a part."""
    model.release(model.malloc(64 * MIB))
    net, gateway = [torch.full((3 * MIB,), float(i)) for i in range(4)], ModelGateway(model)
    blocks, mover = allocated(net, model), Mover(gateway, Places(gateway, TransferConfig()))
    assert model.segments == {min(model.segments): 64 * MIB}
    mover.reserve(blocks)
    parameters, state = blocks[:2], blocks[2:]
    join(parameters, mover, gateway)
    assert list(model.segments.values()) == [64 * MIB, 24 * MIB]
    join(state, mover, gateway)
    model.empty_cache()
    assert list(model.segments.values()) == [24 * MIB, 24 * MIB]
    assert not model.free
    assert all(bool((tensor == value).all()) for value, tensor in enumerate(net))


def test_without_a_room_beside_nothing_moves(model: CachingModel) -> None:
    net, gateway = layers(), ModelGateway(model)
    blocks, mover = allocated(net, model), Mover(gateway, Places(gateway, TransferConfig()))
    mover.reserve(blocks)
    model.capacity = 8 * 12 * MIB + 33 * MIB
    join(blocks, mover, gateway)
    assert list(model.segments.values()) == [12 * MIB] * 8
    model.capacity += MIB
    join(blocks, mover, gateway)
    assert len(model.segments) == 3


def test_staging_is_not_cut_from_the_room(model: CachingModel) -> None:
    small = [torch.zeros(400_000) for _ in range(6)]
    tensors, gateway = [*layers(), *small], ModelGateway(model)
    blocks, mover = allocated(tensors, model), Mover(gateway, Places(gateway, TransferConfig()))
    mover.reserve(blocks)
    join(blocks, mover, gateway)
    model.empty_cache()
    assert list(model.segments.values()) == [34 * MIB, 34 * MIB, 32 * MIB]
    assert not any(size > 3 * MIB for size in model.free.values())


def test_the_first_offload_finds_few_segments(model: CachingModel) -> None:
    net = layers()
    allocated(net, model)
    phases = PhaseOffloader(net)
    assert not phases.is_away
    assert len(model.segments) == 3
    for _ in range(2):
        phases.offload()
        assert not model.segments
        phases.reload()
        assert len(model.segments) == 3
        assert_same(net)
    assert phases.statistics().cycles == 2


def test_gradients_have_no_room(model: CachingModel) -> None:
    """They are dropped one by one, and what comes to lie there may stay."""
    net = layers()
    allocated(net, model)
    phases = PhaseOffloader(net, grads="save")
    for parameter in net:
        parameter.grad = torch.zeros_like(parameter)
    with phases.away():
        assert not model.segments
    assert sorted(model.segments.values()) == [12 * MIB] * 8 + [22 * MIB, 34 * MIB, 34 * MIB]


def test_kept_parameters_are_left_alone(model: CachingModel) -> None:
    net = layers()
    before = [block.address() for block in allocated(net, model)]
    PhaseOffloader(net, params="keep")
    assert [block.address() for block in allocated(net, model)] == before


def test_room_that_is_lost_in_the_middle_leaves_them_away(
    model: CachingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = layers()
    allocated(net, model)
    restored, restore = [0], StorageBlock.restore

    def taken_by_somebody(block: StorageBlock, index: int) -> None:
        restored[0] += 1
        if restored[0] > 4:
            raise torch.OutOfMemoryError("somebody else was faster")
        restore(block, index)

    with monkeypatch.context() as patch:
        patch.setattr(StorageBlock, "restore", taken_by_somebody)
        phases = PhaseOffloader(net)
    assert phases.is_away
    state: dict[str, Tensor] = copy.deepcopy(net.state_dict())
    for shown, old in zip(state.values(), layers(), strict=True):
        assert torch.equal(shown, old)
    with pytest.raises(AwayError):
        net.to(torch.float64)
    phases.reload()
    assert_same(net)
    with phases.away():
        assert not model.segments
    assert_same(net)


def test_an_error_leaves_all_present(model: CachingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    net = layers()
    allocated(net, model)
    back, calls = Mover.back, [0]

    def fail(*args: Any, **settings: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("broken")
        return back(*args, **settings)

    monkeypatch.setattr(Mover, "back", fail)
    with pytest.raises(RuntimeError, match="broken"):
        PhaseOffloader(net)
    assert calls[0] == 3
    assert_same(net)


# ---------------------------------------------------------------- an optimizer's own state


@pytest.fixture
def resident(model: CachingModel) -> HybridDeviceOptimizer:
    """State of two layers, of 11 MiB each, which has stepped; between it lies what stays."""
    net = nn.ParameterList([nn.Parameter(torch.zeros(11 * MIB // 4)) for _ in range(2)])
    for parameter in net:
        parameter.grad = torch.ones_like(parameter)
    optimizer = HybridDeviceOptimizer(torch.optim.Adam(net), model=net, offload_fraction=0.0)
    optimizer.step()
    for parameter, state in optimizer.state.items():
        allocated([state["exp_avg"], parameter, state["exp_avg_sq"]], model)
    assert list(model.segments.values()) == [12 * MIB] * 6
    return optimizer


def moments(optimizer: HybridDeviceOptimizer) -> list[Tensor]:
    return [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


def test_resident_state_is_joined_when_its_places_are_reserved(
    model: CachingModel, resident: HybridDeviceOptimizer
) -> None:
    before = [moment.clone() for moment in moments(resident)]
    resident.reserve_offload()
    assert not resident.is_away
    assert list(model.segments.values()) == [12 * MIB] * 2 + [22 * MIB] * 2
    for moment, old in zip(moments(resident), before, strict=True):
        assert torch.equal(moment, old)
    resident.offload()
    model.empty_cache()
    assert list(model.segments.values()) == [12 * MIB] * 2
    resident.reload()
    resident.step()
    assert float(moments(resident)[0][0]) == pytest.approx(0.19)


@pytest.mark.parametrize("error", [ZeroDivisionError, torch.OutOfMemoryError])
def test_after_an_error_in_that_its_state_is_present(
    resident: HybridDeviceOptimizer, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    back, calls = Mover.back, [0]

    def fail(*args: Any, **settings: Any) -> Any:
        calls[0] += 1
        if calls[0] <= 2:
            raise error
        return back(*args, **settings)

    monkeypatch.setattr(Mover, "back", fail)
    with pytest.raises(error) if error is ZeroDivisionError else contextlib.nullcontext():
        resident.reserve_offload()
    assert calls[0] > 2
    assert not resident.is_away
    assert float(moments(resident)[0][0]) == pytest.approx(0.1)
    resident.step()


def test_without_room_to_come_back_it_is_away(
    resident: HybridDeviceOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = Mover.back

    def nothing_left(*args: Any, **settings: Any) -> Any:
        raise torch.OutOfMemoryError("somebody else was faster")

    monkeypatch.setattr(Mover, "back", nothing_left)
    with pytest.raises(DeviceMemoryError):
        resident.reserve_offload()
    assert resident.is_away
    assert float(moments(resident)[0][0]) == pytest.approx(0.1)
    monkeypatch.setattr(Mover, "back", back)
    resident.reload()
    resident.step()
    assert float(moments(resident)[0][0]) == pytest.approx(0.19)


def test_updates_under_way_are_waited_for_before(
    model: CachingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    class Updating(torch.optim.SGD):
        def synchronize(self) -> None:
            order.append("synchronize")

    monkeypatch.setattr(moves, "join", lambda *args: order.append("join"))
    net = layers()
    PhaseOffloader(net, Updating(net.parameters(), lr=0.1))
    assert order == ["synchronize", "join", "join"]
