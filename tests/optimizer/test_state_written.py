"""State and weights that the caller writes, in every order with saves, loads and freezing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from fsdp_offload import HybridDeviceOptimizer, PhaseOffloader, TransferConfig, checkpoint
from tests.helpers.side_by_side import bits

SMALL = TransferConfig(bucket_bytes=4096, slots=2, host_threads=1)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WHOLE = [("device", FP16), ("host", FP16), ("host", BF16)]
"""Lanes and dtypes that keep a whole master."""
LANES = ["device", "host"]
LIMIT = 0.01


def make(dtype: torch.dtype = FP32, *, frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 70), nn.Linear(70, 3)).to(dtype)
    model[0].requires_grad_(not frozen)
    return model


def wrap(model: nn.Module, lane: str = "device", **options: Any) -> HybridDeviceOptimizer:
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    return HybridDeviceOptimizer(inner, model=model, update_on=lane, transfer=SMALL, **options)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def clamp(model: nn.Module) -> None:
    """By hand."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-LIMIT, LIMIT)


# --------------------------------------------------------------------------- saved after a write


def by_state_dict(model: nn.Module, optimizer: Any, path: Path) -> dict[str, Any]:
    saved = copy.deepcopy(optimizer.state_dict())
    names = [name for name, _ in model.named_parameters()]
    return {names[index]: state["master"] for index, state in saved["state"].items()}


def by_torchs_helper(model: nn.Module, optimizer: Any, path: Path) -> dict[str, Any]:
    saved = get_optimizer_state_dict(model, optimizer)
    return {name: state["master"] for name, state in saved["state"].items()}


def by_save(model: nn.Module, optimizer: Any, path: Path) -> dict[str, Any]:
    checkpoint.save(path / "saved", model, optimizer)
    found = {
        f"optim.state.{name}.master": torch.zeros(p.shape) for name, p in model.named_parameters()
    }
    dcp.load(found, checkpoint_id=path / "saved", no_dist=True)
    return {name.split(".", 2)[2].removesuffix(".master"): v for name, v in found.items()}


def by_reading(model: nn.Module, optimizer: Any, path: Path) -> dict[str, Any]:
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: state["master"].clone() for p, state in optimizer.state.items()}


SAVES = [by_state_dict, by_torchs_helper, by_save, by_reading]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("save", SAVES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("lane", "dtype"), WHOLE, ids=str)
def test_masters_that_are_saved_round_to_the_weights(
    lane: str, dtype: torch.dtype, save: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    model = make(dtype)
    optimizer = wrap(model, lane)
    train(model, optimizer, range(3))
    save(model, optimizer, tmp_path / "before")  # a read state does not hide what is written later
    clamp(model)
    masters = save(model, optimizer, tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(masters[name].to(dtype), parameter), name
    optimizer.close()


def by_step(model: nn.Module, optimizer: Any, earlier: Any) -> None:
    train(model, optimizer, range(3, 4))


def by_load(model: nn.Module, optimizer: Any, earlier: Any) -> None:
    model.load_state_dict(earlier[0])
    optimizer.load_state_dict(earlier[1])


def by_loaded_weights(model: nn.Module, optimizer: Any, earlier: Any) -> None:
    model.load_state_dict(earlier[0])


def by_resync(model: nn.Module, optimizer: Any, earlier: Any) -> None:
    clamp(model)
    optimizer.resync()


CHANGES = [by_step, by_load, by_loaded_weights, by_resync]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("lane", "dtype"), WHOLE, ids=str)
def test_weights_put_back_to_what_they_were_at_the_last_read_are_followed(
    lane: str, dtype: torch.dtype, change: Callable[..., None]
) -> None:
    model = make(dtype)
    optimizer = wrap(model, lane)
    train(model, optimizer, range(2))
    earlier = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(2, 3))
    before = [p.detach().clone() for p in model.parameters()]
    assert optimizer.state
    change(model, optimizer, earlier)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)
    for parameter in model.parameters():
        assert torch.equal(optimizer.state[parameter]["master"].to(dtype), parameter)
    optimizer.close()


