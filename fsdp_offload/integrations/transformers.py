"""Support for the ``Trainer`` of transformers and its subclasses, such as TRL's ``SFTTrainer``."""

from __future__ import annotations

from typing import Any, TypeVar

from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import Trainer, TrainerCallback

from ..core.errors import ConfigError
from ..optimizer import HybridDeviceOptimizer

T = TypeVar("T", bound=Trainer)


def offload(trainer: T, **options: Any) -> T:
    """Wrap the optimizer of ``trainer`` as soon as Accelerate has sharded its model.

    The trainer loads a checkpoint after that, so a resumed run keeps its masters. Call this before
    ``trainer.train()``; returns ``trainer``.

    Args:
        trainer: any trainer that has Accelerate prepare its model and optimizer together.
        options: keywords of :class:`.HybridDeviceOptimizer`, such as ``offload="all"``.

    Raises:
        ConfigError: Accelerate prepared no optimizer (raised when training begins).
    """
    accelerator = trainer.accelerator
    prepare = accelerator.prepare

    def prepare_and_wrap(*given: Any, **settings: Any) -> Any:
        made = prepare(*given, **settings)
        several = made if isinstance(made, list | tuple) else [made]
        models = [each for each in several if isinstance(each, nn.Module)]
        for each in several:
            if models and isinstance(each, AcceleratedOptimizer):
                if not isinstance(each.optimizer, HybridDeviceOptimizer):  # by another train()
                    each.optimizer = HybridDeviceOptimizer(each.optimizer, models, **options)
        return made

    accelerator.prepare = prepare_and_wrap
    trainer.add_callback(_Check())
    return trainer


class _Check(TrainerCallback):  # type: ignore[misc]
    def on_train_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
        if not isinstance(getattr(optimizer, "optimizer", optimizer), HybridDeviceOptimizer):
            raise ConfigError(
                f"a trainer with an optimizer of type {type(optimizer).__name__}",
                reason="Accelerate did not prepare it together with a model",
                remedy="wrap it yourself: HybridDeviceOptimizer(optimizer, model)",
            )
