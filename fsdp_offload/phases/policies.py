"""What becomes of each kind of memory: checked when it is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..errors import ConfigError

_CHOICES: Final = {
    "params": ("save", "rebuild", "keep"),
    "grads": ("drop", "save", "keep"),
    "state": ("save", "keep"),
    "on_use": ("error", "reload"),
}


@dataclass(frozen=True)
class Policies:
    """One word per kind; see :class:`fsdp_offload.phases.PhaseOffloader`."""

    params: str = "save"
    grads: str = "drop"
    state: str = "save"
    on_use: str = "error"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(
                    f"{name}={value!r}",
                    reason="unknown choice",
                    remedy="use " + " or ".join(f'"{choice}"' for choice in choices),
                )
