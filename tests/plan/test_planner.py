from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fsdp_offload.errors import ConfigError
from fsdp_offload.plan import (
    Candidate,
    Plan,
    Prediction,
    Rates,
    lanes_from,
    make_plan,
    replay,
    wants_rates,
)
from fsdp_offload.plan.planner import FORMAT, HOST_BUSY, MIN_GAIN, MIN_GAIN_OF_BOTH

from .known import (
    FAST_CORES,
    FOUR_GPUS,
    MEDIUM_MEMORY,
    ONE_GPU,
    SLOW_MEMORY,
    SLOWER_MEMORY,
    TRUSTED_BUSY,
    candidate,
    config,
    gpt,
    trust_predictions,
)


@pytest.fixture(autouse=True)
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    trust_predictions(monkeypatch)


SPEEDS = st.floats(1.0, 1000.0)
RATES = st.builds(
    Rates,
    h2d_gbps=SPEEDS,
    d2h_gbps=SPEEDS,
    both_ways_gbps=SPEEDS,
    host_numel_per_s=st.floats(1e7, 1e11),
    host_latency_ms=st.floats(0.01, 100.0),
    host_dram_gbps=SPEEDS,
    device_gbps=SPEEDS,
    beside_gbps=SPEEDS,
    beside_numel_per_s=st.floats(1e7, 1e11),
)


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    sizes = draw(st.lists(st.integers(0, 1 << 31), max_size=12))
    flags = st.sampled_from(
        [{}, {}, {}, {"must_stay": True}, {"whole": True}, {"fast_on_host": False}]
    )
    state_bytes = draw(st.sampled_from([0, 2, 4, 6, 8, 10, 12]))
    return [
        candidate(f"p{i}", size, state_bytes=state_bytes, **draw(flags))
        for i, size in enumerate(sizes)
    ]


def predicted(made: list[Candidate], lanes: Any, rates: Rates) -> Prediction:
    found = Plan(tuple(made), tuple(lanes), rates).predict()
    assert found is not None
    return found


def step_ms(made: list[Candidate], lanes: Any, rates: Rates) -> float:
    return predicted(made, lanes, rates).step_ms


def uses_both(made: list[Candidate], lanes: Any) -> bool:
    """Whether both lanes have something to do; what has no bytes is streamed for nothing."""
    return {"streamed", "host"} <= {
        lane for c, lane in zip(made, lanes, strict=True) if c.max_local_bytes
    }


def host_numel(plan: Plan) -> int:
    pairs = zip(plan.candidates, plan.lanes, strict=True)
    return sum(c.max_local_numel for c, lane in pairs if lane == "host")


def single_lanes(made: list[Candidate], lane: str, base: tuple[str, ...]) -> list[str]:
    """Every parameter that may choose in ``lane``, the others where they are."""
    pairs = zip(made, base, strict=True)
    return [lane if c.movable and before != "resident" else before for c, before in pairs]


@given(candidates(), RATES, st.sampled_from([0.0, 0.3, 1.0]))
def test_auto_is_never_predicted_much_slower_than_the_best_single_lane(
    made: list[Candidate], rates: Rates, fraction: float
) -> None:
    chosen = config(offload_fraction=fraction)
    streamed = make_plan(made, chosen).lanes
    auto = make_plan(made, chosen, rates)
    auto_ms = step_ms(made, auto.lanes, rates)
    assert auto_ms <= step_ms(made, streamed, rates)
    # Beside what only the device can update, the host lane has its share of the step.
    host = single_lanes(made, "host", streamed)
    on_host, both = predicted(made, host, rates), uses_both(made, host)
    if not both or on_host.host_ms <= TRUSTED_BUSY["step"] * on_host.step_ms:
        gain = MIN_GAIN_OF_BOTH if both else MIN_GAIN
        assert auto_ms <= on_host.step_ms / (1 - gain) * (1 + 1e-9)
    for each, before, after in zip(made, streamed, auto.lanes, strict=True):
        assert before == after or (each.movable and (before, after) == ("streamed", "host"))


@given(candidates(), RATES)
def test_the_host_lane_gets_one_run_of_what_it_can_take(
    made: list[Candidate], rates: Rates
) -> None:
    lanes = make_plan(made, config(), rates).lanes
    movable = [lane for c, lane in zip(made, lanes, strict=True) if c.movable]
    assert [lane for lane, _ in groupby(movable)].count("host") <= 1


@given(candidates(), RATES, st.sampled_from(["device", "host", "list"]))
def test_rates_change_nothing_but_auto(made: list[Candidate], rates: Rates, update_on: str) -> None:
    if update_on != "device":
        made = [replace(c, must_stay=False, whole=False) for c in made]
    lanes: Any = ["resident"] * len(made) if update_on == "list" else update_on
    assert make_plan(made, config(lanes), rates).lanes == make_plan(made, config(lanes)).lanes
    assert not wants_rates(made, config(lanes), used_bytes=0)


