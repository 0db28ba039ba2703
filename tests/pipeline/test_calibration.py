"""Measuring: whole on every rank or an error on every rank, shared, cached, and given back."""

from __future__ import annotations

import os
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
from fsdp_offload.plan import Rates

Ranks = Callable[..., Any]
CPU = torch.device("cpu")
TRANSFER = TransferConfig(host_threads=2)
TINY = Effort(link_bytes=MIB, chunk_bytes=MIB >> 3, host_bytes=MIB, window_s=0.02)


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


@pytest.mark.parametrize(("together_gbps", "beside_gbps"), [(2.5, 2.5), (70.0, 3.0)])
def test_what_is_measured_bears_its_name(
    monkeypatch: pytest.MonkeyPatch, together_gbps: float, beside_gbps: float
) -> None:
    """The link is not faster beside the cores than alone: more is scatter."""

    class Probe:
        device_memory = None

        def __init__(self, *_: object) -> None:
            pass

        def run(self, n_bytes: int) -> float:
            return 0.0

        def close(self) -> None:
            pass

    class Link(Probe):
        def rates(self) -> list[float]:
            return [1.0, 2.0, 3.0]

    class Host(Probe):
        def rates(self, link: Probe) -> list[float]:
            return [4e9, 5.0]

        def beside(self, link: Probe) -> list[float]:
            return [together_gbps, 6e9]

    monkeypatch.setattr(calibration, "LinkProbe", Link)
    monkeypatch.setattr(calibration, "HostProbe", Host)
    monkeypatch.setattr(calibration, "_device_gbps", lambda *_: 7.0)
    rates = measure_rates(CpuGateway(CPU), TRANSFER, effort=TINY)
    assert rates == Rates(
        h2d_gbps=1.0,
        d2h_gbps=2.0,
        both_ways_gbps=3.0,
        host_numel_per_s=4e9,
        host_latency_ms=5.0,
        host_dram_gbps=beside_gbps + 6 * 28,  # more than the 36 bytes of 4 G/s alone
        device_gbps=7.0,
        beside_gbps=beside_gbps,
        beside_numel_per_s=6e9,
    )


@pytest.mark.parametrize(
    ("cores", "wanted", "threads", "beside"),
    [(1, None, 1, 1), (2, None, 2, 1), (5, None, 5, 2), (5, 4, 4, 4)],
)
def test_beside_the_link_half_of_the_cores_work_or_the_threads_that_are_wanted(
    monkeypatch: pytest.MonkeyPatch, cores: int, wanted: int | None, threads: int, beside: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    gateway, transfer = CpuGateway(CPU), TransferConfig(host_threads=wanted)
    link = calibration.LinkProbe(gateway, transfer, TINY)
    host = calibration.HostProbe(gateway, transfer, TINY)
    working: set[int] = set()

    def noted(index: int) -> Callable[[], object]:
        step = host._steps[index]

        def once() -> object:
            working.add(index)
            return step()

        return once

    try:
        host._steps = [noted(index) for index in range(threads)]
        host.rates(link)
        alone = len(working)
        working.clear()
        gbps, numel_per_s = host.beside(link)
    finally:
        host.close()
        link.close()
    assert (alone, len(working)) == (threads, beside)
    assert gbps > 0
    assert numel_per_s > 0


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
    # Each rank is the slowest in some ways; the last but one has the longest latency.
    mine = [100.0 - 10 * (rank == way % 4) for way in range(9)]
    mine[4] = -(20.0 if rank == 2 else 10.0)
    calibration._known.clear()
    with mock.patch.object(calibration, "_measure", return_value=(mine, None)):
        return measure_rates(CpuGateway(CPU), TRANSFER, groups)


def test_the_slowest_rank_of_the_whole_mesh_counts(ranks: Ranks) -> None:
    found = ranks(4).run(least_of_four)
    assert {astuple(rates) for rates in found} == {(90, 90, 90, 90, 20, 90, 90, 90, 90)}


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
