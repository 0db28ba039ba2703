"""Decisions: pure functions of shapes, budgets and rates; no tensor is touched here."""

from .layout import Bucket, Kind, Layout, ParamSpec, Slice, Span, choose_lanes, make_layout

__all__ = [
    "Bucket",
    "Kind",
    "Layout",
    "ParamSpec",
    "Slice",
    "Span",
    "choose_lanes",
    "make_layout",
]
