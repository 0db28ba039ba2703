"""Phases of FSDP2 jobs: what FSDP2 does by itself, checkpoints while away."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from fsdp_offload import PhaseOffloader, checkpoint
from fsdp_offload.core.errors import AwayError, SpentGradientError, UnspentGradientError
from fsdp_offload.core.fsdp import find_groups
from tests.away import optimizer_alone
from tests.fsdp import models
from tests.fsdp.models import Ranks, Toy, check, check_same, check_same_dicts, check_twins, train

Job = tuple[Toy, Any]


def job(size: int, kind: str = "plain", **options: Any) -> Job:
    """``kind``: plain, fused, or the overlap of a wrapper with all lanes."""
    model = models.toy(models.flat_mesh(size), **options)
    inner = torch.optim.AdamW(models.groups(model), fused=kind == "fused")
    if kind in ("plain", "fused"):
        return model, inner
    lanes = ("host", "streamed", "resident")
    return model, models.wrap(inner, model, update_on=lanes, overlap=kind)


def away(model: nn.Module) -> bool:
    """Whether no parameter has device memory, the padding of its shard included."""
    return not any(
        models.local(p).untyped_storage().nbytes() for p in (*model.parameters(), *model.buffers())
    )


def refused(use: Callable[[], object]) -> None:
    with pytest.raises(AwayError):
        use()


# --------------------------------------------------------------------------- FSDP2 by itself


def use_by_hand(size: int) -> None:
    mine, twin = job(size), job(size)
    early = PhaseOffloader(*mine)
    early.offload()  # before FSDP2's lazy initialisation
    refused(lambda: models.backward(mine[0], 1))
    refused(lambda: mine[0].blocks[0](torch.zeros(1, models.WIDTH)))
    refused(mine[1].step)
    early.reload()
    for made in (mine, twin):
        train(made, range(1, 3))
    mine[0].unshard()
    mine[0].blocks[1].unshard(async_op=True)
    with early.away():
        check(away(mine[0]), "unsharded parameters are left")
        check(all(isinstance(p, DTensor) for p in mine[0].parameters()), "still unsharded")
        pending = [group._raw._all_gather_result for group in find_groups([mine[0]])]
        check(pending == [None] * len(pending), "a gather is pending, and its buffer is left")
    for made in (mine, twin):
        train(made, range(3, 5))
    check_twins(mine[1], twin[1], "after unshard by hand")


def accumulate_without_sync(size: int, grads: str) -> None:
    mine, twin = job(size), job(size)
    phases = PhaseOffloader(*mine, grads=grads)
    for model, optimizer in (mine, twin):
        model.set_requires_gradient_sync(False)
        models.backward(model, 2)
        if model is mine[0]:
            waiting = [g for group in find_groups([model]) for g in group.waiting_gradients]
            check(bool(waiting), "nothing waits for a reduction")
            with phases.away():
                left = [g.untyped_storage().nbytes() > 0 for g in waiting]
                check(grads == "drop" or set(left) == {grads == "keep"}, f"{grads}: {left}")
        elif grads == "drop":
            fresh = job(size)
            fresh[0].load_state_dict(model.state_dict())
            model, optimizer = twin = fresh
        model.set_requires_gradient_sync(True)
        models.backward(model, 3)
        optimizer.step()
    check_twins(mine[1], twin[1], f"accumulated, {grads}")


def accumulate_without_all_reduce(grads: str) -> None:
    """With HSDP, gradients that were reduced within each replica only."""
    hybrid = models.mesh((2, 1), ("ddp", "fsdp"))
    made = [models.toy(hybrid) for _ in range(2)]
    jobs = [(model, torch.optim.AdamW(models.groups(model))) for model in made]
    phases = PhaseOffloader(*jobs[0], grads=grads)
    for index, (model, optimizer) in enumerate(jobs):
        model.set_requires_all_reduce(False)
        if index == 0 or grads != "drop":
            models.backward(model, 2)
        if index == 0:
            with phases.away():
                pass
        model.set_requires_all_reduce(True)
        models.backward(model, 3)
        optimizer.step()
    check_twins(jobs[0][1], jobs[1][1], f"accumulated, {grads}")


def test_gradients_that_wait_for_an_all_reduce(ranks: Ranks) -> None:
    for grads in ("save", "drop"):
        ranks(2).run(accumulate_without_all_reduce, grads)


def drop_what_no_step_has_consumed(size: int, overlap: str | None) -> None:
    made = mine, optimizer = job(size, overlap or "plain")
    phases = PhaseOffloader(*made)

    def is_refused(what: str) -> None:
        with pytest.raises(UnspentGradientError):
            phases.offload()
        check(not phases.is_away and not away(mine), f"{what}: it is away")

    models.backward(mine, 1)
    is_refused("a gradient before step()")
    optimizer.step()
    with phases.away():
        check(all(p.grad is None for p in mine.parameters()), "a gradient is left")
    models.backward(mine, 2)
    optimizer.step()
    if overlap is None:  # else the gradients are the optimizer's now
        models.backward(mine, 3)
        is_refused("a gradient that was added to")
    optimizer.zero_grad()
    mine.set_requires_gradient_sync(False)
    models.backward(mine, 4)
    is_refused("a gradient that waits for its reduction")
    mine.set_requires_gradient_sync(True)
    models.backward(mine, 5)
    optimizer.step()
    phases.offload()
    phases.reload()


def step_beside_an_offloader(size: int) -> None:
    """Its hook reads no parameters, so step() does not wait for updates; for others' it does."""
    mine, optimizer = job(size, "forward")
    phases = PhaseOffloader(mine, optimizer)
    drained: list[None] = []
    drain = optimizer._updates._drain
    optimizer._updates._drain = lambda: (drained.append(None), drain())[1]
    for step, expected in ((1, False), (2, True)):
        models.backward(mine, step)
        optimizer.zero_grad()
        models.backward(mine, step)
        drained.clear()
        optimizer.step()
        check(bool(drained) == expected, f"step {step}: {len(drained)}")
        optimizer.zero_grad()
        optimizer.register_step_post_hook(lambda *_: None)
    phases.close()


