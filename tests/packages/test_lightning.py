"""Lightning's ``ModelParallelStrategy``: wrapped after the strategy has moved what optimizers hold
to the device, it trains as without."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from fsdp_offload import HybridDeviceOptimizer
from tests.fsdp import models
from tests.fsdp.models import check
from tests.helpers.ranks import RankPool
from tests.packages.gloo_trainers import Model, batch, loss_of

pytest.importorskip("lightning", reason="lightning is not installed")
Ranks = Callable[..., RankPool]
STEPS = 5


def make_module(way: str, options: dict[str, Any]) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def configure_model(self) -> None:
            if hasattr(self, "model"):
                return
            self.model, mesh = Model(), models.flat_mesh(2)
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

        def training_step(self, tokens: Any, index: int) -> Any:
            loss = loss_of(self.model(tokens), tokens)
            self.seen.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.01)
            if way == "inside":
                optimizer = HybridDeviceOptimizer(optimizer, self, **options)
            return optimizer

    return Module()


def make_strategy(way: str, full: bool, options: dict[str, Any]) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    from fsdp_offload.integrations.lightning import OffloadStrategy

    if way == "strategy":
        return OffloadStrategy(options, save_distributed_checkpoint=not full)
    return ModelParallelStrategy(save_distributed_checkpoint=not full)


def train(
    way: str,
    *,
    steps: int = STEPS,
    save: str = "",
    load: str | None = None,
    full: bool = False,
    **options: Any,
) -> list[float]:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    exported = {"TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    with mock.patch.dict(os.environ, exported), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=make_strategy(way, full, options),
            plugins=[TorchElasticEnvironment()],
            max_steps=steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        module = make_module(way, options)
        data = torch.utils.data.DataLoader([batch(i) for i in range(8)], None)
        trainer.fit(module, data, ckpt_path=load)
        if save:
            trainer.save_checkpoint(save)
    if way != "plain":
        made = trainer.strategy.optimizers[0].statistics().steps
        check(made == len(module.seen), f"{made} steps")
    return module.seen


def test_smoke(ranks: Ranks) -> None:
    assert ranks(2).run(train, "strategy") == ranks(2).run(train, "plain")


@pytest.mark.long
@pytest.mark.parametrize("full", [False, True])
def test_checkpoints_resume(ranks: Ranks, tmp_path: Path, full: bool) -> None:
    """Lightning's own resume begins with the first batch again, so a plain one is compared."""
    for first in ("plain", "strategy"):
        ranks(2).run(train, first, steps=3, save=str(tmp_path / first), full=full)
    load = str(tmp_path / "plain")
    expected = ranks(2).run(train, "plain", load=load, full=full)
    assert len(expected[0]) == STEPS - 3
    for first, second in (("strategy", "strategy"), ("plain", "strategy"), ("strategy", "plain")):
        found = ranks(2).run(train, second, load=str(tmp_path / first), full=full)
        assert found == expected, (first, second)


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "overlap"),
    [("inside", "step"), ("strategy", "step"), ("strategy", "forward"), ("strategy", "backward")],
)
def test_training_is_the_same(ranks: Ranks, way: str, overlap: str) -> None:
    expected = ranks(2).run(train, "plain")
    assert len(expected[0]) == STEPS
    assert ranks(2).run(train, way, overlap=overlap) == expected
