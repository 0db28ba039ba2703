"""Faults that other offload optimizers have or had, one test each: none of them is here."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_map_only

from fsdp_offload import HybridDeviceOptimizer, LaneError, TransferConfig
from fsdp_offload.core import backend
from fsdp_offload.core.backend import CpuBackend, use_backend
from fsdp_offload.memory import HostArena
from fsdp_offload.pipeline import engine
from fsdp_offload.testing import ADVERSARIES, StreamSimulator
from fsdp_offload.update.codec import decode_plain

pytestmark = pytest.mark.usefixtures("one_thread", "small_host_buckets")
CPU = torch.device("cpu")
LANES = ("resident", "streamed", "host")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL = TransferConfig(bucket_bytes=4096, slots=2, host_threads=2)

each_lane = pytest.mark.parametrize("lane", LANES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


class Model(nn.Module):
    """Three parameters, one of which spans several buckets of 4 KiB."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in (("matrix", (40, 50)), ("vector", (130,)), ("scale", ())):
            value = torch.randn(shape, generator=generator).to(dtype)
            setattr(self, name, nn.Parameter(value))


def wrap(inner: torch.optim.Optimizer, lane: str, **settings: Any) -> HybridDeviceOptimizer:
    lanes = [lane for group in inner.param_groups for p in group["params"] if p.requires_grad]
    return HybridDeviceOptimizer(inner, update_on=lanes, transfer=SMALL, **settings)


def fill_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in model.parameters():
        value = torch.randn(parameter.shape, generator=generator)
        parameter.grad = value.to(parameter.dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        fill_gradients(model, step)
        optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def state_of(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    return copy.deepcopy(optimizer.state_dict()["state"])


def assert_same(found: Any, expected: Any) -> None:
    """bf16 by its bits: many remainders are no numbers."""
    found, expected = (tree_map_only(Tensor, words, each) for each in (found, expected))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


# --------------------------------------------------------------------------- gradients


@each_lane
@each_dtype
def test_a_gradient_of_an_earlier_step_is_not_applied_when_there_is_none(
    lane: str, dtype: torch.dtype
) -> None:
    model = Model(dtype)
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.1), lane)
    train(model, optimizer, range(2))
    before, state = values(model), state_of(optimizer)
    fill_gradients(model, 2)
    model.matrix.grad = None  # all of its buckets
    model.scale.grad = None  # a part of a bucket
    optimizer.step()

    after, new_state = values(model), state_of(optimizer)
    for index, unused in enumerate((True, False, True)):
        assert torch.equal(after[index], before[index]) is unused
        assert float(new_state[index]["step"]) == (2 if unused else 3)
        if unused:
            assert_same(new_state[index], state[index])


@pytest.mark.parametrize("lane", LANES)
def test_zeroing_gradients_in_place_after_the_step_does_not_reach_updates_in_flight(
    lane: str,
) -> None:
    """``zero_grad(set_to_none=False)`` writes on the caller's stream."""

    def run(policy: str | None) -> list[Tensor]:
        with use_backend(CpuBackend(CPU)) if policy is None else StreamSimulator(policy) as backend:
            model = Model(torch.bfloat16)
            optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.1), lane)
            current = backend.current_stream()
            for step in range(2):
                fill_gradients(model, step)
                optimizer.step()
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    current.launch(Tensor.zero_, parameter.grad)
            optimizer.synchronize()
            return values(model)

    expected = run(None)
    for policy in ("lazy", "eager", "immediate:current", "lag:update", "lag:host_out"):
        assert_same(run(policy), expected)


@each_lane
def test_zero_grad_in_place_leaves_zeros_and_the_next_step_uses_them(lane: str) -> None:
    model, plain_model = Model(), Model()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), lane)
    plain = torch.optim.SGD(plain_model.parameters(), lr=0.1, momentum=0.9)
    for each, its_optimizer in ((model, optimizer), (plain_model, plain)):
        fill_gradients(each, 0)
        its_optimizer.step()
        its_optimizer.zero_grad(set_to_none=False)
        its_optimizer.step()

    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert_same(values(model), values(plain_model))


@each_lane
def test_the_closure_runs_once(lane: str) -> None:
    model = Model()
    optimizer = wrap(torch.optim.AdamW(model.parameters()), lane)
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = sum((p * p).sum() for p in model.parameters())
        loss.backward()
        return loss

    assert optimizer.statistics().buckets > 2
    loss = optimizer.step(closure)

    assert calls == [True]
    assert isinstance(loss, Tensor)
    assert loss.item() > 0


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


