"""Cores of the host lane's threads: near the device, divided between ranks, ours alone."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from fsdp_offload.core.backend import CpuBackend
from fsdp_offload.pipeline import worker
from fsdp_offload.pipeline.engine import host_threads
from fsdp_offload.pipeline.worker import cores_of_rank, share, sibling_groups, thread_setup
from tests.helpers.config import config

CUDA = [torch.device("cuda", i) for i in range(4)]
SOCKETS = (frozenset({0, 1, 2, 3, 8, 9, 10, 11}), frozenset({4, 5, 6, 7, 12, 13, 14, 15}))
"""Two of 4 physical cores, with hyper-threads."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """16 cores on two sockets, two devices next to each, one rank per device."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: SOCKETS[0] | SOCKETS[1])
    monkeypatch.setattr(worker, "cores_near", lambda device: SOCKETS[device.index // 2])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        worker, "sibling_groups", lambda some: sorted({(c % 8, c % 8 + 8) for c in some})
    )
    return monkeypatch


def test_ranks_divide_whole_physical_cores_near_their_devices(machine: pytest.MonkeyPatch) -> None:
    found = []
    for rank in range(4):
        machine.setenv("LOCAL_RANK", str(rank))
        found.append(cores_of_rank(CUDA[rank]))

    assert found == [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]


def test_a_process_that_was_bound_already_keeps_all_that_is_near(
    machine: pytest.MonkeyPatch,
) -> None:
    machine.setenv("LOCAL_RANK", "1")
    machine.setattr(os, "sched_getaffinity", lambda pid: SOCKETS[0])

    assert cores_of_rank(CUDA[1]) == SOCKETS[0]


@pytest.mark.parametrize("unknown", ["rank", "devices", "numbers"])
def test_who_shares_cores_is_not_guessed(unknown: str, machine: pytest.MonkeyPatch) -> None:
    machine.setenv("LOCAL_RANK", "1")
    device = CUDA[1]
    if unknown == "rank":
        machine.delenv("LOCAL_RANK")
    elif unknown == "devices":  # each rank sees its own alone
        machine.setattr(torch.cuda, "device_count", lambda: 1)
    else:
        device = CUDA[0]

    assert cores_of_rank(device) == SOCKETS[0]


def test_ranks_without_an_accelerator_divide_all_cores(machine: pytest.MonkeyPatch) -> None:
    everything = SOCKETS[0] | SOCKETS[1]
    machine.setattr(worker, "cores_near", lambda device: everything)
    parts = []
    for rank in range(4):
        machine.setenv("LOCAL_RANK", str(rank))
        parts.append(cores_of_rank(torch.device("cpu")))

    assert frozenset().union(*parts) == everything
    assert sum(map(len, parts)) == len(everything)


@pytest.mark.parametrize(("n_groups", "count"), [(7, 3), (4, 4), (16, 5), (1, 1)])
def test_shares_are_disjoint_complete_and_even(n_groups: int, count: int) -> None:
    groups = [(i,) for i in range(n_groups)]
    parts = [share(groups, i, count) for i in range(count)]

    assert sorted(core for part in parts for core in part) == list(range(n_groups))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_siblings_come_from_the_system_and_stay_within_what_is_allowed(tmp_path: Path) -> None:
    for core, text in ((0, "0,2"), (1, "1,3"), (2, "0,2")):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")

    assert sibling_groups({0, 1, 2, 5}, tmp_path) == [(0, 2), (1,), (5,)]


def test_only_the_thread_itself_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    monkeypatch.setattr(worker, "cores_of_rank", lambda device: one)
    setup = thread_setup(CpuBackend(torch.device("cpu")))
    found: list[set[int]] = []

    def run() -> None:
        setup()
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert found == [set(one)]
    assert os.sched_getaffinity(0) == before


def test_a_system_that_forbids_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(pid: int, mask: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", forbid)
    thread_setup(CpuBackend(torch.device("cpu")))()


@pytest.mark.parametrize(("ranks", "threads"), [(1, 16), (3, 5), (16, 1), (64, 1)])
def test_ranks_of_a_host_divide_its_cores(
    ranks: int, threads: int, machine: pytest.MonkeyPatch
) -> None:
    machine.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert host_threads(config()) == threads
