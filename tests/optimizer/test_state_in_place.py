"""What a caller does in place to state and weights that it was shown is followed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_offload import (
    ConfigError,
    DeviceError,
    HybridDeviceOptimizer,
    StateDictError,
    TransferConfig,
)

SMALL = TransferConfig(bucket_bytes=4096, slots=2, host_threads=1)
LANES = ["resident", "streamed", "host"]


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """The first matrix spans several buckets."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(50, 70), nn.Linear(70, 3)).to(dtype)


def wrap(inner: torch.optim.Optimizer, lane: str, **options: Any) -> HybridDeviceOptimizer:
    count = sum(len(group["params"]) for group in inner.param_groups)
    lanes = {"update_on": [lane] * count}
    return HybridDeviceOptimizer(inner, transfer=SMALL, **{**lanes, **options})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def options_of(lane: str) -> dict[str, Any]:
    return {"lr": 0.01, "fused": True} if lane == "host" else {"lr": 0.01}


@pytest.mark.parametrize("lane", LANES)
def test_a_step_count_written_in_place_reaches_every_piece(lane: str) -> None:
    models = [make_model(), make_model()]
    plain = torch.optim.AdamW(models[0].parameters(), **options_of(lane))
    mine = wrap(torch.optim.AdamW(models[1].parameters(), **options_of(lane)), lane)
    for model, optimizer in zip(models, (plain, mine), strict=True):
        train(model, optimizer, range(3))
        for state in optimizer.state.values():
            state["step"].zero_()
        train(model, optimizer, range(3, 5))
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)
        assert mine.state[b]["step"].item() == 2


@pytest.mark.parametrize("lane", LANES)
def test_state_replaced_by_other_objects_gives_its_values_once(lane: str) -> None:
    models = [make_model(), make_model()]
    plain = torch.optim.AdamW(models[0].parameters(), **options_of(lane))
    mine = wrap(torch.optim.AdamW(models[1].parameters(), **options_of(lane)), lane)
    for model, optimizer in zip(models, (plain, mine), strict=True):
        train(model, optimizer, range(3))
        for state in optimizer.state.values():
            state["step"] = torch.tensor(7.0)
            state["exp_avg"] = state["exp_avg"].clone() * 2
        for step in range(3, 6):
            train(model, optimizer, range(step, step + 1))
            assert {float(state["step"]) for state in optimizer.state.values()} == {step + 5.0}
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def shifted(optimizer: torch.optim.Optimizer, model: nn.Module, how: str) -> None:
    """Each parameter's state becomes the next one's, among live tensors."""
    if how == "by hand":
        states = [optimizer.state[p] for p in model.parameters()]
        before = [dict(state) for state in states]
        for state, other in zip(states, [*before[1:], before[0]], strict=True):
            state.update(other)
        return
    live = optimizer.state_dict()
    count = len(live["state"])
    state = {i: live["state"][(i + 1) % count] for i in range(count)}
    if how == "dropped":
        state[1] = {}  # is reset, and what it had is another's
    optimizer.load_state_dict({**live, "state": state})


@pytest.mark.parametrize(
    ("how", "is_away"),
    [("loaded", False), ("dropped", False), ("by hand", False), ("by hand", True)],
)
@pytest.mark.parametrize("lane", LANES)
def test_state_that_changes_places_is_not_overwritten(lane: str, how: str, is_away: bool) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(3))))
    plain = torch.optim.AdamW(models[0].parameters(), **options_of(lane))
    mine = wrap(torch.optim.AdamW(models[1].parameters(), **options_of(lane)), lane)
    for model, optimizer in zip(models, (plain, mine), strict=True):
        for step in range(4):
            for index, p in enumerate(model.parameters()):  # state of different ages
                generator = torch.Generator().manual_seed(10 * step + index)
                p.grad = torch.randn(p.shape, generator=generator) if step >= index else None
            optimizer.step()
        if is_away and isinstance(optimizer, HybridDeviceOptimizer):
            optimizer.offload()
        shifted(optimizer, model, how)
        if isinstance(optimizer, HybridDeviceOptimizer):
            optimizer.reload()
        train(model, optimizer, range(4, 6))
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_state_replaced_by_another_shape_is_refused() -> None:
    model = make_model()
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.01), "streamed")
    train(model, optimizer, range(1))
    weights = [p.detach().clone() for p in model.parameters()]
    optimizer.state[next(model.parameters())]["exp_avg"] = torch.zeros(3)
    with pytest.raises(StateDictError, match="exp_avg"):
        train(model, optimizer, range(1, 2))
    for a, b in zip(weights, model.parameters(), strict=True):
        assert torch.equal(a, b)