@given(candidates(), RATES)
def test_the_plan_is_a_pure_function_and_survives_json(made: list[Candidate], rates: Rates) -> None:
    plan = make_plan(made, config(), rates)
    assert plan == make_plan(list(made), config(), rates)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert lanes_from(plan, made) == plan.lanes
    assert replay(plan, made[::-1]).lanes == plan.lanes[::-1]


# --------------------------------------------------------------------------- both lanes


def checked_share(made: list[Candidate], rates: Rates, overlap: str) -> None:
    """Where the plan uses both lanes, the host lane is busy for its share of the step at most."""
    lanes = make_plan(made, config(overlap=overlap), rates).lanes
    if uses_both(made, lanes):
        found = predicted(made, lanes, rates)
        assert found.host_ms <= TRUSTED_BUSY[overlap] * found.step_ms


@given(candidates(), RATES, st.sampled_from(sorted(TRUSTED_BUSY)))
def test_beside_a_streamed_lane_the_host_lane_keeps_to_its_share(
    made: list[Candidate], rates: Rates, overlap: str
) -> None:
    checked_share(made, rates, overlap)


@pytest.mark.parametrize("overlap", sorted(TRUSTED_BUSY))
@pytest.mark.parametrize("host_rate", [1e9, 3e9, 5e9, 2e10])
@given(RATES)
def test_it_keeps_to_it_with_a_model_of_many_parameters(
    host_rate: float, overlap: str, rates: Rates
) -> None:
    """There both lanes are chosen more often than with a few parameters of any size."""
    rates = replace(rates, beside_gbps=rates.both_ways_gbps, beside_numel_per_s=host_rate)
    checked_share(gpt(layers=6), rates, overlap)


@pytest.mark.parametrize("overlap", sorted(TRUSTED_BUSY))
def test_it_keeps_to_it_beside_what_cannot_leave_the_streamed_lane(overlap: str) -> None:
    rest = candidate("rest", 800_000_000)
    rates = replace(ONE_GPU, both_ways_gbps=60.0, beside_gbps=50.0)
    alone = "host" if overlap == "step" else "streamed"  # in backward it would be waited for
    assert make_plan([rest], config(overlap=overlap), rates).lanes == (alone,)
    checked_share([candidate("matrix", 100_000_000, whole=True), rest], rates, overlap)


@given(candidates(), RATES)
@example(
    [candidate("tiny", 1, state_bytes=12), candidate("huge", 2_147_424_107, state_bytes=12)],
    Rates(2.0, 8.0, 1.0, 250026932.0, 1.0, 1.0, 1.0, 81.0, 10002099.0),
)
def test_more_of_the_step_for_the_host_lane_makes_it_no_longer_than_by_the_margin(
    made: list[Candidate], rates: Rates
) -> None:
    """That of both lanes, where the host lane alone is taken instead; else not at all."""
    plans = {each: make_plan(made, config(overlap=each), rates) for each in TRUSTED_BUSY}
    ms = {each: step_ms(made, plan.lanes, rates) for each, plan in plans.items()}
    assert TRUSTED_BUSY["backward"] < TRUSTED_BUSY["step"]
    both = {each: uses_both(made, plan.lanes) for each, plan in plans.items()}
    if host_numel(plans["step"]) and both["backward"] and not both["step"]:
        assert (1 - MIN_GAIN_OF_BOTH) * ms["step"] <= ms["backward"]
    else:
        assert ms["step"] <= ms["backward"]


def test_with_backward_the_host_lane_gets_less_than_with_step() -> None:
    plans = {each: make_plan(gpt(), config(overlap=each), ONE_GPU) for each in TRUSTED_BUSY}
    assert 0 < host_numel(plans["backward"]) < host_numel(plans["step"])
    for overlap, plan in plans.items():  # as much as it may have, but for one parameter
        last = plan.lanes.index("host") - 1
        more = (*plan.lanes[:last], *["host"] * (len(plan.lanes) - last))
        found = predicted(gpt(), more, ONE_GPU)
        assert found.host_ms > TRUSTED_BUSY[overlap] * found.step_ms


@pytest.mark.parametrize("overlap", sorted(TRUSTED_BUSY))
def test_fast_host_memory_gets_both_lanes_and_slow_memory_one(overlap: str) -> None:
    chosen = config(overlap=overlap)
    assert set(make_plan(gpt(), chosen, ONE_GPU).lanes) == {"streamed", "host"}
    assert set(make_plan(gpt(), chosen, SLOW_MEMORY).lanes) == {"streamed"}
    # What two lanes get is what decides it.
    beside = {name: getattr(ONE_GPU, name) for name in ("beside_gbps", "beside_numel_per_s")}
    rates = replace(SLOW_MEMORY, **beside)
    assert set(make_plan(gpt(), chosen, rates).lanes) == {"streamed", "host"}