def offload_the_optimizer_alone(size: int) -> None:
    """Refused between a backward that has updated parameters and step(); use is, afterwards."""
    model, optimizer = job(size, "backward")
    train((model, optimizer), range(1))
    phases = optimizer_alone(optimizer)
    models.backward(model, 1)
    with pytest.raises(SpentGradientError, match="step"):
        phases.offload()
    check(not phases.is_away, "it is away")
    optimizer.step()
    optimizer.zero_grad()
    phases.offload()
    saved = get_optimizer_state_dict(model, optimizer)
    refused(lambda: set_optimizer_state_dict(model, optimizer, saved))
    phases.reload()
    phases.offload()
    shards = [models.local(p) for p in model.parameters()]
    before = [shard.clone() for shard in shards]
    refused(lambda: models.backward(model, 2))
    for shard, value in zip(shards, before, strict=True):
        check_same(shard, value, "a shard")
    optimizer.close()


def hold_nothing(size: int) -> None:
    """Gradients that gates and threads held are gone, and so is every slot."""
    model, optimizer = job(size, "forward")
    train((model, optimizer), range(1))
    models.backward(model, 1)
    gradients = [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
    check(bool(gradients), "no gradients")
    optimizer.step()
    optimizer.zero_grad()
    phases = optimizer_alone(optimizer)
    phases.offload()
    gc.collect()
    check(all(ref() is None for ref in gradients), "a gradient is held")
    staging = optimizer._offloadable.staging_buffers()
    check(not any(t.untyped_storage().nbytes() for t in staging), "a staging buffer is held")
    optimizer.close()


def loads_around_the_first_forward(size: int, first: bool) -> None:
    """FSDP2 looks whether a load has replaced its shards."""
    donor, mine, twin = job(size), job(size), job(size)
    train(donor, range(1, 3))
    saved = {n: v.clone() for n, v in donor[0].state_dict().items()}
    for made in (mine, twin):
        if first:
            train(made, range(1, 2))
    phases = PhaseOffloader(*mine)
    with phases.away():
        refused(lambda: mine[0].load_state_dict(saved))
        refused(lambda: set_model_state_dict(mine[0], saved))
    for made in (mine, twin):
        made[0].load_state_dict(saved)
    with phases.away():
        pass
    for made in (mine, twin):
        train(made, range(3, 5))
    check_twins(mine[1], twin[1], f"loaded, first={first}")


def test_what_fsdp2_does_while_parameters_are_away(ranks: Ranks, size: int) -> None:
    pool = ranks(size)
    pool.run(use_by_hand, size)
    for grads in ("save", "keep", "drop"):
        pool.run(accumulate_without_sync, size, grads)
    for overlap in (None, "forward"):
        pool.run(drop_what_no_step_has_consumed, size, overlap)
    pool.run(step_beside_an_offloader, size)
    pool.run(offload_the_optimizer_alone, size)
    pool.run(hold_nothing, size)
    for first in (True, False):
        pool.run(loads_around_the_first_forward, size, first)


# --------------------------------------------------------------------------- checkpoints


def checkpoints_while_away(size: int, kind: str, path: Path) -> None:
    mine = job(size, kind)
    train(mine, range(1, 4))
    expected = copy.deepcopy(get_state_dict(*mine))
    phases = PhaseOffloader(*mine)
    with phases.away():
        check_same_dicts(get_state_dict(*mine), expected, "get_state_dict")
        shown = get_model_state_dict(mine[0])
        there = [models.local(v).untyped_storage().nbytes() > 0 for v in shown.values()]
        check(all(there), "an empty storage is shown")
        model, optimizer = get_state_dict(*mine)
        dcp.save({"model": model, "optim": optimizer}, checkpoint_id=path / "dcp")
        checkpoint.save(path / "own", *mine)
        future = checkpoint.async_save(path / "async", *mine)
        check(away(mine[0]), "a save took device memory")
    train(mine, range(4, 6))  # what is being saved is from before
    with phases.away():  # and the same host memory holds other bytes now
        pass
    future.result()
    for name in ("own", "async"):
        other = job(size, kind)
        checkpoint.load(path / name, *other)
        check_same_dicts(get_state_dict(*other), expected, name)
        train(other, range(4, 6))
        check_twins(other[1], mine[1], f"{name}, trained on")
    other = job(size, kind)
    train(other, range(7, 8))
    with PhaseOffloader(*other).away():
        refused(lambda: checkpoint.load(path / "own", *other))
    model, optimizer = get_state_dict(*other)
    target = {"model": model, "optim": optimizer}
    dcp.load(target, checkpoint_id=path / "dcp")
    set_state_dict(*other, model_state_dict=target["model"], optim_state_dict=target["optim"])
    check_same_dicts(get_state_dict(*other), expected, "dcp")
    dist.barrier()


@pytest.mark.parametrize("kind", ["plain", "step"])
def test_checkpoints_while_away(ranks: Ranks, size: int, kind: str, tmp_path: Path) -> None:
    ranks(size).run(checkpoints_while_away, size, kind, tmp_path)
