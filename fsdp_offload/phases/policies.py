"""What becomes of each kind of memory: checked when it is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..errors import ConfigError

_CHOICES: Final = {
    "params": ("save", "keep"),
    "grads": (None, "drop", "save", "keep"),
    "state": ("save", "keep"),
    "on_use": ("error", "reload"),
    "fixed_address": ("state", True, False),
}


@dataclass(frozen=True)
class Policies:
    """One word per kind; see :class:`fsdp_offload.phases.PhaseOffloader`."""

    params: str = "save"
    grads: str | None = None
    state: str = "save"
    on_use: str = "error"
    fixed_address: bool | str = "state"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices or not isinstance(value, str | bool | None):  # 1 is no True
                raise ConfigError(
                    f"{name}={value!r}",
                    reason="unknown choice",
                    remedy="use " + " or ".join(map(_quoted, choices)),
                )

    def are_fixed(self, kind: str) -> bool:
        """Whether its addresses are to stay. Gradients are new in each iteration."""
        if kind == "grads" or getattr(self, kind) == "keep":
            return False
        return self.fixed_address is True or self.fixed_address == kind


def _quoted(choice: object) -> str:
    return f'"{choice}"' if isinstance(choice, str) else str(choice)
