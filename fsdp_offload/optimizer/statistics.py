"""``statistics()``: what the optimizer holds and what its last step did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from ..core.config import GIB, MIB
from ..link import held_bytes
from .updates import Updates


@dataclass(frozen=True)
class Statistics:
    """What the optimizer holds, and what its last step did, on this rank."""

    optimizer: str
    """Class of the wrapped optimizer."""
    overlap: str
    """As it was asked for, or found."""
    steps: int
    """Calls of ``step()`` since construction."""
    parameters: dict[str, int]
    """Trainable parameters per lane; ``native`` ones keep the state their class makes."""
    device_state_bytes: int
    """State that is on the device now: nothing while the optimizer is away."""
    host_state_bytes: int
    """State in host memory: payload."""
    host_arena_bytes: int
    """Host memory taken for it, alignment and staging included."""
    host_weight_bytes: int
    """Frozen weights in host memory (``offload="all"``)."""
    host_gradient_bytes: int
    """Host memory for gradients, which leave the device after their reduction
    (``offload="all"``)."""
    pinned: bool
    """Whether all of that memory is page-locked."""
    pin_seconds: float
    """Seconds that touching and page-locking it took."""
    host_bytes_by_holder: dict[str, int]
    """Host memory of all that this process holds, this optimizer or not: ``host_memory=`` bounds
    the sum for all ranks of the host."""
    is_away: bool
    """Whether a ``PhaseOffloader`` has offloaded its device memory."""
    staging_bytes: int
    """Device memory of slots, buckets that stay, scratch and staging rings; while
    the optimizer is away, of slots for weights and gradients alone."""
    buckets: int
    """Units of update per step."""
    staying_buckets: int
    """Of these, offloaded ones whose state is on the device now from one step to the next."""
    memory_change: str
    """When, why and for what device memory was last taken or given back; empty: never."""
    moved_bytes: int
    """Bytes that the last step moved to host memory: all offloaded state that it updated on the
    device, and gradients of the host lane."""
    fetched_bytes: int
    """Bytes that were moved to the device for it: not those that were still there, and twice what
    was fetched ahead and then read or written by other code."""
    step_ms: float
    """Host milliseconds of the last ``step()``; the device may still have been at work."""

    def __str__(self) -> str:
        lanes = [f"{count} {_LANES[lane]}" for lane, count in sorted(self.parameters.items())]
        locked = f"page-locked in {self.pin_seconds:.1f} s" if self.pinned else "pageable"
        lines = [
            f'{self.optimizer}, overlap="{self.overlap}", after {self.steps} steps',
            f"parameters: {', '.join(lanes) or 'none'}",
            f"host memory for state: {_size(self.host_arena_bytes)}, {locked}",
            f"device memory for state: {_size(self.device_state_bytes + self.staging_bytes)}; "
            f"{self.staying_buckets} of {self.buckets} buckets stay between steps",
        ]
        if self.host_weight_bytes:
            lines.append(f"host memory for weights: {_size(self.host_weight_bytes)}")
        if self.host_gradient_bytes:
            lines.append(f"host memory for gradients: {_size(self.host_gradient_bytes)}")
        if self.memory_change:
            lines.append(f"device memory changed {self.memory_change}")
        if self.steps:
            sent, fetched = _size(self.moved_bytes), _size(self.fetched_bytes)
            lines.append(
                f"last step: {sent} to the host, {fetched} to the device, "
                f"step() took {self.step_ms:.1f} ms"
            )
        return "\n  ".join(lines)


_LANES: Final = {
    "streamed": "with state in host memory",
    "resident": "with state on the device",
    "native": "with state on the device, updated by the class itself",
    "host": "updated on the CPU",
}


def _size(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.1f} MiB"


def gather(updates: Updates) -> Statistics:
    """Add up what an optimizer holds."""
    reserved, place = updates.reserved, updates.device_state
    engine, natives = reserved.engine, reserved.natives()
    lanes = Counter[str](param.lane for param in reserved.params)
    device_bytes = sum(p.spec.state_bytes for p in reserved.params if p.lane == "resident")
    if natives:
        lanes["native"] = len(natives)
        values = (v for p in natives for v in updates.view.shown.get(p, {}).values())
        device_bytes += sum(v.numel() * v.itemsize for v in values if isinstance(v, Tensor))
    is_off = updates.overlap is not None and updates.overlap.is_off
    weights, gradients = updates.weights, updates.gradients
    slot_bytes = (0 if weights is None else weights.slot_bytes) + (
        0 if gradients is None else gradients.slots.n_bytes
    )
    return Statistics(
        optimizer=type(updates.inner).__name__,
        overlap="step" if is_off else reserved.config.overlap or "step",
        steps=updates.steps,
        parameters=dict(lanes),
        device_state_bytes=0 if place.shows_copies else device_bytes,
        host_state_bytes=engine.payload_bytes,
        host_arena_bytes=reserved.pool.n_bytes,
        host_weight_bytes=0 if weights is None else weights.host_bytes,
        host_gradient_bytes=0 if gradients is None else gradients.host_bytes,
        pinned=0 < reserved.pool.n_bytes == reserved.pool.pinned_bytes,
        pin_seconds=reserved.pool.seconds,
        host_bytes_by_holder=held_bytes(),
        is_away=place.is_away,
        staging_bytes=engine.staging_bytes + slot_bytes,
        buckets=sum(len(lane.buckets) for lane in engine.lanes),
        staying_buckets=len(engine.ring.staying),
        memory_change="" if updates.memory is None else updates.memory.last_change,
        moved_bytes=sum(lane.moved_bytes for lane in engine.lanes),
        fetched_bytes=sum(lane.fetched_bytes for lane in engine.lanes),
        step_ms=updates.step_ms,
    )
