"""Bad input gives typed errors that name value, reason and remedy, and leaves nothing half-built.
A failure inside of a lane surfaces with its traceback, and only a load makes the optimizer usable
again."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_offload
from fsdp_offload import (
    ClosedError,
    ConfigError,
    DeviceError,
    HostMemoryError,
    HybridDeviceOptimizer,
    LaneError,
    OffloadError,
    PinningError,
    PrecisionConfig,
    StateDictError,
    StateSchemaError,
    TransferConfig,
    UnsupportedOptimizerError,
    UnsupportedParameterError,
)
from fsdp_offload.core import arguments, backend
from fsdp_offload.core.backend import CpuBackend, use_backend
from fsdp_offload.memory import HostArena
from fsdp_offload.pipeline import host
from fsdp_offload.testing import StreamSimulator
from tests.helpers.ranks import RankPool

pytestmark = pytest.mark.usefixtures("one_thread", "small_host_buckets")
CPU = torch.device("cpu")
LANES = ("resident", "streamed", "host")
SMALL = TransferConfig(bucket_bytes=4096, slots=2, host_threads=2)
each_lane = pytest.mark.parametrize("lane", LANES)


class Model(nn.Module):
    def __init__(self, seed: int = 0, shapes: tuple[Any, ...] = ((40, 60), (130,))) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes
        )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def wrap(inner: torch.optim.Optimizer, lane: str, **settings: Any) -> HybridDeviceOptimizer:
    lanes = [lane for group in inner.param_groups for p in group["params"] if p.requires_grad]
    return HybridDeviceOptimizer(inner, update_on=lanes, **{"transfer": SMALL, **settings})


def assert_explains(error: OffloadError, what: str) -> None:
    """The message has a value, a reason and a remedy."""
    assert what in error.what
    assert error.reason
    assert error.remedy
    for part in (error.what, error.reason, error.remedy):
        assert part in str(error)


class Refusal:
    """A model with a stepped optimizer and its twin: wrapping the first must change nothing."""

    def __init__(self, cls: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        self.model, self.twin_model = Model(), Model()
        self.inner = cls(self.model.parameters(), lr=0.1)
        self.twin = cls(self.twin_model.parameters(), lr=0.1)
        train(self.model, self.inner, range(1))
        train(self.twin_model, self.twin, range(1))
        self._attributes = dict(self.inner.__dict__)

    def assert_untouched(self) -> None:
        assert self.inner.__dict__ == self._attributes
        train(self.model, self.inner, range(1, 3))
        train(self.twin_model, self.twin, range(1, 3))
        assert_same(values(self.model), values(self.twin_model))
        assert_same(self.inner.state_dict(), self.twin.state_dict())
        gc.collect()
        HybridDeviceOptimizer(self.inner).step()  # and it can still be wrapped


# --------------------------------------------------------------------------- arguments

BAD_ARGUMENTS: list[tuple[dict[str, Any], type[OffloadError], str]] = [
    ({"offload_fraction": -0.1}, ConfigError, "-0.1"),
    ({"offload_fraction": 1.5}, ConfigError, "1.5"),
    ({"offload_fraction": float("nan")}, ConfigError, "nan"),
    ({"offload_fraction": "half"}, ConfigError, "'half'"),
    ({"offload_fraction": True}, ConfigError, "True"),
    ({"offload_fraction": 0.5, "device_budget": "1GiB"}, ConfigError, "device_budget='1GiB'"),
    ({"device_budget": "8 apples"}, ConfigError, "'8 apples'"),
    ({"device_budget": -1}, ConfigError, "-1"),
    ({"update_on": "gpu"}, ConfigError, "'gpu'"),
    ({"update_on": 3}, ConfigError, "3"),
    ({"update_on": ["streamed", "disk"]}, ConfigError, "'disk'"),
    ({"update_on": ["streamed"] * 3}, ConfigError, "3 lanes"),
    ({"overlap": "backward"}, ConfigError, "'backward'"),
    ({"precision": "bf16"}, ConfigError, "'bf16'"),
    ({"transfer": {"slots": 2}}, ConfigError, "{'slots': 2}"),
    ({"model": 5}, ConfigError, "int"),
    ({"model": [nn.Linear(1, 1), "layer"]}, ConfigError, "str"),
    ({"transfer": TransferConfig(host_budget=1000)}, HostMemoryError, "bytes"),
    ({"transfer": TransferConfig(host_budget=0), "update_on": "host"}, HostMemoryError, "bytes"),
]


@pytest.mark.parametrize(("arguments", "kind", "what"), BAD_ARGUMENTS, ids=str)
def test_a_bad_argument_is_refused_and_the_wrapped_optimizer_stays_as_it_was(
    arguments: dict[str, Any],
    kind: type[OffloadError],
    what: str,
    arenas: list[weakref.ref[HostArena]],
) -> None:
    refusal = Refusal()
    with pytest.raises(kind) as caught:
        HybridDeviceOptimizer(refusal.inner, **arguments)

    assert_explains(caught.value, what)
    assert arenas == []
    refusal.assert_untouched()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"bucket_bytes": 100}, "100"),
        ({"bucket_bytes": "big"}, "'big'"),
        ({"slots": 0}, "0"),
        ({"slots": "3"}, "'3'"),
        ({"slots": True}, "True"),
        ({"host_threads": 0}, "0"),
        ({"host_threads": 1.5}, "1.5"),
        ({"pin": "maybe"}, "'maybe'"),
        ({"host_budget": -5}, "-5"),
    ],
    ids=str,
)
def test_a_bad_transfer_setting_is_refused(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TransferConfig(**arguments)
    assert_explains(caught.value, what)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [({"master": "fp8"}, "'fp8'"), ({"moments": torch.float16}, "float16")],
    ids=str,
)
def test_a_bad_precision_setting_is_refused(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PrecisionConfig(**arguments)
    assert_explains(caught.value, what)


def test_a_host_budget_that_is_too_small_says_both_numbers() -> None:
    fits = HybridDeviceOptimizer(torch.optim.AdamW(Model().parameters()))
    n_bytes = fits.statistics().host_arena_bytes
    transfer = TransferConfig(host_budget=n_bytes - 1)
    with pytest.raises(HostMemoryError) as caught:
        HybridDeviceOptimizer(torch.optim.AdamW(Model().parameters()), transfer=transfer)

    assert str(n_bytes - 1) in str(caught.value)
    assert str(n_bytes) in caught.value.what
    assert isinstance(caught.value, MemoryError)


# --------------------------------------------------------------------------- what is wrapped


def test_wrapping_twice_is_refused_through_the_wrapper_and_through_the_inner_one() -> None:
    model, twin_model = Model(), Model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = HybridDeviceOptimizer(inner)
    for again in (optimizer, inner):
        with pytest.raises(ConfigError) as caught:
            HybridDeviceOptimizer(again)
        assert_explains(caught.value, type(again).__name__)
    train(model, optimizer, range(2))
    train(twin_model, torch.optim.AdamW(twin_model.parameters(), lr=0.1), range(2))

    assert_same(values(model), values(twin_model))


def test_only_optimizers_can_be_wrapped() -> None:
    for wrong in (None, Model(), torch.optim.AdamW):
        with pytest.raises(ConfigError) as caught:
            HybridDeviceOptimizer(wrong)  # type: ignore[arg-type]
        assert_explains(caught.value, type(wrong).__name__)


def test_an_optimizer_of_other_parameters_than_the_models_is_refused() -> None:
    refusal, other = Refusal(), Model()
    for models in (other, [other, nn.Linear(2, 2)]):
        with pytest.raises(ConfigError) as caught:
            HybridDeviceOptimizer(refusal.inner, model=models)
        assert_explains(caught.value, "none of them in the optimizer")
    refusal.assert_untouched()


def test_some_parameters_of_the_models_are_enough() -> None:
    model, other = Model(), Model()
    mixed = [model.weights[0], other.weights[1]]
    for models in (model, [model, other], nn.Identity()):
        HybridDeviceOptimizer(torch.optim.AdamW(mixed), model=models).close()


def test_an_optimizer_without_trainable_parameters_is_refused() -> None:
    model = Model().requires_grad_(False)
    with pytest.raises(ConfigError) as caught:
        HybridDeviceOptimizer(torch.optim.AdamW(model.parameters()))
    assert_explains(caught.value, "no trainable parameter")


class MyLBFGS(torch.optim.LBFGS):
    pass


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (torch.optim.LBFGS, "LBFGS"),
        (MyLBFGS, "MyLBFGS"),
        (torch.optim.SparseAdam, "SparseAdam"),
        (lambda p: torch.optim.AdamW(p, differentiable=True), "differentiable=True"),
    ],
    ids=["LBFGS", "subclass", "SparseAdam", "differentiable"],
)
def test_optimizers_that_cannot_be_offloaded_are_refused(make: Any, what: str) -> None:
    model = Model()
    inner = make(model.parameters())
    with pytest.raises(UnsupportedOptimizerError) as caught:
        HybridDeviceOptimizer(inner)

    assert_explains(caught.value, what)
    assert "step" not in inner.__dict__


@pytest.mark.parametrize("make", [torch.optim.Muon, torch.optim.Adafactor])
def test_whole_matrix_optimizers_have_no_host_lane(make: Any) -> None:
    parameter = nn.Parameter(torch.randn(8, 6))
    with pytest.raises(ConfigError) as caught:
        HybridDeviceOptimizer(make([parameter]), update_on=["host"])
    assert_explains(caught.value, "'host'")


class ListState(torch.optim.SGD):
    """Keeps a kind of state that has no place in flat memory."""

    def step(self, closure: None = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = [1, 2]


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Callable[[], Any]) -> None:
        closure()
        super().step()


@pytest.mark.parametrize("cls", [ListState, NeedsClosure])
def test_classes_whose_state_or_step_cannot_be_learnt_are_refused(
    cls: type[torch.optim.Optimizer],
) -> None:
    model = Model()
    inner = cls(model.parameters(), lr=0.1)
    with pytest.raises(StateSchemaError) as caught:
        HybridDeviceOptimizer(inner, elementwise=True)

    assert_explains(caught.value, cls.__name__)
    assert "step" not in inner.__dict__
    assert not inner.state


def test_state_of_the_wrapped_optimizer_that_does_not_fit_is_refused(
    arenas: list[weakref.ref[HostArena]],
) -> None:
    refusal = Refusal()
    refusal.inner.param_groups[0]["amsgrad"] = True  # the state has no max_exp_avg_sq
    with pytest.raises(StateDictError) as caught:
        HybridDeviceOptimizer(refusal.inner)
    refusal.inner.param_groups[0]["amsgrad"] = False

    assert_explains(caught.value, "exp_avg")
    caught = None  # type: ignore[assignment]  # the traceback holds the half-built wrapper
    gc.collect()
    assert [arena() for arena in arenas] == [None]
    refusal.assert_untouched()


# --------------------------------------------------------------------------- parameters


def test_parameters_on_several_device_types_are_refused() -> None:
    here, there = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, device="meta"))
    with pytest.raises(DeviceError) as caught:
        HybridDeviceOptimizer(torch.optim.AdamW([here, there]))
    assert_explains(caught.value, "cpu, meta")


def test_parameters_without_memory_are_refused() -> None:
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    with pytest.raises(DeviceError) as caught:
        HybridDeviceOptimizer(torch.optim.AdamW([parameter]))
    assert_explains(caught.value, "meta")


def test_a_device_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(arguments, "backend_for", lambda _: backend.backend_for(cuda))
    refusal = Refusal()
    with pytest.raises(DeviceError) as caught:
        HybridDeviceOptimizer(refusal.inner)

    assert_explains(caught.value, "cuda:0")
    monkeypatch.undo()
    refusal.assert_untouched()


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: torch.randn(6, 4).t(), "strides (1, 4)"),
        (lambda: torch.randn(12)[::2], "strides (2,)"),
        (lambda: torch.eye(4).to_sparse(), "sparse"),
    ],
    ids=["transposed", "strided", "sparse"],
)
def test_shards_that_are_not_contiguous_and_dense_are_refused(make: Any, what: str) -> None:
    parameter = nn.Parameter(make())
    inner = torch.optim.AdamW([nn.Parameter(torch.zeros(3)), parameter])
    with pytest.raises(UnsupportedParameterError) as caught:
        HybridDeviceOptimizer(inner)

    assert_explains(caught.value, what)
    assert "group0.1" in caught.value.what
    assert "step" not in inner.__dict__


@each_lane
def test_a_sparse_gradient_is_refused_before_anything_is_updated(lane: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 3), nn.Embedding(10, 3, sparse=True)])
    optimizer = wrap(torch.optim.AdamW(model.parameters()), lane, model=model)
    before = values(model)
    (model[0](torch.ones(3)).sum() + model[1](torch.tensor([1])).sum()).backward()
    with pytest.raises(UnsupportedParameterError) as caught:
        optimizer.step()

    assert_explains(caught.value, "1.weight")
    assert_same(values(model), before)
    optimizer.zero_grad()
    optimizer.step()  # not failed: nothing was half-done
    assert optimizer.statistics().steps == 1


@each_lane
def test_a_shard_whose_memory_was_replaced_is_refused_before_anything_is_updated(
    lane: str,
) -> None:
    model = Model()
    optimizer = wrap(torch.optim.AdamW(model.parameters()), lane)
    model.weights[1].data = model.weights[1].data.clone()
    before = values(model)
    with pytest.raises(StateSchemaError) as caught:
        train(model, optimizer, range(1))

    assert_explains(caught.value, "group0.1")
    assert_same(values(model), before)


# --------------------------------------------------------------------------- pinning


class _Pinning(CpuBackend):
    can_pin = True


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """A driver that pins: address -> bytes of what is registered."""
    registered: dict[int, int] = {}

    def pin(address: int, n_bytes: int, device: torch.device | None = None) -> None:
        if len(registered) == registered_at_most[0]:
            raise PinningError(f"{n_bytes} bytes", reason="no more", remedy="ask for less")
        registered[address] = n_bytes

    def unpin(address: int, n_bytes: int, device: torch.device | None = None) -> None:
        registered.pop(address, None)  # an arena of another test may be collected meanwhile

    registered_at_most = [0]
    monkeypatch.setattr(backend, "pin", pin)
    monkeypatch.setattr(backend, "unpin", unpin)
    monkeypatch.setattr(backend, "limit", registered_at_most, raising=False)
    return registered


@pytest.mark.parametrize(("lane", "limit"), [("streamed", 0), ("host", 0), ("host", 1)])
def test_when_pinning_is_refused_all_memory_is_given_back(
    lane: str,
    limit: int,
    driver: dict[int, int],
    arenas: list[weakref.ref[HostArena]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host lane's second piece of memory is its ring of gradient buffers."""
    backend.limit[0] = limit  # type: ignore[attr-defined]
    refusal = Refusal()
    with use_backend(_Pinning(CPU)), pytest.raises(PinningError) as caught:
        wrap(refusal.inner, lane)

    assert_explains(caught.value, "bytes")
    assert len(arenas) == limit + 1
    assert all(arena() is None or arena()._mapping is None for arena in arenas)
    assert driver == {}
    caught = None  # type: ignore[assignment]  # the traceback holds the half-built wrapper
    gc.collect()
    assert [arena() for arena in arenas] == [None] * (limit + 1)
    refusal.assert_untouched()


