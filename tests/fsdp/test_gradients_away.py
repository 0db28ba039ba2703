"""``offload="all"``: gradients leave the device, and nothing else changes a bit."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_offload import (
    DeviceMemoryError,
    HostMemoryError,
    HybridDeviceOptimizer,
    LaneError,
    PhaseOffloader,
)
from fsdp_offload.core.recorded import RecordedShard
from fsdp_offload.link import HostPool, held_bytes
from fsdp_offload.update.bucket import BucketUpdate
from tests.fsdp import models
from tests.fsdp.models import Ranks, check, check_same
from tests.fsdp.test_overlap import loss_of
from tests.fsdp.test_whole_model import build, compare, fail_in_backward, twice, wrap

FP32, BF16 = torch.float32, torch.bfloat16
STEPS = 4


def gradients(model: Any) -> list[Any]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def away(model: Any) -> list[bool]:
    """Of each gradient, whether its values are in host memory."""
    shards = [gradient._local_tensor for gradient in gradients(model)]
    return [type(each) is RecordedShard and each.keeper.real is None for each in shards]


def whole(tensors: list[Any]) -> list[Tensor]:
    """Copies: of one rank, torch returns the gradient itself, which changes later."""
    return [tensor.full_tensor().clone() for tensor in tensors]


# --------------------------------------------------------------------------- what users do


def clip(model: Any, **how: Any) -> list[Any]:
    return [nn.utils.clip_grad_norm_(model.parameters(), 0.05, **how).full_tensor()]


def unscale(model: Any) -> list[Any]:
    found = torch.zeros(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch.amp.GradScaler("cpu")._unscale_grads_(optimizer, torch.tensor(0.3), found, False)
    return [found, *clip(model)]


def overflow(model: Any) -> list[Any]:
    """What GradScaler finds, and skips."""
    gradients(model)[0].mul_(torch.inf)
    found = unscale(model)[:1]
    model.zero_grad()
    return found


@torch.no_grad()
def write(model: Any) -> list[Any]:
    for index, parameter in enumerate(model.parameters()):
        gradient = parameter.grad
        if gradient is None:
            continue
        if index % 4 == 0:
            gradient.add_(0.01)
        elif index % 4 == 1:
            gradient.to_local().view(-1).mul_(0.9)
        elif index % 4 == 2:
            parameter.grad = gradient * 0.5 + 0.01
    return [gradient.full_tensor().sum() for gradient in gradients(model)]


def by_value(model: Any) -> list[Any]:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return clip(model)


def drop_some(model: Any) -> list[Any]:
    for parameter in list(model.parameters())[::3]:
        parameter.grad = None
    return []


def average(model: Any, kept: dict[str, Tensor]) -> list[Any]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            shard = parameter.grad.to_local()
            kept[name] = kept.get(name, torch.zeros_like(shard)).lerp(shard, 0.5)
    return list(kept.values())


BETWEEN: dict[str, Callable[..., list[Any]]] = {
    "": lambda model: [],
    "clip": clip,
    "clip one by one": functools.partial(clip, foreach=False),
    "clip twice": lambda model: [*clip(model), *clip(model)],
    "unscale": unscale,
    "overflow": overflow,
    "write": write,
    "clip by value": by_value,
    "some are missing": drop_some,
    "backward fails": lambda model: fail_in_backward(model, 7),
    "layers called twice": lambda model: [*twice(model, 5), *clip(model)],
}


OURS = {"ours": 2.0, "ours by the largest": torch.inf}
"""Orders of norms, for the wrapper's own ``clip_grad_norm_``."""


def train(model: Any, optimizer: Any, between: Callable[..., Any], micro: int, **how: Any) -> Any:
    """Losses, what was seen between backward and step, and gradients after it."""
    seen: list[Any] = []
    for index in range(STEPS):
        for batch in range(micro):
            if how.get("sync", True) is False:
                model.set_requires_gradient_sync(batch == micro - 1)
            if how.get("last", True) is False:
                model.set_is_last_backward(batch == micro - 1)
            skip = 1 if (index, batch) in ((1, 0), (2, 1)) else None
            loss = loss_of(model, 10 * index + batch, skip=skip)
            loss.backward()
            seen.append(loss.detach())
        seen += between(model)
        if how.get("steps", True) or index % 2:
            optimizer.step()
        if index == 2:
            seen += whole(gradients(model))
        optimizer.zero_grad(set_to_none=how.get("to_none", True))
    return seen


