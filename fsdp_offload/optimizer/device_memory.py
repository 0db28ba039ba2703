"""Device memory that the optimizer takes while there is some to spare, and gives back.

[Note: when it is looked at]
After a few steps the job has been through its peak once, if all its iterations are alike. So memory
is looked at after ``FIRST_LOOK`` steps, when the peak has become steady, and every ``AWAY_STEPS``
steps; and whenever torch's allocator has taken more from the driver than before, or had to give
back cached memory to serve a request. No rank asks another: what stays does not change bits.
"""

from __future__ import annotations

import logging
from typing import Final

import torch

from ..core.backend import Backend
from ..core.config import GIB, MIB
from ..pipeline.engine import Engine
from ..pipeline.streamed import StreamedLane
from ..plan.residency import (
    AWAY_STEPS,
    LEAST_MARGIN_BYTES,
    Reading,
    allowed_bytes,
    is_steady,
)

FIRST_LOOK: Final = 3

_log = logging.getLogger("fsdp_offload")


class DeviceMemory:
    """What one optimizer takes."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._peak_bytes = self._job_bytes = self._grown_at = 0
        self._was_steady = False
        self.last_change = ""
        """When, why and for what memory was taken or given back."""
        self._retries: int | None = None  # not those of before

    def look(self, step: int, engines: list[Engine]) -> None:
        """After the step of that number, from 1 on: take more for ``engines``, or give back."""
        lanes = [engine.streamed for engine in engines if engine.streamed is not None]
        figures = self._backend.allocator()
        if figures is None or not engines:
            return
        reserved, unused, retries = figures
        is_short = self._retries is not None and retries > self._retries
        grown = reserved - self._peak_bytes
        more = 0  # for the job alone
        if grown > 0:
            more = reserved - _own_bytes(lanes) - self._job_bytes
        if is_short or more > LEAST_MARGIN_BYTES // 2:  # less is what the margin is for
            self._grown_at = step
        self._job_bytes += max(0, more)
        self._peak_bytes, self._retries = max(reserved, self._peak_bytes), retries
        was_steady, self._was_steady = self._was_steady, is_steady(step, self._grown_at)
        is_due = step == FIRST_LOOK or step % AWAY_STEPS == 0 or self._was_steady > was_steady
        if not is_due and not is_short and not (grown > 0 and step > FIRST_LOOK):
            return
        free, total = self._backend.free_and_total()
        own = _own_bytes(lanes)
        reading = Reading(total, free, reserved, self._job_bytes, own, self._was_steady)
        allowed = allowed_bytes(reading)
        if is_short:
            allowed = min(allowed, own // 2)
        why = "the peak has grown" if grown > 0 else "to spare"
        why = "torch's allocator was short" if is_short else why
        self._fit(step, lanes, allowed, why, unused)
        if (figures := self._backend.allocator()) is not None:  # what was just taken is no growth
            self._peak_bytes = max(figures.reserved_bytes, self._peak_bytes)

    def _fit(
        self, step: int, lanes: list[StreamedLane], allowed: int, why: str, unused_bytes: int
    ) -> None:
        state = sum(sum(lane.sizes) for lane in lanes)
        for lane in lanes:
            share = allowed * sum(lane.sizes) // state
            before = lane.staying.keys()
            try:
                lane.fit(share, step)
            except torch.OutOfMemoryError:  # others were faster; nothing has changed
                continue
            if (now := lane.staying.keys()) != before:
                self.last_change = (
                    f"after step {step}, {share // MIB} MiB ({why}): {len(now)} of "
                    f"{len(lane.buckets)} buckets stay, {len(before - now)} left"
                )
                travels = len(now) < len(lane.buckets)
                if travels and unused_bytes >= GIB:
                    self.last_change += (
                        f"; torch's allocator has {unused_bytes // MIB} MiB that were never in use,"
                        " of which PYTORCH_ALLOC_CONF=expandable_segments:True could leave some"
                    )
                _log.info("device memory: %s", self.last_change)


def _own_bytes(lanes: list[StreamedLane]) -> int:
    """Adds up all buckets: not for each step."""
    return sum(lane.own_bytes for lane in lanes)
