"""Keep the optimizer state of FSDP2 models in host memory and update it as it streams through."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import checkpoint
    from .activations import (
        ActivationOffload,
        OffloadStatistics,
        PagedStash,
        StashPlan,
        StashStatistics,
    )
    from .checkpoint import OptimizerState
    from .core.config import TransferConfig
    from .core.errors import (
        ActivationError,
        AwayError,
        BusyError,
        CheckpointCorruptError,
        CheckpointError,
        ClosedError,
        ConfigError,
        DeviceError,
        DeviceMemoryError,
        HostMemoryError,
        LaneError,
        NonFiniteGradientError,
        OffloadError,
        PinningError,
        SpentGradientError,
        StashOverflowError,
        StateDictError,
        StateSchemaError,
        UnspentGradientError,
        UnsupportedOptimizerError,
        UnsupportedParameterError,
        UnsupportedTorchError,
    )
    from .core.sharding import shard
    from .optimizer.hybrid import HybridDeviceOptimizer
    from .optimizer.statistics import Statistics
    from .phases import FixedAddressRegion, PhaseOffloader, PhaseStatistics, RegionStatistics, swap

__version__ = "0.1.0"

__all__ = [
    "ActivationError",
    "ActivationOffload",
    "AwayError",
    "BusyError",
    "CheckpointCorruptError",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "DeviceError",
    "DeviceMemoryError",
    "FixedAddressRegion",
    "HostMemoryError",
    "HybridDeviceOptimizer",
    "LaneError",
    "NonFiniteGradientError",
    "OffloadError",
    "OffloadStatistics",
    "OptimizerState",
    "PagedStash",
    "PhaseOffloader",
    "PhaseStatistics",
    "PinningError",
    "RegionStatistics",
    "SpentGradientError",
    "StashOverflowError",
    "StashPlan",
    "StashStatistics",
    "StateDictError",
    "StateSchemaError",
    "Statistics",
    "TransferConfig",
    "UnspentGradientError",
    "UnsupportedOptimizerError",
    "UnsupportedParameterError",
    "UnsupportedTorchError",
    "checkpoint",
    "shard",
    "swap",
]

_MODULES = {
    "ActivationOffload": "activations",
    "FixedAddressRegion": "phases",
    "RegionStatistics": "phases",
    "HybridDeviceOptimizer": "optimizer.hybrid",
    "OffloadStatistics": "activations",
    "OptimizerState": "checkpoint",
    "PagedStash": "activations",
    "PhaseOffloader": "phases",
    "PhaseStatistics": "phases",
    "StashPlan": "activations",
    "StashStatistics": "activations",
    "Statistics": "optimizer.statistics",
    "shard": "core.sharding",
    "swap": "phases",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use, so that importing the package does not import torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name == "checkpoint":
        return import_module(".checkpoint", __name__)
    module = "core.errors" if name.endswith("Error") else _MODULES.get(name, "core.config")
    return getattr(import_module(f".{module}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
