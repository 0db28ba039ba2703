"""The optimizer of FSDP2 models away and back, between steps, in every overlap mode."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import functional as F

from fsdp_offload import AwayError, PhaseOffloader, SpentGradientError, TransferConfig, checkpoint
from tests.fsdp import models
from tests.fsdp.models import check, check_same, check_same_dicts, check_twins, local
from tests.helpers.ranks import RankPool

Ranks = Callable[..., RankPool]
MIXED = ("streamed", "host", "resident")
SMALL = TransferConfig(bucket_bytes=4096, slots=2, host_threads=1, prefetch_bytes=4 * 4096)
FP32, BF16 = torch.float32, torch.bfloat16


def loss_of(model: Any, step: int) -> Tensor:
    batch = models.tokens(step)
    return F.cross_entropy(model(batch).flatten(0, 1).float(), batch.roll(1, 1).flatten())


def make(size: int, overlap: str, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    model = models.toy(models.flat_mesh(size), dtype=dtype)
    plain = torch.optim.AdamW(models.groups(model, lr=0.02), weight_decay=0.1, fused=True)
    options.setdefault("update_on", MIXED)
    return model, models.wrap(plain, model, overlap=overlap, transfer=SMALL, **options)


def train(model: Any, optimizer: Any, step: int) -> None:
    loss_of(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def switch_after_every_step(size: int, overlap: str, dtype: torch.dtype, wait: bool) -> None:
    one, away = make(size, overlap, dtype)
    two, stays = make(size, overlap, dtype)
    for step in range(5):
        train(one, away, step)
        train(two, stays, step)
        away.offload(wait=wait)
        if step == 2:
            check_same_dicts(away.state_dict(), stays.state_dict(), "state while away")
            saved = get_optimizer_state_dict(one, away)
            check_same_dicts(saved, get_optimizer_state_dict(two, stays), "torch's state")
            with pytest.raises(AwayError):
                set_optimizer_state_dict(one, away, saved)
            saved = copy.deepcopy(saved)
        away.reload(wait=wait)
        if step == 2:
            set_optimizer_state_dict(one, away, saved)
    away.synchronize()
    check_twins(away, stays, f"{overlap}, {dtype}")
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        check_same(p.detach(), q.detach(), "a parameter")


@pytest.mark.parametrize("dtype", [pytest.param(FP32, marks=pytest.mark.long), BF16])
@pytest.mark.parametrize("overlap", ["step", "forward", "backward"])
def test_a_phase_switch_after_every_step(ranks: Ranks, overlap: str, dtype: torch.dtype) -> None:
    ranks(2).run(switch_after_every_step, 2, overlap, dtype, overlap != "step")


def on_one_rank() -> None:
    for overlap in ("step", "backward"):
        switch_after_every_step(1, overlap, BF16, False)


def test_one_rank(ranks: Ranks) -> None:
    ranks(2).run(on_one_rank)


def both_away(dtype: torch.dtype) -> None:
    """Uneven shards are parts of padded storages."""
    one, away = make(2, "forward", dtype)
    two, stays = make(2, "forward", dtype)
    phases = PhaseOffloader(one, away)
    for step in range(4):
        train(one, away, step)
        train(two, stays, step)
        stays.synchronize()  # its shards are read below
        phases.offload(wait=False)
        shown, expected = one.state_dict(), two.state_dict()
        for name, value in expected.items():
            check_same(local(shown[name]), local(value), f"{name} in host memory")
        check_same_dicts(away.state_dict(), stays.state_dict(), "state while away")
        phases.reload(wait=False)
    check_twins(away, stays, f"{dtype}")
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        check_same(p.detach(), q.detach(), "a parameter")


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_model_and_optimizer_away(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks(2).run(both_away, dtype)


def refuse_in_the_middle() -> None:
    model, optimizer = make(2, "backward", FP32)
    train(model, optimizer, 0)
    loss_of(model, 1).backward()
    with pytest.raises(SpentGradientError, match="step"):
        optimizer.offload()
    check(not optimizer.is_away, "it left")
    optimizer.step()
    optimizer.zero_grad()
    optimizer.offload()
    held = list(model.parameters())
    before = [p.detach().to_local().clone() for p in held]
    with pytest.raises(AwayError, match="backward"):
        loss_of(model, 2).backward()
    for parameter, value in zip(held, before, strict=True):
        check_same(parameter.detach().to_local(), value, "a shard")
    optimizer.reload()


def test_use_in_the_middle_is_refused(ranks: Ranks) -> None:
    ranks(2).run(refuse_in_the_middle)


def hold_nothing() -> None:
    """Gradients that gates and threads held are gone, and so is every slot."""
    model, optimizer = make(2, "forward", FP32)
    train(model, optimizer, 0)
    loss_of(model, 1).backward()
    gradients = [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
    check(gradients, "no gradients")
    optimizer.step()
    optimizer.zero_grad()
    optimizer.offload()
    gc.collect()
    check(all(ref() is None for ref in gradients), "a gradient is held")
    for segment in optimizer._reserved.engines:
        for tensor in segment.staging():
            check(tensor.untyped_storage().nbytes() == 0, "a staging buffer is held")
    optimizer.close()


def test_gradients_are_not_held(ranks: Ranks) -> None:
    ranks(2).run(hold_nothing)


def save_and_load(path: Path) -> None:
    one, away = make(2, "step", BF16)
    for step in range(2):
        train(one, away, step)
    checkpoint.save(path / "here", one, away)
    away.offload()
    checkpoint.save(path / "away", one, away)
    two, other = make(2, "step", BF16, offload_fraction=0.0, update_on="device")
    checkpoint.load(path / "away", two, other)
    away.reload()
    for step in range(2, 4):
        train(one, away, step)
        train(two, other, step)
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        check_same(p.detach(), q.detach(), "a parameter")
    names = [f.name for f in (path / "here").glob("*.distcp")]
    check(names, "nothing was saved")
    for name in names:
        same = (path / "here" / name).read_bytes() == (path / "away" / name).read_bytes()
        check(same, f"{name} differs")


def test_checkpoints_while_away(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(save_and_load, tmp_path)
