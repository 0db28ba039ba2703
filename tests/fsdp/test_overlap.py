"""Updates beside forward and backward give the plain optimizer's bits with real FSDP2 models."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from fsdp_offload import (
    HybridDeviceOptimizer,
    SpentGradientError,
    StateSchemaError,
    TransferConfig,
    checkpoint,
)
from fsdp_offload.core.fsdp import fsdp_groups
from tests.fsdp import models
from tests.fsdp.models import Ranks, check, check_same, check_twins
from tests.helpers.covering import covering

STEPS = 4
BOTH = ("forward", "backward")
MORE = (pytest.param("forward", marks=pytest.mark.long), "backward")
"""Where the harder one of the two stands for both."""
MIXED = ("streamed", "host", "resident")
FP32, BF16 = torch.float32, torch.bfloat16
SMALL = TransferConfig(bucket_bytes="4KiB", host_threads=1)


def loss_of(model: Any, step: int, skip: int | None = None) -> Tensor:
    batch = models.tokens(step)
    logits = model(batch, skip=skip)
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.roll(1, 1).flatten())


def mesh_of(size: int, hybrid: bool) -> Any:
    return models.mesh((size // 2, 2), ("replicate", "shard")) if hybrid else models.flat_mesh(size)


def build(
    size: int, *, dtype: torch.dtype = FP32, hybrid: bool = False, recomputes: bool = False,
    setting: str = "", **options: Any,
) -> Any:  # fmt: skip
    torch.manual_seed(0)
    model = models.Toy().to(dtype)
    if recomputes:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block)
    models.shard(model, mesh_of(size, hybrid), **options)
    if setting:
        SETTINGS[setting](model)
    return model


def compile_blocks(model: Any) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


def prefetch_forward(model: Any) -> None:
    for first, second in itertools.pairwise([model, *model.blocks]):
        first.set_modules_to_forward_prefetch([second])


def prefetch_backward(model: Any) -> None:
    first, second, third = model.blocks
    third.set_modules_to_backward_prefetch([second, first])
    second.set_modules_to_backward_prefetch([first])


def add_up_gradients(model: Any) -> None:
    for part in (model, *model.blocks):  # the setter is of one module
        part.set_force_sum_reduction_for_comms(True)


def by_columns(parameter: Tensor) -> Shard | None:
    """FSDP2 cuts other dimensions than the first into even parts alone: here one matrix."""
    is_even = parameter.dim() == 2 and parameter.shape[1] % dist.get_world_size() == 0
    return Shard(1) if is_even else None


SETTINGS: dict[str, Callable[[Any], None]] = {
    "compiled": compile_blocks,
    "prefetch in forward": prefetch_forward,
    "prefetch in backward": prefetch_backward,
    "no reshard after backward": lambda model: model.set_reshard_after_backward(False),
    "no divided gradients": add_up_gradients,
    "zeros for unused parameters": lambda model: model.set_reduce_scatter_unused_params(True),
    "group of reductions": lambda model: model.set_separate_reduce_scatter_group(True),
    "two inputs of reductions": lambda model: model.set_reduce_scatter_max_input_buffers(2),
}
if not hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers"):  # torch 2.11
    for newer in ("zeros for unused parameters", "group of reductions", "two inputs of reductions"):
        del SETTINGS[newer]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(models.groups(model, lr=0.02), weight_decay=0.1, fused=True)


def wrap(model: Any, overlap: str, **options: Any) -> HybridDeviceOptimizer:
    options.setdefault("transfer", SMALL)
    return models.wrap(adamw(model), model, overlap=overlap, **options)


# --------------------------------------------------------------------------- training loops


def micro_batches(model: Any, optimizer: Any, how: str | None) -> Iterator[int]:
    """Three, or one without accumulation; around each, what the user does in that case."""
    if how is None:
        yield 0
        return
    for micro in range(3):
        last = micro == 2
        if how == "sync":
            model.set_requires_gradient_sync(last)
        elif how == "last":
            model.set_is_last_backward(last)
        inside = how == "context" and not last and hasattr(optimizer, "accumulate")
        with optimizer.accumulate() if inside else contextlib.nullcontext():
            yield micro


def train(
    model: Any, optimizer: Any, *, steps: range = range(STEPS), clips: bool = False,
    skips: bool = False, accumulate: str | None = None, evaluates: bool = False,
) -> list[float]:  # fmt: skip
    """Losses (and norms) of a few steps. The fuzz has schedulers, closures and zeroing in place."""
    found: list[float] = []
    for step in steps:
        skip = 1 if skips and step % 3 != 1 else None
        for micro in micro_batches(model, optimizer, accumulate):
            loss = loss_of(model, 10 * step + micro, skip if micro != 1 else None)
            loss.backward()
        found.append(float(loss))
        if clips:
            norm = clip_grad_norm_(model.parameters(), 0.1)
            found.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        check_taken(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if evaluates:
            model.eval()
            with torch.no_grad():
                found.append(float(loss_of(model, 500 + step)))
            model.train()
    return found


def check_taken(optimizer: Any) -> None:
    """In backward mode updates must have begun, or nothing here tests anything."""
    overlap = getattr(optimizer, "_overlap", None)
    if overlap is not None and overlap._in_backward:
        check(overlap.has_taken, "no gradient was taken in backward")


def twins(
    overlap: str, size: int, *, dtype: torch.dtype = FP32, build_how: dict[str, Any] | None = None,
    wrap_how: dict[str, Any] | None = None, **how: Any,
) -> None:  # fmt: skip
    """Losses, parameters and state of a plain optimizer and of ours. bf16: of overlap="step"."""
    make = functools.partial(build, size, dtype=dtype, **(build_how or {}))
    plain, mine = make(), make()
    reference = adamw(plain) if dtype == FP32 else wrap(plain, "step", **(wrap_how or {}))
    optimizer = wrap(mine, overlap, **(wrap_how or {}))
    expected, found = train(plain, reference, **how), train(mine, optimizer, **how)
    check(found == expected, f"losses {found}, plain {expected}")
    optimizer.synchronize()
    for (name, a), b in zip(mine.named_parameters(), plain.parameters(), strict=True):
        check_same(a, b, name)
    check_twins(optimizer, reference, "at the end")
    optimizer.close()


CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "skipped block": {"skips": True},
    "micro-batches without sync": {"accumulate": "sync", "skips": True},
    "micro-batches, last backward": {"accumulate": "last"},
    "micro-batches in accumulate()": {"accumulate": "context", "skips": True},
    "activation checkpointing": {"build_how": {"recomputes": True}},
    "no reshard after forward": {"build_how": {"reshard_after_forward": False}},
    **{name: {"build_how": {"setting": name}, "skips": True} for name in SETTINGS},
    "reshard to two": {"build_how": {"reshard_after_forward": 2}},
    "second dimension": {"build_how": {"shard_placement_fn": by_columns}, "skips": True},
    "several blocks in a group": {"build_how": {"together": 2}},
    "evaluation": {"evaluates": True},
    "half": {"wrap_how": {"offload_fraction": 0.5}, "skips": True},
    "mixed": {"wrap_how": {"update_on": MIXED}, "skips": True},
    "host": {"wrap_how": {"update_on": "host"}, "skips": True},
    "bf16": {"dtype": BF16, "skips": True},
    "bf16 mixed": {"dtype": BF16, "wrap_how": {"update_on": MIXED}},
}
FORWARD_ONLY: dict[str, dict[str, Any]] = {
    "clipping": {"clips": True},
    "clipping of micro-batches": {"clips": True, "accumulate": "sync"},
}
DEFAULT = (
    "skipped block",
    "micro-batches in accumulate()",
    "several blocks in a group",
    "bf16 mixed",
)


def run_cases(overlap: str, size: int, names: tuple[str, ...]) -> None:
    for name in names:
        try:
            twins(overlap, size, **(CASES | FORWARD_ONLY)[name])
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("overlap", BOTH)
def test_the_bits_are_those_of_the_plain_optimizer(ranks: Ranks, overlap: str) -> None:
    ranks(2).run(run_cases, overlap, 2, (*DEFAULT, "clipping") if overlap == "forward" else DEFAULT)


@pytest.mark.long
@pytest.mark.parametrize("overlap", BOTH)
def test_the_bits_in_every_case(ranks: Ranks, overlap: str) -> None:
    names = tuple(CASES) + (tuple(FORWARD_ONLY) if overlap == "forward" else ())
    ranks(2).run(run_cases, overlap, 2, names)


@pytest.mark.parametrize("overlap", BOTH)
def test_the_bits_on_one_rank_alone(ranks: Ranks, overlap: str) -> None:
    ranks(2).run(run_cases, overlap, 1, ("as it is",))


def train_while_buckets_move(overlap: str, size: int, folder: str) -> None:
    """Each rank keeps other buckets on its device after each step; checkpoints in between."""
    plain, mine = build(size, dtype=BF16), build(size, dtype=BF16)
    reference, optimizer = wrap(plain, "step"), wrap(mine, overlap)
    chosen, seen = random.Random(dist.get_rank()), set[int]()
    for step in range(STEPS):
        for model, one in ((plain, reference), (mine, optimizer)):
            train(model, one, steps=range(step, step + 1))
        for lane in [optimizer._updates.reserved.engine.ring]:
            staying = chosen.sample(lane.order, chosen.randint(0, len(lane.order)))
            lane.arrange(chosen.sample(lane.order, len(lane.order)), staying, chosen.randint(1, 4))
            seen.add(len(staying))
        if step % 2:
            checkpoint.save(folder, mine, optimizer, overwrite=True)
            checkpoint.load(folder, mine, optimizer)
    check(len(seen) > 1, "the same number of buckets has stayed all the time")
    check_twins(optimizer, reference, "at the end")
    optimizer.close()
    reference.close()


@pytest.mark.parametrize(
    ("overlap", "size"),
    [
        *covering(itertools.product(BOTH, (1, 2))),
        *(pytest.param(overlap, 4, marks=pytest.mark.long) for overlap in BOTH),
    ],
)
def test_what_stays_differs_by_rank_and_step(
    ranks: Ranks, overlap: str, size: int, tmp_path: Path
) -> None:
    ranks(size).run(train_while_buckets_move, overlap, size, str(tmp_path / "saved"))


# --------------------------------------------------------------------------- looking in between


def post_hooks(overlap: str) -> None:
    """They see parameters as the step leaves them, and what they write is used."""
    plain, mine = build(dist.get_world_size()), build(dist.get_world_size())
    seen: list[list[Tensor]] = []

    def hook(model: nn.Module, *_: Any) -> None:
        seen.append([models.local(p).clone() for p in model.parameters()])
        for parameter in model.parameters():
            models.local(parameter).clamp_(-0.2, 0.2)

    reference, optimizer = adamw(plain), wrap(mine, overlap)
    for model, stepper in ((plain, reference), (mine, optimizer)):
        stepper.register_step_post_hook(functools.partial(hook, model))
        train(model, stepper, steps=range(3))
    for index, (theirs, ours) in enumerate(zip(seen[:3], seen[3:], strict=True)):
        for a, b in zip(ours, theirs, strict=True):
            check_same(a, b, f"what the hook saw after step {index}")
    check_twins(optimizer, reference, "at the end")
    optimizer.close()


def two_optimizers(overlap: str) -> None:
    """Over disjoint parameters of one model; the first one rests in every other step."""
    plain, mine = build(dist.get_world_size()), build(dist.get_world_size())
    pairs = []
    for model in (plain, mine):
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        halves = [p for n, p in named if "up" in n], [p for n, p in named if "up" not in n]
        pairs.append([torch.optim.AdamW(half, lr=0.02, fused=True) for half in halves])
    pairs[1] = [models.wrap(o, mine, overlap=overlap, transfer=SMALL) for o in pairs[1]]
    for step in range(STEPS):
        for model, steppers in zip((plain, mine), pairs, strict=True):
            loss_of(model, step).backward()
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad()
    for reference, optimizer in zip(*pairs, strict=True):
        check_twins(optimizer, reference, "both")
    # The first one ends: the hooks of the second are around its own, and must go on.
    pairs[1][0].close()
    for step in range(STEPS, STEPS + 3):
        for model, steppers in zip((plain, mine), pairs, strict=True):
            loss_of(model, step).backward()
            steppers[1].step()
            model.zero_grad()
    check_twins(pairs[1][1], pairs[0][1], "the second alone")
    pairs[1][1].close()


def watched_methods(model: Any) -> list[str]:
    groups = [group for group, _ in fsdp_groups([model])]
    names = ("unshard", "wait_for_unshard", "post_backward")
    return [name for group in groups for name in names if name in group.__dict__]


def go_on_after_the_end(overlap: str) -> None:
    """After the wrapper's end a plain optimizer, or another wrapper, trains the same model."""
    plain, mine = build(dist.get_world_size()), build(dist.get_world_size())
    for part, wraps in enumerate((True, False, True)):
        reference, optimizer = adamw(plain), adamw(mine)
        stepper: Any = optimizer
        if wraps:
            stepper = models.wrap(optimizer, mine, overlap=overlap, transfer=SMALL)
            check(len(watched_methods(mine)) == 12, "hooks")
        steps = range(3 * part, 3 * part + 3)
        found, expected = train(mine, stepper, steps=steps), train(plain, reference, steps=steps)
        check(found == expected, f"part {part}: losses {found}, plain {expected}")
        if part == 0:  # the last one is dropped without it
            stepper.close()
        del stepper, optimizer
        gc.collect()
        check(watched_methods(mine) == [], f"hooks are left: {watched_methods(mine)}")
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        check_same(a, b, "at the end")


