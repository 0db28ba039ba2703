"""A captured forward and backward, replayed between steps: eager bits, on one and two GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from tests.helpers.compare import bits

WIDTH = 512
SLEEP = 20_000_000  # cycles: about 10 ms
FIRST, LAST = 2, 6  # steps before the capture, and in all


def build(mode: str | None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    with torch.device("cuda"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if mode is None:
        return model, optimizer
    transfer = TransferConfig(bucket_bytes="1MiB")
    return model, HybridDeviceOptimizer(
        optimizer, model, overlap=mode, device_memory=0, transfer=transfer
    )


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(8, WIDTH, generator=generator).cuda()


def iteration(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward()
    return loss.detach()


def trained(mode: str | None) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and weights; a plain optimizer trains without a graph."""
    model, optimizer = build(mode)
    static, graph, losses = batch(0), torch.cuda.CUDAGraph(), []
    loss = static
    stream = torch.cuda.Stream()  # FSDP2 is warmed up on the one that is captured
    with torch.cuda.stream(stream):
        for step in range(LAST):
            if mode is not None and step == FIRST:
                # NCCL's watchdog asks for events of earlier collectives meanwhile.
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    loss = iteration(model, static)
                assert optimizer.statistics().overlap == "step"
            if mode is not None and step >= FIRST:
                static.copy_(batch(step))
                graph.replay()
            else:
                loss = iteration(model, batch(step))
            losses.append(loss.clone())
            if mode is not None:  # a wait that is missing shows
                optimizer._updates.reserved.engine.update.launch(torch.cuda._sleep, SLEEP)
            optimizer.step()
            if mode is None or step < FIRST:
                optimizer.zero_grad()  # the graph writes its gradients anew
    torch.cuda.synchronize()
    return losses, [bits(p).clone() for p in model.parameters()]


def compare(mode: str) -> None:
    expected, found = trained(None), trained(mode)
    for what, one, other in zip(("losses", "weights"), found, expected, strict=True):
        assert all(map(torch.equal, one, other)), f"other {what} with {mode}"


@pytest.mark.parametrize("mode", ["step", "forward", "backward"])
def test_replays_have_the_bits_of_eager(ranks: Callable[..., Any], mode: str) -> None:
    ranks(1, device_type="cuda").run(compare, mode)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("mode", ["step", "forward", "backward"])
def test_replays_have_the_bits_of_eager_on_two_ranks(ranks: Callable[..., Any], mode: str) -> None:
    ranks(2, device_type="cuda").run(compare, mode)
