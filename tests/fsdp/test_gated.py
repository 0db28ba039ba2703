"""With updates held back, code that uses a parameter of an FSDP2 model after ``step()`` gets final
values without ``synchronize()``; forward and backward never use what stands for a shard."""

from __future__ import annotations

import copy
import functools
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from fsdp_offload import LaneError, PhaseOffloader
from fsdp_offload.core import dtensor
from fsdp_offload.core.fsdp import Group, fsdp_groups
from fsdp_offload.core.gated import GatedShard
from fsdp_offload.optimizer.host import HostBucket
from tests.fsdp import models
from tests.fsdp.models import Ranks, check
from tests.fsdp.test_overlap import adamw, build, loss_of, wrap
from tests.helpers.simulator import StreamSimulator

Parameters = list[Any]
OLD_COMPILER = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch.compile of 2.11 raises: docs/overlap.md says so"
)
BOTH = pytest.mark.parametrize("overlap", ["forward", "backward"])


def local(value: Any) -> Tensor:
    """The local tensor as the user's code finds it."""
    found: Tensor = value._local_tensor
    return found


# --------------------------------------------------------------------------- ways of reading


def read_gradient(ps: Parameters) -> Any:
    """Through autograd: the derivative of half the squared norm is the parameter."""
    (0.5 * ps[0].norm() ** 2).backward()
    (0.5 * ps[0].to_local().norm() ** 2).backward()
    found, ps[0].grad = ps[0].grad, None
    return found.full_tensor()


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def read_by_foreach(ps: Parameters) -> Any:
    average = [torch.zeros_like(p) for p in ps]
    with torch.no_grad():
        torch._foreach_lerp_(average, ps, 0.25)
    return average


def read_by_state_dict(ps: Parameters) -> Any:
    holder = nn.Module()
    holder.found = nn.ParameterList(ps)
    return [value.clone() for value in get_model_state_dict(holder).values()]