@pytest.mark.parametrize("other", WHOLE, ids=str)
@pytest.mark.parametrize(("lane", "dtype"), WHOLE, ids=str)
def test_weights_written_before_a_save_come_back_in_any_lane(
    lane: str, dtype: torch.dtype, other: tuple[str, torch.dtype]
) -> None:
    model = make(dtype)
    optimizer = wrap(model, lane)
    train(model, optimizer, range(3))
    clamp(model)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    fresh = make(other[1])
    resumed = wrap(fresh, other[0])
    fresh.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for parameter in fresh.parameters():
        assert parameter.abs().max() <= LIMIT * 1.01
        master = resumed.state[parameter]["master"]
        assert master.abs().max() <= LIMIT * 1.01
    optimizer.close()
    resumed.close()


# --------------------------------------------------------------------------- frozen meanwhile


def by_module(model: nn.Module, optimizer: Any) -> None:
    new = {name: torch.full_like(v, 5.0) for name, v in model.state_dict().items()}
    train(model, optimizer, range(9, 10))  # the load of before has been used
    model.load_state_dict(new)


def by_hand(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(5.0)
    optimizer.resync()


def by_hand_alone(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(5.0)


@pytest.mark.parametrize("replace", [by_module, by_hand, by_hand_alone], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("lane", "dtype"), [*WHOLE, ("device", BF16)], ids=str)
def test_a_weight_replaced_while_frozen_outlives_unfreezing(
    lane: str, dtype: torch.dtype, replace: Callable[[nn.Module, Any], None]
) -> None:
    first = make(dtype)
    saving = wrap(first, lane)
    train(first, saving, range(3))
    model = make(dtype, frozen=True)
    optimizer = wrap(model, lane)
    model.load_state_dict(copy.deepcopy(first.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(saving.state_dict()))
    replace(model, optimizer)
    model.requires_grad_(True)
    optimizer.zero_grad()
    train(model, optimizer, range(1))
    for parameter in model[0].parameters():
        assert (parameter - 5.0).abs().max() < 0.1, "one step away from the new weight"
        exact = optimizer.state[parameter]
        assert float(exact["step"]) == 4, "the other state is the loaded one"
    saving.close()
    optimizer.close()


@pytest.mark.parametrize(("lane", "dtype"), [*WHOLE, ("device", BF16)], ids=str)
def test_masters_loaded_while_frozen_are_used_where_the_weight_is_theirs(
    lane: str, dtype: torch.dtype
) -> None:
    always = make(dtype)
    optimizer = wrap(always, lane)
    train(always, optimizer, range(3))
    model = make(dtype, frozen=True)
    resumed = wrap(model, lane)
    model.load_state_dict(copy.deepcopy(always.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.requires_grad_(True)
    for each, its in ((always, optimizer), (model, resumed)):
        train(each, its, range(3, 6))
    key = "master_remainder" if (lane, dtype) == ("device", BF16) else "master"
    for a, b in zip(always.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(bits(optimizer.state[a][key]), bits(resumed.state[b][key]))
    optimizer.close()
    resumed.close()


# --------------------------------------------------------------------------- a step count of zero

CLASSES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
}


def restarted(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["step"].zero_()


def pair(name: str, *, trained: bool = False) -> tuple[list[nn.Module], list[Any]]:
    models = [make(), make()]
    inner = [CLASSES[name](model.parameters()) for model in models]
    if trained:
        for model, optimizer in zip(models, inner, strict=True):
            train(model, optimizer, range(3))
    return models, inner


def check_same(models: list[nn.Module], optimizers: list[Any]) -> None:
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(5, 8))
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b), f"{(a - b).abs().max()}"
    optimizers[1].close()


def wrapped(inner: torch.optim.Optimizer) -> HybridDeviceOptimizer:
    return HybridDeviceOptimizer(inner, update_on="device", transfer=SMALL)


@pytest.mark.parametrize("name", CLASSES)
def test_a_step_count_set_to_zero_before_wrapping(name: str) -> None:
    models, inner = pair(name, trained=True)
    for optimizer in inner:
        restarted(optimizer)
    check_same(models, [inner[0], wrapped(inner[1])])


@pytest.mark.parametrize("name", CLASSES)
def test_a_step_count_set_to_zero_in_a_loaded_dict(name: str) -> None:
    models, inner = pair(name, trained=True)
    saved = copy.deepcopy(inner[0].state_dict())
    for state in saved["state"].values():
        state["step"].zero_()
    optimizers = [inner[0], wrapped(inner[1])]
    for optimizer in optimizers:
        optimizer.load_state_dict(copy.deepcopy(saved))
    check_same(models, optimizers)


@pytest.mark.parametrize("name", CLASSES)
def test_a_step_count_set_to_zero_by_hand_and_then_saved(name: str) -> None:
    models, inner = pair(name)
    optimizers = [inner[0], wrapped(inner[1])]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(3))
        restarted(optimizer)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    check_same(models, optimizers)


def test_step_sizes_of_rprop_outlive_a_step_count_of_zero_without_a_gradient_before() -> None:
    """Where signs have changed in all elements, nothing but the step sizes tells of updates."""
    models = [make(), make()]
    inner = [torch.optim.Rprop(model.parameters(), lr=0.01) for model in models]
    for model, optimizer in zip(models, inner, strict=True):
        train(model, optimizer, range(3))
        restarted(optimizer)
        for state in optimizer.state.values():
            state["prev"].zero_()
    check_same(models, [inner[0], wrapped(inner[1])])


@pytest.mark.parametrize("when", ["before wrapping", "after wrapping", "loaded"])
def test_sums_of_adagrad_that_were_set_before_the_first_step(when: str) -> None:
    models, inner = pair("adagrad")

    def set_sums(optimizer: Any) -> None:
        for state in optimizer.state.values():
            state["sum"].fill_(3.0)

    optimizers = list[Any](inner)
    if when == "before wrapping":
        for optimizer in inner:
            set_sums(optimizer)
    optimizers[1] = wrapped(inner[1])
    if when != "before wrapping":
        for optimizer in optimizers:
            set_sums(optimizer)
    if when == "loaded":
        for optimizer in optimizers:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    check_same(models, optimizers)


@pytest.mark.parametrize("name", CLASSES)
def test_state_that_nobody_has_touched_is_still_the_classs_to_make(name: str) -> None:
    models, inner = pair(name)
    optimizers = [inner[0], wrapped(inner[1])]
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    fresh: list[Tensor] = [v for s in optimizers[1].state.values() for v in s.values()]
    assert fresh
    check_same(models, optimizers)


# --------------------------------------------------------------------------- dropped


@pytest.mark.parametrize("drop", ["delete", "clear"])
@pytest.mark.parametrize(("lane", "dtype"), [*WHOLE, ("host", FP32)], ids=str)
def test_state_dropped_before_a_phase_begins_anew_from_the_weights(
    lane: str, dtype: torch.dtype, drop: str
) -> None:
    models = [make(dtype), make(dtype)]
    stays, leaves = (wrap(model, lane) for model in models)
    for model, optimizer in zip(models, (stays, leaves), strict=True):
        train(model, optimizer, range(2))
        if drop == "delete":
            del optimizer.state[model[0].weight]
        else:
            optimizer.state.clear()
    with PhaseOffloader(models[1], leaves, grads="drop").away():
        pass
    for model, optimizer in zip(models, (stays, leaves), strict=True):
        train(model, optimizer, range(2, 4))
    for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(bits(mine), bits(theirs))
