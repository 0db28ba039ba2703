"""Phases: parameters, gradients and optimizer state leave the device and come back."""

from __future__ import annotations

from .offloader import PhaseOffloader, PhaseStatistics, swap
from .region import FixedAddressRegion, RegionStatistics
from .transfer import Figures, Handle

__all__ = [
    "Figures",
    "FixedAddressRegion",
    "Handle",
    "PhaseOffloader",
    "PhaseStatistics",
    "RegionStatistics",
    "swap",
]
