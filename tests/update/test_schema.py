from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_offload.core.errors import StateSchemaError, UnsupportedOptimizerError
from fsdp_offload.update.schema import (
    Schema,
    check_supported,
    has_schema,
    is_torch_class,
    make_shadow,
    schema_of,
    signature,
    torch_class,
)
from tests.helpers import own_optimizers as own
from tests.helpers.optimizer_table import ELEMENTWISE, SETTINGS, Setting, settings

CPU = torch.device("cpu")
SHAPE = (16, 12)
EVERY_SETTING = settings("open", "foreach", "fused")


def schema_for(optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> Schema:
    return schema_of(optimizer, optimizer.param_groups[0], dtype, CPU)


def parameter(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    made = nn.Parameter(torch.randn(SHAPE).to(dtype))
    made.grad = torch.randn(SHAPE).to(dtype)
    return made


Kinds = list[tuple[str, str, torch.dtype | None]]
"""Names, roles and dtypes."""


def found_in(optimizer: Optimizer) -> Kinds:
    """What one real step leaves."""
    optimizer.step()
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    roles = {(): "scalar", SHAPE: "like"}
    return [
        (name, roles[tuple(value.shape)], value.dtype)
        if isinstance(value, Tensor)
        else (name, "number", None)
        for name, value in state.items()
    ]


def expected_from(schema: Schema) -> Kinds:
    return [(kind.name, kind.role, kind.dtype) for kind in schema.kinds]


# --------------------------------------------------------------------------- torch's classes


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_declared_state_is_what_a_real_step_leaves(name: str) -> None:
    for setting in (setting for setting in EVERY_SETTING if setting.name == name):
        optimizer = setting.build([parameter()])
        if not has_schema(optimizer):
            assert name == "Adafactor"
            continue
        schema = schema_for(optimizer)
        assert schema.elementwise == (name in ELEMENTWISE), setting
        assert expected_from(schema) == found_in(optimizer), setting
        assert all(kind.on_device for kind in schema.kinds), setting


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_declared_state_has_the_dtype_that_the_class_would_use(
    name: str, dtype: torch.dtype
) -> None:
    optimizer = Setting(name, "open", SETTINGS[name][-1]).build([parameter(dtype)])
    schema = schema_for(optimizer, dtype)
    assert expected_from(schema) == found_in(optimizer)


@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [
        ("AdamW", {}, {"step": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}),
        ("NAdam", {}, {"step": 0.0, "mu_product": 1.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}),
        ("ASGD", {"lr": 0.25}, {"step": 0.0, "eta": 0.25, "mu": 1.0, "ax": 0.0}),
        ("Rprop", {"lr": 0.5}, {"step": 0.0, "prev": 0.0, "step_size": 0.5}),
        ("Adagrad", {"initial_accumulator_value": 0.5}, {"step": 0.0, "sum": 0.5}),
        ("SGD", {"momentum": 0.9}, {"momentum_buffer": 0.0}),  # depends on the gradient
        ("SGD", {}, {}),
    ],
)
def test_initial_values_are_those_that_the_class_sets(
    name: str, kwargs: dict[str, Any], expected: dict[str, float]
) -> None:
    schema = schema_for(Setting(name, "open", kwargs).build([parameter()]))
    assert {kind.name: kind.initial for kind in schema.kinds} == expected


# --------------------------------------------------------------------------- whose class it is


class Rehearsing(torch.optim.AdamW):
    """Overrides a method that ``step`` calls."""

    def _init_group(self, *args: Any) -> bool:
        return super()._init_group(*args)


class Clamping(torch.optim.SGD):
    """Overrides ``step``."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            torch._foreach_clamp_max_([p.data for p in group["params"]], 1.0)
        return loss


class Named(torch.optim.AdamW):
    """Has a constructor, a constant and a method of its own."""

    flavour = "plain"

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.5)

    def describe(self) -> str:
        return self.flavour


def test_a_class_derived_from_torchs_is_torchs_unless_it_overrides_something() -> None:
    assert torch_class(torch.optim.AdamW([parameter()])) is torch.optim.AdamW
    assert torch_class(Named([parameter()])) is torch.optim.AdamW
    assert torch_class(type("AdamW", (Named,), {})([parameter()])) is torch.optim.AdamW
    assert torch_class(Rehearsing([parameter()])) is None
    assert torch_class(type("Later", (Rehearsing,), {})([parameter()])) is None
    assert torch_class(Clamping([parameter()], lr=0.1)) is None
    assert torch_class(own.Lion([parameter()])) is None
    assert not is_torch_class(own.Lion([parameter()]))


# --------------------------------------------------------------------------- other classes


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (own.Lion, {"exp_avg": "like"}),
        (own.NumberState, {"step": "number", "exp_avg": "like", "exp_avg_sq": "like"}),
        (own.TensorCounter, {"sum": "like"}),
        (own.Stateless, {}),
    ],
)
def test_state_of_own_classes_is_found(cls: type[Optimizer], expected: dict[str, str]) -> None:
    schema = schema_for(cls([parameter()]))
    assert {kind.name: kind.role for kind in schema.kinds} == expected
    assert schema.elementwise
    assert not schema.eager


# --------------------------------------------------------------------------- nothing is touched


def contents(optimizer: Optimizer) -> bytes:
    """All that the optimizer holds, and its gradients."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return pickle.dumps((optimizer.__dict__, [p.grad for p in parameters]))


class Noisy(own.AttributeCounter):
    """Changes everything that a class can change in its step."""

    defaults_ = {"lr": 0.01, "seen": (), "log": None}  # noqa: RUF012

    def begin(self, group: dict[str, Any]) -> None:
        group["log"] = (group["log"] or 0) + 1
        group.setdefault("list", []).append(1)
        group.setdefault("tensor", torch.zeros(())).add_(torch.rand(()))
        self.history.append(7)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adagrad, own.Langevin, Noisy])
