"""Phases in one process, without FSDP2: kinds, policies, use while away, failures."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from fsdp_offload import PhaseOffloader, TransferConfig, swap
from fsdp_offload.device import _DoneEvent, copy_all
from fsdp_offload.errors import (
    AwayError,
    ClosedError,
    ConfigError,
    DeviceMemoryError,
    HostMemoryError,
    UnsupportedParameterError,
)
from fsdp_offload.memory import HostArena
from fsdp_offload.moving import (
    Block,
    FixedAddressRegion,
    Mover,
    PageBlock,
    StorageBlock,
    Trip,
    absent,
    mover,
    places,
    whereabouts,
)
from fsdp_offload.phases import contents, plain_state, seats
from fsdp_offload.storages import can_swap
from tests.away import has_memory


class Net(nn.Module):
    """Tied weights, a view as a buffer, a frozen parameter, buffers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.register_buffer("corner", self.frozen.data[2:5])
        self.register_buffer("scratch", torch.randn(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)) + self.frozen)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def train(model: nn.Module, optimizer: Optimizer, steps: range, between: Any = None) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(11, (5,), generator=generator)
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
        if between is not None:
            between(step)
        optimizer.zero_grad()


def tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def all_present(tensors: list[Tensor]) -> bool:
    return all(map(has_memory, tensors))


def all_away(tensors: list[Tensor]) -> bool:
    return not any(map(has_memory, tensors))


ADDRESSES = pytest.mark.parametrize("fixed_address", ["state", False])


