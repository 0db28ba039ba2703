"""The optimizer away and back: the bits of a twin that never leaves, no device memory, no loss."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from fsdp_offload import (
    AwayError,
    ClosedError,
    DeviceMemoryError,
    HostMemoryError,
    HybridDeviceOptimizer,
    LaneError,
    PhaseOffloader,
    PrecisionConfig,
    TransferConfig,
    checkpoint,
)
from fsdp_offload.core.backend import copy_all
from fsdp_offload.memory import HostArena, buffers, transfer
from fsdp_offload.memory.transfer import StorageBlock
from fsdp_offload.pipeline.engine import Engine
from fsdp_offload.testing import ADVERSARIES, StreamSimulator
from tests.away import model_away
from tests.helpers.side_by_side import MATRICES, SHAPES, SMALL, assert_same, bits, two_groups

pytestmark = pytest.mark.usefixtures("one_thread")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ALL = [True] * len(SHAPES)
MIXED = tuple(("resident", "streamed", "host")[i % 3] for i in range(len(SHAPES)))


def adamw(groups: Any) -> AdamW:
    return AdamW(groups, lr=0.02, weight_decay=0.1, fused=True)


def build(
    dtype: torch.dtype = FP32,
    make: Callable[..., Optimizer] = adamw,
    shapes: Any = SHAPES,
    **wrap: Any,
) -> tuple[list[nn.Parameter], HybridDeviceOptimizer]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    parameters = [nn.Parameter(value) for value in values]
    wrap.setdefault("transfer", SMALL)
    return parameters, HybridDeviceOptimizer(make(two_groups(parameters)), **wrap)


def step(parameters: list[nn.Parameter], optimizer: Optimizer, index: int) -> None:
    generator = torch.Generator().manual_seed(index)
    for position, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = gradient if (position + index) % 4 else None
    optimizer.step()


def check_same(mine: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert_same(a.detach(), b.detach(), f"parameter {index}")


def check_same_state(mine: HybridDeviceOptimizer, theirs: HybridDeviceOptimizer) -> None:
    a, b = mine.state_dict()["state"], theirs.state_dict()["state"]
    assert a.keys() == b.keys()
    for index in a:
        assert a[index].keys() == b[index].keys()
        for name in a[index]:
            assert_same(a[index][name], b[index][name], f"{name} of {index}")


def device_bytes(optimizer: HybridDeviceOptimizer) -> int:
    """Memory of everything that the optimizer keeps on the device."""
    found = {
        t.untyped_storage()._cdata: t for s in optimizer._reserved.engines for t in s.staging()
    }
    for record in optimizer._reserved.params:
        if record.lane == "resident":
            for piece in record.slices:
                for value in (*record.tensors.values(), *piece.state.values()):
                    if isinstance(value, Tensor) and value.untyped_storage().resizable():
                        found[value.untyped_storage()._cdata] = value
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


CASES = {
    "fp32-0": (FP32, {"offload_fraction": 0.0}),
    "fp32-.5": (FP32, {"offload_fraction": 0.5}),
    "fp32-1": (FP32, {}),
    "host": (FP32, {"update_on": "host"}),
    "bf16-mixed": (BF16, {"update_on": MIXED}),
    "fp16-mixed": (FP16, {"update_on": MIXED}),
    "bf16-resident": (BF16, {"offload_fraction": 0.0}),
    "int8-.5": (
        BF16,
        {"offload_fraction": 0.5, "precision": PrecisionConfig(moments="int8")},
    ),
}


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_a_twin_that_never_leaves(case: str, wait: bool) -> None:
    dtype, wrap = CASES[case]
    mine, away = build(dtype, **wrap)
    theirs, stays = build(dtype, **wrap)
    for index in range(6):
        step(mine, away, index)
        step(theirs, stays, index)
        if index % 2 == 0:
            before = away.statistics()
            trip = away.offload(wait=wait)
            assert away.is_away
            assert away.offload(wait=True).n_bytes == trip.n_bytes
            assert device_bytes(away) == 0
            statistics = away.statistics()
            assert statistics.device_state_bytes == statistics.staging_bytes == 0
            assert statistics.away_bytes >= before.device_state_bytes
            if index == 2:
                check_same_state(away, stays)
            away.reload(wait=wait)
            away.reload(wait=wait)
            assert not away.is_away
            after = away.statistics()
            assert after.device_state_bytes == before.device_state_bytes
            assert after.staging_bytes == before.staging_bytes
            assert (after.away_bytes, after.is_away) == (0, False)
        check_same(mine, theirs)
    check_same_state(away, stays)


def muon(groups: Any) -> Muon:
    return Muon(groups, lr=0.02)


def adafactor(groups: Any) -> Adafactor:
    return Adafactor(groups, lr=0.02)


def momentum(groups: Any) -> SGD:
    return SGD(groups, lr=0.02, momentum=0.9, dampening=0.5)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("make", [muon, adafactor, momentum])
def test_other_optimizers(make: Any, fraction: float) -> None:
    """Adafactor's state stays native: it is made by the class, at the first step."""
    options: Any = {"make": make, "shapes": MATRICES, "offload_fraction": fraction}
    mine, away = build(**options)
    theirs, stays = build(**options)
    away.offload()
    away.reload()
    for index in range(4):
        step(mine, away, index)
        step(theirs, stays, index)
        away.offload()
        check_same_state(away, stays)
        for state in away.state.values():
            for value in state.values():
                assert not isinstance(value, Tensor) or value.untyped_storage().nbytes()
        away.reload()
        check_same(mine, theirs)
    check_same_state(away, stays)


