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
    HybridDeviceOptimizer,
    LaneError,
    PhaseOffloader,
    TransferConfig,
)
from fsdp_offload.core.backend import copy_all
from fsdp_offload.link import HostRange
from tests.away import model_away, optimizer_alone
from tests.helpers.compare import assert_same, bits
from tests.helpers.lanes import in_lanes
from tests.helpers.side_by_side import MATRICES, SHAPES, SMALL, two_groups
from tests.helpers.simulator import ADVERSARIES, StreamSimulator

FP32, BF16 = torch.float32, torch.bfloat16
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
    return parameters, in_lanes(make(two_groups(parameters)), **wrap)


def step(parameters: list[nn.Parameter], optimizer: Optimizer, index: int) -> None:
    generator = torch.Generator().manual_seed(index)
    for position, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = gradient if (position + index) % 4 else None
    optimizer.step()


def device_bytes(optimizer: HybridDeviceOptimizer) -> int:
    """Memory of everything that the optimizer keeps on the device."""
    found = {t.untyped_storage()._cdata: t for t in optimizer._updates.reserved.engine.staging()}
    for record in optimizer._updates.reserved.params:
        if record.lane == "resident":
            for cut in record.slices:
                for value in (*record.tensors.values(), *cut.state.values()):
                    if isinstance(value, Tensor) and value.untyped_storage().resizable():
                        found[value.untyped_storage()._cdata] = value
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


CASES = {
    "fp32-.5": (FP32, {"offload_fraction": 0.5}),
    "bf16-mixed": (BF16, {"update_on": MIXED}),
    "fp16-mixed": (torch.float16, {"update_on": MIXED}),
    "int8-.5": (BF16, {"offload_fraction": 0.5, "moments": "int8"}),
}


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_a_twin_that_never_moves(case: str, wait: bool) -> None:
    dtype, wrap = CASES[case]
    mine, away = build(dtype, **wrap)
    theirs, stays = build(dtype, **wrap)
    phases = optimizer_alone(away)
    for index in range(6):
        step(mine, away, index)
        step(theirs, stays, index)
        if index % 2 == 0:
            before = away.statistics()
            handle = phases.offload(wait=wait)
            assert phases.is_away
            assert phases.offload(wait=True).n_bytes == handle.n_bytes
            assert device_bytes(away) == 0
            statistics = away.statistics()
            assert statistics.device_state_bytes == statistics.staging_bytes == 0
            assert statistics.is_away
            assert handle.n_bytes >= before.device_state_bytes
            if index == 2:
                assert_same(away.state_dict()["state"], stays.state_dict()["state"])
            phases.reload(wait=wait)
            phases.reload(wait=wait)
            after = away.statistics()
            assert after.device_state_bytes == before.device_state_bytes
            assert after.staging_bytes == before.staging_bytes
            assert not after.is_away
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
    phases = optimizer_alone(away)
    phases.offload()
    phases.reload()
    for index in range(4):
        step(mine, away, index)
        step(theirs, stays, index)
        phases.offload()
        assert_same(away.state_dict()["state"], stays.state_dict()["state"])
        for state in away.state.values():
            for value in state.values():
                assert not isinstance(value, Tensor) or value.untyped_storage().nbytes()
        phases.reload()
        assert_same(mine, theirs)
    assert_same(away.state_dict()["state"], stays.state_dict()["state"])


def test_state_of_a_tensor_subclass() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def made() -> tuple[nn.Parameter, HybridDeviceOptimizer]:
        parameter = nn.Parameter(TwoTensor(torch.arange(6.0), torch.ones(6)))
        return parameter, HybridDeviceOptimizer(momentum([{"params": [parameter]}]))

    (mine, away), (theirs, stays) = made(), made()
    phases = optimizer_alone(away)
    for index in range(3):
        for parameter, optimizer in ((mine, away), (theirs, stays)):
            parameter.grad = TwoTensor(torch.full((6,), 0.1 * index), torch.ones(6))
            optimizer.step()
        assert phases.offload().n_bytes == 48
        for name in ("a", "b"):
            buffers = [o.state[p]["momentum_buffer"] for p, o in ((mine, away), (theirs, stays))]
            assert_same(getattr(buffers[0], name), getattr(buffers[1], name), name)
        phases.reload()
        assert_same(mine.a, theirs.a, "parameter")


