"""``offload="all"``: weights live in host memory, and nothing else changes a bit."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fsdp_offload import (
    ClosedError,
    ConfigError,
    DeviceMemoryError,
    HostMemoryError,
    HybridDeviceOptimizer,
    PhaseOffloader,
    checkpoint,
)
from fsdp_offload.core.devices import CpuBackend
from fsdp_offload.core.fsdp import Group, fsdp_groups
from fsdp_offload.core.gated import keeper_of
from fsdp_offload.link import held_bytes
from fsdp_offload.optimizer import weight_slots
from tests.fsdp import models
from tests.fsdp.models import Ranks, check, check_same
from tests.fsdp.test_gated import READERS, as_parts
from tests.fsdp.test_gated import same as same_parts
from tests.fsdp.test_overlap import SETTINGS, loss_of, mesh_of
from tests.helpers.covering import covering

FP32, BF16 = torch.float32, torch.bfloat16
STEPS = 4
FROZEN = ("embed", "up", "blocks.2")
"""The tied embedding, part of two blocks, and all of one."""


def build(
    size: int, *, dtype: torch.dtype = FP32, hybrid: bool = False, recomputes: str = "",
    freezes: bool = False, setting: str = "", **options: Any,
) -> Any:  # fmt: skip
    """``freezes``: most of the parameters; else one. ``recomputes``: all, or "some" operations of
    blocks, "inside" of FSDP2's modules or "outside"."""
    how = {"context_fn": keep_some} if "some" in recomputes else {}
    torch.manual_seed(0)
    model = models.Toy().to(dtype)
    for name, parameter in model.named_parameters():
        if freezes and (name.startswith(FROZEN) or ".up." in name):
            parameter.requires_grad_(False)
    if "inside" in recomputes:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block, **how)
    models.shard(model, mesh_of(size, hybrid), **options)
    if "outside" in recomputes:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block, **how)
    if setting:
        SETTINGS[setting](model)
    return model


def keep_some() -> Any:
    """Selective activation checkpointing: products of matrices are kept."""
    kept = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

    def policy(context: object, func: object, *_: object, **__: object) -> CheckpointPolicy:
        is_kept = func in kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=0.02, weight_decay=0.1)


def wrap(model: Any, **options: Any) -> HybridDeviceOptimizer:
    options = {"transfer": models.TRANSFER, "device_memory": 0, "offload": "all", **options}
    return HybridDeviceOptimizer(adamw(model), model, **options)


def sharded(model: Any) -> list[Any]:
    groups = (Group(*group) for group in fsdp_groups([model]))
    return [p for group in groups for p in group.parameters]


def away(model: Any) -> list[bool]:
    """Whether each weight is in host memory, and FSDP2 has no memory of it."""
    groups = (Group(*group) for group in fsdp_groups([model]))
    shards = [s for group in groups for s in group.shards]
    found = [keeper_of(s.parameter._local_tensor) is not None for s in shards]  # type: ignore[attr-defined]
    empty = [s.padded.numel() == 0 for s in shards]
    check(found == empty, f"{found} is not {empty}")
    return found


def step(model: Any, optimizer: Any, index: int, **how: Any) -> float:
    loss = loss_of(model, index, **how)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def whole(model: Any) -> dict[str, Tensor]:
    return {n: models.local(p).clone() for n, p in model.state_dict().items()}


def compare(found: Any, expected: Any, what: str) -> None:
    mine, theirs = found.state_dict(), expected.state_dict()
    check(mine.keys() == theirs.keys(), f"{what}: keys")
    for name, value in theirs.items():
        check_same(models.local(mine[name]), models.local(value), f"{what}: {name}")


# --------------------------------------------------------------------------- training


@torch.no_grad()
def evaluate(model: Any, index: int) -> list[Any]:
    return [loss_of(model, 100 + index).item()]


def fail_in_forward(model: Any, index: int) -> list[Any]:
    block = model.blocks[1]

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    handle = block.register_forward_hook(fail)
    with contextlib.suppress(ZeroDivisionError):
        loss_of(model, index)
    handle.remove()
    model.reset_iter_state() if hasattr(model, "reset_iter_state") else model.reshard()
    return []


