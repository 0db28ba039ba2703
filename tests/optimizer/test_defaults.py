"""What the one line chooses, where nothing is said."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_offload import HybridDeviceOptimizer
from tests.fsdp import models
from tests.fsdp.models import Ranks
from tests.helpers.own_optimizers import Lion


def test_there_are_few_options() -> None:
    parameters = inspect.signature(HybridDeviceOptimizer).parameters
    assert list(parameters) == [
        "optimizer", "model", "offload", "elementwise", "device_memory", "host_memory", "overlap",
        "update_on", "moments", "master_weights", "offload_fraction", "transfer", "unknown",
    ]  # fmt: skip


@pytest.mark.parametrize("overlap", [None, "step"])
def test_plain_modules_are_updated_in_the_step(
    overlap: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fsdp_offload")
    model = nn.Linear(4, 4)
    plain = torch.optim.AdamW(model.parameters())
    optimizer = HybridDeviceOptimizer(plain, model, overlap=overlap)
    assert optimizer.statistics().overlap == "step"
    assert ("by fsdp_offload.shard(model)" in caplog.text) == (overlap is None)


def chosen(how: str) -> str:
    """``overlap`` of an FSDP2 model whose optimizer or model is special."""
    model: Any = models.toy(models.flat_mesh(dist.get_world_size()))
    parameters: list[Any] = [p for p in model.parameters() if p.requires_grad]
    cls: Any = torch.optim.AdamW
    given: Any = model
    options: dict[str, Any] = {}
    if how == "a parameter of no module":
        parameters.append(nn.Parameter(torch.ones(3)))
    elif how == "no model":
        given = None
    elif how == "a class of one's own":
        cls = Lion
    elif how == "and it is elementwise":
        cls, options = Lion, {"elementwise": True}
    elif how == "a part of the model":
        parameters = parameters[:2]
    elif how == "said":
        options = {"overlap": "step"}
    optimizer = HybridDeviceOptimizer(cls(parameters, lr=0.01), given, **options)
    found = str(optimizer.statistics().overlap)
    optimizer.close()
    return found


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("usual", "forward"),
        ("a part of the model", "forward"),
        ("a parameter of no module", "step"),
        ("no model", "step"),
        ("a class of one's own", "step"),
        ("and it is elementwise", "step"),
        ("said", "step"),
    ],
)
def test_fsdp2_modules_are_updated_beside_the_forward(
    ranks: Ranks, how: str, expected: str
) -> None:
    assert ranks(2).run(chosen, how) == [expected] * 2
