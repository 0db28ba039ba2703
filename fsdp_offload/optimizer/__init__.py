"""``HybridDeviceOptimizer``.

``hybrid`` is its surface and ``updates`` an iteration. ``engine`` builds buckets and runs them:
``ring`` on the device, ``host`` on CPU cores. ``overlap`` runs both beside forward and backward.
``weights`` keeps weights in host memory.
"""

from __future__ import annotations

from .hybrid import HybridDeviceOptimizer
from .statistics import Statistics

__all__ = ["HybridDeviceOptimizer", "Statistics"]