def test_pageable_memory_is_used_only_when_it_was_asked_for(driver: dict[int, int]) -> None:
    model, twin_model = Model(), Model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    with use_backend(_Pinning(CPU)), pytest.warns(RuntimeWarning, match="pageable"):
        optimizer = wrap(inner, "streamed", transfer=TransferConfig(pin="prefer"))
    train(model, optimizer, range(2))
    train(twin_model, torch.optim.AdamW(twin_model.parameters(), lr=0.1), range(2))

    assert not optimizer.statistics().pinned
    assert_same(values(model), values(twin_model))


# --------------------------------------------------------------------------- use after wrapping


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_and_pickles_are_refused_and_name_state_dict(
    duplicate: Callable[[Any], Any],
) -> None:
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW(Model().parameters()))
    with pytest.raises(ConfigError) as caught:
        duplicate(optimizer)

    assert_explains(caught.value, "HybridDeviceOptimizer")
    assert "state_dict()" in caught.value.remedy


@each_lane
@pytest.mark.parametrize(
    ("cls", "option", "value"),
    [(torch.optim.AdamW, "amsgrad", True), (torch.optim.RMSprop, "centered", True)],
)
def test_an_option_whose_state_is_missing_is_refused_where_the_plain_optimizer_fails(
    lane: str, cls: Any, option: str, value: Any
) -> None:
    model, twin_model = Model(), Model()
    twin = cls(twin_model.parameters(), lr=0.1)
    optimizer = wrap(cls(model.parameters(), lr=0.1), lane)
    for each_model, each in ((model, optimizer), (twin_model, twin)):
        train(each_model, each, range(1))
        each.param_groups[0][option] = value
    before = values(model)
    with pytest.raises(KeyError):
        train(twin_model, twin, range(1, 2))
    with pytest.raises(StateSchemaError) as caught:
        train(model, optimizer, range(1, 2))

    assert_explains(caught.value, "param_groups[0]")
    assert option in caught.value.remedy or "amsgrad" in caught.value.remedy
    assert_same(values(model), before)
    optimizer.param_groups[0][option] = False
    train(model, optimizer, range(1, 2))


