"""Accelerate with FSDP2: wrapped after and before ``prepare``, it trains as without."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_offload import ConfigError, HybridDeviceOptimizer
from tests.fsdp.models import check
from tests.helpers.ranks import RankPool
from tests.packages.gloo_trainers import Model, accelerate_with_fsdp2, batch, forgetting, loss_of

pytest.importorskip("accelerate", reason="accelerate is not installed")
Ranks = Callable[..., RankPool]


def make_accelerator(full: bool, scaled: bool) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type="FULL_STATE_DICT" if full else "SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
        reshard_after_forward=True,
    )
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=2)
    assert accelerator.is_fsdp2
    if scaled:  # Accelerate makes none on the CPU
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    return accelerator


def prepared(accelerator: Any, way: str, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """Model and optimizer as the script goes on with them."""
    model = Model().to(dtype)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if way == "before":
        optimizer = HybridDeviceOptimizer(optimizer, model, **options)
    model, optimizer = accelerator.prepare(model, optimizer)
    if way == "after":
        optimizer.optimizer = HybridDeviceOptimizer(optimizer.optimizer, model, **options)
    return model, optimizer


def train(
    way: str,
    steps: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    full: bool = False,
    scaled: bool = False,
    clip: bool = True,
    load: str = "",
    save: str = "",
    **options: Any,
) -> list[float]:
    """Losses, norms, and a loss at the end."""
    with accelerate_with_fsdp2():
        accelerator = make_accelerator(full, scaled)
        model, optimizer = prepared(accelerator, way, dtype, options)
        if load:
            accelerator.load_state(load)
        if way == "loaded":
            optimizer.optimizer = HybridDeviceOptimizer(optimizer.optimizer, model, **options)
        seen = []
        for step in steps:
            for micro in range(2):
                with accelerator.accumulate(model):
                    tokens = batch(10 * step + micro)
                    loss = loss_of(model(tokens), tokens)
                    seen.append(loss.item())
                    accelerator.backward(loss)
                    if clip and accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                        seen.append(float(norm))
                    optimizer.step()
                    optimizer.zero_grad()
        if way != "plain":
            made = optimizer.optimizer.statistics().steps
            check(made == len(steps), f"{made} steps")
        if save:
            accelerator.save_state(save)
        seen.append(loss_of(model(batch(99)), batch(99)).item())
    return seen


def test_smoke(ranks: Ranks) -> None:
    expected = ranks(2).run(train, "plain", range(2))
    assert ranks(2).run(train, "after", range(2), overlap="forward") == expected


@pytest.mark.long
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize(
    ("way", "overlap"), [("before", "step"), ("after", "step"), ("after", "forward")]
)
def test_training_is_the_same(ranks: Ranks, way: str, overlap: str, scaled: bool) -> None:
    expected = ranks(2).run(train, "plain", range(4), scaled=scaled)
    assert ranks(2).run(train, way, range(4), scaled=scaled, overlap=overlap) == expected


@pytest.mark.long
def test_updates_in_backward_are_the_same_without_clipping(ranks: Ranks) -> None:
    expected = ranks(2).run(train, "plain", range(4), clip=False)
    assert ranks(2).run(train, "after", range(4), clip=False, overlap="backward") == expected


def save_and_go_on(
    tmp: str, first: str, second: str, full: bool
) -> tuple[list[float], list[float]]:
    """Losses after a resume, and those of the plain optimizer."""
    for way in {first, "plain"}:
        train(way, range(3), save=f"{tmp}/{way}", full=full)
    expected = train("plain", range(3, 5), load=f"{tmp}/plain", full=full)
    return train(second, range(3, 5), load=f"{tmp}/{first}", full=full), expected


@pytest.mark.long
@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@pytest.mark.parametrize(
    ("first", "second"),
    [("after", "after"), ("before", "before"), ("plain", "after"), ("before", "plain")],
)
def test_checkpoints_of_accelerate_resume(
    ranks: Ranks, tmp_path: Path, first: str, second: str, full: bool
) -> None:
    answers = ranks(2).run(save_and_go_on, str(tmp_path), first, second, full)
    for found, expected in answers:
        assert found == expected


def half(folder: str, way: str, full: bool) -> list[float]:
    """Losses of bf16 shards after a resume."""
    train(way, range(3), dtype=torch.bfloat16, full=full, save=folder)
    return train(way, range(3, 5), dtype=torch.bfloat16, full=full, load=folder)


@pytest.mark.long
@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@pytest.mark.parametrize("way", ["after", "before"])
def test_bf16_checkpoints_of_accelerate_keep_the_master(
    ranks: Ranks, tmp_path: Path, way: str, full: bool
) -> None:
    whole = ranks(2).run(train, way, range(5), dtype=torch.bfloat16)
    resumed = ranks(2).run(half, str(tmp_path), way, full)
    for all_of_them, found in zip(whole, resumed, strict=True):
        assert found == all_of_them[-len(found) :]


def plain_into_ours(tmp: str) -> tuple[str, list[float], list[float]]:
    """A strict load's error; losses when the script loads first and then wraps; plain ones."""
    folder = f"{tmp}/plain"
    kept: dict[str, Any] = {"dtype": torch.bfloat16, "load": folder}
    train("plain", range(3), dtype=torch.bfloat16, save=folder)
    said = ""
    try:
        train("after", range(3, 5), **kept)
    except BaseException as error:  # DCP's derives from it
        said = str(error)
    return said, train("loaded", range(3, 5), **kept), train("plain", range(3, 5), **kept)


