"""A failure inside of a lane surfaces with its traceback, and only a load makes the optimizer
usable again."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_offload import (
    ClosedError,
    ConfigError,
    DeviceMemoryError,
    HybridDeviceOptimizer,
    LaneError,
    StateDictError,
    StateSchemaError,
    UnsupportedParameterError,
)
from fsdp_offload.core.devices import CpuBackend
from fsdp_offload.link import HostRange
from fsdp_offload.update import state as state_io
from tests.helpers.compare import assert_same
from tests.helpers.ranks import RankPool
from tests.helpers.simulator import StreamSimulator
from tests.helpers.training import (
    LANES,
    SMALL,
    Model,
    assert_explains,
    train,
    values,
    wrap,
)


def test_a_sparse_gradient_is_refused_before_anything_is_updated() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 3), nn.Embedding(10, 3, sparse=True)])
    optimizer = wrap(torch.optim.AdamW(model.parameters()), "streamed", model=model)
    before = values(model)
    (model[0](torch.ones(3)).sum() + model[1](torch.tensor([1])).sum()).backward()
    with pytest.raises(UnsupportedParameterError) as caught:
        optimizer.step()

    assert_explains(caught.value, "1.weight")
    assert_same(values(model), before)
    optimizer.zero_grad()
    optimizer.step()  # not failed: nothing was half-done
    assert optimizer.statistics().steps == 1


def test_a_shard_whose_memory_was_replaced_is_refused_before_anything_is_updated() -> None:
    model = Model()
    optimizer = wrap(torch.optim.AdamW(model.parameters()), "streamed")
    model.weights[1].data = model.weights[1].data.clone()
    before = values(model)
    with pytest.raises(StateSchemaError) as caught:
        train(model, optimizer, range(1))

    assert_explains(caught.value, "group0.1")
    assert_same(values(model), before)


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


@pytest.mark.parametrize(
    ("lane", "cls", "option", "value"),
    [
        ("streamed", torch.optim.AdamW, "amsgrad", True),
        ("host", torch.optim.RMSprop, "centered", True),
    ],
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
    "inner.step": lambda o: o._wrapped.step(),
    "inner.state_dict": lambda o: o._wrapped.state_dict(),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_after_close_is_refused(use: str, arenas: list[weakref.ref[HostRange]]) -> None:
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
    model = Model(dtype=torch.bfloat16)
    optimizer = wrap(torch.optim.AdamW(model.parameters()), lane, model=model)
    train(model, optimizer, range(1))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for use in USES.values():
                with pytest.raises(ClosedError, match="process that built it") as caught:
                    use(optimizer)
                assert str(os.getppid()) in caught.value.reason
            model.load_state_dict(Model(seed=1, dtype=torch.bfloat16).state_dict())
            optimizer.close()  # does nothing
            del optimizer
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    train(model, optimizer, range(1, 2))
    assert float(optimizer.state[model.weights[0]]["step"]) == 2
    optimizer.close()


@pytest.mark.parametrize("lane", ["streamed", "host"])
def test_use_in_a_forked_process_is_refused_there_and_harmless_here(
    ranks: Callable[..., RankPool], lane: str
) -> None:
    ranks(2).run(use_in_a_fork, lane)


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
    "a list for state": (lambda: {**_adamw(Model()), "state": []}, "state"),
    "a number for state": (lambda: {**_adamw(Model()), "state": {0: 3}}, "state"),
    "vector step": (lambda: _changed("step", torch.ones(2)), "'step' of group0.1"),
}


@pytest.mark.parametrize(
    ("bad", "lane"), [*zip(BAD_STATE_DICTS, itertools.cycle(LANES), strict=False)]
)
def test_a_state_dict_that_does_not_fit_is_refused_and_nothing_is_written(
    bad: str, lane: str
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


@pytest.mark.parametrize(
    ("lane", "position"), [("streamed", "first"), ("resident", "second"), ("host", "last")]
)
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


@pytest.mark.parametrize(
    ("update_on", "fails"),
    [("device", "no room for a slot"), ("device", "at the end"), ("host", "at the end")],
)
def test_an_addition_that_fails_leaves_everything_as_before(
    update_on: str, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin_model = Model(), Model()
    settings: dict[str, Any] = {"update_on": update_on, "device_memory": 0, "transfer": SMALL}
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW(model.parameters()), model, **settings)
    twin = HybridDeviceOptimizer(torch.optim.AdamW(twin_model.parameters()), twin_model, **settings)
    train(model, optimizer, range(2))
    before = optimizer.statistics()

    def allocate(backend: CpuBackend, n_bytes: int) -> torch.Tensor:
        if n_bytes:  # scratch has none here
            raise torch.OutOfMemoryError(f"{n_bytes} bytes")
        return torch.empty(0, dtype=torch.uint8)

    def expose(param: object) -> dict[str, Any]:
        raise torch.OutOfMemoryError(fails)

    added = nn.Parameter(torch.zeros(5000, dtype=torch.float64))
    with monkeypatch.context() as patch:
        if fails == "no room for a slot":
            patch.setattr(CpuBackend, "allocate", allocate)
        else:
            patch.setattr(state_io, "expose", expose)
        with pytest.raises(DeviceMemoryError, match=r"\d MiB on the device for state"):
            optimizer.add_param_group({"params": [added]})

    after = optimizer.statistics()
    assert (after.buckets, after.parameters) == (before.buckets, before.parameters)
    assert after.host_arena_bytes == before.host_arena_bytes
    train(model, optimizer, range(2, 4))
    train(twin_model, twin, range(4))
    assert_same(values(model), values(twin_model))
    optimizer.add_param_group({"params": [added]})
    added.grad = torch.ones_like(added)
    optimizer.step()
    assert bool(added.abs().min() > 0), "now it is updated"


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


def test_an_interrupt_in_the_middle_stays_an_interrupt_and_fails_the_optimizer(
    explode: Callable[..., None],
) -> None:
    model, optimizer = build_explosive("streamed")
    explode(2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, range(1))
    with pytest.raises(LaneError):
        optimizer.step()


def test_an_exception_in_the_closure_or_in_a_hook_updates_nothing_and_does_not_fail() -> None:
    model, twin_model, lane = Model(), Model(), "streamed"
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
    explode: Callable[..., None], arenas: list[weakref.ref[HostRange]]
) -> None:
    model, optimizer = build_explosive("host")
    explode(2)
    with pytest.raises(LaneError):
        train(model, optimizer, range(1))
    mappings = [weakref.ref(arena()._mapping) for arena in arenas]  # type: ignore[union-attr]
    optimizer.close()
    gc.collect()

    assert mappings
    assert all(mapping() is None for mapping in mappings)
