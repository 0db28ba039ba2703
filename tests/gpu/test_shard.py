"""``shard`` on a GPU: one process, no group before it, the bits of the plain module."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn import functional as F

import fsdp_offload
from fsdp_offload import HybridDeviceOptimizer, UnsupportedParameterError
from tests import phase_jobs
from tests.helpers.compare import assert_same, local
from tests.phase_jobs import make_net

WIDTH = 512


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Block(nn.Module):
    """A norm in fp32, all else in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x.float()).bfloat16()))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
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


@pytest.mark.parametrize("pin_memory", [False, True])
def test_cpu_offload_policy_is_taken_off(pin_memory: bool) -> None:
    """Wrapped between a backward and its step, then trained with the bits of the plain module."""
    mine = Model()
    plain = copy.deepcopy(mine).cuda()
    fsdp_offload.shard(mine, offload_policy=CPUOffloadPolicy(pin_memory=pin_memory))
    assert {parameter.device.type for parameter in mine.parameters()} == {"cpu"}
    before = dict(mine.named_parameters())
    inner = torch.optim.AdamW(mine.parameters(), lr=1e-2, fused=True)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for model in (mine, plain):
        model(torch.ones(64, WIDTH, device="cuda", dtype=torch.bfloat16)).backward()
    optimizer = HybridDeviceOptimizer(inner, mine, master_weights=False)
    assert optimizer.statistics().overlap == "forward"
    for name, parameter in mine.named_parameters():
        assert parameter is before[name]
        assert parameter.device == parameter.to_local().device == torch.device("cuda", 0)
    for each in (optimizer, reference):
        each.step()
        each.zero_grad()
    assert train(mine, optimizer) == train(plain, reference)
    optimizer.synchronize()
    assert_same([*mine.parameters()], [*plain.parameters()])


def take_over() -> None:
    """Uneven shards, and state of steps on the CPU, which goes on on the device."""
    nets = [make_net(), make_net(offload_policy=CPUOffloadPolicy(pin_memory=False))]
    plain, mine = (torch.optim.AdamW(net.parameters(), lr=0.01, fused=True) for net in nets)
    for net, optimizer in zip(nets, (plain, mine), strict=True):
        phase_jobs.train(net, optimizer, range(2))
    mine = HybridDeviceOptimizer(mine, nets[1])
    for net, optimizer in zip(nets, (plain, mine), strict=True):
        phase_jobs.train(net, optimizer, range(2, 5))
    mine.synchronize()
    for expected, found in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(local(found), local(expected))  # two steps by the CPU's kernel


@pytest.mark.gpus(2)
def test_uneven_shards_and_state_are_taken_over(ranks: Callable[..., Any]) -> None:
    ranks(2, device_type="cuda").run(take_over)


@pytest.mark.gpus(2)
def test_a_model_on_another_device_is_refused() -> None:
    with pytest.raises(UnsupportedParameterError, match="on cuda:1"):
        fsdp_offload.shard(Model().to("cuda:1"))
    assert not dist.is_initialized()


def test_a_model_larger_than_the_device() -> None:
    """Weights come from the CPU, group by group; the cap leaves no room for all of them."""
    n_bytes = (64 << 20) * 2  # of each block
    expected, capped = (_train_large(offload) for offload in ("state", "all"))
    assert capped[0] == expected[0]
    assert capped[1] < expected[1] - 12 * n_bytes


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 1 << 16), nn.Linear(1 << 16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def _train_large(offload: str) -> tuple[list[float], int]:
    gc.collect()
    torch.cuda.empty_cache()
    before, total = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    torch.manual_seed(0)
    model = nn.Sequential(*(Wide().to(torch.bfloat16) for _ in range(24)))
    policy = CPUOffloadPolicy(pin_memory=False)
    model = fsdp_offload.shard(model, offload_policy=policy)
    if offload == "all":  # the model has 3 GiB
        torch.cuda.set_per_process_memory_fraction((before + int(2.4 * 2**30)) / total)
    torch.cuda.reset_peak_memory_stats()
    try:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        optimizer = HybridDeviceOptimizer(inner, model, offload=offload, device_memory=0)
        losses = train(Loss(model), optimizer)
        peak = torch.cuda.max_memory_allocated()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    del inner, optimizer, model
    dist.destroy_process_group()
    return losses, peak


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).float().square().mean()
