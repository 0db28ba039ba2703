"""Models that were sharded with ``CPUOffloadPolicy``: taken over, with the bits of plain FSDP2."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from fsdp_offload.core import arguments, fsdp
from tests.fsdp import models
from tests.fsdp.models import Ranks, check

ON_CPU = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(models.groups(model), fused=True)


def take_over(stepped: int, dtype: torch.dtype, overlap: str, **options: Any) -> None:
    """Wrapped after ``stepped`` steps, between a backward and its step."""
    mesh = models.flat_mesh(dist.get_world_size())
    plain, mine = models.toy(mesh, dtype=dtype), models.toy(mesh, dtype=dtype, **ON_CPU)
    expected, wrapped = adamw(plain), adamw(mine)
    for model, optimizer in ((plain, expected), (mine, wrapped)):
        models.train((model, optimizer), range(2, 2 + stepped))
        models.backward(model, 2)
    wrapped = models.wrap(wrapped, mine, overlap=overlap, master_weights=False, **options)
    for model, optimizer in ((plain, expected), (mine, wrapped)):
        optimizer.step()
        optimizer.zero_grad()
        models.train((model, optimizer), range(3, 6))
    models.check_twins(wrapped, expected, "taken over")
    for group, _ in fsdp.fsdp_groups([mine]):
        check(not isinstance(group.offload_policy, CPUOffloadPolicy), "a group has the policy")
        check(not any(each.offload_to_cpu for each in group.fsdp_params), "a parameter has it")


@pytest.mark.parametrize(
    ("stepped", "dtype", "overlap"),
    [(0, torch.float32, "forward"), (2, torch.float32, "step"), (2, torch.bfloat16, "forward")],
)
def test_bits_are_those_of_plain_fsdp2(
    ranks: Ranks, size: int, stepped: int, dtype: torch.dtype, overlap: str
) -> None:
    ranks(size).run(take_over, stepped, dtype, overlap)


@pytest.mark.parametrize("overlap", ["step", "forward", "backward"])
def test_weights_go_to_host_memory(ranks: Ranks, size: int, overlap: str) -> None:
    ranks(size).run(take_over, 2, torch.bfloat16, overlap, offload="all", device_memory=0)


def move(on: str) -> tuple[list[str], list[str]]:
    """The device that FSDP2 gathers on is set to ``on``: this machine may have the CPU alone."""
    model: Any = models.toy(models.flat_mesh(2), **ON_CPU)
    models.backward(model, 2)
    model.frozen.of_the_caller = "kept"
    before = dict(model.named_parameters())
    model(models.tokens(3))  # the root stays gathered
    gradients = [name for name, parameter in before.items() if parameter.grad is not None]
    for group, _ in fsdp.fsdp_groups([model]):
        for each in group.fsdp_params:
            each.device = torch.device(on)
    said: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(
            arguments, "warn", lambda text, *values: said.append(text % values)
        )
        arguments.leave_cpu([model])
        arguments.leave_cpu([model])
    after = dict(model.named_parameters())
    check(list(after) == list(before), f"names {list(after)}")
    for name, parameter in after.items():
        check(parameter is before[name], f"{name} is another object")
        check(type(parameter) is DTensor, f"{name} is a {type(parameter)}")
        check(parameter.device.type == parameter.to_local().device.type == on, f"{name} stayed")
        has_gradient = parameter.grad is not None and parameter.grad.device.type == on
        check(has_gradient == (name in gradients), f"gradient of {name}")
    check(model.head.weight is model.embed.weight, "untied")
    check(not model.frozen.requires_grad, "the frozen parameter is trained")
    check(model.frozen.of_the_caller == "kept", "attributes of a parameter are lost")
    return said, gradients


def test_parameters_move_and_stay_the_same_objects(ranks: Ranks) -> None:
    for said, gradients in ranks(2).run(move, "meta"):
        assert len(gradients) == 16
        assert len(said) == 1
        assert "sharded with CPUOffloadPolicy: its weights, " in said[0]


def test_nothing_is_said_where_nothing_moves(ranks: Ranks) -> None:
    assert [said for said, _ in ranks(2).run(move, "cpu")] == [[], []]