def test_trying_a_class_out_leaves_the_optimizer_and_the_random_state_alone(
    cls: type[Optimizer], stepped: bool
) -> None:
    optimizer = cls([parameter(), parameter()], lr=0.125)
    if stepped:
        optimizer.step()
    before, random = contents(optimizer), torch.get_rng_state()
    schema_for(optimizer)
    assert torch.equal(torch.get_rng_state(), random)
    assert contents(optimizer) == before


def test_trying_a_class_out_calls_no_hook_and_no_step_of_the_instance() -> None:
    calls: list[str] = []
    optimizer = own.Lion([parameter()])
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    optimizer.step = lambda *_: calls.append("bound step")  # as a scheduler puts it there
    assert schema_for(optimizer).kinds[0].name == "exp_avg"
    assert calls == []


# --------------------------------------------------------------------------- shadows


def test_a_shadow_shares_no_state_group_hook_or_method_with_the_optimizer() -> None:
    optimizer = own.AttributeCounter([parameter()])
    optimizer.step()
    optimizer.register_step_post_hook(lambda *_: None)
    optimizer.grad_scale = torch.ones(())  # type: ignore[attr-defined]
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    shadow = make_shadow(optimizer, [])
    assert type(shadow) is type(optimizer)
    assert (shadow.state, shadow.param_groups) == ({}, [])
    assert shadow.history == optimizer.history  # type: ignore[attr-defined]
    assert shadow.history is not optimizer.history  # type: ignore[attr-defined]
    assert not {"step", "grad_scale"} & shadow.__dict__.keys()
    assert shadow._optimizer_step_post_hooks == OrderedDict()
    assert len(optimizer._optimizer_step_post_hooks) == 1


# --------------------------------------------------------------------------- signatures


def test_signatures_change_with_flags_and_with_a_number_becoming_zero_only() -> None:
    def of(**values: Any) -> object:
        return signature({"params": [], "lr": 0.1, "betas": (0.9, 0.99), **values})

    assert of(momentum=0.9) == of(momentum=0.1) != of(momentum=0)
    assert of(amsgrad=True) != of(amsgrad=False) != of(amsgrad=None)
    assert of(mode="a") != of(mode="b")
    assert of(fused=None) != of()
    assert of() == of(lr=0.0) == of(lr=torch.ones(())) == of(initial_lr=1, param_names=["a"])
    assert signature({"a": 1, "b": 0}) == signature({"b": 0, "a": 2})
    assert hash(of(eps=1e-8)) == hash(of(eps=1e-3))


# --------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
@pytest.mark.parametrize("derived", [False, True])
def test_classes_that_cannot_be_cut_are_refused_with_the_reason(name: str, derived: bool) -> None:
    cls = getattr(torch.optim, name)
    cls = type("Derived", (cls,), {}) if derived else cls
    with pytest.raises(UnsupportedOptimizerError, match=rf"{cls.__name__}: it .*AdamW"):
        check_supported(cls([parameter()]))


def test_a_step_that_fails_on_a_scratch_parameter_is_a_typed_error_with_its_cause() -> None:
    class Fails(own.Own):
        def update(self, *_: Any) -> None:
            raise ZeroDivisionError("seven")

    with pytest.raises(StateSchemaError, match=r"Fails .*its step failed.*seven") as caught:
        schema_for(Fails([parameter()]))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
