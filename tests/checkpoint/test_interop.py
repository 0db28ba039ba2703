"""Checkpoints that other programs wrote or read: torch's own functions, torchtitan, Megatron."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from fsdp_offload import checkpoint
from fsdp_offload.core.errors import CheckpointError, OffloadError
from tests.checkpoint import jobs
from tests.checkpoint.jobs import FLAT, NESTED, OURS, OURS_BF16, PLAIN, Job, Ranks, Variant
from tests.fsdp import models
from tests.fsdp.models import check, check_same, check_same_dicts


def check_arrived(found: Job, expected: Job, *, options: bool = True) -> None:
    """All of the state of the two jobs, but for masters that one of them lacks."""
    mine, theirs = jobs.whole(found), jobs.whole(expected)
    for name in mine.keys() & theirs.keys():
        if options or not name.startswith("options"):
            wanted = theirs[name]
            if name.startswith("exp_avg"):
                wanted = wanted.to(mine[name].dtype)
            check_same(mine[name], wanted, name)


def check_goes_on(found: Job, expected: Job) -> None:
    for job in (found, expected):
        jobs.train(job, jobs.AFTER)
    check_arrived(found, expected)


def refusal(fn: Callable[[], Any]) -> OffloadError | None:
    """What a call raised on all ranks, to be looked at outside."""
    try:
        fn()
    except OffloadError as error:
        return error
    return None


def stateful(variant: Variant, path: Path, writer: bool, reader: bool) -> None:
    """The shape of torch's tutorial: one Stateful per object."""
    saving, loading = jobs.trained(variant), jobs.elsewhere(variant)
    before = jobs.addresses(loading.optimizer)
    save: dict[str, Any] = {"storage_writer": checkpoint.Writer(path)} if writer else {}
    load: dict[str, Any] = {"storage_reader": checkpoint.Reader(path)} if reader else {}
    for act, job, plugin in ((dcp.save, saving, save), (dcp.load, loading, load)):
        state = {
            "model": get_model_state_dict(job.model),
            "optim": checkpoint.OptimizerState(*job.pair),
        }
        act(state, **(plugin or {"checkpoint_id": path}))
    check(jobs.addresses(loading.optimizer) == before, "loading moved the state")
    check_arrived(loading, saving)
    check_goes_on(loading, saving)


@pytest.mark.parametrize(
    "variant", [OURS_BF16, pytest.param(OURS, marks=pytest.mark.long)], ids=str
)
@pytest.mark.parametrize(("writer", "reader"), [(True, False), (False, True)])
def test_optimizer_state_is_a_stateful(
    ranks: Ranks, tmp_path: Path, variant: Variant, writer: bool, reader: bool
) -> None:
    """With torch's writer and our reader, and the reverse."""
    ranks(2).run(stateful, variant, tmp_path / "one", writer, reader)


def torch_reads_ours(path: Path) -> None:
    saving, loading = jobs.trained(OURS), jobs.elsewhere(PLAIN)
    checkpoint.save(path, *saving.pair)
    jobs.load_by_torch(loading, path, FLAT)
    check_arrived(loading, saving)
    check_goes_on(loading, saving)


def test_plain_dcp_load_reads_our_files(ranks: Ranks, tmp_path: Path) -> None:
    """A plain job resumes from them without this package."""
    ranks(2).run(torch_reads_ours, tmp_path / "one")


def titan(job: Job) -> dict[str, Any]:
    """torchtitan: weights at the top, a flat optimizer, a train state, a scheduler."""
    return {
        **get_model_state_dict(job.model),
        "optimizer": get_optimizer_state_dict(*job.pair, options=FLAT),
        "train_state": {"step": torch.tensor(3), "ntokens_seen": 12},
        "lr_scheduler": {"last_epoch": 3},
    }


def megatron(job: Job) -> dict[str, Any]:
    """Megatron-FSDP's ``fsdp_dtensor``; its groups are not said to be of which parameters."""
    nested = get_optimizer_state_dict(*job.pair, options=NESTED)
    groups = [{**group, "params": []} for group in nested["param_groups"]]
    return {
        "model": {f"module.{n}": v for n, v in get_model_state_dict(job.model).items()},
        "optimizer": {
            "state": {f"module.{fqn}": entry for fqn, entry in nested["state"].items()},
            "param_groups": groups,
        },
        "iteration": 3,
    }


def ema_beside(job: Job) -> dict[str, Any]:
    """A second set of weights, which must not be taken for the first."""
    ema = {name: torch.zeros_like(value) for name, value in get_model_state_dict(job.model).items()}
    return {**jobs.job_state(job, FLAT), "ema": {"model": ema}}


