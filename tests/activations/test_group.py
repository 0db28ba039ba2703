"""Groups: the bits of no stash, whatever autograd does with what it saved."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_offload import (
    ActivationError,
    AwayError,
    ClosedError,
    ConfigError,
    FixedAddressRegion,
    PagedStash,
)
from fsdp_offload.activations.group import MemoryRange, SavedRows, SavedTensor, StashGroup
from tests.activations import moe
from tests.activations.moe import CPU

SIZES: dict[str, Any] = {"page_bytes": "256B", "tail": "nan"}


@pytest.fixture(params=["exact", "pages", "spill"])
def stash(request: pytest.FixtureRequest) -> Iterator[PagedStash]:
    """In each of its modes; it has recorded three layers with 24 rows."""
    device_bytes, host_bytes = ("12KiB", "32KiB") if request.param == "spill" else (None, 0)
    made = PagedStash(CPU, device_bytes, host_bytes, **SIZES)
    if request.param != "exact":
        wide = torch.ones(moe.TOKENS, moe.DIM)
        with made.exact():
            moe.gradients(moe.model().use(made), wide)
        made.prepare()
    yield made
    assert is_idle(made)
    made.close()


def is_idle(stash: PagedStash) -> bool:
    """No pages are in use, nothing is live, and the stacks are in their first order."""
    stash._store.collect()
    now, pool = stash.statistics(), stash._store.pool
    if pool is not None:
        order = torch.arange(pool.free.numel(), dtype=torch.int32)
        assert torch.equal(pool.free.sort().values, order)
    return now.used_device_pages == now.used_host_pages == stash._store.n_live == 0


def live_groups(stash: PagedStash) -> int:
    """Of which something was taken, and whose backward has not come."""
    return stash._store.n_live - len(stash._store.dropped)


def test_the_bits_are_those_without_a_stash(stash: PagedStash) -> None:
    model = moe.model()
    for seed in range(4):
        expected = moe.gradients(model.use(None), moe.batch(seed))
        assert moe.same(moe.gradients(model.use(stash), moe.batch(seed)), expected)
    now = stash.statistics()
    assert (now.overflows, now.inactive_groups) == (0, 0)
    assert (now.most_host_pages > 0) == (stash._host_bytes > 0)
    assert (now.most_device_pages > 0) == (stash._store.pool is not None)


def test_several_microbatches_are_live_at_once(stash: PagedStash) -> None:
    """In turns, as a pipeline has them: neither first in, first out nor the opposite."""
    model, batches = moe.model(1), [moe.batch(seed) for seed in range(4)]
    expected = moe.several(model.use(None), batches, "01021323")
    assert moe.same(moe.several(model.use(stash), batches, "01021323"), expected)


@pytest.mark.parametrize("scenario", [moe.second_derivative, moe.compiled])
def test_what_autograd_may_do_with_it(stash: PagedStash, scenario: Any) -> None:
    before = stash.statistics().groups
    found, expected = scenario(stash.group), scenario(lambda *_: nullcontext())
    assert moe.same(found, expected)
    assert stash.statistics().groups == before + 1


def test_a_memory_range_is_copied_once(stash: PagedStash) -> None:
    gc.collect()
    routed, count = torch.randn(40, 16, requires_grad=True), torch.tensor(7)
    with stash.group(routed, count):
        both = routed * 2 + 1
        gate, up = both.chunk(2, dim=-1)  # two views
        y = gate * up
        z = y * y  # saved twice
    found = Counter(
        type(each) for each in gc.get_objects() if isinstance(each, SavedTensor | MemoryRange)
    )
    assert found == {SavedTensor: 4, MemoryRange: 2}
    z[:7].sum().backward()
    assert routed.grad is not None


def test_without_a_backward_everything_goes_by_reference_count(stash: PagedStash) -> None:
    gc.collect()
    gc.disable()
    try:
        y = moe.model().use(stash)(moe.batch(0))
        assert live_groups(stash) == 3
        del y
        kinds = (SavedTensor, MemoryRange, SavedRows, StashGroup)
        assert not [found for found in gc.get_objects() if isinstance(found, kinds)]
        assert live_groups(stash) == 0
        moe.model().use(stash)(moe.batch(0))  # its first group releases the pages
    finally:
        gc.enable()


def test_a_backward_that_ends_in_the_middle_loses_nothing(stash: PagedStash) -> None:
    model = moe.model()
    model.layers[1].register_full_backward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        moe.gradients(model.use(stash), moe.batch(0))
    del model
    gc.collect()  # the hook's frames


def fail(*_: object) -> None:
    raise RuntimeError("on purpose")


def test_an_exception_inside_leaves_nothing_behind(stash: PagedStash) -> None:
    buffer, count = torch.randn(40, 16, requires_grad=True), torch.tensor(7)
    y = buffer
    with suppress(RuntimeError), stash.group(buffer, count):
        y = buffer.sin()
        fail()
    y.sum().backward()  # as without a stash
    assert torch.equal(buffer.grad, buffer.detach().cos())
    with stash.group(buffer, count):  # not open any more
        pass


def test_backward_inside_of_the_group(stash: PagedStash) -> None:
    buffer, count = torch.randn(40, 16, requires_grad=True), torch.tensor(7)
    with stash.group(buffer, count):
        buffer.sin().sum().backward()
    assert torch.equal(buffer.grad, buffer.detach().cos())


def test_nothing_is_saved_without_gradients(stash: PagedStash) -> None:
    before = stash.statistics()
    buffer, count = torch.randn(40, 16), torch.tensor(7)
    with stash.group(buffer, count):
        buffer.sin()  # its input needs none
    with torch.no_grad(), stash.group(buffer.requires_grad_(), count):
        buffer.sin()
    now = stash.statistics()
    assert (live_groups(stash), now.groups, now.inactive_groups) == (0, before.groups, 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_group_inside_of_a_checkpoint_does_nothing(stash: PagedStash, reentrant: bool) -> None:
    model, x = moe.model(), moe.batch(0).requires_grad_()
    expected = moe.gradients(model.use(None), x)

    whole = nn.ModuleList([model.use(stash)])
    whole.forward = lambda x: checkpoint(model, x, use_reentrant=reentrant)
    assert moe.same(moe.gradients(whole, x), expected)
    if not reentrant:  # that kind has no hooks: its recomputed forward is stashed and comes back
        assert stash.statistics().inactive_groups == 6


def test_attached_by_hooks(stash: PagedStash) -> None:
    """``rows`` reads the inputs of an inner module."""

    class Inner(nn.Module):
        def forward(self, routed: Tensor, count: Tensor) -> Tensor:
            return moe.poisoned(routed, count).sin().square()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * 2, torch.tensor(7))[:7]  # type: ignore[no-any-return]

    outer, x = Outer(), torch.randn(40, 16, requires_grad=True)
    attached = stash.attach(outer, at=outer.inner, rows=lambda routed, count: count)
    y = outer(x).sum()
    assert live_groups(stash) == 1
    y.backward()
    mine, x.grad = x.grad, None
    attached.remove()
    outer(x).sum().backward()
    assert torch.equal(mine[:7], x.grad[:7])
    groups = stash.statistics().groups
    attached.remove()
    outer(x)
    assert stash.statistics().groups == groups


def test_what_an_attached_module_saves_without_output_stays_as_it_is(stash: PagedStash) -> None:
    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> None:
            self.found = x.sin()

    module, x = Keeps(), torch.randn(40, 16, requires_grad=True)
    stash.attach(module, rows=lambda x: torch.tensor(3))
    with pytest.raises(ConfigError, match="rows of int"):
        module(1)
    module(x)  # after an error no group is open
    assert live_groups(stash) == 0
    module.found.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().cos())


# --------------------------------------------------------------------------- refusals


@contextmanager
def opened() -> Iterator[tuple[PagedStash, Tensor, StashGroup]]:
    stash, x = PagedStash(CPU, **SIZES), torch.randn(40, 16, requires_grad=True)
    with stash.group() as group:
        yield stash, x, group


@pytest.mark.parametrize(
    ("x", "count", "part"),
    [
        (torch.zeros(4, 4), torch.tensor(1.0), "float32"),
        (torch.zeros(4, 4), torch.tensor(True), "bool"),
        (torch.zeros(4, 4), torch.tensor([1, 2]), "(2,)"),
        (torch.zeros(4, 4), 3, "int"),
        (torch.zeros(4, 4), torch.tensor(1, device="meta"), "meta"),
        (torch.zeros(4, 4, device="meta"), torch.tensor(1), "meta"),
        (torch.tensor(1.0), torch.tensor(1), "()"),
        ([1], torch.tensor(1), "list"),
    ],
)
def test_rows_that_are_none_are_refused(x: Any, count: Any, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PagedStash(CPU).group(x, count)
    assert part in caught.value.what
    with pytest.raises(ConfigError, match="both"):
        PagedStash(CPU).group(x)


def test_rows_twice_and_two_groups_at_once_are_refused() -> None:
    with opened() as (stash, x, group):
        group.rows(x, torch.tensor(3))
        with pytest.raises(ActivationError, match="twice"):
            group.rows(x, torch.tensor(3))
        with pytest.raises(ActivationError, match="inside another group"), stash.group():
            pass


def test_a_group_that_was_never_told_its_rows_is_refused() -> None:
    with pytest.raises(ActivationError, match="without rows"), opened() as (_, x, _):
        y = x.sin()
    del y


def test_another_thread_is_refused() -> None:
    with opened() as (stash, _, group):
        group.keep()
    with ThreadPoolExecutor() as other, pytest.raises(ActivationError, match="thread"):
        other.submit(stash.group().__enter__).result()


@pytest.mark.parametrize("saved", ["input", "output", "kept"])
def test_a_saved_tensor_written_in_place_inside_is_refused(saved: str) -> None:
    graph: list[Tensor] = []  # what is saved of a graph that is gone needs no care

    def run() -> None:
        with opened() as (_, x, group):
            group.rows(x, torch.tensor(3))
            y = x * 2
            if saved == "output":
                y = y.exp()
            elif saved == "kept":
                y = y[:5].clone()
            graph.append(y.sin())
            y.mul_(2)

    with pytest.raises(ActivationError, match="in-place"):
        run()


def test_a_kept_tensor_written_in_place_later_is_refused_as_by_torch() -> None:
    with opened() as (_, x, group):
        group.rows(x, torch.tensor(3))
        y = (x * 2)[:5].clone()
        z = y.sin()
    y.mul_(2)
    with pytest.raises(ActivationError, match="in-place"):
        z.sum().backward()


def test_a_taken_tensor_may_be_written_in_place_later(stash: PagedStash) -> None:
    x = torch.randn(40, 16, requires_grad=True)
    with stash.group(x, torch.tensor(3)):
        y = x * 1
        z = y.sin()
    y.mul_(2)
    z[:3].sum().backward()
    assert torch.equal(x.grad[:3], x.detach()[:3].cos())


def test_backward_after_close_is_refused() -> None:
    stash = PagedStash(CPU, "64KiB", **SIZES)
    stash.prepare()
    y = moe.model().use(stash)(moe.batch(0))
    stash.close()
    stash.close()
    with pytest.raises(ClosedError):
        y.sum().backward()
    with pytest.raises(ClosedError):
        stash.group()


def test_a_paused_region_is_refused() -> None:
    region = FixedAddressRegion("stash", CPU)
    stash = PagedStash(CPU, "64KiB", region=region, **SIZES)
    stash.prepare()
    model = moe.model()
    expected = moe.gradients(model, moe.batch(0))
    region.pause(save=False)
    with pytest.raises(AwayError, match="paused"):
        model.use(stash)(moe.batch(0))
    region.resume()
    assert moe.same(moe.gradients(model, moe.batch(0)), expected)


def test_live_memory_is_that_of_the_rows() -> None:
    """After the forward neither the buffers nor what was computed from them is there."""
    stash = PagedStash(CPU, "64KiB", **SIZES)
    stash.prepare()
    x = torch.randn(40, 16, requires_grad=True)
    with stash.group(x, torch.tensor(3)):
        y = x * 2
        z = y.sin()
    gone = weakref.ref(y)
    memory = y.untyped_storage()
    del y
    assert gone() is None
    assert torch._C._storage_Use_Count(memory._cdata) == 1
    z[:3].sum().backward()