def owners(tensor: Tensor) -> int:
    """Of its storage."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def assert_same(first: Any, second: Any) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
}


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[HostArena]]:
    """Every arena that blocks get from here on."""
    found: list[weakref.ref[HostArena]] = []

    def build(*args: Any, **settings: Any) -> HostArena:
        arena = HostArena(*args, **settings)
        found.append(weakref.ref(arena))
        return arena

    monkeypatch.setattr(places, "HostArena", build)
    return found


# ---------------------------------------------------------------------- out and back


@ADDRESSES
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_with_a_phase_after_every_step_has_the_same_bits(
    name: str, fixed_address: bool | str
) -> None:
    plain, moved = net(), net()
    first = OPTIMIZERS[name](plain.parameters())
    second = OPTIMIZERS[name](moved.parameters())
    train(plain, first, range(6))
    phases = PhaseOffloader(moved, second, fixed_address=fixed_address)
    objects = [id(t) for t in tensors_of(moved)]

    def switch(step: int) -> None:
        with phases.away():
            assert all_away(tensors_of(moved))
            state = [v for s in second.state.values() for v in s.values()]
            assert all_away([v for v in state if isinstance(v, Tensor)])

    train(moved, second, range(6), switch)
    assert_same(moved.state_dict(), plain.state_dict())
    assert_same(second.state_dict(), first.state_dict())
    assert [id(t) for t in tensors_of(moved)] == objects
    assert moved.head.weight is moved.embed.weight
    assert moved.corner.data_ptr() == moved.frozen.data_ptr() + 8
    assert phases.statistics().cycles == 6


def test_each_storage_moves_once() -> None:
    model = net()
    phases = PhaseOffloader(model)
    expected = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_of(model)}
    assert phases.offload().n_bytes == sum(expected.values())
    assert phases.statistics().offloaded["params"].n_bytes == sum(expected.values())
    phases.reload()
    assert phases.statistics().reloaded["params"].n_bytes == sum(expected.values())


def test_twice_is_a_no_op() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    phases = PhaseOffloader(model)
    phases.reload()
    first = phases.offload()
    assert phases.offload() is first
    assert phases.is_away
    phases.reload()
    assert phases.reload().is_done()
    assert not phases.is_away
    assert_same(model.state_dict(), before)
    assert phases.statistics().cycles == 1


def raising(*args: object, **options: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("grads", ["drop", "save", "keep"])
@pytest.mark.parametrize("params", ["save", "keep"])
@pytest.mark.parametrize("state", ["save", "keep"])
def test_policies_move_what_they_name(params: str, grads: str, state: str) -> None:
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    phases = PhaseOffloader(model, optimizer, params=params, grads=grads, state=state)
    train(model, optimizer, range(2))
    nn.functional.cross_entropy(model(torch.arange(5)), torch.arange(5)).backward()
    gradients = [p.grad for p in model.parameters()]
    values = [None if g is None else g.clone() for g in gradients]
    moments = [s["momentum_buffer"] for s in optimizer.state.values()]
    live = [g for g in gradients if g is not None]
    phases.offload()
    assert (all_away if params == "save" else all_present)(tensors_of(model))
    assert (all_away if state == "save" else all_present)(moments)
    if grads == "keep":
        assert [p.grad for p in model.parameters()] == gradients or all_present(live)
    elif grads == "save":
        assert all_away(live)
        with pytest.raises(AwayError, match="gradient of"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(AwayError):
            model.zero_grad(set_to_none=False)
    else:
        assert all(p.grad is None for p in model.parameters())
    phases.reload()
    if grads == "drop":
        assert all(p.grad is None for p in model.parameters())
    else:
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
        assert_same(
            [p.grad for p in model.parameters() if p.grad is not None],
            [v for v in values if v is not None],
        )


def test_gradients_dropped_while_away_stay_dropped() -> None:
    model = net()
    phases = PhaseOffloader(model, grads="save")
    nn.functional.cross_entropy(model(torch.arange(5)), torch.arange(5)).backward()
    with phases.away():
        model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_gradients_that_came_back_are_not_held() -> None:
    model = nn.Linear(4, 4)
    phases = PhaseOffloader(model, grads="save")
    model.weight.grad = torch.ones(4, 4)
    with phases.away():
        pass
    gradient = model.weight.grad
    model.zero_grad()
    assert owners(gradient) == owners(torch.empty(1))


def test_exceptions_inside_away_still_reload() -> None:
    phases = PhaseOffloader(net())
    with pytest.raises(KeyError), phases.away():
        raise KeyError("inside")
    assert not phases.is_away


def test_an_inner_away_leaves_the_reload_to_the_outer_one() -> None:
    phases = PhaseOffloader(net())
    with phases.away():
        with phases.away():
            assert phases.is_away
        assert phases.is_away
    assert not phases.is_away


def test_the_body_of_away_may_close() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    phases = PhaseOffloader(model)
    with phases.away():
        phases.close()
    assert_same(model.state_dict(), before)


def test_host_memory_is_taken_once_and_given_back(arenas: Any) -> None:
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, range(1))
    phases = PhaseOffloader(model, optimizer)
    held = phases.statistics().host_bytes
    payload = sum(
        {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for t in [
                *tensors_of(model),
                *(v for s in optimizer.state.values() for v in s.values()),
            ]
        }.values()
    )
    assert payload <= held
    train(model, optimizer, range(1, 30), lambda _: (phases.offload(), phases.reload()))
    assert phases.statistics().host_bytes == held
    assert len(arenas) == 1
    phases.offload()
    shown = model.state_dict()
    phases.close()
    phases.close()
    assert not phases.is_away
    assert phases.statistics().host_bytes == 0
    with pytest.raises(ClosedError):
        phases.offload()
    del shown
    gc.collect()
    assert all(arena() is None or arena()._mapping is None for arena in arenas)
    train(model, optimizer, range(30, 32))


def test_state_made_later_moves_too() -> None:
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    phases = PhaseOffloader(model, optimizer)
    held = phases.statistics().host_bytes
    train(model, optimizer, range(1))
    phases.offload()
    assert all_away([s["exp_avg"] for s in optimizer.state.values()])
    assert phases.statistics().host_bytes > held
    phases.reload()


@pytest.mark.parametrize("ahead_bytes", [1, 600])
@pytest.mark.parametrize("fixed_address", [False, True, "state"])
def test_part_of_the_state_leaves_before_the_rest_is_known(
    monkeypatch: pytest.MonkeyPatch, ahead_bytes: int, fixed_address: bool | str
) -> None:
    """600 bytes are several of its tensors, not all; as a whole all have left, and come back."""
    if fixed_address is True and not can_swap():
        pytest.skip("this torch cannot swap CPU storages")
    is_fixed = fixed_address and can_swap()
    monkeypatch.setattr(contents, "AHEAD_BYTES", ahead_bytes)
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, range(1))
    phases = PhaseOffloader(model, optimizer, fixed_address=fixed_address)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    moments = [value for values in optimizer.state.values() for value in values.values()]
    n_bytes = sum(moment.nbytes for moment in moments)
    sent: list[int] = []
    out = Mover.out

    def noted(mover: Mover, blocks: Sequence[Block]) -> Trip:
        trip = out(mover, blocks)
        sent.append(trip.n_bytes)
        return trip

    monkeypatch.setattr(Mover, "out", noted)
    for _ in range(2):
        sent.clear()
        phases.offload()
        assert sent[0]
        assert is_fixed or sent[0] < n_bytes
        figures = phases.statistics().offloaded["state"]
        assert figures.n_bytes == sum(sent[:2])
        assert is_fixed or figures.n_bytes == n_bytes
        assert all_away(moments)
        assert_same(optimizer.state_dict()["state"], before)
        phases.reload()
        assert_same(optimizer.state_dict()["state"], before)


@ADDRESSES
def test_state_that_was_replaced_does_not_leave(fixed_address: bool | str) -> None:
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, range(1))
    phases = PhaseOffloader(model, optimizer, fixed_address=fixed_address)
    values = next(iter(optimizer.state.values()))
    mine = values["exp_avg"]
    values["exp_avg"] = mine + 1
    with phases.away():
        assert all_present([mine])
        assert owners(mine) == owners(torch.empty(1))  # whoever replaced it decides how long
        assert all_away([values["exp_avg"]])
        shown = next(iter(optimizer.state_dict()["state"].values()))
        assert torch.equal(shown["exp_avg"], mine + 1)
    assert torch.equal(values["exp_avg"], mine + 1)


@pytest.mark.parametrize(
    "error", [HostMemoryError("value", reason="", remedy=""), RuntimeError("broken")]
)
@pytest.mark.parametrize(
    ("owner", "where"),
    [("", "_reshard"), ("_contents", "collect"), ("_moves", "reserve"), ("_optimizer", "offload")],
)
@ADDRESSES
def test_what_left_ahead_comes_back_if_the_rest_cannot_leave(
    monkeypatch: pytest.MonkeyPatch,
    fixed_address: bool | str,
    owner: str,
    where: str,
    error: BaseException,
) -> None:
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, range(1))
    phases = PhaseOffloader(model, optimizer, fixed_address=fixed_address)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    moments = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    left: list[bool] = []

    def fails(*args: Any) -> Any:
        left.append(all_away(moments) and all_present(list(map(absent.present, moments))))
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(getattr(phases, owner, phases), where, fails)
        with pytest.raises(type(error)):
            phases.offload()
    assert left == [True]
    assert not phases.is_away
    assert all_present([*moments, *tensors_of(model)])
    assert_same(optimizer.state_dict()["state"], before)
    phases.offload()
    assert all_away(moments)
    phases.reload()
    train(model, optimizer, range(1, 2))


@pytest.mark.skipif(not can_swap(), reason="this torch cannot swap CPU storages")
@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("is_seen", [False, True])
def test_new_state_beside_old_at_fixed_addresses(
    monkeypatch: pytest.MonkeyPatch, is_seen: bool, is_refused: bool
) -> None:
    """The old may not begin to leave before the new has its seat. ``is_seen``: the host sees at
    once that a copy has ended. ``is_refused``: the first time there is no host memory for it."""
    monkeypatch.setattr(_DoneEvent, "query", lambda event: is_seen)
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(2)])
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for count in (1, 2):
        for parameter in list(model.parameters())[:count]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if count == 1:
            phases = PhaseOffloader(model, optimizer, fixed_address=True)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    if is_refused:
        with monkeypatch.context() as patch:
            patch.setattr(places, "HostArena", refused)
            with pytest.raises(HostMemoryError):
                phases.offload()
    for _ in range(2):
        with phases.away():
            assert_same(optimizer.state_dict()["state"], before)
        assert_same(optimizer.state_dict()["state"], before)


def refused(*args: Any, **options: Any) -> Any:
    raise HostMemoryError("an arena", reason="none is left", remedy="none")


def test_what_left_ahead_is_known_if_it_cannot_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, range(1))
    phases = PhaseOffloader(model, optimizer)
    monkeypatch.setattr(contents, "AHEAD_BYTES", 1)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))

    def full(mover: Mover, blocks: Sequence[Block], **options: Any) -> Trip:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(phases._moves, "reserve", raising)
        patch.setattr(Mover, "back", full)
        with pytest.raises(ZeroDivisionError):
            phases.offload()
    assert phases.is_away
    assert_same((model.state_dict(), optimizer.state_dict()["state"]), before)
    phases.reload()
    assert_same((model.state_dict(), optimizer.state_dict()["state"]), before)
    train(model, optimizer, range(1, 2))


def test_what_left_ahead_is_known_although_what_is_new_has_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where state stays at its addresses, nothing leaves ahead of what is new."""
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(2)])
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    phases: Any = None
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        phases = phases or PhaseOffloader(model, optimizer, fixed_address=False)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))

    def full(block: StorageBlock, index: int) -> None:
        raise torch.OutOfMemoryError("taken")

    with monkeypatch.context() as patch:
        patch.setattr(places, "HostArena", refused)
        patch.setattr(StorageBlock, "restore", full)
        with pytest.raises(HostMemoryError):
            phases.offload()
    assert phases.is_away
    with pytest.raises(AwayError):
        optimizer.step()
    assert_same((model.state_dict(), optimizer.state_dict()["state"]), before)
    phases.reload()
    assert_same((model.state_dict(), optimizer.state_dict()["state"]), before)


