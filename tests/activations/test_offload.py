"""Activations in host memory: the bits of none, whatever autograd does with what it saved."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdp_offload import (
    ActivationError,
    ActivationOffload,
    ClosedError,
    ConfigError,
    DeviceError,
    HostMemoryError,
    PagedStash,
    TransferConfig,
)
from fsdp_offload.activations import offload
from fsdp_offload.activations.batches import AHEAD, Batch
from fsdp_offload.activations.saved import SavedTensor
from fsdp_offload.core.devices import CpuBackend
from fsdp_offload.link import Link, Residence
from tests.activations import moe
from tests.activations.moe import CPU
from tests.helpers.policies import POLICIES
from tests.helpers.simulator import StreamSimulator

DIM, SEQ = 16, 32
SIZE = SEQ * DIM * 4  # of one activation of `Block`


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BATCH_BYTES", 3 * SIZE)
    monkeypatch.setattr(offload, "LEAST_BYTES", 512)


class Block(nn.Module):
    """Attention and MLP, with all that autograd saves of them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(F.rms_norm(x, (DIM,))).unflatten(-1, (3, DIM)).unbind(-2)
        scores = (query @ key.transpose(-1, -2)).softmax(-1)
        x = x + F.dropout(scores @ value, 0.1)
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, layers: int = 3, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def model(layers: int = 3, checkpointed: bool = False) -> Model:
    torch.manual_seed(1)
    return Model(layers, checkpointed)


def batch(seed: int) -> Tensor:
    return torch.randn(SEQ, DIM, generator=torch.Generator().manual_seed(seed))


def gradients(net: nn.Module, seed: int, moved: ActivationOffload | None = None) -> list[Tensor]:
    torch.manual_seed(seed)  # dropout
    return moe.gradients(net, batch(seed), moved)


def made(host_memory: int | str = "4MiB", **how: Any) -> ActivationOffload:
    return ActivationOffload(host_memory, **{"share": 1.0, "device": "cpu"} | how)


def is_idle(moved: ActivationOffload) -> bool:
    now = moved.statistics()
    return now.live_batches == now.used_host_bytes == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"share": 0.4},
        {"share": 0},
        {"host_memory": f"{9 * SIZE}B"},
        {"inflight_bytes": 0},
    ],
    ids=str,
)
def test_the_bits_are_those_without(policy: str, how: dict[str, Any]) -> None:
    net = model()
    expected = [gradients(net, seed) for seed in range(4)]
    with StreamSimulator(policy, inline_current=True) as simulator:
        moved = made(**how)
        for seed in range(4):
            assert moe.same(gradients(net, seed, moved), expected[seed])
        simulator.synchronize()
        now = moved.statistics()
        assert is_idle(moved)
        assert (now.sent_bytes > 0) == (how != {"share": 0})
        assert (now.full_batches > 0) == ("host_memory" in how)
        assert (now.inactive, now.iterations) == (0, 4)
        moved.close()
        assert simulator.late_uses == []


def test_each_range_is_copied_once_and_parameters_never() -> None:
    moved, net = made(), model(1)
    with moved:
        y = net(batch(0).requires_grad_())
    now = moved.statistics()
    assert now.kept_bytes["a parameter"] == (3 + 4 + 4) * DIM * DIM * 4
    # x, its norm (rms_norm has two saved forms in one), qkv, scores, dropout's mask and value,
    # what up, gelu and down read
    sizes = [1, 1, 3, 2, 1, 1, 4, 4]
    assert now.sent_bytes <= sum(sizes) * SIZE
    assert now.taken > now.ranges
    y.sum().backward()
    assert moved.statistics().returned_bytes == now.sent_bytes


@pytest.mark.parametrize("order", ["012012", "012210", "012120"])
def test_several_forwards_before_backwards_in_any_order(order: str) -> None:
    net, moved, batches = model(), made(), [batch(seed) for seed in range(3)]
    found = moe.several(net, batches, order, lambda: moved)
    assert is_idle(moved)
    assert moe.same(found, moe.several(net, batches, order))


