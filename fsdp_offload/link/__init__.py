"""Bytes in motion: page-locked host memory, and transfers between it and the device."""

from __future__ import annotations

from .budget import local_ranks
from .host_memory import HostRange
from .host_pool import HostPool, held_bytes

__all__ = ["HostPool", "HostRange", "held_bytes", "local_ranks"]
