"""The wrapper keeps every promise of ``torch.optim.Optimizer``, and gives back what it takes."""

from __future__ import annotations

import copy
import gc
import io
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_map

import fsdp_offload
from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from fsdp_offload.memory import HostArena
from fsdp_offload.memory.arena import _mappings
from fsdp_offload.testing import StreamSimulator
from fsdp_offload.update.shadow import Shadow
from tests.helpers.side_by_side import bits

pytestmark = pytest.mark.usefixtures("one_thread", "small_host_buckets")
LANES = ("resident", "streamed", "host")
SMALL = TransferConfig(bucket_bytes=4096, slots=2, host_threads=2)
each_lane = pytest.mark.parametrize("lane", LANES)


class Model(nn.Module):
    def __init__(self, seed: int = 0, shapes: tuple[Any, ...] = ((40, 60), (130,))) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes
        )


def fill_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = gradient if parameter.requires_grad else None


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        fill_gradients(model, step)
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def comparable(value: Any) -> Any:
    """Remainders are bits that may look like NaN."""
    return bits(value) if isinstance(value, Tensor) else value


def wrap(inner: torch.optim.Optimizer, lane: str, **settings: Any) -> HybridDeviceOptimizer:
    lanes = [lane for group in inner.param_groups for p in group["params"] if p.requires_grad]
    return HybridDeviceOptimizer(inner, update_on=lanes, transfer=SMALL, **settings)


def pair(
    lane: str, cls: Any = torch.optim.SGD, **settings: Any
) -> tuple[Model, HybridDeviceOptimizer, Model, torch.optim.Optimizer]:
    """A wrapped optimizer and the plain one with the kernel that the lane would choose."""
    settings = {"lr": 0.1, **settings}
    if cls is torch.optim.SGD:
        settings = {"momentum": 0.9, "fused": lane == "host" or None, **settings}
    model, twin_model = Model(), Model()
    optimizer = wrap(cls(model.parameters(), **settings), lane)
    return model, optimizer, twin_model, cls(twin_model.parameters(), **settings)


# --------------------------------------------------------------------------- an Optimizer


@each_lane
def test_it_is_an_optimizer_that_shares_groups_and_defaults(lane: str) -> None:
    inner = torch.optim.AdamW(Model().parameters(), lr=0.1)
    groups, group, defaults = inner.param_groups, inner.param_groups[0], dict(inner.defaults)
    keys = dict(group)
    optimizer = wrap(inner, lane)

    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups[0] is inner.param_groups[0] is group
    assert optimizer.param_groups is inner.param_groups
    assert group == keys
    assert groups[0] is group
    assert optimizer.defaults == defaults
    assert repr(optimizer).startswith("HybridDeviceOptimizer (")
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.param_groups[0] is group


@each_lane
def test_after_wrapping_the_inner_optimizer_forwards_to_the_wrapper(lane: str) -> None:
    model, optimizer, twin_model, twin = pair(lane)
    inner = optimizer._inner
    train(model, inner, range(2))
    train(twin_model, twin, range(2))

    assert optimizer.statistics().steps == 2
    assert_same(values(model), values(twin_model))
    assert inner.state is optimizer.state
    saved = copy.deepcopy(inner.state_dict())
    assert_same(saved, twin.state_dict())
    train(model, inner, range(2, 3))
    inner.load_state_dict(saved)
    assert_same(optimizer.state_dict(), twin.state_dict())
    inner.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert inner.step(lambda: 5.0) == 5.0


@each_lane
def test_the_closures_loss_is_returned_and_its_gradients_are_used(lane: str) -> None:
    model, optimizer, twin_model, twin = pair(lane)
    losses = []
    for each, its_optimizer in ((model, optimizer), (twin_model, twin)):

        def closure(each: Model = each, its_optimizer: Any = its_optimizer) -> Tensor:
            its_optimizer.zero_grad()
            loss = torch.stack([p.square().sum() for p in each.parameters()]).sum()
            loss.backward()
            return loss

        losses.append([its_optimizer.step(closure) for _ in range(3)])

    assert_same(losses[0], losses[1])
    assert_same(values(model), values(twin_model))
    assert optimizer.step() is None


