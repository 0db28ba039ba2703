"""State and weights that the caller writes, loads and saves; the fuzz has them in every order."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import Optimizer

from fsdp_offload import HybridDeviceOptimizer, StateDictError, checkpoint
from tests.helpers.compare import assert_same, bits
from tests.helpers.own_optimizers import NumberState
from tests.helpers.side_by_side import SHAPES, Apart, SideBySide
from tests.helpers.training import LANES, Model, each_lane, train, values, wrap

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WHOLE = [("streamed", FP16), ("host", FP16)]
"""Lanes and dtypes that keep a whole master."""
LIMIT = 0.01


def name_of(value: object) -> str:
    return getattr(value, "__name__", str(value))


def made(lane: str, dtype: torch.dtype, steps: int = 3) -> tuple[Model, HybridDeviceOptimizer]:
    """A wrapped AdamW that knows its model, after a few steps."""
    model = Model(dtype=dtype)
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.01), lane, model=model)
    train(model, optimizer, range(steps))
    return model, optimizer


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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("lane", "dtype", "save"),
    [
        (*WHOLE[0], by_state_dict),
        (*WHOLE[1], by_reading),
        (*WHOLE[1], by_save),
    ],
    ids=name_of,
)
def test_masters_that_are_saved_round_to_the_weights(
    lane: str, dtype: torch.dtype, save: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    model, optimizer = made(lane, dtype)
    save(model, optimizer, tmp_path / "before")  # a read state does not hide what is written later
    clamp(model)
    masters = save(model, optimizer, tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(masters[name].to(dtype), parameter), name


@each_lane
def test_weights_loaded_in_place_and_then_announced_are_the_new_masters(lane: str) -> None:
    """``sd = model.state_dict(); dcp.load(sd); model.load_state_dict(sd)``: nothing changes in
    the last call."""
    model = Model(dtype=BF16)
    mine = wrap(torch.optim.SGD(model.parameters(), lr=1.0), lane, model=model)
    train(model, mine, range(3))
    shown = model.state_dict()
    for value in shown.values():
        value.fill_(64.0)
    model.load_state_dict(shown)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
        p.grad.view(-1)[0] = 2**-3  # far below half a bf16 ulp of 64
    mine.step()
    for state in mine.state.values():
        assert not state["master_remainder"].view(-1)[1:].any()


def test_a_load_without_saved_masters_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(dtype=BF16)
    plain = torch.optim.AdamW(model.parameters())
    train(model, plain, range(2))
    saved = copy.deepcopy(plain.state_dict())
    mine = wrap(torch.optim.AdamW(model.parameters()), "streamed")
    with caplog.at_level("WARNING", logger="fsdp_offload"):
        mine.load_state_dict(saved)
        assert "no saved fp32 masters for 2 parameters" in caplog.text
        caplog.clear()
        mine.load_state_dict(copy.deepcopy(mine.state_dict()))
        assert "no saved fp32 masters" not in caplog.text
    assert all(not state["master_remainder"].any() for state in mine.state.values())


# --------------------------------------------------------------------------- frozen meanwhile


def by_module(model: nn.Module, optimizer: Any) -> None:
    new = {name: torch.full_like(v, 5.0) for name, v in model.state_dict().items()}
    train(model, optimizer, range(9, 10))  # the load of before has been used
    model.load_state_dict(new)


def by_hand_alone(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(5.0)


def by_hand(model: nn.Module, optimizer: Any) -> None:
    by_hand_alone(model, optimizer)
    optimizer.resync()


def loaded_while_frozen(
    lane: str, dtype: torch.dtype
) -> tuple[Model, HybridDeviceOptimizer, Model, HybridDeviceOptimizer]:
    """A trained pair, and another that has loaded its state while a parameter was frozen."""
    first, saving = made(lane, dtype)
    model = Model(dtype=dtype)
    model.weights[0].requires_grad_(False)
    where = {"update_on": "host" if lane == "host" else "device"}  # also of what comes later
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.01), lane, model=model, **where)
    model.load_state_dict(copy.deepcopy(first.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(saving.state_dict()))
    return first, saving, model, optimizer


@pytest.mark.parametrize(
    ("lane", "dtype", "replace"),
    [
        ("streamed", FP16, by_module),
        ("host", BF16, by_hand),
        ("host", FP16, by_hand_alone),
        ("streamed", BF16, by_hand_alone),
    ],
    ids=name_of,
)
def test_a_weight_replaced_while_frozen_outlives_unfreezing(
    lane: str, dtype: torch.dtype, replace: Callable[[nn.Module, Any], None]
) -> None:
    _, _, model, optimizer = loaded_while_frozen(lane, dtype)
    replace(model, optimizer)
    model.requires_grad_(True)
    optimizer.zero_grad()
    train(model, optimizer, range(1))
    weight = model.weights[0]
    assert (weight - 5.0).abs().max() < 0.1, "one step away from the new weight"
    assert float(optimizer.state[weight]["step"]) == 4, "the other state is the loaded one"


@pytest.mark.parametrize(("lane", "dtype"), [*WHOLE, ("streamed", BF16), ("host", BF16)], ids=str)
def test_masters_loaded_while_frozen_are_used_where_the_weight_is_theirs(
    lane: str, dtype: torch.dtype
) -> None:
    always, optimizer, model, resumed = loaded_while_frozen(lane, dtype)
    model.requires_grad_(True)
    for each, its in ((always, optimizer), (model, resumed)):
        train(each, its, range(3, 6))
    assert_same(values(model), values(always))
    key = "master_remainder" if dtype == BF16 else "master"
    for a, b in zip(always.parameters(), model.parameters(), strict=True):
        assert torch.equal(bits(optimizer.state[a][key]), bits(resumed.state[b][key]))


@each_lane
def test_a_parameter_that_is_frozen_meanwhile_keeps_its_place(lane: str) -> None:
    """Momentum that was not there before is reserved then."""

    def sgd(groups: Any) -> Optimizer:
        return torch.optim.SGD(groups, lr=0.1)

    def fused(groups: Any) -> Optimizer:
        return torch.optim.SGD(groups, lr=0.1, fused=True)

    plain = {"plain_build": partial(Apart, fused)} if lane == "host" else {}
    half = {"dtypes": [FP16], "plain_dtypes": [FP32]}
    twins = SideBySide(sgd, update_on=[lane], **half, **plain)
    present = [True] * len(SHAPES)
    twins.step(present)
    twins.mine[0].requires_grad_(False)
    twins.change(momentum=0.9)
    twins.step([False, *present[1:]])
    twins.mine[0].requires_grad_(True)
    twins.step(present)
    twins.compare()


# --------------------------------------------------------------------------- written by hand


def test_state_replaced_by_another_shape_is_refused() -> None:
    model, optimizer = made("streamed", FP32)
    weights = values(model)
    optimizer.state[model.weights[0]]["exp_avg"] = torch.zeros(3)
    with pytest.raises(StateDictError, match="exp_avg"):
        train(model, optimizer, range(1, 2))
    assert_same(values(model), weights)


def test_live_state_that_has_changed_places_is_loaded_as_it_was() -> None:
    parameters = [nn.Parameter(torch.randn(9)) for _ in range(2)]
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW(parameters))
    for parameter in parameters:
        parameter.grad = torch.randn(9)
    optimizer.step()
    state = optimizer.state_dict()
    before = copy.deepcopy(state["state"])
    state["state"] = {0: state["state"][1], 1: state["state"][0]}
    optimizer.load_state_dict(state)
    after = optimizer.state_dict()["state"]
    for index in range(2):
        for name, value in before[index].items():
            assert torch.equal(after[1 - index][name], value)


def test_a_load_restores_python_numbers_that_were_shown() -> None:
    model = Model()
    optimizer = wrap(NumberState(model.parameters()), "streamed", elementwise=True)
    train(model, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(1, 5))
    assert {state["step"] for state in optimizer.state.values()} == {5}
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(5, 6))
    assert {state["step"] for state in optimizer.state.values()} == {2}


def test_a_group_of_frozen_parameters_reserves_nothing() -> None:
    model, mine = made("streamed", FP32)
    before = mine.statistics()
    for _ in range(3):
        mine.add_param_group({"params": [nn.Parameter(torch.ones(9), requires_grad=False)]})
    assert mine.statistics() == before
    train(model, mine, range(2))


def test_a_wrapped_model_can_still_be_copied_and_pickled() -> None:
    model, _ = made("streamed", BF16)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.load_state_dict(model.state_dict())
        assert_same(values(twin), values(model))


@pytest.mark.parametrize(("lane", "is_stepped"), [*zip(LANES, (False, True, True), strict=True)])
def test_a_master_alone_is_loaded_where_momentum_is_needed_now(
    lane: str, is_stepped: bool, tmp_path: Path
) -> None:
    """As the plain optimizer, which makes the momentum at its next step."""
    models = [Model(seed, dtype=BF16) for seed in range(3)]
    inner = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    mine, *others = (wrap(o, lane, model=m) for o, m in zip(inner, models, strict=True))
    train(models[0], mine, range(is_stepped))
    for optimizer in (mine, *others):
        optimizer.param_groups[0]["momentum"] = 0.9
    assert all(len(state) == 1 for state in mine.state.values())
    checkpoint.save(tmp_path / "saved", models[0], mine)
    models[1].load_state_dict(copy.deepcopy(models[0].state_dict()))
    others[0].load_state_dict(copy.deepcopy(mine.state_dict()))
    checkpoint.load(tmp_path / "saved", models[2], others[1])
    for model, optimizer in zip(models, (mine, *others), strict=True):
        train(model, optimizer, range(3, 5))
        assert_same(values(model), values(models[0]))


def test_amsgrad_switched_on_before_the_first_step_is_reserved_then() -> None:
    twins = SideBySide(lambda groups: torch.optim.AdamW(groups, lr=0.1))
    twins.change(amsgrad=True)
    twins.run(4)
    assert "max_exp_avg_sq" in twins.wrapped.state[twins.mine[0]]