@ADDRESSES
def test_state_that_is_a_kept_gradient_stays(fixed_address: bool | str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, range(1))
    optimizer.zero_grad()
    phases = PhaseOffloader(model, optimizer, grads="keep", fixed_address=fixed_address)
    (parameter, values), *others = optimizer.state.items()
    parameter.grad = values["momentum_buffer"]
    before = copy.deepcopy(optimizer.state_dict()["state"])
    with phases.away():
        assert all_present([values["momentum_buffer"]])
        assert all_away([each["momentum_buffer"] for _, each in others])
        assert_same(optimizer.state_dict()["state"], before)
    assert_same(optimizer.state_dict()["state"], before)


def test_dropping_the_last_reference_frees_memory(arenas: Any) -> None:
    model = net()
    phases = PhaseOffloader(model)
    phases.offload()
    phases.reload()
    del phases
    gc.collect()
    assert [arena() for arena in arenas] == [None]


def test_memory_that_is_away_outlives_the_offloader() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    PhaseOffloader(model, on_use="reload").offload()
    gc.collect()
    assert_same(model.state_dict(), before)
    model(torch.arange(5))
    assert all_present(tensors_of(model))


def test_a_model_dropped_while_away_leaves_nothing(
    arenas: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whereabouts, "_entries", {})  # others' trips may still be listed
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, range(1))
    PhaseOffloader(model, optimizer).offload()
    assert whereabouts._entries
    del model, optimizer
    gc.collect()
    assert not whereabouts._entries
    assert [arena() for arena in arenas] == [None]


