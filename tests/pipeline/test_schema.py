from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_offload.errors import StateSchemaError, UnsupportedOptimizerError
from fsdp_offload.pipeline.schema import (
    Schema,
    StateKind,
    check_supported,
    is_torch_class,
    make_shadow,
    probe,
    raw_step,
    signature,
)
from tests import own_optimizers as own
from tests.optimizer_table import ELEMENTWISE, SETTINGS, Setting, settings

CPU = torch.device("cpu")
SHAPE = (16, 12)
EVERY_SETTING = settings("open", "foreach", "fused")


def probed(optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> Schema:
    return probe(optimizer, optimizer.param_groups[0], dtype, CPU)


def parameter(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    made = nn.Parameter(torch.randn(SHAPE).to(dtype))
    made.grad = torch.randn(SHAPE).to(dtype)
    return made


def kind_of(name: str, value: Any) -> StateKind:
    """What a value in a real state is."""
    if not isinstance(value, Tensor):
        return StateKind(name, "number")
    if value.dim() == 0:
        return StateKind(name, "scalar", value.dtype, value.device == CPU)
    return StateKind(name, "like" if value.shape == SHAPE else "other", value.dtype)


def found_in(optimizer: Optimizer) -> tuple[list[str], list[Any], list[Any]]:
    """Names, roles and dtypes that one real step leaves."""
    optimizer.step()
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    kinds = [kind_of(name, value) for name, value in state.items()]
    return [k.name for k in kinds], [k.role for k in kinds], [k.dtype for k in kinds]


def expected_from(schema: Schema) -> tuple[list[str], list[Any], list[Any]]:
    kinds = schema.kinds
    return [k.name for k in kinds], [k.role for k in kinds], [k.dtype for k in kinds]


# --------------------------------------------------------------------------- what is probed


@pytest.mark.parametrize("setting", EVERY_SETTING, ids=str)
def test_probed_state_is_what_a_real_step_leaves(setting: Setting) -> None:
    optimizer = setting.build([parameter()])
    schema = probed(optimizer)
    assert schema.elementwise == (setting.name in ELEMENTWISE)
    assert expected_from(schema) == found_in(optimizer)
    assert all(kind.on_device for kind in schema.kinds)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_probed_state_has_the_dtype_that_the_class_would_use(name: str, dtype: torch.dtype) -> None:
    optimizer = Setting(name, "open", SETTINGS[name][-1]).build([parameter(dtype)])
    schema = probed(optimizer, dtype)
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
    schema = probed(Setting(name, "open", kwargs).build([parameter()]))
    assert {kind.name: kind.initial for kind in schema.kinds} == expected


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (own.Lion, {"exp_avg": "like"}),
        (own.NumberState, {"step": "number", "exp_avg": "like", "exp_avg_sq": "like"}),
        (own.EagerMomentum, {"step": "scalar", "momentum": "like"}),
        (own.Stateless, {}),
        (own.Blocks, {"norms": "other"}),
        (own.Lamb, {"exp_avg": "like"}),
    ],
)
def test_state_of_own_classes_is_found(cls: type[Optimizer], expected: dict[str, str]) -> None:
    schema = probed(cls([parameter()]))
    assert {kind.name: kind.role for kind in schema.kinds} == expected
    assert schema.eager == (cls is own.EagerMomentum)


def test_state_made_at_construction_keeps_its_filling_and_takes_the_dtype_of_the_update() -> None:
    optimizer = own.EagerMomentum([parameter(torch.bfloat16)])
    kinds = {kind.name: kind for kind in probed(optimizer, torch.float32).kinds}
    assert kinds["momentum"].initial == 0.25
    assert kinds["momentum"].dtype == torch.float32


def test_state_that_depends_on_the_number_of_dimensions_is_of_unknown_shape() -> None:
    schema = probed(own.Factored([parameter()]))
    assert schema.role("other")
    assert not schema.elementwise


# --------------------------------------------------------------------------- element-wise or not


@pytest.mark.parametrize(
    "cls",
    [
        own.Lion,
        own.ReplacingMomentum,
        own.GroupCounter,
        own.AttributeCounter,
        own.TensorCounter,
        own.NumberState,
        own.EagerMomentum,
        own.Stateless,
        type("MyAdamW", (torch.optim.AdamW,), {}),
    ],
)
def test_own_element_wise_classes_may_be_cut(cls: type[Optimizer]) -> None:
    assert probed(cls([parameter()])).elementwise


@pytest.mark.parametrize("cls", [own.Lamb, own.Centralised, own.Transposing, own.Orthogonal])
def test_own_classes_that_mix_elements_are_kept_whole(cls: type[Optimizer]) -> None:
    schema = probed(cls([parameter()]))
    assert (schema.elementwise, schema.coupled) == (False, False)


@pytest.mark.parametrize("cls", [own.Clipping, own.Estimating, own.Langevin])
def test_own_classes_that_mix_parameters_or_draw_noise_need_one_call(cls: type[Optimizer]) -> None:
    schema = probed(cls([parameter()]))
    assert (schema.elementwise, schema.coupled) == (False, True)


def test_a_class_of_torchs_name_is_not_torchs_class() -> None:
    imposter = type("AdamW", (torch.optim.AdamW,), {})
    assert is_torch_class(torch.optim.AdamW([parameter()]))
    assert not is_torch_class(imposter([parameter()]))


