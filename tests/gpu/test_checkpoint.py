"""Checkpoints of jobs on GPUs: NCCL-only groups, pinned staging, no device memory, exact resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_offload import HybridDeviceOptimizer, checkpoint
from tests.helpers.compare import assert_same
from tests.phase_jobs import Net, close, device_here, make_net, make_optimizer, train

LANES = ("streamed", "host", "mixed")
WIDE = 1025  # uneven over two ranks
SLEEP = 50_000_000  # cycles
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Job = tuple[Net, torch.optim.Optimizer]


def job(kind: str, dtype: torch.dtype, lr: float = 0.01) -> Job:
    net = make_net(dtype)
    return net, make_optimizer(net, kind, lr)


def whole(made: Job) -> dict[str, torch.Tensor]:
    """Weights and moments of all ranks, on the CPU."""
    net, optimizer = made
    found = {}
    for name, parameter in net.named_parameters():
        tensors = {"weight": parameter, **optimizer.state[parameter]}
        for kind in ("weight", "exp_avg", "exp_avg_sq", "step"):
            value = tensors[kind]
            if hasattr(value, "full_tensor"):
                shard = value._local_tensor.to(device_here())
                value = type(value)(shard, value._spec, requires_grad=False).full_tensor()
            found[f"{name}.{kind}"] = value.detach().cpu().clone()
    return found


def save_and_go_on(folder: str, kind: str, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    made = job(kind, DTYPES[dtype])
    train(*made, range(3))
    checkpoint.save(f"{folder}/sync", *made, extra={"step": 3})
    saved = whole(made)
    futures = []
    for name in ("first", "second"):  # the second uses the arena of the first
        futures.append(checkpoint.async_save(f"{folder}/{name}", *made, extra={"step": 3}))
        if name == "first":
            futures[0].result()
    train(*made, range(3, 6))
    futures[1].result()
    after = whole(made)
    close(made[1])
    return saved, after


def load_and_go_on(path: str, kind: str, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    made = job(kind, DTYPES[dtype], lr=0.5)
    train(*made, range(1))
    assert checkpoint.load(path, *made) == {"step": 3}
    loaded = whole(made)
    train(*made, range(3, 6))
    after = whole(made)
    close(made[1])
    return loaded, after


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LANES)
def test_a_job_goes_on_exactly(
    ranks: Callable[..., Any], tmp_path: Path, kind: str, dtype: str
) -> None:
    pool = ranks(1, device_type="cuda")
    saved, after = pool.run(save_and_go_on, str(tmp_path), kind, dtype)[0]
    for name in ("sync", "first", "second"):
        loaded, resumed = pool.run(load_and_go_on, str(tmp_path / name), kind, dtype)[0]
        assert_same(loaded, saved, name)
        assert_same(resumed, after, name)


def test_staged_values_are_those_of_the_current_stream() -> None:
    """Which is still to write them, while a CPU tensor is copied."""
    device, stager = torch.device("cuda", 0), checkpoint.Stager()
    for turn in range(3):
        held = torch.zeros(4 << 20, device=device)
        torch.cuda._sleep(SLEEP)
        held.fill_(turn + 1)
        staged = stager.stage({"a": held, "turned": held.view(2, -1).t(), "b": torch.ones(3)})
        held.zero_()
        assert staged["a"].is_pinned()
        for name, value in (("a", turn + 1), ("turned", turn + 1), ("b", 1)):
            assert bool((staged[name] == value).all()), name
    stager.close()


def peak_of_a_save(folder: str) -> int:
    made = job("streamed", torch.bfloat16)
    train(*made, range(2))
    checkpoint.save(f"{folder}/warm", *made)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    checkpoint.save(f"{folder}/measured", *made)
    checkpoint.async_save(f"{folder}/async", *made).result()
    grown = torch.cuda.max_memory_allocated() - held
    close(made[1])
    return grown


def test_a_save_takes_no_device_memory(ranks: Callable[..., Any], tmp_path: Path) -> None:
    assert ranks(1, device_type="cuda").run(peak_of_a_save, str(tmp_path)) == [0]


def through_whole_states(dtype: str) -> None:
    """torch's calls; on a load with cpu_offload=True, because torch wants all in one memory."""
    made = job("mixed", DTYPES[dtype])
    train(*made, range(3))
    saved = whole(made)
    for cpu_offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
        weights = get_model_state_dict(made[0], options=options)
        state = get_optimizer_state_dict(*made, options=options)
        other = job("mixed", DTYPES[dtype], lr=0.3)
        options = StateDictOptions(
            full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True
        )
        set_model_state_dict(other[0], weights, options=options)
        set_optimizer_state_dict(*other, state, options=options)
        assert_same(whole(other), saved)
        close(other[1])
    close(made[1])


@pytest.mark.gpus(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_states_over_ranks(ranks: Callable[..., Any], dtype: str) -> None:
    ranks(2, device_type="cuda").run(through_whole_states, dtype)


def fill(folder: str) -> int:
    """Fill a model on the meta device; returns the most device memory beside its shards."""
    with torch.device("meta"):
        net = Net(WIDE)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in (*net.layers, net.narrow, net):
        fully_shard(layer, mesh=mesh)
    net.scale = torch.full((WIDE,), 0.9, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    checkpoint.load(folder, net)
    peak = torch.cuda.max_memory_allocated() - before
    expected = make_net(width=WIDE)
    shards = [parameter.to_local() for parameter in net.parameters()]  # type: ignore[attr-defined]
    assert_same(shards, [parameter.to_local() for parameter in expected.parameters()])
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW(net.parameters()), net)
    for _ in range(2):
        net(torch.ones(8, WIDE, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return peak - sum(shard.nbytes for shard in shards)


def export(folder: str) -> None:
    checkpoint.export_safetensors(make_net(width=WIDE), folder, max_shard_bytes="4MB")


@pytest.mark.parametrize(
    "count", [1, pytest.param(2, marks=pytest.mark.gpus(2))], ids=["one", "two"]
)
def test_the_meta_device_is_filled_shard_by_shard(
    ranks: Callable[..., Any], tmp_path: Path, count: int
) -> None:
    ranks(count, device_type="cuda").run(export, str(tmp_path / "folder"))
    extra = ranks(count, device_type="cuda").run(fill, str(tmp_path / "folder"))
    assert max(extra) < 4 * WIDE * WIDE + (1 << 20)  # one uneven shard while it is padded