USES: dict[str, Callable[[HybridDeviceOptimizer], object]] = {
    "step": lambda o: o.step(),
    "state": lambda o: o.state,
    "state_dict": lambda o: o.state_dict(),
    "load_state_dict": lambda o: o.load_state_dict({}),
    "synchronize": lambda o: o.synchronize(),
    "resync": lambda o: o.resync(),
    "add_param_group": lambda o: o.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
    "inner.step": lambda o: o._inner.step(),
    "inner.state_dict": lambda o: o._inner.state_dict(),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_after_close_is_refused(use: str, arenas: list[weakref.ref[HostArena]]) -> None:
    model = Model()
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW(model.parameters()))
    optimizer.close()
    n_arenas = len(arenas)
    with pytest.raises(ClosedError) as caught:
        USES[use](optimizer)

    assert_explains(caught.value, "closed")
    assert len(arenas) == n_arenas
    assert len(optimizer.param_groups) == 1


def use_in_a_fork(lane: str) -> None:
    """Both processes use the optimizer; runs in a rank, which has no threads of other tests."""
    p = nn.Parameter(torch.zeros(100))
    p.grad = torch.ones(100)
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW([p]), update_on=lane)
    optimizer.step()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            check_refused(optimizer)
            optimizer.close()  # does nothing
            del optimizer
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 2
    optimizer.close()


