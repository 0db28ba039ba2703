"""The stream simulator's policies as parameters of a test."""

from __future__ import annotations

from typing import Final

import pytest

from tests.helpers.simulator import ADVERSARIES

FEW: Final = ("lazy", "eager", "immediate", "random:0", "random:1")
"""In the default selection. That waits are complete is shown by removing each in turn, under the
policies that notice; more orders add little to that."""
POLICIES: Final = [
    policy if policy in FEW else pytest.param(policy, marks=pytest.mark.long)
    for policy in ADVERSARIES
]
