"""PEFT's LoRA in a script with FSDP2: adapters train, save and resume as without offload."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from fsdp_offload import HybridDeviceOptimizer, checkpoint
from tests.fsdp import models
from tests.helpers.ranks import RankPool
from tests.packages.test_trainer import make_model, rows

pytest.importorskip("peft", reason="peft is not installed")
Ranks = Callable[..., RankPool]


def train(offloads: bool, steps: range, load: str = "", save: str = "") -> list[float]:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    model: Any = get_peft_model(make_model(), adapters)
    mesh = models.flat_mesh(2)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=0.01, fused=True)
    if offloads:
        optimizer = HybridDeviceOptimizer(optimizer, model)
        models.check(optimizer.statistics().overlap == "forward", "beside the forward")
    if load:
        checkpoint.load(load, model, optimizer)
    seen = []
    for step in steps:
        ids = rows()[step]["input_ids"][None]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(trained, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        seen += [loss.item(), float(norm)]
    if save:
        checkpoint.save(save, model, optimizer)
    return seen


def test_adapters_train_and_resume_the_same(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks(2).run(train, False, range(5))
    assert ranks(2).run(train, True, range(5)) == expected
    for first in (False, True):
        path = str(tmp_path / str(first))
        ranks(2).run(train, first, range(3), save=path)
        for second in (False, True):
            found = ranks(2).run(train, second, range(3, 5), load=path)
            assert found == [seen[6:] for seen in expected], (first, second)
