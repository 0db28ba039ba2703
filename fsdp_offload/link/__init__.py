"""Bytes in motion: page-locked host memory, and transfers between it and the device."""

from __future__ import annotations

from .budget import check_host_budget, local_ranks
from .host_memory import ArenaStatistics, HostRange, checked_arena
from .host_pool import HostPool, held_bytes

__all__ = [
    "ArenaStatistics",
    "HostPool",
    "HostRange",
    "check_host_budget",
    "checked_arena",
    "held_bytes",
    "local_ranks",
]
