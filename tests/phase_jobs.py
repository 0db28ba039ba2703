"""Jobs that are offloaded and reloaded on a GPU; most run inside ranks.

Ranks run without pytest's rewriting: failures carry their own words.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from fsdp_offload import (
    AwayError,
    DeviceMemoryError,
    FixedAddressRegion,
    PhaseOffloader,
    TransferConfig,
    checkpoint,
    swap,
)
from tests.helpers.compare import assert_same, local
from tests.helpers.lanes import in_lanes

WIDTH = 129  # rows: uneven over 2 and 4 ranks, and not a multiple of 4
STEPS = 4
CYCLES = 20  # of a CUDA graph
SMALL = TransferConfig(bucket_bytes="64KiB", host_threads=1)

LANES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "resident": {"offload_fraction": 0.0},
    "fraction": {"offload_fraction": 0.5, "update_on": "device"},
    "streamed": {"update_on": "device"},
    "host": {"update_on": "host"},
    "mixed": {"update_on": ("resident", "streamed", "host")},
    "forward": {"update_on": "device", "overlap": "forward"},
}
"""Options of the wrapper; None: the plain optimizer."""

POLICIES: dict[str, dict[str, str]] = {
    "all": {},
    "grads-saved": {"grads": "save"},
    "grads-kept": {"grads": "keep"},
    "params-kept": {"params": "keep"},
    "state-kept": {"state": "keep"},
}


def resident_set_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Net(nn.Module):
    """Layers with uneven shards, one with empty ones (3 rows), a tied weight, a buffer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.narrow = nn.Linear(width, 3)
        self.first = nn.Linear(width, width, bias=False)
        self.last = nn.Linear(width, width, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.full((width,), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return self.narrow(self.last(x))


def device_here() -> torch.device:
    """This rank's GPU."""
    return torch.device("cuda", torch.cuda.current_device())


def make_net(dtype: torch.dtype = torch.float32, width: int = WIDTH, **options: Any) -> Net:
    """The same weights on every rank and at every call, sharded over all ranks."""
    device = device_here()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    net = Net(width).to(device, dtype)
    for layer in (*net.layers, net.narrow):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)  # type: ignore[return-value]


def make_optimizer(net: Net, lanes: str, lr: float = 0.01) -> Optimizer:
    """AdamW, wrapped as ``LANES`` says."""
    plain = torch.optim.AdamW(net.parameters(), lr=lr)
    options = LANES[lanes]
    if options is None:
        return plain
    return in_lanes(plain, model=net, transfer=SMALL, **options)


def close(*things: Any) -> None:
    """What can be closed."""
    for thing in things:
        if hasattr(thing, "close"):
            thing.close()


def inputs(step: int, dtype: torch.dtype) -> Tensor:
    """Of this rank."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(8, WIDTH, generator=generator).to(device_here(), dtype)


def train(
    net: Net,
    optimizer: Optimizer,
    steps: Iterable[int],
    switch: Callable[[str], object] = lambda where: None,
) -> None:
    """Clipped steps; ``switch`` is called with where the step stands."""
    dtype = next(net.parameters()).dtype
    for step in steps:
        net(inputs(step, dtype)).float().square().mean().backward()
        switch("gradients")
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        switch("stepped")


def snapshot(net: Net, optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies of this rank's weights and state, in host memory."""
    found = {f"{name}/weight": local(p) for name, p in net.named_parameters()}
    for name, parameter in net.named_parameters():
        for kind, value in optimizer.state[parameter].items():
            found[f"{name}/{kind}"] = local(value)
    return {name: tensor.cpu().clone() for name, tensor in found.items()}


def free_bytes() -> int:
    """Of the device, as its driver says."""
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def storages(net: Net, optimizer: Optimizer) -> list[torch.UntypedStorage]:
    """Of the shards and the state on the device, each once."""
    tensors = [*net.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    shards = [local(v) for v in tensors if isinstance(v, Tensor)]
    device = device_here()
    found = [t.untyped_storage() for t in shards if t.device == device]
    return list({storage._cdata: storage for storage in found}.values())


# ------------------------------------------------------------------------------------- the jobs


def same_training(lanes: str, policy: str, dtype: str, *, keep_addresses: bool = False) -> None:
    """A switch after every step, also of the optimizer alone, and with gradients that survive it
    one before, changes no bit."""
    results = []
    for switched in (False, True):
        net = make_net(getattr(torch, dtype))
        optimizer: Any = make_optimizer(net, lanes)
        first = int(keep_addresses)  # a plain optimizer needs its state before
        train(net, optimizer, range(first))
        movers: list[PhaseOffloader] = []
        if switched:
            how = {"keep_addresses": keep_addresses, **POLICIES[policy]}
            movers.append(PhaseOffloader(net, optimizer, **how))  # type: ignore[arg-type]
            if not keep_addresses:  # what keeps an address is one offloader's
                movers.append(PhaseOffloader(net, optimizer, params="keep", grads="keep"))

        def switch(where: str, movers: Any = movers) -> None:
            with_gradients = movers[:1] if policy.startswith("grads") else []
            for mover in movers if where == "stepped" else with_gradients:
                with mover.away():
                    mover.offload()  # nothing left to do
                    assert mover.is_away
                assert not mover.is_away

        train(net, optimizer, range(first, STEPS), switch)
        results.append(snapshot(net, optimizer))
        close(*movers, optimizer)
    assert_same(results[1], results[0], f"{lanes}, {policy}, {dtype}")


def trained(lanes: str, width: int = WIDTH, **options: Any) -> tuple[Net, Optimizer, Any]:
    """A job after two steps and its offloader."""
    net = make_net(width=width)
    optimizer = make_optimizer(net, lanes)
    generator = torch.Generator(device_here()).manual_seed(1)
    for _ in range(2):
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).normal_(generator=generator)
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer, PhaseOffloader(net, optimizer, **options)


def frees_its_payload(lanes: str, width: int, *, keep_addresses: bool) -> list[float]:
    """Shares of the payload that the driver had more while away, over three cycles."""
    net, optimizer, phases = trained(lanes, width, keep_addresses=keep_addresses)
    before, shares = snapshot(net, optimizer), []
    moved = storages(net, optimizer)
    n_bytes = sum(storage.nbytes() for storage in moved)
    for _ in range(3):
        torch.cuda.empty_cache()
        held = free_bytes()
        phases.offload()
        shares.append((free_bytes() - held) / n_bytes)
        assert phases.statistics().freed_bytes > 0.9 * n_bytes
        if lanes == "plain" and not keep_addresses:
            assert {storage.nbytes() for storage in moved} == {0}
        phases.reload()
        assert_same(snapshot(net, optimizer), before, f"cycle of {lanes}")
    close(phases, optimizer)
    return shares


def segments_after_a_cycle(count: int, n_bytes: int) -> int:
    """Of torch's allocator, that hold ``count`` storages of that size."""
    model = nn.Module()
    for index in range(count):
        zeros = torch.zeros(n_bytes // 4, device=device_here())
        model.register_parameter(f"p{index}", nn.Parameter(zeros))
    phases = PhaseOffloader(model)
    with phases.away():
        pass
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    segments = [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in torch.cuda.memory_snapshot()
    ]
    phases.close()
    return len({start for start, end in segments for a in addresses if start <= a < end})


def use_while_away(lanes: str) -> None:
    """Typed errors, and nothing is lost by them; state dicts come from host memory."""
    net, optimizer, phases = trained(lanes)
    before = snapshot(net, optimizer)
    phases.offload()
    phases.offload()  # nothing left to do
    for use in (lambda: net(inputs(0, torch.float32)), optimizer.step):
        with pytest.raises(AwayError, match="Remedy"):
            use()
        assert phases.is_away
    assert float(torch.ones(1000, device=device_here()).sum()) == 1000  # the context is usable
    with without_device_memory():
        for name, value in net.state_dict().items():
            if (key := f"{name}/weight") in before:
                assert_same({key: local(value).cpu()}, {key: before[key]}, "state_dict")
    phases.reload()
    phases.reload()
    assert_same(snapshot(net, optimizer), before, f"after errors, {lanes}")
    train(net, optimizer, range(1))
    close(phases, optimizer)


def saves_while_away(lanes: str, folder: str) -> None:
    """Of a wrapper: an ``async_save`` writes what was there when it was called, a save while away
    takes no device memory, and a load is refused."""
    net, optimizer, phases = trained(lanes)
    before = snapshot(net, optimizer)
    future = checkpoint.async_save(f"{folder}/{lanes}-under-way", net, optimizer)
    with phases.away():
        pass
    train(net, optimizer, range(1))
    future.result()
    checkpoint.load(f"{folder}/{lanes}-under-way", net, optimizer)
    assert_same(snapshot(net, optimizer), before, f"saved under way, {lanes}")
    phases.offload()
    with without_device_memory():
        optimizer.state_dict()
        checkpoint.save(f"{folder}/{lanes}", net, optimizer)
    with pytest.raises(AwayError, match=r"checkpoint\.load"):
        checkpoint.load(f"{folder}/{lanes}", net, optimizer)
    phases.reload()
    train(net, optimizer, range(1))
    checkpoint.load(f"{folder}/{lanes}", net, optimizer)
    assert_same(snapshot(net, optimizer), before, f"saved while away, {lanes}")
    close(phases, optimizer)


@contextlib.contextmanager
def without_device_memory() -> Iterator[None]:
    """What is inside takes none, but for what collectives take to begin."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    yield
    grown = torch.cuda.max_memory_allocated() - held
    assert grown <= (0 if dist.get_world_size() == 1 else 4096), f"{grown} bytes"


def no_room_to_come_back(width: int, *, keep_addresses: bool) -> None:
    """Another allocation has taken the memory: an error, everything stays away, a retry works."""
    net, optimizer, phases = trained("resident", width, keep_addresses=keep_addresses)
    before = snapshot(net, optimizer)
    phases.offload()
    torch.cuda.empty_cache()
    taken = torch.empty(free_bytes() - (64 << 20), dtype=torch.uint8, device=device_here())
    for _ in range(2):
        with pytest.raises(DeviceMemoryError, match="Remedy"):
            phases.reload()
        assert phases.is_away
    weights = net.state_dict()
    name = "layers.0.weight"
    assert_same({name: local(weights[name]).cpu()}, {name: before[f"{name}/weight"]}, "away")
    del taken
    torch.cuda.empty_cache()
    phases.reload()
    assert_same(snapshot(net, optimizer), before, "after the second try")
    close(phases, optimizer)


def used_at_once(width: int, *, keep_addresses: bool) -> None:
    """``reload(wait=False)`` and a forward right behind it; ``offload(wait=False)`` under a kernel
    that is still writing."""
    net, optimizer, phases = trained("resident", width, keep_addresses=keep_addresses)
    x = torch.ones(4, width, device=device_here())
    wanted = net(x).detach().clone()
    net.reshard()  # type: ignore[attr-defined]
    for _ in range(3):
        phases.offload()
        handle = phases.reload(wait=False)
        found = net(x).detach().clone()
        net.reshard()  # type: ignore[attr-defined]
        assert torch.equal(found, wanted)
        handle.wait()
        assert handle.is_done()
    before = snapshot(net, optimizer)
    torch.cuda._sleep(200_000_000)  # about 0.1 s, in which what follows does not begin
    with torch.no_grad():
        for parameter in net.parameters():
            local(parameter).add_(1)
    handle = phases.offload(wait=False)
    handle.wait()
    phases.reload()
    for name, parameter in net.named_parameters():
        assert torch.equal(local(parameter).cpu(), before[f"{name}/weight"] + 1), name
    close(phases, optimizer)


def gives_host_memory_back() -> None:
    """``close()`` unmaps what was page-locked: the process shrinks by it."""
    _, optimizer, phases = trained("plain", 1024)
    with phases.away():
        pass
    held, size = phases.statistics().host_bytes, resident_set_bytes()
    phases.close()
    assert size - resident_set_bytes() > 0.9 * held, (size, resident_set_bytes(), held)
    close(optimizer)


def swapped(width: int, *, keep_addresses: bool) -> None:
    """Two jobs take turns; each keeps its bits, and neither takes more memory for it."""
    jobs = [trained("plain", width, keep_addresses=keep_addresses) for _ in range(2)]
    with torch.no_grad():
        for parameter in jobs[1][0].parameters():
            local(parameter).neg_()
    before = [snapshot(net, optimizer) for net, optimizer, _ in jobs]
    (_, _, one), (_, _, other) = jobs
    other.offload()
    free, held = list[int](), list[int]()
    for _ in range(4):
        swap(out=one, in_=other)
        assert (one.is_away, other.is_away) == (True, False)
        assert_same(snapshot(*jobs[1][:2]), before[1], "the second")
        swap(out=other, in_=one)
        assert (one.is_away, other.is_away) == (False, True)
        assert_same(snapshot(*jobs[0][:2]), before[0], "the first")
        free.append(free_after_all())
        held.append(torch.cuda.memory_allocated())
    assert held[1:] == held[1:2] * 3, held
    # torch's segments of 2 MiB for small tensors: 8 MiB more in ten cycles, then no more.
    assert min(free[1:]) >= free[1] - (16 << 20), free
    close(one, other)


def free_after_all() -> int:
    """Of the device, when torch has given back what it has cached."""
    gc.collect()
    torch.cuda.empty_cache()
    return free_bytes()


def loads(width: int, *, keep_addresses: bool) -> None:
    """State that a load has replaced leaves nothing behind but its kept addresses."""
    net, optimizer, phases = trained("plain", width, keep_addresses=keep_addresses)
    with phases.away():
        pass
    before, free = snapshot(net, optimizer), []
    for _ in range(4):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert_same(snapshot(net, optimizer), before, "loaded")
        with phases.away():
            pass
        assert_same(snapshot(net, optimizer), before, "back")
        free.append(free_after_all())
    assert max(free) - min(free) < (32 << 20), free  # segments that others share
    close(phases, optimizer)


def graph_of(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """What ``run`` enqueues, captured after a first run on another stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def attend(weight: Tensor, cache: Tensor, place: Tensor, x: Tensor) -> Tensor:
    """One more row of ``cache``, then a product with all of it."""
    cache.index_copy_(0, place, x @ weight)
    place += 1
    return torch.softmax(x @ cache.T / 8, -1) @ cache


def region_with_cache() -> None:
    """A step over weights and a cache; memory is the driver's between steps."""
    device = device_here()
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
    graph = graph_of(lambda: out.copy_(attend(weight, cache, place, x)))
    for mine, theirs in zip(own, other, strict=True):
        mine.copy_(theirs)
    for cycle in range(CYCLES):
        before = free_bytes()
        region.pause()
        assert region.is_paused
        assert free_bytes() > before
        region.resume()
        assert [tensor.data_ptr() for tensor in own] == addresses
        graph.replay()
        assert torch.equal(out, attend(*other)), cycle
    assert torch.equal(cache, other[1])
    assert int(place) == CYCLES
    region.close()


def model_and_update() -> None:
    """Forward and update of a model that was made before, without a region of its own."""
    device = device_here()
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)) for _ in "ab"]
    for model in models:
        model.to(device)
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, capturable=True) for m in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()  # makes the state
    model, optimizer = models[0], optimizers[0]
    phases = PhaseOffloader(model, optimizer, grads="keep", keep_addresses=True)
    x, out = torch.randn(4, 256, device=device), torch.empty(4, 8, device=device)
    with torch.no_grad():
        forward = graph_of(lambda: out.copy_(model(x)))
    update = graph_of(optimizer.step)
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
