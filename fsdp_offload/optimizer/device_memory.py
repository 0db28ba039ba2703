"""Take spare device memory for state, and give it back when memory is short.

:class:`.residency.MemoryWatch` decides when to look and how much to take; this module supplies its
figures. Ranks decide on their own, because bits do not depend on which buckets stay.
"""

from __future__ import annotations

import logging

import torch

from ..core.backend import AllocatorFigures, Backend
from ..core.config import GIB, MIB
from ..core.storage import has_expandable_segments
from ..plan.residency import MemoryWatch
from .ring import Ring

_log = logging.getLogger("fsdp_offload")


class DeviceMemory:
    """Adapts the device memory of one optimizer."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._watch = MemoryWatch()
        self._figures: AllocatorFigures | None = None
        self.last_change = ""  # when and why memory was last taken or given back

    def look(self, step: int, ring: Ring) -> None:
        """Take more memory for ``ring``, or give some back, after step number ``step`` (from 1
        on)."""
        figures = self._backend.allocator()
        is_same = figures == self._figures and not self._watch.is_due(step)
        if figures is None or is_same:
            return
        own = ring.own_bytes
        self._figures = figures
        if not (why := self._watch.observe(step, figures, own)):
            return
        allowed = self._watch.decide(step, *self._backend.free_and_total(), own)
        if allowed is None or not self._fit(step, ring, allowed, why, figures.unused_bytes):
            return
        if (figures := self._backend.allocator()) is not None:
            self._figures = figures
            self._watch.changed(step, figures)

    def _fit(self, step: int, ring: Ring, allowed: int, why: str, unused_bytes: int) -> bool:
        """Fit the ring into ``allowed`` bytes; returns whether the allocator's figures may have
        changed."""
        before, slots = ring.staying.keys(), len(ring.slots)
        try:
            ring.fit(allowed, step)
        except torch.OutOfMemoryError:  # another process was faster: only torch's cache has changed
            return True
        now = ring.staying.keys()
        if now != before:
            self.last_change = (
                f"after step {step} to {allowed // MIB} MiB ({why}): {len(now)} of "
                f"{len(ring.sizes)} buckets stay, {len(before - now)} evicted"
            )
            travels = len(now) < len(ring.sizes)
            if travels and unused_bytes >= GIB and not has_expandable_segments():
                self.last_change += (
                    f"; torch's allocator reserves {unused_bytes // MIB} MiB without "
                    "using them, and PYTORCH_ALLOC_CONF=expandable_segments:True would "
                    "reserve less"
                )
            _log.info("device memory changed %s", self.last_change)
        return len(ring.slots) != slots or now != before