def scatter(ps: Parameters) -> Any:
    """A collective of the user's on the local tensor."""
    even, another = [p for p in ps if len(p) % 2 == 0]
    mine = local(even)
    parts = [torch.zeros(mine.shape) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    dist.all_reduce(mine)
    dist.broadcast(local(another), 0)
    return [*parts, even, another]


@torch.no_grad()
def in_place(change: Callable[[Any], Any], ps: Parameters) -> Any:
    for p in ps:
        change(p)
    return ps


@torch.no_grad()
def assigned(ps: Parameters) -> Any:
    local(ps[0])[0] = 7.0
    ps[1]._local_tensor *= 3.0
    return ps


def inference(ps: Parameters) -> Any:
    with torch.inference_mode():
        return [(p * 2).full_tensor() for p in ps]


def numpy_of(ps: Parameters) -> Any:
    return [torch.from_numpy(numpy.array(local(p).numpy())) for p in ps]


def by_address(ps: Parameters) -> Any:
    """Raw memory, found by address."""
    import ctypes

    found = []
    for p in ps:
        shard = local(p)
        n_bytes = shard.numel() * shard.element_size()
        raw = ctypes.string_at(shard.data_ptr(), n_bytes)
        found.append(torch.frombuffer(bytearray(raw), dtype=shard.dtype) if raw else shard)
    return found


READERS: dict[str, Callable[[Parameters], Any]] = {
    "norm": lambda ps: [p.detach().norm() for p in ps],
    "autograd": read_gradient,
    "full_tensor": lambda ps: [p.full_tensor() for p in ps],
    "to_local": lambda ps: [p.to_local() for p in ps],
    "detach": lambda ps: [p.detach().clone() for p in ps],
    "operation on the local tensor": lambda ps: [local(p) + 1 for p in ps],
    "deepcopy": lambda ps: [copy.deepcopy(p) for p in ps],
    "torch.save of the local tensor": lambda ps: saved([local(p) for p in ps]),
    "print of the local tensor": lambda ps: f"{local(ps[0])} {local(ps[1])!r}",
    "numpy": numpy_of,
    "address": by_address,
    "get_model_state_dict": read_by_state_dict,
    "_foreach_lerp_ of averages": read_by_foreach,
    "collectives": scatter,
    "mul_": functools.partial(in_place, lambda p: p.mul_(0.5)),
    "assignment to the local tensor": assigned,
    "inference_mode": inference,
}


# --------------------------------------------------------------------------- the twins


def step(model: Any, optimizer: Any, index: int) -> None:
    loss_of(model, index).backward()
    optimizer.step()
    optimizer.zero_grad()


def sharded(model: Any) -> Parameters:
    """Trained parameters with elements on both ranks."""
    return [p for p in model.parameters() if p.requires_grad and len(p) > 1]


def as_parts(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [part for each in value for part in as_parts(each)]
    value = value.to_local() if isinstance(value, DTensor) else value
    return [value.detach().clone() if isinstance(value, Tensor) else value]


def same(found: Any, expected: Any) -> bool:
    pairs = zip(as_parts(found), as_parts(expected), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def read_while_updates_are_held_back(names: list[str], overlap: str, guarded: bool) -> None:
    for name in names:
        read_by(name, overlap, guarded)


def read_by(name: str, overlap: str, guarded: bool) -> None:
    """The reader's numbers, and afterwards those of the parameters, are the plain optimizer's."""
    reader = READERS[name]
    plain = build(dist.get_world_size())
    reference = adamw(plain)
    for index in range(2):
        step(plain, reference, index)
    expected = as_parts(reader(sharded(plain)))
    with StreamSimulator("lazy", inline_current=True):
        mine = build(dist.get_world_size())
        optimizer = wrap(mine, overlap)
        for index in range(2):
            step(mine, optimizer, index)
        parameters = sharded(mine)
        found = as_parts(reader(parameters))
        optimizer.synchronize()  # an update that comes after a write
        with torch.no_grad():
            found += as_parts([p + 0 for p in parameters])
            expected += as_parts([p + 0 for p in sharded(plain)])
        is_right = same(found, expected)
        check(is_right or not guarded, f"{name} with {overlap}")
        check(not is_right or guarded, f"{name} with {overlap}: nothing was held back")
        optimizer.close()


@pytest.mark.parametrize("overlap", ["forward", pytest.param("backward", marks=pytest.mark.long)])
@pytest.mark.parametrize("first", range(4))
def test_reading_waits(ranks: Ranks, size: int, first: int, overlap: str) -> None:
    names = list(READERS)[first::4]
    ranks(size).run(read_while_updates_are_held_back, names, overlap, guarded=True)


def read_without_gates() -> None:
    with mock.patch.object(dtensor, "close_gate"):
        names = ["full_tensor", "address", "mul_"]
        read_while_updates_are_held_back(names, "forward", guarded=False)


# --------------------------------------------------------------------------- gradients


def gradients_of(model: Any) -> list[Any]:
    return [p.grad for p in sharded(model)]


@torch.no_grad()
def zeroed(model: Any, optimizer: Any) -> Any:
    optimizer.zero_grad(set_to_none=False)
    return gradients_of(model)


@torch.no_grad()
def by_hand(model: Any, optimizer: Any) -> Any:
    local(gradients_of(model)[0])[0] = 7.0
    gradients_of(model)[1]._local_tensor *= 3.0
    return gradients_of(model)


def backward_again(model: Any, optimizer: Any) -> Any:
    """FSDP2 adds to what is there."""
    loss_of(model, 9).backward()
    return gradients_of(model)


def backward_without_forward(model: Any, optimizer: Any) -> Any:
    optimizer.zero_grad(set_to_none=False)
    loss = loss_of(model, 3)
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()
    return gradients_of(model)


def step_again(model: Any, optimizer: Any) -> Any:
    optimizer.step()
    return gradients_of(model)


GRADIENT_USES: dict[str, Callable[[Any, Any], Any]] = {
    "norm": lambda model, _: torch.nn.utils.get_total_norm(gradients_of(model)).full_tensor(),
    "clipping": lambda model, _: nn.utils.clip_grad_norm_(sharded(model), 0.1).full_tensor(),
    "zero_grad": zeroed,
    "by hand": by_hand,
    "another backward": backward_again,
    "another backward without a forward": backward_without_forward,
    "another step": step_again,
}


def use_gradients(names: list[str], guarded: bool) -> None:
    """After ``step()`` with ``"forward"``: the numbers of the plain optimizer, then and later."""
    for name in names:
        use, found = GRADIENT_USES[name], []
        with StreamSimulator("lazy", inline_current=True):
            for wrapped in (False, True):
                model = build(dist.get_world_size())
                optimizer = wrap(model, "forward") if wrapped else adamw(model)
                step(model, optimizer, 0)
                loss_of(model, 1).backward()
                optimizer.step()
                found.append(as_parts(use(model, optimizer)))
                for _ in range(2):
                    optimizer.step()
                if wrapped:
                    optimizer.synchronize()
                found[-1] += as_parts([p + 0 for p in sharded(model)])
                if wrapped:
                    optimizer.close()
        check(same(*found) == guarded, f"{name}: guarded {guarded}")


def test_gradients_are_there_until_they_are_zeroed(ranks: Ranks, size: int) -> None:
    ranks(size).run(use_gradients, list(GRADIENT_USES), guarded=True)


def write_gradients_without_gates() -> None:
    with mock.patch.object(dtensor.GatedGradients, "close"):
        use_gradients(["clipping", "zero_grad", "by hand"], guarded=False)


@pytest.mark.parametrize("job", [read_without_gates, write_gradients_without_gates])
def test_without_gates_numbers_are_wrong(ranks: Ranks, size: int, job: Callable[[], None]) -> None:
    ranks(size).run(job)


def let_gradients_go(by: str) -> None:
    """The memory of a gradient goes with the next forward, or before, whoever drops it."""
    model = build(dist.get_world_size())
    optimizer = wrap(model, "forward")
    for index in range(3):
        loss_of(model, index).backward()
        gone = [weakref.ref(local(p.grad)) for p in sharded(model)]
        optimizer.step()
        check(all(type(local(p.grad)) is GatedShard for p in sharded(model)), "gated")
        (model if by == "model" else optimizer).zero_grad()
        loss = loss_of(model, index)
        check(not any(ref() is not None for ref in gone), f"kept in step {index}")
        del loss
    optimizer.close()


@pytest.mark.parametrize("by", ["model", "optimizer"])
def test_gradients_are_not_kept(ranks: Ranks, size: int, by: str) -> None:
    ranks(size).run(let_gradients_go, by)


def compiled_each_time(overlap: str, backend: str) -> None:
    """Compiled before a gate was closed and again behind it, then used in later steps."""
    torch.compiler.reset()  # how often a function is compiled is limited, over all tests
    read = torch.compile(lambda p: p * 2 + 1, backend=backend, fullgraph=True)
    plain = build(dist.get_world_size())
    reference = adamw(plain)
    with (
        StreamSimulator("lazy", inline_current=True),
        torch._functorch.config.patch(enable_autograd_cache=False),  # see core/gated.py
    ):
        mine = build(dist.get_world_size())
        optimizer = wrap(mine, overlap)
        for index in range(4):
            step(plain, reference, index)
            step(mine, optimizer, index)
            if index == 0:
                optimizer.synchronize()
            for p, expected in zip(sharded(mine)[:2], sharded(plain), strict=False):
                check(same(read(p), expected * 2 + 1), f"in step {index}")
                check(same(read(local(p)), local(expected) * 2 + 1), f"locally in step {index}")
        optimizer.close()


@OLD_COMPILER
@pytest.mark.parametrize(
    ("backend", "overlap"),
    [
        ("aot_eager", "forward"),
        *(
            pytest.param(*both, marks=pytest.mark.long)
            for both in (("aot_eager", "backward"), ("inductor", "forward"))
        ),
    ],
)
def test_compiled_code_waits_in_every_step(
    ranks: Ranks, size: int, overlap: str, backend: str
) -> None:
    """Inductor's code takes addresses."""
    ranks(size).run(compiled_each_time, overlap, backend)


# --------------------------------------------------------------------------- what does not wait


def gates(model: Any) -> set[bool]:
    """Whether shards are gated."""
    parameters = (p for group in fsdp_groups([model]) for p in Group(*group).parameters)
    return {type(local(p)) is GatedShard for p in parameters if p.requires_grad}


def look_at_metadata() -> None:
    """It does not wait."""
    with StreamSimulator("lazy", inline_current=True) as simulator:
        model = build(dist.get_world_size())
        optimizer = wrap(model, "forward")
        step(model, optimizer, 0)
        simulator.reset_counters()
        for p in model.parameters():
            shard = local(p)
            plain = dtensor.local(p)
            for each in (shard, plain):
                check(each.shape == plain.shape and each.size(0) == len(plain), "shape")
                check(each.dtype == plain.dtype and each.device == plain.device, "dtype, device")
                check(each.stride() == plain.stride() and each.is_contiguous(), "strides")
                check(each.is_leaf and not each.requires_grad, "autograd")
                check(not hasattr(each, "fsdp_pre_all_gather"), "as FSDP2 asks")
            check(p.shape[0] == len(p) and p.is_leaf and p.requires_grad is not None, "of DTensor")
        check(not simulator.wait_log, f"waits: {simulator.wait_log}")
        check(gates(model) == {True}, "gated before and after")
        optimizer.close()


def train_untouched(overlap: str, size: int, setting: str) -> None:
    calls: list[str] = []

    def use(original: Any, func: Any, args: Any, kwargs: Any) -> Any:
        calls.append(str(func))
        return original(func, args, kwargs)

    plain, mine = build(size, setting=setting), build(size, setting=setting)
    reference, optimizer = adamw(plain), wrap(mine, overlap)
    for index in range(4):
        step(plain, reference, index)
        with mock.patch.object(GatedShard, "_use", functools.partial(use, GatedShard._use)):
            step(mine, optimizer, index)
        check(gates(mine) == {True}, "gated after step()")
    check(not calls, f"used: {calls}")
    models.check_twins(optimizer, reference, overlap)
    check(gates(mine) == {False}, "the state was read, which waits for everything")
    optimizer.close()


@pytest.mark.parametrize(
    ("overlap", "size", "setting"),
    [
        ("forward", 1, ""),
        ("backward", 2, "prefetch in forward"),
        ("forward", 2, "no reshard after backward"),
        pytest.param("backward", 2, "compiled", marks=pytest.mark.long),
    ],
)
def test_forward_and_backward_never_use_what_stands_for_a_shard(
    ranks: Ranks, overlap: str, size: int, setting: str
) -> None:
    ranks(2).run(train_untouched, overlap, size, setting)


def open_one_by_one(overlap: str) -> None:
    """Of a module that the forward leaves out, shards stay gated; and they do when they are used,
    because another stream has not waited."""
    with StreamSimulator("lazy", inline_current=True) as simulator:
        model = build(dist.get_world_size())
        optimizer = wrap(model, overlap)
        step(model, optimizer, 0)
        seen = list[set[bool]]()
        model.blocks[0].register_forward_hook(
            lambda *_: seen.append(gates(model.blocks[2]) | gates(model.blocks[1]))
        )
        loss_of(model, 1, skip=1)
        check(seen == [{True}], f"before they are gathered: {seen}")
        check(gates(model.blocks[2]) == gates(model.blocks[0]) == {False}, "gathered")
        check(gates(model.blocks[1]) == {True}, "left out")
        parameter = model.blocks[1].up.weight
        waits = []
        for stream in (simulator._current, simulator.stream("another")):
            simulator._current = stream
            simulator.reset_counters()
            parameter.detach().norm()
            waits.append({name for name, _ in simulator.wait_log})
        check(waits == [{"current"}, {"another"}], f"{waits}")
        optimizer.close()


@BOTH
def test_each_stream_that_uses_a_parameter_waits_until_it_is_gathered(
    ranks: Ranks, size: int, overlap: str
) -> None:
    ranks(size).run(open_one_by_one, overlap)


# --------------------------------------------------------------------------- shards come back


def go_away(model: Any, optimizer: Any) -> None:
    offloader = PhaseOffloader(model, optimizer)
    offloader.offload()
    check(gates(model) == {False}, "away")
    offloader.reload()
    offloader.close()


def load(model: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


ENDS: dict[str, Callable[[Any, Any], object]] = {
    "close": lambda model, optimizer: optimizer.close(),
    "synchronize": lambda model, optimizer: optimizer.synchronize(),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "state_dict of the model": lambda model, optimizer: model.state_dict(),
    "offload": go_away,
    "load": load,
}


def come_back(name: str, overlap: str) -> None:
    plain = build(dist.get_world_size())
    reference = adamw(plain)
    step(plain, reference, 0)
    with StreamSimulator("lazy", inline_current=True):
        mine = build(dist.get_world_size())
        optimizer = wrap(mine, overlap)
        step(mine, optimizer, 0)
        kept = [local(p) for p in sharded(mine)]
        check(gates(mine) == {True}, "after step()")
        ENDS[name](mine, optimizer)
        check(gates(mine) == {False}, f"after {name}")
        check(same(sharded(mine), sharded(plain)), f"after {name}")
        check(same([t + 0 for t in kept], sharded(plain)), "what was kept from before")
        optimizer.close()


@pytest.mark.parametrize("name", ENDS)
def test_shards_come_back(ranks: Ranks, size: int, name: str) -> None:
    ranks(size).run(come_back, name, "backward" if name in ("load", "close") else "forward")


def drop() -> None:
    """Shards come back: nobody has kept the optimizer, nor do gated shards keep it or the model."""
    with StreamSimulator("lazy", inline_current=True):
        plain, mine = build(dist.get_world_size()), build(dist.get_world_size())
        reference, optimizer = adamw(plain), wrap(mine, "backward")
        step(plain, reference, 0)
        step(mine, optimizer, 0)
        kept, dropped = local(sharded(mine)[0]), weakref.ref(optimizer)
        del optimizer
        gc.collect()
        check(dropped() is None, "the optimizer is kept")
        check(gates(mine) == {False}, "after the drop")
        check(same(sharded(mine), sharded(plain)), "waited for")
        check(same(kept + 0, sharded(plain)[0]), "what was kept from before")


def fail_before_a_reader() -> None:
    """The first one gets the error; then weights can be read, and written for a load."""
    model = build(dist.get_world_size())
    optimizer = wrap(model, "forward", update_on="host")
    step(model, optimizer, 0)
    loss_of(model, 1).backward()

    def fail(*_: object) -> None:
        raise ZeroDivisionError("on a host thread")

    with mock.patch.object(HostBucket, "step", fail):
        optimizer.step()
        with pytest.raises(LaneError) as caught:
            as_parts([p.detach().norm() for p in sharded(model)])
        check("using a parameter" in caught.value.what, caught.value.what)
        check("on a host thread" in caught.value.reason, caught.value.reason)
        check("load a checkpoint" in caught.value.remedy, caught.value.remedy)
    check(gates(model) == {False}, "after the failure")
    for parameter in sharded(model):
        parameter.detach().zero_()
    optimizer.close()


def read_in_a_graph_capture() -> None:
    """The host waits for the update, and the next step for its own."""
    with StreamSimulator("lazy", inline_current=True) as simulator:
        model = build(dist.get_world_size())
        optimizer = wrap(model, "forward")
        step(model, optimizer, 0)
        with mock.patch.object(simulator, "is_capturing", return_value=True):
            sharded(model)[0].detach().norm()
        check(gates(model) == {False}, "after the capture")
        check(optimizer.statistics().overlap == "step", "turned to step")
        step(model, optimizer, 1)
        check(gates(model) == {False}, "after the next step")
        optimizer.close()


@pytest.mark.parametrize(
    "job", [look_at_metadata, drop, fail_before_a_reader, read_in_a_graph_capture]
)
def test_on_two_ranks(ranks: Ranks, job: Callable[[], None]) -> None:
    ranks(2).run(job)
