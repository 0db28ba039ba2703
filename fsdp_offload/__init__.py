"""Optimizer state of FSDP2 models in host memory, updated while it travels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import PrecisionConfig, TransferConfig
    from .errors import (
        CheckpointCorruptError,
        CheckpointError,
        ClosedError,
        ConfigError,
        DeviceError,
        HostMemoryError,
        LaneError,
        OffloadError,
        PinningError,
        StateDictError,
        StateSchemaError,
        UnsupportedOptimizerError,
        UnsupportedParameterError,
    )
    from .optimizer import HybridDeviceOptimizer
    from .report import Statistics

__version__ = "0.1.0"

__all__ = [
    "CheckpointCorruptError",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "DeviceError",
    "HostMemoryError",
    "HybridDeviceOptimizer",
    "LaneError",
    "OffloadError",
    "PinningError",
    "PrecisionConfig",
    "StateDictError",
    "StateSchemaError",
    "Statistics",
    "TransferConfig",
    "UnsupportedOptimizerError",
    "UnsupportedParameterError",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: importing the package does not import torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    modules = {"HybridDeviceOptimizer": "optimizer", "Statistics": "report"}
    module = "errors" if name.endswith("Error") else modules.get(name, "config")
    return getattr(import_module(f".{module}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