# --------------------------------------------------------------------------- schedulers


@pytest.mark.parametrize("built", ["before", "on inner", "on wrapper"])
@pytest.mark.parametrize("kind", ["lambda", "one cycle", "tensor"])
@each_lane
def test_schedulers_work_on_either_optimizer(lane: str, kind: str, built: str) -> None:
    """Warnings are errors: none that ``lr_scheduler.step()`` came first, either."""

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        if kind == "one cycle":  # also changes the momentum at every step
            return OneCycleLR(optimizer, max_lr=0.3, total_steps=6)
        return LambdaLR(optimizer, lambda step: 1 / (1 + step))

    lr = torch.tensor(0.1) if kind == "tensor" else 0.1
    model, twin_model = Model(), Model()
    inner = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, foreach=False)
    twin_lr = lr.clone() if isinstance(lr, Tensor) else lr
    twin = torch.optim.SGD(twin_model.parameters(), lr=twin_lr, momentum=0.9, foreach=False)
    scheduler = schedule(inner) if built == "before" else None
    optimizer = wrap(inner, lane)
    scheduler = scheduler or schedule(inner if built == "on inner" else optimizer)
    twin_scheduler = schedule(twin)
    rates = []
    for step in range(5):
        for each, its, its_scheduler in (
            (model, optimizer, scheduler),
            (twin_model, twin, twin_scheduler),
        ):
            train(each, its, range(step, step + 1))
            its_scheduler.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))

    assert len(set(rates)) == 5
    assert_same(values(model), values(twin_model))
    assert scheduler.get_last_lr() == twin_scheduler.get_last_lr()


@each_lane
def test_hyper_parameters_can_be_changed_by_hand_at_any_step(lane: str) -> None:
    model, optimizer, twin_model, twin = pair(lane)
    for step in range(4):
        for each, its in ((model, optimizer), (twin_model, twin)):
            group = its.param_groups[0]
            group["lr"], group["weight_decay"] = 0.1 / (1 + step), 0.01 * step
            group["nesterov"] = step == 2
            train(each, its, range(step, step + 1))

    assert_same(values(model), values(twin_model))


# --------------------------------------------------------------------------- hooks


