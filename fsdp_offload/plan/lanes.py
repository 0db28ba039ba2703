"""Which lane each parameter's state lives in: a pure function of global metadata.

Every rank must decide the same, so only global sizes are used.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.config import Lane, OffloadConfig
from ..core.errors import ConfigError
from .layout import ParamSpec


def choose_lanes(specs: Sequence[ParamSpec], config: OffloadConfig) -> tuple[Lane, ...]:
    """One lane per spec, in update order.

    Parameters stay on the device in the given order as long as they fit into what may stay; a
    parameter that does not fit is offloaded and later, smaller ones are still tried. So the
    share that leaves is at least the one asked for, and exceeds it by less than the largest
    parameter.

    Raises:
        ConfigError: ``update_on="host"``, and the optimizer works on whole matrices.
    """
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


def _checked(spec: ParamSpec, lane: Lane) -> Lane:
    """``lane``, if ``spec`` can live in it.

    Raises:
        ConfigError: it cannot.
    """
    if spec.whole and lane == "host":
        raise ConfigError(
            f"lane 'host' for {spec.fqn}",
            reason="its optimizer works on whole matrices, which may communicate on the device",
            remedy='use update_on="device"',
        )
    return lane
