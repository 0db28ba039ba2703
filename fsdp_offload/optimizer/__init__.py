"""``HybridDeviceOptimizer`` and what surrounds its step: state shown, wrapping, clipping."""

from __future__ import annotations

from .hybrid import HybridDeviceOptimizer
from .statistics import Statistics

__all__ = ["HybridDeviceOptimizer", "Statistics"]
