"""Keep what autograd saves in pages of used rows, or in host memory."""

from __future__ import annotations

from ..plan.activations import GroupRows, StashPlan
from .group import Attachment, StashGroup
from .offload import ActivationOffload, OffloadStatistics
from .stash import PagedStash, StashStatistics

__all__ = [
    "ActivationOffload",
    "Attachment",
    "GroupRows",
    "OffloadStatistics",
    "PagedStash",
    "StashGroup",
    "StashPlan",
    "StashStatistics",
]
