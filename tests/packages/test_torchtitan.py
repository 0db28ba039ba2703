"""torchtitan's containers, clipping and checkpoint manager over an FSDP2 model: with wrapped
optimizers in the container they train and resume as without.

Its Trainer needs a GPU (a device module, Triton, flex attention), so the loop of its ``train_step``
is written out here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from fsdp_offload import HybridDeviceOptimizer
from tests.fsdp import models
from tests.helpers.ranks import RankPool
from tests.packages.gloo_trainers import Model, batch, loss_of

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
Ranks = Callable[..., RankPool]


def container(model: Any, wrap: bool, options: dict[str, Any]) -> Any:
    """As ``Trainer`` builds it from ``config.optimizer``: two optimizers."""
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    class Offloaded(OptimizersContainer):
        @dataclass(kw_only=True, slots=True)
        class Config(OptimizersContainer.Config):
            pass

        def __init__(self, config: Any, *, model_parts: list[Any]) -> None:
            super().__init__(config, model_parts=model_parts)
            self.optimizers = [
                HybridDeviceOptimizer(optimizer, model_parts, **options)
                for optimizer in self.optimizers
            ]

    settings = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs=settings)
        for pattern, name in ((r"blocks\.", "AdamW"), (r".*", "Adam"))
    ]
    cls = Offloaded if wrap else OptimizersContainer
    return cls.Config(param_groups=groups, implementation="fused").build(model_parts=[model])


def train(
    wrap: bool,
    steps: Sequence[int],
    folder: str = "",
    *,
    dtype: torch.dtype = torch.float32,
    mode: str = "disabled",
    load: int = -1,
    save: int = -1,
    micros: int = 2,
    **options: Any,
) -> list[float]:
    """Losses, norms and rates, as ``Trainer.train_step`` comes to them."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer
    from torchtitan.distributed.utils import clip_grad_norm_

    model, mesh = Model().to(dtype), models.flat_mesh(2)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = container(model, wrap, options)
    rates = LRSchedulersContainer.Config(warmup_steps=2).build(
        optimizers=optimizers, training_steps=8
    )
    manager = CheckpointManager.Config(
        enable=bool(folder), folder="saved", interval=1, async_mode=mode
    ).build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=rates,
        states={},
        sd_adapter=None,
        base_folder=folder,
    )
    if load >= 0:
        manager.load(step=load)
    seen: list[float] = []
    for step in steps:
        optimizers.zero_grad()
        for micro in range(micros):
            tokens = batch(10 * step + micro)
            loss = loss_of(model(tokens), tokens) / micros
            loss.backward()
            seen.append(loss.item())
        seen.append(float(clip_grad_norm_(list(model.parameters()), 0.5, foreach=True)))
        if folder:
            manager.maybe_wait_for_staging()
        optimizers.step()
        rates.step()
        seen += [float(group["lr"]) for each in optimizers for group in each.param_groups]
        if step == save:
            manager.save(curr_step=step)
    if folder:
        manager.maybe_wait_for_saving()
        manager.close()
    dist.barrier()
    return seen


def test_smoke(ranks: Ranks) -> None:
    assert ranks(2).run(train, True, range(2)) == ranks(2).run(train, False, range(2))


@pytest.mark.long
@pytest.mark.parametrize("overlap", ["step", "forward"])
def test_training_is_the_same(ranks: Ranks, overlap: str) -> None:
    expected = ranks(2).run(train, False, range(5))
    assert ranks(2).run(train, True, range(5), overlap=overlap) == expected


@pytest.mark.long
@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)], ids=str)
def test_checkpoints_resume(
    ranks: Ranks, tmp_path: Path, first: bool, second: bool, mode: str
) -> None:
    folder = str(tmp_path)
    whole = ranks(2).run(train, False, range(5))
    options = ({}, {"overlap": "forward"})
    ranks(2).run(train, first, range(5), folder, mode=mode, save=2, **options[first])
    found = ranks(2).run(train, second, range(3, 5), folder, load=2, **options[second])
    for mine, theirs in zip(found, whole, strict=True):
        assert mine == theirs[-len(mine) :]


def clipped_in_backward() -> str:
    try:
        train(True, range(2), overlap="backward", micros=1)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.long
def test_clipping_after_updates_in_backward_says_which_overlap_to_use(ranks: Ranks) -> None:
    for said in ranks(2).run(clipped_in_backward):
        assert said.startswith("SpentGradientError")
        assert 'use overlap="forward"' in said


def load_plain(folder: str, **options: Any) -> str:
    try:
        train(True, [], folder, dtype=torch.bfloat16, load=2, **options)
    except BaseException as error:  # DCP's derives from it
        return str(error)
    return ""


@pytest.mark.long
def test_bf16_shards(ranks: Ranks, tmp_path: Path) -> None:
    """With masters, ours resume exactly; a plain checkpoint needs ``master="none"``, which is the
    arithmetic of the job that has saved it."""
    half: dict[str, Any] = {"dtype": torch.bfloat16}
    whole = ranks(2).run(train, True, range(5), str(tmp_path / "ours"), save=2, **half)
    found = ranks(2).run(train, True, range(3, 5), str(tmp_path / "ours"), load=2, **half)
    for mine, theirs in zip(found, whole, strict=True):
        assert mine == theirs[-len(mine) :]
    plain = str(tmp_path / "plain")
    whole = ranks(2).run(train, False, range(5), plain, save=2, **half)
    for said in ranks(2).run(load_plain, plain):
        assert "Missing key" in said
    half["master_weights"] = False
    found = ranks(2).run(train, True, range(3, 5), plain, load=2, **half)
    for mine, theirs in zip(found, whole, strict=True):
        assert mine == theirs[-len(mine) :]
