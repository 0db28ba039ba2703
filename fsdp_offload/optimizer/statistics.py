"""``statistics()``: an optimizer's memory, and figures of its last step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from ..core.config import brief
from ..link import held_bytes
from .updates import Updates


@dataclass(frozen=True)
class Statistics:
    """Memory of the optimizer, and figures of its last step, on this rank."""

    optimizer: str
    """Class of the wrapped optimizer."""
    overlap: str
    """The mode in use: ``"step"``, ``"forward"`` or ``"backward"``."""
    steps: int
    """Calls of ``step()`` since construction."""
    parameters: dict[str, int]
    """Trainable parameters by where their state lives: ``streamed`` from host memory, ``resident``
    on the device, ``host`` (updated on the CPU), ``native`` (the class keeps its own state on the
    device)."""
    device_state_bytes: int
    """Bytes of state that only the device has; 0 while the optimizer is offloaded."""
    host_state_bytes: int
    """Bytes of state in host memory."""
    host_arena_bytes: int
    """Host memory allocated for state, alignment and staging included."""
    host_weight_bytes: int
    """Bytes of weights in host memory (``offload="all"``)."""
    host_gradient_bytes: int
    """Host memory allocated for gradients (``offload="all"``)."""
    pinned: bool
    """Whether all host memory for state is page-locked."""
    pin_seconds: float
    """Seconds that allocating and page-locking it took."""
    host_bytes_by_holder: dict[str, int]
    """Host memory of this process by object of this package; ``host_memory=`` bounds its sum over
    all ranks of the host."""
    is_away: bool
    """Whether a ``PhaseOffloader`` has offloaded its device memory."""
    staging_bytes: int
    """Device memory for slots, buckets that stay and scratch; while the optimizer is offloaded,
    only slots for weights and gradients."""
    buckets: int
    """Buckets that one step updates."""
    staying_buckets: int
    """Buckets whose state stays on the device between steps, so that it does not move."""
    memory_change: str
    """When and why device memory was last taken or given back; empty: never."""
    moved_bytes: int
    """Bytes that the last step moved to host memory: updated state that does not stay, and
    gradients for updates on the CPU."""
    fetched_bytes: int
    """Bytes that the last step moved to the device. State that was prefetched and then used by
    other code counts twice."""
    step_ms: float
    """Host milliseconds of the last ``step()``; the device may have worked longer."""

    def __str__(self) -> str:
        lanes = (f"{count} {_LANES[lane]}" for lane, count in sorted(self.parameters.items()))
        lines = [
            f'{self.optimizer}, overlap="{self.overlap}", after {self.steps} steps',
            f"parameters: {', '.join(lanes) or 'none'}",
            f"host memory for state: {brief(self.host_arena_bytes)}, "
            + (f"page-locked in {self.pin_seconds:.1f} s" if self.pinned else "pageable"),
            "device memory for state, slots and scratch: "
            f"{brief(self.device_state_bytes + self.staging_bytes)}; "
            f"{self.staying_buckets} of {self.buckets} buckets stay there between steps",
        ]
        if self.host_weight_bytes:
            lines.append(f"host memory for weights: {brief(self.host_weight_bytes)}")
        if self.host_gradient_bytes:
            lines.append(f"host memory for gradients: {brief(self.host_gradient_bytes)}")
        if self.memory_change:
            lines.append(f"device memory changed {self.memory_change}")
        if self.steps:
            lines.append(
                f"last step: {brief(self.moved_bytes)} to the host, "
                f"{brief(self.fetched_bytes)} to the device, step() took {self.step_ms:.1f} ms"
            )
        return "\n  ".join(lines)


_LANES: Final = {
    "streamed": "with state in host memory",
    "resident": "with state on the device",
    "native": "with state on the device, updated by the class itself",
    "host": "updated on the CPU",
}


def gather(updates: Updates) -> Statistics:
    """Collect the statistics of an optimizer."""
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
