"""What all comparisons of results rest on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.compare import same

ZERO = torch.zeros(3)
NAN = torch.tensor([torch.nan])
OTHER_NAN = (NAN.view(torch.int32) + 1).view(torch.float32)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (ZERO, -ZERO),
        (NAN, OTHER_NAN),
        (ZERO, ZERO.double()),
        (ZERO, ZERO.view(3, 1)),
        (ZERO[:1], 0.0),
        (0.0, ZERO[:1]),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1, "b": 2}, {"a": 1}),
        ([ZERO, ZERO], [ZERO]),
        ({"a": [ZERO, 1]}, {"a": [ZERO, 2]}),
        ({"a": [ZERO, {"b": ZERO}]}, {"a": [ZERO, {"b": -ZERO}]}),
    ],
)
def test_what_differs(found: Any, expected: Any) -> None:
    assert not same(found, expected)
    for one in (found, expected):
        assert same(one, one)


def test_the_same_bits_are_the_same() -> None:
    assert same({"a": [NAN, (1, "x")]}, {"a": (NAN.clone(), [1, "x"])})
    assert same(torch.ones(4)[::2], torch.ones(2))
