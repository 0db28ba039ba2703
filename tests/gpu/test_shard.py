"""``shard`` on a GPU: one process, no group before it, the bits of the plain module."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp_offload
from fsdp_offload import HybridDeviceOptimizer, UnsupportedParameterError
from tests.helpers.compare import assert_same

WIDTH = 512


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Model(nn.Module):
    """Norms in fp32, all else in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4)
        )
        self.bfloat16()
        for layer in self.layers:
            layer[0].float()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer[1](layer[0](x.float()).bfloat16()))
        return x.float().square().mean()


def train(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for step in range(6):
        generator = torch.Generator("cuda").manual_seed(step)
        x = torch.randn(64, WIDTH, device="cuda", generator=generator).bfloat16()
        loss = model(x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("device", ["cpu", "cuda"])  # where the model is before
@pytest.mark.parametrize("device_memory", ["auto", 0])
def test_bits_are_those_of_the_plain_module(device: str, device_memory: Any) -> None:
    mine = Model().to(device)
    plain = copy.deepcopy(mine).cuda()
    fsdp_offload.shard(mine)
    assert {parameter.device for parameter in mine.parameters()} == {torch.device("cuda", 0)}
    optimizer = HybridDeviceOptimizer(
        torch.optim.AdamW(mine.parameters(), lr=1e-2, fused=True),
        mine,
        device_memory=device_memory,
        master_weights=False,
    )
    assert optimizer.statistics().overlap == "forward"
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    assert train(mine, optimizer) == train(plain, reference)
    optimizer.synchronize()
    assert_same([*mine.parameters()], [*plain.parameters()])


@pytest.mark.gpus(2)
def test_a_model_on_another_device_is_refused() -> None:
    with pytest.raises(UnsupportedParameterError, match="on cuda:1"):
        fsdp_offload.shard(Model().to("cuda:1"))
    assert not dist.is_initialized()
