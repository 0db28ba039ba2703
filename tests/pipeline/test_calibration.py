"""Measuring: whole on every rank or an error on every rank, shared, cached, and given back."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_offload import shards
from fsdp_offload.config import MIB, TransferConfig
from fsdp_offload.device import CpuGateway
from fsdp_offload.errors import DeviceError
from fsdp_offload.memory import HostArena
from fsdp_offload.pipeline import calibration
from fsdp_offload.pipeline.calibration import Effort, measure_rates

Ranks = Callable[..., Any]
CPU = torch.device("cpu")
TRANSFER = TransferConfig(host_threads=2)
TINY = Effort(link_bytes=MIB, chunk_bytes=MIB >> 3, host_bytes=MIB, window_s=0.002)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    calibration._known.clear()
    yield
    calibration._known.clear()


def test_rates_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = measure_rates(CpuGateway(CPU), TRANSFER, effort=TINY)
    assert all(value > 0 for value in astuple(rates))
    monkeypatch.delattr(calibration, "_measure")
    assert measure_rates(CpuGateway(CPU), TRANSFER) is rates


def test_memory_and_threads_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []

    class Noted(HostArena):
        def __init__(self, n_bytes: int, **settings: Any) -> None:
            super().__init__(n_bytes, **settings)
            held.extend([weakref.ref(self), weakref.ref(self._mapping)])

    class Gateway(CpuGateway):
        def allocate(self, n_bytes: int) -> torch.Tensor:
            made = super().allocate(n_bytes)
            held.append(weakref.ref(made.untyped_storage()))
            return made

    monkeypatch.setattr(calibration, "HostArena", Noted)
    before = threading.active_count()
    measure_rates(Gateway(CPU), TRANSFER, effort=TINY)
    assert len(held) == 5
    assert [ref() for ref in held] == [None] * 5
    assert threading.active_count() == before


@pytest.mark.parametrize("part", ["LinkProbe", "HostProbe", "_device_gbps"])
def test_a_failure_is_typed_and_keeps_its_cause(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(calibration, part, fail)
    before = threading.active_count()
    with pytest.raises(DeviceError, match=r"no such luck.*Remedy") as caught:
        measure_rates(CpuGateway(CPU), TRANSFER, effort=TINY)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert threading.active_count() == before
    monkeypatch.undo()
    measure_rates(CpuGateway(CPU), TRANSFER, effort=TINY)


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
    # Found late, it would be another error: that a thread does not get a core.
    with pytest.raises(DeviceError, match="in a thread"):
        measure_rates(CpuGateway(CPU), TRANSFER, effort=TINY)


# --------------------------------------------------------------------------- ranks


def parameters(*meshes: Any) -> list[nn.Parameter]:
    """One per mesh, cut along its last axis."""
    made = []
    for mesh in meshes:
        placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
        made.append(nn.Parameter(distribute_tensor(torch.zeros(8, 4), mesh, placements)))
    return made


def measured_for_real() -> tuple[Any, Any]:
    groups = shards.mesh_groups(parameters(init_device_mesh("cpu", (2,))))
    calibration._known.clear()
    first = measure_rates(CpuGateway(CPU), TRANSFER, groups, effort=TINY)
    # A rank that knows them already measures again with one that does not.
    if dist.get_rank() == 0:
        calibration._known.clear()
    return first, measure_rates(CpuGateway(CPU), TRANSFER, groups, effort=TINY)


def test_all_ranks_get_the_same_rates(ranks: Ranks) -> None:
    one, two = ranks(2).run(measured_for_real)
    assert one == two


def least_of_four() -> Any:
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    made = parameters(hybrid, hybrid["shard"], hybrid)
    groups = shards.mesh_groups([*made, nn.Parameter(torch.zeros(2))])
    assert len(groups) == 2
    rank = dist.get_rank()
    # Each rank is the slowest in one way; the last but one has the longest latency.
    mine = [100.0 - 10 * (rank == way) for way in range(7)]
    mine[4] = -(20.0 if rank == 2 else 10.0)
    calibration._known.clear()
    with mock.patch.object(calibration, "_measure", return_value=(mine, None)):
        return measure_rates(CpuGateway(CPU), TRANSFER, groups)


def test_the_slowest_rank_of_the_whole_mesh_counts(ranks: Ranks) -> None:
    found = ranks(4).run(least_of_four)
    assert {astuple(rates) for rates in found} == {(90, 90, 90, 90, 20, 100, 100)}


def fail_on_rank_1(part: str) -> str:
    groups = shards.mesh_groups(parameters(init_device_mesh("cpu", (2,))))
    calibration._known.clear()

    def fail(*_: object) -> None:
        raise RuntimeError("no such luck")

    patch = mock.patch.object(calibration, part, fail)
    try:
        if dist.get_rank() == 1:
            patch.start()
        measure_rates(CpuGateway(CPU), TRANSFER, groups, effort=TINY)
    except DeviceError as error:
        return error.reason
    finally:
        mock.patch.stopall()
    return "nothing was raised"


@pytest.mark.parametrize("part", ["LinkProbe", "HostProbe", "_device_gbps"])
def test_a_failure_of_one_rank_is_raised_on_all(ranks: Ranks, part: str) -> None:
    assert ranks(2).run(fail_on_rank_1, part) == [
        "another rank could not measure them",
        "no such luck",
    ]
