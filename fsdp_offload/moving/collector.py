"""Python's garbage collector, kept from what moves memory."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Python's collector has no turn inside: objects are made for each module and storage, and a
    full collection (0.1 s and more) would come between copies. It comes while they run."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
