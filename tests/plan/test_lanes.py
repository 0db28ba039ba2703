from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_offload.core.config import Lane, OffloadConfig
from fsdp_offload.core.errors import ConfigError
from fsdp_offload.plan import ParamSpec, choose_lanes

SIZES = st.one_of(st.sampled_from([0, 1, 8]), st.integers(0, 1 << 40))


def config(**given: Any) -> OffloadConfig:
    return OffloadConfig.make(**{"update_on": "device", "overlap": "step", **given})


def spec(fqn: str, global_bytes: int, *, must_stay: bool = False, whole: bool = False) -> ParamSpec:
    return ParamSpec(fqn=fqn, global_bytes=global_bytes, must_stay=must_stay, whole=whole)


@st.composite
def specs(draw: st.DrawFn, *, must_stay: bool = False) -> list[ParamSpec]:
    sizes = draw(st.lists(SIZES, max_size=12))
    return [
        ParamSpec(
            fqn=f"p{index}",
            global_bytes=size,
            must_stay=must_stay and draw(st.booleans()),
        )
        for index, size in enumerate(sizes)
    ]


def bytes_in(lane: Lane, made: list[ParamSpec], lanes: tuple[Lane, ...]) -> int:
    return sum(c.global_bytes for c, each in zip(made, lanes, strict=True) if each == lane)


@given(specs(), st.floats(0, 1))
def test_the_share_that_leaves_is_met_within_the_largest_parameter(
    made: list[ParamSpec], fraction: float
) -> None:
    lanes = choose_lanes(made, config(offload_fraction=fraction))
    total = sum(c.global_bytes for c in made)
    asked = Fraction(fraction) * total
    left = bytes_in("streamed", made, lanes)
    rounding = total * 2.0**-50  # of the one float product
    assert left >= asked - rounding
    assert left <= asked + max((c.global_bytes for c in made), default=0) + rounding


@given(specs(must_stay=True))
def test_a_fraction_of_0_keeps_everything_and_empty_parameters_too(made: list[ParamSpec]) -> None:
    assert set(choose_lanes(made, config(offload_fraction=0))) <= {"resident"}
    assert set(choose_lanes(made, config(offload_fraction=0.0, update_on="host"))) <= {"resident"}


@given(specs(), st.sampled_from(["device", "host"]))
def test_a_fraction_of_1_keeps_nothing(made: list[ParamSpec], update_on: str) -> None:
    away = "host" if update_on == "host" else "streamed"
    assert set(choose_lanes(made, config(update_on=update_on))) <= {away}
    assert set(choose_lanes(made, config(offload_fraction=1, update_on=update_on))) <= {away}


def test_a_large_parameter_leaves_and_later_smaller_ones_are_still_kept() -> None:
    made = [spec(f"p{size}", size) for size in (30, 60, 5, 5)]
    lanes = choose_lanes(made, config(offload_fraction=0.5))
    assert lanes == ("resident", "streamed", "resident", "resident")


def test_whole_matrices_have_no_host_lane() -> None:
    whole = spec("model.matrix", 1, whole=True)
    with pytest.raises(ConfigError, match=r"model\.matrix.*whole matrices"):
        choose_lanes([whole], config(update_on="host"))
    assert choose_lanes([whole], config(update_on="device")) == ("streamed",)
    assert choose_lanes([whole], config(offload_fraction=0, update_on="host")) == ("resident",)
