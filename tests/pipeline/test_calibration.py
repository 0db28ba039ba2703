"""Measuring: whole on every rank or an error on every rank, and everything is given back."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_offload.core import dtensor
from fsdp_offload.core.backend import CpuBackend
from fsdp_offload.core.config import MIB, TransferConfig
from fsdp_offload.core.errors import DeviceError
from fsdp_offload.memory import HostArena
from fsdp_offload.pipeline import calibration
from fsdp_offload.pipeline.calibration import Effort, Probe, measure_rates

Ranks = Callable[..., Any]
CPU = torch.device("cpu")
TRANSFER = TransferConfig(host_threads=2)
TINY = Effort(link_bytes=MIB, chunk_bytes=MIB >> 3, host_bytes=MIB, window_s=0.02)


def test_rates_are_measured_and_all_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []

    class Noted(HostArena):
        def __init__(self, n_bytes: int, **settings: Any) -> None:
            super().__init__(n_bytes, **settings)
            held.extend([weakref.ref(self), weakref.ref(self._mapping)])

    class Backend(CpuBackend):
        def allocate(self, n_bytes: int) -> torch.Tensor:
            made = super().allocate(n_bytes)
            held.append(weakref.ref(made.untyped_storage()))
            return made

    monkeypatch.setattr(calibration, "HostArena", Noted)
    before = threading.active_count()
    rates = measure_rates(Backend(CPU), TRANSFER, effort=TINY)
    assert all(value > 0 for value in rates)
    assert rates.beside_gbps <= rates.link_gbps
    assert len(held) == 5
    assert [ref() for ref in held] == [None] * 5
    assert threading.active_count() == before


@pytest.mark.parametrize("after", [0, 4])
def test_an_error_in_a_host_thread_is_raised_at_once(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = calibration._adamw_step
    calls: list[int] = []

    def failing(memory: Any) -> Callable[[], object]:
        step = real(memory)

        def once() -> None:
            calls.append(1)
            if len(calls) > after:
                raise ZeroDivisionError("in a thread")
            step()

        return once

    monkeypatch.setattr(calibration, "_adamw_step", failing)
    before = threading.active_count()
    # Found late, it would be another error: that a thread does not get a core.
    with pytest.raises(DeviceError, match=r"in a thread.*Remedy") as caught:
        measure_rates(CpuBackend(CPU), TRANSFER, effort=TINY)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert threading.active_count() == before


# --------------------------------------------------------------------------- ranks


def parameters(*meshes: Any) -> list[nn.Parameter]:
    """One per mesh, cut along its last axis."""
    made = []
    for mesh in meshes:
        placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
        made.append(nn.Parameter(distribute_tensor(torch.zeros(8, 4), mesh, placements)))
    return made


def least_of_four() -> Any:
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    made = parameters(hybrid, hybrid["shard"], hybrid)
    groups = dtensor.mesh_groups([*made, nn.Parameter(torch.zeros(2))])
    assert len(groups) == 2
    rank = dist.get_rank()  # each rank is the slowest in one way, but for the last
    both = 90.0 - 10 * (rank == 1), 9.0 - (rank == 2)
    link = mock.patch.object(Probe, "link_gbps", return_value=100.0 - 10 * (rank == 0))
    beside = mock.patch.object(Probe, "beside", return_value=both)
    with link, beside:
        return tuple(measure_rates(CpuBackend(CPU), TRANSFER, groups, effort=TINY))


def test_the_slowest_rank_of_the_whole_mesh_counts(ranks: Ranks) -> None:
    assert set(ranks(4).run(least_of_four)) == {(90.0, 80.0, 8.0)}


def fail_on_rank_1(part: str) -> str:
    groups = dtensor.mesh_groups(parameters(init_device_mesh("cpu", (2,))))

    def fail(*_: object) -> None:
        raise RuntimeError("no such luck")

    patch = mock.patch.object(Probe, part, fail)
    try:
        if dist.get_rank() == 1:
            patch.start()
        measure_rates(CpuBackend(CPU), TRANSFER, groups, effort=TINY)
    except DeviceError as error:
        return error.reason
    finally:
        mock.patch.stopall()
    return "nothing was raised"


@pytest.mark.parametrize("part", ["__init__", "link_gbps", "beside"])
def test_a_failure_of_one_rank_is_raised_on_all(ranks: Ranks, part: str) -> None:
    assert ranks(2).run(fail_on_rank_1, part) == [
        "another rank could not measure them",
        "no such luck",
    ]