@each_lane
def test_step_hooks_run_once_per_step_with_the_wrapper_wherever_they_were_registered(
    lane: str,
) -> None:
    model = Model()
    inner = torch.optim.AdamW(model.parameters())
    seen: list[tuple[str, object]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda optimizer, args, kwargs: seen.append((name, optimizer))

    inner.register_step_pre_hook(note("pre, inner before"))
    inner.register_step_post_hook(note("post, inner before"))
    optimizer = wrap(inner, lane)
    optimizer.register_step_pre_hook(note("pre, wrapper"))
    optimizer.register_step_post_hook(note("post, wrapper"))
    inner.register_step_post_hook(note("post, inner after"))
    handles = [
        register_optimizer_step_pre_hook(note("pre, global")),
        register_optimizer_step_post_hook(note("post, global")),
    ]
    expected = ["pre, global", "pre, inner before", "pre, wrapper"]
    expected += ["post, inner before", "post, wrapper", "post, inner after", "post, global"]
    try:
        for step in (optimizer.step, inner.step):
            seen.clear()
            fill_gradients(model, 0)
            step()
            assert sorted(name for name, _ in seen) == sorted(expected)
            assert [name[:3] for name, _ in seen] == ["pre"] * 3 + ["pos"] * 4
            assert all(argument is optimizer for _, argument in seen)
    finally:
        for handle in handles:
            handle.remove()


@each_lane
def test_pre_hooks_may_change_gradients_and_post_hooks_see_the_new_parameters(lane: str) -> None:
    model, optimizer, twin_model, twin = pair(lane)
    seen: list[Tensor] = []

    def halve(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    for its in (optimizer, twin):
        its.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(lambda *_: seen.extend(values(model)))
    train(model, optimizer, range(1))
    train(twin_model, twin, range(1))

    assert_same(values(model), values(twin_model))
    assert_same(seen, values(model))


@each_lane
@pytest.mark.parametrize("on_inner", [False, True], ids=["on wrapper", "on inner before"])
def test_state_dict_hooks_run_and_may_replace_the_state_dict(lane: str, on_inner: bool) -> None:
    model = Model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = None if on_inner else wrap(inner, lane)
    target, calls = optimizer or inner, []

    def after_saving(optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
        calls.append("saved")
        return {**saved, "extra": 1}

    def before_loading(optimizer: Any, loaded: dict[str, Any]) -> dict[str, Any]:
        calls.append("load")
        assert loaded.pop("extra") == 1
        loaded["param_groups"] = [{**g, "lr": 0.7} for g in loaded["param_groups"]]
        return loaded

    target.register_state_dict_pre_hook(lambda _: calls.append("save"))
    target.register_state_dict_post_hook(after_saving)
    target.register_load_state_dict_pre_hook(before_loading)
    target.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    optimizer = optimizer or wrap(inner, lane)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)

    assert calls == ["save", "saved", "load", "loaded"]
    assert optimizer.param_groups[0]["lr"] == 0.7
    assert saved["extra"] == 1, "the caller's dict was changed"


# --------------------------------------------------------------------------- groups


@each_lane
@pytest.mark.parametrize("on_inner", [False, True], ids=["on wrapper", "on inner"])
def test_a_group_can_be_added_at_any_time(lane: str, on_inner: bool) -> None:
    model, optimizer, twin_model, twin = pair(lane)
    train(model, optimizer, range(2))
    train(twin_model, twin, range(2))
    for each, its in ((model, optimizer._inner if on_inner else optimizer), (twin_model, twin)):
        each.weights.extend(Model(seed=4, shapes=((700,), (3, 5))).weights)
        its.add_param_group({"params": list(each.weights)[2:], "lr": 0.02, "weight_decay": 0.1})

    assert len(optimizer.param_groups) == len(optimizer._inner.param_groups) == 2
    assert len(optimizer.state) == 4, "its state is reserved at once"
    train(model, optimizer, range(2, 5))
    train(twin_model, twin, range(2, 5))
    assert_same(values(model), values(twin_model))
    assert_same(optimizer.state_dict(), twin.state_dict())


def test_a_group_that_torch_refuses_leaves_everything_as_it_was() -> None:
    model = Model()
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW(model.parameters()))
    before = optimizer.statistics()
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model.weights[0]]})

    assert len(optimizer.param_groups) == 1
    assert optimizer.statistics() == before


def test_groups_with_names_keep_them() -> None:
    model = Model()
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW(model.named_parameters()))
    train(model, optimizer, range(1))
    names = [name for name, _ in model.named_parameters()]

    assert optimizer.param_groups[0]["param_names"] == names
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == names
    assert [record.fqn for record in optimizer._records] == names


