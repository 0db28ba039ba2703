from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fsdp_offload.errors import ConfigError
from fsdp_offload.plan import Rates

from .known import ONE_GPU


def test_rates_survive_json() -> None:
    assert Rates.from_dict(json.loads(json.dumps(ONE_GPU.to_dict()))) == ONE_GPU


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "55", True, None])
def test_what_is_no_speed_is_refused_with_its_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"rates\.d2h_gbps=.*Remedy"):
        replace(ONE_GPU, d2h_gbps=value)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"pcie_gbps": 1.0}, "pcie_gbps"), ({"h2d_gbps": None}, "h2d_gbps")],
    ids=["unknown", "missing"],
)
def test_other_names_are_refused(change: dict[str, Any], named: str) -> None:
    values = {k: v for k, v in {**ONE_GPU.to_dict(), **change}.items() if v is not None}
    with pytest.raises(ConfigError, match=named):
        Rates.from_dict(values)