@pytest.mark.parametrize("scenario", [moe.second_derivative, moe.compiled])
def test_what_autograd_may_do_with_it(scenario: Any) -> None:
    moved = made()
    assert moe.same(scenario(lambda *_: moved), scenario(lambda *_: nullcontext()))
    assert moved.statistics().taken > 0


def test_backward_inside_of_the_context() -> None:
    net, moved = model(), made()
    expected = gradients(net, 0)
    with moved:
        assert moe.same(gradients(net, 0), expected)
    assert is_idle(moved)


@pytest.mark.parametrize("policy", ["lazy", "immediate"])
def test_everything_goes_by_reference_count(policy: str) -> None:
    gc.collect()
    gc.disable()
    try:
        with StreamSimulator(policy, inline_current=True) as simulator:
            moved, net = made(), model()
            kept: list[Any] = []
            for seed in range(2):
                with moved:
                    loss = net(batch(seed))
                kept += map(weakref.ref, alive(moved))
                if seed:  # the first of it only
                    torch.autograd.grad(loss.sum(), net.blocks[-1].down.weight)
                del loss
            assert kept
            assert moved.statistics().iterations == 2  # what is only being copied is not live
            simulator.synchronize()
            assert is_idle(moved)
            assert [find for find in kept if find() is not None] == []
        assert simulator.late_uses == []
    finally:
        gc.enable()
    assert not any(isinstance(each, SavedTensor | Batch) and each is not moved._copies.open
                   for each in gc.get_objects())  # fmt: skip


def alive(moved: ActivationOffload) -> list[Batch]:
    return moved._copies.live()


def test_an_exception_in_forward_or_backward() -> None:
    net, moved = model(), made()
    expected = gradients(net, 0)
    with suppress(ZeroDivisionError), moved:
        net(batch(0))
        raise ZeroDivisionError
    assert is_idle(moved)
    with moved:
        y = net(x := batch(0).requires_grad_())
    x.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    del x, y
    assert is_idle(moved)
    assert moe.same(gradients(net, 0, moved), expected)


def test_around_checkpointing_inputs_of_blocks_are_moved() -> None:
    moved, net = made(), model(checkpointed=True)
    expected = gradients(net, 0)
    assert moe.same(gradients(net, 0, moved), expected)
    assert moved.statistics().sent_bytes >= 2 * SIZE  # the first input is one of the caller's
    assert moved.statistics().sent_bytes <= 4 * SIZE


def test_inside_of_other_hooks_it_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    moved, x = made(), batch(0).requires_grad_()
    caplog.set_level("INFO", "fsdp_offload")

    def inside(x: Tensor) -> Tensor:
        with moved:
            return x.sin().exp()

    checkpoint(inside, x, use_reentrant=False).sum().backward()
    with moved, moved:  # nor inside of itself
        x.sin().sum().backward()
    now = moved.statistics()
    assert now.inactive == 3  # forward, again in backward, and inside of itself
    assert now.taken == 1
    assert [r.message for r in caplog.records if "does nothing inside" in r.message]
    assert len(caplog.records) == 1


def test_a_group_inside_hands_on_what_has_no_rows() -> None:
    net, moved = moe.model(), made()
    expected = moe.gradients(net.use(None), moe.batch(0))
    stash = PagedStash(CPU, page_bytes="256B", tail="nan")
    assert moe.same(moe.gradients(net.use(stash), moe.batch(0), moved), expected)
    stashed, now = stash.statistics(), moved.statistics()
    assert stashed.inactive_groups == 0
    assert now.kept_bytes["a parameter"] == stashed.kept_bytes["a parameter"]
    assert now.taken >= 3  # x of each layer
    assert is_idle(moved)