@each_lane
@pytest.mark.parametrize("history", ["fresh", "looked at", "trained before", "loaded"])
def test_a_parameter_that_is_unfrozen_after_wrapping_is_trained_as_by_the_plain_optimizer(
    lane: str, history: str
) -> None:
    # The host lane would choose the fused kernel, which is broken in the plain optimizer here.
    foreach = False if lane == "host" else None
    settings = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "foreach": foreach}
    model, twin_model = Model(), Model()
    inner = torch.optim.SGD(model.parameters(), **settings)
    twin = torch.optim.SGD(twin_model.parameters(), **settings)
    if history == "trained before":
        train(model, inner, range(2))
        train(twin_model, twin, range(2))
    for each in (model, twin_model):
        each.weights[1].requires_grad_(False)
    optimizer = wrap(inner, lane)
    if history == "looked at":
        assert optimizer.state[model.weights[1]] == {}
    if history == "loaded":
        other = Model(seed=3)
        source = torch.optim.SGD(other.parameters(), **settings)
        train(other, source, range(2))
        for its in (optimizer, twin):
            its.load_state_dict(copy.deepcopy(source.state_dict()))
    assert_same(optimizer.state_dict()["state"].get(1, {}), twin.state_dict()["state"].get(1, {}))
    train(model, optimizer, range(2, 4))
    train(twin_model, twin, range(2, 4))
    for each in (model, twin_model):
        each.weights[1].requires_grad_(True)
    train(model, optimizer, range(4, 7))
    train(twin_model, twin, range(4, 7))

    assert_same(values(model), values(twin_model))
    assert_same(optimizer.state_dict(), twin.state_dict())


# --------------------------------------------------------------------------- state dicts


@each_lane
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Rprop, torch.optim.NAdam])
def test_state_dicts_go_both_ways_between_the_wrapper_and_the_plain_optimizer(
    lane: str, cls: Any
) -> None:
    model, optimizer, twin_model, twin = pair(lane, cls)
    train(model, optimizer, range(3))
    train(twin_model, twin, range(3))
    expected = copy.deepcopy(twin.state_dict())
    assert_same(optimizer.state_dict(), expected)

    back_model = Model()
    back_model.load_state_dict(model.state_dict())
    back = cls(back_model.parameters(), lr=0.7)
    back.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    there_model, there, _, _ = pair(lane, cls, lr=0.7)
    there_model.load_state_dict(model.state_dict())
    there.load_state_dict(expected)
    for each, its in ((twin_model, twin), (back_model, back), (there_model, there)):
        train(each, its, range(3, 5))

    assert_same(values(back_model), values(twin_model))
    assert_same(values(there_model), values(twin_model))


@each_lane
def test_ids_may_be_numbers_or_names(lane: str) -> None:
    model, optimizer, *_ = pair(lane, torch.optim.AdamW)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    names = {0: "layers.0.weight", 1: "layers.0.bias"}
    named = {
        "state": {names[i]: state for i, state in reversed(saved["state"].items())},
        "param_groups": [
            {**group, "params": [names[i] for i in group["params"]]}
            for group in saved["param_groups"]
        ],
    }
    _, other, *_ = pair(lane, torch.optim.AdamW)
    other.load_state_dict(named)

    assert_same(other.state_dict(), saved)
    assert other.state_dict()["param_groups"][0]["params"] == [0, 1]


@each_lane
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loading_its_own_live_state_dict_changes_nothing(lane: str, dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.1), lane)
    train(model, optimizer, range(2))
    before, saved = values(model), copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())

    assert_same(values(model), before)
    assert_same(tree_map(comparable, optimizer.state_dict()), tree_map(comparable, saved))


@each_lane
def test_a_saved_state_dict_loads_with_weights_only(lane: str) -> None:
    model, optimizer, *_ = pair(lane, torch.optim.AdamW)
    train(model, optimizer, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    payload = sum(v.numel() * 4 for s in optimizer.state.values() for v in s.values())
    assert file.tell() < payload + 8192, "more than the state was saved"
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    _, other, *_ = pair(lane, torch.optim.AdamW)
    other.load_state_dict(loaded)

    assert_same(loaded, optimizer.state_dict())
    assert_same(other.state_dict(), optimizer.state_dict())


@each_lane
def test_a_loaded_tensor_lr_is_not_shared_with_the_dict_it_came_from(lane: str) -> None:
    _, optimizer, *_ = pair(lane, torch.optim.AdamW, lr=torch.tensor(0.5))
    saved = optimizer.state_dict()
    _, other, *_ = pair(lane, torch.optim.AdamW, lr=torch.tensor(0.1))
    other.load_state_dict(saved)
    saved["param_groups"][0]["lr"].fill_(9.0)

    assert float(other.param_groups[0]["lr"]) == 0.5


def test_a_load_takes_hyper_parameters_and_leaves_the_choice_of_kernel() -> None:
    source = torch.optim.AdamW(Model().parameters(), lr=0.3, betas=(0.5, 0.6), foreach=True)
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW(Model().parameters(), fused=True))
    optimizer.load_state_dict(source.state_dict())
    group = optimizer.param_groups[0]

    assert (group["lr"], group["betas"]) == (0.3, (0.5, 0.6))
    assert (group["fused"], group["foreach"]) == (True, None)


