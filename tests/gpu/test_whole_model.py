"""``offload="all"`` on a GPU: the same bits whatever is late, less memory, and what is read."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint as recompute

from fsdp_offload import DeviceError, HybridDeviceOptimizer, checkpoint
from fsdp_offload.core.gated import GatedShard

SLEEP = 20_000_000  # cycles: about 10 ms
LAYERS, WIDTH, STEPS = 12, 2048, 6
LATE = ("nothing", "compute", "fetch")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    store: Path = tmp_path_factory.mktemp("store") / "file"
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


class Adapted(nn.Module):
    """A frozen matrix with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 8, bias=False)
        self.up = nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = recompute(layer, x, use_reentrant=False)
        return x.float().square().mean()


def build(mesh: Any) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Model().to(torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrap(model: Any, offload: str) -> HybridDeviceOptimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    inner = torch.optim.AdamW(trained, lr=1e-2, fused=True)
    return HybridDeviceOptimizer(inner, model, offload=offload, device_memory=0)


def hold_up(optimizer: HybridDeviceOptimizer, late: str) -> None:
    if late == "compute":
        torch.cuda._sleep(SLEEP)
    elif late == "fetch" and optimizer._updates.weights is not None:
        optimizer._updates.weights._link._in.launch(torch.cuda._sleep, SLEEP)


def train(model: Any, optimizer: HybridDeviceOptimizer, late: str) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(64, WIDTH, device="cuda", generator=generator).to(torch.bfloat16)
        x.requires_grad_(True)
        hold_up(optimizer, late)
        loss = model(x)
        hold_up(optimizer, late)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("late", LATE)
def test_bits_are_those_of_weights_on_the_device(mesh: Any, late: str) -> None:
    found = []
    for offload in ("state", "all"):
        model = build(mesh)
        optimizer = wrap(model, offload)
        losses = train(model, optimizer, late)
        values = [value.full_tensor() for value in model.state_dict().values()]
        optimizer.close()
        found.append([*losses, *values, *(p.to_local().clone() for p in model.parameters())])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_frozen_weights_take_three_slots(mesh: Any) -> None:
    model = build(mesh)
    layer_bytes = WIDTH * WIDTH * 2
    gc.collect()
    before = torch.cuda.memory_allocated()
    optimizer = wrap(model, "all")
    freed = before - torch.cuda.memory_allocated()
    assert freed > (LAYERS - 4) * layer_bytes - (256 << 20)  # slots, and what state takes
    weights: Any = optimizer._updates.weights
    small_bytes = 2 * 8 * WIDTH * 2  # of the trained matrices of a layer
    assert weights.slot_bytes == 3 * (layer_bytes + small_bytes)
    train(model, optimizer, "nothing")
    torch.cuda.synchronize()
    fetched = weights._link.fetched_bytes
    train(model, optimizer, "nothing")
    per_step = (weights._link.fetched_bytes - fetched) / STEPS
    assert per_step <= 2 * LAYERS * (layer_bytes + small_bytes)  # a forward and a backward
    held = torch.cuda.memory_allocated()
    for parameter in model.parameters():
        parameter.detach().float().norm().item()
    assert torch.cuda.memory_allocated() <= held
    optimizer.close()


def test_saves_loads_and_averages_take_no_memory_of_all_weights(mesh: Any, tmp_path: Path) -> None:
    """One copy of a weight at a time, where a kernel of torch's reads it."""
    model, layer_bytes = build(mesh), WIDTH * WIDTH * 2
    optimizer = wrap(model, "all")
    train(model, optimizer, "nothing")
    averages = [torch.zeros_like(p) for p in model.parameters()]
    state = {name: value.cpu() for name, value in model.state_dict().items()}

    def save_and_load() -> None:
        checkpoint.save(tmp_path / "one", model, optimizer)
        checkpoint.load(tmp_path / "one", model, optimizer)
        checkpoint.export_safetensors(model, tmp_path / "two", optimizer=optimizer)

    def average() -> None:
        torch._foreach_lerp_(averages, list(model.parameters()), 0.5)

    uses = (save_and_load, 1), (lambda: model.load_state_dict(state), 1), (average, 3)
    for use, most in uses:
        torch.cuda.synchronize()
        gc.collect()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            use()
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - held < most * layer_bytes
        assert torch.cuda.memory_allocated() - held < layer_bytes // 2
    for mine, theirs in zip(averages, state.values(), strict=True):
        assert torch.equal(mine.to_local().cpu(), (theirs.to_local() * 0.5).to(mine.dtype))
    optimizer.close()


def test_an_address_is_refused_or_right(mesh: Any) -> None:
    model = build(mesh)
    expected = model.layers[0].base.weight.to_local().clone()
    optimizer = wrap(model, "all")
    shard = model.layers[0].base.weight._local_tensor
    assert type(shard) is GatedShard
    assert shard.device == expected.device
    assert torch.equal(shard.cpu(), expected.cpu())
    assert shard.data_ptr() != 0
    with pytest.raises(DeviceError, match="capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        model.layers[0](torch.zeros(1, WIDTH, device="cuda", dtype=torch.bfloat16))
    torch.cuda.synchronize()
    optimizer.close()
    assert torch.equal(model.layers[0].base.weight.to_local(), expected)
