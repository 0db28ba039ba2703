"""Rates of machines that were measured, and candidates of a GPT, without a tensor."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from fsdp_offload.config import OffloadConfig
from fsdp_offload.plan import Candidate, Rates, planner

LINK_GBPS = 101.46
"""Both ways, of run 1 in docs/benchmarks/step_h200_2026-11-20.md; so are the times in tests."""

ONE_GPU = Rates(55.3, 55.3, LINK_GBPS, 4.4e9, 7.0, 226.0, 3500.0, 85.7, 5.0e9)
"""Fast host memory: two lanes lose a sixth of the link while half of the cores work."""
SLOW_MEMORY = replace(
    ONE_GPU,
    both_ways_gbps=96.6,
    host_numel_per_s=4.0e9,
    host_dram_gbps=138.0,
    beside_gbps=72.3,
    beside_numel_per_s=2.33e9,
)
"""Slow host memory: there they lose a quarter of it. What is not named is that of ``ONE_GPU``."""
MEDIUM_MEMORY = replace(
    ONE_GPU,
    both_ways_gbps=100.2,
    host_numel_per_s=3.98e9,
    host_dram_gbps=169.0,
    beside_gbps=81.4,
    beside_numel_per_s=3.11e9,
)
"""Of run 23 in docs/benchmarks/iteration_h200_2026-11-22_lanes.md: 20 and 30 % of the state in the
host lane took 12 and 16.5 ms less than streaming all of it."""
SLOWER_MEMORY = replace(
    ONE_GPU,
    both_ways_gbps=94.7,
    host_numel_per_s=3.73e9,
    host_dram_gbps=134.0,
    beside_gbps=71.1,
    beside_numel_per_s=2.12e9,
)
"""Of run 25 there: 20 and 30 % took as long as streaming all of it, within 2.5 ms."""
FOUR_GPUS = Rates(28.0, 28.0, 50.3, 1.77e9, 18.0, 52.0, 3500.0, 24.0, 1.0e9)
"""One of four ranks that share one host's memory."""
FAST_CORES = Rates(25.0, 25.0, 40.0, 40e9, 1.0, 2000.0, 3500.0, 40.0, 40e9)
"""A slow link beside a host with fast memory."""


def config(update_on: Any = "auto", **given: Any) -> OffloadConfig:
    arguments = dict.fromkeys(("offload_fraction", "device_budget", "precision", "transfer"))
    return OffloadConfig.make(**{**arguments, "update_on": update_on, "overlap": "step", **given})


def candidate(fqn: str, numel: int, *, state_bytes: int = 10, **given: Any) -> Candidate:
    """AdamW: ``state_bytes`` per element on the device lanes, all in fp32 on the host."""
    values: dict[str, Any] = {
        "global_bytes": numel * state_bytes,
        "max_local_bytes": numel * state_bytes,
        "max_local_numel": numel,
        "host_state_bytes": 12 * numel,
        "gradient_bytes": 4 * numel,
        "fast_on_host": True,
    }
    return Candidate(fqn, **{**values, **given})


def gpt(state_bytes: int = 10, layers: int = 24, dim: int = 2048) -> list[Candidate]:
    """The model of the step benchmark: 1.33 G parameters in 146 tensors."""
    block = [(3 * dim, dim), (dim, dim), (4 * dim, dim), (dim, 4 * dim), (dim,), (dim,)]
    shapes = {"embed.weight": (60000, dim)}
    shapes |= {f"layers.{i}.p{j}.weight": s for i in range(layers) for j, s in enumerate(block)}
    shapes["norm.weight"] = (dim,)
    return [candidate(fqn, math.prod(s), state_bytes=state_bytes) for fqn, s in shapes.items()]


TRUSTED_BUSY = {"step": 0.6, "backward": 1 / 3}


def trust_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if two lanes took what is predicted for them, in these modes; by default that is trusted
    for ``step()`` alone."""
    monkeypatch.setattr(planner, "HOST_BUSY", TRUSTED_BUSY)
