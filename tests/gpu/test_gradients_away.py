"""Gradients in host memory, on a GPU: the same bits whatever is late, and less memory."""

from __future__ import annotations

import contextlib
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

from fsdp_offload import HybridDeviceOptimizer
from fsdp_offload.core.recorded import RecordedShard

SLEEP = 20_000_000  # cycles: about 10 ms
LAYERS, WIDTH, STEPS = 12, 2048, 4
LATE = ("nothing", "compute", "store", "fetch", "update")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    store: Path = tmp_path_factory.mktemp("store") / "file"
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


class Layer(nn.Module):
    """With parameters of odd sizes, whose gradients begin at any address."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((1,), 0.7))
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH - 1)
        self.down = nn.Linear(WIDTH - 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x))))


def build(mesh: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = nn.Sequential(*(Layer() for _ in range(LAYERS))).to(dtype)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrap(model: Any, offload: str, overlap: str) -> HybridDeviceOptimizer:
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return HybridDeviceOptimizer(inner, model, offload=offload, device_memory=0, overlap=overlap)


def hold_up(optimizer: HybridDeviceOptimizer, late: str) -> None:
    gradients: Any = optimizer._updates.gradients
    if late == "compute":
        torch.cuda._sleep(SLEEP)
    elif gradients is not None and late in ("store", "fetch"):
        link = gradients.mover.link
        (link._out if late == "store" else link._in).launch(torch.cuda._sleep, SLEEP)
    elif late == "update":
        optimizer._updates.reserved.engine.update.launch(torch.cuda._sleep, SLEEP)


def train(model: Any, optimizer: HybridDeviceOptimizer, late: str, what: str) -> list[Tensor]:
    generator, dtype = torch.Generator("cuda").manual_seed(1), next(model.parameters()).dtype
    seen = []
    count = 2 if "accumulate" in what else 1
    for _ in range(STEPS):
        for batch in range(count):
            is_last = batch + 1 == count
            with contextlib.nullcontext() if is_last else optimizer.accumulate():
                x = torch.randn(64, WIDTH, device="cuda", generator=generator).to(dtype)
                hold_up(optimizer, late)
                loss = model(x).float().square().mean()
                hold_up(optimizer, late)
                loss.backward()
                seen.append(loss.detach())
        hold_up(optimizer, late)
        if what == "accumulate in backward":
            optimizer.step()
            optimizer.zero_grad()
            continue
        if what == "unscale":
            found = torch.zeros((), device="cuda")
            scaler, factor = torch.amp.GradScaler("cuda"), torch.tensor(0.3, device="cuda")
            scaler._unscale_grads_(optimizer, factor, found, True)
            seen.append(found)
        if what == "write":
            with torch.no_grad():
                for parameter in list(model.parameters())[::3]:
                    parameter.grad.add_(0.01)
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).full_tensor())
        optimizer.step()
        optimizer.zero_grad()
    return seen


CASES = [
    *((late, "clip", torch.bfloat16, "forward") for late in LATE),
    *((late, "accumulate", torch.bfloat16, "forward") for late in LATE),
    *((late, "accumulate in backward", torch.bfloat16, "backward") for late in LATE),
    ("store", "clip", torch.float32, "step"),
    ("fetch", "accumulate", torch.float32, "step"),
    ("nothing", "write", torch.bfloat16, "forward"),
    ("nothing", "unscale", torch.float32, "forward"),
]


@pytest.mark.parametrize(("late", "what", "dtype", "overlap"), CASES)
def test_bits_are_those_of_gradients_on_the_device(
    mesh: Any, late: str, what: str, dtype: torch.dtype, overlap: str
) -> None:
    found = []
    for offload in ("state", "all"):
        model = build(mesh, dtype)
        optimizer = wrap(model, offload, overlap)
        seen = train(model, optimizer, late, what)
        values = [value.full_tensor() for value in model.state_dict().values()]
        if offload == "all":
            assert optimizer.statistics().host_gradient_bytes > 0
        optimizer.close()
        found.append([*seen, *values])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_a_backward_holds_few_gradients(mesh: Any) -> None:
    peaks, left = {}, {}
    for offload in ("state", "all"):
        model = build(mesh, torch.bfloat16)
        optimizer = wrap(model, offload, "forward")
        train(model, optimizer, "nothing", "clip")
        loss = model(torch.randn(64, WIDTH, device="cuda", dtype=torch.bfloat16)).float().mean()
        torch.cuda.synchronize()
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        torch.cuda.synchronize()
        peaks[offload] = torch.cuda.max_memory_allocated() - before
        left[offload] = torch.cuda.memory_allocated() - before
        is_away = {type(p.grad._local_tensor) is RecordedShard for p in model.parameters()}
        assert is_away == {offload == "all"}
        optimizer.close()
        del model, optimizer, loss
        gc.collect()
    gradient_bytes = LAYERS * 2 * WIDTH * WIDTH * 2
    assert peaks["state"] - peaks["all"] > 0.5 * gradient_bytes
    assert left["state"] - left["all"] > 0.7 * gradient_bytes


def test_norms_are_read_without_a_fetch(mesh: Any) -> None:
    model = build(mesh, torch.bfloat16)
    optimizer = wrap(model, "all", "forward")
    model(torch.randn(64, WIDTH, device="cuda", dtype=torch.bfloat16)).float().mean().backward()
    gradients: Any = optimizer._updates.gradients
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert gradients.mover.link.fetched_bytes == 0
    optimizer.step()
    optimizer.synchronize()
    assert gradients.mover.link.fetched_bytes > 0
    optimizer.close()
