"""What stands for a gradient in host memory: the bits of a plain one, and what moves for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_offload.core.backend import Event
from fsdp_offload.core.recorded import ORDERS, Place, Record, RecordedShard, apply_all, record_of
from tests.helpers.compare import same

BF16, FP32 = torch.bfloat16, torch.float32


class Reached:
    """An event that nothing has to wait for."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class Home:
    """Counts what moves, and the waits."""

    def __init__(self) -> None:
        self.fetched: list[Record] = []
        self.waits: list[Event] = []

    def fetch(self, record: Record) -> Tensor:
        self.fetched.append(record)
        return record.place.host.clone()


class Made:
    """Plain gradients, and what stands for equal ones."""

    def __init__(self, count: int = 3, dtype: torch.dtype = FP32) -> None:
        generator = torch.Generator().manual_seed(7)
        self.plain = [torch.randn(4, 9 + i, generator=generator).to(dtype) for i in range(count)]
        self.home = Home()
        self.normed = Reached()
        norms = zip(*(torch._foreach_norm(self.plain, order) for order in ORDERS), strict=True)
        self.records = [
            Record(
                self.home.fetch,
                self.home.waits.append,
                Place(t.clone(), 0, torch.stack(each), self.normed, Reached()),
            )
            for t, each in zip(self.plain, norms, strict=True)
        ]
        pairs = zip(self.plain, self.records, strict=True)
        self.away: list[Tensor] = [RecordedShard(t, keeper=record) for t, record in pairs]

    def updated_from(self) -> list[Tensor]:
        """What an update reads."""
        read = []
        for record in self.records:
            values = record.real if record.real is not None else record.place.host
            read.append(values.clone())
            apply_all([(read[-1:], record.operations)])
        return read

    def check(self, moved: int = 0, pinned: int = 0) -> None:
        found = self.updated_from()
        assert same(found, self.plain)
        assert len(self.home.fetched) == moved
        assert sum(record.real is not None for record in self.records) == pinned


@torch.no_grad()
def clip(gradients: list[Tensor], order: float = 2.0) -> Tensor:
    norms = torch._foreach_norm(gradients, order)
    total = torch.linalg.vector_norm(torch.stack(norms), order)
    torch._foreach_mul_(gradients, torch.clamp(0.3 / (total + 1e-6), max=1.0))
    return total


def unscale(gradients: list[Tensor]) -> Tensor:
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.tensor(0.3))
    return found


def zero(gradients: list[Tensor]) -> list[Tensor]:
    for gradient in gradients:
        gradient.zero_()
    return [torch.zeros_like(gradient) for gradient in gradients]


def scale_each(gradients: list[Tensor]) -> None:
    factor = torch.tensor(0.7)
    for index, gradient in enumerate(gradients):
        gradient.mul_(factor).div_(3)
        gradients[index] *= 1.1
        gradients[index] /= factor
    factor.fill_(5.0)  # the caller's


def scale_below(gradients: list[Tensor]) -> None:
    """As DTensor calls it."""
    torch.ops.aten._foreach_mul_.Scalar(gradients, 0.9)
    torch.ops.aten._foreach_div_.Tensor(gradients, torch.tensor(1.7))
    torch.ops.aten.mul_.Tensor(gradients[0], 0.3)


STAYS: dict[str, Callable[[list[Tensor]], Any]] = {
    "clip": clip,
    "clip by the largest": lambda gradients: clip(gradients, torch.inf),
    "unscale": unscale,
    "zero": zero,
    "zero all": lambda gradients: [torch._foreach_zero_(gradients), torch.ones(2)][1:],
    "scale each": scale_each,
    "scale below torch's functions": scale_below,
    "aliases": lambda gradients: [g.detach().view_as(g).mul_(0.5).shape for g in gradients],
    "looks": lambda gradients: [(g.shape, g.dtype, g.is_inference()) for g in gradients],
}


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("what", list(STAYS))
def test_nothing_moves_for(what: str, dtype: torch.dtype) -> None:
    made = Made(dtype=dtype)
    if what == "unscale" and dtype != FP32:
        made = Made()  # torch's CPU kernel has no other
    expected, found = STAYS[what](made.plain), STAYS[what](made.away)
    assert same(found, expected) if isinstance(expected, Tensor | list) else found == expected
    made.check()


def test_norms_are_read_behind_the_reduction_and_copied() -> None:
    made = Made()
    norms = torch._foreach_norm(made.away, 2)
    expected = copy.deepcopy(norms)
    for record in made.records:
        record.place.norms.zero_()  # the next reduction
    assert same(norms, expected)
    assert set(made.home.waits) == {made.normed}