def check_refused(optimizer: HybridDeviceOptimizer) -> None:
    """Each use."""
    for use in (
        optimizer.step,
        optimizer.state_dict,
        optimizer.synchronize,
        lambda: optimizer.state,
        lambda: optimizer.load_state_dict({}),
    ):
        with pytest.raises(ClosedError, match="process that built it") as caught:
            use()
        assert str(os.getpid()) in caught.value.what


@pytest.mark.parametrize("lane", ["device", "host"])
def test_use_in_a_forked_process_is_refused_there_and_harmless_here(
    ranks: Callable[..., RankPool], lane: str
) -> None:
    ranks(2).run(use_in_a_fork, lane)


@pytest.mark.parametrize("bad", ["strided", "pinning"])
def test_a_group_that_cannot_be_added_leaves_everything_as_it_was(
    bad: str, driver: dict[int, int]
) -> None:
    model, twin_model = Model(), Model()
    twin = torch.optim.AdamW(twin_model.parameters(), lr=0.1)
    backend.limit[0] = 1  # type: ignore[attr-defined]
    with use_backend(_Pinning(CPU)):
        optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.1), "streamed")
    numbers = torch.randn(20)[::2] if bad == "strided" else torch.randn(20)
    with pytest.raises(UnsupportedParameterError if bad == "strided" else PinningError):
        optimizer.add_param_group({"params": [nn.Parameter(numbers)]})
    train(model, optimizer, range(2))
    train(twin_model, twin, range(2))

    assert len(optimizer.param_groups) == len(optimizer._inner.param_groups) == 1
    assert_same(values(model), values(twin_model))
    assert_same(optimizer.state_dict(), twin.state_dict())
    assert len(driver) == 1


