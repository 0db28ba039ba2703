"""Activations: what autograd saves of buffers that are not full, in pages of what is used."""

from __future__ import annotations

from ..plan.activations import GroupRows, StashPlan
from .attach import Attachment
from .group import Group
from .stash import PagedStash, StashStatistics

__all__ = ["Attachment", "Group", "GroupRows", "PagedStash", "StashPlan", "StashStatistics"]
