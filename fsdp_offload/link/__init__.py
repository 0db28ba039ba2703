"""Bytes in motion: page-locked host memory, and transfers between it and the device."""

from __future__ import annotations

from .budget import check_host_budget, local_ranks
from .host_memory import ArenaStatistics, HostRange, checked_arena

__all__ = [
    "ArenaStatistics",
    "HostRange",
    "check_host_budget",
    "checked_arena",
    "local_ranks",
]
