"""The optimizer away and back: the bits of a twin that never moves, no device memory, no loss."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
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
    TransferConfig,
)
from fsdp_offload.core.backend import copy_all
from fsdp_offload.link import HostRange
from fsdp_offload.link.block import StorageBlock
from fsdp_offload.pipeline.engine import Engine
from tests.away import model_away
from tests.helpers.compare import assert_same, bits
from tests.helpers.side_by_side import MATRICES, SHAPES, SMALL, two_groups
from tests.helpers.simulator import ADVERSARIES, StreamSimulator

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


def device_bytes(optimizer: HybridDeviceOptimizer) -> int:
    """Memory of everything that the optimizer keeps on the device."""
    found = {
        t.untyped_storage()._cdata: t for s in optimizer._reserved.engines for t in s.staging()
    }
    for record in optimizer._reserved.params:
        if record.lane == "resident":
            for cut in record.slices:
                for value in (*record.tensors.values(), *cut.state.values()):
                    if isinstance(value, Tensor) and value.untyped_storage().resizable():
                        found[value.untyped_storage()._cdata] = value
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


CASES = {
    "fp32-.5": (FP32, {"offload_fraction": 0.5}),
    "host": (FP32, {"update_on": "host"}),
    "bf16-mixed": (BF16, {"update_on": MIXED}),
    "int8-.5": (BF16, {"offload_fraction": 0.5, "moments": "int8"}),
}
MORE = {
    "fp32-0": (FP32, {"offload_fraction": 0.0}),
    "fp32-1": (FP32, {}),
    "fp16-mixed": (FP16, {"update_on": MIXED}),
    "bf16-resident": (BF16, {"offload_fraction": 0.0}),
}


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(c, marks=pytest.mark.long) for c in MORE)])
def test_bits_are_those_of_a_twin_that_never_moves(case: str, wait: bool) -> None:
    dtype, wrap = {**CASES, **MORE}[case]
    mine, away = build(dtype, **wrap)
    theirs, stays = build(dtype, **wrap)
    for index in range(6):
        step(mine, away, index)
        step(theirs, stays, index)
        if index % 2 == 0:
            before = away.statistics()
            handle = away.offload(wait=wait)
            assert away.is_away
            assert away.offload(wait=True).n_bytes == handle.n_bytes
            assert device_bytes(away) == 0
            statistics = away.statistics()
            assert statistics.device_state_bytes == statistics.staging_bytes == 0
            assert statistics.away_bytes >= before.device_state_bytes
            if index == 2:
                assert_same(away.state_dict()["state"], stays.state_dict()["state"])
            away.reload(wait=wait)
            away.reload(wait=wait)
            after = away.statistics()
            assert after.device_state_bytes == before.device_state_bytes
            assert after.staging_bytes == before.staging_bytes
            assert (after.away_bytes, after.is_away) == (0, False)
        assert_same(mine, theirs)
    assert_same(away.state_dict()["state"], stays.state_dict()["state"])


def muon(groups: Any) -> Muon:
    return Muon(groups, lr=0.02)


def adafactor(groups: Any) -> Adafactor:
    return Adafactor(groups, lr=0.02)


def momentum(groups: Any) -> SGD:
    return SGD(groups, lr=0.02, momentum=0.9, dampening=0.5)


@pytest.mark.parametrize("make", [muon, adafactor, momentum])
def test_other_optimizers(make: Any) -> None:
    """Adafactor's state stays unmanaged: it is made by the class, at the first step."""
    options: Any = {"make": make, "shapes": MATRICES, "offload_fraction": 0.0}
    mine, away = build(**options)
    theirs, stays = build(**options)
    away.offload()
    away.reload()
    for index in range(4):
        step(mine, away, index)
        step(theirs, stays, index)
        away.offload()
        assert_same(away.state_dict()["state"], stays.state_dict()["state"])
        for state in away.state.values():
            for value in state.values():
                assert not isinstance(value, Tensor) or value.untyped_storage().nbytes()
        away.reload()
        assert_same(mine, theirs)
    assert_same(away.state_dict()["state"], stays.state_dict()["state"])


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
    assert_same(mine, [nn.Parameter(b) for b in before])
    for parameter in mine:
        parameter.grad = torch.ones_like(parameter)
    with model_away(mine), pytest.raises(AwayError, match="the shard of"):
        away.step()
    away.step()