def test_what_the_caller_holds_is_moved_like_the_rest() -> None:
    moved, held = made(), []
    weight = torch.randn(DIM, DIM, requires_grad=True)
    x = batch(0)  # the caller's

    def iterate() -> None:
        with moved:
            y = x @ weight
            held[:] = [y]
            z = (y.exp() * y.sin()).exp().sum()
        z.backward()

    with moved, torch.no_grad():  # an evaluation is no iteration
        x @ weight
    for n in range(1, 4):
        iterate()
        assert moved.statistics().sent_bytes == n * 5 * SIZE
    assert moved.statistics().iterations == 3


def test_a_share_is_spread() -> None:
    moved, x = made(share=0.5), batch(0).requires_grad_()
    for _ in range(3):
        with moved:
            y = x
            for _ in range(24):
                y = y.exp().sin()
        places = [
            batch.start is not None or batch.residence is Residence.FETCHING
            for batch in alive(moved)
        ]
        assert places == [False, True] * 4
        y.sum().backward()
    assert moved._copies.counts["full_batches"] == 0


def test_what_is_on_its_way_is_not_brought_back() -> None:
    with StreamSimulator("lazy", inline_current=True):
        moved, x = made(), batch(0).requires_grad_()
        with moved:
            y = x.exp().exp().sum()
        y.backward()
        assert moved.statistics().returned_bytes == 0
        moved.close()


def chain(moved: ActivationOffload) -> Any:
    """Five batches of three ranges."""
    y = batch(0).requires_grad_()
    with moved:
        for _ in range(15):
            y = y.exp().mul(0.1)
    return y


def needs_last(y: Any) -> None:
    y.grad_fn.next_functions[0][0]._saved_result  # noqa: B018


@pytest.mark.parametrize(("share", "count"), [(1.0, 1 + AHEAD), (0.5, AHEAD)])
def test_two_batches_come_back_ahead(share: float, count: int) -> None:
    """Those in between that stay do not count."""
    moved = made(share=share)
    needs_last(chain(moved))
    assert moved._copies.counts["batches"] == 5
    assert moved.statistics().returned_bytes == count * 3 * SIZE


def test_what_is_needed_soon_is_not_let_go() -> None:
    with StreamSimulator("lazy", inline_current=True) as simulator:
        moved = made()
        needs_last(y := chain(moved))
        simulator.synchronize()
        moved.statistics()
        y.sum().backward()
        assert moved.statistics().returned_bytes == 2 * 3 * SIZE
        moved.close()


def test_without_memory_nothing_comes_back_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [4]

    def allocate(self: CpuBackend, n_bytes: int) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError
        return torch.empty(n_bytes, dtype=torch.uint8)

    monkeypatch.setattr(CpuBackend, "allocate", allocate)
    net, moved = model(), made()
    with moved:
        loss = net(batch(0)).sum()
    loss.grad_fn.next_functions[0][0].next_functions[1][0]._saved_mat1  # noqa: B018
    assert left[0] < 0  # that was for the next one
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward(retain_graph=True)
    left[0] = 10**6
    loss.backward()
    del loss
    assert is_idle(moved)


@pytest.mark.parametrize("policy", ["lazy", "immediate"])
def test_written_in_place_before_its_copy_has_ended(policy: str) -> None:
    with StreamSimulator(policy, inline_current=True):
        moved, x = made(), batch(0).requires_grad_()
        with moved:
            y = x.exp()
            z = y.sin()
            y.add_(1)
        with pytest.raises(ActivationError, match="in-place operation"):
            z.sum().backward()


