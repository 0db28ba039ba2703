"""Decisions: pure functions of shapes, budgets and rates; no tensor is touched here."""

from .lanes import Candidate, choose_lanes
from .layout import Bucket, Entry, Kind, Layout, Slice, Span, make_layout
from .planner import Plan, lanes_from, make_plan, replay, wants_rates
from .prediction import Prediction, predict_iteration_ms
from .rates import Rates

__all__ = [
    "Bucket",
    "Candidate",
    "Entry",
    "Kind",
    "Layout",
    "Plan",
    "Prediction",
    "Rates",
    "Slice",
    "Span",
    "choose_lanes",
    "lanes_from",
    "make_layout",
    "make_plan",
    "predict_iteration_ms",
    "replay",
    "wants_rates",
]
