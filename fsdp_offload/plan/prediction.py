"""What a step will take: bytes and elements over rates, and what of it stays visible.

A step keeps four things busy at once: the link, the host lane's cores, host memory and device
memory. It takes as long as the busiest of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..config import Lane
from ..errors import ConfigError
from .lanes import Candidate
from .rates import Rates

if TYPE_CHECKING:
    from .planner import Plan

LINK_EFFICIENCY: Final = 0.975
"""What the streamed lane reaches of plain copies both ways: 0.973 to 0.981 in all runs of
``docs/benchmarks/step_h200_2026-11-20.md``."""
HOST_EFFICIENCY: Final = 0.7
"""What the host lane's threads reach beside a streamed lane of what they reach in the measurement.
An estimate: 8 threads updated 3.5 G parameters/s in steps on one H200 machine (units of 2 M in 4.5
ms), and 5.0 in the measurement on another."""

FEW_STREAMED: Final = 0.1
"""Up to that much of the host lane's bytes, a streamed lane does not take cores from it."""


def is_beside(streamed_bytes: int, host_bytes: int) -> bool:
    """Whether a streamed lane of so much state counts beside a host lane: the latter has fewer
    threads then, and both are slower than alone."""
    return streamed_bytes > host_bytes * FEW_STREAMED


@dataclass(frozen=True)
class Load:
    """What parameters ask of the machine in one step, on the rank with the largest shards."""

    link_bytes: int = 0  # both directions together
    host_numel: int = 0  # elements updated on CPU cores
    dram_bytes: int = 0  # of host memory, read and written
    device_bytes: int = 0  # of device memory, read and written
    streamed_bytes: int = 0  # state in the streamed lane
    host_bytes: int = 0  # state in the host lane

    def __add__(self, other: Load) -> Load:
        return Load(
            self.link_bytes + other.link_bytes,
            self.host_numel + other.host_numel,
            self.dram_bytes + other.dram_bytes,
            self.device_bytes + other.device_bytes,
            self.streamed_bytes + other.streamed_bytes,
            self.host_bytes + other.host_bytes,
        )

    def __sub__(self, other: Load) -> Load:
        return Load(
            self.link_bytes - other.link_bytes,
            self.host_numel - other.host_numel,
            self.dram_bytes - other.dram_bytes,
            self.device_bytes - other.device_bytes,
            self.streamed_bytes - other.streamed_bytes,
            self.host_bytes - other.host_bytes,
        )


def load_of(candidate: Candidate, lane: Lane) -> Load:
    """What one parameter asks of the machine in ``lane``."""
    state, gradient = candidate.max_local_bytes, candidate.gradient_bytes
    if lane == "resident":  # state and shard are read and written, the gradient read
        return Load(device_bytes=2 * state + 3 * gradient)
    if lane == "streamed":  # the copies add a write and a read of the slot
        return Load(
            link_bytes=2 * state,
            dram_bytes=2 * state,
            device_bytes=4 * state + 3 * gradient,
            streamed_bytes=state,
        )
    # Gradient: written by the copy, read by the kernel. Master: read by the copy back.
    return Load(
        link_bytes=2 * gradient,
        host_numel=candidate.max_local_numel,
        dram_bytes=2 * candidate.host_state_bytes + 3 * gradient,
        device_bytes=4 * gradient,
        host_bytes=candidate.host_state_bytes,
    )


@dataclass(frozen=True)
class Prediction:
    """Milliseconds for which each part of the machine is busy in one step."""

    link_ms: float
    host_ms: float
    """The host lane's cores, the latency of its last unit included."""
    dram_ms: float
    device_ms: float

    @property
    def busy_ms(self) -> dict[str, float]:
        """The same by name: ``"link"``, ``"host"``, ``"dram"``, ``"device"``."""
        return {
            "link": self.link_ms,
            "host": self.host_ms,
            "dram": self.dram_ms,
            "device": self.device_ms,
        }

    @property
    def step_ms(self) -> float:
        """The whole step: all of them run at once."""
        return max(self.link_ms, self.host_ms, self.dram_ms, self.device_ms)

    @property
    def limit(self) -> str:
        """The name of what sets :attr:`step_ms`."""
        busy_ms = self.busy_ms
        return max(busy_ms, key=busy_ms.__getitem__)


def predict(load: Load, rates: Rates) -> Prediction:
    """The step that ``load`` takes."""
    gbps = rates.both_ways_gbps * LINK_EFFICIENCY
    numel_per_s, beside_gbps = rates.host_numel_per_s, gbps
    if load.host_numel and is_beside(load.streamed_bytes, load.host_bytes):
        numel_per_s = rates.beside_numel_per_s * HOST_EFFICIENCY
        beside_gbps = rates.beside_gbps * LINK_EFFICIENCY
    host_ms = load.host_numel / numel_per_s * 1e3
    # While the cores work, the link is slower.
    beside_bytes = min(load.link_bytes, host_ms * beside_gbps * 1e6)
    link_ms = beside_bytes / beside_gbps / 1e6 + (load.link_bytes - beside_bytes) / gbps / 1e6
    return Prediction(
        link_ms=link_ms,
        host_ms=host_ms + rates.host_latency_ms if load.host_numel else 0.0,
        dram_ms=load.dram_bytes / rates.host_dram_gbps / 1e6,
        device_ms=load.device_bytes / rates.device_gbps / 1e6,
    )


def predict_iteration_ms(
    plan: Plan,
    rates: Rates,
    *,
    on_device_iteration_ms: float,
    forward_ms: float,
    backward_ms: float,
    overlap: str,
    clipping: bool,
) -> float:
    """The iteration under ``plan``, if whatever may be hidden is.

    Args:
        plan: lanes of all parameters.
        rates: of this machine.
        on_device_iteration_ms: the same iteration with the optimizer on the device.
        forward_ms: its forward.
        backward_ms: its backward.
        overlap: ``"step"``: nothing is hidden. ``"forward"``: what ``step()`` starts runs under the
            next forward. ``"backward"``: under backward too.
        clipping: the update waits for the norm of all gradients, so backward hides nothing.

    Raises:
        ConfigError: an unknown ``overlap``, or a negative time.
    """
    if overlap not in ("step", "forward", "backward"):
        raise ConfigError(
            f"overlap={overlap!r}",
            reason="unknown choice",
            remedy='use "step", "forward" or "backward"',
        )
    times = (on_device_iteration_ms, forward_ms, backward_ms)
    if not all(0 <= time_ms < float("inf") for time_ms in times):
        raise ConfigError(
            f"on_device_iteration_ms, forward_ms, backward_ms = {times}",
            reason="times are finite and not negative",
            remedy="give measured milliseconds",
        )
    predicted = plan.predict(rates)
    assert predicted is not None
    step_ms = predicted.step_ms
    if overlap == "step":
        return max(on_device_iteration_ms, backward_ms + forward_ms + step_ms)
    if overlap == "forward" or clipping:
        return max(on_device_iteration_ms, backward_ms + max(forward_ms, step_ms))
    return max(on_device_iteration_ms, step_ms)