# ---------------------------------------------------------------------- use while away


@pytest.fixture
def away() -> tuple[Net, Optimizer, PhaseOffloader]:
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, range(2))
    phases = PhaseOffloader(model, optimizer)
    phases.offload()
    return model, optimizer, phases


Away = tuple[Net, Optimizer, PhaseOffloader]

USES: dict[str, Callable[[Net, Optimizer], object]] = {
    "forward": lambda m, o: m(torch.arange(5)),
    "part": lambda m, o: m.body[2](torch.zeros(1, 6)),
    "step": lambda m, o: o.step(),
    "cast": lambda m, o: m.double(),
    "move": lambda m, o: m.body.to("meta"),
    "deepcopy": lambda m, o: copy.deepcopy(m),
    "pickle": lambda m, o: pickle.dumps(m.body),
    "optimizer copy": lambda m, o: copy.deepcopy(o),
    "assign": lambda m, o: m.load_state_dict(net(1).state_dict(), assign=True),
}


@pytest.mark.parametrize("use", USES)
def test_use_while_away_raises_and_harms_nothing(use: str, away: Away) -> None:
    model, optimizer, phases = away
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(AwayError):
        USES[use](model, optimizer)
    assert phases.is_away
    phases.reload()
    assert_same((model.state_dict(), optimizer.state_dict()), before)
    if use not in ("move", "cast", "assign"):
        USES[use](model, optimizer)


@pytest.mark.parametrize("use", ["forward", "part", "step", "deepcopy"])
def test_use_may_reload(use: str) -> None:
    model, twin = net(), net()
    optimizers = [OPTIMIZERS["adamw"](m.parameters()) for m in (model, twin)]
    for each, optimizer in zip((model, twin), optimizers, strict=True):
        train(each, optimizer, range(2))
        each(torch.arange(5)).square().sum().backward()
    phases = PhaseOffloader(model, optimizers[0], grads="save", on_use="reload")
    phases.offload()
    USES[use](model, optimizers[0])
    USES[use](twin, optimizers[1])
    assert not phases.is_away
    assert_same(model.state_dict(), twin.state_dict())
    assert_same(optimizers[0].state_dict(), optimizers[1].state_dict())


def test_nothing_is_left_on_modules_and_optimizer(away: Away) -> None:
    model, optimizer, phases = away
    phases.reload()
    fresh = net()
    for (name, module), twin in zip(model.named_modules(), fresh.modules(), strict=True):
        assert module.__dict__.keys() == twin.__dict__.keys(), name
        assert not module._forward_pre_hooks
    assert "step" not in optimizer.__dict__
    assert "state_dict" not in optimizer.__dict__


def test_a_scheduler_built_while_away_steps_on(away: Away) -> None:
    model, optimizer, phases = away
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with pytest.raises(AwayError):
        optimizer.step()
    phases.reload()
    train(model, optimizer, range(2), lambda _: scheduler.step())
    assert optimizer.param_groups[0]["lr"] == 0.0025


def test_a_backward_from_before_raises_while_away_and_works_after() -> None:
    model, twin = net(), net()
    phases = PhaseOffloader(model, grads="drop")
    tokens = torch.arange(5)
    losses = [nn.functional.cross_entropy(m(tokens), tokens) for m in (model, twin)]
    versions = [p._version for p in model.parameters()]
    phases.offload()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[0].backward(retain_graph=True)
    phases.reload()
    assert [p._version for p in model.parameters()] == versions
    model.zero_grad()
    for loss in losses:
        loss.backward(retain_graph=True)
    assert_same([p.grad for p in model.parameters()][:-1], [p.grad for p in twin.parameters()][:-1])
    with phases.away():
        model.load_state_dict(net(5).state_dict())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[0].backward()


