"""Updates beside forward and backward on a GPU: the plain optimizer's bits, whatever is late.

Each part of an iteration is held up in turn by a kernel that only waits: on the compute stream,
on the streams of the pipeline. A missing wait then shows. (Watched groups of one rank reduce on the
compute stream.)
"""

from __future__ import annotations

import functools
import gc
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from tests.helpers.compare import bits

STEPS = 8
SLEEP = 20_000_000  # cycles: about 10 ms
LATE = ("nothing", "compute", "fetch", "update", "store")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    store: Path = tmp_path_factory.mktemp("store") / "file"
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (512, 1024, 768, 1024, 512, 640, 512)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.scale = nn.Parameter(torch.ones(512))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.scale).float().square().mean()


def build(mesh: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Model().to(dtype)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hold_up(optimizer: torch.optim.Optimizer, late: str) -> None:
    """A plain optimizer has no streams to hold up; an unknown ``late`` raises."""
    if late == "compute":
        torch.cuda._sleep(SLEEP)
    elif late != "nothing" and isinstance(optimizer, HybridDeviceOptimizer):
        lane = optimizer._updates.reserved.engine.ring
        assert lane is not None
        streams = {"fetch": lane.link._in, "update": lane.link.update, "store": lane.link._out}
        streams[late].launch(torch.cuda._sleep, SLEEP)


def train(model: Any, optimizer: Any, late: str, *, clip: bool) -> list[Tensor]:
    losses = []
    generator = torch.Generator("cuda").manual_seed(1)
    dtype = next(model.parameters()).dtype
    for _ in range(STEPS):
        x = torch.randn(64, 512, device="cuda", generator=generator).to(dtype)
        hold_up(optimizer, late)
        loss = model(x)
        hold_up(optimizer, late)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        hold_up(optimizer, late)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("overlap", ["forward", "backward"])
@pytest.mark.parametrize("lanes", ["streamed", "half"])
def test_fp32_shards(mesh: Any, overlap: str, late: str, lanes: str) -> None:
    plain, mine = build(mesh, torch.float32), build(mesh, torch.float32)
    clip = overlap == "forward"
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    optimizer = HybridDeviceOptimizer(
        torch.optim.AdamW(mine.parameters(), lr=1e-2, fused=True),
        model=mine,
        overlap=overlap,
        offload_fraction=1.0 if lanes == "streamed" else 0.5,
        device_memory="8MiB",
        transfer=TransferConfig(bucket_bytes="1MiB"),
        update_on="device",
    )
    expected = train(plain, reference, "nothing", clip=clip)
    found = train(mine, optimizer, late, clip=clip)
    assert torch.equal(torch.stack(found), torch.stack(expected))
    optimizer.synchronize()
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a._local_tensor, b._local_tensor)
        for name, value in optimizer.state[a].items():
            other = reference.state[b][name]
            if name != "step":
                assert torch.equal(value._local_tensor.cuda(), other._local_tensor), name
    optimizer.close()


@pytest.mark.parametrize("late", LATE)
def test_bf16_shards_in_all_modes(mesh: Any, late: str) -> None:
    """The same weights and remainders as with ``overlap="step"``."""
    outcomes = []
    for overlap in ("step", "forward", "backward"):
        model = build(mesh, torch.bfloat16)
        optimizer = HybridDeviceOptimizer(
            torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
            model=model,
            overlap=overlap,
            transfer=TransferConfig(bucket_bytes="1MiB"),
            update_on="device",
        )
        losses = train(model, optimizer, late if overlap != "step" else "nothing", clip=False)
        state = [
            value._local_tensor.cpu().clone()
            for p in model.parameters()
            for name, value in optimizer.state[p].items()
            if name != "step"
        ]
        outcomes.append([torch.stack(losses).cpu(), *state])
        optimizer.close()
    for other in outcomes[1:]:
        for a, b in zip(outcomes[0], other, strict=True):
            assert torch.equal(bits(a), bits(b))


