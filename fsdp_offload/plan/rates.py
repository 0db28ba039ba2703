"""How fast this machine is: the numbers that the planner and its predictions stand on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..errors import ConfigError


@dataclass(frozen=True)
class Rates:
    """Speeds of one rank while all ranks of its host do the same; the slowest rank's.

    1 GB is 10^9 bytes. Measured by :func:`fsdp_offload.pipeline.calibration.measure_rates`.

    Raises:
        ConfigError: a value is not a positive finite number.
    """

    h2d_gbps: float
    """Host to device alone, page-locked memory."""

    d2h_gbps: float
    """Device to host alone."""

    both_ways_gbps: float
    """Both directions at once, their sum."""

    host_numel_per_s: float
    """Parameters per second of the host lane: torch's fused fp32 AdamW on this rank's share of the
    cores, with the lane's gradients and parameters travelling beside it."""

    host_latency_ms: float
    """From the last gradient's arrival to the end of its update: one unit on one core."""

    host_dram_gbps: float
    """This rank's share of host memory bandwidth: the most that transfers and the host lane reached
    alone or together (with half of the cores), reads and writes counted."""

    device_gbps: float
    """Device memory bandwidth of the fused AdamW kernel."""

    beside_gbps: float
    """Both directions of the link while half of this rank's cores update, the sum."""

    beside_numel_per_s: float
    """Parameters per second of those cores meanwhile."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value <= 0:
                raise ConfigError(
                    f"rates.{name}={value!r}",
                    reason="not a positive finite number",
                    remedy="measure again, or give the machine's figure in the unit of its name",
                )

    def to_dict(self) -> dict[str, float]:
        """Plain numbers by name, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Rates:
        """The rates that :meth:`to_dict` gave.

        Raises:
            ConfigError: a name is missing or unknown, or a value is no rate.
        """
        names = {field.name for field in fields(cls)}
        if differing := sorted(names ^ set(values)):
            raise ConfigError(
                f"rates with the names {sorted(values)}",
                reason=f"{', '.join(differing)} missing or unknown",
                remedy="pass what Rates.to_dict() gave",
            )
        return cls(**values)
