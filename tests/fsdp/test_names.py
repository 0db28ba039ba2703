"""FSDP2's private names: listed in one place, and tried where something is built on them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup

import fsdp_offload
from fsdp_offload import HybridDeviceOptimizer, PhaseOffloader, UnsupportedTorchError
from fsdp_offload.core import fsdp, fsdp_names
from tests.fsdp import models
from tests.fsdp.models import Ranks, check

PACKAGE = Path(fsdp_offload.__file__).parent


def build(*sizes: int) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = models.flat_mesh(*sizes) if len(sizes) == 1 else models.mesh(sizes, ("ddp", "fsdp"))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    return model


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters())


def find_all(*sizes: int) -> None:
    """Before the first forward, after a backward, and while others have replaced methods."""
    model = build(*sizes)
    fsdp_names.check_torch([model])
    optimizer = HybridDeviceOptimizer(adamw(model), model=model, overlap="backward")
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    fsdp_names.check_torch([model])
    offloader = PhaseOffloader(model, optimizer)
    with offloader.away():
        fsdp_names.check_torch([model])


@pytest.mark.parametrize("sizes", [(1,), (2,), (2, 1)], ids=str)
def test_names_are_there(ranks: Ranks, sizes: tuple[int, ...]) -> None:
    ranks(2).run(find_all, *sizes)


def refusal(build_on: Callable[[Any], object], model: Any) -> str:
    with pytest.raises(UnsupportedTorchError) as caught:
        build_on(model)
    check("torch 2.11, 2.13, 2.14, 2.15" in caught.value.remedy, f"remedy {caught.value.remedy}")
    return str(caught.value)


def takes_nothing(self: object) -> None:
    """Instead of a method with arguments."""


def refuse_others() -> None:
    def wrap(model: Any) -> object:
        return HybridDeviceOptimizer(adamw(model), model=model, overlap="step")

    for build_on in (wrap, PhaseOffloader):
        model = build(2)
        group = fsdp.fsdp_groups([model])[0][0]
        with mock.patch.object(group, "_post_reduce_event"):
            del group._post_reduce_event
            text = refusal(build_on, model)
            check("FSDPParamGroup._post_reduce_event: this private" in text, text)
            group._post_reduce_event = None
        with mock.patch.object(FSDPParamGroup, "unshard", takes_nothing):
            text = refusal(build_on, model)
            check("FSDPParamGroup.unshard: " in text and "1 arguments" in text, text)
        with mock.patch.object(FSDPParamGroup, "_partial_reduce_output", property(), create=True):
            text = refusal(build_on, model)
            check("FSDPParamGroup._partial_reduce_output" in text, text)
        with mock.patch.object(FSDPCommContext, "lazy_init"):
            text = refusal(build_on, model)
            check("FSDPCommContext.reduce_scatter_stream" in text, text)
        declared = {k: v for k, v in FSDPParam.__annotations__.items() if k != "_unsharded_param"}
        with mock.patch.object(FSDPParam, "__annotations__", declared):
            text = refusal(build_on, model)
            check("FSDPParam._unsharded_param: this private name" in text, text)
        build_on(model)


def test_a_version_without_a_name_is_refused_at_construction(ranks: Ranks) -> None:
    ranks(2).run(refuse_others)


def test_names_are_used_in_two_files_and_all_of_them_are_listed() -> None:
    listed = {name for each in fsdp_names.NAMES for name in (each.attribute, each.before)}
    files = [PACKAGE / "core" / name for name in ("fsdp.py", "fsdp_names.py")]
    text = "".join(file.read_text() for file in files)
    owners = "raw|group|state|_state|_state_ctx|context|comm_ctx|mesh_info|fsdp_param|streams"
    used = set(re.findall(rf"\b(?:{owners})(?=\.(\w+))", text)) - {
        "fsdp_groups", "grad", "lazy_init", "__dict__", "parameters",
    }  # fmt: skip
    assert {"comm_ctx", "unsharded_accumulated_grad", "is_last_backward", "_state_ctx"} <= used
    assert used <= listed
    private = re.compile(rf"\.(?:{'|'.join(n for n in listed if n.startswith('_'))}|comm_ctx)\b")
    others = [p for p in PACKAGE.rglob("*.py") if p not in files]
    assert [str(p) for p in others if private.search(p.read_text())] == []


@pytest.mark.parametrize(
    ("version", "warnings"), [("2.15.3+cu132", 0), ("2.16.0.dev20261101", 1), ("3.0.0", 1)]
)
def test_one_warning_of_a_newer_torch(
    version: str,
    warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    fsdp_names._warn_if_newer.cache_clear()
    model = nn.Linear(3, 2)
    HybridDeviceOptimizer(adamw(model), model=model).close()
    PhaseOffloader(model).close()
    found = [record.getMessage() for record in caplog.records if "newer" in record.getMessage()]
    assert len(found) == warnings
    assert all(f"torch {version}" in text and "2.11, 2.13, 2.14, 2.15" in text for text in found)
