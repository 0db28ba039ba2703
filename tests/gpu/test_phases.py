"""Offload and reload of a GPU: the driver's memory, addresses, CUDA graphs, streams, NCCL."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import phase_jobs
from tests.phase_jobs import LANES, POLICIES

REPOSITORY = Path(__file__).parents[2]
WIDE = 2048  # five matrices of 16 MiB, each in a segment of its own, and moments: 240 MiB leave
WIDER = 2 * WIDE  # so that copies take long, or half of a matrix has its own segment
ADDRESSES = pytest.mark.parametrize("keep_addresses", [False, True], ids=["default", "keep"])

Pool = Callable[..., Any]


def check_shares(found: list[list[float]]) -> None:
    """In the first cycle storages may share segments of torch's allocator with what stays, or
    with holes that earlier jobs have left, which the driver then has back, too."""
    for first, *later in found:
        assert first >= 0.9
        assert all(0.99 <= share < 1.2 for share in later), later


@pytest.mark.alone
@ADDRESSES
@pytest.mark.parametrize("lanes", ["plain", "resident"])
def test_the_driver_has_the_memory_meanwhile(ranks: Pool, lanes: str, keep_addresses: bool) -> None:
    pool = ranks(1, device_type="cuda")
    check_shares(pool.run(phase_jobs.frees_its_payload, lanes, WIDE, keep_addresses=keep_addresses))


def test_storages_that_come_back_share_segments(ranks: Pool) -> None:
    """The fewer there are, the sooner the next offload has given them back."""
    count, n_bytes = 40, 24 << 20  # each would have its own; batches are of 128 MiB or more
    (segments,) = ranks(1, device_type="cuda").run(
        phase_jobs.segments_after_a_cycle, count, n_bytes
    )
    assert segments <= 8


@pytest.mark.parametrize("lanes", LANES)
def test_training_with_switches_is_training_without(ranks: Pool, lanes: str) -> None:
    for dtype in ("float32", "bfloat16"):
        ranks(1, device_type="cuda").run(phase_jobs.same_training, lanes, "all", dtype)


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "all"])
@pytest.mark.parametrize("lanes", ["plain", "mixed"])
def test_policies(ranks: Pool, lanes: str, policy: str) -> None:
    ranks(1, device_type="cuda").run(phase_jobs.same_training, lanes, policy, "bfloat16")


@pytest.mark.parametrize("policy", ["all", "grads-saved"])
@pytest.mark.parametrize("lanes", ["plain", "mixed"])
def test_training_at_kept_addresses(ranks: Pool, lanes: str, policy: str) -> None:
    pool = ranks(1, device_type="cuda")
    pool.run(phase_jobs.same_training, lanes, policy, "float32", keep_addresses=True)


@pytest.mark.parametrize("lanes", LANES)
def test_use_while_away_raises_and_takes_no_device_memory(
    ranks: Pool, tmp_path: Path, lanes: str
) -> None:
    pool = ranks(1, device_type="cuda")
    pool.run(phase_jobs.use_while_away, lanes)
    if lanes != "plain":
        pool.run(phase_jobs.saves_while_away, lanes, str(tmp_path))


def test_close_gives_host_memory_back(ranks: Pool) -> None:
    ranks(1, device_type="cuda").run(phase_jobs.gives_host_memory_back)


@pytest.mark.alone
@ADDRESSES
def test_no_room_to_come_back(ranks: Pool, keep_addresses: bool) -> None:
    pool = ranks(1, device_type="cuda")
    pool.run(phase_jobs.no_room_to_come_back, WIDE, keep_addresses=keep_addresses)


@ADDRESSES
def test_used_at_once(ranks: Pool, keep_addresses: bool) -> None:
    ranks(1, device_type="cuda").run(phase_jobs.used_at_once, WIDER, keep_addresses=keep_addresses)


@pytest.mark.alone
@ADDRESSES
def test_two_jobs_take_turns(ranks: Pool, keep_addresses: bool) -> None:
    ranks(1, device_type="cuda").run(phase_jobs.swapped, WIDE, keep_addresses=keep_addresses)


@pytest.mark.alone
@ADDRESSES
def test_loads_take_no_more_room(ranks: Pool, keep_addresses: bool) -> None:
    ranks(1, device_type="cuda").run(phase_jobs.loads, WIDE, keep_addresses=keep_addresses)


@pytest.mark.alone
def test_a_graph_over_a_region_replays_after_every_pause() -> None:
    phase_jobs.region_with_cache()


def test_graphs_survive_an_offloader_with_kept_addresses() -> None:
    phase_jobs.model_and_update()


# ------------------------------------------------------------------------------- several GPUs


@pytest.mark.gpus(2)
@pytest.mark.parametrize("lanes", LANES)
def test_two_gpus_train_the_same(ranks: Pool, lanes: str) -> None:
    pool = ranks(2, device_type="cuda")
    for dtype in ("float32", "bfloat16"):
        pool.run(phase_jobs.same_training, lanes, "all", dtype)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "all"])
def test_two_gpus_and_policies(ranks: Pool, policy: str) -> None:
    pool = ranks(2, device_type="cuda")
    pool.run(phase_jobs.same_training, "mixed", policy, "bfloat16")
    pool.run(phase_jobs.same_training, "mixed", policy, "float32", keep_addresses=True)


@pytest.mark.alone
@pytest.mark.gpus(2)
@ADDRESSES
def test_two_gpus_offload(ranks: Pool, tmp_path: Path, keep_addresses: bool) -> None:
    pool = ranks(2, device_type="cuda")
    for _ in range(2):  # the second job's storages lie in what the first one's have left
        job = phase_jobs.frees_its_payload
        check_shares(pool.run(job, "plain", WIDER, keep_addresses=keep_addresses))
    pool.run(phase_jobs.use_while_away, "mixed")
    pool.run(phase_jobs.saves_while_away, "mixed", str(tmp_path))
    pool.run(phase_jobs.used_at_once, WIDER, keep_addresses=keep_addresses)
    pool.run(phase_jobs.swapped, 512, keep_addresses=keep_addresses)


# ------------------------------------------------------------------------------------- example


def run_here(arguments: list[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_example() -> None:
    output = run_here(["examples/rl_phases.py", "--iterations=21"])
    rewards = [float(reward) for reward in re.findall(r"reward (\d\.\d+) ", output)]
    assert "1 x cuda" in output
    assert rewards[-1] > 2 * rewards[0], output
