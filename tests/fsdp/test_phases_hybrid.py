"""Phases of a :class:`HybridDeviceOptimizer`: every lane and overlap, masters, checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fsdp_offload import HybridDeviceOptimizer, PhaseOffloader, checkpoint
from tests.fsdp import models
from tests.fsdp.models import Toy, check, check_twins
from tests.fsdp.test_phases import away, check_values, refused, train, values
from tests.helpers.ranks import RankPool

Ranks = Callable[..., RankPool]
MIXED = ("host", "streamed", "resident")


def job(
    dtype: torch.dtype, overlap: str = "step", lanes: tuple[str, ...] = MIXED
) -> tuple[Toy, HybridDeviceOptimizer]:
    model = models.toy(models.flat_mesh(2), dtype=dtype)
    inner = torch.optim.AdamW(models.groups(model), fused=True)
    return model, models.wrap(inner, model, update_on=lanes, overlap=overlap)


def switch_after_every_step(dtype: torch.dtype, overlap: str, lanes: tuple[str, ...]) -> None:
    mine, twin = job(dtype, overlap, lanes), job(dtype, overlap, lanes)
    between = overlap != "backward"  # else gradients are spent by then
    phases = PhaseOffloader(*mine, grads="save" if between else "drop")
    for step in range(1, 5):
        for model, optimizer in (mine, twin):
            models.backward(model, step)
            if model is mine[0] and between:
                phases.offload(wait=False)
                phases.reload(wait=False)
            optimizer.step()
            if model is mine[0]:
                with phases.away():
                    check(away(model), "memory is left")
            optimizer.zero_grad()
    check_twins(mine[1], twin[1], f"{dtype} {overlap} {lanes}")
    phases.close()


@pytest.mark.parametrize(
    ("dtype", "overlap"), [(torch.bfloat16, "forward"), (torch.float32, "backward")]
)
def test_training_has_the_same_bits(ranks: Ranks, dtype: torch.dtype, overlap: str) -> None:
    ranks(2).run(switch_after_every_step, dtype, overlap, MIXED)


@pytest.mark.long
@pytest.mark.parametrize("lanes", [("host",), ("streamed",), ("resident",), MIXED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("overlap", ["step", "forward", "backward"])
def test_every_lane_has_the_same_bits(
    ranks: Ranks, lanes: tuple[str, ...], dtype: torch.dtype, overlap: str
) -> None:
    ranks(2).run(switch_after_every_step, dtype, overlap, lanes)


def checkpoints_while_away(path: Path, dtype: torch.dtype) -> None:
    mine = job(dtype)
    train(mine, range(1, 3))
    expected = values(mine)
    phases = PhaseOffloader(*mine)
    with phases.away():
        check_values(mine, expected, "get_state_dict")
        checkpoint.save(path / "own", *mine)
        future = checkpoint.async_save(path / "async", *mine)
    train(mine, range(4, 6))
    future.result()
    for name in ("own", "async"):
        other = job(dtype)
        train(other, range(7, 8))
        with PhaseOffloader(*other).away():
            refused(functools.partial(checkpoint.load, path / name, *other), "checkpoint.load()")
        checkpoint.load(path / name, *other)
        check_values(other, expected, name)
        train(other, range(4, 6))
        check_twins(other[1], mine[1], f"{name}, trained on")


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16]
)
def test_checkpoints_while_away(ranks: Ranks, tmp_path: Path, dtype: torch.dtype) -> None:
    ranks(2).run(checkpoints_while_away, tmp_path, dtype)