# --------------------------------------------------------------------------- GradScaler


@each_lane
@pytest.mark.parametrize("fused", [False, True], ids=["for-loop", "fused"])
@pytest.mark.parametrize("through", ["wrapper", "inner"])
def test_a_grad_scaler_unscales_and_skips_steps_with_infinite_gradients(
    lane: str, fused: bool, through: str
) -> None:
    model, optimizer, twin_model, twin = pair(lane, fused=fused)
    seen = []
    for each, its in ((model, optimizer), (twin_model, twin)):
        target = its._inner if its is optimizer and through == "inner" else its
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for step in range(4):
            target.zero_grad()
            loss = torch.stack([p.square().sum() for p in each.parameters()]).sum()
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            if step == 2:
                scaler.unscale_(target)
                nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            scaler.step(target)
            scaler.update()
            seen.append((each is model, scaler.get_scale(), values(each)))

    assert optimizer.statistics().steps == 3
    assert_same([s[1:] for s in seen if s[0]], [s[1:] for s in seen if not s[0]])


# --------------------------------------------------------------------------- how much, and where


def state_bytes(optimizer: HybridDeviceOptimizer, lane: str) -> int:
    """Bytes of the state that users see, of parameters in a lane, scalars not counted."""
    return sum(
        value.numel() * value.itemsize
        for record in optimizer._records
        if record.lane == lane
        for value in optimizer.state[record.parameter].values()
        if value.dim()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_statistics_are_what_tensors_add_up_to(
    dtype: torch.dtype, arenas: list[weakref.ref[HostArena]]
) -> None:
    model = Model(shapes=((40, 60), (130,), (64, 10), (7,), (500,))).to(dtype)
    optimizer = HybridDeviceOptimizer(
        torch.optim.AdamW(model.parameters()),
        update_on=["streamed", "host", "resident", "streamed", "host"],
        transfer=SMALL,
    )
    statistics = optimizer.statistics()
    n_host = 130 + 500

    assert statistics.steps == statistics.moved_bytes == 0
    assert statistics.parameters == {"streamed": 2, "host": 2, "resident": 1}
    assert statistics.device_state_bytes == state_bytes(optimizer, "resident")
    # The host lane keeps an fp32 master even where the shard says it all and it is not shown.
    hidden = 4 * n_host if dtype == torch.float32 else 0
    shown = state_bytes(optimizer, "streamed") + state_bytes(optimizer, "host")
    assert statistics.host_state_bytes == shown + hidden
    assert statistics.host_arena_bytes == sum(a()._n_bytes for a in arenas)  # type: ignore[union-attr]
    assert statistics.host_arena_bytes >= statistics.host_state_bytes
    assert not statistics.pinned
    pieces = sum(len(record.pieces) for record in optimizer._records)
    assert 5 < statistics.buckets <= pieces

    train(model, optimizer, range(2))
    everything = optimizer.statistics()
    assert everything.steps == 2
    assert everything.step_ms > 0
    # What moves is the state of streamed parameters and 4 bytes of each gradient of host ones,
    # with gaps of less than 64 elements behind each slice.
    least = state_bytes(optimizer, "streamed") + 4 * n_host
    assert least <= everything.moved_bytes < least + 64 * 16 * pieces
    for parameter in model.parameters():
        parameter.grad = None
    optimizer.step()
    assert optimizer.statistics().moved_bytes == 0
    model.weights[3].grad = torch.ones_like(model.weights[3])
    optimizer.step()
    assert 0 < optimizer.statistics().moved_bytes <= 4096


def test_staging_is_slots_and_scratch_of_the_size_that_was_asked_for() -> None:
    model = Model(shapes=((5000,),))
    sizes = []
    for slots in (1, 2, 4):
        transfer = TransferConfig(bucket_bytes=8192, slots=slots)
        optimizer = HybridDeviceOptimizer(torch.optim.AdamW(model.parameters()), transfer=transfer)
        sizes.append(optimizer.statistics().staging_bytes)
    assert sizes == [8192, 2 * 8192, 4 * 8192]


@pytest.mark.parametrize("update_on", ["device", "host"])
@pytest.mark.parametrize("budget", [0, 1000, 6000, "16KiB", "1GiB"])
def test_a_device_budget_is_not_exceeded_and_is_used(update_on: str, budget: int | str) -> None:
    model = Model(shapes=((40, 10), (130,), (20, 30), (7,)))
    optimizer = HybridDeviceOptimizer(
        torch.optim.AdamW(model.parameters()), device_budget=budget, update_on=update_on
    )
    allowed = {"16KiB": 16 << 10, "1GiB": 1 << 30}.get(str(budget), budget)
    statistics = optimizer.statistics()
    away = [r for r in optimizer._records if r.lane != "resident"]

    assert statistics.device_state_bytes <= int(allowed)
    for record in away:  # none of them would fit into what is left
        assert statistics.device_state_bytes + 8 * record.parameter.numel() > int(allowed)
    assert {record.lane for record in away} <= {"streamed" if update_on == "device" else "host"}


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 0.75, 1.0, 1])
def test_the_fraction_is_met_within_the_largest_parameter(fraction: float) -> None:
    model = Model(shapes=((40, 10), (130,), (20, 30), (7,), (200,), (333,)))
    optimizer = HybridDeviceOptimizer(
        torch.optim.AdamW(model.parameters()), offload_fraction=fraction
    )
    statistics = optimizer.statistics()
    total = 8 * sum(p.numel() for p in model.parameters())

    assert statistics.device_state_bytes + statistics.host_state_bytes == total
    assert fraction * total <= statistics.host_state_bytes < fraction * total + 8 * 600
    if fraction in (0, 1):
        assert statistics.host_state_bytes == fraction * total