def test_a_forked_process_is_told() -> None:
    phases = PhaseOffloader(net())
    phases.offload()
    child = os.fork()
    if child == 0:
        try:
            phases.reload()
        except ClosedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    phases.reload()


def test_other_threads_read_while_phases_switch() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    expected = copy.deepcopy(model.state_dict())
    phases, failures, stop = PhaseOffloader(model), [], threading.Event()

    def read() -> None:
        while not stop.is_set():
            try:
                assert_same(
                    {n: v.clone() for n, v in model.state_dict().items()}, expected
                ) if phases.is_away else None
            except AssertionError as error:
                failures.append(error)

    phases.offload()
    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(20):
        model.state_dict()
        phases.offload(wait=False).wait()
    stop.set()
    thread.join()
    phases.reload()
    assert not failures
    assert_same(model.state_dict(), expected)
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def rss_bytes() -> int:
    gc.collect()  # what earlier tests have left may go at any time
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_host_memory_is_flat_over_cycles_and_goes_with_close() -> None:
    model = nn.Linear(3072, 3072)  # more than malloc ever keeps for itself
    payload = model.weight.nbytes
    phases = PhaseOffloader(model)
    with phases.away():
        pass
    before = rss_bytes()
    for _ in range(8):
        phases.offload()
        phases.reload()
    held = rss_bytes()
    assert held - before < 2 * payload  # one payload was seen to come and go, eight are a leak
    phases.close()
    assert held - rss_bytes() > 0.9 * payload


# ---------------------------------------------------------------------- state dicts


def test_state_dict_while_away_is_in_host_memory(away: Away) -> None:
    model, optimizer, phases = away
    shown, state = model.state_dict(), optimizer.state_dict()
    part = model.body.state_dict(prefix="x.")
    kept = model.state_dict(keep_vars=True)
    through_dcp = get_model_state_dict(model)
    assert not any(absent.is_absent(v) for v in (*shown.values(), *kept.values()))
    assert isinstance(kept["frozen"], nn.Parameter)
    assert not kept["frozen"].requires_grad
    assert shown["embed.weight"].data_ptr() == shown["head.weight"].data_ptr()
    values = copy.deepcopy((shown, state, part, dict(kept), through_dcp))
    assert all_away(tensors_of(model))
    phases.reload()
    assert_same(values[0], model.state_dict())
    assert_same(values[1], optimizer.state_dict())
    assert_same(values[2], model.body.state_dict(prefix="x."))
    assert_same(values[4], get_model_state_dict(model))


def test_state_dict_hooks_of_others_see_values(away: Away) -> None:
    model, _, _ = away
    sums = []
    model.body.register_state_dict_post_hook(
        lambda module, state, prefix, meta: sums.append(sum(v.sum() for v in state.values()))
    )
    model.state_dict()
    assert len(sums) == 1


@pytest.mark.parametrize("how", ["module", "part", "dcp", "in place"])
def test_loads_while_away_arrive_at_reload(how: str, away: Away) -> None:
    model, _, phases = away
    other = copy.deepcopy(net(5).state_dict())
    objects = [id(t) for t in tensors_of(model)]
    if how == "module":
        model.load_state_dict(other)
    elif how == "part":
        model.body.load_state_dict({k[5:]: v for k, v in other.items() if k[:5] == "body."})
    elif how == "dcp":
        set_model_state_dict(model, other)
    else:
        for name, value in model.state_dict().items():
            value.copy_(other[name])
    assert all_away(tensors_of(model))
    assert [id(t) for t in tensors_of(model)] == objects
    phases.reload()
    loaded = model.state_dict()
    names = [n for n in other if how != "part" or n.startswith("body.")]
    assert_same({n: loaded[n] for n in names}, {n: other[n] for n in names})


def test_a_load_that_fails_leaves_the_model_as_it_was(away: Away) -> None:
    model, _, phases = away
    bad = net(5).state_dict()
    bad["frozen"] = torch.zeros(9)
    objects = [id(t) for t in tensors_of(model)]
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(bad)

    def boom(*_: object) -> None:
        raise KeyError("hook")

    model.body.register_load_state_dict_pre_hook(boom)
    with pytest.raises(KeyError):
        model.load_state_dict(net(5).state_dict())
    assert [id(t) for t in tensors_of(model)] == objects
    phases.reload()
    assert all_present(tensors_of(model))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stepped", [True, False])
