"""Sizes from a job's size alone: against measured ones, and as properties."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_offload.cli.arguments import CARDS_GIB
from fsdp_offload.plan.estimate import (
    MOST_GPUS,
    Model,
    Workload,
    bounds_ms,
    estimate,
    fewest_gpus,
)

GIB = 1 << 30
CARDS = {name: int(gib * GIB) for name, gib in CARDS_GIB.items()}
H100 = CARDS["h100-80"]
FIRST = Model(1_330_000_000, 24, 2048, 60000)
NARROW = Model(1_260_000_000, 60, 1280, 60000)
DEEP = Model(3_140_000_000, 60, 2048, 60000)
PAIR = Workload(4096, gpus=2, checkpointed=False)
SHORT = Workload(8192, checkpointed=False)


@pytest.mark.parametrize(
    ("model", "work", "device_memory", "gib"),
    [
        pytest.param(FIRST, SHORT, 0, 17.72, id="0"),
        pytest.param(FIRST, SHORT, 1.5 * GIB, 19.09, id="1.5 GiB"),
        pytest.param(FIRST, SHORT, None, 29.99, id="auto"),
        pytest.param(
            NARROW, replace(SHORT, tokens=4096, moments="bf16"), 1.5 * GIB, 14.87, id="60 layers"
        ),
        pytest.param(DEEP, PAIR, None, 34.37, id="two GPUs"),
    ],
)
def test_memory_is_what_was_measured(
    model: Model, work: Workload, device_memory: float | None, gib: float
) -> None:
    """Peaks of torch's allocator on H100s, torch 2.11, commit d0d21fd; two GPUs: 35dfab6."""
    found = estimate(model, work, H100, device_memory)
    assert found.fits
    assert found.peak_bytes / GIB == pytest.approx(gib, rel=0.03)


def test_updates_hide_behind_the_forward_or_the_backward() -> None:
    assert bounds_ms(40e9, 0.0, 500.0, 1000.0, 40.0) == {"forward": 2000.0, "backward": 1500.0}
    assert bounds_ms(80e9, 8e9, 500.0, 1000.0, 40.0) == {"forward": 3200.0, "backward": 2500.0}
    assert bounds_ms(0.0, 0.0, 500.0, 1000.0, 40.0) == {"forward": 1500.0, "backward": 1500.0}


def test_measured_iterations_are_near_their_bound() -> None:
    """Links are slower beside kernels than alone, as they were measured."""
    path = Path(__file__).parents[2] / "docs" / "benchmarks" / "whole_h100_2026-11-28.json"
    report = json.loads(path.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    alone = rows.pop("compute")
    assert len(rows) == 5
    for name, row in rows.items():
        gbps = row.get("link", report["link"])["h2d+d2h_gbps"] / 2
        times_ms = alone["forward_ms"], alone["backward_ms"]
        bound = bounds_ms(row["moved_bytes"], 0.0, *times_ms, gbps)[row["kind"]]
        assert 1.0 < row["iteration_ms"] / bound < (1.22 if "bf16" in name else 1.1), name


SIZES = st.floats(1e6, 4e11)
JOBS = st.builds(
    Workload,
    tokens=st.integers(1, 32).map(lambda n: 1024 * n),
    gpus=st.sampled_from([1, 2, 8, 64]),
    checkpointed=st.booleans(),
    shard_bytes=st.sampled_from([2, 4]),
    moments=st.sampled_from(["fp32", "bf16", "int8"]),
    offload=st.sampled_from(["state", "all"]),
)
CHOSEN = st.sampled_from(sorted(CARDS))


@given(SIZES, JOBS, CHOSEN, st.floats(0, 100), st.floats(0, 100))
def test_with_more_device_memory_less_travels(
    params: float, work: Workload, name: str, less: float, more: float
) -> None:
    model, memory = Model.of_size(params), CARDS[name]
    low, high = (estimate(model, work, memory, n * GIB) for n in sorted((less, more)))
    assert low.fits == high.fits
    if not low.fits:
        return
    assert high.in_bytes <= low.in_bytes
    for found in (low, high):
        assert found.peak_bytes <= memory
        assert 0 <= found.stays_bytes <= found.state_bytes


@given(SIZES, JOBS, CHOSEN)
def test_what_fits_with_state_alone_away_fits_with_all_and_moves_no_more(
    params: float, work: Workload, name: str
) -> None:
    model, card = Model.of_size(params), CARDS[name]
    state, both = (estimate(model, replace(work, offload=x), card) for x in ("state", "all"))
    if not state.fits:
        return
    assert both.fits
    assert both.in_bytes == both.out_bytes == pytest.approx(state.in_bytes)
    assert both.weights_away_bytes == 0


def test_a_model_of_which_nothing_stays_fits_into_a_small_card() -> None:
    """7.9B parameters: 16 bytes in per parameter with gradients, 14 out."""
    model, work = Model(7_900_000_000, 38, 4096, 60000), Workload(16384, offload="all")
    assert estimate(model, replace(work, offload="state"), 24 * GIB).missing_bytes > 11 * GIB
    found = estimate(model, work, 24 * GIB, 0)
    assert found.fits
    assert found.peak_bytes < 14 * GIB
    assert found.in_bytes / model.params == pytest.approx(16, rel=0.01)
    assert found.out_bytes / model.params == pytest.approx(14, rel=0.01)
    assert found.host_bytes / model.params == pytest.approx(14, rel=0.01)
    more = estimate(model, work, CARDS["rtx-4090"])
    assert more.fits
    assert 0 < more.weights_bytes < 2 * model.params
    assert (more.gradients_bytes, more.stays_bytes) == (0, pytest.approx(0, abs=1024))
    assert more.in_bytes < found.in_bytes


@given(SIZES, JOBS, CHOSEN)
def test_it_fits_on_the_fewest_gpus_and_more_but_not_on_less(
    params: float, work: Workload, name: str
) -> None:
    model, card = Model.of_size(params), CARDS[name]
    fewest = fewest_gpus(model, work, card)
    if fewest is None:
        assert not estimate(model, replace(work, gpus=MOST_GPUS), card).fits
        return
    assert estimate(model, replace(work, gpus=fewest), card).fits
    assert fewest == 1 or not estimate(model, replace(work, gpus=fewest - 1), card).fits
    assert estimate(model, work, card).fits == (work.gpus >= fewest)


@given(SIZES)
def test_the_usual_shape_has_about_so_many_parameters(params: float) -> None:
    model = Model.of_size(params)
    per_block = 12 * model.width**2
    found = model.layers * per_block + model.root_params
    assert model.block_params > 0
    assert found == pytest.approx(params, abs=0.51 * per_block + 0.2 * params)