# --------------------------------------------------------------------------- giving back


def host_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("fsdp_offload-host")]


@each_lane
def test_close_gives_everything_back_and_may_be_called_again(
    lane: str, arenas: list[weakref.ref[HostArena]]
) -> None:
    mappings, threads = set(_mappings), set(host_threads())
    model, optimizer, twin_model, twin = pair(lane)
    train(model, optimizer, range(2))
    train(twin_model, twin, range(2))
    assert len(set(_mappings) - mappings) == {"resident": 0, "streamed": 1, "host": 2}[lane]
    assert len(set(host_threads()) - threads) == (2 if lane == "host" else 0)
    optimizer.close()
    optimizer.close()
    gc.collect()

    assert set(_mappings) <= mappings
    assert set(host_threads()) <= threads
    assert all(arena() is None or arena()._mapping is None for arena in arenas)
    assert_same(values(model), values(twin_model))
    assert optimizer.statistics().host_arena_bytes == 0


@each_lane
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
def test_a_wrapper_that_is_dropped_without_close_gives_everything_back(
    lane: str, stepped: bool, arenas: list[weakref.ref[HostArena]]
) -> None:
    mappings, threads = set(_mappings), set(host_threads())
    model = Model()
    inner = torch.optim.AdamW(model.parameters())
    optimizer = wrap(inner, lane, model=model)
    scheduler = LambdaLR(inner, lambda step: 1.0)
    if stepped:
        train(model, optimizer, range(2))
        scheduler.step()
    reference = weakref.ref(optimizer)
    del optimizer, inner, scheduler  # each keeps the others
    gc.collect()

    assert reference() is None
    assert [arena() for arena in arenas] == [None] * len(arenas)
    assert set(_mappings) <= mappings
    assert set(host_threads()) <= threads
    model.load_state_dict(Model(seed=1).state_dict())  # its hooks are gone, too
    assert not model._load_state_dict_pre_hooks
    assert not model._load_state_dict_post_hooks


