"""Activations in host memory on a GPU: bits, memory, an allocator that stays flat, no captures."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_offload import ActivationOffload, DeviceError
from fsdp_offload.activations import offload
from tests.activations import moe, test_offload

CUDA = torch.device("cuda", 0)
DIM, SEQ, BATCH, LAYERS, MIB = 512, 512, 8, 6, 1 << 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(F.rms_norm(x, (DIM,))).unflatten(-1, (3, 8, DIM // 8))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        # Not torch's fused attention, whose backward sums in no fixed order.
        mixed = (query @ key.transpose(-1, -2) / 8).softmax(-1) @ value
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(-2)), 0.1)
        return x + self.down(F.gelu(self.up(F.rms_norm(x, (DIM,)))))


@pytest.fixture(autouse=True)
def _smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BATCH_BYTES", 16 * MIB)


def model(dtype: torch.dtype = torch.bfloat16) -> test_offload.Model:
    torch.manual_seed(0)
    net = test_offload.Model(layers=0)
    net.blocks.extend(Block() for _ in range(LAYERS))
    return net.to(CUDA, dtype)


def batch(seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, SEQ, DIM, generator=generator).to(CUDA, dtype)


def iteration(
    net: nn.Module, x: Tensor, moved: ActivationOffload | None, seed: int
) -> list[Tensor]:
    torch.manual_seed(seed)
    net.zero_grad()
    with moved or nullcontext():
        loss = net(x).float().square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"share": 0.5},
        {"inflight_bytes": 0},
        {"host_memory": "100MiB"},
    ],
    ids=str,
)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_bits(how: dict[str, Any], dtype: torch.dtype, checkpointed: bool) -> None:
    net = model(dtype)
    net.checkpointed = checkpointed
    moved = ActivationOffload(**{"host_memory": "1GiB", "share": 1.0, "device": CUDA} | how)
    for seed in range(6):
        x = batch(seed, dtype)
        expected = iteration(net, x, None, seed)
        assert moe.same(iteration(net, x, moved, seed), expected), seed
    torch.cuda.synchronize()
    now = moved.statistics()
    assert now.live_batches == now.used_host_bytes == 0
    assert now.sent_bytes > 0
    moved.close()


def test_bits_while_memory_is_reused_by_other_work() -> None:
    """Two forwards before their backwards, and allocations of the same sizes in between."""
    net = model()
    found = []
    for moved in (None, ActivationOffload("2GiB", 1.0, device=CUDA, inflight_bytes="64MiB")):
        for _ in range(5):
            net.zero_grad()
            losses = []
            for seed in range(2):
                torch.manual_seed(seed)
                with moved or nullcontext():
                    losses.append(net(batch(seed)).float().square().mean())
                junk = [torch.full_like(batch(0), float("nan")) for _ in range(20)]
                del junk
            for loss in losses:
                loss.backward()
                junk = [torch.full_like(batch(0), float("nan")) for _ in range(20)]
                del junk
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert moe.same(*found)


def after_forward(net: nn.Module, moved: ActivationOffload | None) -> int:
    """Device bytes that a forward leaves."""
    gc.collect()
    torch.cuda.synchronize()
    before, x = torch.cuda.memory_allocated(), batch(0)
    with moved or nullcontext():
        loss = net(x).float().square().mean()
    torch.cuda.synchronize()
    if moved is not None:
        moved.statistics()  # lets go of what has been copied
    found = torch.cuda.memory_allocated() - before
    loss.backward()
    return found


@pytest.mark.alone
def test_memory_falls_by_what_was_moved_and_stays_flat() -> None:
    net = model()
    plain = [after_forward(net, None) for _ in range(2)][1]
    moved = ActivationOffload("1GiB", 1.0, device=CUDA)
    after_forward(net, moved)
    before = moved.statistics().sent_bytes
    less = plain - after_forward(net, moved)
    sent = moved.statistics().sent_bytes - before
    # What the caller holds, too, is sent and stays: the input.
    assert 0.9 * sent <= less <= sent * 1.01
    assert less >= 0.8 * plain
    figures = []
    for seed in range(50):
        iteration(net, batch(0), moved, seed)
        figures.append((torch.cuda.memory_reserved(), moved.statistics().most_host_bytes))
    assert len(set(figures[20:])) == 1
    torch.cuda.synchronize()
    assert moved.statistics().used_host_bytes == 0
    moved.close()


def test_captures_are_refused() -> None:
    moved, graph = ActivationOffload("64MiB", 1.0, device=CUDA), torch.cuda.CUDAGraph()
    weight = torch.ones(1024, 1024, device=CUDA, requires_grad=True)
    with torch.cuda.graph(graph):
        with torch.no_grad():
            y = weight.exp()
        with pytest.raises(DeviceError, match="capture"):
            moved.__enter__()
    graph.replay()
    assert torch.equal(y, weight.exp())
    with moved:  # which works on
        z = weight.exp().sum()
    z.backward()
    assert torch.equal(weight.grad, y)
    moved.close()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_captured_callables_inside_keep_what_they_save() -> None:
    moved = ActivationOffload("64MiB", 1.0, device=CUDA)
    linear = nn.Linear(DIM, DIM).to(CUDA)
    sample = torch.randn(SEQ, DIM, device=CUDA, requires_grad=True)
    expected = torch.autograd.grad(linear(sample).exp().sum(), sample)
    with moved:
        captured = torch.cuda.make_graphed_callables(linear, (sample.detach().requires_grad_(),))
    with moved:
        y = captured(sample).exp().sum()
    assert moe.same(list(torch.autograd.grad(y, sample)), list(expected))
    moved.close()


def test_parameters_stay_and_ranges_go_once() -> None:
    net = model()
    moved = ActivationOffload("1GiB", 1.0, device=CUDA)
    iteration(net, batch(0), moved, 0)
    now = moved.statistics()
    assert now.kept_bytes["a parameter"] >= 4 * LAYERS - 1  # x of the first has no gradient
    per_layer: Callable[[int], int] = lambda widths: widths * BATCH * SEQ * DIM * 2  # noqa: E731
    # x, its norm, qkv (3), the softmax and what it reads (8 each), its product, out and dropout's
    # mask, then the same of the MLP: x, norm, up (4), gelu (4).
    assert now.sent_bytes <= LAYERS * per_layer(36)
    assert now.taken > now.ranges
    moved.close()
