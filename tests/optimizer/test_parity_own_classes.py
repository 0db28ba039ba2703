"""Optimizer classes of a user's own give the bits that they give unwrapped."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_offload import HybridDeviceOptimizer
from fsdp_offload.core.errors import LaneError, StateSchemaError
from tests.helpers import own_optimizers as own
from tests.helpers.side_by_side import SHAPES, Build, SideBySide

LANES = ("resident", "streamed", "host")
NOT_EMPTY = tuple(shape for shape in SHAPES if 0 not in shape)
ELEMENTWISE = [
    own.Lion,
    own.ReplacingMomentum,
    own.GroupCounter,
    own.AttributeCounter,
    own.TensorCounter,
    own.NumberState,
    own.Stateless,
]
LEFT_ALONE = [own.NumberState, own.EagerMomentum, own.Lamb, own.Factored, own.Clipping]


def make(cls: type[Optimizer], **changed: Any) -> Build:
    """Two groups with different lr."""

    def build(groups: list[dict[str, Any]]) -> Optimizer:
        optimizer = cls(groups, **changed)
        for group in optimizer.param_groups[1:]:
            group["lr"] *= 3
        return optimizer

    return build


def own_twins(cls: type[Optimizer], **wrap: Any) -> SideBySide:
    """Of a class that the caller calls element-wise."""
    return SideBySide(make(cls), elementwise=True, **wrap)


def compare_settings(twins: SideBySide) -> None:
    """What a class counts in its groups and attributes is written back."""
    for mine, plain in zip(twins.wrapped.param_groups, twins.plain.param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {
            k: v for k, v in plain.items() if k != "params"
        }
    for name in ("count", "history"):
        assert getattr(twins.wrapped, name, None) == getattr(twins.plain, name, None)


@pytest.mark.parametrize(("cls", "first"), [*zip(ELEMENTWISE, itertools.cycle(range(3)))])
@pytest.mark.parametrize("mixed", [False, True], ids=["one lane", "mixed"])
def test_element_wise_classes_are_cut_and_exact_in_every_lane(
    cls: type[Optimizer], first: int, mixed: bool
) -> None:
    lanes = [LANES[(first + i * mixed) % 3] for i in range(len(SHAPES))]
    twins = own_twins(cls, shapes=((130, 70), *SHAPES[1:]), update_on=lanes)
    assert twins.wrapped.statistics().buckets > 3
    assert twins.lanes() == set(lanes)
    twins.run()
    compare_settings(twins)


@pytest.mark.parametrize(
    ("cls", "dtype", "lane"),
    [
        (own.Lion, torch.bfloat16, "streamed"),
        (own.NumberState, torch.float16, "resident"),
        (own.GroupCounter, torch.bfloat16, "host"),
    ],
)
def test_half_precision_masters_follow_the_class_on_fp32(
    cls: type[Optimizer], dtype: torch.dtype, lane: str
) -> None:
    twins = own_twins(cls, dtypes=[dtype], plain_dtypes=[torch.float32], update_on=[lane])
    twins.run()
    compare_settings(twins)


@pytest.mark.parametrize(
    ("cls", "dtype"),
    [*((cls, torch.float32) for cls in LEFT_ALONE), (own.NumberState, torch.bfloat16)],
)
def test_classes_that_are_not_torchs_run_their_own_step(
    cls: type[Optimizer], dtype: torch.dtype
) -> None:
    twins = SideBySide(make(cls), shapes=NOT_EMPTY, dtypes=[dtype])
    assert twins.lanes() == {"native"}
    twins.run()
    compare_settings(twins)


def test_noise_is_drawn_in_the_same_order_as_without_wrapping() -> None:
    twins = SideBySide(make(own.Langevin))
    twins.set_gradients([True] * len(SHAPES))
    for optimizer in (twins.wrapped, twins.plain):
        torch.manual_seed(3)
        optimizer.step()
    twins.compare()


def test_a_class_that_runs_its_own_step_is_named_with_its_bytes_and_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parameters = [nn.Parameter(torch.randn(70, 50)), nn.Parameter(torch.randn(10))]
    HybridDeviceOptimizer(own.Lion(parameters))
    HybridDeviceOptimizer(own.Lion([nn.Parameter(torch.ones(1))]), offload_fraction=0)
    HybridDeviceOptimizer(own.Lion([nn.Parameter(torch.ones(1))]), elementwise=True)
    (message,) = [r.getMessage() for r in caplog.records if "its own step" in r.getMessage()]
    assert message.startswith("Lion is not a class of torch.optim")
    assert "2 parameters of 14040 bytes" in message
    assert "elementwise=True" in message


def test_the_class_keeps_its_methods_and_what_its_step_returns() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    inner = own.ScheduleFree([parameter])
    optimizer = HybridDeviceOptimizer(inner)
    with pytest.raises(RuntimeError, match="call train"):
        optimizer.step()
    optimizer.train()
    assert optimizer.step(lambda: 7.0) == 7.0
    optimizer.eval()
    assert inner.mode == "eval"
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = optimizer.nothing_such


def test_state_dicts_of_a_class_that_runs_its_own_step_are_its_own() -> None:
    twins = SideBySide(make(own.Factored), shapes=NOT_EMPTY)
    for _ in range(3):
        twins.step([True, False, True, True, True, True])
    saved = twins.wrapped.state_dict()
    torch.testing.assert_close(saved, twins.plain.state_dict(), rtol=0, atol=0)
    other = SideBySide(make(own.Factored), shapes=NOT_EMPTY)
    with torch.no_grad():
        for source, mine, theirs in zip(twins.mine, other.mine, other.theirs, strict=True):
            mine.copy_(source)
            theirs.copy_(source)
    for optimizer in (other.wrapped, other.plain):
        optimizer.load_state_dict(copy.deepcopy(saved))
    other.step([True] * len(NOT_EMPTY))
    other.compare()
    group = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    other.wrapped.add_param_group({"params": group[:1]})
    other.plain.add_param_group({"params": group[1:]})
    other.mine, other.theirs = [*other.mine, group[0]], [*other.theirs, group[1]]
    other.step([True] * len(other.mine))
    other.compare()


@pytest.mark.parametrize(
    ("cls", "lane"),
    [*zip([own.GroupCounter, own.AttributeCounter, own.TensorCounter], LANES, strict=True)],
)
def test_steps_in_which_a_group_has_no_gradient_are_counted_as_without_wrapping(
    cls: type[Optimizer], lane: str
) -> None:
    twins = own_twins(cls, shapes=[(70, 50), (9,)], update_on=[lane])
    for present in ([True, True], [True, False], [False, False], [False, True], [True, True]):
        twins.step(present)
        twins.compare()
        compare_settings(twins)


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
    optimizer = HybridDeviceOptimizer(LateState([parameter]), elementwise=True)
    for _ in range(2):
        parameter.grad = torch.randn(9, 9)
        optimizer.step()
    with pytest.raises(LaneError, match=r"'late', 'sum'") as caught:
        optimizer.step()
    assert isinstance(caught.value.__cause__, StateSchemaError)


@pytest.mark.parametrize("cls", [own.ListState, own.Blocks, own.Failing, own.EagerMomentum])
def test_classes_that_are_not_element_wise_as_promised_are_refused_when_wrapping(
    cls: type[Optimizer],
) -> None:
    optimizer = cls([nn.Parameter(torch.randn(3, 3))])
    with pytest.raises(StateSchemaError, match=rf"{cls.__name__}.*leave out elementwise=True"):
        HybridDeviceOptimizer(optimizer, elementwise=True)
    assert "step" not in optimizer.__dict__, "a refused optimizer is left as it was"