def test_a_dropped_wrapper_waits_for_transfers_in_flight_before_it_gives_memory_back() -> None:
    with StreamSimulator("lazy") as simulator:
        model = Model()
        optimizer = wrap(torch.optim.AdamW(model.parameters()), "streamed")
        train(model, optimizer, range(1))
        (d2h,) = (stream for stream in simulator._streams if stream.name == "d2h")
        assert d2h.entries
        del optimizer
        gc.collect()

        assert not d2h.entries


def test_synchronize_leaves_nothing_in_flight() -> None:
    with StreamSimulator("lazy") as simulator:
        model = Model(shapes=((40, 60), (130,), (500,)))
        lanes = ["streamed", "host", "resident"]
        optimizer = HybridDeviceOptimizer(
            torch.optim.AdamW(model.parameters()), update_on=lanes, transfer=SMALL
        )
        train(model, optimizer, range(2))
        assert any(stream.entries for stream in simulator._streams)
        optimizer.synchronize()

        assert [s.name for s in simulator._streams if s.entries] == ["current"]


# --------------------------------------------------------------------------- host threads


@pytest.fixture
def kernel_threads(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int]]:
    """(thread, number of its kernels' threads) of each step that ran on a thread of its own."""
    seen: set[tuple[str, int]] = set()
    step = Shadow.step

    def noted(self: Shadow, *args: Any) -> None:
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            seen.add((thread.name, torch.get_num_threads()))
        step(self, *args)

    monkeypatch.setattr(Shadow, "step", noted)
    return seen


class Own(torch.optim.SGD):
    """Not torch's class: it may share data between its calls, so only one runs at a time."""

    def _init_group(self, *args: Any) -> bool:
        return super()._init_group(*args)


@pytest.mark.parametrize("cls", [torch.optim.SGD, Own])
def test_only_the_host_lanes_own_threads_get_their_number_of_kernel_threads(
    cls: type[torch.optim.SGD], kernel_threads: set[tuple[str, int]]
) -> None:
    """As many threads as were asked for, over all: many of one, or one of many."""
    before, older = torch.get_num_threads(), set(host_threads())
    wanted = before + 3
    answers: list[int] = []
    ask, done = threading.Event(), threading.Event()

    def older_thread() -> None:
        torch.get_num_threads()
        ask.wait()
        answers.append(torch.get_num_threads())
        done.set()

    threading.Thread(target=older_thread, daemon=True).start()
    model = Model()
    transfer = TransferConfig(bucket_bytes=4096, host_threads=wanted)
    inner = cls(model.parameters(), lr=0.1)
    optimizer = HybridDeviceOptimizer(inner, elementwise=True, update_on="host", transfer=transfer)
    newer = threading.Thread(target=lambda: answers.append(torch.get_num_threads()))
    newer.start()
    newer.join()
    train(model, optimizer, range(2))
    ask.set()
    done.wait()

    assert len(set(host_threads()) - older) == (1 if cls is Own else wanted)
    assert {number for _, number in kernel_threads} == {wanted if cls is Own else 1}
    assert all(name.startswith("fsdp_offload-host") for name, _ in kernel_threads)
    assert torch.get_num_threads() == before
    assert answers == [before, before]


