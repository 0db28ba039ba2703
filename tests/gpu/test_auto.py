"""``update_on="auto"`` on a GPU: measured within a second, the same on all ranks."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from fsdp_offload.core import dtensor
from fsdp_offload.core.backend import backend_for
from fsdp_offload.pipeline import inventory
from fsdp_offload.pipeline.calibration import measure_rates

pytestmark = pytest.mark.alone
TRANSFER = TransferConfig()


def warm() -> None:
    """What every process that trains has done: a context, a first fused step."""
    parameter = nn.Parameter(torch.ones(8, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], fused=True).step()
    torch.cuda.synchronize()


def test_rates_are_measured_in_a_second_and_device_memory_is_given_back() -> None:
    warm()
    backend = backend_for(torch.device("cuda"))
    gc.collect()  # what other tests have left
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    began = time.perf_counter()
    rates = measure_rates(backend, TRANSFER)
    seconds = time.perf_counter() - began
    print(f"{seconds:.2f} s: {rates}")
    assert seconds <= 1.0
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() <= reserved
    assert 10 < rates.beside_gbps <= rates.link_gbps
    assert rates.host_numel_per_s > 1e8


def test_auto_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [nn.Parameter(torch.randn(8192, 8192, device="cuda")) for _ in range(6)]
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW(made), update_on="auto", transfer=TRANSFER)
    lanes = optimizer.lanes
    optimizer.close()
    monkeypatch.delattr(inventory, "measure_rates")
    again = HybridDeviceOptimizer(torch.optim.AdamW(made), update_on=lanes, transfer=TRANSFER)
    assert again.lanes == lanes
    again.close()


def measured_on_a_mesh() -> tuple[float, tuple[float, ...]]:
    warm()
    mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(8, 4, device="cuda"), mesh, [Shard(0)]))
    groups = dtensor.mesh_groups([parameter])
    torch.distributed.all_reduce(torch.ones(1, device="cuda"), group=groups[0])
    backend: Any = backend_for(torch.device("cuda", torch.cuda.current_device()))
    began = time.perf_counter()
    rates = measure_rates(backend, TRANSFER, groups)
    return time.perf_counter() - began, tuple(rates)


@pytest.mark.gpus(2)
def test_ranks_measure_together_and_agree(ranks: Callable[..., Any]) -> None:
    (first_s, first), (second_s, second) = ranks(2, device_type="cuda").run(measured_on_a_mesh)
    print(f"{max(first_s, second_s):.2f} s: {first}")
    assert first == second
    assert max(first_s, second_s) <= 1.5
