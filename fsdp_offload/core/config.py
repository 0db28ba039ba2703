"""What a user may choose: frozen dataclasses, checked when they are made.

Each value is explained under its field. Sizes accept an ``int`` in bytes or a string such as
``"8GiB"`` (binary units) or ``"8GB"`` (decimal units).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final, Literal

import torch

from .errors import ConfigError

MIB: Final = 1 << 20
GIB: Final = 1 << 30
LANES: Final = ("resident", "streamed", "host")
Lane = Literal["resident", "streamed", "host"]
OVERLAPS: Final = ("step", "forward", "backward")
DEFAULT_PREFETCH_BYTES: Final = 1 << 30
STEP_BUCKET_BYTES: Final = 32 * MIB
OVERLAP_BUCKET_BYTES: Final = 128 * MIB

_UNITS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}


def parse_bytes(value: int | str, name: str = "size") -> int:
    """Bytes meant by ``value``: an int, or a number with a unit ("8GiB", "500 MB").

    Raises:
        ConfigError: the text is no size, or it is negative.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        parsed = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
        if match is None or match[2].upper() not in _UNITS:
            raise ConfigError(
                f"{name}={value!r}",
                reason="not a size",
                remedy='give bytes as an int, or a string such as "8GiB" or "500MB"',
            )
        parsed = int(float(match[1]) * _UNITS[match[2].upper()])
    if parsed < 0:
        raise ConfigError(f"{name}={value!r}", reason="a size is never negative", remedy="use 0")
    return parsed


@dataclass(frozen=True)
class PrecisionConfig:
    """In which precision state is kept and updated; the same in every lane."""

    master: Literal["auto", "none"] = "auto"
    """``"auto"``: parameters with bf16 or fp16 shards get an fp32 master, others none.
    ``"none"``: update in the shard's own dtype, as torch would."""

    moments: torch.dtype | Literal["int8"] | None = None
    """How state tensors are kept between updates. ``None``: fp32 where there is a master, else the
    shard's dtype, which is what torch would use on such a parameter. ``torch.bfloat16``, or
    ``"int8"`` (``exp_avg`` and ``exp_avg_sq``, with a scale per 64 elements): where the update
    runs in fp32, element by element, and on the device. See ``docs/precision.md``."""

    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """How moments are rounded to fewer bits. To nearest, a squared average with ``beta2=0.999``
    stops following its gradients, because an update moves it by less than half a step."""

    def __post_init__(self) -> None:
        if self.master not in ("auto", "none"):
            raise ConfigError(
                f"precision.master={self.master!r}",
                reason="unknown choice",
                remedy='use "auto" or "none"',
            )
        if self.moments not in (None, torch.bfloat16, "int8"):
            raise ConfigError(
                f"precision.moments={self.moments!r}",
                reason="state is kept in the dtype of the update, in bf16, or in int8 codes",
                remedy='use None, torch.bfloat16 or "int8"',
            )
        if self.rounding not in ("stochastic", "nearest"):
            raise ConfigError(
                f"precision.rounding={self.rounding!r}",
                reason="unknown choice",
                remedy='use "stochastic" or "nearest"',
            )

    def compute_dtype(self, shard_dtype: torch.dtype) -> torch.dtype:
        """dtype in which a shard of ``shard_dtype`` is updated and its moments are kept."""
        if self.master == "auto" and shard_dtype in (torch.bfloat16, torch.float16):
            return torch.float32
        return shard_dtype


