"""Trainers of other packages on CPU ranks: what makes them take the path that they take on GPUs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH = 32, 16


class Block(nn.Module):
    """Its class's name is what Accelerate and Lightning are told to shard by."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """The same weights at every call, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int) -> Tensor:
    """Data of this rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(VOCABULARY, (2, 8), generator=generator)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(1, 1).flatten())


@contextlib.contextmanager
def forgetting() -> Iterator[None]:
    """Accelerate's state is of the process; ranks are used again."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def forget() -> None:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()

    forget()
    try:
        yield
    finally:
        forget()


@contextlib.contextmanager
def accelerate_with_fsdp2() -> Iterator[None]:
    """Inside, Accelerate takes gloo for a backend of GPUs: on the CPU it would use DDP."""
    from accelerate.state import DistributedType, PartialState

    def backend(*_: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    def barrier(_: PartialState) -> None:
        dist.barrier()  # gloo takes no device_ids

    environment = {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_USE_FSDP": "true"}
    with (
        mock.patch.dict(os.environ, {**environment, "FSDP_VERSION": "2"}),
        mock.patch.object(PartialState, "_prepare_backend", backend),
        mock.patch.object(PartialState, "wait_for_everyone", barrier),
        forgetting(),
    ):
        yield
