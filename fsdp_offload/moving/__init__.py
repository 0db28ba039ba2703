"""Memory that leaves the device for a while and comes back: blocks, their places, the mover."""

from __future__ import annotations

from .blocks import Block, StorageBlock, collect
from .mover import Mover, Trip
from .places import Places

__all__ = ["Block", "Mover", "Places", "StorageBlock", "Trip", "collect"]
