"""Device memory that the optimizer takes while there is some to spare, and gives back.

After a few steps the job has been through its peak once, if all its iterations are alike.
:class:`.residency.MemoryWatch` says when memory is looked at, and how much there may be: here are
the figures that it needs. No rank asks another: what stays does not change bits.
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
    """What one optimizer takes."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._watch = MemoryWatch()
        self._figures: AllocatorFigures | None = None
        self.last_change = ""
        """When, why and for what memory was taken or given back."""

    def look(self, step: int, ring: Ring) -> None:
        """After the step of that number, from 1 on: take more for ``ring``, or give back."""
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
        """Whether it made the allocator's figures others."""
        before, slots = ring.staying.keys(), len(ring.slots)
        try:
            ring.fit(allowed, step)
        except torch.OutOfMemoryError:  # others were faster; torch's cache alone has changed
            return True
        now = ring.staying.keys()
        if now != before:
            self.last_change = (
                f"after step {step}, {allowed // MIB} MiB ({why}): {len(now)} of "
                f"{len(ring.sizes)} buckets stay, {len(before - now)} left"
            )
            travels = len(now) < len(ring.sizes)
            if travels and unused_bytes >= GIB and not has_expandable_segments():
                self.last_change += (
                    f"; torch's allocator reserves {unused_bytes // MIB} MiB without "
                    "using them, and PYTORCH_ALLOC_CONF=expandable_segments:True would "
                    "reserve less"
                )
            _log.info("device memory: %s", self.last_change)
        return len(ring.slots) != slots or now != before
