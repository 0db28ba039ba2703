"""Bytes in motion: page-locked host memory, and transfers between it and the device."""

from __future__ import annotations

from .block import Block, Residence
from .budget import local_ranks
from .host_memory import HostRange
from .host_pool import HostPool, held_bytes
from .link import Link

__all__ = ["Block", "HostPool", "HostRange", "Link", "Residence", "held_bytes", "local_ranks"]
