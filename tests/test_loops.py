"""Loops as users write them, without a trainer: losses, and losses after a resume, are those of the
same loop without offload, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from fsdp_offload import HybridDeviceOptimizer, checkpoint
from tests.fsdp import models
from tests.fsdp.models import check
from tests.helpers.ranks import RankPool

Ranks = Callable[..., RankPool]
WIDTH, STEPS, HALF = 24, 6, 3


class Averages(nn.Module):
    """An average of each parameter, as docs/how-to.md has it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for index, p in enumerate(model.parameters()):
            self.register_buffer(f"average_{index}", p.detach().float().clone())

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for kept, p in zip(self.buffers(), model.parameters(), strict=True):
            kept.lerp_(p.float(), 0.1)


class Block(nn.Module):  # not of torch: its own containers are not compiled
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    if kind == "one process":
        return model
    mesh = models.flat_mesh(2)
    for block in model.blocks:
        if kind == "compiled":
            block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if kind == "compiled as a whole":
        return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]
    return model


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, WIDTH, generator=generator)


def train(kind: str, offloads: bool, steps: range, save: str = "", load: str = "") -> list[float]:
    """The loss and the norm of each step; of averages at the end, too."""
    if kind.startswith("compiled"):
        torch.compiler.reset()
        counters.clear()
    model = build(kind)
    kept = [model, *([Averages(model)] if kind == "averages" else [])]
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    if offloads:
        optimizer = HybridDeviceOptimizer(optimizer, model, transfer=models.TRANSFER)
        mode = "step" if kind == "one process" else "forward"
        check(optimizer.statistics().overlap == mode, f"not {mode}")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    if load:
        scheduler.load_state_dict(checkpoint.load(load, kept, optimizer)["scheduler"])
    seen = []
    for step in steps:
        loss = (model(batch(step)) - batch(step)).square().mean()
        loss.backward()
        norm: Any = clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        for averages in kept[1:]:
            averages.update(model)
        seen += [loss.item(), float(norm)]
    if kind.startswith("compiled"):
        check(counters["stats"]["unique_graphs"] > 0, "nothing was compiled")
    if save:
        checkpoint.save(save, kept, optimizer, extra={"scheduler": scheduler.state_dict()})
    for averages in kept[1:]:
        seen += [float(each.full_tensor().sum()) for each in averages.buffers()]
    if offloads:
        optimizer.close()
    return seen


def compare(kind: str, folder: str) -> None:
    """Without offload and with it, in one go and resumed, also from one to the other."""
    expected = train(kind, False, range(STEPS))
    check(train(kind, True, range(STEPS)) == expected, "losses differ")
    both = (True,) if kind == "compiled" else (False, True)  # names in files are the same
    for first in both:
        path = f"{folder}/{first}"
        train(kind, first, range(HALF), save=path)
        for second in both:
            found = train(kind, second, range(HALF, STEPS), load=path)
            check(found == expected[2 * HALF :], f"from {first} to {second}: losses differ")


def test_a_script_of_one_process_without_fsdp2(tmp_path: Path) -> None:
    compare("one process", str(tmp_path))


@pytest.mark.parametrize(
    "kind",
    [
        "fsdp2",
        "averages",
        *(pytest.param(s, marks=pytest.mark.long) for s in ("compiled", "compiled as a whole")),
    ],
)
def test_a_script_with_fsdp2(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    ranks(2).run(compare, kind, str(tmp_path))