# --------------------------------------------------------------------------- state dicts


def _adamw(model: nn.Module, **settings: Any) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    train(model, optimizer, range(1))
    return optimizer.state_dict()


def _sgd(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    train(model, optimizer, range(1))
    return optimizer.state_dict()


def _changed(name: str, value: object) -> dict[str, Any]:
    saved = _adamw(Model())
    saved["state"][1][name] = value
    return saved


BAD_STATE_DICTS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "nothing": (dict, "keys []"),
    "a module's": (lambda: dict(Model().state_dict()), "weights.0"),
    "other number of parameters": (lambda: _adamw(Model(shapes=((3,),))), "[1] parameters"),
    "other shapes": (lambda: _adamw(Model(shapes=((40, 60), (131,)))), "(131,)"),
    "other order": (lambda: _adamw(Model(shapes=((130,), (40, 60)))), "(130,)"),
    "other class": (lambda: _sgd(Model()), "momentum_buffer"),
    "other flags": (lambda: _adamw(Model(), amsgrad=True), "param_groups[0]"),
    "no tensor": (lambda: _changed("exp_avg", "text"), "'exp_avg' of group0.1 of type str"),
    "vector step": (lambda: _changed("step", torch.ones(2)), "'step' of group0.1"),
}


@each_lane
@pytest.mark.parametrize("bad", BAD_STATE_DICTS)
def test_a_state_dict_that_does_not_fit_is_refused_and_nothing_is_written(
    lane: str, bad: str
) -> None:
    model, twin_model = Model(), Model()
    twin = wrap(torch.optim.AdamW(twin_model.parameters(), lr=0.1), lane)
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.1), lane)
    train(model, optimizer, range(2))
    train(twin_model, twin, range(2))
    make, what = BAD_STATE_DICTS[bad]
    with pytest.raises(StateDictError) as caught:
        optimizer.load_state_dict(make())

    assert_explains(caught.value, what)
    assert_same(optimizer.state_dict(), twin.state_dict())
    train(model, optimizer, range(2, 4))
    train(twin_model, twin, range(2, 4))
    assert_same(values(model), values(twin_model))


