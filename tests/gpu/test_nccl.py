"""FSDP2 on NCCL: twins, clipping, checkpoints to another number of ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from fsdp_offload.update import codec
from tests.fsdp.models import bits

SMALL = TransferConfig(bucket_bytes=64 << 10, slots=3)
WIDTH = 129  # not a multiple of 4 and uneven over 2 and 4 ranks


class Net(nn.Module):
    """Uneven and empty shards: 129 and 3 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.narrow = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.narrow(x)


def make_net(dtype: torch.dtype = torch.float32, mesh: Any = None) -> Net:
    torch.manual_seed(0)
    net = Net().to("cuda", dtype)
    for layer in (*net.layers, net.narrow):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(net: Net, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(8, WIDTH, device="cuda", dtype=next(net.parameters()).dtype)
        net(x).float().square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def twins(lane: Any, options: dict[str, Any]) -> None:
    plain_net, net = make_net(), make_net()
    plain = torch.optim.AdamW(plain_net.parameters(), lr=0.01, **options)
    inner = torch.optim.AdamW(net.parameters(), lr=0.01, **options)
    count = sum(1 for _ in net.parameters())
    lanes = [("resident", "streamed")[i % 2] for i in range(count)] if lane == "mixed" else lane
    mine = HybridDeviceOptimizer(inner, model=net, update_on=lanes, transfer=SMALL)
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


@pytest.mark.gpus(4)
def test_device_lanes_equal_the_plain_optimizer_on_four(ranks: Callable[..., Any]) -> None:
    ranks(4, device_type="cuda").run(twins, "device", {"fused": True})


def host_twin() -> None:
    """The host lane against torch's CPU kernel on copies of the shards, fed the same gradients."""
    net = make_net(torch.bfloat16)
    mine = HybridDeviceOptimizer(
        torch.optim.AdamW(net.parameters(), lr=0.01), model=net, update_on="host", transfer=SMALL
    )
    copies = [nn.Parameter(local(p).detach().float().cpu()) for p in net.parameters()]
    plain = torch.optim.AdamW(copies, lr=0.01, fused=True)
    for step in range(4):
        torch.manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(8, WIDTH, device="cuda", dtype=torch.bfloat16)
        net(x).float().square().mean().backward()
        for copy, parameter in zip(copies, net.parameters(), strict=True):
            copy.grad = local(parameter.grad).float().cpu()
        plain.step()
        mine.step()
        mine.zero_grad()
    for copy, parameter in zip(copies, net.parameters(), strict=True):
        assert torch.equal(local(mine.state[parameter]["master"]), copy)
    mine.close()


@pytest.mark.gpus(2)
def test_host_lane_equals_the_cpu_kernel(ranks: Callable[..., Any]) -> None:
    ranks(2, device_type="cuda").run(host_twin)


def save(path: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Train 3 steps, save, train 3 more; the full masters (or parameters) at the end."""
    net = make_net(dtype)
    mine = HybridDeviceOptimizer(torch.optim.AdamW(net.parameters(), lr=0.01), model=net)
    train(net, mine, range(3))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(net, mine, options=options)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=path)
    found = full_masters(net, mine)
    mine.close()
    return found


def load(path: str, dtype: torch.dtype, world_size: int) -> list[torch.Tensor] | None:
    """Load on the first ranks only; the full masters there."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    if world_size < dist.get_world_size():
        mesh = init_device_mesh(
            "cuda", (dist.get_world_size() // world_size, world_size), mesh_dim_names=("r", "s")
        )["s"]
    net = make_net(dtype, mesh)
    mine = HybridDeviceOptimizer(torch.optim.AdamW(net.parameters(), lr=0.5), model=net)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(net, mine, options=options)
    dcp.load({"model": model_state, "optim": optimizer_state}, checkpoint_id=path)
    set_state_dict(
        net,
        mine,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=options,
    )
    assert mine.param_groups[0]["lr"] == 0.01
    found = full_masters(net, mine)
    mine.close()
    return found


def full_masters(net: Net, mine: HybridDeviceOptimizer) -> list[torch.Tensor]:
    """Masters and first moments of all parameters, gathered to whole tensors on the CPU."""
    found = []
    for parameter in net.parameters():
        shard = local(parameter).detach()
        master = shard.float().reshape(-1).clone()
        if "master_remainder" in mine.state[parameter]:
            remainder = local(mine.state[parameter]["master_remainder"]).reshape(-1)
            codec.decode(shard.reshape(-1), remainder.cuda(), master)
        for flat in (master, local(mine.state[parameter]["exp_avg"]).cuda()):
            whole = DTensor.from_local(
                flat.view(shard.shape),
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            found.append(whole.full_tensor().cpu())
    return found


@pytest.mark.gpus(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_loads_on_another_number_of_ranks(
    ranks: Callable[..., Any], dtype: torch.dtype
) -> None:
    pool = ranks(2, device_type="cuda")
    with tempfile.TemporaryDirectory() as path:
        saved = pool.run(save, path, dtype)[0]
        for world_size in (2, 1):
            for loaded in pool.run(load, path, dtype, world_size):
                assert all(
                    torch.equal(bits(a), bits(b)) for a, b in zip(saved, loaded, strict=True)
                )
