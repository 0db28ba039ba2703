"""Options of the user: frozen dataclasses that check their values when they are built.

Each value is explained under its field. Sizes are a string such as ``"8GiB"`` (binary units) or
``"8GB"`` (decimal units), or an ``int`` of bytes: 0, or 1 MiB and more (buckets and pages: 4 KiB).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Any, Final, Literal

import torch

from .errors import ConfigError

MIB: Final = 1 << 20
GIB: Final = 1 << 30
Lane = Literal["resident", "streamed", "host"]
_PINS: Final = ("require", "prefer", "never")
OFFLOADS: Final = ("state", "all")
OVERLAPS: Final = ("step", "forward", "backward")
FIRST_DEVICE_BYTES: Final = GIB
"""Bytes that ``device_memory="auto"`` takes until it knows the job's peak."""
SMALL_BUCKET_BYTES: Final = 32 * MIB
MEDIUM_BUCKET_BYTES: Final = 64 * MIB
LARGE_BUCKET_BYTES: Final = 128 * MIB
MOMENTS: Final[dict[object, torch.dtype | Literal["int8"] | None]] = {
    None: None,
    "fp32": None,
    torch.float32: None,
    "bf16": torch.bfloat16,
    torch.bfloat16: torch.bfloat16,
    "int8": "int8",
    torch.int8: "int8",
}
"""Values of ``moments=`` and their meaning."""

SMALL_BYTES: Final = 4096
"""Least size of buckets and pages, which may be smaller than 1 MiB."""

