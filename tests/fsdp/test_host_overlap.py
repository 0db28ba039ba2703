"""The host lane beside forward and backward: the bits of torch's CPU kernel, clipping included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from fsdp_offload.core.errors import LaneError
from fsdp_offload.pipeline import host
from tests.fsdp import models
from tests.fsdp.models import check
from tests.helpers.ranks import RankPool

Ranks = Callable[..., RankPool]
SMALL = TransferConfig(bucket_bytes=4096, slots=2, host_threads=2)
STEPS = 6
LANES = ("host", "streamed", "resident")


def job(size: int, **options: Any) -> tuple[Any, Any]:
    model = models.toy(models.flat_mesh(size))
    optimizer = torch.optim.AdamW(models.groups(model), weight_decay=0.1, fused=True)
    if options:
        optimizer = HybridDeviceOptimizer(optimizer, model=model, transfer=SMALL, **options)
    return model, optimizer


def train(overlap: str, lanes: Any, size: int, clip: float | None) -> None:
    plain_model, plain = job(size)
    names: dict[str, Any] = {"update_on": "host"}
    if lanes == "mixed":
        trainable = [p for p in models.parameters_of(plain) if p.requires_grad]
        names = {
            "update_on": [("host", "streamed", "resident")[i % 3] for i in range(len(trainable))]
        }
    model, mine = job(size, overlap=overlap, **names)
    for step in range(1, STEPS + 1):
        losses = [models.backward(m, step) for m in (plain_model, model)]
        check(losses[0] == losses[1], f"step {step}: losses {losses}")
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(models.parameters_of(plain), clip)
            found = mine.clip_grad_norm_(clip)
            models.check_same(found.full_tensor(), norm.full_tensor(), f"norm of step {step}")
        for optimizer in (plain, mine):
            optimizer.step()
            optimizer.zero_grad()
    models.check_twins(mine, plain, f"{overlap} {lanes}")
    mine.close()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("overlap", "clip"), [("forward", 0.05), ("backward", None)])
@pytest.mark.parametrize("lanes", ["host", "mixed"])
def test_the_bits_are_those_of_the_plain_optimizer(
    ranks: Ranks, lanes: str, overlap: str, clip: float | None, size: int
) -> None:
    ranks(size).run(train, overlap, lanes, size, clip)


def fail_and_recover(overlap: str) -> None:
    """A failure on a host thread surfaces, stays until a load, and then is gone."""
    plain_model, plain = job(1)
    model, mine = job(1, overlap=overlap, update_on="host")
    for step in (1, 2):
        for each, optimizer in ((plain_model, plain), (model, mine)):
            models.backward(each, step)
            optimizer.step()
            optimizer.zero_grad()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    saved = plain.state_dict()
    update = host.HostUnit.update

    def explode(unit: Any, work: Any) -> None:
        raise ZeroDivisionError("on purpose")

    host.HostUnit.update = explode  # type: ignore[method-assign]
    try:
        models.backward(model, 3)
        mine.step()
        mine.synchronize()
        raise AssertionError("the failure did not surface")
    except LaneError as error:
        check("on purpose" in str(error), f"{error}")
    finally:
        host.HostUnit.update = update  # type: ignore[method-assign]
    try:
        mine.step()
        raise AssertionError("a failed optimizer stepped")
    except LaneError:
        pass
    mine.load_state_dict(saved)
    model.load_state_dict(weights)
    mine.zero_grad()
    for step in (3, 4):
        for each, optimizer in ((plain_model, plain), (model, mine)):
            models.backward(each, step)
            optimizer.step()
            optimizer.zero_grad()
    models.check_twins(mine, plain, "after the load")
    mine.close()


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_a_failure_stays_until_a_load(ranks: Ranks, overlap: str) -> None:
    ranks(1).run(fail_and_recover, overlap)
