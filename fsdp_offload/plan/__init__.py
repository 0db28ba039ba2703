"""Decisions: pure functions of shapes, budgets and rates; no tensor is touched here."""

from .lanes import Candidate, Rates, choose_lanes, wants_rates
from .layout import Bucket, Entry, Kind, Layout, Slice, Span, make_layout

__all__ = [
    "Bucket",
    "Candidate",
    "Entry",
    "Kind",
    "Layout",
    "Rates",
    "Slice",
    "Span",
    "choose_lanes",
    "make_layout",
    "wants_rates",
]
