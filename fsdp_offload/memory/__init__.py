"""Host memory: is there enough of it, and the arena that holds the state."""

from __future__ import annotations

from .arena import ArenaStatistics, HostArena
from .budget import HostMemory, available_host_bytes, check_host_budget, local_ranks

__all__ = [
    "ArenaStatistics",
    "HostArena",
    "HostMemory",
    "available_host_bytes",
    "check_host_budget",
    "local_ranks",
]
