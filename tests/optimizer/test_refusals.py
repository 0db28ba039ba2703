"""What is refused when an optimizer is wrapped: a typed error that names value, reason and remedy,
and the wrapped optimizer stays as it was."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import fsdp_offload
from fsdp_offload import (
    ConfigError,
    DeviceError,
    HostMemoryError,
    HybridDeviceOptimizer,
    OffloadError,
    PinningError,
    StateDictError,
    StateSchemaError,
    TransferConfig,
    UnsupportedOptimizerError,
    UnsupportedParameterError,
)
from fsdp_offload.core import arguments, devices
from fsdp_offload.core.devices import CpuBackend
from fsdp_offload.link import HostRange
from tests.helpers.compare import assert_same
from tests.helpers.simulator import use_backend
from tests.helpers.training import Model, assert_explains, train, values, wrap

CPU = torch.device("cpu")


class Refusal:
    """A model with a stepped optimizer and its twin: wrapping the first must change nothing."""

    def __init__(self) -> None:
        self.model, self.twin_model = Model(), Model()
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.twin = torch.optim.AdamW(self.twin_model.parameters(), lr=0.1)
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


BAD_ARGUMENTS: list[tuple[dict[str, Any], type[OffloadError], str]] = [
    ({"offload_fraction": 1.5}, ConfigError, "1.5"),
    ({"offload_fraction": float("nan")}, ConfigError, "nan"),
    ({"offload_fraction": "half"}, ConfigError, "'half'"),
    ({"offload_fraction": True}, ConfigError, "True"),
    ({"device_memory": "8 apples"}, ConfigError, "'8 apples'"),
    ({"device_memory": -1}, ConfigError, "-1"),
    ({"host_memory": "much"}, ConfigError, "'much'"),
    ({"moments": "fp8"}, ConfigError, "'fp8'"),
    ({"moments": torch.float16}, ConfigError, "torch.float16"),
    ({"moments": {}}, ConfigError, "moments={}"),
    ({"moments": "fp32", "master_weights": False}, ConfigError, "without a master"),
    ({"master_weights": 1}, ConfigError, "master_weights=1"),
    (
        {"host_memory": "5B", "transfer": TransferConfig(host_memory="6B")},
        ConfigError,
        "host_memory='5B' and '6B' in transfer",
    ),
    ({"update_on": "gpu"}, ConfigError, "'gpu'"),
    ({"update_on": 3}, ConfigError, "3"),
    ({"update_on": ["streamed", "host"]}, ConfigError, "['streamed', 'host']"),
    ({"overlap": "backward"}, ConfigError, "'backward'"),
    ({"overlap": True}, ConfigError, "overlap=True"),
    ({"update_on": True}, ConfigError, "update_on=True"),
    ({"transfer": {"pin": "never"}}, ConfigError, "{'pin': 'never'}"),
    ({"model": 5}, ConfigError, "int"),
    ({"model": [nn.Linear(1, 1), "layer"]}, ConfigError, "str"),
    ({"model": [Model(), nn.Linear(2, 2)]}, ConfigError, "none of them in the optimizer"),
    ({"transfer": TransferConfig(host_memory="1000B")}, HostMemoryError, "bytes"),
    # What belongs into a configuration names its place.
    ({"bucket_bytes": 3}, ConfigError, "transfer=TransferConfig(bucket_bytes=3)"),
    ({"pin": "never"}, ConfigError, "transfer=TransferConfig(pin='never')"),
]


@pytest.mark.parametrize(("given", "kind", "what"), BAD_ARGUMENTS, ids=str)
def test_a_bad_argument_is_refused_and_the_wrapped_optimizer_stays_as_it_was(
    given: dict[str, Any], kind: type[OffloadError], what: str, arenas: list[weakref.ref[HostRange]]
) -> None:
    refusal = Refusal()
    with pytest.raises(kind) as caught:
        HybridDeviceOptimizer(refusal.inner, **given)

    assert_explains(caught.value, what)
    assert arenas == []
    refusal.assert_untouched()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bucket_bytes", "100B"),
        ("bucket_bytes", "big"),
        ("host_threads", 0),
        ("host_threads", 1.5),
        ("pin", "maybe"),
        ("host_memory", -5),
    ],
)
def test_a_bad_setting_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        TransferConfig(**{name: value})
    assert_explains(caught.value, name, repr(value))


def test_unknown_keywords_name_the_nearest() -> None:
    inner = torch.optim.AdamW(Model().parameters())
    for name, near in (("overlapp", "'overlap'"), ("bucket_byte", "'bucket_bytes'")):
        with pytest.raises(TypeError, match=f"no argument '{name}'; did you mean {near}"):
            HybridDeviceOptimizer(inner, **{name: 1})
    with pytest.raises(TypeError, match=r"no argument 'xyz'$"):
        HybridDeviceOptimizer(inner, xyz=1)


def test_a_host_budget_that_is_too_small_says_both_numbers() -> None:
    fits = HybridDeviceOptimizer(torch.optim.AdamW(Model().parameters()))
    n_bytes = fits.statistics().host_arena_bytes
    transfer = TransferConfig(host_memory=f"{n_bytes - 1}B")
    with pytest.raises(HostMemoryError) as caught:
        HybridDeviceOptimizer(torch.optim.AdamW(Model().parameters()), transfer=transfer)

    assert_explains(caught.value, str(n_bytes - 1), str(n_bytes))
    assert isinstance(caught.value, MemoryError)


def test_the_host_budget_is_that_of_all_groups_together() -> None:
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    optimizer = HybridDeviceOptimizer(torch.optim.AdamW(first.parameters()), host_memory="40000B")
    taken = optimizer.statistics().host_arena_bytes
    with pytest.raises(HostMemoryError, match=f"is 40000 bytes, of which {taken} bytes are taken"):
        optimizer.add_param_group({"params": list(second.parameters())})
    assert optimizer.statistics().host_arena_bytes == taken
    assert len(optimizer.param_groups) == 1


# --------------------------------------------------------------------------- what is wrapped


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Callable[[], Any]) -> None:
        closure()
        super().step()


def adamw(*tensors: torch.Tensor, **options: Any) -> Optimizer:
    return torch.optim.AdamW([nn.Parameter(t) for t in tensors], **options)


def frozen() -> Optimizer:
    return torch.optim.AdamW(Model().requires_grad_(False).parameters())


THREE = torch.zeros(3)
WRONG: dict[str, tuple[Callable[[], Any], dict[str, Any], type[OffloadError], str]] = {
    "None": (lambda: None, {}, ConfigError, "NoneType"),
    "a class": (lambda: torch.optim.AdamW, {}, ConfigError, "type"),
    "a model": (Model, {}, ConfigError, "HybridDeviceOptimizer(optimizer, model)"),
    "all frozen": (frozen, {}, ConfigError, "no trainable parameter"),
    "LBFGS": (lambda: torch.optim.LBFGS([nn.Parameter(THREE)]), {}, UnsupportedOptimizerError,
              "LBFGS"),
    "SparseAdam": (lambda: torch.optim.SparseAdam([nn.Parameter(THREE)]), {},
                   UnsupportedOptimizerError, "SparseAdam"),
    "differentiable": (lambda: adamw(THREE, differentiable=True), {}, UnsupportedOptimizerError,
                       "differentiable=True"),
    "capturable on the CPU": (lambda: adamw(THREE, capturable=True), {}, UnsupportedOptimizerError,
                              "capturable"),
    "needs a closure": (lambda: NeedsClosure([nn.Parameter(THREE)], lr=0.1), {"elementwise": True},
                        StateSchemaError, "NeedsClosure"),
    "two devices": (lambda: adamw(THREE, torch.zeros(3, device="meta")), {}, DeviceError,
                    "cpu, meta"),
    "no memory": (lambda: adamw(torch.zeros(3, device="meta")), {}, DeviceError, "meta"),
    "transposed": (lambda: adamw(THREE, torch.randn(6, 4).t()), {}, UnsupportedParameterError,
                   "strides (1, 4)"),
    "sparse": (lambda: adamw(THREE, torch.eye(4).to_sparse()), {}, UnsupportedParameterError,
               "group0.1"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_wrapped_is_refused(case: str) -> None:
    make, options, kind, what = WRONG[case]
    inner = make()
    with pytest.raises(kind) as caught:
        HybridDeviceOptimizer(inner, **options)

    assert_explains(caught.value, what)
    if isinstance(inner, Optimizer):
        assert "step" not in inner.__dict__
        assert not inner.state


def test_wrapping_twice_is_refused_through_the_wrapper_and_through_the_inner_one() -> None:
    inner = torch.optim.AdamW(Model().parameters(), lr=0.1)
    optimizer = HybridDeviceOptimizer(inner)
    for again in (optimizer, inner):
        with pytest.raises(ConfigError) as caught:
            HybridDeviceOptimizer(again)
        assert_explains(caught.value, type(again).__name__)
    optimizer.close()


def test_some_parameters_of_the_models_are_enough() -> None:
    model, other = Model(), Model()
    mixed = [model.weights[0], other.weights[1]]
    for models in (model, [model, other], nn.Identity()):
        HybridDeviceOptimizer(torch.optim.AdamW(mixed), model=models).close()


def test_state_of_the_wrapped_optimizer_that_does_not_fit_is_refused(
    arenas: list[weakref.ref[HostRange]],
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


def test_a_device_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(arguments, "backend_for", lambda _: devices.backend_for(cuda))
    refusal = Refusal()
    with pytest.raises(DeviceError) as caught:
        HybridDeviceOptimizer(refusal.inner)

    assert_explains(caught.value, "cuda:0")
    monkeypatch.undo()
    refusal.assert_untouched()


# --------------------------------------------------------------------------- pinning


class _Pinning(CpuBackend):
    can_pin = True


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """A driver that pins: address -> bytes of what is registered."""
    registered: dict[int, int] = {}
    registered_at_most = [0]

    def pin(address: int, n_bytes: int, device: torch.device | None = None) -> None:
        if len(registered) == registered_at_most[0]:
            raise PinningError(f"{n_bytes} bytes", reason="no more", remedy="ask for less")
        registered[address] = n_bytes

    def unpin(address: int, n_bytes: int, device: torch.device | None = None) -> None:
        registered.pop(address, None)  # an arena of another test may be collected meanwhile

    monkeypatch.setattr(devices, "pin", pin)
    monkeypatch.setattr(devices, "unpin", unpin)
    monkeypatch.setattr(devices, "limit", registered_at_most, raising=False)
    return registered


@pytest.mark.parametrize("lane", ["streamed", "host"])
def test_when_pinning_is_refused_all_memory_is_given_back(
    lane: str, driver: dict[int, int], arenas: list[weakref.ref[HostRange]]
) -> None:
    refusal = Refusal()
    with use_backend(_Pinning(CPU)), pytest.raises(PinningError) as caught:
        wrap(refusal.inner, lane)

    assert_explains(caught.value, "bytes")
    assert all(arena() is None or arena()._mapping is None for arena in arenas)
    assert driver == {}
    caught = None  # type: ignore[assignment]  # the traceback holds the half-built wrapper
    gc.collect()
    assert [arena() for arena in arenas] == [None]
    refusal.assert_untouched()


def test_pageable_memory_is_used_only_when_it_was_asked_for(driver: dict[int, int]) -> None:
    inner = torch.optim.AdamW(Model().parameters(), lr=0.1)
    with use_backend(_Pinning(CPU)), pytest.warns(RuntimeWarning, match="pageable"):
        optimizer = wrap(inner, "streamed", transfer=TransferConfig(pin="prefer"))
    assert not optimizer.statistics().pinned


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        ("strided", UnsupportedParameterError),
        ("pinning", PinningError),
        ("another device", DeviceError),
        ("differentiable", UnsupportedOptimizerError),
        ("twice", ValueError),
    ],
)
def test_a_group_that_cannot_be_added_leaves_everything_as_it_was(
    bad: str, kind: type[Exception], driver: dict[int, int]
) -> None:
    model, twin_model = Model(), Model()
    twin = torch.optim.AdamW(twin_model.parameters(), lr=0.1)
    devices.limit[0] = 1  # type: ignore[attr-defined]
    with use_backend(_Pinning(CPU)):
        optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.1), "streamed")
    before = optimizer.statistics()
    added: Any = nn.Parameter(torch.randn(20)[::2] if bad == "strided" else torch.randn(20))
    if bad == "another device":
        added = nn.Parameter(torch.ones(9, device="meta"))
    elif bad == "twice":
        added = model.weights[0]
    with pytest.raises(kind):
        optimizer.add_param_group({"params": [added], "differentiable": bad == "differentiable"})
    assert optimizer.statistics() == before
    assert len(optimizer.param_groups) == len(optimizer._wrapped.param_groups) == 1
    train(model, optimizer, range(2))
    train(twin_model, twin, range(2))
    assert_same(values(model), values(twin_model))
    assert_same(optimizer.state_dict(), twin.state_dict())
    assert len(driver) == 1


@pytest.mark.parametrize("name", [n for n in fsdp_offload.__all__ if n.endswith("Error")])
def test_errors_have_one_base_and_can_be_pickled(name: str) -> None:
    kind = getattr(fsdp_offload, name)
    error = kind("thing=3", reason="too small", remedy="use 4")
    again = pickle.loads(pickle.dumps(error))

    assert isinstance(error, OffloadError)
    assert type(again) is kind
    assert str(again) == str(error) == "thing=3: too small. Remedy: use 4"
    assert (again.what, again.reason, again.remedy) == ("thing=3", "too small", "use 4")
