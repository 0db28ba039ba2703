"""``CPUOffloadPolicy`` is taken off, even if the device is full at first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

import fsdp_offload
from fsdp_offload.core import fsdp, storage


def test_parameters_move_on_when_the_device_was_full(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    policy = CPUOffloadPolicy(pin_memory=False)
    try:
        (group,) = fsdp.find_groups([fsdp_offload.shard(model, offload_policy=policy)])
    finally:
        dist.destroy_process_group()
    raw: Any = group._raw
    for each in raw.fsdp_params:
        each.device = torch.device("meta")
    model.bias.grad = torch.zeros_like(model.bias)
    move, calls = fsdp.move, 0

    def move_once(*given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("full")
        move(*given)

    monkeypatch.setattr(fsdp, "move", move_once)
    with pytest.raises(torch.OutOfMemoryError):
        group.leave_cpu()
    assert list(group.homes) == [model.bias]
    group.leave_cpu()
    assert group.homes == {}
    assert type(raw.offload_policy) is OffloadPolicy
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_a_move_that_fails_keeps_the_gradient() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = gradient = torch.ones(2)
    with pytest.raises((RuntimeError, AssertionError)):
        storage.move(parameter, torch.device("xpu:99"))
    assert parameter.grad is gradient
