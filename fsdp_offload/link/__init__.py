"""Page-locked host memory, and transfers between it and the device."""

from __future__ import annotations

from .block import Block, Residence
from .budget import cores_per_rank
from .host_memory import HostRange
from .host_pool import HostPool, held_bytes
from .link import Link, allocating

__all__ = [
    "Block", "HostPool", "HostRange", "Link", "Residence", "allocating", "cores_per_rank",
    "held_bytes",
]  # fmt: skip