def fail_in_backward(model: Any, index: int) -> list[Any]:
    handle = model.blocks[1].up.register_full_backward_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        loss_of(model, 70 + index).backward()
    handle.remove()
    model.reset_iter_state() if hasattr(model, "reset_iter_state") else model.reshard()
    return []


def twice(model: Any, index: int) -> list[Any]:
    """A layer that is called again, and a whole forward that nothing follows."""
    blocks = model.blocks
    model.blocks = nn.ModuleList([blocks[0], blocks[1], blocks[1], blocks[0], blocks[2]])
    loss_of(model, index).backward()
    found = [loss_of(model, index).item()]
    model.blocks = blocks
    return found


def accumulate(model: Any, index: int) -> list[Any]:
    model.set_requires_gradient_sync(False)
    loss_of(model, 50 + index).backward()
    model.set_requires_gradient_sync(True)
    return []


BETWEEN: dict[str, Callable[[Any, int], list[Any]]] = {
    "": lambda model, index: [],
    "evaluation": evaluate,
    "fails": fail_in_forward,
    "fails in backward": fail_in_backward,
    "twice": twice,
    "accumulation": accumulate,
}


def train(model: Any, optimizer: Any, between: str, stay_bytes: int = 0) -> list[Any]:
    """``stay_bytes``: for state that stays on the device from the second step on."""
    seen: list[Any] = []
    for index in range(STEPS):
        if index == 1 and stay_bytes:
            ring = optimizer._updates.reserved.engine.ring
            ring.fit(stay_bytes, 1)
            check(0 < len(ring.staying) < len(ring.sizes), "some buckets stay")
        seen += BETWEEN[between](model, index)
        seen.append(step(model, optimizer, index, skip=1 if index == 1 else None))
    return seen


def train_both(
    size: int, between: str = "", *, slots: int = 3, dtype: torch.dtype = FP32, **how: Any
) -> None:
    """The plain twin in fp32, else the one with ``offload="state"``."""
    overlap, stay_bytes = how.pop("overlap", None), how.pop("stay_bytes", 0)
    memory, all_leave = how.pop("memory", 0), "memory" not in how
    options = {"overlap": overlap, "moments": how.pop("moments", None)}
    with mock.patch.object(weight_slots, "SLOTS", slots):
        plain, mine = (build(size, dtype=dtype, **how) for _ in range(2))
        reference: Any = adamw(plain)
        if dtype != FP32:
            reference = wrap(plain, offload="state", **options)
        optimizer = wrap(mine, device_memory=memory, **options)
        check(any(away(mine)) and all(away(mine)) == all_leave, f"away: {away(mine)}")
        expected = train(plain, reference, between)
        found = train(mine, optimizer, between, stay_bytes)
        check(found == expected, f"losses {found} are not {expected}")
        check(all(away(mine)) == all_leave and any(away(mine)), "still away")
        compare(mine, plain, "weights")
        optimizer.close()
        check(not any(away(mine)), "back")
        compare(mine, plain, "weights that are back")
        check(evaluate(mine, 0) == evaluate(plain, 0), "a forward after close()")


@pytest.mark.parametrize(
    ("between", "freezes", "size"), covering(itertools.product(BETWEEN, (False, True), (1, 2)))
)
def test_training_has_the_same_bits(ranks: Ranks, between: str, freezes: bool, size: int) -> None:
    ranks(size).run(train_both, size, between, freezes=freezes)


