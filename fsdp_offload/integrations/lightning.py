"""A ``ModelParallelStrategy`` of Lightning, for modules that ``configure_model`` shards."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy

from ..optimizer import HybridDeviceOptimizer


class OffloadStrategy(ModelParallelStrategy):  # type: ignore[misc]
    """Wraps each optimizer after Lightning has moved optimizer state to the device.

    Lightning would move all state of a wrapper that ``configure_optimizers`` returned.

    Args:
        options: keywords of :class:`.HybridDeviceOptimizer`, such as ``{"offload": "all"}``.
        settings: keywords of ``ModelParallelStrategy``.
    """

    optimizers: Any  # a property of the strategy

    def __init__(self, options: dict[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._options = options or {}

    def setup(self, trainer: Trainer) -> None:
        """Wrap the optimizers that ``configure_optimizers`` returned."""
        super().setup(trainer)
        module, options = self.lightning_module, self._options
        self.optimizers = [HybridDeviceOptimizer(o, module, **options) for o in self.optimizers]