def tensor_lr(job: Job) -> dict[str, Any]:
    """A nested optimizer one of whose options is a tensor: each option has its own key."""
    for group in job.optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    return jobs.job_state(job, NESTED)


LAYOUTS = {f.__name__: f for f in (titan, megatron, ema_beside, tensor_lr)}
NAMED: dict[str, dict[str, Any]] = {
    "titan": {"model_prefix": ""},
    # A parameter without a gradient has no state there, and its options do not say whose they are.
    "megatron": {"model_prefix": "model.module.", "strict": False},
}


def load_layout(layout: str, target: Variant, path: Path) -> None:
    saving, loading = jobs.trained(PLAIN), jobs.elsewhere(target)
    own = [group["lr"] for group in loading.optimizer.param_groups]
    dcp.save(LAYOUTS[layout](saving), checkpoint_id=path)
    if named := NAMED.get(layout):
        error = refusal(lambda: checkpoint.load(path, *loading.pair))
        check(error is not None, "loaded without a prefix")
        check(f"model_prefix={named['model_prefix']!r}" in str(error), str(error))
    found = checkpoint.load(path, *loading.pair, **NAMED.get(layout, {}))
    models.check(found == {}, "extra was found")
    check_arrived(loading, saving, options=layout != "megatron")
    if layout == "megatron":
        kept = [group["lr"] for group in loading.optimizer.param_groups]
        check(kept == own, f"options {kept} came from a checkpoint that has none")
    else:
        check_goes_on(loading, saving)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_other_programs_are_loaded(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    ranks(2).run(load_layout, layout, OURS, tmp_path)


def load_with_prefixes(path: Path) -> list[OffloadError | None]:
    """Actor and critic in one checkpoint."""
    actor, critic, loading = jobs.trained(PLAIN), jobs.trained(PLAIN, steps=2), jobs.elsewhere(OURS)
    both = {"actor": jobs.job_state(actor, FLAT), "critic": jobs.job_state(critic, FLAT)}
    dcp.save(both, checkpoint_id=path)
    refused = refusal(lambda: checkpoint.load(path, *loading.pair))
    prefixes = {"model_prefix": "critic.model.", "optimizer_prefix": "critic.optim."}
    checkpoint.load(path, *loading.pair, **prefixes)
    check_arrived(loading, critic)
    return refused


def test_one_of_several_jobs_is_named_by_its_prefixes(ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks(2).run(load_with_prefixes, tmp_path):
        assert isinstance(error, CheckpointError)
        assert "model_prefix" in error.remedy


def load_weights(path: Path) -> OffloadError | None:
    saving = jobs.trained(OURS_BF16)
    checkpoint.save(path, saving.model)
    fresh, used = jobs.make(OURS_BF16), jobs.elsewhere(OURS_BF16)
    expected = jobs.whole(saving)
    for job in (fresh, used):
        before = jobs.whole(job)
        check(checkpoint.load(path, job.model) == {}, "extra was found")
        found = jobs.whole(job)
        for name in found:
            kind, _, fqn = name.partition(" ")
            if kind in ("weight", "master"):
                weight = expected[f"weight {fqn}"].to(found[name].dtype)
                check_same(found[name], weight, name)
            else:
                check_same(found[name], before[name], name)
            if job is fresh and kind == "exp_avg":
                check(not found[name].any(), f"{name} is not zero")
    unchanged = jobs.whole(used)
    refused = refusal(lambda: checkpoint.load(path, *used.pair))
    check_same_dicts(jobs.whole(used), unchanged, "whole job")
    return refused


def test_weights_alone_set_masters_and_leave_moments(ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks(2).run(load_weights, tmp_path / "weights"):
        assert isinstance(error, CheckpointError)
        assert "optimizer" in str(error)


def load_into_plain(path: Path, less: bool) -> None:
    if less:
        saving, loading = jobs.trained(OURS, steps=4), jobs.trained(PLAIN, steps=2)
    else:
        saving, loading = jobs.trained(PLAIN), jobs.elsewhere(PLAIN)
    checkpoint.save(path, *saving.pair)
    checkpoint.load(path, *loading.pair)
    check_arrived(loading, saving)


@pytest.mark.parametrize("less", [True, False])
def test_a_plain_job_has_state_of_the_parameters_that_were_saved(
    ranks: Ranks, tmp_path: Path, less: bool
) -> None:
    """Parameters that never had a gradient, here or there."""
    ranks(2).run(load_into_plain, tmp_path / "one", less)