CASES: dict[str, dict[str, Any]] = {
    "one slot": {"slots": 1, "between": "twice"},
    "five slots": {"slots": 5},
    "bf16": {"dtype": BF16},
    "bf16 backward": {"dtype": BF16, "overlap": "backward", "between": "evaluation"},
    "fp16": {"dtype": torch.float16},
    "bf16 moments": {"dtype": BF16, "moments": "bf16"},
    "backward": {"overlap": "backward"},
    "step": {"overlap": "step", "between": "evaluation"},
    "buckets stay": {"stay_bytes": 40_000, "between": "evaluation"},
    "buckets stay, backward": {"stay_bytes": 40_000, "overlap": "backward"},
    "buckets stay, bf16": {"stay_bytes": 40_000, "dtype": BF16, "overlap": "step"},
    "checkpoint inside": {"recomputes": "inside"},
    "checkpoint outside": {"recomputes": "outside"},
    "recomputes some inside": {"recomputes": "some inside", "overlap": "backward"},
    "recomputes some outside": {"recomputes": "some outside"},
    "several blocks": {"together": 2},
    "root keeps": {"reshard_after_forward": False},
    "some stay": {"memory": "30000B", "between": "evaluation"},
    "some stay, backward": {"memory": "16000B", "overlap": "backward", "dtype": BF16},
    **{name: {"setting": name, "overlap": "backward"} for name in SETTINGS},
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)},
}


@pytest.mark.parametrize("case", list(CASES))
def test_training_in_many_ways_has_the_same_bits(ranks: Ranks, size: int, case: str) -> None:
    ranks(size).run(train_both, size, **CASES[case])


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"hybrid": True}, marks=pytest.mark.long),
        pytest.param({"reshard_after_forward": 2}, marks=pytest.mark.long),
        pytest.param({"hybrid": True, "dtype": BF16}, marks=pytest.mark.long),
        {"hybrid": True, "dtype": torch.float16, "overlap": "backward"},
    ],
)
def test_training_on_four_ranks_has_the_same_bits(ranks: Ranks, how: dict[str, Any]) -> None:
    ranks(4).run(train_both, 4, "evaluation", **how)


# --------------------------------------------------------------------------- fetching ahead


def count_fetches(freezes: bool) -> None:
    """After an iteration that shows the order, each gather finds its group in a slot, and each
    group is fetched once per gather at most."""
    model = build(dist.get_world_size(), freezes=freezes)
    optimizer = wrap(model, overlap="step")
    held: Any = optimizer._updates.weights
    for index in range(4):
        with (
            mock.patch.object(held, "_fetch", wraps=held._fetch) as fetch,
            mock.patch.object(held, "lending", wraps=held.lending) as lend,
        ):
            step(model, optimizer, 0)
        late = [which for (which, wanted), _ in fetch.call_args_list if not wanted]
        check(index < 2 or not late, f"fetched late in iteration {index}: {late}")
        check(index < 2 or 0 < fetch.call_count <= lend.call_count, f"{fetch.call_count} fetches")
    optimizer.close()


@pytest.mark.parametrize(("freezes", "size"), covering(itertools.product((False, True), (1, 2))))
def test_weights_are_fetched_ahead(ranks: Ranks, freezes: bool, size: int) -> None:
    ranks(size).run(count_fetches, freezes)


# --------------------------------------------------------------------------- readers and writers


WAYS = {
    "frozen": {"freezes": True},
    "forward": {},
    "backward": {"overlap": "backward"},
    "step in bf16": {"overlap": "step", "dtype": BF16},
    "forward in fp16": {"dtype": torch.float16},
}
"""What is built, and how it is updated."""


def both(
    what: str, *, overlap: str | None = None, **how: Any
) -> Iterator[tuple[Any, HybridDeviceOptimizer, list[Any]]]:
    """A model with its weights on the device, then one with them in host memory, and a list for
    what is seen of each, which has to be the same."""
    found: list[list[Any]] = []
    for offload in ("state", "all"):
        model = build(dist.get_world_size(), **how)
        optimizer = wrap(model, offload=offload, overlap=overlap)
        found.append([])
        yield model, optimizer, found[-1]
        check(all(away(model)) == any(away(model)) == (offload == "all"), f"{what}: away again")
        found[-1] += whole(model).values()
        optimizer.close()
        found[-1] += [models.local(p).clone() for p in sharded(model)]
    wrong = [i for i, pair in enumerate(zip(*found, strict=True)) if not same_parts(*pair)]
    check(not wrong, f"{what}: {wrong} of {len(found[0])}")


