"""Memory that leaves the device for a while and comes back: blocks, their places, the mover."""

from __future__ import annotations

from .absent import Absence, host_view, is_absent, present, register
from .blocks import Block, StorageBlock, collect
from .mover import Mover, Trip, give_up
from .places import Places

__all__ = [
    "Absence",
    "Block",
    "Mover",
    "Places",
    "StorageBlock",
    "Trip",
    "collect",
    "give_up",
    "host_view",
    "is_absent",
    "present",
    "register",
]
