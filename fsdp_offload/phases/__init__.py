"""Offload and reload parameters, gradients and optimizer state between phases."""

from __future__ import annotations

from ..link.transfer import Figures, Handle
from .offloader import PhaseOffloader, PhaseStatistics, swap
from .region import FixedAddressRegion, RegionStatistics

__all__ = [
    "Figures",
    "FixedAddressRegion",
    "Handle",
    "PhaseOffloader",
    "PhaseStatistics",
    "RegionStatistics",
    "swap",
]
