"""A small model, its wrapped and its plain optimizer, for tests in one process."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_offload import HybridDeviceOptimizer, OffloadError, TransferConfig
from tests.helpers.lanes import in_lanes

LANES: Final = ("resident", "streamed", "host")
SMALL: Final = TransferConfig(bucket_bytes="4KiB", host_threads=2)
each_lane = pytest.mark.parametrize("lane", LANES)


class Model(nn.Module):
    """Parameters alone; the first one spans several buckets of 4 KiB."""

    def __init__(
        self,
        seed: int = 0,
        shapes: tuple[Any, ...] = ((40, 60), (130,)),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes
        )


def fill_gradients(model: nn.Module, step: int) -> None:
    """The same ones for every model of these shapes; None for what is frozen."""
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = gradient if parameter.requires_grad else None


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """One update for each of the steps."""
    for step in steps:
        fill_gradients(model, step)
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [p.detach().clone() for p in model.parameters()]


def wrap(inner: Optimizer, lane: str, **settings: Any) -> HybridDeviceOptimizer:
    """All trainable parameters in one lane, in small buckets."""
    lanes = [lane for group in inner.param_groups for p in group["params"] if p.requires_grad]
    return in_lanes(inner, **{"update_on": lanes, "transfer": SMALL, **settings})


def pair(
    lane: str, cls: Any = torch.optim.SGD, **settings: Any
) -> tuple[Model, HybridDeviceOptimizer, Model, Optimizer]:
    """A wrapped optimizer and the plain one with the kernel that the lane would choose."""
    settings = {"lr": 0.1, **settings}
    if cls is torch.optim.SGD:
        settings = {"momentum": 0.9, "fused": lane == "host" or None, **settings}
    model, twin_model = Model(), Model()
    optimizer = wrap(cls(model.parameters(), **settings), lane)
    return model, optimizer, twin_model, cls(twin_model.parameters(), **settings)


def assert_explains(error: OffloadError, *words: str) -> None:
    """The message has a value, a reason and a remedy, and these words."""
    assert error.reason
    assert error.remedy
    for part in (error.what, error.reason, error.remedy, *words):
        assert part in str(error)