def read(name: str, way: str) -> None:
    """What a reader or a writer gets, and leaves, of weights."""
    for model, optimizer, seen in both(name, **WAYS[way]):
        step(model, optimizer, 0)
        chosen = [p for p in sharded(model) if len(p) > 1]
        is_trained = chosen[0].requires_grad
        chosen[0].requires_grad_(is_trained or name == "autograd")
        seen += as_parts(READERS[name](chosen))
        chosen[0].requires_grad_(is_trained)
        seen.append(step(model, optimizer, 1))


IN_FP32 = ("numpy", "collectives", "convert")
"""What has no bf16, or is of fp32 itself."""


def ways(names: Any) -> list[tuple[str, str]]:
    return [(n, w) for n in names for w in WAYS if n not in IN_FP32 or "dtype" not in WAYS[w]]


@pytest.mark.parametrize(("name", "way"), covering(ways(READERS)))
def test_every_reader_gets_values_and_every_writer_is_heard(
    ranks: Ranks, size: int, name: str, way: str
) -> None:
    ranks(size).run(read, name, way)


# --------------------------------------------------------------------------- state dicts and loads


def state_dict_plain(model: Any, folder: str) -> Any:
    return whole(model)


def state_dict_full(model: Any, folder: str) -> Any:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


def doubled(model: Any) -> dict[str, Any]:
    """Other values, as a state dict."""
    return {name: value.detach() * 2 + 1 for name, value in model.state_dict().items()}


def load_plain(model: Any, folder: str) -> Any:
    model.load_state_dict(doubled(model))


def load_assigned(model: Any, folder: str) -> Any:
    model.load_state_dict(doubled(model), assign=True)


@torch.no_grad()
def write_then_assign(model: Any, folder: str) -> Any:
    """What was written before is not the weight any more."""
    state = doubled(model)
    for p in sharded(model):
        p.mul_(7.0)
    model.load_state_dict(state, assign=True)


def load_by_torch(model: Any, folder: str) -> Any:
    set_model_state_dict(model, doubled(model))


def save_and_load_by_dcp(model: Any, folder: str) -> Any:
    dcp.save(model.state_dict(), checkpoint_id=folder)
    load_plain(model, folder)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)


def convert(model: Any, folder: str) -> Any:
    model.to(torch.float32)
    model.to("cpu")


@torch.no_grad()
def initialise(model: Any, folder: str) -> Any:
    torch.manual_seed(dist.get_rank())
    for p in sharded(model):
        nn.init.normal_(p.to_local())
        p.data.mul_(0.5)


@torch.no_grad()
def hold_a_view(model: Any, folder: str) -> Any:
    """Written before and after the next gather."""
    model.held = [p.to_local()[0:1] for p in sharded(model)]
    for each in model.held:
        each.fill_(0.25)


@torch.no_grad()
def write_held(model: Any) -> None:
    for each in getattr(model, "held", ()):
        each.add_(0.5)
    vars(model).pop("held", None)


CHANGES: dict[str, Callable[[Any, str], Any]] = {
    function.__name__: function
    for function in (
        *(state_dict_plain, state_dict_full, load_plain, load_assigned, load_by_torch),
        write_then_assign,
        *(save_and_load_by_dcp, convert, initialise, hold_a_view),
    )
}


def change(name: str, folder: str, early: bool, way: str) -> None:
    """Between two steps, or (``early``) before FSDP2 has seen its first forward."""
    for number, (model, optimizer, seen) in enumerate(both(name, **WAYS[way])):
        if not early:
            seen.append(step(model, optimizer, 0))
        result = CHANGES[name](model, f"{folder}/{number}")
        seen += as_parts(list(result.values())) if isinstance(result, dict) else []
        if "assign" in name:  # the optimizer has others then
            seen.append(loss_of(model, 1).item())
        else:
            seen.append(step(model, optimizer, 1))
            write_held(model)
            seen.append(step(model, optimizer, 2))


@pytest.mark.parametrize(
    ("name", "way", "early"),
    covering((*each, early) for each in ways(CHANGES) for early in (False, True)),
)
def test_state_dicts_and_loads(
    ranks: Ranks, size: int, name: str, way: str, early: bool, tmp_path: Path
) -> None:
    ranks(size).run(change, name, str(tmp_path), early, way)


