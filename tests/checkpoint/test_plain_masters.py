"""bf16 checkpoints of plain optimizers here, and ours there: masters are right, or named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from fsdp_offload import checkpoint
from tests.checkpoint.make_golden import Job, dump, job, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

BF16 = torch.bfloat16
LANES = ["streamed", "host"]


def trained(made: Job) -> Job:
    train(made)
    return made


def dicts(made: Job) -> dict[str, Any]:
    return {"model": get_model_state_dict(made[0]), "optim": get_optimizer_state_dict(*made)}


def check_masters(found: Job, expected: Job) -> None:
    """Moments are the plain optimizer's, masters its weights."""
    mine, theirs = dump(found), dump(expected)
    for fqn in ("weight", "bias"):
        assert torch.equal(mine[fqn], theirs[fqn])
        assert torch.equal(mine[f"{fqn}.exp_avg"].bfloat16(), theirs[f"{fqn}.exp_avg"])
        assert torch.equal(mine[f"{fqn}.master"], theirs[fqn].float())


@pytest.mark.parametrize("lane", LANES)
def test_a_strict_load_by_torch_names_the_entry(lane: str, tmp_path: Path) -> None:
    """docs/troubleshooting.md has this text."""
    dcp.save(dicts(trained(job(BF16, None))), checkpoint_id=tmp_path / "one", no_dist=True)
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint.*master"):
        dcp.load(dicts(job(BF16, lane)), checkpoint_id=tmp_path / "one", no_dist=True)


@pytest.mark.parametrize("remedy", ["checkpoint.load", "allow_partial_load"])
@pytest.mark.parametrize("lane", LANES)
def test_both_remedies_take_masters_from_the_weights(
    lane: str, remedy: str, tmp_path: Path
) -> None:
    source, path = trained(job(BF16, None)), tmp_path / "one"
    dcp.save(dicts(source), checkpoint_id=path, no_dist=True)
    target = job(BF16, lane)
    if remedy == "checkpoint.load":
        checkpoint.load(path, *target)
    else:
        state, planner = dicts(target), DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(state, checkpoint_id=path, planner=planner, no_dist=True)
        set_model_state_dict(target[0], state["model"])
        set_optimizer_state_dict(*target, state["optim"])
    check_masters(target, source)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "masters" in message]


NAMES = {"streamed": "'master_remainder'", "host": "'master'"}


@pytest.mark.parametrize("lane", LANES)
def test_a_state_dict_with_masters_says_once_who_ignores_them(
    lane: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = trained(job(BF16, lane))
    copy.deepcopy(dicts(made))
    (message,) = said(caplog)
    assert NAMES[lane] in message
    assert "without fsdp_offload" in message
    assert "bfloat16 weights" in message
    made[1].state_dict()
    assert len(said(caplog)) == 1


def test_nothing_is_said_where_nothing_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(job(torch.float32, "streamed"))[1].state_dict()
    checkpoint.save(tmp_path / "one", *trained(job(BF16, "streamed")))
    assert not said(caplog)


@pytest.mark.parametrize("lane", LANES)
def test_a_plain_optimizer_that_loads_ours_says_what_it_ignores(
    lane: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save(tmp_path / "one", *trained(job(BF16, lane)))
    checkpoint.load(tmp_path / "one", *job(BF16, None))
    (message,) = said(caplog)
    assert NAMES[lane].strip("'") in message
    assert "AdamW ignores them" in message


@pytest.mark.parametrize(
    ("lane", "dtype"),
    [("host", torch.bfloat16), ("host", torch.float16), ("streamed", torch.float16)],
    ids=str,
)
def test_a_save_carries_weights_that_were_written_by_hand(
    lane: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A load into another lane or dtype gives them, not what they were before."""
    made = trained(job(dtype, lane))
    with torch.no_grad():
        for parameter in made[0].parameters():
            parameter.fill_(0.1)
    checkpoint.save(tmp_path / "one", *made)
    for target in (job(dtype, "resident"), job(torch.float32, "streamed")):
        checkpoint.load(tmp_path / "one", *target)
        for parameter in target[0].parameters():
            # Where a weight was that number before, by chance, its master stays.
            rounded = parameter.to(dtype)
            assert torch.equal(rounded, torch.full_like(rounded, 0.1))
