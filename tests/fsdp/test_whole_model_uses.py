"""Weights in host memory, and other optimizers, averages, failures, saves."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from fsdp_offload import HybridDeviceOptimizer, LaneError, checkpoint
from fsdp_offload.core.devices import CpuBackend
from fsdp_offload.optimizer.overlap import Overlap
from fsdp_offload.optimizer.weights import Away, Weights
from fsdp_offload.update.bucket import BucketUpdate
from tests.fsdp import models
from tests.fsdp.models import Ranks, check
from tests.fsdp.test_gated import as_parts
from tests.fsdp.test_gated import same as same_parts
from tests.fsdp.test_overlap import loss_of, mesh_of
from tests.fsdp.test_whole_model import away, both, build, evaluate, sharded, step, whole, wrap
from tests.helpers.covering import covering
from tests.helpers.simulator import StreamSimulator

FP32, BF16 = torch.float32, torch.bfloat16


def kept(optimizer: Any) -> int:
    """How many weights the device has a copy of, besides slots."""
    groups = optimizer._updates.weights.away
    return sum(each.kept is not None for group in groups for each in group)


# --------------------------------------------------------------------------- other optimizers


def is_matrix(name: str, p: Tensor) -> bool:
    return p.dim() == 2 and "blocks" in name and len(p) >= dist.get_world_size()


def two(model: Any, **how: Any) -> list[Any]:
    """Muon for matrices of blocks, beside AdamW; ``how``: of each, None: it is not wrapped."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    muon = torch.optim.Muon([p for name, p in named if is_matrix(name, p)], lr=0.02)
    adamw = torch.optim.AdamW([p for name, p in named if not is_matrix(name, p)], lr=0.02)
    both = []
    for inner, options in ((muon, how.get("muon")), (adamw, how.get("adamw"))):
        if options is not None:
            inner = HybridDeviceOptimizer(
                inner, model, device_memory=0, transfer=models.TRANSFER, **options
            )
        both.append(inner)
    return both[::-1] if how.get("reverse") else both


ALL: dict[str, Any] = {"offload": "all"}
PAIRS: dict[str, dict[str, Any]] = {
    "both": {"muon": ALL, "adamw": ALL},
    "both, AdamW first": {"muon": ALL, "adamw": ALL, "reverse": True},
    "beside a plain one": {"adamw": ALL},
    "in backward": {"muon": {"offload": "state"}, "adamw": {**ALL, "overlap": "backward"}},
}


def train_two(freezes: bool, how: dict[str, Any]) -> None:
    """They step in turns, and are closed one after the other, in the middle of training."""
    found = []
    for made in ({}, how):
        model = build(dist.get_world_size(), freezes=freezes)
        optimizers = two(model, **made)
        seen: list[Any] = []
        for index in range(5):
            loss = loss_of(model, index, skip=1 if index == 1 else None)
            loss.backward()
            seen.append(loss.item())
            if "backward" not in str(how):
                seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor())
            for optimizer in optimizers[:: 1 if index % 2 else -1]:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            if made and index == 2:
                check(any(away(model)), "nothing is away")
                trained = [p for p in sharded(model) if p.requires_grad]
                gone = dict(zip(sharded(model), away(model), strict=True))
                mine = [g["params"] for o in optimizers for g in o.param_groups if "betas" in g]
                check(all(gone[p] for ps in mine for p in ps), "AdamW's stay")
                check(not all(gone[p] for p in trained), "Muon's leave")
        seen += list(whole(model).values())
        for optimizer in optimizers if made else ():
            getattr(optimizer, "close", lambda: None)()
            seen.append(loss_of(model, 7).item())
        found.append([*seen, *([loss_of(model, 7).item()] * 2 if not made else ())])
        check(not any(away(model)), "back")
    wrong = [i for i, pair in enumerate(zip(*found, strict=True)) if not same_parts(*pair)]
    check(not wrong, f"{wrong} of {len(found[0])}")


@pytest.mark.parametrize(("how", "freezes"), covering(itertools.product(PAIRS, (False, True))))
def test_two_optimizers(ranks: Ranks, size: int, how: str, freezes: bool) -> None:
    ranks(size).run(train_two, freezes, PAIRS[how])


def warn_of_matrices() -> list[str]:
    """Weights of a class that works on whole matrices stay, and it says so."""
    said: list[str] = []
    model = build(1)
    with mock.patch(
        "fsdp_offload.optimizer.whole_model.warn", lambda text, *args: said.append(text % args)
    ):
        for optimizer in two(model, muon=ALL, adamw=ALL):
            optimizer.close()
    return said


def test_a_class_of_whole_matrices_keeps_its_weights_with_a_warning(ranks: Ranks) -> None:
    [[text]] = ranks(1).run(warn_of_matrices)

    assert "stay on the device: Muon does not update element by element" in text