def test_use_while_away_is_refused_before_anything_is_touched() -> None:
    mine, away = build(offload_fraction=0.5)
    step(mine, away, 0)
    phases = optimizer_alone(away)
    phases.offload()
    before = [p.detach().clone() for p in mine]
    calls = []
    with pytest.raises(AwayError, match=r"step\(\).*reload\(\)"):
        away.step(lambda: calls.append(1))
    assert not calls
    groups = len(away.param_groups)
    with pytest.raises(AwayError, match="add_param_group"):
        away.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(away.param_groups) == groups
    for load in (away.resync, lambda: away.load_state_dict(away.state_dict())):
        with pytest.raises(AwayError, match=r"call reload\(\)"):
            load()
    phases.reload()
    assert_same(mine, [nn.Parameter(b) for b in before])
    for parameter in mine:
        parameter.grad = torch.ones_like(parameter)
    with model_away(mine), pytest.raises(AwayError, match="the shard of"):
        away.step()
    away.step()


def test_what_is_done_to_the_state_while_away_comes_back() -> None:
    mine, away = build(offload_fraction=0.5)
    step(mine, away, 1)
    phases = optimizer_alone(away)
    phases.offload()
    state = away.state
    state[mine[0]]["exp_avg"].fill_(3.0)
    state[mine[1]]["exp_avg"] = torch.full(SHAPES[1], 4.0)  # another object
    state[mine[0]]["step"].fill_(7.0)
    phases.reload()
    assert bool((away.state[mine[0]]["exp_avg"] == 3).all())
    assert bool((away.state[mine[1]]["exp_avg"] == 4).all())
    assert float(away.state[mine[0]]["step"]) == 7
    phases.offload()
    away.state.clear()
    phases.reload()
    step(mine, away, 2)
    assert max(float(state["step"]) for state in away.state.values()) == 1


def test_loads_of_weights_while_the_optimizer_is_away_are_refused() -> None:
    """The masters would have to follow."""
    model = nn.Linear(30, 30).bfloat16()
    away = HybridDeviceOptimizer(adamw(model.parameters()), model, offload_fraction=0.0)
    step(list(model.parameters()), away, 1)
    before = copy.deepcopy((model.state_dict(), away.state_dict()["state"]))
    phases = optimizer_alone(away)
    phases.offload()
    with pytest.raises(AwayError, match=r"call reload\(\)"):
        model.load_state_dict(before[0])
    phases.reload()
    after = model.state_dict(), away.state_dict()["state"]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    model.load_state_dict(before[0])


def test_a_failed_optimizer_is_not_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, away = build(offload_fraction=0.5)
    step(mine, away, 0)
    saved, phases = copy.deepcopy(away.state_dict()), optimizer_alone(away)

    def fail(*_: Any) -> None:
        raise ValueError("broken")

    with monkeypatch.context() as patch:
        patch.setattr("fsdp_offload.update.state.write", fail)
        with pytest.raises(LaneError):
            away.load_state_dict(saved)
    with pytest.raises(LaneError):
        phases.offload()
    away.load_state_dict(saved)
    phases.offload()
    phases.reload()
    step(mine, away, 1)


def test_the_optimizer_alone_goes_within_a_phase_of_all_of_it() -> None:
    """What one offloader has away, the other neither moves nor brings back."""
    parameters, away = build(offload_fraction=0.5)
    step(parameters, away, 1)
    both = PhaseOffloader(nn.ParameterList(parameters), away, grads="drop")
    alone = optimizer_alone(away)
    for outer, inner in ((alone, both), (both, alone)):
        outer.offload()
        inner.offload()
        inner.reload()
        with pytest.raises(AwayError):
            away.step()
        outer.reload()
        step(parameters, away, 2)


