"""Mistakes that first users made: each gets an error or a warning that says what to do.

Tests of the parts that they concern provoke the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_offload import (
    ConfigError,
    HybridDeviceOptimizer,
    NonFiniteGradientError,
    PhaseOffloader,
    TransferConfig,
    checkpoint,
)
from tests.helpers.training import assert_explains

PAGE = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text()


def made(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def saved(order: Callable[[str, Any, Any], tuple[Any, ...]], folder: Path) -> None:
    checkpoint.save(*order(str(folder / "one"), *made()))


def loaded(order: Callable[[str, Any, Any], tuple[Any, ...]], folder: Path) -> None:
    checkpoint.load(*order(str(folder / "one"), *made()))


def offloaded(*optimizer: Any, **options: Any) -> None:
    PhaseOffloader(made()[0], *optimizer, **options)


def wrapped(**options: Any) -> None:
    model, optimizer = made()
    HybridDeviceOptimizer(optimizer, model, **options)


MISTAKES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "overlap=True": (
        lambda _: wrapped(overlap=True),
        "when updates run",
        '"step" or "forward"',
    ),
    'update_on="cpu"': (lambda _: wrapped(update_on="cpu"), "on the device, or on the", '"host"'),
    'pin="no"': (lambda _: TransferConfig(pin="no"), "required, preferred", '"never"'),  # type: ignore[arg-type]
    'params="kep"': (lambda _: offloaded(params="kep"), "not one of", '"save" or "keep"'),
    'grads="none"': (lambda _: offloaded(grads="none"), "not one of", 'None or "drop"'),
    "keep_addresses=1": (lambda _: offloaded(keep_addresses=1), "not one of", "True or False"),
    "another model": (
        lambda _: offloaded(made()[1]),
        "parameters of another module",
        "the module that the optimizer",
    ),
    'transfer="8GiB"': (lambda _: offloaded(transfer="8GiB"), "not a Tr", "TransferConfig(...)"),
    "host_memory=": (
        lambda _: offloaded(host_memory="8GiB"),
        "option of TransferConfig",
        "transfer=TransferConfig(host_memory=",
    ),
    "keep_addresses=True": (
        lambda _: PhaseOffloader(*made(), keep_addresses=True),
        "an optimizer that has no state",
        "after the first step(), or",
    ),
    "save(path, optimizer, model)": (
        lambda folder: saved(lambda path, model, optimizer: (path, optimizer, model), folder),
        "optimizer of type Sequential: not a torch.optim.Optimizer",
        "path (if any), model, optimizer",
    ),
    "save(model, optimizer, path)": (
        lambda folder: saved(lambda path, model, optimizer: (model, optimizer, path), folder),
        "optimizer of type str: not a torch.optim.Optimizer",
        "path (if any), model, optimizer",
    ),
    "load(model, optimizer, path)": (
        lambda folder: loaded(lambda path, model, optimizer: (model, optimizer, path), folder),
        "optimizer of type str: not a torch.optim.Optimizer",
        "path (if any), model, optimizer",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_is_refused_with_reason_and_remedy(mistake: str, tmp_path: Path) -> None:
    provoke, reason, remedy = MISTAKES[mistake]
    with pytest.raises(ConfigError) as caught:
        provoke(tmp_path)
    assert_explains(caught.value, reason, remedy)
    assert os.listdir(tmp_path) == []


def test_moments_may_be_named_by_the_words_of_exports(tmp_path: Path) -> None:
    for moments in ("fp32", "bf16", "int8", torch.bfloat16):
        wrapped(moments=moments)
    with pytest.raises(ConfigError, match=r"weights are written in bf16 or fp32.*Remedy: use"):
        checkpoint.export_safetensors(tmp_path / "one", tmp_path / "out", dtype="fp8")


def test_fp16_gradients_overflow_as_with_torch() -> None:
    """Without an error in either; asked for, there is one."""
    found = []
    for wraps in (False, True):
        model, optimizer = made(torch.float16)
        if wraps:
            optimizer = HybridDeviceOptimizer(optimizer, model, master_weights=False)
        (model(torch.ones(1, 4, dtype=torch.float16)).sum() * 6e4 * 6e4).backward()
        optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
        assert not all(p.isfinite().all() for p in found[-1])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0, equal_nan=True)
    assert isinstance(optimizer, HybridDeviceOptimizer)
    with pytest.raises(NonFiniteGradientError, match="Remedy"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert "`NonFiniteGradientError`" in PAGE


def test_what_torch_says_stands_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/troubleshooting.md is searched by these texts."""
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError) as no_group:
        fully_shard(made()[0])
    model, optimizer = made(torch.float16)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 4, dtype=torch.float16)).sum()).backward()
    with pytest.raises(ValueError) as unscaled:
        scaler.unscale_(optimizer)
    for caught, text in (
        (no_group, "environment variable RANK expected, but not set"),
        (unscaled, "Attempting to unscale FP16 gradients."),
    ):
        assert text in str(caught.value)
        assert text in PAGE