@each_lane
@each_dtype
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


@each_lane
@each_dtype
@pytest.mark.parametrize("write", [load_module, write_and_resync])
def test_loads_that_can_be_seen_make_the_master_exactly_the_weight(
    lane: str, dtype: torch.dtype, write: Callable[..., None]
) -> None:
    """Also elements whose weight did not change lose the bits that only the master had."""
    model = Model(dtype)
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.01), lane, model=model)
    train(model, optimizer, range(3))
    write(model, optimizer, partly_new(model))
    twin_model = Model(dtype)
    write_by_hand(twin_model, optimizer, values(model))
    twin = wrap(torch.optim.AdamW(twin_model.parameters(), lr=0.01), lane)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state.pop("master", None), state.pop("master_remainder", None)
    twin.load_state_dict(saved)
    train(model, optimizer, range(3, 6))
    train(twin_model, twin, range(3, 6))

    assert_same(values(model), values(twin_model))
    assert_same(state_of(optimizer), state_of(twin))


@each_lane
@pytest.mark.parametrize(
    ("dtype", "half_step"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=["bf16", "fp16"]
)
def test_the_master_of_a_weight_written_by_hand_is_within_half_a_step_of_its_dtype(
    lane: str, dtype: torch.dtype, half_step: float
) -> None:
    """Where values are compared (host lane, fp16) the master of a changed weight is exact."""
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


# --------------------------------------------------------------------------- what users see


@each_lane
def test_param_groups_and_state_dicts_hold_no_classes(lane: str) -> None:
    model = Model(torch.bfloat16)
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1)), lane)
    train(model, optimizer, range(1))
    plain_keys = set(torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).param_groups[0])

    assert set(optimizer.param_groups[0]) == plain_keys
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert_same(torch.load(file, weights_only=True), optimizer.state_dict())


@each_lane
@each_dtype
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
    assert set(found["state"]) == {"matrix", "vector", "scale"}
    for state in found["state"].values():
        assert float(state["step"]) == 0
        assert not state["exp_avg"].any()


@each_lane
def test_torchs_set_optimizer_state_dict_runs_no_step_and_restores_every_bit(lane: str) -> None:
    model, other_model = Model(torch.bfloat16), Model(torch.bfloat16, seed=3)
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.1), lane, model=model)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other_model.load_state_dict(model.state_dict())
    other = wrap(torch.optim.AdamW(other_model.parameters(), lr=0.7), lane, model=other_model)
    set_optimizer_state_dict(other_model, other, saved)

    assert other.statistics().steps == 0
    assert_same(values(other_model), values(model))
    assert_same(state_of(other), state_of(optimizer))
    train(model, optimizer, range(2, 4))
    train(other_model, other, range(2, 4))
    assert_same(values(other_model), values(model))


@each_lane
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
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


@each_lane
@each_dtype
def test_after_a_resume_step_counts_on_in_every_bucket(lane: str, dtype: torch.dtype) -> None:
    model = Model(dtype)
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.1), lane)
    train(model, optimizer, range(3))
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(3, 5))

    resumed_model = Model(dtype, seed=9)
    resumed = wrap(torch.optim.AdamW(resumed_model.parameters(), lr=0.3), lane)
    train(resumed_model, resumed, range(1))  # it has steps of its own, which must go
    resumed_model.load_state_dict(weights)
    resumed.load_state_dict(saved)
    train(resumed_model, resumed, range(3, 5))

    assert_same(values(resumed_model), values(model))
    assert_same(state_of(resumed), state_of(optimizer))
    steps = [float(p.state["step"]) for record in resumed._records for p in record.pieces]
    assert len(steps) > 3
    assert set(steps) == {5.0}


# --------------------------------------------------------------------------- memory


