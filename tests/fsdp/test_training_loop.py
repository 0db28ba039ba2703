"""What surrounds ``step()`` in a training loop, on FSDP2 models: as with the plain optimizer."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from tests.fsdp import models
from tests.fsdp.models import Ranks, check
from tests.helpers.covering import covering

LANES: dict[str, Any] = {"update_on": ("streamed", "host", "resident")}
AWAY: dict[str, Any] = {"offload": "all", "device_memory": 0}


def twins(how: dict[str, Any], **options: Any) -> list[tuple[models.Toy, Optimizer]]:
    """Equal models on two ranks: one with fused AdamW, one with the same optimizer wrapped."""
    made: list[tuple[models.Toy, Optimizer]] = []
    for wrapped in (False, True):
        model = models.toy(models.flat_mesh(2))
        optimizer: Optimizer = torch.optim.AdamW(models.groups(model), **{"fused": True, **options})
        if wrapped:
            optimizer = models.wrap(optimizer, model, **how)
        made.append((model, optimizer))
    return made


def scale_losses(through_inner: bool, how: dict[str, Any]) -> list[float]:
    """Six scaled steps; at step 3 one element on rank 1 overflows. Returns the scales."""
    pair = twins(how, fused=through_inner, foreach=None if through_inner else False)
    steppers = [optimizer for _, optimizer in pair]
    if through_inner:
        steppers[1] = steppers[1]._wrapped
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in pair]
    scales = []
    for step in range(1, 7):
        for (model, _), stepper, scaler in zip(pair, steppers, scalers, strict=True):
            models.backward(model, step, scale=scaler.scale)
            if step == 3 and dist.get_rank() == 1:
                models.local(model.blocks[2].down.weight.grad)[0, 0] = torch.inf
            if step % 2:  # with and without clipping, which unscales first
                scaler.unscale_(stepper)
                clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(stepper)
            scaler.update()
            stepper.zero_grad()
        models.check_twins(pair[1][1], pair[0][1], f"step {step}")
        check(len({s.get_scale() for s in scalers}) == 1, f"scales at step {step}")
        scales.append(scalers[1].get_scale())
    model, wrapped = pair[1]
    updates = wrapped.state[model.embed.weight]["step"].item()
    check(updates == 5, f"{updates} updates instead of 5")
    return scales


@pytest.mark.parametrize(
    ("through_inner", "how"), covering(itertools.product((False, True), (LANES, AWAY)))
)
def test_grad_scaler_skips_the_step_on_all_ranks_after_an_overflow_on_one(
    ranks: Ranks, through_inner: bool, how: dict[str, Any]
) -> None:
    results = ranks(2).run(scale_losses, through_inner, how)

    assert results[0] == results[1] == [64, 128, 64, 64, 128, 128]


# --------------------------------------------------------------------------- no collective

COLLECTIVES = [
    name
    for name in dir(distributed_c10d)
    if name.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "send", "recv"))
    or name in ("barrier", "monitored_barrier", "isend", "irecv", "batch_isend_irecv", "new_group")
]


class CollectiveIssued(AssertionError):
    """Something communicated that must not."""


@contextlib.contextmanager
def no_collectives() -> Iterator[None]:
    """Any way to communicate raises: by name on every thread, by operator on this one."""

    def refuse(*_: Any, **__: Any) -> None:
        raise CollectiveIssued("a torch.distributed function was called")

    with contextlib.ExitStack() as stack:
        for module in (dist, distributed_c10d):
            for name in COLLECTIVES:
                if callable(getattr(module, name, None)):
                    stack.enter_context(mock.patch.object(module, name, refuse))
        operators = stack.enter_context(CommDebugMode())
        yield
        if counts := operators.get_comm_counts():
            raise CollectiveIssued(f"operators: {dict(counts)}")


def use_silently(dtype: torch.dtype, how: dict[str, Any]) -> None:
    model = models.toy(models.flat_mesh(2), dtype=dtype)
    inner = torch.optim.AdamW(models.groups(model), fused=True)
    with no_collectives():
        wrapped = models.wrap(inner, model, **how)
        wrapped.state_dict()
    for step in (1, 2):
        models.backward(model, step)
        with no_collectives():
            wrapped.step()
            saved = wrapped.state_dict()
            wrapped.load_state_dict(saved)
            get_optimizer_state_dict(model, wrapped)
            wrapped.synchronize()
            wrapped.zero_grad()
    with no_collectives():
        wrapped.close()


@pytest.mark.parametrize(
    ("dtype", "how"), covering(itertools.product((torch.float32, torch.bfloat16), (LANES, AWAY)))
)
def test_elementwise_optimizers_issue_no_collective(
    ranks: Ranks, dtype: torch.dtype, how: dict[str, Any]
) -> None:
    ranks(2).run(use_silently, dtype, how)


def provoke() -> None:
    """The trap itself: both of its halves must catch a collective."""
    toy = models.toy(models.flat_mesh(2))
    muon = models.wrap(torch.optim.Muon(models.groups(toy, matrices_only=True)), toy)
    models.backward(toy, 2)
    for call in (lambda: dist.all_reduce(torch.ones(8)), muon.step):
        with pytest.raises(CollectiveIssued), no_collectives():
            call()


def test_the_trap_for_collectives_catches_functions_and_operators(ranks: Ranks) -> None:
    ranks(2).run(provoke)
