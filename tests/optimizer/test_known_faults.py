"""Faults that other offload optimizers have or had, one test each: none of them is here."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
)

from fsdp_offload import HybridDeviceOptimizer
from fsdp_offload.core import devices
from fsdp_offload.core.devices import CpuBackend
from fsdp_offload.link import HostRange, host_pool
from fsdp_offload.update.codec import decode_plain
from tests.helpers import training
from tests.helpers.compare import assert_same
from tests.helpers.simulator import ADVERSARIES, StreamSimulator, use_backend
from tests.helpers.training import LANES, fill_gradients, values, wrap

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((40, 50), (130,), ())
each_lane_and_dtype = pytest.mark.parametrize(
    ("lane", "dtype"), [*zip(LANES, DTYPES, strict=True)], ids=str
)


class Model(training.Model):
    """Three parameters, one of which spans several buckets of 4 KiB."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__(seed, SHAPES, dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    training.train(model, optimizer, steps)
    optimizer.zero_grad()


def state_of(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    return copy.deepcopy(optimizer.state_dict()["state"])


# --------------------------------------------------------------------------- gradients


@each_lane_and_dtype
def test_a_gradient_of_an_earlier_step_is_not_applied_when_there_is_none(
    lane: str, dtype: torch.dtype
) -> None:
    model = Model(dtype)
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.1), lane)
    train(model, optimizer, range(2))
    before, state = values(model), state_of(optimizer)
    fill_gradients(model, 2)
    model.weights[0].grad = None  # all of its buckets
    model.weights[2].grad = None  # a part of a bucket
    optimizer.step()

    after, new_state = values(model), state_of(optimizer)
    for index, unused in enumerate((True, False, True)):
        assert torch.equal(after[index], before[index]) is unused
        assert float(new_state[index]["step"]) == (2 if unused else 3)
        if unused:
            assert_same(new_state[index], state[index])


# --------------------------------------------------------------------------- weights from outside


def write_by_hand(model: nn.Module, optimizer: HybridDeviceOptimizer, new: list[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), new, strict=True):
        parameter.data.copy_(value)


def load_module(model: nn.Module, optimizer: HybridDeviceOptimizer, new: list[Tensor]) -> None:
    names = [name for name, _ in model.named_parameters()]
    model.load_state_dict(dict(zip(names, new, strict=True)))


def write_and_resync(model: nn.Module, optimizer: HybridDeviceOptimizer, new: list[Tensor]) -> None:
    write_by_hand(model, optimizer, new)
    optimizer.resync()


WRITES = pytest.mark.parametrize("write", [write_by_hand, load_module, write_and_resync])


def partly_new(model: nn.Module) -> list[Tensor]:
    """Every other element is another value, the rest stay what they are."""
    changed = values(Model(next(model.parameters()).dtype, seed=5))
    for new, old in zip(changed, values(model), strict=True):
        new.reshape(-1)[1::2] = old.reshape(-1)[1::2]
    return changed


@each_lane_and_dtype
@WRITES
def test_weights_loaded_from_outside_are_not_reverted_by_a_stale_master(
    lane: str, dtype: torch.dtype, write: Callable[..., None]
) -> None:
    model = Model(dtype)
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.1), lane, model=model)
    train(model, optimizer, range(3))
    new = partly_new(model)
    write(model, optimizer, new)
    optimizer.param_groups[0]["lr"] = 0.0  # an update that changes nothing
    train(model, optimizer, range(3, 5))

    assert_same(values(model), new)


@pytest.mark.parametrize(
    ("lane", "dtype", "half_step"),
    [
        ("streamed", torch.bfloat16, 2**-8),
        ("host", torch.bfloat16, 2**-8),
        ("host", torch.float16, 2**-11),
        ("streamed", torch.float16, 2**-11),
    ],
    ids=str,
)
def test_the_master_of_a_weight_written_by_hand_is_within_half_a_step_of_its_dtype(
    lane: str, dtype: torch.dtype, half_step: float
) -> None:
    """Where values are compared (fp16) the master of a changed weight is exact."""
    model = Model(dtype)
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.1), lane)
    train(model, optimizer, range(3))
    old, new = values(model), partly_new(model)
    write_by_hand(model, optimizer, new)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, range(3, 4))

    for parameter, before, weight in zip(model.parameters(), old, new, strict=True):
        state, wanted = optimizer.state[parameter], weight.float()
        master = state.get("master")
        if master is None:
            master = torch.empty_like(wanted).view(-1)
            decode_plain(weight.view(-1), state["master_remainder"].view(-1), master)
            master = master.view(wanted.shape)
        else:
            changed = weight != before
            assert torch.equal(master[changed], wanted[changed])
        assert ((master - wanted).abs() <= wanted.abs() * half_step).all()