def test_optimizer_loads_while_away(name: str, stepped: bool) -> None:
    donor_model, model, twin = net(1), net(), net()
    donor = OPTIMIZERS[name](donor_model.parameters())
    train(donor_model, donor, range(3))
    saved = io.BytesIO()
    torch.save(donor.state_dict(), saved)
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (model, twin)]
    for each, optimizer in zip((model, twin), optimizers, strict=True):
        if stepped:
            train(each, optimizer, range(1))
        phases = PhaseOffloader(each, optimizer)
        if each is model:
            phases.offload()
            kept = [v for s in optimizer.state.values() for v in s.values()]
        saved.seek(0)
        optimizer.load_state_dict(torch.load(saved))
        if each is model:
            now = [v for s in optimizer.state.values() for v in s.values()]
            if stepped and name != "sgd":
                assert {id(v) for v in kept} == {id(v) for v in now}
            assert_same(copy.deepcopy(optimizer.state_dict()), donor.state_dict())
            phases.reload()
        train(each, optimizer, range(3, 5), lambda _, p=phases: (p.offload(), p.reload()))
    assert_same(optimizers[0].state_dict(), optimizers[1].state_dict())
    assert_same(model.state_dict(), twin.state_dict())


@pytest.mark.parametrize(("name", "per_parameter"), [("adamw", 2), ("fused", 3), ("sgd", 1)])
def test_state_loaded_in_the_place_of_nothing_goes_to_the_device(
    name: str, per_parameter: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    donor_model, model = net(1), net()
    donor = OPTIMIZERS[name](donor_model.parameters())
    train(donor_model, donor, range(2))
    optimizer = OPTIMIZERS[name](model.parameters())
    phases = PhaseOffloader(model, optimizer)
    phases.offload()
    optimizer.load_state_dict(copy.deepcopy(donor.state_dict()))
    moved: list[Tensor] = []
    monkeypatch.setattr(plain_state, "_to_device", lambda v, p: (moved.append(v), v)[1])
    phases.reload()
    assert len(moved) == per_parameter * len(donor.state)  # not the steps that torch keeps here
    phases.offload()
    phases.reload()
    assert len(moved) == per_parameter * len(donor.state)


def test_an_optimizer_load_that_fails_changes_nothing(away: Away) -> None:
    model, optimizer, phases = away
    before = copy.deepcopy(optimizer.state_dict())
    groups = [id(p) for p in optimizer.param_groups[0]["params"]]
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == groups
    assert_same(optimizer.state_dict(), before)
    phases.reload()
    train(model, optimizer, range(2, 3))


def test_checkpoint_while_away(away: Away, tmp_path: Path) -> None:
    from fsdp_offload import checkpoint

    model, optimizer, phases = away
    checkpoint.save(tmp_path / "a", model, optimizer)
    future = checkpoint.async_save(tmp_path / "b", model, optimizer)
    phases.reload()
    train(model, optimizer, range(2, 3))  # what was saved is from before
    future.result()
    results = []
    for name in "ab":
        other = net(3)
        fresh = OPTIMIZERS["adamw"](other.parameters())
        checkpoint.load(tmp_path / name, other, fresh)
        train(other, fresh, range(2, 3))
        results.append((other.state_dict(), fresh.state_dict()["state"]))
    expected = model.state_dict(), optimizer.state_dict()["state"]
    assert_same(results, [expected, expected])


# ---------------------------------------------------------------------- failures


def test_host_memory_short_changes_nothing() -> None:
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with pytest.raises(HostMemoryError):
        PhaseOffloader(model, transfer=TransferConfig(host_budget=100))
    held = sum(t.untyped_storage().nbytes() + 64 for t in tensors_of(model))
    phases = PhaseOffloader(model, optimizer, transfer=TransferConfig(host_budget=held))
    train(model, optimizer, range(1))
    with pytest.raises(HostMemoryError):
        phases.offload()
    assert not phases.is_away
    assert all_present(tensors_of(model))
    train(model, optimizer, range(1, 2))


@pytest.mark.skipif(not can_swap(), reason="this torch cannot swap CPU storages")
def test_fixed_addresses() -> None:
    plain, moved = net(), net()
    a, b = OPTIMIZERS["fused"](plain.parameters()), OPTIMIZERS["fused"](moved.parameters())
    train(plain, a, range(6))
    train(moved, b, range(1))
    phases = PhaseOffloader(moved, b, fixed_address=True)

    def addresses() -> list[int]:
        state = [values["exp_avg"] for values in b.state.values()]
        return [tensor.data_ptr() for tensor in (*tensors_of(moved), *state)]

    def switch(_: int) -> None:
        before = copy.deepcopy((moved.state_dict(), b.state_dict()))
        with phases.away():
            assert_same((moved.state_dict(), b.state_dict()), before)

    first = addresses()
    train(moved, b, range(1, 6), switch)
    assert addresses() == first
    assert_same(moved.state_dict(), plain.state_dict())
    assert_same(a.state_dict(), b.state_dict())
    other = net(5).state_dict()
    with phases.away():
        moved.load_state_dict(other)
    assert_same(moved.state_dict(), other)
    phases.close()
    assert_same(moved.state_dict(), other)


@pytest.mark.skipif(not can_swap(), reason="this torch cannot swap CPU storages")
def test_fixed_addresses_after_one_failure_and_another(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = OPTIMIZERS["fused"](model.parameters())
    train(model, optimizer, range(1))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    phases = PhaseOffloader(model, optimizer, fixed_address=True)

    def full(mover: Mover, blocks: Sequence[Block], **options: Any) -> Trip:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(phases._contents, "take_ahead", raising)
        with pytest.raises(ZeroDivisionError):
            phases.offload()
    with monkeypatch.context() as patch:
        patch.setattr(phases._contents, "collect", raising)
        patch.setattr(Mover, "back", full)
        with pytest.raises(ZeroDivisionError):
            phases.offload()
    assert_same((model.state_dict(), optimizer.state_dict()["state"]), before)
    phases.reload()
    assert_same((model.state_dict(), optimizer.state_dict()["state"]), before)


@pytest.mark.parametrize(
    ("fixed_address", "counts"), [(False, (0, 5, 15, 25)), ("state", (0, 5, 12, 13))]
)
def test_no_room_at_reload_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, fixed_address: bool | str, counts: Sequence[int]
) -> None:
    """It is short after so many storages, or chunks: 12 are the model's."""
    monkeypatch.setitem(FixedAddressRegion.__init__.__kwdefaults__, "chunk_bytes", 4096)
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, range(2))
    phases = PhaseOffloader(model, optimizer, fixed_address=fixed_address)
    phases.offload()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    left = 0

    def shortened(restore: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
        def short(block: Any, index: int) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise torch.OutOfMemoryError("taken")
            restore(block, index)

        return short

    with monkeypatch.context() as patch:
        for each in (StorageBlock, PageBlock):
            patch.setattr(each, "restore", shortened(each.restore))
        for left in counts:  # noqa: B007
            with pytest.raises(DeviceMemoryError, match="bytes"):
                phases.reload()
            assert phases.is_away
            assert all_away(tensors_of(model))
            assert_same((model.state_dict(), optimizer.state_dict()), before)
    phases.reload()
    assert_same((model.state_dict(), optimizer.state_dict()), before)


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize(
    ("fixed_address", "at"),
    [*((False, i) for i in range(1, 9)), *(("state", i) for i in range(1, 8))],
)
def test_an_exception_mid_copy_loses_nothing(
    room: bool, at: int, fixed_address: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each of the copies out: four of parameters, and four of state or three of its chunks."""
    monkeypatch.setitem(FixedAddressRegion.__init__.__kwdefaults__, "chunk_bytes", 1 << 20)
    model, optimizer = trained()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    phases = PhaseOffloader(model, optimizer, fixed_address=fixed_address)
    count = 0

    def failing(view: Callable[[Any, int], Tensor]) -> Callable[[Any, int], Tensor]:
        def fail(block: Any, index: int) -> Tensor:
            nonlocal count
            count += 1
            if count == at:
                raise RuntimeError("broken")
            return view(block, index)

        return fail

    def full(block: Any, index: int) -> None:
        raise torch.OutOfMemoryError("taken")

    with monkeypatch.context() as patch:
        for each in (StorageBlock, PageBlock):
            patch.setattr(each, "view", failing(each.view))
            if not room:
                patch.setattr(each, "restore", full)
        with pytest.raises(RuntimeError, match="broken"):
            phases.offload()
        has_left = any(t.untyped_storage().nbytes() == 0 for t in tensors_of(model))
        assert phases.is_away or not has_left
        assert not (room and phases.is_away)
        assert_same((model.state_dict(), optimizer.state_dict()), before)
        if phases.is_away:
            with pytest.raises(DeviceMemoryError):
                phases.reload()
    phases.reload()
    assert_same((model.state_dict(), optimizer.state_dict()), before)
    assert all_present(tensors_of(model))
    optimizer.step()


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("fixed_address", [False, "state"])
def test_an_exception_on_the_way_back_leaves_all_away(
    at: int, fixed_address: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each of the copies back; a later call brings all."""
    monkeypatch.setitem(FixedAddressRegion.__init__.__kwdefaults__, "chunk_bytes", 1 << 20)
    model, optimizer = trained()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    phases = PhaseOffloader(model, optimizer, fixed_address=fixed_address)
    phases.offload()
    counts = iter(range(1, 100))

    def broken(targets: Any, sources: Any) -> None:
        if next(counts) == at:
            raise ZeroDivisionError
        copy_all(targets, sources)

    with monkeypatch.context() as patch:
        patch.setattr(mover, "copy_all", broken)
        patch.setattr(mover, "PACK_BELOW_BYTES", 0)
        try:
            phases.reload()
        except ZeroDivisionError:
            assert phases.is_away
            assert all_away(tensors_of(model))
            assert_same((model.state_dict(), optimizer.state_dict()), before)
        else:
            assert next(counts) == at == 8  # chunks of state are one less
    phases.reload()
    assert_same((model.state_dict(), optimizer.state_dict()), before)
    optimizer.step()


def trained() -> tuple[nn.ParameterList, Optimizer]:
    model = nn.ParameterList([nn.Parameter(torch.randn(n)) for n in (9, 300_000, 270_000, 5)])
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.skipif(not can_swap(), reason="this torch cannot swap CPU storages")
def test_pieces_that_have_no_copy_yet_stay_when_the_way_back_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block of a region leaves piece by piece: the rest of it was not copied this time."""
    monkeypatch.setitem(FixedAddressRegion.__init__.__kwdefaults__, "chunk_bytes", 4096)
    model = nn.Linear(64, 64, bias=False)  # four pieces
    phases = PhaseOffloader(model, fixed_address=True)
    phases.offload()
    phases.reload()
    with torch.no_grad():
        model.weight.fill_(7.0)
    sent = []
    left, fetch_all = Mover._left, Mover._fetch_all

    def fail_out(self: Mover, *args: Any) -> None:
        left(self, *args)
        sent.append(args)
        if len(sent) == 2:
            raise RuntimeError("on the way out")

    def fail_back(self: Mover, *args: Any) -> None:
        monkeypatch.setattr(Mover, "_fetch_all", fetch_all)
        raise RuntimeError("on the way back")

    monkeypatch.setattr(Mover, "_left", fail_out)
    monkeypatch.setattr(Mover, "_fetch_all", fail_back)
    with pytest.raises(RuntimeError, match="on the way back"):
        phases.offload()
    assert len(sent) > 2  # what had not left by then has left since
    assert phases.is_away
    assert bool((model.state_dict()["weight"] == 7).all())
    phases.reload()
    assert bool((model.weight == 7).all())
    phases.close()


def test_memory_that_torch_does_not_own_stays_or_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.weight.data = torch.frombuffer(bytearray(16), dtype=torch.float32).view(2, 2)
    with PhaseOffloader(model).away():  # no device: nothing is lost by leaving it
        assert all_present([model.weight])
        assert all_away([model.bias])

    class OnDevice(StorageBlock):
        class storage:
            device = torch.device("cuda")
            resizable = staticmethod(lambda: False)

        def __init__(self) -> None:
            self.key, self.n_bytes = "params.weight", 16

    with pytest.raises(UnsupportedParameterError, match="weight"):
        seats.movable([OnDevice()])


@pytest.mark.parametrize(
    "arguments",
    [
        {"params": "drop"},
        {"grads": "rebuild"},
        {"state": "drop"},
        {"on_use": "ignore"},
        {"params": "rebuild"},
        {"optimizer": "adamw"},
    ],
    ids=str,
)
def test_wrong_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PhaseOffloader(net(), **arguments)


def test_wrong_models_and_copies() -> None:
    with pytest.raises(ConfigError):
        PhaseOffloader(nn.ReLU())
    phases = PhaseOffloader(net())
    with pytest.raises(ConfigError):
        copy.deepcopy(phases)
    with pytest.raises(ConfigError):
        pickle.dumps(phases)


# ---------------------------------------------------------------------- swap


def test_swap_reuses_room(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = net(1), net(2)
    before = copy.deepcopy((first.state_dict(), second.state_dict()))
    a, b = PhaseOffloader(first), PhaseOffloader(second)
    b.offload()
    restore = StorageBlock.restore
    tensors = [*tensors_of(first), *tensors_of(second)]
    room = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())

    def short(block: StorageBlock, index: int) -> None:
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        if sum(storages.values()) + block.n_bytes > room:
            raise torch.OutOfMemoryError("full")
        restore(block, index)

    monkeypatch.setattr(StorageBlock, "restore", short)
    for _ in range(3):
        out, in_ = swap(out=a, in_=b)
        assert out.n_bytes == in_.n_bytes > 0
        assert (a.is_away, b.is_away) == (True, False)
        a, b = b, a
    swap(out=b, in_=a, wait=False)
    a.offload()
    monkeypatch.undo()
    a.reload()
    b.reload()
    assert_same((first.state_dict(), second.state_dict()), before)