def test_one_gpu_uses_both_lanes_and_the_last_layers_go_to_the_host() -> None:
    made = gpt()
    plan = make_plan(made, config(), ONE_GPU)
    assert plan.lanes[0] == "streamed"  # the embedding is needed first
    assert plan.lanes[-1] == "host"
    assert [lane for lane, _ in groupby(plan.lanes)] == ["streamed", "host"]
    both = step_ms(made, plan.lanes, ONE_GPU)
    for lane in ("streamed", "host"):
        assert both < 0.9 * step_ms(made, [lane] * len(made), ONE_GPU)
    # No other cut that leaves the host lane within its share is better.
    for cut in range(len(made)):
        other = predicted(made, ["streamed"] * cut + ["host"] * (len(made) - cut), ONE_GPU)
        if other.host_ms <= TRUSTED_BUSY["step"] * other.step_ms:
            assert both <= other.step_ms


@pytest.mark.parametrize("state_bytes", [4, 6, 8, 10])
def test_four_gpus_at_the_wall_of_host_memory_stream(state_bytes: int) -> None:
    """The host lane moves more bytes of it per parameter, so it can only slow the other down."""
    assert set(make_plan(gpt(state_bytes), config(), FOUR_GPUS).lanes) == {"streamed"}


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("state_bytes", [4, 8, 10])
def test_from_slow_to_fast_cores_auto_follows_the_best(state_bytes: int, share: float) -> None:
    """Where both lanes take about as long, too, with enough host memory for both or not."""
    made = gpt(state_bytes, layers=4)
    chosen = []
    for exponent in range(-25, 26):
        factor = 1.06**exponent
        rates = replace(
            ONE_GPU,
            host_numel_per_s=4e9 * factor,
            beside_numel_per_s=4.5e9 * factor,
            host_dram_gbps=700 * share,
        )
        single = [step_ms(made, [lane] * len(made), rates) for lane in ("streamed", "host")]
        auto = make_plan(made, config(), rates)
        chosen.append("both" if uses_both(made, auto.lanes) else auto.lanes[0])
        assert step_ms(made, auto.lanes, rates) <= 1.03 * min(single)
        if chosen[-1] == "both":
            assert step_ms(made, auto.lanes, rates) <= (1 - MIN_GAIN_OF_BOTH) * min(single) * 1.03
    assert chosen[0] == "streamed"
    assert ("both" in chosen) == (state_bytes > 4)  # else a gradient and a master are as many bytes


def test_fast_cores_behind_a_slow_link_take_everything() -> None:
    rates = replace(FAST_CORES, both_ways_gbps=5.0)
    # Gradients and parameters travel too: a lane needs less of the link than the other.
    assert set(make_plan(gpt(), config(), rates).lanes) == {"host"}


def test_a_small_model_is_streamed_because_a_host_unit_takes_longer() -> None:
    made = [candidate(f"p{i}", 1000) for i in range(10)]
    assert set(make_plan(made, config(), ONE_GPU).lanes) == {"streamed"}
    assert not wants_rates(made, config(), used_bytes=0)
    assert wants_rates(gpt(), config(), used_bytes=0)
    assert not wants_rates(gpt(), config(offload_fraction=0.0), used_bytes=0)


def test_one_large_parameter_at_the_end_does_not_keep_the_others_from_the_host() -> None:
    made = [*gpt(layers=12), candidate("head.weight", 2_600_000_000)]
    plan = make_plan(made, config(), ONE_GPU)
    lanes = [lane for lane, _ in groupby(plan.lanes)]
    assert lanes == ["host", "streamed"]


def test_whole_and_slow_parameters_stay_streamed_between_those_on_the_host() -> None:
    made = gpt()
    made[-10] = replace(made[-10], whole=True)
    made[-8] = replace(made[-8], fast_on_host=False)
    lanes = make_plan(made, config(), ONE_GPU).lanes
    assert lanes[-10:] == (*("streamed", "host") * 2, *["host"] * 6)


def test_a_budget_counts_first_and_the_rest_is_shared() -> None:
    made = gpt()
    budget = sum(c.max_local_bytes for c in made) // 2
    lanes = make_plan(made, config(device_budget=budget), ONE_GPU).lanes
    kept = sum(c.max_local_bytes for c, lane in zip(made, lanes, strict=True) if lane == "resident")
    assert 0.9 * budget < kept <= budget
    assert {"streamed", "host"} <= set(lanes)


