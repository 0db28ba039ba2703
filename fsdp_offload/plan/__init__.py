"""Decisions: pure functions of shapes, budgets and rates; no tensor is touched here."""

from .lanes import Candidate, choose_lanes
from .layout import Bucket, Entry, Kind, Layout, Slice, Span, make_layout

__all__ = [
    "Bucket",
    "Candidate",
    "Entry",
    "Kind",
    "Layout",
    "Slice",
    "Span",
    "choose_lanes",
    "make_layout",
]
