"""Which lane each parameter's state lives in: a pure function of global metadata.

Every rank must decide the same, so only numbers that are equal on all ranks are used: global
sizes for a fraction, the largest shard over all ranks for the link, and the slowest rank's rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from ..core.config import MIB, Lane, OffloadConfig
from ..core.errors import ConfigError
from .layout import ParamSpec

HOST_BYTES_PER_NUMEL: Final = 8
"""What the host lane sends over the link per element: an fp32 gradient and an fp32 parameter."""
HOST_EFFICIENCY: Final = 0.7
"""What the host lane reaches in a step of what was measured: 3.5 of 5.0 G parameters/s (H200)."""
MOST_ON_HOST: Final = 0.35
"""Share of the streamed elements. With half of them there a step of 1.33 G parameters took 404 ms
where 344 to 348 were reached with 30 to 35 %, and 358 with none (docs/reference.md)."""
MIN_GAIN: Final = 0.05
"""Of the streamed step. Where 4 % are predicted nothing was won, where 6 %, that was."""
MIN_BYTES: Final = 256 * MIB
"""State below which nothing is measured: the links of today carry it in 6 ms."""
FEW_STREAMED: Final = 0.1
"""Up to that much of the host lane's bytes, a streamed lane does not take cores from it; with more
the host lane has fewer threads, and both are slower than alone."""


class Rates(NamedTuple):
    """Speeds of one rank while all ranks of its host do the same; 1 GB is 10^9 bytes."""

    link_gbps: float
    """Both directions of the link at once, the sum."""
    beside_gbps: float
    """The same while half of this rank's cores update."""
    host_numel_per_s: float
    """Parameters per second that these cores update meanwhile."""


def choose_lanes(
    specs: Sequence[ParamSpec],
    config: OffloadConfig,
    rates: Rates | None = None,
) -> tuple[Lane, ...]:
    """One lane per spec. Specs are in update order, or as ``config.update_on`` lists lanes.
    ``update_on="auto"`` streams without ``rates``.

    Parameters stay on the device in the given order as long as they fit into what may stay; a
    parameter that does not fit is offloaded and later, smaller ones are still tried. So the
    share that leaves is at least the one asked for, and exceeds it by less than the largest
    parameter.

    Raises:
        ConfigError: a list of lanes of the wrong length, or a lane a parameter cannot live in.
    """
    if not isinstance(config.update_on, str):
        return _given_lanes(specs, config.update_on)
    sizes = [c.global_bytes for c in specs]
    allowance = (1.0 - config.offload_fraction) * sum(sizes)
    away: Lane = "host" if config.update_on == "host" else "streamed"
    lanes: list[Lane] = []
    allowance -= sum(size for c, size in zip(specs, sizes, strict=True) if c.must_stay)
    for spec, size in zip(specs, sizes, strict=True):
        if spec.must_stay:
            lanes.append("resident")
        elif size > 0 and size <= allowance:
            lanes.append("resident")
            allowance -= size
        else:
            # Nothing to move: with a fraction of 0 everything is resident, also empty parameters.
            keep = size == 0 and config.offload_fraction == 0
            lanes.append("resident" if keep else _checked(spec, away))
    if config.update_on == "auto" and rates is not None:
        for index in _host_run(specs, lanes, rates):
            lanes[index] = "host"
    return tuple(lanes)


def wants_rates(specs: Sequence[ParamSpec], config: OffloadConfig) -> bool:
    """Whether :func:`choose_lanes` has a choice that is worth measuring for.

    Beside forward and backward two lanes were never faster than one: the link is busy for less of
    the iteration, and the host lane's threads compete with the launches.
    """
    if config.update_on != "auto" or config.overlap != "step":
        return False
    lanes = choose_lanes(specs, config)
    pairs = zip(specs, lanes, strict=True)
    movable = (c for c, lane in pairs if lane == "streamed" and c.host_numel)
    return sum(c.max_local_bytes for c in movable) >= MIN_BYTES


def step_seconds(streamed_bytes: int, host_numel: int, rates: Rates) -> float:
    """How long a step takes with so much state streamed, and so many elements updated on cores.

    The cores and the link run side by side. While the cores work, they take host memory from the
    link, which has ``beside_gbps``; before and after that it has ``link_gbps``.
    """
    host_s = host_numel / (rates.host_numel_per_s * HOST_EFFICIENCY)
    link_bytes = 2 * streamed_bytes + HOST_BYTES_PER_NUMEL * host_numel
    left_bytes = link_bytes - host_s * rates.beside_gbps * 1e9
    if left_bytes < 0:  # the link is done first
        return host_s
    return host_s + left_bytes / (rates.link_gbps * 1e9)


def _host_run(specs: Sequence[ParamSpec], lanes: Sequence[Lane], rates: Rates) -> list[int]:
    """Which streamed specs go to the host lane instead: the run with the shortest step.

    It ends the update order: there gradients come first in backward and parameters are needed last
    in forward, so the lane with the longest way has the most time. A parameter that is too large
    for :data:`MOST_ON_HOST`, such as an output projection, is passed over.
    """
    streamed = [i for i, lane in enumerate(lanes) if lane == "streamed"]
    n_bytes, on_host = sum(specs[i].max_local_bytes for i in streamed), 0
    movable = [i for i in streamed if specs[i].host_numel]
    limit = MOST_ON_HOST * sum(specs[i].host_numel for i in movable)
    best_s = (1 - MIN_GAIN) * step_seconds(n_bytes, 0, rates)
    run: list[int] = []
    best = 0
    for index in reversed(movable):
        spec = specs[index]
        if spec.host_numel > limit:
            continue
        if on_host + spec.host_numel > limit:
            break
        run.append(index)
        on_host += spec.host_numel
        n_bytes -= spec.max_local_bytes
        if (seconds := step_seconds(n_bytes, on_host, rates)) < best_s:
            best_s, best = seconds, len(run)
    return run[:best]


def _given_lanes(specs: Sequence[ParamSpec], given: tuple[str, ...]) -> tuple[Lane, ...]:
    if len(given) != len(specs):
        raise ConfigError(
            f"update_on with {len(given)} lanes",
            reason=f"the optimizer has {len(specs)} trainable parameters",
            remedy="give one lane per parameter, in the order of param_groups",
        )
    return tuple(_checked(c, lane) for c, lane in zip(specs, given, strict=True))


def _checked(spec: ParamSpec, lane: str) -> Lane:
    """``lane``, if ``spec`` can live in it.

    Raises:
        ConfigError: it cannot.
    """
    if spec.must_stay and lane != "resident":
        raise ConfigError(
            f"lane {lane!r} for {spec.fqn}",
            reason="its shard is a tensor subclass, its state has no known shape, or its "
            "optimizer couples all parameters",
            remedy='give it the lane "resident"',
        )
    if spec.whole and lane == "host":
        raise ConfigError(
            f"lane 'host' for {spec.fqn}",
            reason="its optimizer works on whole matrices, which may communicate on the device",
            remedy='use update_on="device"',
        )
    return lane  # type: ignore[return-value]