def load_below_a_view(folder: str) -> None:
    """A view that the caller holds across a load shows what was loaded, and is heard after it."""
    for number, (model, optimizer, seen) in enumerate(both("a view")):
        step(model, optimizer, 0)
        checkpoint.save(f"{folder}/{number}", model, optimizer)
        views = [p.to_local().detach()[0:1] for p in sharded(model)]
        for each in views:
            each.fill_(7.0)
        checkpoint.load(f"{folder}/{number}", model, optimizer)
        seen += [*(each.clone() for each in views), step(model, optimizer, 1)]
        for each in views:
            each.add_(0.5)
        del each, views
        seen.append(step(model, optimizer, 2))


def test_a_view_across_a_load(ranks: Ranks, size: int, tmp_path: Path) -> None:
    ranks(size).run(load_below_a_view, str(tmp_path))


# --------------------------------------------------------------------------- from start to end


def weights_held() -> int:
    gc.collect()
    return held_bytes().get("HybridDeviceOptimizer: weights", 0)


def unfreeze() -> None:
    """A weight that is trained from now on comes back, also to an optimizer of other weights."""
    found = []
    for offload in ("state", "all"):
        model = build(dist.get_world_size(), freezes=True)
        first, second = model.blocks[0].up.weight, model.blocks[2].up.weight
        optimizer = wrap(model, offload=offload)
        step(model, optimizer, 0)
        first.requires_grad_(True)
        second.requires_grad_(True)
        with torch.no_grad():
            view = model.blocks[0].down.weight.to_local()
            view.mul_(2)  # nothing may drop this
        optimizer.add_param_group({"params": [first], "lr": 0.01})
        del view
        other = HybridDeviceOptimizer(torch.optim.SGD([second], lr=0.1, momentum=0.9), model)
        seen: list[Any] = []
        for index in range(1, 4):
            seen.append(loss_of(model, index).item())
            loss_of(model, index).backward()
            other.step()
            other.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        if offload == "all":
            check(away(model).count(False) == 2, "the others stay away")
        other.close()
        optimizer.close()
        found.append(seen + [models.local(p).clone() for p in model.parameters()])
    check(same_parts(*found), "unfrozen")


def delete(by: str) -> None:
    """The weights outlive their optimizer, and go with their model."""
    model = build(dist.get_world_size())
    reference = build(dist.get_world_size())
    optimizer = wrap(model)
    find = weakref.ref(optimizer._updates.weights)
    check(weights_held() > 0, "held")
    if by == "optimizer":
        del optimizer
        check(evaluate(model, 0) == evaluate(reference, 0), "without an optimizer")
        compare(model, reference, "without an optimizer")
        model.zero_grad()
        optimizer = wrap(model)  # what a later one trains comes back, and leaves no more
        trained = [p.requires_grad for p in sharded(model)]
        check([not each for each in away(model)] == trained, f"{away(model)} of {trained}")
        compare(model, reference, "with another optimizer")
        optimizer.close()
    else:
        optimizer.close()
        check(weights_held() == 0, "given back")
    del model, optimizer
    gc.collect()
    check(find() is None and weights_held() == 0, "gone with the model")


def delete_what_refers_to_itself() -> None:
    """A model that has its optimizer, as a trainer's module does, goes with it."""
    model = build(dist.get_world_size())
    model.optimizer = wrap(model)
    step(model, model.optimizer, 0)
    parameter = model.blocks[0].up.weight
    expected = models.local(parameter).clone()
    find = weakref.ref(model)
    del model
    gc.collect()
    gc.collect()
    check(find() is None, "gone")
    check_same(models.local(parameter), expected, "a parameter that outlives both")
    del parameter
    gc.collect()
    check(weights_held() == 0, "memory")


