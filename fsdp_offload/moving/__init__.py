"""Memory that leaves the device for a while and comes back: blocks, their places, the mover."""

from __future__ import annotations

from .absent import Absence, Settle, host_view, is_absent, present
from .blocks import Block, StorageBlock, collect, is_whole
from .joining import SPARE_BYTES, join
from .mover import Mover, Trip, give_up, missing_parts
from .pages import PageBlock, Pages, Spares
from .places import Places
from .region import FixedAddressRegion, RegionStatistics
from .settling import Seat, seats_of, settle_storages

__all__ = [
    "SPARE_BYTES",
    "Absence",
    "Block",
    "FixedAddressRegion",
    "Mover",
    "PageBlock",
    "Pages",
    "Places",
    "RegionStatistics",
    "Seat",
    "Settle",
    "Spares",
    "StorageBlock",
    "Trip",
    "collect",
    "give_up",
    "host_view",
    "is_absent",
    "is_whole",
    "join",
    "missing_parts",
    "present",
    "seats_of",
    "settle_storages",
]