OMP = """
import os, threading, torch
from torch import nn
from fsdp_offload import HybridDeviceOptimizer
seen = []
class Own(torch.optim.SGD):
    def step(self, closure=None):
        if threading.current_thread() is not threading.main_thread():
            seen.append(torch.get_num_threads())
        super().step()
os.sched_getaffinity = lambda _: set(range(12))
for ranks in "1", "4":
    os.environ["LOCAL_WORLD_SIZE"] = ranks
    for cls in (Own, torch.optim.SGD):
        p = nn.Parameter(torch.zeros(100))
        p.grad = torch.ones(100)
        inner = cls([p], lr=0.1)
        optimizer = HybridDeviceOptimizer(inner, elementwise=True, update_on="host")
        optimizer.step()
        seen.append(sum(t.name.startswith("fsdp_offload-host") for t in threading.enumerate()))
        optimizer.close()
    assert torch.get_num_threads() == 1, torch.get_num_threads()
print(*seen)
"""


@pytest.mark.long
def test_the_host_lane_ignores_omp_num_threads_and_shares_cores_among_local_ranks() -> None:
    """torchrun exports ``OMP_NUM_THREADS=1``."""
    done = subprocess.run(
        [sys.executable, "-c", OMP],
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    # On one rank of this host 12 kernel threads of one, then 12 threads; on each of four 3.
    assert done.stdout.strip() == "12 1 12 3 1 3"


def test_one_host_thread_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def build(threads: int, update_on: str) -> None:
        transfer = TransferConfig(host_threads=threads)
        model = Model()
        inner = torch.optim.AdamW(model.parameters())
        HybridDeviceOptimizer(inner, model, update_on=update_on, transfer=transfer)

    with caplog.at_level(logging.WARNING, "fsdp_offload"):
        build(2, "host")
        build(1, "device")
        assert caplog.records == []
        build(1, "host")

    assert len(caplog.records) == 1
    assert "host_threads" in caplog.text


# --------------------------------------------------------------------------- a user's own class


class Counting(torch.optim.SGD):
    """Keeps a counter and a list of its own, and changes a group value."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.n_steps, self.log = 0, []
        for group in self.param_groups:
            group["seen"] = 0

    def step(self, closure: None = None) -> None:
        self.n_steps += 1
        self.log.append(self.n_steps)
        for group in self.param_groups:
            group["seen"] += 1
        super().step()


@each_lane
def test_what_a_class_changes_in_itself_and_its_groups_changes_once_per_step(lane: str) -> None:
    model, twin_model = Model(), Model()
    inner, twin = Counting(model.parameters(), lr=0.1), Counting(twin_model.parameters(), lr=0.1)
    optimizer = wrap(inner, lane, elementwise=True)
    assert (inner.n_steps, inner.log) == (0, []), "wrapping ran steps on the optimizer itself"
    assert optimizer.statistics().buckets > 1
    train(model, optimizer, range(3))
    train(twin_model, twin, range(3))

    assert (inner.n_steps, inner.log) == (3, [1, 2, 3]) == (twin.n_steps, twin.log)
    assert optimizer.param_groups[0]["seen"] == 3
    assert_same(values(model), values(twin_model))


# --------------------------------------------------------------------------- the package

IMPORT = """
import sys
import fsdp_offload
assert "torch" not in sys.modules
assert fsdp_offload.__version__
assert set(fsdp_offload.__all__) <= set(dir(fsdp_offload))
try:
    fsdp_offload.nonsense
except AttributeError as error:
    assert "nonsense" in str(error)
else:
    raise AssertionError
from fsdp_offload import LaneError
assert "torch" not in sys.modules
"""


def test_importing_the_package_does_not_import_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_resolves_and_the_list_is_sorted() -> None:
    assert fsdp_offload.__all__ == sorted(fsdp_offload.__all__)
    for name in fsdp_offload.__all__:
        assert getattr(fsdp_offload, name).__name__.rpartition(".")[2] == name
