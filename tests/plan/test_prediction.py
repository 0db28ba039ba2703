"""Predictions against times measured on the machine that the rates are of."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_offload.errors import ConfigError
from fsdp_offload.plan import Rates, make_plan, predict_iteration_ms
from fsdp_offload.plan.explain import block_of

from .known import ONE_GPU, candidate, config, gpt, trust_predictions


@pytest.fixture(autouse=True)
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    trust_predictions(monkeypatch)


@pytest.mark.parametrize(
    ("update_on", "state_bytes", "measured_ms", "limit"),
    [
        ("device", 10, 269.5, "link"),
        ("device", 8, 214.1, "link"),
        ("host", 10, 306.4, "host"),
        ("host", 8, 303.7, "host"),
    ],
)
def test_predictions_are_within_15_per_cent_of_what_was_measured(
    update_on: str, state_bytes: int, measured_ms: float, limit: str
) -> None:
    predicted = make_plan(gpt(state_bytes), config(update_on)).predict(ONE_GPU)
    assert predicted is not None
    assert predicted.step_ms == pytest.approx(measured_ms, rel=0.15)
    assert predicted.limit == limit
    if update_on == "device":  # the streamed lane scatters less
        assert predicted.step_ms == pytest.approx(measured_ms, rel=0.02)


def test_nothing_is_predicted_without_rates() -> None:
    plan = make_plan(gpt(), config("device"))
    assert plan.predict() is None
    assert "not predicted" in plan.explain()


def test_resident_state_costs_device_memory_only() -> None:
    predicted = make_plan(gpt(), config(offload_fraction=0.0), ONE_GPU).predict()
    assert predicted is not None
    assert (predicted.link_ms, predicted.host_ms, predicted.dram_ms) == (0, 0, 0)
    assert predicted.step_ms == predicted.device_ms > 0


ROUND = Rates(
    h2d_gbps=50.0,
    d2h_gbps=50.0,
    both_ways_gbps=100.0,  # 97.5 of them for the streamed lane
    host_numel_per_s=2e9,
    host_latency_ms=5.0,
    host_dram_gbps=1000.0,
    device_gbps=1000.0,
    beside_gbps=40.0,  # 39 of them
    beside_numel_per_s=1e9,  # 0.7 of it beside a streamed lane
)
STREAMED = 264_500_000  # elements, of 20 bytes over the link
LINK_AND_HOST_MS = [
    # 70 M elements at 0.7 G/s; 3.9 GB at 39 GB/s meanwhile, and 1.95 GB at 97.5 GB/s after it.
    ("streamed", 70_000_000, 100.0 + 20.0, 100.0 + 5.0),
    # A second at 0.7 G/s: all of 10.89 GB passes at 39 GB/s.
    ("streamed", 700_000_000, 10.89e9 / 39e6, 1000.0 + 5.0),
    # No streamed lane: all cores and the whole link for the host lane.
    ("resident", 700_000_000, 5.6e9 / 97.5e6, 350.0 + 5.0),
    # The streamed lane has less than a tenth of the host lane's bytes: it does not count.
    ("streamed", 7_000_000_000, (5.29e9 + 56e9) / 97.5e6, 3500.0 + 5.0),
    # No host lane.
    ("streamed", 0, 5.29e9 / 97.5e6, 0.0),
]


@pytest.mark.parametrize(("first", "host_numel", "link_ms", "host_ms"), LINK_AND_HOST_MS)
def test_with_both_lanes_the_link_is_slower_while_cores_work(
    first: str, host_numel: int, link_ms: float, host_ms: float
) -> None:
    made = [candidate("first", STREAMED), candidate("second", host_numel)]
    predicted = make_plan(made, config([first, "host"])).predict(ROUND)
    assert predicted is not None
    assert predicted.link_ms == pytest.approx(link_ms, rel=1e-9)
    assert predicted.host_ms == pytest.approx(host_ms, rel=1e-9)


ITERATION: dict[str, Any] = {
    "on_device_iteration_ms": 147.0,
    "forward_ms": 45.0,
    "backward_ms": 90.0,
    "overlap": "backward",
    "clipping": False,
}


@pytest.mark.parametrize(
    ("given", "expected_ms"),
    [
        ({}, 269.0),  # the link's time hides everything
        ({"on_device_iteration_ms": 300.0}, 300.0),  # and is hidden by a longer iteration
        ({"clipping": True}, 90 + 269),  # nothing to do before the norm is known
        ({"overlap": "forward"}, 90 + 269),
        ({"overlap": "forward", "forward_ms": 400.0}, 490.0),
        ({"overlap": "step"}, 45 + 90 + 269),
    ],
)
def test_an_iteration_is_bounded_by_what_cannot_be_hidden(
    given: dict[str, Any], expected_ms: float
) -> None:
    plan = make_plan(gpt(), config("device"))
    predicted_ms = predict_iteration_ms(plan, ONE_GPU, **{**ITERATION, **given})
    assert predicted_ms == pytest.approx(expected_ms, abs=1.0)


@pytest.mark.parametrize(
    "given", [{"overlap": "never"}, {"forward_ms": -1.0}, {"backward_ms": float("nan")}]
)
def test_times_and_overlap_are_checked(given: dict[str, Any]) -> None:
    plan = make_plan(gpt(), config("device"))
    with pytest.raises(ConfigError, match="Remedy"):
        predict_iteration_ms(plan, ONE_GPU, **{**ITERATION, **given})


# --------------------------------------------------------------------------- the table


def test_the_table_of_a_small_plan() -> None:
    made = [
        candidate("embed.weight", 4_000_000),
        candidate("layers.0.w.weight", 1_000_000),
        candidate("layers.0.w.bias", 1_000_000),
        candidate("layers.1.w.weight", 2_000_000),
    ]
    plan = make_plan(made, config(["resident", "streamed", "streamed", "host"]), ONE_GPU)
    text = plan.explain({"step": 1.0, "layers.1.w.weight": 0.5, "streamed": 0.25})
    assert text.splitlines() == [
        "lane      parameters  count  state MB  link MB  predicted ms  measured",
        "resident  embed           1      40.0      0.0          0.04         -",
        "streamed  layers.0        2      20.0     20.0          0.40         -",
        "host      layers.1        1      24.0      8.0          0.45      0.50",
        "resident  all             1      40.0      0.0          0.04         -",
        "streamed  all             2      20.0     20.0          0.40      0.25",
        "host      all             1      24.0      8.0          0.45      0.50",
        "step: predicted 7.6 ms, measured 1.0 ms, limited by the host; busy ms: "
        "link 0.7, host 7.6, dram 0.5, device 0.1; predicted / measured 7.57",
        "rates: link 55.3 up, 55.3 down, 101.5 GB/s both; host 4.40 G parameters/s; "
        "together 85.7 GB/s and 5.00 G parameters/s; dram 226, device 3500 GB/s",
    ]


def test_rows_of_a_lane_add_up_to_its_total() -> None:
    plan = make_plan(gpt(), config(), ONE_GPU)
    rows = [line.split() for line in plan.explain(200.0).splitlines()[1:-2]]
    for lane in ("streamed", "host"):
        of_runs = [float(row[5]) for row in rows if row[0] == lane and row[1] != "all"]
        (total,) = (float(row[5]) for row in rows if row[:2] == [lane, "all"])
        assert sum(of_runs) == pytest.approx(total, abs=0.01 * len(of_runs))


@pytest.mark.parametrize(
    ("fqn", "block"),
    [
        ("layers.3.attention.wq.weight", "layers.3"),
        ("model.layers.12.experts.4.w1", "model.layers.12"),
        ("norm.weight", "norm"),
        ("group0.3", "group0"),
        ("scale", "scale"),
    ],
)
def test_parameters_are_grouped_by_block(fqn: str, block: str) -> None:
    assert block_of(fqn) == block
