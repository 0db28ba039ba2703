"""The optimizer away and back: the bits of a twin that never leaves, no device memory, no loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from fsdp_offload import (
    AwayError,
    DeviceMemoryError,
    HostMemoryError,
    HybridDeviceOptimizer,
    LaneError,
    PrecisionConfig,
    TransferConfig,
    checkpoint,
)
from fsdp_offload.moving import StorageBlock, whereabouts
from fsdp_offload.testing import ADVERSARIES, StreamSimulator
from tests.twins import MATRICES, SHAPES, SMALL, Twins, assert_same, bits, two_groups

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
    found = {t.untyped_storage()._cdata: t for s in optimizer._segments for t in s.staging()}
    for record in optimizer._records:
        if record.lane == "resident":
            for piece in record.pieces:
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


@pytest.mark.parametrize("case", CASES)
def test_a_load_while_away_arrives_with_the_reload(case: str) -> None:
    dtype, wrap = CASES[case]
    source, other = build(dtype, **wrap)
    for index in range(3):
        step(source, other, index)
    saved = copy.deepcopy(other.state_dict())
    mine, away = build(dtype, **wrap)
    step(mine, away, 9)
    away.offload()
    with torch.no_grad():
        for target, value in zip(mine, source, strict=True):
            target.copy_(value)
    away.load_state_dict(saved)
    check_same_state(away, other)
    assert device_bytes(away) == 0
    away.reload()
    check_same_state(away, other)
    for index in range(3, 6):
        step(mine, away, index)
        step(source, other, index)
    check_same(mine, source)


def test_native_state_loaded_while_away_replaces_what_was_there() -> None:
    options: Any = {"make": adafactor, "shapes": MATRICES}
    source, other = build(**options)
    mine, away = build(**options)
    step(source, other, 0)
    for index in range(3):
        step(mine, away, index)
    away.offload()
    with torch.no_grad():
        for target, value in zip(mine, source, strict=True):
            target.copy_(value)
    away.load_state_dict(copy.deepcopy(other.state_dict()))
    away.reload()
    check_same_state(away, other)
    for index in range(3, 6):
        step(mine, away, index)
        step(source, other, index)
    check_same(mine, source)


def test_state_written_while_away_comes_back() -> None:
    mine, away = build(offload_fraction=0.5)
    step(mine, away, 1)
    away.offload()
    first = away.state[mine[0]]
    first["exp_avg"].fill_(3.0)
    away.state[mine[1]]["exp_avg"] = torch.full(SHAPES[1], 4.0)  # another object
    away.state[mine[0]]["step"].fill_(7.0)
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

    def fail(self: StorageBlock, index: int) -> None:
        nonlocal count
        count += 1
        if count == fails_at + 1:
            raise torch.OutOfMemoryError("taken by somebody else")
        restore(self, index)

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


@pytest.mark.parametrize("comes_back", [True, False])
def test_an_exception_while_it_leaves(comes_back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is whole on the device again, or, without room for that, whole in host memory."""
    mine, away = build(offload_fraction=0.5)
    theirs, stays = build(offload_fraction=0.5)
    step(mine, away, 0)
    step(theirs, stays, 0)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("fsdp_offload.moving.mover.Mover._pack", fail)
        if not comes_back:
            patch.setattr(StorageBlock, "restore", fail)
        with pytest.raises(DeviceMemoryError, match="no room"):
            away.offload()
    assert away.is_away is not comes_back
    check_same_state(away, stays)
    away.reload()
    step(mine, away, 1)
    step(theirs, stays, 1)
    check_same(mine, theirs)


def test_host_memory_counts_against_the_budget_and_is_given_back() -> None:
    budget = TransferConfig(bucket_bytes=4096, slots=2, host_threads=1, host_budget=35_000)
    mine, away = build(offload_fraction=0.5, transfer=budget)
    step(mine, away, 0)
    state = copy.deepcopy(away.state_dict())
    with pytest.raises(HostMemoryError, match="host_budget"):
        for _ in range(2):
            away.offload()
    assert not away.is_away
    check_same_state(away, away)
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
    assert away._absence.reserved_bytes == 0


def test_a_failed_optimizer_is_not_offloaded_and_can_be_reloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, away = build(offload_fraction=0.5)
    step(mine, away, 0)
    saved = copy.deepcopy(away.state_dict())
    away.offload()

    def fail(*_: Any) -> None:
        raise ValueError("broken")

    with monkeypatch.context() as patch:
        patch.setattr("fsdp_offload.pipeline.state.write", fail)
        with pytest.raises(LaneError):
            away.load_state_dict(saved)
    with pytest.raises(LaneError):
        away.offload()
    away.load_state_dict(saved)
    away.reload()
    step(mine, away, 1)
