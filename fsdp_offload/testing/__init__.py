"""Tools for testing code that offloads: a rank pool and a stream simulator.

Nothing in the package imports this module. Its names are resolved on first use, so that the stream
simulator can be used without starting anything that belongs to worker processes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_offload.testing.ranks import RankError, RankPool
    from fsdp_offload.testing.simulator import ADVERSARIES, StreamSimulator

__all__ = ["ADVERSARIES", "RankError", "RankPool", "StreamSimulator"]

_HOMES = {
    "ADVERSARIES": "fsdp_offload.testing.simulator",
    "RankError": "fsdp_offload.testing.ranks",
    "RankPool": "fsdp_offload.testing.ranks",
    "StreamSimulator": "fsdp_offload.testing.simulator",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