# --------------------------------------------------------------------------- failures in a lane


class Explosive(torch.optim.SGD):
    """Raises in the n-th of its calls, which is the n-th bucket."""

    calls_left = 10**9
    error: BaseException | None = None

    def step(self, closure: None = None) -> None:
        Explosive.calls_left -= 1
        if Explosive.calls_left == 0:
            self.explode()
        super().step()

    def explode(self) -> None:
        raise Explosive.error or ZeroDivisionError("in a bucket")


@pytest.fixture
def explode(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``explode(n, error)``: the n-th call from now on raises."""

    def arm(calls: int, error: BaseException | None = None) -> None:
        monkeypatch.setattr(Explosive, "calls_left", calls)
        monkeypatch.setattr(Explosive, "error", error)

    monkeypatch.setattr(Explosive, "calls_left", 10**9)
    return arm


def build_explosive(lane: str) -> tuple[Model, HybridDeviceOptimizer]:
    model = Model(shapes=((90, 60), (130,)))
    return model, wrap(Explosive(model.parameters(), lr=0.1, momentum=0.9), lane, elementwise=True)


@each_lane
@pytest.mark.parametrize("position", ["first", "second", "last"])
def test_a_failure_in_a_lane_surfaces_and_only_a_load_makes_the_optimizer_usable(
    lane: str, position: str, explode: Callable[..., None]
) -> None:
    model, optimizer = build_explosive(lane)
    buckets = optimizer.statistics().buckets
    assert buckets > 4
    train(model, optimizer, range(2))
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(2, 5))
    clean = values(model)

    error = ZeroDivisionError("in a bucket")
    explode({"first": 1, "second": 2, "last": buckets}[position], error)
    with pytest.raises(LaneError, match="in a bucket") as caught:
        train(model, optimizer, range(5, 6))
    assert_explains(caught.value, "step()")
    assert caught.value.__cause__ is error
    assert "explode" in {frame.name for frame in traceback.extract_tb(error.__traceback__)}

    frozen = values(model)
    for use in (name for name in USES if name != "load_state_dict"):
        with pytest.raises(LaneError, match="in a bucket") as caught:
            USES[use](optimizer)
        assert caught.value.__cause__ is error
        assert "load" in caught.value.remedy
    with pytest.raises(StateDictError):
        optimizer.load_state_dict({})
    with pytest.raises(LaneError):  # a load that was refused does not count
        optimizer.step()
    assert_same(values(model), frozen)

    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(2, 5))
    assert_same(values(model), clean)


def test_failures_on_several_host_threads_end_in_one_error_and_leave_no_call_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's own classes run on many threads at once, a bucket in several units."""
    monkeypatch.setattr(host, "UNIT_NUMEL", 128)
    model = Model(shapes=((90, 60), (130,)))
    transfer = TransferConfig(bucket_bytes=4096, host_threads=4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = HybridDeviceOptimizer(inner, update_on="host", transfer=transfer)
    train(model, optimizer, range(1))
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(1, 3))
    clean, update = values(model), host.HostUnit.update
    running: list[host.HostUnit] = []

    def fail_often(unit: host.HostUnit, work: Any) -> None:
        running.append(unit)
        try:
            if unit.shadow.pieces[0].start % 512 == 0:
                raise ZeroDivisionError("in a unit")
            update(unit, work)
        finally:
            running.pop()

    with monkeypatch.context() as patch:
        patch.setattr(host.HostUnit, "update", fail_often)
        with pytest.raises(LaneError, match="in a unit") as caught:
            train(model, optimizer, range(3, 4))
        assert running == []
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(1, 3))

    assert_same(values(model), clean)


