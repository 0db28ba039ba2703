"""CUDA graphs over memory that leaves and comes back at its address; on the CPU, plain calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_offload import FixedAddressRegion, PhaseOffloader

CYCLES = 20


class _Call:
    """What a graph is without a GPU."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.replay = run


def graph_of(run: Callable[[], object], device: torch.device) -> Any:
    """What ``run`` enqueues, captured after a first run on another stream."""
    if device.type != "cuda":
        run()
        return _Call(run)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def free_bytes(device: torch.device) -> int:
    """Of the device, as its driver says."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def attend(weight: Tensor, cache: Tensor, place: Tensor, x: Tensor) -> Tensor:
    """One more row of ``cache``, then a product with all of it."""
    cache.index_copy_(0, place, x @ weight)
    place += 1
    return torch.softmax(x @ cache.T / 8, -1) @ cache


def region_with_cache(device: torch.device) -> None:
    """A step over weights and a cache; memory is the driver's between steps."""
    region = FixedAddressRegion("cache", device)
    weight, cache = region.empty((64, 64)), region.empty((CYCLES + 2, 64))
    place, x = region.empty((1,), dtype=torch.int64), region.empty((1, 64))
    own = [weight, cache, place, x]
    torch.manual_seed(0)
    other = [torch.randn_like(weight), torch.zeros_like(cache), torch.zeros_like(place)]
    other.append(torch.randn_like(x))
    for mine, theirs in zip(own, other, strict=True):
        mine.copy_(theirs)
    addresses = [tensor.data_ptr() for tensor in own]
    out = torch.empty(1, 64, device=device)
    graph = graph_of(lambda: out.copy_(attend(weight, cache, place, x)), device)
    for mine, theirs in zip(own, other, strict=True):
        mine.copy_(theirs)
    for cycle in range(CYCLES):
        before = free_bytes(device)
        region.pause()
        assert region.is_paused
        assert device.type == "cpu" or free_bytes(device) > before
        region.resume()
        assert [tensor.data_ptr() for tensor in own] == addresses
        graph.replay()
        assert torch.equal(out, attend(*other)), cycle
    assert torch.equal(cache, other[1])
    assert int(place) == CYCLES
    region.close()


def model_and_update(device: torch.device) -> None:
    """Forward and update of a model that was made before, without a region of its own."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)) for _ in "ab"]
    for model in models:
        model.to(device)
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=0.01, capturable=device.type == "cuda") for m in models
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()  # makes the state
    model, optimizer = models[0], optimizers[0]
    phases = PhaseOffloader(model, optimizer, grads="keep", keep_addresses=True)
    x, out = torch.randn(4, 256, device=device), torch.empty(4, 8, device=device)
    with torch.no_grad():
        forward = graph_of(lambda: out.copy_(model(x)), device)
    update = graph_of(optimizer.step, device)
    optimizers[1].step()  # the first run of the update outside of its capture
    addresses = [p.data_ptr() for p in model.parameters()]
    for cycle in range(CYCLES):
        with phases.away():
            pass
        assert [p.data_ptr() for p in model.parameters()] == addresses
        update.replay()
        optimizers[1].step()
        forward.replay()
        assert torch.equal(out, models[1](x)), cycle
    phases.close()
