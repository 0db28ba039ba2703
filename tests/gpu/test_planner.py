"""Rates of this machine, and what they predict of a step."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_offload import HybridDeviceOptimizer, TransferConfig, shards
from fsdp_offload.device import gateway_for
from fsdp_offload.memory import local_ranks
from fsdp_offload.pipeline import calibration
from fsdp_offload.pipeline.calibration import measure_rates
from fsdp_offload.plan import Plan

pytestmark = pytest.mark.alone
TRANSFER = TransferConfig()
WIDTH = 8192


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    calibration._known.clear()
    yield
    calibration._known.clear()


def warm() -> None:
    """What every process that trains has done: a context, a first fused step."""
    parameter = nn.Parameter(torch.ones(8, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], fused=True).step()
    torch.cuda.synchronize()


def median_ms(fn: Callable[[], object], count: int = 10) -> float:
    """Median milliseconds with the device idle before and after."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        fn()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def test_rates_are_measured_in_two_seconds_and_device_memory_is_given_back() -> None:
    warm()
    gateway = gateway_for(torch.device("cuda"))
    gc.collect()  # what other tests have left
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    began = time.perf_counter()
    rates = measure_rates(gateway, TRANSFER)
    seconds = time.perf_counter() - began
    print(f"{seconds:.2f} s: {rates}")
    assert seconds <= 2.0
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() <= reserved
    assert 0.9 * max(rates.h2d_gbps, rates.d2h_gbps) < rates.both_ways_gbps
    assert rates.both_ways_gbps < 1.1 * (rates.h2d_gbps + rates.d2h_gbps)
    assert rates.host_dram_gbps >= rates.both_ways_gbps
    assert rates.device_gbps > rates.both_ways_gbps
    assert measure_rates(gateway, TRANSFER) is rates


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_streamed_step_is_predicted_within_15_per_cent(dtype: torch.dtype) -> None:
    """About 1 GB of state: 100 M elements of 10 bytes (bf16), or 134 M of 8."""
    count = 12 if dtype == torch.bfloat16 else 16
    made = [
        nn.Parameter(torch.randn(WIDTH, 1024, device="cuda", dtype=dtype)) for _ in range(count)
    ]
    optimizer = HybridDeviceOptimizer(
        torch.optim.AdamW(made, fused=True), update_on="device", transfer=TRANSFER
    )
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    for _ in range(3):
        optimizer.step()

    def step() -> None:
        optimizer.step()
        optimizer.synchronize()

    measured_ms = median_ms(step)
    rates = measure_rates(optimizer._gateway, TRANSFER)
    plan = optimizer._inventory.made
    print(plan.explain(measured_ms, rates=rates))
    predicted = plan.predict(rates)
    optimizer.close()
    assert predicted is not None
    assert predicted.limit == "link"
    assert predicted.step_ms == pytest.approx(measured_ms, rel=0.15)


def test_auto_measures_and_its_plan_can_be_replayed() -> None:
    made = [nn.Parameter(torch.randn(WIDTH, WIDTH, device="cuda")) for _ in range(6)]
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW(made), transfer=TRANSFER)
    plan = optimizer._inventory.made
    print(plan.explain())
    optimizer.close()
    assert plan.rates is not None
    assert Plan.from_dict(plan.to_dict()) == plan


def test_small_models_are_not_measured_for() -> None:
    parameter = nn.Parameter(torch.randn(1024, 1024, device="cuda"))
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW([parameter]), transfer=TRANSFER)
    optimizer.close()
    assert not calibration._known


def measured_on_a_mesh() -> tuple[float, tuple[float, ...], int]:
    warm()
    mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(8, 4, device="cuda"), mesh, [Shard(0)]))
    groups = shards.mesh_groups([parameter])
    torch.distributed.all_reduce(torch.ones(1, device="cuda"), group=groups[0])
    calibration._known.clear()
    gateway: Any = gateway_for(torch.device("cuda", torch.cuda.current_device()))
    began = time.perf_counter()
    rates = measure_rates(gateway, TRANSFER, groups)
    return time.perf_counter() - began, astuple(rates), local_ranks()


@pytest.mark.gpus(2)
def test_ranks_measure_together_and_agree(ranks: Callable[..., Any]) -> None:
    (first_s, first, _), (second_s, second, local) = ranks(2, device_type="cuda").run(
        measured_on_a_mesh
    )
    print(f"{local} local ranks, {max(first_s, second_s):.2f} s: {first}")
    assert first == second
    assert max(first_s, second_s) <= 2.0