def refuse() -> None:
    model = build(dist.get_world_size())
    with pytest.raises(ConfigError, match=r"fsdp_offload\.shard\(model\) or fully_shard"):
        wrap(nn.Linear(3, 3))
    with pytest.raises(ConfigError, match='"state" or "all"'):
        wrap(model, offload="weights")
    before = list(whole(model).values())
    optimizer = wrap(model, offload="state")
    enough = optimizer.statistics().host_arena_bytes + 100
    optimizer.close()
    gc.collect()
    held = held_bytes()
    for n_bytes, what in ((enough, "state of AdamW"), (9000, "weights")):
        with pytest.raises(HostMemoryError, match=rf"{what}: .*\d{{4}}"):
            wrap(model, host_memory=f"{n_bytes}B")
        is_same = same_parts(list(whole(model).values()), before)
        gc.collect()
        check(not any(away(model)) and is_same and held_bytes() == held, "as before")
    wrap(model).close()


def refuse_a_small_device(every: str) -> None:
    """Whichever of its allocations fails, the constructor names it, and leaves all as it was."""
    allocate, seen = CpuBackend.allocate, set[str]()
    for index in range(0, 100, int(every)):
        model = build(dist.get_world_size())
        gc.collect()
        before, held, calls = list(whole(model).values()), held_bytes(), itertools.count()

        def limited(backend: Any, n_bytes: int, index: int = index, calls: Any = calls) -> Tensor:
            if next(calls) == index:
                raise torch.OutOfMemoryError("full")
            return allocate(backend, n_bytes)

        try:
            with mock.patch.object(CpuBackend, "allocate", limited):
                optimizer = wrap(model)
        except DeviceMemoryError as error:
            seen.add(re.sub(r"^\d+\.\d\d MiB", "N MiB", error.what))
        else:
            optimizer.close()
            break
        gc.collect()
        check(same_parts(list(whole(model).values()), before), "weights")
        check(not any(away(model)) and held_bytes() == held, f"as before: {held_bytes()}")
        optimizer = wrap(model)
        step(model, optimizer, 0)
        optimizer.close()
    check(seen == {f"N MiB on the device for {each}" for each in ("weights", "state")}, f"{seen}")


def offload_in_phases(params: str) -> None:
    """Weights that are in host memory are none of a PhaseOffloader's."""
    for model, optimizer, seen in both("phases"):
        step(model, optimizer, 0)
        phases = PhaseOffloader(model, optimizer, params=params)
        with phases.away():
            pass
        seen.append(step(model, optimizer, 1))
        phases.close()


def fork() -> None:
    """A forked process gets an error, not a crash."""
    model = build(dist.get_world_size())
    optimizer = wrap(model)
    pid = os.fork()
    if not pid:
        try:
            sharded(model)[0].norm()
        except ClosedError:
            os._exit(7)
        finally:
            os._exit(1)
    check(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7, "a typed error")
    optimizer.close()


def fetch_again() -> None:
    """After Ctrl-C in a fetch, what the slot has is not taken for the group's."""
    model = build(dist.get_world_size())
    optimizer = wrap(model)
    evaluate(model, 0)
    model.reshard()
    weights: Any = optimizer._updates.weights
    group, stream = weights.away[-1], weights.backend.current_stream()
    for index in range(len(weights.away)):
        weights.slots.evict(index)
    with weights.lending(0, stream):
        weights.slots.following = dict  # nothing more is fetched ahead
    weights.slots.evict(0)
    interrupted = mock.patch.object(weights._link, "fetch", side_effect=KeyboardInterrupt)
    with interrupted, contextlib.suppress(KeyboardInterrupt):
        with weights.lending(group[0].index, stream):
            raise AssertionError("not interrupted")
    with weights.lending(group[0].index, stream):
        check(same_parts([e.held.padded for e in group], [e.host for e in group]), "weights")
    optimizer.close()


