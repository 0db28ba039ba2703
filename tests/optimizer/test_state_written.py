"""State and weights that the caller writes, in every order with saves, loads and freezing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from fsdp_offload import HybridDeviceOptimizer, TransferConfig, checkpoint
from tests.helpers.side_by_side import bits

SMALL = TransferConfig(bucket_bytes=4096, slots=2, host_threads=1)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WHOLE = [("device", FP16), ("host", FP16), ("host", BF16)]
"""Lanes and dtypes that keep a whole master."""
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
@pytest.mark.parametrize(
    ("lane", "dtype", "save"),
    [(*WHOLE[i % 3], save) for i, save in enumerate(SAVES)],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
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


@pytest.mark.parametrize(
    ("lane", "dtype", "other"), [(*WHOLE[i], WHOLE[i - 1]) for i in range(3)], ids=str
)
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


@pytest.mark.parametrize(
    ("lane", "dtype", "replace"),
    [
        ("device", FP16, by_module),
        ("host", BF16, by_hand),
        ("host", FP16, by_hand_alone),
        ("device", BF16, by_hand_alone),
    ],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
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