def test_no_allocation_and_no_gradients_held_after_the_first_steps(mesh: Any) -> None:
    model = build(mesh, torch.float32)
    optimizer = HybridDeviceOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        model=model,
        overlap="backward",
        transfer=TransferConfig(bucket_bytes="1MiB"),
        update_on="device",
    )
    train(model, optimizer, "nothing", clip=False)
    gc.collect()  # what other tests have left
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["num_device_alloc"]
    peaks = []
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        train(model, optimizer, "nothing", clip=False)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    assert torch.cuda.memory_stats()["num_device_alloc"] == before
    # Gradients go once the host sees that their updates have run: sooner or later by a few.
    assert max(peaks) - min(peaks) <= 8 << 20
    optimizer.close()


# --------------------------------------------------------------------------- parameters are read


def norms_of(parameters: list[Any]) -> list[Tensor]:
    return [p.detach().norm().full_tensor() for p in parameters]


def averages_of(parameters: list[Any]) -> list[Tensor]:
    averages = [torch.zeros_like(p) for p in parameters]
    torch._foreach_lerp_(averages, [p.detach() for p in parameters], 0.25)
    return [average.to_local() for average in averages]


def copies_on_the_host(parameters: list[Any]) -> list[Tensor]:
    return [p.to_local().cpu() for p in parameters]


@functools.cache
def compiler() -> Any:
    """Inductor's: it is imported here, and warns of what it uses itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.compile(lambda tensor: tensor * 2 + 1)


def compiled(parameters: list[Any]) -> list[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [compiler()(p.to_local()) for p in parameters[:2]]


@pytest.mark.parametrize("late", ["fetch", "update"])
@pytest.mark.parametrize("overlap", ["forward", "backward"])
@pytest.mark.parametrize(
    "read",
    [
        norms_of,
        averages_of,
        copies_on_the_host,
        pytest.param(
            compiled,
            marks=pytest.mark.skipif(
                torch.__version__ < "2.12", reason="torch.compile of 2.11 raises: docs/overlap.md"
            ),
        ),
    ],
)
def test_code_that_reads_parameters_after_a_step_waits_for_it(
    mesh: Any, read: Any, overlap: str, late: str
) -> None:
    plain, mine = build(mesh, torch.float32), build(mesh, torch.float32)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    optimizer = HybridDeviceOptimizer(
        torch.optim.AdamW(mine.parameters(), lr=1e-2, fused=True),
        mine,
        overlap=overlap,
        device_memory="8MiB",
        transfer=TransferConfig(bucket_bytes="1MiB"),
    )
    sharded, gated = list(plain.parameters()), list(mine.parameters())
    with torch.no_grad():
        read(sharded)  # compiled code is made for plain tensors first
    for index in range(4):
        for model, stepped in ((plain, reference), (mine, optimizer)):
            x = torch.full((64, 512), 0.1 * index, device="cuda")
            model(x).backward()
            hold_up(stepped, late)
            stepped.step()
            stepped.zero_grad()
        with torch.no_grad():
            for found, expected in zip(read(gated), read(sharded), strict=True):
                assert torch.equal(found, expected)
    optimizer.close()


def test_updates_do_not_wait_for_all_of_a_large_kernel(mesh: Any) -> None:
    """Their stream has priority: a product of matrices has many thread blocks, and an update begins
    between two of them."""
    model = build(mesh, torch.bfloat16)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    optimizer = HybridDeviceOptimizer(inner, model, device_memory=0)
    update: Any = optimizer._updates.reserved.engine.update
    assert update.raw.priority < torch.cuda.current_stream().priority
    matrix = torch.randn(16384, 16384, device="cuda", dtype=torch.bfloat16)
    some, small = torch.empty_like(matrix), torch.ones(1 << 20, device="cuda")
    for _ in range(3):  # the first ones load kernels
        torch.mm(matrix, matrix, out=some)
        update.launch(small.mul_, 1.0)
        torch.cuda.synchronize()
        begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begins.record()
        for _ in range(4):
            torch.mm(matrix, matrix, out=some)
        ends.record()
        update.launch(torch.cuda._sleep, 1_000_000)
        for _ in range(8):
            update.launch(small.mul_, 1.0)
        updated = update.record_timed()
        torch.cuda.synchronize()
    assert begins.elapsed_time(updated) < 0.6 * begins.elapsed_time(ends)
    optimizer.close()