@pytest.mark.parametrize("lane", ["streamed", "host"])
def test_saving_neither_copies_nor_moves_the_state(lane: str) -> None:
    model = Model(torch.bfloat16)
    optimizer = wrap(torch.optim.AdamW(model.parameters()), lane)
    train(model, optimizer, range(1))
    saved = optimizer.state_dict()["state"]

    for index, record in enumerate(optimizer._records):
        for name, tensor in record.tensors.items():
            assert saved[index][name].data_ptr() == tensor.data_ptr()
            assert saved[index][name].device == CPU
            assert not tensor.untyped_storage().resizable(), "not memory of the arena"


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
    master_bytes = 4 if lane == "host" else 0
    payload = sum(p.numel() * (8 + master_bytes) for p in model.parameters())
    assert statistics.device_state_bytes + statistics.host_state_bytes == payload


class _Pinning(CpuBackend):
    can_pin = True


@pytest.mark.parametrize(("lane", "n_arenas"), [("resident", 0), ("streamed", 1), ("host", 2)])
def test_pinned_memory_is_allocated_once_and_not_per_tensor(
    lane: str, n_arenas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host lane's second one is its ring of gradient buffers."""
    pinned: list[int] = []
    monkeypatch.setattr(backend, "pin", lambda address, n_bytes, device: pinned.append(n_bytes))
    monkeypatch.setattr(backend, "unpin", lambda address, n_bytes, device: None)
    made: list[int] = []

    class CountedArena(HostArena):
        def __init__(self, n_bytes: int, **settings: Any) -> None:
            made.append(n_bytes)
            super().__init__(n_bytes, **settings)

    monkeypatch.setattr(engine, "HostArena", CountedArena)
    parameters = nn.ParameterList(nn.Parameter(torch.randn(100)) for _ in range(50))
    with use_backend(_Pinning(CPU)):
        optimizer = wrap(torch.optim.AdamW(parameters), lane)
    n_allocations = len(made)
    train(parameters, optimizer, range(2))

    assert len(pinned) == n_arenas
    assert [n for n in made if n] == pinned
    assert len(made) == n_allocations, "memory was allocated after construction"
    assert optimizer.statistics().pinned == (n_arenas > 0)


# --------------------------------------------------------------------------- order and failures


@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
@each_lane
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


class Failing(torch.optim.SGD):
    """Raises in the n-th of its calls, which is the n-th bucket."""

    calls_left = 10**9

    def step(self, closure: None = None) -> None:
        Failing.calls_left -= 1
        if Failing.calls_left == 0:
            raise ZeroDivisionError("in the middle of the buckets")
        super().step()


@each_lane
def test_an_exception_swallowed_by_the_loop_is_not_followed_by_half_updated_steps(
    lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    optimizer = wrap(Failing(model.parameters(), lr=0.1, momentum=0.9), lane, elementwise=True)
    assert optimizer.statistics().buckets > 2
    errors: list[Exception] = []
    after_failure: list[list[Tensor]] = []
    for step in range(5):
        fill_gradients(model, step)
        if step == 2:
            monkeypatch.setattr(Failing, "calls_left", 2)
        try:
            optimizer.step()
        except Exception as error:  # as training loops with "skip bad batches" do
            errors.append(error)
            after_failure.append(values(model))

    assert [type(error) for error in errors] == [LaneError] * 3
    assert all("load a checkpoint" in str(error) for error in errors)
    assert_same(after_failure[1:], after_failure[:1] * 2)


# --------------------------------------------------------------------------- ranks


def _lanes_by_name(fraction: float | None, budget: int | None) -> tuple[dict[str, str], list[int]]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 1), nn.Linear(6, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    inner = torch.optim.AdamW(model.parameters())
    optimizer = HybridDeviceOptimizer(
        inner, model=model, offload_fraction=fraction, device_budget=budget
    )
    lanes = {record.fqn: record.lane for record in optimizer._records}
    sizes = [p.to_local().numel() for p in model.parameters()]
    optimizer.close()
    return lanes, sizes


@pytest.mark.parametrize(
    ("fraction", "budget"), [(0.0, None), (0.3, None), (0.7, None), (1.0, None), (None, 150)]
)
def test_empty_trailing_shards_are_in_the_lane_that_the_other_ranks_use(
    ranks: Callable[..., Any], fraction: float | None, budget: int | None
) -> None:
    results = ranks(2).run(_lanes_by_name, fraction, budget)

    (first, sizes), (second, trailing_sizes) = results
    assert 0 in trailing_sizes
    assert 0 not in sizes
    assert first == second
    assert set(first.values()) == {
        (0.0, None): {"resident"},
        (1.0, None): {"streamed"},
    }.get((fraction, budget), {"resident", "streamed"})
