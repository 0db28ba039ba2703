"""Checkpoints of jobs on GPUs: NCCL-only groups, pinned staging, no device memory, exact resume."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from fsdp_offload import HybridDeviceOptimizer, checkpoint
from tests.fsdp.models import bits
from tests.gpu.test_nccl import SMALL, Net, make_net, train

LANES: dict[str, Any] = {
    "streamed": "device",
    "host": "host",
    "mixed": ("resident", "streamed", "host"),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Job = tuple[Net, torch.optim.Optimizer]


def job(kind: str, dtype: torch.dtype, lr: float = 0.01) -> Job:
    net = make_net(dtype)
    plain = torch.optim.AdamW(net.parameters(), lr=lr)
    if kind == "plain":
        return net, plain
    lanes = LANES[kind]
    if isinstance(lanes, tuple):
        count = sum(1 for _ in net.parameters())
        lanes = list(itertools.islice(itertools.cycle(lanes), count))
    return net, HybridDeviceOptimizer(plain, model=net, update_on=lanes, transfer=SMALL)


def whole(made: Job) -> dict[str, torch.Tensor]:
    """Weights and moments of all ranks, on the CPU."""
    net, optimizer = made
    found = {}
    for name, parameter in net.named_parameters():
        tensors = {"weight": parameter, **optimizer.state[parameter]}
        for kind in ("weight", "exp_avg", "exp_avg_sq", "step"):
            value = tensors[kind]
            if hasattr(value, "full_tensor"):
                shard = value._local_tensor.to("cuda")
                value = type(value)(shard, value._spec, requires_grad=False).full_tensor()
            found[f"{name}.{kind}"] = value.detach().cpu().clone()
    return found


def close(made: Job) -> None:
    if isinstance(made[1], HybridDeviceOptimizer):
        made[1].close()


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
    close(made)
    return saved, after


def load_and_go_on(path: str, kind: str, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    made = job(kind, DTYPES[dtype], lr=0.5)
    train(*made, range(1))
    assert checkpoint.load(path, *made) == {"step": 3}
    loaded = whole(made)
    train(*made, range(3, 6))
    after = whole(made)
    close(made)
    return loaded, after


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in a if not torch.equal(bits(a[name]), bits(b[name]))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LANES)
def test_a_job_goes_on_exactly(
    ranks: Callable[..., Any], tmp_path: Path, kind: str, dtype: str
) -> None:
    pool = ranks(1, device_type="cuda")
    saved, after = pool.run(save_and_go_on, str(tmp_path), kind, dtype)[0]
    for name in ("sync", "first", "second"):
        loaded, resumed = pool.run(load_and_go_on, str(tmp_path / name), kind, dtype)[0]
        assert not equal(saved, loaded), name
        assert not equal(after, resumed), name


def test_between_lanes_and_the_plain_optimizer(ranks: Callable[..., Any], tmp_path: Path) -> None:
    pool = ranks(1, device_type="cuda")
    for dtype in DTYPES:
        for kind in ("streamed", "host", "plain"):
            folder = tmp_path / f"{dtype}-{kind}"
            saved, _ = pool.run(save_and_go_on, str(folder), kind, dtype)[0]
            for other in (*LANES, "plain"):
                loaded, _ = pool.run(load_and_go_on, str(folder / "sync"), other, dtype)[0]
                different = equal(saved, loaded)
                if dtype == "bf16" and "plain" in (kind, other) and kind != other:
                    different = [
                        name for name in different
                        if not torch.equal(saved[name].bfloat16(), loaded[name].bfloat16())
                    ]  # fmt: skip
                assert not different, (dtype, kind, other)


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
    close(made)
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
        assert not equal(saved, whole(other))
        close(other)
    close(made)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_states_over_ranks(ranks: Callable[..., Any], dtype: str) -> None:
    ranks(2, device_type="cuda").run(through_whole_states, dtype)


@pytest.mark.gpus(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["streamed", "mixed", "plain"])
def test_to_another_number_of_ranks(
    ranks: Callable[..., Any], tmp_path: Path, kind: str, dtype: str
) -> None:
    four = ranks(4, device_type="cuda")
    saved, after = four.run(save_and_go_on, str(tmp_path), kind, dtype)[0]
    loaded, resumed = four.run(load_and_go_on, str(tmp_path / "second"), kind, dtype)[0]
    assert not equal(saved, loaded)
    assert not equal(after, resumed)
    for other in ("mixed", "plain") if dtype == "fp32" else ("mixed",):
        two = ranks(2, device_type="cuda").run(
            load_and_go_on, str(tmp_path / "second"), other, dtype
        )
        different = equal(saved, two[0][0])
        if dtype == "bf16" and kind == "plain":
            different = [n for n in different if not torch.equal(
                saved[n].bfloat16(), two[0][0][n].bfloat16()
            )]  # fmt: skip
        assert not different, other
