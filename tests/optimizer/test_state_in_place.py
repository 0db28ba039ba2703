"""What a caller does in place to state and weights that it was shown is followed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_offload import (
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


@pytest.mark.parametrize("lane", ["streamed", "host"])
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


def test_a_group_of_frozen_parameters_reserves_nothing() -> None:
    model = make_model()
    mine = wrap(torch.optim.AdamW(model.parameters()), "streamed")
    before = mine.statistics()
    for _ in range(3):
        mine.add_param_group({"params": [nn.Parameter(torch.ones(9), requires_grad=False)]})
    assert mine.statistics() == before
    train(model, mine, range(2))


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
