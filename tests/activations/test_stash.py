"""Sizes, overflow and refusals of a stash, on one process and on several ranks."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_offload import (
    ActivationError,
    ClosedError,
    ConfigError,
    DeviceError,
    DeviceMemoryError,
    HostMemoryError,
    PagedStash,
    StashOverflowError,
)
from fsdp_offload.core.devices import CpuBackend
from tests.activations import moe
from tests.activations.moe import CPU
from tests.helpers.ranks import RankPool

SIZES: dict[str, Any] = {"page_bytes": "256B", "tail": "nan"}


def prepared(**sizes: Any) -> PagedStash:
    """That has recorded batch 0."""
    stash = PagedStash(CPU, **SIZES | sizes)
    moe.gradients(moe.model().use(stash), moe.batch(0))
    stash.prepare(margin=1.0)
    return stash


def wide(seed: int) -> Tensor:
    """All tokens have two rows: more than batch 0 had."""
    x = moe.batch(seed)
    x[:, 0] = 1.0
    return x


# --------------------------------------------------------------------------- overflow


def test_pages_that_run_out_are_noticed_and_later_iterations_go_on() -> None:
    stash, model = prepared(), moe.model()
    expected = moe.gradients(model, moe.batch(0))
    model.use(stash)
    moe.gradients(model, wide(1))
    assert stash.statistics().overflows > 0
    with pytest.raises(StashOverflowError, match="pages ran out"):
        stash.check()
    stash.check()
    assert moe.same(moe.gradients(model, moe.batch(0)), expected)
    stash.check()
    assert stash.statistics().used_device_pages == 0


def losses(model: moe.Model, stash: PagedStash | None, whole: bool) -> list[Tensor]:
    """Of ten steps with random numbers in the forward and a counter; every fifth batch is wide."""
    torch.manual_seed(0)
    model.use(stash)
    counter = torch.zeros(1)
    found: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run: Any = (lambda fn: fn(False)) if stash is None else stash.run
    for step in range(10):
        x = wide(step) if step % 5 == 4 else moe.batch(0)

        def forward(retry: bool, x: Tensor = x) -> Tensor:
            counter.add_(0 if retry else 1)
            y: Tensor = model(x * (1 + torch.rand(1))) * counter
            return y.sin().mean()

        def iteration(retry: bool, x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = forward(retry, x)
            loss.backward()
            return loss.detach()

        optimizer.zero_grad()
        loss = run(iteration if whole else forward)
        if not whole:
            loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, counter]


@pytest.mark.parametrize("whole", [False, True], ids=["forward", "iteration"])
def test_what_overflowed_is_repeated_exactly(whole: bool) -> None:
    stash = prepared()
    expected = losses(moe.model(), None, whole)
    assert moe.same(losses(moe.model(), stash, whole), expected)
    now = stash.statistics()
    assert now.exact_groups > 3  # which recorded
    assert now.groups - now.exact_groups > 24  # pages hold what they can in a repetition, too
    assert now.repeats == 2
    assert stash._store.n_live == 0


@pytest.mark.parametrize(("rows", "what"), [(70, "70 rows beyond"), (-7, "a count below 0")])
def test_a_count_that_no_buffer_has(rows: int, what: str) -> None:
    stash = prepared(device_bytes="64KiB")
    x, count = torch.randn(40, 16, requires_grad=True), torch.tensor(rows)

    def forward(retry: bool) -> Tensor:
        with stash.group(x, count):
            return x.sin()

    with pytest.raises(StashOverflowError, match=f"{rows} rows of 40"):
        stash.run(forward)  # whose repetition has the same buffer
    forward(False)
    with pytest.raises(StashOverflowError, match=what):
        stash.check()


def test_a_dispatcher_that_dropped_rows_gets_its_repetition() -> None:
    stash = prepared(device_bytes="64KiB")
    x, asked = torch.randn(40, 16, requires_grad=True), []

    def forward(retry: bool) -> Tensor:
        asked.append(retry)
        buffer = torch.cat([x, x]) if retry else x
        with stash.group(buffer, torch.tensor(70)):
            return buffer.sin()

    assert stash.run(forward).shape[0] == 80
    assert asked == [False, True]


def overflow_on_the_last(stash: PagedStash, model: moe.Model) -> None:
    is_last = dist.get_rank() == dist.get_world_size() - 1
    attempts: list[bool] = []

    def forward(retry: bool) -> Tensor:
        attempts.append(retry)
        y: Tensor = model(wide(0) if is_last else moe.batch(0))
        dist.all_reduce(total := y.detach().sum())
        return y.square().mean() + total

    expected = forward(False)
    model.use(stash)
    attempts.clear()
    assert torch.equal(stash.run(forward), expected)
    assert attempts == [False, True]
    forward(False)
    with pytest.raises(StashOverflowError, match="pages ran out"):
        stash.check()


def fail_on_the_last(stash: PagedStash, model: moe.Model) -> None:
    def fail(retry: bool) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("on purpose")

    is_last = dist.get_rank() == dist.get_world_size() - 1
    with pytest.raises(ValueError if is_last else ActivationError, match="on"):
        stash.run(fail)


def on_ranks(fails: bool) -> None:
    (fail_on_the_last if fails else overflow_on_the_last)(prepared(), moe.model())


@pytest.mark.parametrize("fails", [False, True], ids=["overflow", "error"])
def test_all_ranks_repeat_or_none(ranks: Any, fails: bool) -> None:
    pool: RankPool = ranks(2)
    pool.run(on_ranks, fails)


# --------------------------------------------------------------------------- sizes


def test_the_pool_is_what_was_in_use_at_once() -> None:
    stash = PagedStash(CPU, **SIZES)
    with pytest.raises(ActivationError, match="before any group"):
        stash.prepare()
    model = moe.model().use(stash)
    moe.gradients(model, moe.batch(0))
    plan = stash.prepare(margin=1.0)
    moe.gradients(model, moe.batch(0))
    now = stash.statistics()
    assert now.most_device_pages == now.device_pages == plan.device_pages
    assert now.overflows == 0
    assert plan.device_bytes == now.device_pages * 256
    larger = stash.prepare(margin=2.0)  # again
    assert larger.device_pages == 2 * plan.device_pages
    moe.gradients(model, wide(1))
    stash.check()


def test_repr_says_what_is_where() -> None:
    stash = PagedStash(CPU, "2MiB", "1MiB")
    stash.prepare()
    pool = "pool of 2.00 MiB on the device and 1.00 MiB in host memory"
    y = moe.model().use(stash)(moe.batch(0))
    assert repr(stash) == f"PagedStash(cpu, paged, {pool}, 3 live groups)"
    with stash.exact():
        assert repr(stash) == f"PagedStash(cpu, exact, {pool}, 3 live groups)"
    del y
    stash.close()
    assert repr(stash) == "PagedStash(cpu, closed, 0 live groups)"


def test_prepare_is_refused_while_a_group_is_live() -> None:
    stash = PagedStash(CPU, "64KiB", **SIZES)
    y = moe.model().use(stash)(moe.batch(0))
    with pytest.raises(ActivationError, match="3 live groups"):
        stash.prepare()
    del y
    stash.prepare()


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"page_bytes": "200B"}, "200"),
        ({"page_bytes": "64B"}, "64"),
        ({"tail": "one"}, "one"),
        ({"device_bytes": "much"}, "much"),
        ({"host_bytes": -1}, "-1"),
        ({"region": mock.Mock(device=torch.device("cuda", 1))}, "a region on cuda:1"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        PagedStash(CPU, **wrong)


@pytest.mark.parametrize("margin", [0.5, float("nan")])
def test_a_margin_below_one(margin: float) -> None:
    with pytest.raises(ConfigError, match="margin"):
        PagedStash(CPU, "1MiB").prepare(margin=margin)


def test_no_room_on_the_host_takes_nothing() -> None:
    stash = PagedStash(CPU, "64KiB", host_bytes="900TiB", **SIZES)
    with pytest.raises(HostMemoryError):
        stash.prepare()
    assert stash.statistics().device_pages == 0
    moe.gradients(moe.model().use(stash), moe.batch(0))  # still exact


@pytest.mark.parametrize("fails", ["_take_pool", "_add_tables"])
def test_without_room_for_another_pool_a_stash_is_exact(fails: str) -> None:
    stash, model = prepared(), moe.model()
    expected = moe.gradients(model, moe.batch(0))
    full = mock.patch.object(PagedStash, fails, side_effect=torch.OutOfMemoryError("full"))
    with full, pytest.raises(DeviceMemoryError, match="goes on without a pool"):
        stash.prepare()
    assert repr(stash) == "PagedStash(cpu, exact, 0 live groups)"
    assert moe.same(moe.gradients(model.use(stash), moe.batch(0)), expected)
    stash.prepare()
    assert ", paged, pool of " in repr(stash)


def test_a_pool_that_is_taken_inside_of_exact_is_used_after_it() -> None:
    stash, model = PagedStash(CPU, **SIZES), moe.model()
    with stash.exact():
        moe.gradients(model.use(stash), moe.batch(0))
        stash.prepare()
        assert ", exact, " in repr(stash)
    assert ", paged, pool of " in repr(stash)
    before = stash.statistics().exact_groups
    moe.gradients(model, moe.batch(0))
    assert stash.statistics().exact_groups == before


def test_exact_rows_go_to_the_host_where_the_device_is_full() -> None:
    stash, model = PagedStash(CPU, **SIZES), moe.model()
    expected = moe.gradients(model, moe.batch(0))
    with mock.patch.object(Tensor, "clone", side_effect=torch.OutOfMemoryError("full")):
        loss = model.use(stash)(moe.batch(0)).square().mean()
    model.zero_grad()
    loss.backward()
    assert moe.same([p.grad for p in model.parameters()], expected[1:])


# --------------------------------------------------------------------------- captures and processes


@pytest.fixture
def capturing() -> Iterator[None]:
    with mock.patch.object(CpuBackend, "is_capturing", return_value=True):
        yield


def test_what_waits_for_the_device_is_refused_in_a_capture(capturing: None) -> None:
    stash = PagedStash(CPU, "64KiB", **SIZES)
    calls = {
        "prepare": stash.prepare,
        "check": stash.check,
        "run": lambda: stash.run(lambda retry: None),
        "exact": lambda: stash.exact().__enter__(),
        "group": lambda: stash.group().__enter__(),
    }
    for name, call in calls.items():
        with pytest.raises(DeviceError, match="capture") as caught:
            call()
        assert caught.value.remedy, name


def test_a_captured_group_goes_back_in_a_capture_only() -> None:
    stash = prepared(device_bytes="64KiB")
    pool = stash._store.pool
    assert pool is not None
    pool.add_tables(1, 100)
    x, count = torch.randn(40, 16, requires_grad=True), torch.tensor(7)
    with (
        mock.patch.object(CpuBackend, "is_capturing", return_value=True),
        mock.patch.object(type(pool), "can_capture", True),
    ):
        with stash.group(x, count):
            y = x.sin()
        with pytest.raises(ActivationError, match="captured_groups"):
            with stash.group(x, count):
                z = x.sin()
    with pytest.raises(DeviceError, match="outside"):
        y[:7].sum().backward()
    with stash.group(x, count):
        z = x.sin()
    with (
        mock.patch.object(CpuBackend, "is_capturing", return_value=True),
        pytest.raises(DeviceError, match="inside"),
    ):
        z[:7].sum().backward()


def test_copies_and_forked_processes_are_refused() -> None:
    stash = prepared()
    for copies in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match="a copy or a pickle"):
            copies(stash)
    with (
        mock.patch.object(os, "getpid", return_value=-1),
        pytest.raises(ClosedError, match="parent"),
    ):
        stash.group()
    stash.close()
    with pytest.raises(ClosedError, match="it is closed"):
        stash.group()
