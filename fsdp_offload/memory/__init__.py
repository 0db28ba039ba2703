"""Host memory: is there enough of it, and the arena that holds the state."""

from __future__ import annotations

from .arena import ArenaStatistics, HostArena, checked_arena
from .budget import check_host_budget, local_ranks

__all__ = [
    "ArenaStatistics",
    "HostArena",
    "check_host_budget",
    "checked_arena",
    "local_ranks",
]