def train_both(
    size: int, between: str = "", *, micro: int = 1, overlap: str = "forward", **how: Any
) -> None:
    loop = {name: how.pop(name) for name in ("sync", "last", "steps", "to_none") if name in how}
    plain, mine = (build(size, **how) for _ in range(2))
    reference, optimizer = (
        wrap(plain, offload="state", overlap=overlap),
        wrap(mine, overlap=overlap),
    )
    check(optimizer.statistics().host_gradient_bytes > 0, "gradients leave")
    looks: list[list[bool]] = []

    def look(model: Any) -> list[Any]:
        if model is mine:
            looks.append(away(model))
        if between in OURS:
            clips = optimizer if model is mine else reference
            return [clips.clip_grad_norm_(0.05, OURS[between]).full_tensor()]
        return BETWEEN[between](model)

    expected, found = (
        train(*made, look, micro, **loop) for made in ((plain, reference), (mine, optimizer))
    )
    # In between, a layer that is skipped may have a gradient that was written.
    check(all(looks[0] + looks[-1]) and len(looks[0]) > 9, f"on the device: {looks}")
    check(len(found) == len(expected), "something else was seen")
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        check_same(one, other, f"seen: {index}")
    compare(mine, plain, "weights")
    optimizer.close()


@pytest.mark.parametrize("between", [*BETWEEN, *OURS])
def test_training_has_the_same_bits(ranks: Ranks, size: int, between: str) -> None:
    ranks(size).run(train_both, size, between)


CASES: dict[str, dict[str, Any]] = {
    "step": {"overlap": "step", "between": "clip"},
    "step, writes": {"overlap": "step", "between": "write", "micro": 2},
    "bf16": {"dtype": BF16, "between": "clip", "micro": 2},
    "mixed precision": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32), "between": "clip",
    },
    "bf16, reduced in fp32": {
        "dtype": BF16, "mp_policy": MixedPrecisionPolicy(reduce_dtype=FP32), "micro": 2,
    },
    "accumulation": {"micro": 3, "between": "clip"},
    "accumulation, no sync": {"micro": 2, "sync": False, "between": "clip"},
    "accumulation, not the last": {"micro": 2, "last": False, "between": "clip"},
    "accumulation over skipped steps": {"steps": False, "to_none": False, "between": "write"},
    "zeroed": {"to_none": False, "between": "clip", "micro": 2},
    "zeroed, writes": {"to_none": False, "between": "write"},
    "several blocks": {"together": 2, "between": "clip"},
    "root keeps": {"reshard_after_forward": False},
}  # fmt: skip


@pytest.mark.parametrize("case", list(CASES))
def test_training_in_many_ways_has_the_same_bits(ranks: Ranks, size: int, case: str) -> None:
    ranks(size).run(train_both, size, **CASES[case])


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"hybrid": True}, marks=pytest.mark.long),
        {"hybrid": True, "dtype": BF16, "micro": 2},
    ],
)
def test_training_on_four_ranks_has_the_same_bits(ranks: Ranks, how: dict[str, Any]) -> None:
    ranks(4).run(train_both, 4, "clip", **how)


