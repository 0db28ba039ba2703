"""``update_on="auto"``: which parameters the host lane gets, by rates of machines that were run."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_offload.plan import ParamSpec, Rates, choose_lanes, wants_rates
from fsdp_offload.plan.lanes import MOST_ON_HOST, step_seconds
from tests.helpers.config import config

# Of the machines in docs/reference.md: the link with both ways at once, the same beside half of the
# cores, and what these update.
MACHINES = {
    "slow memory": (Rates(94.7, 71.1, 2.1e9), False),
    "medium memory": (Rates(100.2, 81.4, 3.1e9), True),
    "fast memory": (Rates(101.5, 85.7, 5.0e9), True),
    "slow cores": (Rates(95.6, 76.7, 2.7e9), False),
    "H100": (Rates(98.6, 78.5, 4.7e9), True),
}


def candidate(fqn: str, numel: int, **given: Any) -> ParamSpec:
    """bf16 AdamW: two moments and the remainder."""
    sizes = {"global_bytes": 10 * numel, "max_local_bytes": 10 * numel, "host_numel": numel}
    return ParamSpec(fqn=fqn, **{**sizes, **given})


def gpt() -> list[ParamSpec]:
    """1.33 G parameters: an embedding, 24 blocks of 2048, a norm."""
    blocks = [candidate(f"{i}.{j}", n << 22) for i in range(24) for j, n in enumerate((3, 1, 4, 4))]
    return [candidate("embedding", 60000 * 2048), *blocks, candidate("norm", 2048)]


@pytest.mark.parametrize("machine", MACHINES)
def test_both_lanes_only_where_they_were_faster(machine: str) -> None:
    rates, both = MACHINES[machine]
    lanes = choose_lanes(gpt(), config(), rates)
    assert ("host" in lanes) is both
    if both:
        first = lanes.index("host")
        assert set(lanes[:first]) == {"streamed"}  # one run at the end of the update order
        assert set(lanes[first:]) == {"host"}
        on_host = sum(c.host_numel for c in gpt()[first:])
        assert 0.15 < on_host / sum(c.host_numel for c in gpt()) <= MOST_ON_HOST


def test_the_cores_take_of_the_link_while_they_work() -> None:
    rates = Rates(link_gbps=100.0, beside_gbps=80.0, host_numel_per_s=1e10)
    assert step_seconds(50 * 10**9, 0, rates) == pytest.approx(1.0)
    # 7 G elements take a second; 80 of 100 + 56 GB are carried meanwhile.
    assert step_seconds(50 * 10**9, 7 * 10**9, rates) == pytest.approx(1.0 + 76 / 100)
    assert step_seconds(0, 7 * 10**9, rates) == pytest.approx(1.0)


def test_a_parameter_that_is_too_large_for_the_host_lane_is_passed_over() -> None:
    made = [candidate(f"{i}", 10**8) for i in range(10)] + [candidate("head", 10**9)]
    lanes = choose_lanes(made, config(), MACHINES["fast memory"][0])
    assert lanes[-1] == "streamed"
    assert lanes[-2] == "host"


def test_only_what_has_a_fused_kernel_moves_and_what_stays_stays() -> None:
    made = [
        candidate("a", 10**9, host_numel=0),
        candidate("b", 10**9, must_stay=True, host_numel=0),
    ]
    rates = MACHINES["fast memory"][0]
    assert choose_lanes(made, config(), rates) == ("streamed", "resident")
    assert choose_lanes(gpt(), config(offload_fraction=0), rates)[-1] == "resident"


def test_nothing_is_measured_without_a_choice() -> None:
    assert wants_rates(gpt(), config())
    assert not wants_rates([candidate("a", 1000)], config())
    assert not wants_rates(gpt(), config("device"))
    assert not wants_rates(gpt(), config(["host"] * 98))
    assert not wants_rates(gpt(), config(overlap="backward"))
    assert not wants_rates(gpt(), config(offload_fraction=0))