def test_state_of_a_tensor_subclass() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def made() -> tuple[nn.Parameter, HybridDeviceOptimizer]:
        parameter = nn.Parameter(TwoTensor(torch.arange(6.0), torch.ones(6)))
        return parameter, HybridDeviceOptimizer(momentum([{"params": [parameter]}]))

    (mine, away), (theirs, stays) = made(), made()
    for index in range(3):
        for parameter, optimizer in ((mine, away), (theirs, stays)):
            parameter.grad = TwoTensor(torch.full((6,), 0.1 * index), torch.ones(6))
            optimizer.step()
        away.offload()
        assert away.statistics().away_bytes == 48
        for name in ("a", "b"):
            buffers = [o.state[p]["momentum_buffer"] for p, o in ((mine, away), (theirs, stays))]
            assert_same(getattr(buffers[0], name), getattr(buffers[1], name), name)
        away.reload()
        assert_same(mine.a, theirs.a, "parameter")


def test_use_while_away_is_refused_before_anything_is_touched() -> None:
    mine, away = build(offload_fraction=0.5)
    step(mine, away, 0)
    away.offload()
    before = [p.detach().clone() for p in mine]
    calls = []
    with pytest.raises(AwayError, match=r"step\(\).*reload\(\)"):
        away.step(lambda: calls.append(1))
    assert not calls
    groups = len(away.param_groups)
    with pytest.raises(AwayError, match="add_param_group"):
        away.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(away.param_groups) == groups
    away.reload()
    check_same(mine, [nn.Parameter(b) for b in before])
    step(mine, away, 1)


def test_state_written_while_away_comes_back() -> None:
    mine, away = build(offload_fraction=0.5)
    step(mine, away, 1)
    away.offload()
    state = away.state
    state[mine[0]]["exp_avg"].fill_(3.0)
    state[mine[1]]["exp_avg"] = torch.full(SHAPES[1], 4.0)  # another object
    state[mine[0]]["step"].fill_(7.0)
    away.reload()
    assert bool((away.state[mine[0]]["exp_avg"] == 3).all())
    assert bool((away.state[mine[1]]["exp_avg"] == 4).all())
    assert float(away.state[mine[0]]["step"]) == 7


@pytest.mark.parametrize("fails_at", [0, 1, 2, 5, 9])
def test_no_device_memory_at_reload_leaves_all_in_host_memory(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, away = build(offload_fraction=0.5)
    theirs, stays = build(offload_fraction=0.5)
    step(mine, away, 0)
    step(theirs, stays, 0)
    away.offload()
    count = 0
    restore = StorageBlock.restore

    def fail(self: StorageBlock) -> None:
        nonlocal count
        count += 1
        if count == fails_at + 1:
            raise torch.OutOfMemoryError("taken by somebody else")
        restore(self)

    with monkeypatch.context() as patch:
        patch.setattr(StorageBlock, "restore", fail)
        with pytest.raises(DeviceMemoryError, match="taken by somebody else"):
            away.reload()
    assert away.is_away
    assert device_bytes(away) == 0
    check_same_state(away, stays)
    away.reload()
    step(mine, away, 1)
    step(theirs, stays, 1)
    check_same(mine, theirs)
    check_same_state(away, stays)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ZeroDivisionError])