@pytest.mark.long
def test_a_plain_bf16_checkpoint_is_loaded_before_wrapping(ranks: Ranks, tmp_path: Path) -> None:
    for said, loaded, plain in ranks(2).run(plain_into_ours, str(tmp_path)):
        assert "Missing key" in said
        assert "master_remainder" in said
        assert loaded[0] == plain[0]
        assert loaded == pytest.approx(plain, abs=0.05)


def refused() -> None:
    with accelerate_with_fsdp2():
        model, optimizer = prepared(make_accelerator(False, False), "plain", torch.float32, {})
        line = "optimizer.optimizer = HybridDeviceOptimizer(optimizer.optimizer, model)"
        try:
            HybridDeviceOptimizer(optimizer, model)
        except ConfigError as error:
            check(line in str(error), str(error))
        else:
            raise AssertionError("AcceleratedOptimizer was not refused")
        exec(line, {"HybridDeviceOptimizer": HybridDeviceOptimizer}, locals())
        check(isinstance(optimizer.optimizer, HybridDeviceOptimizer), "the line works")
    plain = Model()
    inner = torch.optim.AdamW(plain.parameters())
    try:
        HybridDeviceOptimizer(inner, plain, overlap="forward")
    except ConfigError as error:
        check("without an FSDP2 module" in str(error), str(error))
    else:
        raise AssertionError("overlap before prepare was not refused")


@pytest.mark.long
def test_the_accelerated_optimizer_and_overlap_before_prepare_are_refused(ranks: Ranks) -> None:
    ranks(2).run(refused)


def train_without_fsdp(wraps: bool) -> list[float]:
    from accelerate import Accelerator

    exported = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # asked for, and not used
    with forgetting(), mock.patch.dict(os.environ, exported):
        accelerator = Accelerator(cpu=True)
        model: Any = Model()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = accelerator.prepare(model, optimizer)
        if wraps:
            optimizer.optimizer = HybridDeviceOptimizer(optimizer.optimizer, model)
        seen = []
        for step in range(4):
            loss = loss_of(model(batch(step)), batch(step))
            accelerator.backward(loss)
            seen += [loss.item(), float(accelerator.clip_grad_norm_(model.parameters(), 0.5))]
            optimizer.step()
            optimizer.zero_grad()
    return seen


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
def test_one_process_and_ddp(ranks: Ranks, size: int) -> None:
    expected = ranks(size).run(train_without_fsdp, False)
    assert ranks(size).run(train_without_fsdp, True) == expected
