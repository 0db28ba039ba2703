"""Which lane each parameter's state lives in: a pure function of global metadata.

Every rank must decide the same, so only global sizes are used.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.config import Lane, OffloadConfig
from ..core.errors import ConfigError
from .layout import ParamSpec


def choose_lanes(specs: Sequence[ParamSpec], config: OffloadConfig) -> tuple[Lane, ...]:
    """One lane per spec. Specs are in update order, or as ``config.update_on`` lists lanes.

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
    return tuple(lanes)


def _given_lanes(specs: Sequence[ParamSpec], given: Sequence[str]) -> tuple[Lane, ...]:
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
