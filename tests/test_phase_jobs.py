"""What ``tests/gpu/test_phases.py`` runs on GPUs, on the CPU: the same state machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_offload.core.storage import can_swap
from tests import graph_jobs, phase_jobs

SWAPS = pytest.mark.skipif(not can_swap(), reason="this torch cannot swap CPU storages")

Pool = Callable[..., Any]


@pytest.mark.long
def test_every_lane_and_policy(ranks: Pool) -> None:
    pool = ranks(2)
    for lanes in phase_jobs.LANES:
        pool.run(phase_jobs.same_training, lanes, "all", "float32")
    for policy in phase_jobs.POLICIES:
        pool.run(phase_jobs.same_training, "mixed", policy, "bfloat16")


def test_use_while_away(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(phase_jobs.use_while_away, "plain")
    ranks(2).run(phase_jobs.saves_while_away, "mixed", str(tmp_path))


def test_close_gives_host_memory_back(ranks: Pool) -> None:
    ranks(2).run(phase_jobs.gives_host_memory_back)


ADDRESSES = [False, pytest.param(True, marks=SWAPS)]


@pytest.mark.parametrize("keep_addresses", ADDRESSES)
def test_cycles(ranks: Pool, keep_addresses: bool) -> None:
    pool = ranks(2)
    pool.run(phase_jobs.frees_its_payload, "plain", 64, keep_addresses=keep_addresses)
    pool.run(phase_jobs.used_at_once, 64, keep_addresses=keep_addresses)
    pool.run(phase_jobs.swapped, 64, keep_addresses=keep_addresses)
    pool.run(phase_jobs.loads, 64, keep_addresses=keep_addresses)


JOBS = ["region_with_cache", pytest.param("model_and_update", marks=SWAPS)]


@pytest.mark.parametrize("job", JOBS)
def test_calls_in_the_place_of_graphs(job: str) -> None:
    getattr(graph_jobs, job)(torch.device("cpu"))
