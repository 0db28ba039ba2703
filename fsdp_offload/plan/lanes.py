"""Which lane each parameter's state lives in: a pure function of global metadata.

Every rank must decide the same, so only numbers that are equal on all ranks are used: global
sizes for a fraction, the largest shard over all ranks for a device budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import Lane, OffloadConfig
from ..errors import ConfigError


@dataclass(frozen=True)
class Candidate:
    """A parameter as the choice of lanes sees it; all numbers are equal on all ranks."""

    fqn: str
    global_bytes: int  # state bytes of the whole parameter
    max_local_bytes: int  # state bytes of its largest shard
    must_stay: bool = False  # tensor subclasses, state of unknown shape, coupled parameters
    whole: bool = False  # updated as a whole matrix: no host lane
    max_local_numel: int = 0  # elements of its largest shard
    host_state_bytes: int = 0  # of its largest shard in the host lane, the master included
    gradient_bytes: int = 0  # of its largest shard, as it travels in the host lane
    fast_on_host: bool = False  # its class has a fused CPU kernel, which the rates speak of

    @property
    def movable(self) -> bool:
        """Whether the planner may give it the host lane."""
        return self.fast_on_host and not (self.must_stay or self.whole) and self.max_local_numel > 0


def choose_lanes(
    candidates: Sequence[Candidate], config: OffloadConfig, *, used_bytes: int = 0
) -> tuple[Lane, ...]:
    """One lane per candidate; ``used_bytes`` of a device budget are taken already.

    ``update_on="auto"`` is ``"device"`` here; :func:`.planner.make_plan` goes on from it.

    Parameters stay on the device in the given order as long as they fit into what may stay; a
    parameter that does not fit is offloaded and later, smaller ones are still tried. So the
    share that leaves is at least the one asked for, and exceeds it by less than the largest
    parameter.

    Raises:
        ConfigError: a list of lanes of the wrong length, or a lane a parameter cannot live in.
    """
    if not isinstance(config.update_on, str):
        return _given_lanes(candidates, config.update_on)
    if config.device_budget_bytes is not None:
        sizes = [c.max_local_bytes for c in candidates]
        allowance = float(config.device_budget_bytes - used_bytes)
    else:
        sizes = [c.global_bytes for c in candidates]
        allowance = (1.0 - config.offload_fraction) * sum(sizes)
    away: Lane = "host" if config.update_on == "host" else "streamed"
    lanes: list[Lane] = []
    allowance -= sum(size for c, size in zip(candidates, sizes, strict=True) if c.must_stay)
    for candidate, size in zip(candidates, sizes, strict=True):
        if candidate.must_stay:
            lanes.append("resident")
        elif size > 0 and size <= allowance:
            lanes.append("resident")
            allowance -= size
        else:
            # Nothing to move: with a fraction of 0 everything is resident, also empty parameters.
            keep = size == 0 and config.device_budget_bytes is None and config.offload_fraction == 0
            lanes.append("resident" if keep else checked_lane(candidate, away))
    return tuple(lanes)


def _given_lanes(candidates: Sequence[Candidate], given: tuple[str, ...]) -> tuple[Lane, ...]:
    if len(given) != len(candidates):
        raise ConfigError(
            f"update_on with {len(given)} lanes",
            reason=f"the optimizer has {len(candidates)} trainable parameters",
            remedy="give one lane per parameter, in the order of param_groups",
        )
    return tuple(checked_lane(c, lane) for c, lane in zip(candidates, given, strict=True))


def checked_lane(candidate: Candidate, lane: str) -> Lane:
    """``lane``, if ``candidate`` can live in it.

    Raises:
        ConfigError: it cannot.
    """
    if candidate.must_stay and lane != "resident":
        raise ConfigError(
            f"lane {lane!r} for {candidate.fqn}",
            reason="its shard is a tensor subclass, its state has no known shape, or its "
            "optimizer couples all parameters",
            remedy='give it the lane "resident"',
        )
    if candidate.whole and lane == "host":
        raise ConfigError(
            f"lane 'host' for {candidate.fqn}",
            reason="its optimizer works on whole matrices, which may communicate on the device",
            remedy='use update_on="device"',
        )
    return lane  # type: ignore[return-value]
