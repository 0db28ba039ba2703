"""What tests of the plan and of the pipeline share."""

from __future__ import annotations

from typing import Any

from fsdp_offload.core.config import OffloadConfig


def config(update_on: Any = "device", **given: Any) -> OffloadConfig:
    return OffloadConfig.make(**{"update_on": update_on, "overlap": "step", **given})
