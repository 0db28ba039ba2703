"""State that callers write by hand, and hyper-parameters that they change in place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_offload import ConfigError, HybridDeviceOptimizer, StateDictError
from fsdp_offload.update.params import Snapshot
from tests.helpers.compare import same

BF16, FP16 = torch.bfloat16, torch.float16


def stepped(dtype: torch.dtype) -> tuple[nn.Parameter, HybridDeviceOptimizer]:
    """After one step."""
    parameter = nn.Parameter(torch.randn(9).to(dtype))
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW([parameter]))
    parameter.grad = torch.randn(9).to(dtype)
    optimizer.step()
    return parameter, optimizer


BAD = [{"step": torch.zeros(2)}, {"step": "two"}, {"exp_avg_sq": None}, {"master": torch.ones(3)}]


@pytest.mark.parametrize("bad", BAD)
def test_bad_values_are_refused_before_good_ones_are_adopted(bad: dict[str, Any]) -> None:
    parameter, optimizer = stepped(FP16)
    state = optimizer.state[parameter]
    live, before = state["exp_avg"], copy.deepcopy(state)
    state.update(bad, exp_avg=torch.full((9,), 3.0))
    with pytest.raises(StateDictError, match=next(iter(bad))):
        optimizer.step()
    assert same(live, before["exp_avg"])


def test_an_entry_that_the_caller_deleted_is_missing() -> None:
    parameter, optimizer = stepped(BF16)
    del optimizer.state[parameter]["exp_avg"]
    with pytest.raises(StateDictError, match=r"\['exp_avg'\] are missing"):
        optimizer.step()


@pytest.mark.parametrize(("dtype", "name"), [(FP16, "master"), (BF16, "master_remainder")])
def test_a_master_that_the_caller_replaced_is_adopted(dtype: torch.dtype, name: str) -> None:
    parameter, optimizer = stepped(dtype)
    new = torch.arange(9).to(optimizer.state[parameter][name].dtype)
    optimizer.state[parameter][name] = new.clone()
    assert same(optimizer.state_dict()["state"][0][name], new)
    assert dtype == BF16 or same(parameter.detach(), new.half())


@pytest.mark.parametrize("cls", [torch.optim.ASGD, torch.optim.Rprop])
def test_plain_optimizer_continues_with_a_parameter_without_a_gradient_so_far(cls: Any) -> None:
    """Its state shows the learning rate of its own group."""

    def build() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        made = [nn.Parameter(torch.ones(5)) for _ in range(2)]
        return made, cls([{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(made)])

    (wrapped, inner), (parameters, plain) = build(), build()
    optimizer = HybridDeviceOptimizer(inner)
    for own, each in ((wrapped, optimizer), (parameters, plain)):
        own[0].grad = torch.ones(5)
        each.step()
    (loaded, continued) = build()
    continued.load_state_dict(optimizer.state_dict())
    for own, each in ((loaded, continued), (parameters, plain)):
        own[1].grad = torch.ones(5)
        each.step()
    assert same(loaded[1].detach(), parameters[1].detach())


def test_tensors_inside_hyper_parameters_are_copied() -> None:
    beta = torch.tensor(0.9)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], betas=(beta, torch.tensor(0.99)))
    snapshot = Snapshot.take(optimizer, optimizer.param_groups, host=True)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it adds "initial_lr", which no update used
    snapshot.check_unchanged(optimizer.param_groups)
    beta.fill_(0.5)
    for groups in (snapshot.groups, snapshot.host_groups):
        assert groups[0]["betas"][0] == 0.9
    with pytest.raises(ConfigError, match="betas"):
        snapshot.check_unchanged(optimizer.param_groups)