def warn_of_early_reads(offload: str) -> list[str]:
    """Weights are read before ``step()``, twice, and after it."""
    said: list[str] = []
    model = build(1)
    optimizer = wrap(model, offload=offload, overlap="backward")
    with mock.patch(
        "fsdp_offload.optimizer.overlap.warn", lambda text, *args: said.append(text % args)
    ):
        for index in range(2):
            loss_of(model, index).backward()
            if index:
                whole(model)
                whole(model)
            optimizer.step()
            optimizer.zero_grad()
            whole(model)
            check(len(said) == index, str(said))
    optimizer.close()
    return said


@pytest.mark.parametrize("offload", ["state", "all"])
def test_a_read_before_the_step_is_warned_of_once(ranks: Ranks, offload: str) -> None:
    [[text]] = ranks(1).run(warn_of_early_reads, offload)

    assert "backward() has updated some of them" in text


def warn_of_nothing(late: bool) -> list[str]:
    """One of two layers of each block is not used, or (``late``) not trained at first."""
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)) for _ in "ab"))
    for block in model:
        if late:
            block[1].requires_grad_(False)
        else:
            block.forward = block[0].forward
        fully_shard(block, mesh=models.flat_mesh(1))
    optimizer = HybridDeviceOptimizer(
        torch.optim.AdamW(model.parameters()), model, offload="all", overlap="backward",
        device_memory=0, transfer=models.TRANSFER,
    )  # fmt: skip
    said: list[str] = []
    with mock.patch("fsdp_offload.optimizer.overlap.warn", lambda text, *_: said.append(text)):
        for index in range(3):
            if index == 2:
                model.requires_grad_(True)
            model(torch.ones(2, 9)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    optimizer.close()
    return said


@pytest.mark.parametrize("late", [False, True])
def test_nobody_reads_a_layer_without_gradients(ranks: Ranks, late: bool) -> None:
    assert ranks(1).run(warn_of_nothing, late) == [[]]


# --------------------------------------------------------------------------- averages


AVERAGES: dict[str, dict[str, Any]] = {
    "equal": {},
    "all at once": {"multi_avg_fn": get_ema_multi_avg_fn(0.5)},
    "one by one": {"avg_fn": get_ema_avg_fn(0.5)},
}


def average(how: str, dtype: torch.dtype) -> None:
    """By torch's class; the device has one copy at a time, and keeps none."""
    for model, optimizer, seen in both(how, dtype=dtype):
        torch.manual_seed(1)
        averaged: Any = AveragedModel(models.Toy().to(dtype), **AVERAGES[how])
        models.shard(averaged.module, mesh_of(dist.get_world_size(), False))
        for index in range(3):
            seen.append(step(model, optimizer, index))
            with at_once() as most:
                averaged.update_parameters(model)
            is_here = optimizer._updates.weights is None
            check(is_here or (kept(optimizer), most) == (0, [1]), f"{most} copies")
        norms = torch.nn.utils.get_total_norm([p.detach() for p in sharded(model)])
        seen += [norms.full_tensor(), *whole(averaged).values()]


@contextlib.contextmanager
def at_once() -> Iterator[list[int]]:
    """The most copies of weights that were in use together, if any."""
    held, most = set[Any](), list[int]()
    take, used = Away.take, Away.used

    def taking(each: Away) -> Tensor:
        held.add(each)
        most[:] = [max(len(held), *most)] if most else [len(held)]
        return take(each)

    def using(each: Away, *args: Any, **kwargs: Any) -> None:
        used(each, *args, **kwargs)
        held.discard(each)

    with mock.patch.object(Away, "take", taking), mock.patch.object(Away, "used", using):
        yield most


@pytest.mark.parametrize(("how", "dtype"), covering(itertools.product(AVERAGES, (FP32, BF16))))
def test_averages(ranks: Ranks, size: int, how: str, dtype: torch.dtype) -> None:
    ranks(size).run(average, how, dtype)


# --------------------------------------------------------------------------- failures and ends


@contextlib.contextmanager
def failing(bucket: int) -> Iterator[None]:
    """Inside, the update of so many-th bucket raises."""
    original, calls = BucketUpdate.run, iter(range(10**9))

    def run(*args: Any) -> None:
        if next(calls) == bucket:
            raise ZeroDivisionError("planted")
        original(*args)

    with mock.patch.object(BucketUpdate, "run", run):
        yield


def fail(overlap: str, then: str) -> None:
    """In the middle of an update: weights can be used, as with ``offload="state"``, and a load
    makes good for all."""
    found, order = [], list[int]()
    for offload in ("all", "state"):
        model = build(dist.get_world_size())
        optimizer: Any = wrap(model, offload=offload, overlap=overlap)
        ring = optimizer._updates.reserved.engine.ring
        order = order or list(ring.order)
        ring.arrange(order, ring.staying.keys())  # so that the same bucket fails
        ring.reorder = lambda *_: None  # else by measured times
        seen: list[Any] = [step(model, optimizer, 0)]
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        state = optimizer.state_dict()
        state = copy.deepcopy({**state, "state": dict(state["state"])})
        with failing(5), contextlib.suppress(LaneError):
            step(model, optimizer, 1)
            raise AssertionError("no LaneError")
        if then == "load":
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            optimizer.zero_grad()
            seen.append(step(model, optimizer, 2))
        elif then == "close":
            optimizer.close()
            check(not any(away(model)), "back")
        else:
            del optimizer
            gc.collect()
        seen += [*(p.detach().norm() for p in sharded(model)), *evaluate(model, 3)]
        found.append(as_parts(seen + list(whole(model).values())))
        check(then == "close" or any(away(model)) == (offload == "all"), "away")
        if then == "load":
            optimizer.close()
    check(same_parts(*found), f"after a failure, {then}")


@pytest.mark.parametrize(
    ("overlap", "then"),
    covering(itertools.product(("step", "forward", "backward"), ("load", "close", "delete"))),
)
def test_a_failed_optimizer(ranks: Ranks, overlap: str, then: str) -> None:
    ranks(1).run(fail, overlap, then)


def delete_while_updating(overlap: str) -> None:
    """What is under way ends first; so do copies that nobody waits for."""
    found = []
    for offload in ("state", "all"):
        with StreamSimulator("lazy", inline_current=True) as simulator:
            model = build(dist.get_world_size())
            optimizer = wrap(model, offload=offload, overlap=overlap)
            for index in range(2):
                step(model, optimizer, index)
            if overlap == "forward":
                loss_of(model, 2).backward()
            del optimizer
            gc.collect()
            check(not running(simulator, "gradients"), "gradients that are copied")
            grads = [p.grad for p in sharded(model) if p.grad is not None]
            found.append([*whole(model).values(), *map(models.local, grads), *evaluate(model, 2)])
            del model, grads
            gc.collect()
            check(not running(simulator, "weights"), "weights that are fetched ahead")
            check(not simulator.late_uses, f"{simulator.late_uses}")
    check(same_parts(*found), "after a deletion")


def running(simulator: Any, client: str) -> bool:
    """Whether a link has copies in its queues."""
    return any(each.entries and client in each.name for each in simulator._streams)


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_deletion_while_updates_are_held_back(ranks: Ranks, size: int, overlap: str) -> None:
    ranks(size).run(delete_while_updating, overlap)


# --------------------------------------------------------------------------- other threads


@contextlib.contextmanager
def reading(model: Any, *, forever: bool = True) -> Iterator[threading.Thread]:
    """Inside, another thread reads all weights."""
    ended, errors = threading.Event(), list[Exception]()

    def read() -> None:
        try:
            while True:
                for p in sharded(model):
                    p.detach().norm()
                if ended.is_set() or not forever:
                    return
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield thread
    finally:
        ended.set()
        thread.join()
    check(not errors, f"{errors}")


def read_beside(offload: str, overlap: str) -> None:
    model = build(dist.get_world_size())
    optimizer = wrap(model, offload=offload, overlap=overlap)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with reading(model):
            for index in range(30):
                step(model, optimizer, index)
    finally:
        sys.setswitchinterval(interval_s)
    optimizer.close()


@pytest.mark.parametrize(("offload", "overlap"), [("all", "forward"), ("state", "backward")])
def test_another_thread_reads_and_waits(ranks: Ranks, offload: str, overlap: str) -> None:
    ranks(1).run(read_beside, offload, overlap)


def gather_beside() -> None:
    """A gather may wait for a thread that reads a weight."""
    model = build(dist.get_world_size())
    optimizer = wrap(model, overlap="backward")
    gather = Overlap.before_gather

    def waiting(*args: Any) -> None:
        with reading(model, forever=False) as thread:
            thread.join(10)
            check(not thread.is_alive(), "the thread waits for the gather")
        gather(*args)

    with mock.patch.object(Overlap, "before_gather", waiting):
        step(model, optimizer, 0)
    optimizer.close()


def test_a_gather_waits_for_another_thread(ranks: Ranks) -> None:
    ranks(1).run(gather_beside)


# --------------------------------------------------------------------------- saves and loads


@contextlib.contextmanager
def no_device_memory() -> Iterator[None]:
    """Inside, nothing may be allocated on the device, nor fetched."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("device memory")

    with contextlib.ExitStack() as stack:
        for owner, name in ((Away, "take"), (Weights, "fetch"), (CpuBackend, "allocate")):
            stack.enter_context(mock.patch.object(owner, name, refuse))
        yield


def save_by_dcp(folder: str, model: Any, optimizer: Any) -> None:
    state = {"m": get_model_state_dict(model), "o": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)


def save_by_dcp_beside(folder: str, model: Any, optimizer: Any, **options: Any) -> Any:
    state = {"m": get_model_state_dict(model), "o": get_optimizer_state_dict(model, optimizer)}
    return dcp.async_save(state, checkpoint_id=folder, **options)


def load_by_dcp(folder: str, model: Any, optimizer: Any) -> None:
    state = {"m": get_model_state_dict(model), "o": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["m"])
    set_optimizer_state_dict(model, optimizer, state["o"])


SAVES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "save": (checkpoint.save, checkpoint.load),
    "async_save": (checkpoint.async_save, checkpoint.load),
    "dcp.save": (save_by_dcp, load_by_dcp),
    "dcp.async_save": (save_by_dcp_beside, load_by_dcp),
    "dcp.async_save with our stager": (
        lambda *args: save_by_dcp_beside(*args, async_stager=checkpoint.Stager()), load_by_dcp,
    ),
}  # fmt: skip


def save(how: str, folder: str, way: dict[str, Any]) -> None:
    """A moment is saved, while training goes on where it may, and comes back, in all modes; what
    this package does takes no device memory."""
    saves, loads = SAVES[how]
    guard = contextlib.nullcontext if how.startswith("dcp") else no_device_memory
    made, found = [], []
    for offload in ("state", "all"):
        dtype, overlap = way.get("dtype", FP32), way.get("overlap")
        model = build(dist.get_world_size(), dtype=dtype, freezes=way.get("freezes", False))
        optimizer = wrap(model, offload=offload, overlap=overlap)
        step(model, optimizer, 0)
        with guard():
            future = saves(f"{folder}/{offload}", model, optimizer)
        found.append([*whole(model).values()])
        step(model, optimizer, 1)
        if future is not None:
            future.result()
        step(model, optimizer, 2)
        made.append((model, optimizer))
    for (model, optimizer), seen in zip(made, found, strict=True):
        for saved in ("state", "all"):
            with guard():
                loads(f"{folder}/{saved}", model, optimizer)
            seen += [*whole(model).values(), step(model, optimizer, 1), *whole(model).values()]
    check(all(away(made[1][0])), "away")
    for _, optimizer in made:
        optimizer.close()
    check(same_parts(*found), how)


WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 in backward": {"dtype": BF16, "overlap": "backward"},
    "frozen": {"freezes": True, "overlap": "step"},
}


@pytest.mark.parametrize(
    ("how", "way"),
    covering(
        (how, way) for how in SAVES for way in WAYS if way == "fp32" or not how.startswith("dcp")
    ),
)
def test_saves_and_loads(ranks: Ranks, size: int, how: str, way: str, tmp_path: Path) -> None:
    """torch's own saves use the group of the forward: on one rank, none waits for another."""
    size = 1 if how.startswith("dcp.async") else size
    ranks(size).run(save, how, str(tmp_path), WAYS[way])


def export(folder: str) -> None:
    """The same files, which take no device memory."""
    found = []
    for offload in ("state", "all"):
        model = build(dist.get_world_size(), dtype=BF16)
        optimizer = wrap(model, offload=offload)
        step(model, optimizer, 0)
        with no_device_memory():
            checkpoint.export_safetensors(model, f"{folder}/{offload}", optimizer=optimizer)
        optimizer.close()
        dist.barrier()
        files = sorted(Path(f"{folder}/{offload}").rglob("*.safetensors"))
        found.append([file.read_bytes() for file in files])
    check(found[0] == found[1] and found[0], "exported")


def test_export(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(export, str(tmp_path))


def load_without_copies(value: str) -> None:
    """A load into the module writes host memory, from whatever memory."""
    for model, optimizer, seen in both(value):
        step(model, optimizer, 0)
        state = {name: LOADED[value](each) for name, each in model.state_dict().items()}
        with no_device_memory():
            model.load_state_dict(state)
        check(optimizer._updates.weights is None or kept(optimizer) == 0, "copies on the device")
        seen += [*whole(model).values(), step(model, optimizer, 1)]


LOADED: dict[str, Callable[[Any], Any]] = {
    "other": lambda value: value * 2 + 1,
    "another dtype": lambda value: (value * 2).to(torch.float64),
    "its own": lambda value: value,
}


@pytest.mark.parametrize("value", list(LOADED))
def test_a_load_into_the_module(ranks: Ranks, size: int, value: str) -> None:
    ranks(size).run(load_without_copies, value)