# --------------------------------------------------------------------------- nothing is touched


def contents(optimizer: Optimizer) -> dict[str, Any]:
    """A copy of all that the optimizer holds, parameters by identity."""
    groups = [
        {k: copy.deepcopy(v) for k, v in g.items() if k != "params"}
        | {"ids": list(map(id, g["params"]))}
        for g in optimizer.param_groups
    ]
    state = {id(p): copy.deepcopy(dict(s)) for p, s in optimizer.state.items()}
    skipped = ("state", "param_groups")
    rest = {k: copy.deepcopy(v) for k, v in optimizer.__dict__.items() if k not in skipped}
    values = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
    gradients = [p.grad.clone() for g in optimizer.param_groups for p in g["params"]]
    return {"groups": groups, "state": state, "rest": rest, "values": values, "grads": gradients}


def assert_equal(a: Any, b: Any) -> None:
    if isinstance(a, Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            assert_equal(a[name], b[name])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


class Noisy(own.AttributeCounter):
    """Changes everything that a class can change in its step."""

    defaults_ = {"lr": 0.01, "seen": (), "log": None}  # noqa: RUF012

    def begin(self, group: dict[str, Any]) -> None:
        group["log"] = (group["log"] or 0) + 1
        group.setdefault("list", []).append(1)
        group.setdefault("tensor", torch.zeros(())).add_(torch.rand(()))
        self.history.append(7)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize(
    "cls", [torch.optim.AdamW, torch.optim.Adagrad, own.EagerMomentum, own.Langevin, Noisy]
)
def test_probing_leaves_the_optimizer_and_the_random_state_alone(
    cls: type[Optimizer], stepped: bool
) -> None:
    optimizer = cls([parameter(), parameter()], lr=0.125)
    if stepped:
        optimizer.step()
    before, random = contents(optimizer), torch.get_rng_state()
    probed(optimizer)
    assert torch.equal(torch.get_rng_state(), random)
    assert_equal(contents(optimizer), before)


def test_probing_calls_no_hook_and_no_step_of_the_instance() -> None:
    calls: list[str] = []
    optimizer = torch.optim.SGD([parameter()], lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    optimizer.step = lambda *_: calls.append("bound step")  # as a scheduler puts it there
    assert probed(optimizer).kinds[0].name == "momentum_buffer"
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


def test_the_raw_step_keeps_no_grad_and_drops_only_torchs_own_wrapper() -> None:
    optimizer = own.Lion([parameter()])
    assert own.Lion.step.hooked  # type: ignore[attr-defined]
    calls: list[object] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    with torch.enable_grad():
        raw_step(own.Lion)(optimizer)  # updating a leaf in place needs no_grad
    assert calls == []

    class Plain:
        def step(self) -> None: ...

    assert raw_step(Plain) is Plain.step  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("name", "off", "on"),
    [
        ("Adam", {"amsgrad": False}, {"amsgrad": True}),
        ("SGD", {"momentum": 0.0}, {"momentum": 0.5}),
        ("RMSprop", {"centered": False}, {"centered": True}),
        ("RMSprop", {"momentum": 0}, {"momentum": 0.5}),
    ],
)
def test_options_that_change_the_state_change_the_signature(
    name: str, off: dict[str, Any], on: dict[str, Any]
) -> None:
    built = [Setting(name, "open", kwargs).build([parameter()]) for kwargs in (off, on)]
    first, second = (signature(optimizer.param_groups[0]) for optimizer in built)
    assert first != second
    assert probed(built[0]).kinds != probed(built[1]).kinds


# --------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
@pytest.mark.parametrize("derived", [False, True])
def test_classes_that_cannot_be_cut_are_refused_with_the_reason(name: str, derived: bool) -> None:
    cls = getattr(torch.optim, name)
    cls = type("Derived", (cls,), {}) if derived else cls
    with pytest.raises(UnsupportedOptimizerError, match=rf"{cls.__name__}: it .*AdamW"):
        check_supported(cls([parameter()]))


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_differentiable_is_refused_in_any_group(name: str) -> None:
    optimizer = Setting(name, "open", {}).build([{"params": [parameter()]} for _ in range(2)])
    check_supported(optimizer)
    optimizer.param_groups[1]["differentiable"] = True
    with pytest.raises(UnsupportedOptimizerError, match="differentiable=True: autograd"):
        check_supported(optimizer)


def test_a_step_that_fails_on_a_scratch_parameter_is_a_typed_error_with_its_cause() -> None:
    class Fails(own.Own):
        def update(self, *_: Any) -> None:
            raise ZeroDivisionError("seven")

    with pytest.raises(StateSchemaError, match=r"Fails: its step failed.*seven") as caught:
        probed(Fails([parameter()]))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_class_that_reads_state_which_nobody_makes_is_a_typed_error() -> None:
    with pytest.raises(StateSchemaError, match=r"Failing: its step failed.*missing"):
        probed(own.Failing([parameter()]))


def test_state_that_is_neither_tensor_nor_number_is_refused_with_its_name() -> None:
    with pytest.raises(StateSchemaError, match=r"'preconditioners' of type list in ListState"):
        probed(own.ListState([parameter()]))