def accumulate(size: int, micro: int, *, skips: Any = (), **how: Any) -> None:
    """With updates in backward: gradients of all micro-batches but the last leave, and are read."""
    found = []
    for offload in ("state", "all"):
        model = build(size, **how)
        optimizer = wrap(model, offload=offload, overlap="backward")
        seen: list[Any] = []
        for index in range(STEPS):
            # Once it has begun with one micro-batch, which uses gradients at once.
            count = micro if index else 1
            for batch in range(count):
                marks = contextlib.nullcontext() if batch + 1 == count else optimizer.accumulate()
                with marks:
                    skip = 1 if (index, batch) in skips else None
                    loss = loss_of(model, 10 * index + batch, skip=skip)
                    loss.backward()
                    seen.append(loss.detach())
                if batch + 1 < count and (index, batch) not in skips:
                    is_away = away(model)
                    check(all(is_away) == any(is_away) == (offload == "all"), f"{is_away}")
                    if index == 2:
                        seen += whole(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
            has_left = optimizer.statistics().host_gradient_bytes > 0
            check(has_left == (offload == "all" and index > 0), "gradients leave")
        found.append([*seen, *map(models.local, model.state_dict().values())])
        optimizer.close()
        check(not any("gradients" in each for each in held_bytes()), "host memory")
    for index, (one, other) in enumerate(zip(*found, strict=True)):
        check_same(one, other, f"seen: {index}")


@pytest.mark.parametrize(
    ("size", "how"),
    [
        (1, {"micro": 3}),
        (2, {"micro": 2, "dtype": BF16}),
        (2, {"micro": 2, "skips": ((1, 1), (2, 0), (3, 1))}),
        (1, {"micro": 3, "mp_policy": MixedPrecisionPolicy(reduce_dtype=FP32), "dtype": BF16}),
        (1, {"micro": 2, "reshard_after_forward": False}),
    ],
)
def test_backward_accumulates(ranks: Ranks, size: int, how: dict[str, Any]) -> None:
    ranks(size).run(accumulate, size, **how)


# --------------------------------------------------------------------------- what else happens


def read() -> None:
    """Readers get values; the device keeps nothing of them."""
    plain, mine = build(1), build(1)
    optimizer = wrap(mine)
    kept: list[dict[str, Tensor]] = [{}, {}]
    for index in range(2):
        seen = []
        for model, shown in zip((plain, mine), kept, strict=True):
            loss_of(model, index).backward()
            seen.append(average(model, shown))
            seen[-1] += [(gradient * 2).full_tensor() for gradient in gradients(model)]
            if index:
                model.zero_grad(set_to_none=False)
            seen[-1] += [(gradient + 1).full_tensor() for gradient in gradients(model)]
        for one, other in zip(*seen, strict=True):
            check_same(one, other, "what was read")
        check(all(away(mine)), "kept on the device")
        for model in (plain, mine):
            model.zero_grad()
    optimizer.close()


def keep_alias() -> None:
    """A gradient that somebody still has when the next backward overwrites host memory."""
    plain, mine = build(1), build(1)
    optimizer = wrap(mine)
    kept = []
    for model in (plain, mine):
        loss_of(model, 0).backward()
        kept.append(gradients(model)[3])
        other = gradients(model)[4].to_local()
        model.zero_grad()
        loss_of(model, 1).backward()
        loss_of(model, 2).backward()
        other.mul_(2.0)
        kept += [other, gradients(model)[4].to_local()]
        kept[-1].mul_(3.0)
        loss_of(model, 3).backward()
        kept[-1].mul_(0.5)
        kept += whole(gradients(model))
    half = len(kept) // 2
    for one, other in zip(kept[:half], kept[half:], strict=True):
        check_same(models.local(one) + 0, models.local(other) + 0, "an alias")
    optimizer.close()


def end(how: str) -> None:
    """Gradients outlive the optimizer, and host memory goes back."""
    gc.collect()
    before = held_bytes()
    plain, mine = build(1), build(1)
    optimizer = wrap(mine)
    check(any("gradients" in holder for holder in held_bytes()), "who holds host memory")
    for model in (plain, mine):
        loss_of(model, 0).backward()
        clip(model)
    if how == "close":
        optimizer.close()
        check(not any(away(mine)), "still away")
        check(held_bytes() == before, f"held: {held_bytes()}")
    del optimizer
    gc.collect()
    for model in (plain, mine):
        loss_of(model, 1).backward()
    for one, other in zip(gradients(mine), gradients(plain), strict=True):
        check_same(one.full_tensor(), other.full_tensor(), "a gradient")
    check(not any(away(mine)), "gradients leave for nobody")
    del one, other
    mine.zero_grad()
    gc.collect()
    check(not any("gradients" in holder for holder in held_bytes()), f"held: {held_bytes()}")


def two_phases() -> None:
    """Beside a PhaseOffloader, which drops gradients that were consumed."""
    plain, mine = build(1), build(1)
    pairs = [(plain, wrap(plain, offload="state")), (mine, wrap(mine))]
    for model, optimizer in pairs:
        phases = PhaseOffloader(model, optimizer)
        for index in range(3):
            loss_of(model, index).backward()
            clip(model)
            optimizer.step()
            if index == 1:
                optimizer.zero_grad()
            phases.offload().wait()
            phases.reload()
            optimizer.zero_grad()
        phases.close()
        optimizer.close()
    compare(mine, plain, "a weight")


def one_copy() -> None:
    """The gradients of a group are stored, and fetched for accumulation, by one copy; the group
    that follows is fetched ahead."""
    model = build(1)
    optimizer = wrap(model)
    gradients: Any = optimizer._updates.gradients
    link = gradients.mover.link
    with (
        mock.patch.object(link, "store", wraps=link.store) as store,
        mock.patch.object(link, "fetch", wraps=link.fetch) as fetch,
    ):
        for index in range(3):
            loss_of(model, index).backward()
    groups = len(gradients._stores)
    check(store.call_count == 3 * groups, f"{store.call_count} stores")
    check(fetch.call_count == 2 * groups, f"{fetch.call_count} fetches")
    calls = store.call_args_list + fetch.call_args_list
    check(all(len(call.args[0].host) == 1 for call in calls), "several copies")
    check(gradients._follows[3] == 2, f"{gradients._follows}")
    optimizer.close()


def two_optimizers() -> None:
    """Each has gradients of the same FSDP2 groups."""
    plain, mine = build(1), build(1)
    seen: list[list[Any]] = []
    for model, offload in ((plain, "state"), (mine, "all")):
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizers = [
            HybridDeviceOptimizer(
                torch.optim.AdamW(some, lr=0.02), model, offload=offload, device_memory=0,
                transfer=models.TRANSFER, overlap="step",
            )
            for some in (trained[::2], trained[1::2])
        ]  # fmt: skip
        seen.append([])
        for index in range(2 * STEPS):
            loss_of(model, index).backward()
            if index % 2:
                seen[-1] += clip(model)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        seen[-1] += whole(list(model.parameters()))
        for optimizer in optimizers:
            optimizer.close()
    for one, other in zip(*seen, strict=True):
        check_same(one, other, "beside another optimizer")


def no_room() -> None:
    """Gradients that cannot come back stay where they are, and nothing is lost."""
    plain, mine = build(1), build(1)
    optimizer = wrap(mine)
    backend = optimizer._updates.gradients.mover.backend  # type: ignore[union-attr]
    for model in (plain, mine):
        loss_of(model, 0).backward()
    full = mock.patch.object(backend, "allocate", side_effect=torch.OutOfMemoryError("full"))
    with full, pytest.raises(DeviceMemoryError, match="gradients"):
        gradients(mine)[0].add_(1.0)
    with full, pytest.raises(DeviceMemoryError, match="gradients"):
        optimizer.close()
    check(all(away(mine)), "away")
    optimizer.close()
    for one, other in zip(gradients(mine), gradients(plain), strict=True):
        check_same(one.full_tensor(), other.full_tensor(), "a gradient")


def step_without_room(optimizer: HybridDeviceOptimizer) -> None:
    backend = optimizer._updates.reserved.backend
    full = mock.patch.object(backend, "allocate", side_effect=torch.OutOfMemoryError("full"))
    with full, pytest.raises(DeviceMemoryError, match="gradients"):
        optimizer.step()


def no_room_in_step() -> None:
    """The first ``step()`` updates nothing, and the second everything."""
    plain, mine = build(1), build(1)
    for model, offload in ((plain, "state"), (mine, "all")):
        optimizer = wrap(model, offload=offload, overlap="step")
        loss_of(model, 0).backward()
        if offload == "all":
            step_without_room(optimizer)
        optimizer.step()
        optimizer.close()
    compare(mine, plain, "a weight")


def no_room_for_what_was_accumulated() -> None:
    """Of a block that the last micro-batch skips: the first ``step()`` ends nothing."""
    plain, mine = build(1), build(1)
    for model, offload in ((plain, "state"), (mine, "all")):
        optimizer = wrap(model, offload=offload, overlap="backward")
        with optimizer.accumulate():
            loss_of(model, 0).backward()
        loss_of(model, 1, skip=1).backward()
        if offload == "all":
            step_without_room(optimizer)
            next(p for p in model.parameters() if type(p.grad) is DTensor).grad.add_(0.0)
        optimizer.step()
        optimizer.close()
    compare(mine, plain, "a weight")


def no_room_for_what_is_fetched_ahead() -> None:
    """It is fetched when it is needed; and nothing is kept of a reduction that failed."""
    plain, mine = build(1), build(1)
    pairs = [
        (m, wrap(m, offload=o, overlap="backward")) for m, o in ((plain, "state"), (mine, "all"))
    ]
    for model, optimizer in pairs:
        with optimizer.accumulate():
            loss_of(model, 0).backward()
    gradients: Any = pairs[1][1]._updates.gradients
    start, calls = gradients.mover.start, itertools.count()

    def full(*arguments: Any) -> Any:
        if next(calls) == 2:
            raise DeviceMemoryError("gradients", reason="a test", remedy="none")
        return start(*arguments)

    loss_of(plain, 1).backward()
    with mock.patch.object(gradients.mover, "start", full):
        loss_of(mine, 1).backward()
    check(next(calls) > 3, "it was fetched later")
    for _, optimizer in pairs:
        optimizer.step()
    compare(mine, plain, "a weight")
    model, optimizer = pairs[1]
    optimizer.zero_grad()
    with optimizer.accumulate():
        loss_of(model, 2).backward()
    fails = mock.patch.object(BucketUpdate, "run", side_effect=ZeroDivisionError)
    with fails, pytest.raises(LaneError):
        loss_of(model, 3).backward()
    check(not any(store.returned for store in gradients._stores), "gradients are kept")
    for _, optimizer in pairs:
        optimizer.close()


def accumulate_for_the_first_time() -> None:
    """Without host memory, and then in ``inference_mode``."""
    plain, mine = build(1), build(1)
    for model, offload in ((plain, "state"), (mine, "all")):
        optimizer = wrap(model, offload=offload, overlap="backward")
        error = HostMemoryError("gradients", reason="a test", remedy="none")
        short = mock.patch.object(HostPool, "take", side_effect=error)
        if offload == "all":
            with short, pytest.raises(HostMemoryError), optimizer.accumulate():
                raise AssertionError("entered")
        with torch.inference_mode():
            context = optimizer.accumulate()
            context.__enter__()
        loss_of(model, 0).backward()
        context.__exit__(None, None, None)
        loss_of(model, 1).backward()
        optimizer.step()
        optimizer.close()
    compare(mine, plain, "a weight")


def update_fails() -> None:
    """More often than there are slots, each time made good by a load."""
    plain, mine = build(1), build(1)
    reference, optimizer = wrap(plain, offload="state"), wrap(mine)
    state = optimizer.state_dict()
    for _ in range(6):
        weights = {name: value.clone() for name, value in mine.state_dict().items()}
        saved = copy.deepcopy(
            {"state": dict(state["state"]), "param_groups": state["param_groups"]}
        )
        loss_of(mine, 0).backward()
        fails = mock.patch.object(BucketUpdate, "run", side_effect=ZeroDivisionError)
        with fails, pytest.raises(LaneError):
            optimizer.step()
        mine.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        optimizer.zero_grad()
    for model, each in ((plain, reference), (mine, optimizer)):
        loss_of(model, 1).backward()
        each.step()
        each.close()
    compare(mine, plain, "a weight")


def stay(options: dict[str, Any]) -> None:
    model = build(1)
    optimizer = wrap(model, **options)
    loss_of(model, 0).backward()
    check(optimizer.statistics().host_gradient_bytes == 0, "host memory")
    has_room = options.get("device_memory") == "1GiB"
    check(not has_room or optimizer.statistics().host_weight_bytes == 0, "weights have left")
    check(options.get("overlap") == "backward" or not any(away(model)), "away")
    optimizer.step()
    optimizer.close()


def host_memory_is_short() -> None:
    gc.collect()
    before, model = held_bytes(), build(1)
    optimizer = wrap(model)
    needed = sum(held_bytes().values())
    optimizer.close()
    with pytest.raises(HostMemoryError, match="gradients"):
        wrap(model, host_memory=f"{needed - 1000}B")
    check(held_bytes() == before, f"held: {held_bytes()}")


JOBS = (
    read,
    one_copy,
    keep_alias,
    two_phases,
    two_optimizers,
    no_room,
    no_room_in_step,
    no_room_for_what_was_accumulated,
    no_room_for_what_is_fetched_ahead,
    accumulate_for_the_first_time,
    update_fails,
)


@pytest.mark.parametrize("job", [*JOBS, host_memory_is_short], ids=lambda job: job.__name__)
def test_jobs(ranks: Ranks, job: Callable[[], None]) -> None:
    ranks(1).run(job)


@pytest.mark.parametrize("how", ["close", "delete"])
def test_gradients_outlive_the_optimizer(ranks: Ranks, how: str) -> None:
    ranks(1).run(end, how)


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": "backward"},
        {"device_memory": "1GiB"},
        {"offload": "state"},
        {"update_on": "host"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_gradients_stay(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks(1).run(stay, options)
