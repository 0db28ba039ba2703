"""Optimizer classes of a user's own give the bits that they give unwrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_offload import HybridDeviceOptimizer
from fsdp_offload.errors import ConfigError, LaneError, StateSchemaError
from tests import own_optimizers as own
from tests.twins import MATRICES, SHAPES, SMALL, Build, Twins

LANES = ("resident", "streamed", "host")
NOT_EMPTY = tuple(shape for shape in SHAPES if 0 not in shape)
ELEMENTWISE = [
    own.Lion,
    own.ReplacingMomentum,
    own.GroupCounter,
    own.AttributeCounter,
    own.TensorCounter,
    own.NumberState,
    own.EagerMomentum,
    own.Stateless,
]
WHOLE = [own.Lamb, own.Centralised, own.Transposing, own.Orthogonal]


def make(cls: type[Optimizer], **changed: Any) -> Build:
    """Two groups with different lr."""

    def build(groups: list[dict[str, Any]]) -> Optimizer:
        optimizer = cls(groups, **changed)
        for group in optimizer.param_groups[1:]:
            group["lr"] *= 3
        return optimizer

    return build


def compare_settings(twins: Twins) -> None:
    """What a class counts in its groups and attributes is written back."""
    for mine, plain in zip(twins.wrapped.param_groups, twins.plain.param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {
            k: v for k, v in plain.items() if k != "params"
        }
    inner = twins.wrapped._inner
    for name in ("count", "history"):
        assert getattr(inner, name, None) == getattr(twins.plain, name, None)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("cls", ELEMENTWISE)
def test_element_wise_classes_are_cut_and_exact_in_every_lane(
    cls: type[Optimizer], lane: str
) -> None:
    shapes = ((130, 70), *SHAPES[1:]) if lane == "host" else SHAPES  # its buckets are larger
    twins = Twins(make(cls), shapes=shapes, update_on=[lane] * len(SHAPES))
    assert twins.wrapped.statistics().buckets > 3
    twins.run()
    compare_settings(twins)


@pytest.mark.parametrize("cls", ELEMENTWISE)
def test_element_wise_classes_are_exact_with_all_lanes_mixed(cls: type[Optimizer]) -> None:
    lanes = [LANES[i % 3] for i in range(len(SHAPES))]
    twins = Twins(make(cls), update_on=lanes)
    assert twins.lanes() == set(LANES)
    twins.run()
    compare_settings(twins)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cls", [own.Lion, own.NumberState, own.GroupCounter, own.EagerMomentum])
def test_half_precision_masters_follow_the_class_on_fp32(
    cls: type[Optimizer], dtype: torch.dtype, lane: str
) -> None:
    twins = Twins(
        make(cls), dtypes=[dtype], plain_dtypes=[torch.float32], update_on=[lane] * len(SHAPES)
    )
    twins.run()
    compare_settings(twins)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", WHOLE)
def test_whole_matrix_classes_keep_whole_parameters(
    cls: type[Optimizer], dtype: torch.dtype, fraction: float
) -> None:
    twins = Twins(
        make(cls),
        shapes=NOT_EMPTY if cls in (own.Lamb, own.Centralised) else MATRICES,
        dtypes=[dtype],
        plain_dtypes=[torch.float32],
        offload_fraction=fraction,
    )
    twins.run()


@pytest.mark.parametrize("cls", WHOLE)
def test_whole_matrix_classes_have_no_host_lane(cls: type[Optimizer]) -> None:
    with pytest.raises(ConfigError, match="works on whole matrices"):
        Twins(make(cls), shapes=MATRICES, update_on="host")


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("cls", [own.Blocks, own.Factored])
def test_state_of_unknown_shape_stays_as_the_class_makes_it(
    cls: type[Optimizer], fraction: float
) -> None:
    twins = Twins(make(cls), shapes=NOT_EMPTY, offload_fraction=fraction)
    assert twins.lanes() == {"native"}
    twins.run()
    compare_settings(twins)


@pytest.mark.parametrize("update_on", ["device", "host"])
@pytest.mark.parametrize("cls", [own.Clipping, own.Estimating])
def test_classes_that_couple_parameters_run_in_one_call(
    cls: type[Optimizer], update_on: str
) -> None:
    twins = Twins(make(cls), shapes=NOT_EMPTY, update_on=update_on)
    assert twins.lanes() == {"native"}
    twins.run()
    compare_settings(twins)


def test_noise_is_drawn_in_the_same_order_as_without_wrapping() -> None:
    twins = Twins(make(own.Langevin))
    twins.set_gradients([True] * len(SHAPES))
    for optimizer in (twins.wrapped, twins.plain):
        torch.manual_seed(3)
        optimizer.step()
    twins.compare()


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("cls", [own.GroupCounter, own.AttributeCounter, own.TensorCounter])
def test_steps_in_which_a_group_has_no_gradient_are_counted_as_without_wrapping(
    cls: type[Optimizer], lane: str
) -> None:
    twins = Twins(make(cls), shapes=[(70, 50), (9,)], update_on=[lane] * 2)
    for present in ([True, True], [True, False], [False, False], [False, True], [True, True]):
        twins.step(present)
        twins.compare()
        compare_settings(twins)


def test_values_that_a_class_counts_are_taken_from_the_optimizer_at_every_step() -> None:
    """Resetting a counter, as a warm restart does, reaches all lanes."""
    twins = Twins(make(own.GroupCounter), update_on=[LANES[i % 3] for i in range(len(SHAPES))])
    for step in range(4):
        if step == 2:
            for optimizer in (twins.wrapped, twins.plain):
                for group in optimizer.param_groups:
                    group["k"] = 10
        twins.step([True] * len(SHAPES))
        twins.compare()
        compare_settings(twins)


@pytest.mark.parametrize("lane", LANES)
def test_a_stepped_optimizer_of_an_own_class_is_taken_over(lane: str) -> None:
    parameters = [nn.Parameter(torch.randn(70, 50)) for _ in range(2)]
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    first, plain = own.NumberState(parameters), own.NumberState(copies)

    def step(*optimizers: Optimizer) -> None:
        for mine, theirs in zip(parameters, copies, strict=True):
            mine.grad = torch.randn(70, 50)
            theirs.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()

    for _ in range(2):
        step(first, plain)
    wrapped = HybridDeviceOptimizer(first, update_on=[lane] * 2, transfer=SMALL)
    for _ in range(2):
        step(wrapped, plain)
    for mine, theirs in zip(parameters, copies, strict=True):
        assert torch.equal(mine, theirs)
        assert wrapped.state[mine]["step"] == plain.state[theirs]["step"] == 4


class LateState(own.Own):
    """Adds a kind of state in its third step."""

    defaults_ = {"lr": 0.01, "k": 0}  # noqa: RUF012

    def begin(self, group: dict[str, Any]) -> None:
        group["k"] += 1

    def update(self, p: Any, g: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("sum", torch.zeros_like(p)).add_(g)
        if group["k"] > 2:
            state.setdefault("late", torch.zeros_like(p)).add_(g)
        p.sub_(state["sum"], alpha=group["lr"])


def test_state_that_appears_later_is_an_error_that_names_it() -> None:
    parameter = nn.Parameter(torch.randn(9, 9))
    optimizer = HybridDeviceOptimizer(LateState([parameter]))
    for _ in range(2):
        parameter.grad = torch.randn(9, 9)
        optimizer.step()
    with pytest.raises(LaneError, match=r"'late', 'sum'") as caught:
        optimizer.step()
    assert isinstance(caught.value.__cause__, StateSchemaError)


@pytest.mark.parametrize("cls", [own.ListState, own.Failing])
@pytest.mark.parametrize("wrap", [HybridDeviceOptimizer])
def test_classes_that_cannot_be_offloaded_are_refused_when_wrapping(
    cls: type[Optimizer], wrap: Callable[..., Optimizer]
) -> None:
    optimizer = cls([nn.Parameter(torch.randn(3, 3))])
    with pytest.raises(StateSchemaError, match=cls.__name__):
        wrap(optimizer)
    assert "step" not in optimizer.__dict__, "a refused optimizer is left as it was"