def test_what_is_done_to_the_state_while_away_comes_back() -> None:
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
    away.offload()
    away.state.clear()
    away.reload()
    step(mine, away, 2)
    assert max(float(state["step"]) for state in away.state.values()) == 1


@pytest.mark.parametrize(
    ("method", "error", "fails_at"),
    [("restore", DeviceMemoryError, 0), ("restore", DeviceMemoryError, 5), ("view", KeyError, 3)],
)
def test_a_move_that_fails(
    method: str, error: Any, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload leaves all in host memory, an offload on the device; a later call works."""
    mine, away = build(offload_fraction=0.5)
    theirs, stays = build(offload_fraction=0.5)
    step(mine, away, 0)
    step(theirs, stays, 0)
    is_reload = method == "restore"
    if is_reload:
        away.offload()
    calls, original = iter(range(100)), getattr(StorageBlock, method)

    def fail(self: StorageBlock) -> Any:
        if next(calls) == fails_at:
            raise torch.OutOfMemoryError("taken") if is_reload else KeyError
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(StorageBlock, method, fail)
        with pytest.raises(error):
            away.reload() if is_reload else away.offload()
    assert away.is_away is is_reload
    assert (device_bytes(away) == 0) is is_reload
    assert_same(away.state_dict()["state"], stays.state_dict()["state"])
    away.reload()
    for index in range(1, 3):
        step(mine, away, index)
        step(theirs, stays, index)
        away.offload()
        away.reload()
    assert_same(mine, theirs)
    assert_same(away.state_dict()["state"], stays.state_dict()["state"])


def test_host_memory_counts_against_the_budget_and_is_given_back() -> None:
    budget = TransferConfig(bucket_bytes="4KiB", host_threads=1, host_memory="35000B")
    mine, away = build(offload_fraction=0.5, transfer=budget)
    step(mine, away, 0)
    state = copy.deepcopy(away.state_dict())
    with pytest.raises(HostMemoryError, match="host_memory"):
        away.offload()
    assert not away.is_away
    assert torch.equal(away.state_dict()["state"][0]["exp_avg"], state["state"][0]["exp_avg"])
    away.close()  # it has the bound

    mine, away = build(offload_fraction=0.5)
    n_bytes = away.statistics().device_state_bytes
    away.offload()
    reserved = away.statistics().offload_reserved_bytes
    assert reserved >= n_bytes > 0
    away.reload()
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
    parameters, away = build(offload_fraction=0.5)
    model = nn.ParameterList(parameters)
    step(parameters, away, 1)
    phases = PhaseOffloader(model, away, grads="drop")
    away.offload()
    phases.offload()  # the optimizer was offloaded by itself, and is reloaded by itself
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


SMALL_BUCKETS = TransferConfig(bucket_bytes="4KiB", host_threads=1)


@pytest.mark.parametrize("dtype", [pytest.param(FP32, marks=pytest.mark.long), BF16])
def test_every_order_that_streams_allow_gives_the_same_bits(dtype: torch.dtype) -> None:
    wrap = {"update_on": MIXED, "transfer": SMALL_BUCKETS, "device_memory": "24000B"}
    expected, _ = simulated("immediate", True, dtype, wrap)
    for policy in ADVERSARIES:
        found, simulator = simulated(policy, False, dtype, wrap)
        assert not simulator.late_uses
        for index, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(bits(a), bits(b)), (policy, index)


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
    closes: bool, arenas: list[weakref.ref[HostRange]]
) -> None:
    mine, away = build(offload_fraction=0.5)
    step(mine, away, 1)
    away.offload(wait=False)
    held = [weakref.ref(t) for record in away._reserved.params for t in record.tensors.values()]
    assert len(arenas) == 2
    if closes:
        away.close()
        with pytest.raises(ClosedError):
            away.reload()
        with pytest.raises(ClosedError):
            away.offload()
    del away, mine
    gc.collect()
    assert all(ref() is None for ref in [*arenas, *held])
