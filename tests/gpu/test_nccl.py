"""FSDP2 on NCCL: twins, clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_offload import HybridDeviceOptimizer
from fsdp_offload.update import codec
from tests.helpers.compare import local
from tests.helpers.lanes import in_lanes
from tests.phase_jobs import SMALL, inputs, make_net, train


def twins(lane: Any, options: dict[str, Any]) -> None:
    plain_net, net = make_net(), make_net()
    plain = torch.optim.AdamW(plain_net.parameters(), lr=0.01, **options)
    inner = torch.optim.AdamW(net.parameters(), lr=0.01, **options)
    count = sum(1 for _ in net.parameters())
    lanes = [("resident", "streamed")[i % 2] for i in range(count)] if lane == "mixed" else lane
    mine = in_lanes(inner, model=net, update_on=lanes, transfer=SMALL)
    for optimizer, module in ((plain, plain_net), (mine, net)):
        train(module, optimizer, range(5))
    for a, b in zip(plain_net.parameters(), net.parameters(), strict=True):
        assert torch.equal(local(a), local(b))
        for name, value in plain.state[a].items():
            assert torch.equal(local(value).cpu(), local(mine.state[b][name]).cpu()), name
    mine.close()


@pytest.mark.gpus(2)
@pytest.mark.parametrize("lane", ["device", "mixed"])
@pytest.mark.parametrize("options", [{"fused": True}, {}], ids=["fused", "foreach"])
def test_device_lanes_equal_the_plain_optimizer(
    ranks: Callable[..., Any], lane: str, options: dict[str, Any]
) -> None:
    ranks(2, device_type="cuda").run(twins, lane, options)


def host_twin() -> None:
    """The host lane against torch's CPU kernel on copies of the shards, fed the same gradients."""
    net = make_net(torch.bfloat16)
    mine = HybridDeviceOptimizer(
        torch.optim.AdamW(net.parameters(), lr=0.01), model=net, update_on="host", transfer=SMALL
    )
    copies = [nn.Parameter(local(p).float().cpu()) for p in net.parameters()]
    plain = torch.optim.AdamW(copies, lr=0.01, fused=True)
    for step in range(4):
        net(inputs(step, torch.bfloat16)).float().square().mean().backward()
        for copy, parameter in zip(copies, net.parameters(), strict=True):
            copy.grad = local(parameter.grad).float().cpu()
        plain.step()
        mine.step()
        mine.zero_grad()
    for copy, parameter in zip(copies, net.parameters(), strict=True):
        remainder = local(mine.state[parameter]["master_remainder"])
        assert torch.equal(codec.decoded(local(parameter).cpu(), remainder), copy)
    mine.close()


@pytest.mark.gpus(2)
def test_host_lane_equals_the_cpu_kernel(ranks: Callable[..., Any]) -> None:
    ranks(2, device_type="cuda").run(host_twin)