class CountingSGD(torch.optim.Optimizer):
    """Keeps a Python number as state and steps by its inverse."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    count = self.state[p]["count"] = self.state[p].get("count", 0) + 1
                    p.add_(p.grad, alpha=-group["lr"] / count)


def test_a_load_restores_python_numbers_that_were_shown() -> None:
    model = make_model()
    optimizer = wrap(CountingSGD(model.parameters()), "streamed", elementwise=True)
    train(model, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(1, 5))
    assert {state["count"] for state in optimizer.state.values()} == {5}
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(5, 6))
    assert {state["count"] for state in optimizer.state.values()} == {2}


@pytest.mark.parametrize("lane", LANES)
def test_state_written_in_place_before_the_first_step_is_kept(lane: str) -> None:
    models = [make_model(), make_model()]
    plain = torch.optim.AdamW(models[0].parameters(), **options_of(lane))
    train(models[0], plain, range(3))
    models[1].load_state_dict(models[0].state_dict())
    mine = wrap(torch.optim.AdamW(models[1].parameters(), **options_of(lane)), lane)
    shown = mine.state_dict()["state"]
    for index, saved in plain.state_dict()["state"].items():
        for name, value in saved.items():
            shown[index][name].copy_(value)  # as torch.distributed.checkpoint does
    for model, optimizer in zip(models, (plain, mine), strict=True):
        train(model, optimizer, range(3, 6))
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("lane", LANES)
def test_dropped_state_starts_anew_as_with_the_plain_optimizer(lane: str) -> None:
    models = [make_model(), make_model()]
    plain = torch.optim.AdamW(models[0].parameters(), **options_of(lane))
    mine = wrap(torch.optim.AdamW(models[1].parameters(), **options_of(lane)), lane)
    for model, optimizer in zip(models, (plain, mine), strict=True):
        train(model, optimizer, range(3))
        optimizer.state.clear()
        train(model, optimizer, range(3, 5))
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)
    saved = mine.state_dict()["state"]
    assert [saved[i]["step"].item() for i in range(4)] == [2.0] * 4


@pytest.mark.parametrize("lane", LANES)
def test_weights_loaded_in_place_and_then_announced_are_the_new_masters(lane: str) -> None:
    """``sd = model.state_dict(); dcp.load(sd); model.load_state_dict(sd)``: nothing changes in
    the last call."""
    model = make_model(torch.bfloat16)
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
        if lane == "host":
            expected = torch.full_like(state["master"], 64.0)
            expected.view(-1)[0] -= 2**-3
            assert torch.equal(state["master"], expected)
        else:
            assert not state["master_remainder"].view(-1)[1:].any()


def test_a_wrapped_model_can_still_be_copied_and_pickled() -> None:
    model = make_model(torch.bfloat16)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1.0), "streamed", model=model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.load_state_dict(model.state_dict())
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a, b)
    optimizer.close()


def test_a_device_budget_is_spent_once() -> None:
    models = [make_model() for _ in range(3)]
    one = sum(8 * p.numel() for p in models[0].parameters())
    inner = torch.optim.AdamW(models[0].parameters())
    mine = HybridDeviceOptimizer(inner, device_budget=one + 100, transfer=SMALL)
    for model in models[1:]:
        mine.add_param_group({"params": list(model.parameters())})
    assert mine.statistics().device_state_bytes <= one + 100
    assert mine.statistics().parameters["resident"] >= 4
    assert mine.statistics().host_state_bytes >= 2 * one - 100


def test_a_group_of_frozen_parameters_reserves_nothing() -> None:
    model = make_model()
    mine = wrap(torch.optim.AdamW(model.parameters()), "streamed")
    before = mine.statistics()
    for _ in range(3):
        mine.add_param_group({"params": [nn.Parameter(torch.ones(9), requires_grad=False)]})
    assert mine.statistics() == before
    train(model, mine, range(2))


def test_added_parameters_pass_the_same_checks_as_the_first() -> None:
    model = make_model()
    mine = wrap(torch.optim.AdamW(model.parameters()), "streamed")
    with pytest.raises((DeviceError, ConfigError)):
        mine.add_param_group({"params": [nn.Parameter(torch.ones(9, device="meta"))]})
    with pytest.raises(ConfigError, match="differentiable"):
        mine.add_param_group({"params": [nn.Parameter(torch.ones(9))], "differentiable": True})
    assert len(mine.param_groups) == 1
    train(model, mine, range(2))


@pytest.mark.parametrize(
    "state", [[], {0: {"step": "x", "exp_avg": None, "exp_avg_sq": None}}, {0: 3}]
)
def test_malformed_state_is_refused_before_anything_is_written(state: Any) -> None:
    model = make_model()
    mine = wrap(torch.optim.AdamW(model.parameters()), "streamed")
    train(model, mine, range(2))
    saved = copy.deepcopy(mine.state_dict())
    with pytest.raises(StateDictError):
        mine.load_state_dict({"state": state, "param_groups": saved["param_groups"]})
    for index, values in mine.state_dict()["state"].items():
        for name, value in values.items():
            assert torch.equal(value, saved["state"][index][name])
    train(model, mine, range(2, 3))


def test_a_load_without_saved_masters_says_so(caplog: pytest.LogCaptureFixture) -> None:
    models = [make_model(torch.bfloat16), make_model(torch.bfloat16)]
    plain = torch.optim.AdamW(models[0].parameters())
    train(models[0], plain, range(2))
    models[1].load_state_dict(models[0].state_dict())
    mine = wrap(torch.optim.AdamW(models[1].parameters()), "streamed")
    with caplog.at_level("WARNING", logger="fsdp_offload"):
        mine.load_state_dict(plain.state_dict())
        assert "4 parameters came without a saved fp32 master" in caplog.text
        caplog.clear()
        mine.load_state_dict(copy.deepcopy(mine.state_dict()))
        assert "came without" not in caplog.text
    assert all(not state["master_remainder"].any() for state in mine.state.values())