def unfreeze_after_backward(overlap: str) -> None:
    """A parameter gets its first gradient between backward and ``step()``; its bucket is the first
    that is updated on the device."""
    found = []
    for wraps in (False, True):
        model = build(dist.get_world_size())
        stepper: Any = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
        if wraps:
            stepper = models.wrap(stepper, model, overlap=overlap, update_on=("host",))
        for step in range(3):
            loss_of(model, step).backward()
            if step == 1:
                model.frozen.requires_grad_(True)
                model.frozen.grad = torch.ones_like(model.frozen)
            stepper.step()
            stepper.zero_grad()
        found.append([models.local(p).clone() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        check_same(b, a, "after three steps")
    stepper.close()


@pytest.mark.parametrize("overlap", MORE)
@pytest.mark.parametrize(
    "job", [post_hooks, two_optimizers, go_on_after_the_end, unfreeze_after_backward]
)
def test_around_the_loop(ranks: Ranks, size: int, job: Callable[[str], None], overlap: str) -> None:
    ranks(size).run(job, overlap)


def replaced_parameters() -> None:
    """``load_state_dict(assign=True)`` puts other parameters there before the first forward."""
    model = build(2)
    model.load_state_dict({n: v.clone() for n, v in model.state_dict().items()}, assign=True)
    model.head.weight = model.embed.weight  # which the load has untied
    optimizer = wrap(model, "backward")
    ungated = [r.fqn for r in optimizer._updates.overlap._ungated.params]
    check(not ungated, f"no group holds {ungated}")
    train(model, optimizer, steps=range(2))
    optimizer.close()


def test_parameters_replaced_before_wrapping_are_found_in_their_groups(ranks: Ranks) -> None:
    ranks(2).run(replaced_parameters)


def changed_groups() -> None:
    """Before the first step the backward follows the groups; later it leaves gradients to
    ``step()``, which names what moved."""
    plain, mine = build(2), build(2)
    reference, optimizer = adamw(plain), wrap(mine, "backward")
    for model, each in ((plain, reference), (mine, optimizer)):
        each.param_groups[0]["params"].append(each.param_groups[1]["params"].pop())
        train(model, each, steps=range(2))
        removed = each.param_groups.pop()
        loss_of(model, 2).backward()
        if each is optimizer:
            with pytest.raises(StateSchemaError, match="moved or are missing"):
                optimizer.step()
        each.param_groups.append(removed)
        each.step()
    check_twins(optimizer, reference, "changed groups")
    optimizer.close()


def test_changed_groups_in_backward_mode(ranks: Ranks) -> None:
    ranks(2).run(changed_groups)


def finalize_by_hand(overlap: str) -> None:
    plain, mine = build(2), build(2)
    reference, optimizer = adamw(plain), wrap(mine, overlap)
    for model, stepper in ((plain, reference), (mine, optimizer)):
        model.set_manual_backward_finalization(True)
        for step in range(STEPS):
            loss_of(model, step).backward()
            model.finalize_backward()
            stepper.step()
            stepper.zero_grad()
    check_twins(optimizer, reference, overlap)
    optimizer.close()


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_manual_backward_finalization"), reason="torch before 2.15"
)
@pytest.mark.parametrize("overlap", BOTH)
def test_backward_that_the_caller_finalizes(ranks: Ranks, overlap: str) -> None:
    ranks(2).run(finalize_by_hand, overlap)


def count_torchs_copies(size: int, memory: int | str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model, mesh=mesh_of(size, False))
    optimizer = wrap(model, "forward", device_memory=memory)
    names = ("_chunk_cat", "split_with_sizes_copy")
    own = {name: mock.Mock(wraps=getattr(torch, name)) for name in names}
    with mock.patch.multiple(torch, **own):
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    counted = [copy.called for copy in own.values()]
    # One rank gathers nothing that would have to be split.
    check(counted == [memory != 0, memory != 0 and size > 1], f"copies of FSDP2's own: {counted}")
    optimizer.close()


@pytest.mark.parametrize("memory", [0, "1MiB"])
@pytest.mark.parametrize("size", [1, 2])
def test_fsdps_buffers_are_copied_without_tables_while_state_travels(
    ranks: Ranks, size: int, memory: int | str
) -> None:
    ranks(size).run(count_torchs_copies, size, memory)


# --------------------------------------------------------------------------- refused


class Twice(models.Toy):
    """Uses one block two times in a forward."""

    def forward(self, tokens: Tensor, *, skip: int | None = None) -> Tensor:
        x = self.blocks[2](self.embed(tokens) + self.frozen)
        return self.head(self.blocks[2](x))


class Recomputed(models.Block):
    """Runs a backward of its own for each use."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)


def reduce_twice() -> None:
    """Two reductions in one backward: the first one was taken, so the second is refused."""
    model = Twice()
    model.blocks[2] = Recomputed(70)
    models.shard(model, models.flat_mesh(2))
    optimizer = wrap(model, "backward")
    with pytest.raises(SpentGradientError, match=r"blocks\.2"):
        loss_of(model, 0).backward()
    optimizer.close()


def test_gradients_that_come_in_two_parts_are_refused_in_backward_mode(ranks: Ranks) -> None:
    ranks(2).run(reduce_twice)