@each_lane_and_dtype
def test_torchs_get_optimizer_state_dict_runs_no_random_dummy_step(
    lane: str, dtype: torch.dtype
) -> None:
    model = Model(dtype)
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.1), lane, model=model)
    before, random_state = values(model), torch.get_rng_state()
    found = get_optimizer_state_dict(model, optimizer)

    assert_same(values(model), before)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert optimizer.statistics().steps == 0
    assert set(found["state"]) == {f"weights.{i}" for i in range(3)}
    for state in found["state"].values():
        assert float(state["step"]) == 0
        assert not state["exp_avg"].any()


@pytest.mark.parametrize(
    ("lane", "dtype"), [("streamed", torch.bfloat16), ("host", torch.float16)], ids=str
)
def test_load_state_dict_does_not_cast_state_to_the_parameters_dtype(
    lane: str, dtype: torch.dtype
) -> None:
    fp32 = Model()
    plain = torch.optim.AdamW(fp32.parameters(), lr=0.1)
    train(fp32, plain, range(2))
    model = Model(dtype)
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.1), lane)
    addresses = [s["exp_avg"].data_ptr() for s in optimizer.state.values()]
    optimizer.load_state_dict(plain.state_dict())

    for parameter, mine in zip(fp32.parameters(), optimizer.state.values(), strict=True):
        for name, wanted in plain.state[parameter].items():
            assert mine[name].dtype == torch.float32
            assert torch.equal(mine[name], wanted)
    assert [s["exp_avg"].data_ptr() for s in optimizer.state.values()] == addresses


# --------------------------------------------------------------------------- memory


@pytest.mark.parametrize("lane", LANES)
def test_state_is_not_held_twice_when_a_stepped_optimizer_is_wrapped(lane: str) -> None:
    model = Model()
    inner = torch.optim.AdamW(model.parameters())
    train(model, inner, range(1))
    old = [weakref.ref(t) for s in inner.state.values() for t in s.values() if t.dim()]
    assert len(old) == 4
    optimizer = wrap(inner, lane)
    gc.collect()

    assert [reference() for reference in old] == [None] * 4
    assert inner.state is optimizer.state
    statistics = optimizer.statistics()
    payload = sum(p.numel() * 8 for p in model.parameters())
    assert statistics.device_state_bytes + statistics.host_state_bytes == payload


class _Pinning(CpuBackend):
    can_pin = True


@pytest.mark.parametrize(("lane", "n_arenas"), [("resident", 0), ("streamed", 1), ("host", 2)])
def test_pinned_memory_is_allocated_once_and_not_per_tensor(
    lane: str, n_arenas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[int] = []
    monkeypatch.setattr(devices, "pin", lambda address, n_bytes, device: pinned.append(n_bytes))
    monkeypatch.setattr(devices, "unpin", lambda address, n_bytes, device: None)
    made: list[int] = []

    class CountedArena(HostRange):
        def __init__(self, n_bytes: int, **settings: Any) -> None:
            made.append(n_bytes)
            super().__init__(n_bytes, **settings)

    monkeypatch.setattr(host_pool, "HostRange", CountedArena)
    parameters = nn.ParameterList(nn.Parameter(torch.randn(100)) for _ in range(50))
    with use_backend(_Pinning(CPU)):
        optimizer = wrap(torch.optim.AdamW(parameters), lane)
    n_allocations = len(made)
    train(parameters, optimizer, range(2))

    assert len(pinned) == n_arenas
    assert [n for n in made if n] == pinned
    assert len(made) == n_allocations, "memory was allocated after construction"
    assert optimizer.statistics().pinned == (n_arenas > 0)


@pytest.mark.parametrize(
    ("lane", "as_tensor"), [("resident", True), ("streamed", True), ("host", False)]
)
def test_hyper_parameters_changed_after_the_step_do_not_reach_buckets_in_flight(
    lane: str, as_tensor: bool
) -> None:
    """As schedulers do; a tensor lr is filled in place."""

    def run(policy: str | None) -> list[Tensor]:
        with use_backend(CpuBackend(CPU)) if policy is None else StreamSimulator(policy):
            model = Model()
            lr = torch.tensor(0.1) if as_tensor else 0.1
            optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=lr), lane)
            assert optimizer.statistics().buckets > 2
            group = optimizer.param_groups[0]
            for step in range(2):
                fill_gradients(model, step)
                optimizer.step()
                new = 0.1 / (step + 2)
                group["lr"] = group["lr"].fill_(new) if as_tensor else new
                group["betas"], group["weight_decay"] = (0.5 + new, 0.9), new
            optimizer.synchronize()
            return values(model)

    expected = run(None)
    for policy in ADVERSARIES[:3]:
        assert_same(run(policy), expected)