@pytest.mark.parametrize("make", [adamw, lambda p: HybridDeviceOptimizer(adamw(p))])
def test_the_model_is_used_while_its_optimizer_is_away(make: Any) -> None:
    model = nn.Linear(5, 3)
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = model.weight.grad
    phases = PhaseOffloader(model, optimizer, params="keep", grads="keep")
    expected = model(torch.ones(5))
    with phases.away():
        assert torch.equal(model(torch.ones(5)), expected)
        model(torch.ones(5)).sum().backward()
        with pytest.raises(AwayError, match=r"reload\(\) of its PhaseOffloader first"):
            optimizer.step()
    assert model.weight.grad is kept
    assert bool((kept == 2).all())
    optimizer.step()
    saves = PhaseOffloader(model, optimizer, params="keep", grads="save")
    with saves.away():
        with pytest.raises(AwayError, match="forward"):
            model(torch.ones(5))
        if isinstance(optimizer, HybridDeviceOptimizer):  # another one reads address 0
            with pytest.raises(AwayError, match=r"zero_grad\(set_to_none=False\)"):
                optimizer.zero_grad(set_to_none=False)
    assert bool((kept == 2).all())


# --------------------------------------------------------------------------- streams


def state_of(optimizer: HybridDeviceOptimizer) -> list[Tensor]:
    """Read at once, whatever is under way."""
    return [v.clone() for s in optimizer.state_dict()["state"].values() for v in s.values()]


def simulated(
    policy: str, wait: bool, wrap: dict[str, Any]
) -> tuple[list[Tensor], StreamSimulator]:
    with StreamSimulator(policy) as simulator:
        found: list[Tensor] = []
        parameters, optimizer = build(BF16, **wrap)
        phases = optimizer_alone(optimizer)
        current = simulator.current_stream()
        for index in range(4):
            generator = torch.Generator().manual_seed(index)
            for parameter in parameters:
                value = torch.randn(parameter.shape, generator=generator).bfloat16()
                parameter.grad = torch.zeros_like(value)
                current.launch(copy_all, [parameter.grad], [value])
            optimizer.step()
            if index != 2:
                phases.offload(wait=wait)
                found += state_of(optimizer) if index == 1 else []
                phases.reload(wait=wait)
                found += state_of(optimizer) if index == 3 else []
        current.synchronize()
        found += [p.detach().clone() for p in parameters]
        optimizer.close()
    return found, simulator


SMALL_BUCKETS = TransferConfig(bucket_bytes="4KiB", host_threads=1)


def test_every_order_that_streams_allow_gives_the_same_bits() -> None:
    wrap = {"update_on": MIXED, "transfer": SMALL_BUCKETS, "device_memory": "24000B"}
    expected, _ = simulated("immediate", True, wrap)
    for policy in ADVERSARIES:
        found, simulator = simulated(policy, False, wrap)
        assert not simulator.late_uses
        for index, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(bits(a), bits(b)), (policy, index)


# --------------------------------------------------------------------------- given back


@pytest.mark.parametrize("closes", [True, False])
def test_host_memory_goes_with_the_optimizer_even_while_it_is_away(
    closes: bool, arenas: list[weakref.ref[HostRange]]
) -> None:
    mine, away = build(offload_fraction=0.5)
    step(mine, away, 1)
    phases = optimizer_alone(away)
    phases.offload(wait=False)
    held = [
        weakref.ref(t) for record in away._updates.reserved.params for t in record.tensors.values()
    ]
    assert len(arenas) == 2
    if closes:
        away.close()
        phases.close()
        with pytest.raises(ClosedError):
            phases.offload()
    del away, mine, phases
    gc.collect()
    assert all(ref() is None for ref in [*arenas, *held])