@pytest.mark.parametrize(
    ("is_packed", "fails_at"), [(True, 1), (True, 2), (False, 1), (False, 2), (False, 6)]
)
def test_an_exception_while_it_leaves(
    is_packed: bool, error: Any, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it stays on the device."""
    mine, away = build(offload_fraction=0.5)
    theirs, stays = build(offload_fraction=0.5)
    step(mine, away, 0)
    step(theirs, stays, 0)
    away.reserve_offload()
    copied = itertools.count(1)

    def fail(targets: Any, sources: Any) -> None:
        if next(copied) == fails_at:
            raise error("broken")
        copy_all(targets, sources)

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "copy_all", fail)
        if not is_packed:
            patch.setattr(transfer, "PACK_BELOW_BYTES", 0)
        with pytest.raises(error):
            away.offload()
    assert not away.is_away
    check_same_state(away, stays)
    for index in range(1, 3):
        step(mine, away, index)
        step(theirs, stays, index)
        away.offload()
        away.reload()
    check_same(mine, theirs)
    check_same_state(away, stays)


def test_host_memory_counts_against_the_budget_and_is_given_back() -> None:
    budget = TransferConfig(bucket_bytes=4096, slots=2, host_threads=1, host_budget=35_000)
    mine, away = build(offload_fraction=0.5, transfer=budget)
    step(mine, away, 0)
    state = copy.deepcopy(away.state_dict())
    with pytest.raises(HostMemoryError, match="host_budget"):
        away.offload()
    assert not away.is_away
    assert torch.equal(away.state_dict()["state"][0]["exp_avg"], state["state"][0]["exp_avg"])

    mine, away = build(offload_fraction=0.5)
    away.reserve_offload()
    reserved = away.statistics().offload_reserved_bytes
    assert reserved >= away.statistics().device_state_bytes > 0
    for _ in range(3):
        away.offload()
        away.reload()
    assert away.statistics().offload_reserved_bytes == reserved
    away.offload()
    away.close()
    assert away.statistics().offload_reserved_bytes == 0


@pytest.mark.parametrize(
    "load",
    [
        lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
        lambda model, optimizer: optimizer.resync(),
        lambda model, optimizer: model.load_state_dict(model.state_dict()),
    ],
    ids=["optimizer", "resync", "model"],
)
def test_loads_while_away_are_refused(load: Any) -> None:
    """Of weights, too: the masters would have to follow."""
    model = nn.Linear(30, 30).bfloat16()
    away = HybridDeviceOptimizer(adamw(model.parameters()), model, offload_fraction=0.0)
    step(list(model.parameters()), away, 1)
    before = copy.deepcopy((model.state_dict(), away.state_dict()["state"]))
    away.offload()
    with pytest.raises(AwayError, match=r"reload\(\) first"):
        load(model, away)
    away.reload()
    after = model.state_dict(), away.state_dict()["state"]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    load(model, away)


def test_state_that_is_dropped_while_away_is_made_anew() -> None:
    mine, away = build(BF16, offload_fraction=0.5)
    step(mine, away, 1)
    away.offload()
    away.state.clear()
    away.reload()
    step(mine, away, 2)
    assert max(float(state["step"]) for state in away.state.values()) == 1


def test_a_failed_optimizer_is_not_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, away = build(offload_fraction=0.5)
    step(mine, away, 0)
    saved = copy.deepcopy(away.state_dict())

    def fail(*_: Any) -> None:
        raise ValueError("broken")

    with monkeypatch.context() as patch:
        patch.setattr("fsdp_offload.update.state.write", fail)
        with pytest.raises(LaneError):
            away.load_state_dict(saved)
    with pytest.raises(LaneError):
        away.offload()
    away.load_state_dict(saved)
    away.offload()
    away.reload()
    step(mine, away, 1)


def test_what_a_phase_offloader_has_away_is_its_own() -> None:
    model, away = net(offload_fraction=0.5)
    parameters = list(model.parameters())
    step(parameters, away, 1)
    phases = PhaseOffloader(model, away, grads="drop")
    away.offload()
    phases.offload()  # the optimizer has gone by itself, and comes back by itself
    phases.reload()
    with pytest.raises(AwayError):
        away.step()
    away.reload()
    step(parameters, away, 2)
    phases.offload()
    away.offload()
    with pytest.raises(AwayError, match="a PhaseOffloader has offloaded it"):
        away.reload()
    phases.reload()
    step(parameters, away, 3)


# --------------------------------------------------------------------------- beside the model


def test_step_while_the_model_is_away_is_refused() -> None:
    mine, optimizer = build(offload_fraction=0.5)
    step(mine, optimizer, 0)
    state = copy.deepcopy(optimizer.state_dict())
    for parameter in mine:
        parameter.grad = torch.ones_like(parameter)
    with model_away(mine), pytest.raises(AwayError, match="the shard of"):
        optimizer.step()
    after = optimizer.state_dict()
    assert torch.equal(bits(after["state"][0]["exp_avg"]), bits(state["state"][0]["exp_avg"]))
    optimizer.step()


# --------------------------------------------------------------------------- checkpoints


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(30, 30) for _ in range(6)])


def net(make: Callable[..., Optimizer] = adamw, **wrap: Any) -> tuple[Net, Any]:
    model = Net()
    wrap.setdefault("transfer", SMALL)
    groups = two_groups(list(model.parameters()))
    return model, HybridDeviceOptimizer(make(groups), model=model, **wrap)


def files_of(path: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in path.rglob("*.distcp")}


@pytest.mark.parametrize("make", [adamw, adafactor])
def test_checkpoints_while_away(make: Any, tmp_path: Path) -> None:
    """The bytes of a save on the device; loads while away arrive; an async save is not torn."""
    model, away = net(make, offload_fraction=0.5)
    parameters = list(model.parameters())
    step(parameters, away, 1)
    checkpoint.save(tmp_path / "here", model, away)
    expected = copy.deepcopy(away.state_dict())
    away.offload()
    checkpoint.save(tmp_path / "away", model, away)
    assert files_of(tmp_path / "away") == files_of(tmp_path / "here")
    away.reload()
    future = checkpoint.async_save(tmp_path / "async", model, away)
    away.offload()
    away.reload()
    step(parameters, away, 2)
    future.result()
    assert files_of(tmp_path / "async") == files_of(tmp_path / "here")
    other = net(make, offload_fraction=0.5)
    step(list(other[0].parameters()), other[1], 3)
    other[1].offload()
    with pytest.raises(AwayError):
        checkpoint.load(tmp_path / "away", *other)
    other[1].reload()
    checkpoint.load(tmp_path / "away", *other)
    found = other[1].state_dict()["state"]
    for index, state in expected["state"].items():
        for name, value in state.items():
            assert_same(found[index][name], value, f"{name} of {index}")


# --------------------------------------------------------------------------- streams


def state_of(optimizer: HybridDeviceOptimizer) -> list[Tensor]:
    """Read at once, whatever is under way."""
    return [v.clone() for s in optimizer.state_dict()["state"].values() for v in s.values()]


def simulated(
    policy: str, wait: bool, dtype: torch.dtype, wrap: dict[str, Any]
) -> tuple[list[Tensor], StreamSimulator]:
    with StreamSimulator(policy) as simulator:
        found: list[Tensor] = []
        parameters, optimizer = build(dtype, **wrap)
        current = simulator.current_stream()
        for index in range(4):
            generator = torch.Generator().manual_seed(index)
            for parameter in parameters:
                value = torch.randn(parameter.shape, generator=generator).to(dtype)
                parameter.grad = torch.zeros_like(value)
                current.launch(copy_all, [parameter.grad], [value])
            optimizer.step()
            if index != 2:
                optimizer.offload(wait=wait)
                found += state_of(optimizer) if index == 1 else []
                optimizer.reload(wait=wait)
                found += state_of(optimizer) if index == 3 else []
        current.synchronize()
        found += [p.detach().clone() for p in parameters]
        optimizer.close()
    return found, simulator


PREFETCHING = TransferConfig(bucket_bytes=4096, slots=2, host_threads=1, prefetch_bytes=8192)


@functools.cache
def in_order(dtype: torch.dtype, transfer: TransferConfig) -> list[Tensor]:
    return simulated("immediate", True, dtype, {"update_on": MIXED, "transfer": transfer})[0]


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("policy", ADVERSARIES)
def test_every_order_that_streams_allow_gives_the_same_bits(
    policy: str, dtype: torch.dtype
) -> None:
    wrap = {"update_on": MIXED, "transfer": PREFETCHING}
    expected = in_order(dtype, PREFETCHING)
    found, simulator = simulated(policy, False, dtype, wrap)
    assert not simulator.late_uses
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(bits(a), bits(b)), index


def test_a_step_that_does_not_follow_the_reload_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    wrap = {"offload_fraction": 0.0}
    expected, _ = simulated("immediate", True, FP32, wrap)
    monkeypatch.setattr(Engine, "follow", lambda self, *events: None)
    found, _ = simulated("lag:phase_in", False, FP32, wrap)
    same = (torch.equal(bits(a), bits(b)) for a, b in zip(found, expected, strict=True))
    assert not all(same)


# --------------------------------------------------------------------------- given back


@pytest.mark.parametrize("closes", [True, False])
def test_host_memory_goes_with_the_optimizer_even_while_it_is_away(
    closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[HostArena]] = []

    class Noted(HostArena):
        def __init__(self, *args: Any, **settings: Any) -> None:
            made.append(weakref.ref(self))
            super().__init__(*args, **settings)

    monkeypatch.setattr(buffers, "HostArena", Noted)
    mine, away = build(offload_fraction=0.5)
    step(mine, away, 1)
    away.offload(wait=False)
    held = [weakref.ref(t) for record in away.params for t in record.tensors.values()]
    assert made
    if closes:
        away.close()
        with pytest.raises(ClosedError):
            away.reload()
        with pytest.raises(ClosedError):
            away.offload()
    del away, mine
    gc.collect()
    assert all(ref() is None for ref in [*made, *held])
