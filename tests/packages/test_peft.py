"""PEFT's LoRA in a script with FSDP2: adapters train, save and resume as without offload."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import fsdp_offload
from fsdp_offload import HybridDeviceOptimizer, checkpoint
from tests.fsdp import models
from tests.helpers.ranks import RankPool
from tests.packages.test_trainer import make_model, rows

pytest.importorskip("peft", reason="peft is not installed")
Ranks = Callable[..., RankPool]


def train(
    offloads: bool, steps: range, load: str = "", save: str = "", offload: str = "state"
) -> list[float]:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    model: Any = get_peft_model(make_model(), adapters)
    model = fsdp_offload.shard(model, mesh=models.flat_mesh(2))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=0.01, fused=True)
    if offloads:
        optimizer = HybridDeviceOptimizer(optimizer, model, offload=offload)
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
    assert ranks(2).run(train, True, range(5), offload="all") == expected
    for first in (False, True):
        path = str(tmp_path / str(first))
        ranks(2).run(train, first, range(3), save=path)
        for second in (False, True):
            found = ranks(2).run(train, second, range(3, 5), load=path)
            assert found == [seen[6:] for seen in expected], (first, second)


def save_adapter(folder: str) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    model: Any = fsdp_offload.shard(get_peft_model(make_model(), adapters))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW(trained), model, offload="all")
    ids = rows()[0]["input_ids"][None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=whole)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
        found = PeftModel.from_pretrained(make_model(), folder).state_dict()
        models.check(found.keys() == state.keys(), "names")
        for name, value in state.items():
            models.check_same(found[name], value, name)


def test_an_adapter_is_saved(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(save_adapter, str(tmp_path))