@torch.no_grad()
def hold_no_copies() -> None:
    """What reads, or writes without a view that stays, leaves nothing on the device."""
    model = build(dist.get_world_size())
    optimizer = wrap(model)
    with torch.enable_grad():
        step(model, optimizer, 0)
    for p in sharded(model):
        p.detach().norm()
        (p * 2).sum().item()
        p.to_local().clone()
        p.add_(1)
        p.to_local().mul_(2)
    torch._foreach_mul_(sharded(model), 0.5)
    held: Any = optimizer._updates.weights
    check(not any(each.kept is not None for group in held.away for each in group), "kept copies")
    state = model.state_dict()
    [value.to_local().sum() for value in state.values()]
    checkpoint.state.weights_of([model])
    check(not any(each.kept is not None for group in held.away for each in group), "kept copies")
    stat = optimizer.statistics()
    check(stat.host_weight_bytes == held.host_bytes > 0, f"statistics {stat}")
    optimizer.close()


def close_on_a_full_device() -> None:
    """State makes room for weights that come back; without room, training goes on."""
    model, reference = build(dist.get_world_size()), build(dist.get_world_size())
    optimizer, plain = wrap(model), adamw(reference)
    ring = optimizer._updates.reserved.engine.ring
    spare = sum(ring.sizes.values()) * 3 // 4
    step(model, optimizer, 0)
    ring.fit(spare, 1)
    check(len(ring.staying) > 0, "state stays")
    allocate = CpuBackend.allocate

    def full(backend: Any, n_bytes: int) -> Tensor:
        raise torch.OutOfMemoryError("full")

    def shared(backend: Any, n_bytes: int) -> Tensor:
        return (full if ring.staying else allocate)(backend, n_bytes)

    with mock.patch.object(CpuBackend, "allocate", full), pytest.raises(DeviceMemoryError):
        optimizer.close()
    check(any(away(model)), "as before")
    step(model, optimizer, 1)
    ring.fit(spare, 100)
    check(len(ring.staying) > 0, "state stays again")
    with mock.patch.object(CpuBackend, "allocate", shared):
        optimizer.close()
    for index in range(2):
        step(reference, plain, index)
    compare(model, reference, "after close()")


def copy_parameters() -> None:
    model = build(dist.get_world_size())
    reference = build(dist.get_world_size())
    optimizer = wrap(model)
    for mine, theirs in zip(sharded(model), sharded(reference), strict=True):
        check_same(copy.deepcopy(mine), theirs, "deepcopy")
        check(type(copy.deepcopy(mine)._local_tensor) is Tensor, "a tensor of its own")
        check(mine.device == theirs.device and isinstance(mine, DTensor), "its looks")
    optimizer.close()


@pytest.mark.parametrize(
    ("job", "arguments"),
    [
        *((job, ()) for job in (unfreeze, refuse, fork)),
        (refuse_a_small_device, ("3",)),
        pytest.param(refuse_a_small_device, ("1",), marks=pytest.mark.long),
        (close_on_a_full_device, ()),
        (delete_what_refers_to_itself, ()),
        *((job, ()) for job in (fetch_again, hold_no_copies, copy_parameters)),
        *((delete, (by,)) for by in ("optimizer", "model")),
        *((offload_in_phases, (params,)) for params in ("save", "keep")),
    ],
    ids=lambda value: getattr(value, "__name__", None) or "-".join(value),
)
def test_from_start_to_end(ranks: Ranks, size: int, job: Any, arguments: tuple[str, ...]) -> None:
    ranks(size).run(job, *arguments)


def order_in_backward() -> None:
    model = build(1)
    optimizer = wrap(model, overlap="backward")
    updates: Any = optimizer._updates
    ring = updates.reserved.engine.ring
    groups = {r.index: gate.rank for gate in updates.overlap.gates for r in gate.params}
    spans = [sorted({groups[i] for i in bucket.indices}) for bucket in ring.buckets]
    shared = [index for index, of in enumerate(spans) if len(of) > 1]
    check(len(shared) > 1, f"{spans}")
    for index in shared:
        alike = [i for i, of in enumerate(spans) if of[0] == spans[index][0]]
        check(min(alike, key=ring.order.index) == index, f"{ring.order} of {spans}")
    optimizer.close()


def test_a_slot_is_free_when_its_group_is_updated(ranks: Ranks) -> None:
    """The next weights go into the slot of the group before: a bucket of both passes first."""
    ranks(1).run(order_in_backward)
