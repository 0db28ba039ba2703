"""Sizes and times from a job's size alone: against measured ones, and as properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_offload.plan.estimate import (
    CARDS,
    MOST_GPUS,
    Model,
    Workload,
    estimate,
    fewest_gpus,
    reached,
)

GIB = 1 << 30
H100 = CARDS["h100-80"]
FIRST = Model(1_330_000_000, 24, 2048, 60000)
NARROW = Model(1_260_000_000, 60, 1280, 60000)
SECOND = Model(6_690_000_000, 32, 4096, 60000)
THIRD = Model(7_900_000_000, 38, 4096, 60000)
DEEP = Model(3_140_000_000, 60, 2048, 60000)
PAIR = Workload(4096, gpus=2, checkpointed=False)
SHORT, LONG = Workload(8192, checkpointed=False), Workload(16384)


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
    assert found is not None
    assert found.peak_bytes / GIB == pytest.approx(gib, rel=0.03)


@pytest.mark.parametrize(
    ("model", "work", "card", "device_memory", "ms"),
    [
        pytest.param(FIRST, SHORT, "h100-80", None, 155.0, id="first"),
        pytest.param(FIRST, SHORT, "h100-80", 2 * GIB, 375.1, id="2 GiB"),
        pytest.param(SECOND, LONG, "h100-80", None, 1544.8, id="second"),
        pytest.param(THIRD, LONG, "h100-80", None, 2099.7, id="third"),
        pytest.param(FIRST, SHORT, "h200", None, 146.2, id="first, H200"),
        pytest.param(SECOND, LONG, "h200", None, 1480.2, id="second, H200"),
        pytest.param(DEEP, PAIR, "h100-80", None, 314.0, id="two GPUs, the host is late"),
        pytest.param(DEEP, replace(LONG, gpus=2), "h100-80", None, 849.4, id="two GPUs"),
        pytest.param(DEEP, replace(LONG, gpus=2), "h100-80", 0, 1101.1, id="two GPUs, 0"),
    ],
)
def test_times_are_what_was_measured(
    model: Model, work: Workload, card: str, device_memory: float | None, ms: float
) -> None:
    """Medians of iterations with clipping, torch 2.11, commit 6190976; 2 GiB: d1d32f3, two GPUs:
    35dfab6. Second and third with expandable_segments.
    """
    found = estimate(model, work, CARDS[card], device_memory)
    assert found is not None
    assert found.iteration_ms == pytest.approx(ms, rel=0.1)


SIZES = st.floats(1e8, 4e11)
JOBS = st.builds(
    Workload,
    tokens=st.integers(1, 32).map(lambda n: 1024 * n),
    gpus=st.sampled_from([1, 2, 8, 64]),
    checkpointed=st.booleans(),
    shard_bytes=st.sampled_from([2, 4]),
    moments=st.sampled_from(["fp32", "bf16", "int8"]),
)
CHOSEN = st.sampled_from(sorted(CARDS))


@given(SIZES, JOBS, CHOSEN, st.floats(0, 100), st.floats(0, 100))
def test_more_device_memory_never_takes_longer(
    params: float, work: Workload, name: str, less: float, more: float
) -> None:
    model, card = Model.of_size(params), CARDS[name]
    low, high = (estimate(model, work, card, n * GIB) for n in sorted((less, more)))
    if low is None:
        assert high is None
        return
    assert high is not None
    assert high.exposed_ms <= low.exposed_ms * 1.001 + 1e-6
    for found in (low, high):
        assert found.peak_bytes <= card.memory_bytes
        assert 0 <= found.stays_bytes <= found.state_bytes
        assert 0 < found.share_of_bound <= 1


@given(SIZES, JOBS, CHOSEN)
def test_it_fits_on_the_fewest_gpus_and_not_on_half_of_them(
    params: float, work: Workload, name: str
) -> None:
    model, card = Model.of_size(params), CARDS[name]
    fewest = fewest_gpus(model, work, card)
    if fewest is None:
        assert estimate(model, replace(work, gpus=MOST_GPUS), card) is None
        return
    assert estimate(model, replace(work, gpus=fewest), card) is not None
    assert fewest == 1 or estimate(model, replace(work, gpus=fewest // 2), card) is None


@given(SIZES)
def test_the_usual_shape_has_about_so_many_parameters(params: float) -> None:
    model = Model.of_size(params)
    per_block = 12 * model.width**2
    found = model.layers * per_block + model.root_params
    assert found == pytest.approx(params, abs=0.51 * per_block + 0.2 * params)


def test_speed_lies_between_those_of_neighbouring_widths() -> None:
    assert reached(512) == reached(1024) < reached(1280) < reached(2048) < reached(3000)
    assert reached(1 << 20) == reached(8192)