# --------------------------------------------------------------------------- saved plans


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: made[:-1], r"norm\.weight.*the optimizer does not have it"),
        (lambda made: [*made, candidate("extra", 5)], "extra.*the plan does not have it"),
        (lambda made: [*made[:-1], candidate("norm.weight", 5)], r"norm\.weight.*here it has 50"),
        (
            lambda made: [*made[:-1], replace(made[-1], whole=True)],
            r"norm\.weight.*whole matrices",
        ),
        (lambda made: [*made, made[0]], r"embed\.weight.*name of two"),
    ],
    ids=["missing", "unknown", "bytes", "lane", "twice"],
)
def test_a_plan_of_another_model_is_refused(change: Any, message: str) -> None:
    made = gpt()
    plan = make_plan(made, config(), ONE_GPU)
    with pytest.raises(ConfigError, match=message):
        lanes_from(plan, change(made))


def test_a_plan_holds_on_another_number_of_ranks() -> None:
    made = gpt()
    plan = make_plan(made, config(), ONE_GPU)
    cut = [replace(c, max_local_bytes=c.max_local_bytes // 8, max_local_numel=1) for c in made]
    assert replay(plan, cut).lanes == plan.lanes


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.update(format=1),  # before rates had both lanes at once
        lambda values: values.update(format=FORMAT + 1),
        lambda values: values.pop("format"),
        lambda values: values.pop("rates"),
        lambda values: values.pop("parameters"),
        lambda values: values["parameters"][0].pop("lane"),
        lambda values: values["parameters"][0].update(global_bytes="5"),
        lambda values: values["parameters"][0].update(colour="red"),
        lambda values: values.update(parameters=[3]),
    ],
)
def test_what_is_no_plan_is_refused(change: Any) -> None:
    values = make_plan(gpt(layers=1), config(), ONE_GPU).to_dict()
    change(values)
    with pytest.raises(ConfigError, match="Remedy"):
        Plan.from_dict(values)


def test_an_unknown_lane_is_refused() -> None:
    values = make_plan(gpt(layers=1), config(), ONE_GPU).to_dict()
    values["parameters"][0]["lane"] = "disk"
    with pytest.raises(ConfigError, match="'disk'"):
        Plan.from_dict(values)


def test_plans_of_added_parameters_are_joined() -> None:
    first = make_plan(gpt(), config(), ONE_GPU)
    later = make_plan([candidate("late", 10)], config())
    joined = Plan((), ()).joined(first).joined(later)
    assert joined.lanes == (*first.lanes, "streamed")
    assert joined.rates == ONE_GPU
    assert joined.lane("late") == "streamed"
    assert joined.lane("norm.weight") == "host"


@pytest.mark.parametrize("overlap", ["step", "forward", "backward"])
def test_by_default_two_lanes_are_for_steps_alone(
    monkeypatch: pytest.MonkeyPatch, overlap: str
) -> None:
    monkeypatch.undo()
    chosen = config(overlap=overlap)
    assert wants_rates(gpt(), chosen, used_bytes=0) == (overlap in HOST_BUSY) == (overlap == "step")
    slow_link = replace(ONE_GPU, both_ways_gbps=60.0, beside_gbps=55.0, host_numel_per_s=2e9)
    for rates in (ONE_GPU, MEDIUM_MEMORY, slow_link):
        plan = make_plan(gpt(), chosen, rates)
        assert uses_both(gpt(), plan.lanes) == (overlap == "step")
        if overlap == "step":
            one = min(step_ms(gpt(), [lane] * len(gpt()), rates) for lane in ("streamed", "host"))
            assert step_ms(gpt(), plan.lanes, rates) < (1 - MIN_GAIN_OF_BOTH) * one


@pytest.mark.parametrize(
    ("rates", "least", "most"),
    [
        (SLOW_MEMORY, 0.0, 0.0),
        (SLOWER_MEMORY, 0.0, 0.0),
        (replace(MEDIUM_MEMORY, beside_gbps=78.0), 0.0, 0.0),  # a gain of 1 % is predicted
        (MEDIUM_MEMORY, 0.18, 0.23),
        (ONE_GPU, 0.18, 0.33),
    ],
    ids=["slow", "slower", "little", "medium", "fast"],
)
def test_by_default_shares_are_among_those_that_were_measured(
    monkeypatch: pytest.MonkeyPatch, rates: Rates, least: float, most: float
) -> None:
    """On machines with such rates; half of the state there took longer than streaming all of it."""
    monkeypatch.undo()
    plan = make_plan(gpt(), config(), rates)
    pairs = list(zip(gpt(), plan.lanes, strict=True))
    on_host = sum(c.max_local_numel for c, lane in pairs if lane == "host")
    assert least <= on_host / sum(c.max_local_numel for c, _ in pairs) <= most