_UNITS: Final = {
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


def parse_bytes(value: object, name: str = "size", *, least_int: int = MIB) -> int:
    """Parse a byte size: 0, an int, or a number and a unit ("8GiB", "5 MB").

    Args:
        value: the caller's value.
        name: name of the option.
        least_int: bytes; a smaller int was probably meant in another unit.

    Raises:
        ConfigError: ``value`` is not a size, is negative, or lacks a unit.
    """
    if not isinstance(value, bool) and isinstance(value, Integral):  # NumPy's, too
        if int(value) == 0 or int(value) >= least_int:
            return int(value)
    elif isinstance(value, str):
        if value.strip() == "0":
            return 0
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", value)
        if match is not None and match[2].upper() in _UNITS:
            return int(float(match[1]) * _UNITS[match[2].upper()])
    raise _no_size(value, name)


def check_choice(name: str, value: object, choices: Sequence[object], reason: str) -> None:
    """Refuse a value outside ``choices``; 1 does not count as True.

    Raises:
        ConfigError: ``value`` is not a choice.
    """
    if value not in choices or not isinstance(value, str | bool | None):
        quoted = " or ".join(
            f'"{each}"' if isinstance(each, str) else str(each) for each in choices
        )
        raise ConfigError(f"{name}={value!r}", reason=reason, remedy=f"use {quoted}")


def brief(n_bytes: int) -> str:
    """Format a size for a reader."""
    if n_bytes < MIB / 100:
        return f"{n_bytes} bytes"
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB / 10 else f"{n_bytes / MIB:.2f} MiB"


def exact(n_bytes: int) -> str:
    """Format a size for a reader who may need every byte."""
    return f"{n_bytes} bytes" if n_bytes < MIB else f"{brief(n_bytes)} ({n_bytes} bytes)"


def sized(value: int | str | None, name: str = "size", *, least_int: int = MIB) -> int | None:
    """As :func:`parse_bytes`; ``None`` stays ``None``."""
    return None if value is None else parse_bytes(value, name, least_int=least_int)


def _no_size(value: object, name: str) -> ConfigError:
    try:
        number = float("nan") if isinstance(value, bool) else float(str(value))
    except ValueError:
        number = float("nan")
    reason, remedy = "not a size", 'write bytes as an int, or text with a unit, such as "8GiB"'
    if number < 0:
        reason, remedy = "a size cannot be negative", "use 0"
    elif 0 < number < 1:
        reason, remedy = "a share is not accepted", 'write a size, such as "8GiB"'
    elif 1 <= number < float("inf"):
        # The unit that was probably meant: 8 means GiB, 4096 means MiB.
        unit = "B" if number >= MIB else "MiB" if number >= 1024 else "GiB"
        reason = "text needs a unit" if isinstance(value, str) else "a float needs a unit"
        if isinstance(value, Integral):
            reason = "an int counts bytes, and so few are probably a mistake"
        remedy = f'write "{number:.15g}{unit}"'
        if unit != "B":
            remedy += f'; "{number:.15g}B" would be {number:.15g} bytes'
    return ConfigError(f"{name}={value!r}", reason=reason, remedy=remedy)


def align(value: int, unit: int) -> int:
    """Round ``value`` up to a multiple of ``unit``."""
    return -(-value // unit) * unit


@dataclass(frozen=True)
class TransferConfig:
    """How state moves between host and device, and how host memory is allocated."""

    bucket_bytes: int | str | None = None
    """Bytes of state in one bucket, the unit of transfer and update. Each element counts as at
    least 4 bytes. ``None``: 128 MiB if updates overlap forward or backward, and device memory is
    at least a GiB or "auto" (``offload="all"``: 64 MiB if "auto"); else 32 MiB."""

    host_threads: int | None = None
    """Threads for updates on the CPU, on cores next to the device. ``None``: cores of this process
    / ranks on this host, regardless of ``OMP_NUM_THREADS``."""

    pin: Literal["require", "prefer", "never"] = "require"
    """``"require"``: page-locked host memory or an error. ``"prefer"``: fall back to pageable
    memory with a warning. ``"never"``: pageable. Without an accelerator nothing is pinned."""

    host_memory: int | str | None = None
    """Bytes of host memory that all objects of this package may use together, on all ranks of this
    host: one value for all. ``None``: the value of another object, else free memory or the cgroup's
    limit, whichever is smaller. ``host_memory=`` of an optimizer means the same."""

    def __post_init__(self) -> None:
        bucket_bytes = sized(self.bucket_bytes, "bucket_bytes", least_int=SMALL_BYTES)
        sized(self.host_memory, "host_memory")
        if bucket_bytes is not None and bucket_bytes < SMALL_BYTES:
            raise ConfigError(
                f"bucket_bytes={self.bucket_bytes!r}",
                reason="a bucket under 4 KiB cannot hold 64 elements of every kind of state",
                remedy='use at least "4KiB"; 16 MiB and more reach link speed',
            )
        threads = self.host_threads
        if threads is not None and (type(threads) is not int or threads < 1):
            raise ConfigError(
                f"host_threads={threads!r}",
                reason="updates on the CPU need at least one thread",
                remedy="pass an int of at least 1, or None for cores / local ranks",
            )
        check_choice(
            "pin", self.pin, _PINS, "page-locked memory is required, preferred, or never used"
        )


def checked_transfer(transfer: object) -> TransferConfig:
    """Return ``transfer``, or the default for None.

    Raises:
        ConfigError: ``transfer`` is something else.
    """
    if transfer is None or isinstance(transfer, TransferConfig):
        return transfer or TransferConfig()
    raise ConfigError(
        f"transfer={transfer!r}",
        reason="not a TransferConfig",
        remedy="pass fsdp_offload.TransferConfig(...) or None",
    )


@dataclass(frozen=True)
class OffloadConfig:
    """The arguments of :class:`HybridDeviceOptimizer`, checked together."""

    offload_fraction: float = 1.0
    device_memory: int | Literal["auto"] = "auto"
    """Device bytes that the optimizer may take, for slots and for state that stays."""
    update_on: str = "device"
    """Where offloaded state is updated: ``"device"`` as it streams through, or ``"host"`` on CPU
    cores."""
    overlap: str | None = None
    """None: ``"forward"`` if possible, else ``"step"``."""
    moments: torch.dtype | Literal["int8"] | None = None
    """How state tensors are stored between updates. ``None``: fp32 if the parameter has a master,
    else the shard's dtype, as torch does. bf16 and int8 (``exp_avg`` and ``exp_avg_sq``, with a
    scale per 64 elements) need an element-wise update in fp32 on the device. See
    ``docs/optimizers.md``."""
    master_weights: bool = True
    """Whether parameters with bf16 or fp16 shards get an fp32 master."""
    offload: str = "state"
    """Memory that may leave the device: ``"state"``, or ``"all"``: also weights and gradients."""
    transfer: TransferConfig = field(default_factory=TransferConfig)

    @classmethod
    def make(
        cls,
        *,
        offload_fraction: float | None = None,
        device_memory: int | str = "auto",
        host_memory: int | str | None = None,
        moments: torch.dtype | str | None = None,
        master_weights: bool = True,
        transfer: TransferConfig | None = None,
        **others: Any,
    ) -> OffloadConfig:
        """Check the user's arguments together; ``others`` are further fields.

        Raises:
            ConfigError: a value is out of range, unknown, or contradicts another.
        """
        memory: int | Literal["auto"] = "auto"
        if device_memory != "auto":
            memory = parse_bytes(device_memory, "device_memory")
        return cls(
            offload_fraction=1.0 if offload_fraction is None else offload_fraction,
            device_memory=memory,
            moments=_moments_meant(moments, master_weights),
            master_weights=master_weights,
            transfer=_with_host_memory(checked_transfer(transfer), host_memory),
            **others,
        )

    def __post_init__(self) -> None:
        fraction = self.offload_fraction
        is_number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
        if not is_number or not 0.0 <= fraction <= 1.0:  # also refuses NaN
            raise ConfigError(
                f"offload_fraction={fraction!r}",
                reason="it must be a number from 0 to 1",
                remedy="0 keeps all state on the device, 1 offloads all of it",
            )
        why = "state is updated on the device, or on the host's cores"
        check_choice("update_on", self.update_on, ("device", "host"), why)
        if self.moments is not None and self.update_on == "host":
            raise ConfigError(
                f"update_on='host' with moments={self.moments!r}",
                reason="updates on the CPU keep state in the update's dtype",
                remedy='use update_on="device", or leave moments out',
            )
        check_choice("offload", self.offload, OFFLOADS, "it says what may leave the device")
        check_choice("master_weights", self.master_weights, (True, False), "neither True nor False")
        why = "it says when updates run"
        check_choice("overlap", self.overlap, (None, *OVERLAPS), why)

    def compute_dtype(self, shard_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of updates and moments for a shard of ``shard_dtype``."""
        if self.master_weights and shard_dtype in (torch.bfloat16, torch.float16):
            return torch.float32
        return shard_dtype

    @property
    def first_device_bytes(self) -> int:
        """Device bytes for slots and buckets that stay, at the start; 0: the fewest slots."""
        if self.device_memory != "auto":
            return self.device_memory
        return 0 if self.overlap == "step" or self.offload == "all" else FIRST_DEVICE_BYTES

    @property
    def bucket_bytes(self) -> int:
        """Return the bytes of state in a bucket."""
        given = sized(self.transfer.bucket_bytes, least_int=SMALL_BYTES)
        if given is not None:
            return given
        # Large ones cost less host time, which launches of the model compete for, but more memory.
        if self.device_memory == "auto" and self.overlap != "step":
            return MEDIUM_BUCKET_BYTES if self.offload == "all" else LARGE_BUCKET_BYTES
        is_small = self.overlap == "step" or self.first_device_bytes < FIRST_DEVICE_BYTES
        return SMALL_BUCKET_BYTES if is_small else LARGE_BUCKET_BYTES


def _moments_meant(moments: object, master_weights: bool) -> torch.dtype | Literal["int8"] | None:
    if not isinstance(moments, Hashable) or moments not in MOMENTS:
        raise ConfigError(
            f"moments={moments!r}",
            reason="moments are stored in the update's dtype, in bf16, or in int8",
            remedy='use "fp32", "bf16", "int8", or a dtype',
        )
    if moments is not None and MOMENTS[moments] is None and not master_weights:
        raise ConfigError(
            f"moments={moments!r} with master_weights=False",
            reason="without a master, moments have the shard's dtype",
            remedy="pass only one of them",
        )
    return MOMENTS[moments]


def _with_host_memory(transfer: TransferConfig, host_memory: int | str | None) -> TransferConfig:
    if host_memory is None:
        return transfer
    if transfer.host_memory is not None:
        raise ConfigError(
            f"host_memory={host_memory!r} and {transfer.host_memory!r} in transfer",
            reason="both bound host memory",
            remedy="pass only one of them",
        )
    return replace(transfer, host_memory=host_memory)


def check_keywords(owner: str, unknown: Mapping[str, object], known: Iterable[str]) -> None:
    """Refuse keywords that the class called ``owner`` does not have.

    Raises:
        ConfigError: a field of :class:`TransferConfig`.
        TypeError: no such name anywhere; names the nearest one.
    """
    inner = [entry.name for entry in fields(TransferConfig)]
    for name, value in unknown.items():
        if name in inner:
            raise ConfigError(
                f"{name}={value!r}",
                reason="an option of TransferConfig",
                remedy=f"pass transfer=TransferConfig({name}={value!r})",
            )
        near = difflib.get_close_matches(name, [*known, *inner], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"{owner} has no argument {name!r}{hint}")
