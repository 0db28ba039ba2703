"""Remainders travel through torch's own calls bit for bit, also where they read as NaN."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from fsdp_offload import checkpoint
from fsdp_offload.checkpoint import OptimizerState
from fsdp_offload.core.errors import StateDictError
from tests.fsdp import models
from tests.fsdp.models import Ranks, check, local

Job = tuple[nn.Module, Optimizer]
REMAINDER = "master_remainder"


def patterns() -> Tensor:
    """Each of the 65536 patterns once, NaNs of every payload among them: (256, 256)."""
    words = torch.arange(-32768, 32768, dtype=torch.int32) * 7919
    return words.to(torch.int16).view(torch.bfloat16).view(256, 256)


def check_bits(found: Tensor, expected: Tensor, what: str) -> None:
    check(found.dtype == torch.bfloat16, f"{what}: {found.dtype}")
    check(torch.equal(found.view(torch.int16), expected.view(torch.int16)), what)


def job(lanes: Any = ("streamed", "resident")) -> Job:
    torch.manual_seed(3)
    model = nn.Linear(256, 256, dtype=torch.bfloat16)
    fully_shard(model, mesh=models.flat_mesh(dist.get_world_size()))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, models.wrap(inner, model, update_on=lanes)


def stepped(lanes: Any = ("streamed", "resident")) -> Job:
    """After a step, with all patterns as remainders of the weight."""
    model, optimizer = made = job(lanes)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    kept = optimizer.state[model.weight][REMAINDER]
    rows = patterns().chunk(dist.get_world_size())[dist.get_rank()]
    local(kept).view(torch.int16).copy_(rows.view(torch.int16))
    return made


def check_job(found: Job, expected: Job, what: str) -> None:
    for mine, theirs in zip(found[0].parameters(), expected[0].parameters(), strict=True):
        models.check_same(mine, theirs, f"{what}: weight")
        ours, others = found[1].state[mine], expected[1].state[theirs]
        check(ours.keys() == others.keys(), f"{what}: {ours.keys()}")
        for name, value in others.items():
            models.check_same(ours[name], value, f"{what}: {name}")
    whole = found[1].state[found[0].weight][REMAINDER].full_tensor()
    check_bits(whole, patterns(), what)


def through_whole_dicts(*, flat: bool, cpu_offload: bool, broadcast: bool) -> None:
    """As trainers save and load; the loading job is fresh.

    torch loads a flat whole dict of any optimizer without the option that made it flat.
    """
    saving, loading = stepped(), job()
    options = StateDictOptions(
        full_state_dict=True, cpu_offload=cpu_offload, flatten_optimizer_state_dict=flat
    )
    weights = get_model_state_dict(saving[0], options=options)
    state = get_optimizer_state_dict(*saving, options=options)
    if cpu_offload and not broadcast:  # only the first rank has got anything
        shared: list[Any] = [(weights, state)]
        dist.broadcast_object_list(shared, src=0)
        weights, state = shared[0]
    options = StateDictOptions(
        full_state_dict=True,
        cpu_offload=cpu_offload,
        broadcast_from_rank0=broadcast,
    )
    if broadcast and dist.get_rank() != 0:
        weights, state = {}, {}
    set_model_state_dict(loading[0], weights, options=options)
    set_optimizer_state_dict(*loading, state, options=options)
    check_job(loading, saving, f"flat={flat} cpu_offload={cpu_offload} broadcast={broadcast}")


@pytest.mark.parametrize(
    ("flat", "cpu_offload", "broadcast"),
    [(False, False, True), (True, True, False), (True, False, False), (False, True, True)],
)
def test_masters_survive_whole_state_dicts(
    ranks: Ranks, flat: bool, cpu_offload: bool, broadcast: bool
) -> None:
    ranks(2).run(through_whole_dicts, flat=flat, cpu_offload=cpu_offload, broadcast=broadcast)


def load_cast(path: Path) -> list[str]:
    saving, loading = stepped(), job()
    state = copy.deepcopy(saving[1].state_dict())
    for values in state["state"].values():
        values[REMAINDER] = values[REMAINDER].float()
    packed = {
        name: value.float() if name.endswith(REMAINDER) else value
        for name, value in OptimizerState(*saving).state_dict().items()
    }
    weights = get_model_state_dict(saving[0])
    dcp.save({"model": weights, "optim": packed}, checkpoint_id=path)
    refused = []
    for load in (
        lambda: loading[1].load_state_dict(state),
        lambda: checkpoint.load(path, *loading),
    ):
        before = copy.deepcopy(loading[1].state_dict())
        try:
            load()
        except StateDictError as error:
            refused.append(str(error))
        models.check_same_dicts(loading[1].state_dict(), before, "after a refusal")
    return refused


def test_a_remainder_that_was_cast_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    for refused in ranks(2).run(load_cast, tmp_path):
        assert len(refused) == 2
        assert all("master_remainder" in text and "torch.float32" in text for text in refused)
