"""Names of rows: what a row trains with, read from its name.

``plain`` is the optimizer on the device. ``step``, ``forward`` and ``backward`` are ours with that
``overlap``. Peers are named in :mod:`.peers`. Words joined by ``-`` change a row:

========================  ====================================================================
``clip``                  clip every iteration: ours with ``optimizer.clip_grad_norm_``
``torchclip``             clip with ``torch.nn.utils.clip_grad_norm_``
``bf16``, ``int8``        moments in that precision
``nearest``,
``stochastic``            how bf16 moments are rounded
``host``, ``auto``        ``update_on``; without them ``"device"``
``h0.2``                  that share of the state in the host lane, the rest streamed
``f0.5``                  ``offload_fraction``
``p4GiB``                 ``TransferConfig(prefetch_bytes=...)``
``b64MiB``, ``s6``        ``TransferConfig(bucket_bytes=..., slots=...)``
``t8``                    ``TransferConfig(host_threads=...)``
``again``                 nothing: the row once more, to see how much the machine drifts
========================  ====================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ..config import parse_bytes
from ..errors import ConfigError

OURS: Final = ("step", "forward", "backward")
PEERS: Final = ("cpuoffload", "torchao", "deepspeed", "megatron")
MAX_NORM: Final = 1.0
DEFAULT_ROWS: Final = (
    "plain",
    "plain-clip",
    "step",
    "forward",
    "backward",
    "step-clip",
    "forward-clip",
    "forward-clip-p4GiB",
    "forward-torchclip",
    "backward-bf16",
    "backward-int8",
    "step-host",
    "forward-host",
    "backward-host",
    "backward-auto",
    *PEERS,
)
_WORDS: Final = {
    "clip": ("clip", "ours"),
    "torchclip": ("clip", "torch"),
    "bf16": ("moments", "bf16"),
    "int8": ("moments", "int8"),
    "nearest": ("rounding", "nearest"),
    "stochastic": ("rounding", "stochastic"),
    "host": ("update_on", "host"),
    "auto": ("update_on", "auto"),
    "again": ("again", True),
}


@dataclass(frozen=True)
class Case:
    """One row, checked when it is made."""

    name: str
    kind: str
    """``"plain"``, one of :data:`OURS`, or one of :data:`PEERS`."""
    clip: str = "none"
    """``"none"``, ``"ours"`` or ``"torch"``."""
    moments: str | None = None
    """``None`` (fp32 beside a master, else the shards' dtype), ``"bf16"`` or ``"int8"``."""
    rounding: str | None = None
    update_on: str = "device"
    offload_fraction: float = 1.0
    host_share: float = 0.0
    bucket_bytes: int | None = None
    slots: int | None = None
    host_threads: int | None = None
    prefetch_bytes: int | None = None
    again: bool = False

    @classmethod
    def parse(cls, name: str, **defaults: Any) -> Case:
        """The case that ``name`` means; ``defaults`` hold unless a word says otherwise.

        Raises:
            ConfigError: a word is unknown, or does not go with the kind of row.
        """
        kind, *words = name.split("-")
        chosen = dict(defaults)
        for word in words:
            key, value = cls._read(name, word)
            chosen[key] = value
        return cls(name=name, kind=kind, **chosen)

    @staticmethod
    def _read(name: str, word: str) -> tuple[str, Any]:
        if word in _WORDS:
            return _WORDS[word]
        head, rest = word[:1], word[1:]
        try:
            if head in ("f", "h"):
                return "offload_fraction" if head == "f" else "host_share", float(rest)
            if head in ("s", "t"):
                return "slots" if head == "s" else "host_threads", int(rest)
            if head in ("p", "b"):
                key = "prefetch_bytes" if head == "p" else "bucket_bytes"
                return key, parse_bytes(rest, word)
        except ValueError:  # a ConfigError is one, too
            pass
        raise ConfigError(
            f"row {name!r}",
            reason=f"the word {word!r} is unknown",
            remedy=f"use {', '.join(_WORDS)}, h0.2, f0.5, p4GiB, b64MiB, s6 or t8",
        )

    def __post_init__(self) -> None:
        kinds = ("plain", *OURS, *PEERS)
        if self.kind not in kinds:
            raise ConfigError(
                f"row {self.name!r}",
                reason=f"{self.kind!r} is no kind of row",
                remedy=f"begin with one of {', '.join(kinds)}",
            )
        is_ours = self.kind in OURS
        special = self.moments or self.rounding or self.update_on != "device" or self.host_share
        if not is_ours and (special or self.offload_fraction != 1.0):
            raise ConfigError(
                f"row {self.name!r}",
                reason="only rows of ours have lanes and precisions",
                remedy=f"begin with one of {', '.join(OURS)}",
            )

    @property
    def is_ours(self) -> bool:
        """Whether the row uses :class:`HybridDeviceOptimizer`."""
        return self.kind in OURS

    def same_bits_as(self, shards: str) -> tuple[object, ...] | None:
        """Rows with the same key promise the same losses, bit for bit; ``None`` promises nothing.

        Args:
            shards: ``"fp32"`` shards are updated alike with and without us; ``"bf16"`` ones have
                a master only with us.
        """
        clips = self.clip != "none"
        if self.kind == "plain":
            return (clips, None, None, "device") if shards == "fp32" else (clips, "no master")
        if not self.is_ours or self.update_on == "auto" or self.host_share:
            return None
        if self.update_on == "host" and self.offload_fraction < 1.0:
            return None  # two kernels, CPU and device, take part
        return (clips, self.moments, self.rounding, self.update_on)

    @property
    def transfer(self) -> dict[str, Any]:
        """Arguments for :class:`TransferConfig`: only what was chosen."""
        names = ("bucket_bytes", "slots", "prefetch_bytes", "host_threads")
        return {n: v for n in names if (v := getattr(self, n)) is not None}

    @property
    def precision(self) -> dict[str, Any]:
        """Arguments for :class:`PrecisionConfig`: only what was chosen."""
        import torch

        found: dict[str, Any] = {}
        if self.moments is not None:
            found["moments"] = torch.bfloat16 if self.moments == "bf16" else self.moments
        if self.rounding is not None:
            found["rounding"] = self.rounding
        return found