def test_written_in_place_afterwards_is_harmless() -> None:
    moved, x = made(), batch(0).requires_grad_()
    with moved:
        y = x.exp()
        z = y.sin().sum()
    with torch.no_grad():
        y.zero_()
    z.backward()
    assert torch.equal(x.grad, x.exp().cos() * x.exp())


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_memory_that_its_owner_frees_and_fills_again(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FSDP2 does with a gathered parameter: before its copy, or while the copy runs, which is
    noticed at the end of the forward, or after the copy."""
    moved, x, weight = made(), batch(0).requires_grad_(), batch(1)
    start, is_copied = Link.store, [False]

    def store(link: Link, batch: Batch, **how: Any) -> Any:
        start(link, batch, **how)
        batch.host[0].fill_(255)  # what a copy makes of memory that others have by now
        batch.stored = Mock(query=lambda: is_copied[0])
        return batch.stored

    if when != "before":
        monkeypatch.setattr(offload, "BATCH_BYTES", SIZE)
        monkeypatch.setattr(Link, "store", store)
    with moved:
        y = x * weight
        weight.untyped_storage().resize_(0)
        is_copied[0] = when != "during"
        moved.statistics()  # frees what is copied
    weight.untyped_storage().resize_(SIZE)
    weight.data.copy_(batch(1))  # another version counter, as with FSDP2
    is_copied[0] = True
    moved.statistics()
    y.sum().backward()
    assert torch.equal(x.grad, batch(1))


def test_closed_inside_it_moves_nothing_more() -> None:
    moved, x = made(), batch(0).requires_grad_()
    with moved:
        moved.close()
        y = x.exp().sum()
    y.backward()
    assert torch.equal(x.grad, x.exp())


def test_saved_again_after_a_write_is_another_range() -> None:
    moved, x = made(), batch(0)
    weight = torch.ones(SEQ, DIM, requires_grad=True)
    with moved:
        first = (weight * x).sum()
        moved._copies.send()
        x.add_(1)
        second = (weight * x).sum()
    assert moved.statistics().ranges == 2
    (first + second).backward()
    assert torch.equal(weight.grad, batch(0) + (batch(0) + 1))


def test_repr_says_what_is_where() -> None:
    x = torch.ones(1 << 18, requires_grad=True)
    with StreamSimulator("lazy", inline_current=True) as simulator:
        moved = made()
        with moved:
            y = x.exp()
        sizes = (
            "1.00 MiB of 4.00 MiB of host memory in use, 1.00 MiB of device memory held by copies"
        )
        assert repr(moved) == f"ActivationOffload(cpu, {sizes}; 1.00 MiB moved so far)"
        simulator.synchronize()
        moved.statistics()
        assert ", 0 bytes of device memory held by copies" in repr(moved)
        y.sum().backward()
        moved.close()
    assert repr(moved) == "ActivationOffload(cpu, closed)"


def test_bad_arguments() -> None:
    for how in ({"host_memory": 0}, {"host_memory": "much"}, {"share": 1.5}, {"share": True},
                {"share": "auto"}, {"inflight_bytes": -1}):  # fmt: skip
        with pytest.raises(ConfigError):
            made(**how)
    with pytest.raises(
        HostMemoryError, match=r"ActivationOffload: .*\(2097152 bytes\).*\(1048576 bytes\)"
    ):
        made("2MiB", transfer=TransferConfig(host_memory="1MiB"))
    with pytest.raises(ConfigError, match="copy"):
        copy.deepcopy(made())


def test_where_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = made()
    with moved:
        y = batch(0).requires_grad_().exp().sum()
    with ThreadPoolExecutor() as other, pytest.raises(ActivationError, match="thread"):
        other.submit(moved.__enter__).result()
    with monkeypatch.context() as patch:
        patch.setattr(CpuBackend, "is_capturing", lambda self: True)
        with pytest.raises(DeviceError, match="capture"), moved:
            pass
        with pytest.raises(DeviceError, match="capture"):
            y.backward(retain_graph=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(ClosedError, match="parent"), moved:
            pass
    moved.close()
    moved.close()
    with pytest.raises(ClosedError, match="memory was freed"):
        y.backward()
    with pytest.raises(ClosedError), moved:
        pass


def test_a_capture_inside_keeps_what_it_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = made()
    with moved:
        monkeypatch.setattr(CpuBackend, "is_capturing", lambda self: True)
        y = batch(0).requires_grad_().exp()
        monkeypatch.setattr(CpuBackend, "is_capturing", lambda self: False)
    assert moved.statistics().kept_bytes == {"a CUDA graph capture": SIZE}
    y.sum().backward()