def test_norms_of_some_away_and_some_on_the_device() -> None:
    made = Made()
    mixed = [made.away[0], made.plain[1], made.away[2]]
    assert same(torch._foreach_norm(mixed, 2), torch._foreach_norm(made.plain, 2))
    torch._foreach_mul_(mixed, 0.5)
    torch._foreach_mul_([made.plain[0], made.plain[2]], 0.5)
    made.records[1].keep(made.plain[1].clone())
    made.check(pinned=1)


def test_a_second_norm_takes_one_copy_at_a_time() -> None:
    made = Made()
    for gradients in (made.plain, made.away):
        clip(gradients)
    assert same(clip(made.away), clip(made.plain))
    made.check(moved=3)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_value_that_is_not_finite_is_found(value: float) -> None:
    made = Made()
    made.plain[1][2, 3] = value
    made.records[1].place.norms[1] = value
    assert unscale(made.away) == unscale([each.clone() for each in made.plain]) == 1.0
    assert not made.home.fetched


def test_a_sum_of_squares_that_overflows_is_no_infinity() -> None:
    made = Made()
    for record in made.records:
        record.place.norms[0] = torch.inf
    assert unscale(made.away) == 0.0


def test_unscaling_twice_looks_at_the_values() -> None:
    made = Made()
    for _ in range(2):
        assert same(unscale(made.away), unscale(made.plain))
    made.check(moved=3, pinned=3)


READS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda g: g.sum(),
    "norm": lambda g: torch.linalg.vector_norm(g),
    "average": lambda g: torch.zeros(g.shape).lerp(g, 0.5),
    "item": lambda g: torch.tensor(g.max().item()),
    "copy": lambda g: g.clone(),
}


@pytest.mark.parametrize("what", list(READS))
def test_a_read_keeps_nothing(what: str) -> None:
    made = Made(1)
    made.away[0].mul_(0.5)
    made.plain[0].mul_(0.5)
    assert same([READS[what](made.away[0])], [READS[what](made.plain[0])])
    made.check(moved=1)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda g: g.add_(1.0),
    "clamp": lambda g: torch._foreach_clamp_min_([g], -0.1),
    "+=": lambda g: g.__iadd__(torch.ones_like(g)),
    "a view": lambda g: g.view(-1)[::2].zero_(),
    "an element": lambda g: g.__setitem__((0, 0), 3.0),
    "of another shape": lambda g: g.mul_(torch.arange(1.0, 5.0)[:, None]),
    "data": lambda g: g.data.mul_(3.0),
    "numpy": lambda g: g.numpy().fill(2.0),
    "named": lambda g: g.mul_(other=0.5),
    "named in a list": lambda g: torch._foreach_mul_([g], scalar=0.5),
    "named list": lambda g: torch._foreach_zero_(self=[g]),
}


@pytest.mark.parametrize("what", list(WRITES))
def test_a_write_keeps_the_copy(what: str) -> None:
    made = Made(1)
    for (gradient,) in (made.plain, made.away):
        gradient.mul_(0.5)
        WRITES[what](gradient)
        gradient.mul_(0.25)
    made.check(moved=1, pinned=1)
    made.away[0].zero_()
    made.plain[0].zero_()
    made.check(moved=1, pinned=1)


def test_an_in_place_use_returns_what_stands_for_it() -> None:
    (gradient,) = Made(1).away
    assert all(
        type(found) is RecordedShard
        for found in (gradient.mul_(2.0), gradient.zero_(), gradient.add_(1.0), gradient.detach())
    )


def test_an_alias_sees_what_is_done_later() -> None:
    made = Made(1)
    alias = made.away[0].detach()
    made.away[0].mul_(0.5)
    assert record_of(alias) is made.records[0]
    assert same([alias.clone()], [made.plain[0] * 0.5])


def test_the_version_changes_with_each_write() -> None:
    (gradient,) = Made(1).away
    versions = [gradient._version]
    for write in (lambda: gradient.mul_(2.0), gradient.zero_, lambda: gradient.add_(1.0)):
        write()
        versions.append(gradient._version)
    gradient.sum()
    assert versions == sorted(set(versions))
    assert gradient._version == versions[-1]


def test_factors_of_lists_of_several_dtypes_are_not_noted() -> None:
    made, narrow = Made(1), torch.ones(3, dtype=BF16)
    torch._foreach_mul_([made.away[0], narrow], torch.tensor(0.3))
    torch._foreach_mul_([made.plain[0], torch.ones(3, dtype=BF16)], torch.tensor(0.3))
    made.check(moved=1, pinned=1)


def test_lists_may_be_named() -> None:
    made = Made()
    others = [torch.ones_like(each) for each in made.plain]
    for gradients in (made.plain, made.away):
        torch._foreach_add_(gradients, other=others)
    made.check(moved=3, pinned=3)
