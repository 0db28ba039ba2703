"""Phases: parameters, gradients and optimizer state leave the device and come back."""

from __future__ import annotations

from .handle import Handle, PhaseStatistics, Transfer
from .offloader import PhaseOffloader, swap

__all__ = ["Handle", "PhaseOffloader", "PhaseStatistics", "Transfer", "swap"]