@pytest.mark.parametrize("lane", ["streamed", "resident"])
def test_a_failure_that_the_host_learns_of_late_surfaces_in_the_next_call(
    lane: str, explode: Callable[..., None]
) -> None:
    with StreamSimulator("lazy"):
        model, optimizer = build_explosive(lane)
        explode(2)
        train(model, optimizer, range(1))
        with pytest.raises(LaneError) as caught:
            optimizer.state_dict()

        assert_explains(caught.value, "synchronize()")
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(LaneError):
            optimizer.step()


@each_lane
def test_an_interrupt_in_the_middle_stays_an_interrupt_and_fails_the_optimizer(
    lane: str, explode: Callable[..., None]
) -> None:
    model, optimizer = build_explosive(lane)
    explode(2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, range(1))
    with pytest.raises(LaneError):
        optimizer.step()


@each_lane
def test_an_exception_in_the_closure_or_in_a_hook_updates_nothing_and_does_not_fail(
    lane: str,
) -> None:
    model, twin_model = Model(), Model()
    twin = wrap(torch.optim.AdamW(twin_model.parameters(), lr=0.1), lane)
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.1), lane)
    train(model, optimizer, range(1))
    train(twin_model, twin, range(1))

    def refuse(*_: Any) -> None:
        raise ValueError("not now")

    with pytest.raises(ValueError, match="not now"):
        optimizer.step(refuse)
    handle = optimizer.register_step_pre_hook(refuse)
    with pytest.raises(ValueError, match="not now"):
        optimizer.step()
    handle.remove()
    train(model, optimizer, range(1, 3))
    train(twin_model, twin, range(1, 3))

    assert_same(values(model), values(twin_model))


def test_a_failed_optimizer_can_be_closed(
    explode: Callable[..., None], arenas: list[weakref.ref[HostArena]]
) -> None:
    model, optimizer = build_explosive("host")
    explode(2)
    with pytest.raises(LaneError):
        train(model, optimizer, range(1))
    mappings = [weakref.ref(arena()._mapping) for arena in arenas]  # type: ignore[union-attr]
    optimizer.close()
    gc.collect()

    assert [mapping() for mapping in mappings] == [None] * 2


# --------------------------------------------------------------------------- the errors


@pytest.mark.parametrize("name", [n for n in fsdp_offload.__all__ if n.endswith("Error")])
def test_errors_have_one_base_and_can_be_pickled(name: str) -> None:
    kind = getattr(fsdp_offload, name)
    error = kind("thing=3", reason="too small", remedy="use 4")
    again = pickle.loads(pickle.dumps(error))

    assert isinstance(error, OffloadError)
    assert type(again) is kind
    assert str(again) == str(error) == "thing=3: too small. Remedy: use 4"
    assert (again.what, again.reason, again.remedy) == ("thing=3", "too small", "use 4")