@dataclass(frozen=True)
class TransferConfig:
    """How state travels between host and device, and how host memory is obtained."""

    bucket_bytes: int | str | None = None
    """Bytes of state, all kinds together, in one bucket: the unit of transfer and update. Each
    element counts as 4 bytes at least. ``None``: 32 MiB with ``overlap="step"``; 128 MiB with the
    others, where the host's own time per bucket competes with the launches of forward and
    backward."""

    slots: int = 4
    """Device staging buffers of one bucket each. Three keep both directions of the link busy; the
    fourth absorbs jitter."""

    prefetch_bytes: int | str | None = None
    """Device memory for state that is on its way beyond the slots: fetched before its gradients
    are there, or updated and still to be written back. It keeps the link busy where the forward
    ends and the backward begins. With ``overlap="backward"`` half of it keeps buckets from one
    iteration to the next (all buckets but one, where it and the slots hold all state): they are
    written back like the others, and not fetched again.
    ``None``: 1 GiB with ``overlap="forward"`` or ``"backward"``, none with ``"step"``. More than
    all of the state is never taken."""

    host_threads: int | None = None
    """Threads of the host lane. ``None``: cores of this process / ranks on this host, and half of
    that beside a streamed lane of more than a tenth of its bytes, whatever ``OMP_NUM_THREADS``
    says."""

    bind_threads: bool = True
    """Keep the host lane's threads on cores next to the device (Linux). Where the process may use
    all cores of the machine, ranks of one host divide them. Other threads are left alone."""

    pin: Literal["require", "prefer", "never"] = "require"
    """``"require"``: page-locked host memory or an error. ``"prefer"``: fall back to pageable
    memory with a warning. ``"never"``: pageable. Without an accelerator nothing is pinned."""

    huge_pages: bool = True
    """Ask for transparent huge pages under the arena (Linux; ignored where there are none)."""

    numa: bool = True
    """Touch the arena first from the cores next to the device, so that it lies in their memory."""

    host_budget: int | str | None = None
    """Host bytes that all ranks on this host may use together. ``None``: the smaller of free
    memory and what the cgroup leaves."""

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "host_budget", "prefetch_bytes"):
            if (size := getattr(self, name)) is not None:
                object.__setattr__(self, name, parse_bytes(size, name))
        if self.bucket_bytes is not None and int(self.bucket_bytes) < 4096:
            raise ConfigError(
                f"transfer.bucket_bytes={self.bucket_bytes}",
                reason="a bucket under 4 KiB cannot hold 64 elements of every kind of state",
                remedy="use at least 4096; 16 MiB and more reach link speed",
            )
        for name, value in (("slots", self.slots), ("host_threads", self.host_threads)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ConfigError(
                    f"transfer.{name}={value!r}", reason="not a whole number", remedy="use an int"
                )
        if self.slots < 1:
            raise ConfigError(
                f"transfer.slots={self.slots}",
                reason="a bucket needs a slot to travel in",
                remedy="use 1 or more; 3 and more overlap both directions",
            )
        if self.host_threads is not None and self.host_threads < 1:
            raise ConfigError(
                f"transfer.host_threads={self.host_threads}",
                reason="the host lane needs a thread",
                remedy="use 1 or more, or None for cores / local ranks",
            )
        if not isinstance(self.bind_threads, bool):
            raise ConfigError(
                f"transfer.bind_threads={self.bind_threads!r}",
                reason="neither True nor False",
                remedy="use True to keep threads near the device, False to leave them alone",
            )
        if self.pin not in ("require", "prefer", "never"):
            raise ConfigError(
                f"transfer.pin={self.pin!r}",
                reason="unknown choice",
                remedy='use "require", "prefer" or "never"',
            )


@dataclass(frozen=True)
class OffloadConfig:
    """The arguments of :class:`HybridDeviceOptimizer`, checked together."""

    offload_fraction: float = 1.0
    device_budget_bytes: int | None = None
    device_memory: int | str | None = None
    """Bytes that slots and buckets that stay may take in all; ``"auto"``: what is to spare; None:
    what ``transfer`` says."""
    update_on: str | tuple[str, ...] = "device"
    """Where offloaded state is updated. ``"device"``: streamed. ``"host"``: on CPU cores.
    ``"auto"``: as the planner finds fastest by measured rates; on CPU tensors streamed. Or a lane
    for each trainable parameter, in the order of ``param_groups``."""
    overlap: str = "step"
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)

    @classmethod
    def make(
        cls,
        *,
        offload_fraction: float | None,
        device_budget: int | str | None,
        device_memory: int | str | None = None,
        update_on: str | Sequence[str],
        overlap: str,
        precision: PrecisionConfig | None,
        transfer: TransferConfig | None,
    ) -> OffloadConfig:
        """Check the user's arguments together.

        Raises:
            ConfigError: a value is out of range, unknown, or contradicts another.
        """
        if offload_fraction is not None and device_budget is not None:
            raise ConfigError(
                f"offload_fraction={offload_fraction} and device_budget={device_budget!r}",
                reason="both say how much state stays on the device",
                remedy="give one of them",
            )
        for name, value, kind in (
            ("precision", precision, PrecisionConfig),
            ("transfer", transfer, TransferConfig),
        ):
            if value is not None and not isinstance(value, kind):
                raise ConfigError(
                    f"{name}={value!r}",
                    reason=f"not a {kind.__name__}",
                    remedy=f"pass fsdp_offload.{kind.__name__}(...) or None",
                )
        if not isinstance(update_on, Sequence):  # a str is one, too
            raise ConfigError(
                f"update_on={update_on!r}",
                reason="neither a choice nor a list of lanes",
                remedy='use "device", "host", "auto", or one lane per parameter',
            )
        budget = None if device_budget is None else parse_bytes(device_budget, "device_budget")
        return cls(
            offload_fraction=1.0 if offload_fraction is None else offload_fraction,
            device_budget_bytes=budget,
            device_memory=device_memory
            if device_memory in (None, "auto")
            else parse_bytes(device_memory, "device_memory"),
            update_on=update_on if isinstance(update_on, str) else tuple(update_on),
            overlap=overlap,
            precision=precision or PrecisionConfig(),
            transfer=transfer or TransferConfig(),
        )

    def __post_init__(self) -> None:
        fraction = self.offload_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float):
            raise ConfigError(
                f"offload_fraction={fraction!r}", reason="not a number", remedy="use 0 to 1"
            )
        if not 0.0 <= fraction <= 1.0:  # also refuses NaN
            raise ConfigError(
                f"offload_fraction={fraction}",
                reason="outside [0, 1]",
                remedy="0 keeps all state on the device, 1 offloads all of it",
            )
        if isinstance(self.update_on, str):
            if self.update_on not in ("auto", "device", "host"):
                raise ConfigError(
                    f"update_on={self.update_on!r}",
                    reason="unknown choice",
                    remedy='use "device", "host", "auto", or one lane per parameter',
                )
        elif unknown := [lane for lane in self.update_on if lane not in LANES]:
            raise ConfigError(
                f"update_on contains {unknown[0]!r}",
                reason="unknown lane",
                remedy=f"use one of {', '.join(LANES)} per parameter",
            )
        lanes = (self.update_on,) if isinstance(self.update_on, str) else self.update_on
        if self.precision.moments is not None and "host" in lanes:
            raise ConfigError(
                f"update_on={self.update_on!r} with precision.moments={self.precision.moments!r}",
                reason="the host lane updates state where it lies, in the dtype of the update",
                remedy='use update_on="device", or leave moments None',
            )
        if self.overlap not in OVERLAPS:
            raise ConfigError(
                f"overlap={self.overlap!r}",
                reason="unknown choice",
                remedy=f"use one of {', '.join(OVERLAPS)}",
            )

    @property
    def bucket_bytes(self) -> int:
        """Bytes of state in a bucket."""
        given = self.transfer.bucket_bytes
        if given is None:
            return STEP_BUCKET_BYTES if self.overlap == "step" else OVERLAP_BUCKET_BYTES
        return int(given)

    @property
    def prefetch_bytes(self) -> int:
        """Device memory beyond the slots."""
        given = self.transfer.prefetch_bytes
        if given is None:
            return 0 if self.overlap == "step" else DEFAULT_PREFETCH_BYTES
        return int(given)


def check_keywords(unknown: Mapping[str, object], known: Iterable[str]) -> None:
    """Refuse keywords that :class:`HybridDeviceOptimizer` does not have.

    Args:
        unknown: name and value of each.
        known: the names that it has.

    Raises:
        ConfigError: a field of one of the configurations.
        TypeError: no such name anywhere; names the nearest one.
    """
    places = {
        entry.name: (argument, kind.__name__)
        for argument, kind in (("transfer", TransferConfig), ("precision", PrecisionConfig))
        for entry in fields(kind)
    }
    for name, value in unknown.items():
        if name in places:
            argument, kind = places[name]
            raise ConfigError(
                f"{name}={value!r}",
                reason=f"an option of {kind}",
                remedy=f"pass {argument}={kind}({name}={value!r})",
            )
        near = difflib.get_close_matches(name, [*known, *places], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"HybridDeviceOptimizer has no argument {name!r}{hint}")
