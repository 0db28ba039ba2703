"""On CUDA: updates of buckets against the plain optimizer, and clipped inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from tests.helpers.compare import assert_same

SHAPES = [(300, 70), (7,), (0,), (129, 65), (1000,), (64, 64), (3, 5, 7)]
SMALL = TransferConfig(bucket_bytes="64KiB")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Run:
    """A wrapped optimizer whose steps are recorded as parameters and state."""

    def __init__(
        self, dtype: torch.dtype, lanes: float, shapes: Sequence[Any] = SHAPES, **options: Any
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator) for shape in shapes]
        self.parameters = [nn.Parameter(value.to("cuda", dtype)) for value in values]
        inner = torch.optim.AdamW(self.parameters, fused=True, **{"lr": 0.01, **options})
        self.optimizer = HybridDeviceOptimizer(inner, offload_fraction=lanes, transfer=SMALL)

    def fill(self, step: int) -> None:
        generator = torch.Generator().manual_seed(50 + step)
        for index, parameter in enumerate(self.parameters):
            value = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.grad = None if step and (step + index) % 4 == 3 else value

    def outcome(self) -> list[torch.Tensor]:
        state = self.optimizer.state
        found = [p.detach().cpu() for p in self.parameters]
        return found + [v.cpu() for p in self.parameters for v in state[p].values()]


@pytest.mark.parametrize("lanes", [0.0, 1.0])
@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.0}, {"amsgrad": True, "maximize": True}, {"lr": "tensor"}],
    ids=str,
)
def test_fp32_weights_are_those_of_the_plain_optimizer(
    options: dict[str, Any], lanes: float
) -> None:
    """By lists that are made once, or by the class."""
    if options.get("lr") == "tensor":
        options = {"lr": torch.tensor(0.01, device="cuda")}
    for shapes in (SHAPES, [(16, 16)] * 30 + [(256, 300), (48,)]):
        run = Run(torch.float32, lanes, shapes, **options)
        others = [nn.Parameter(p.detach().clone()) for p in run.parameters]
        plain = torch.optim.AdamW(others, fused=True, **{"lr": 0.01, **options})
        for step in range(5):
            run.fill(step)
            for p, other in zip(run.parameters, others, strict=True):
                other.grad = None if p.grad is None else p.grad.clone()
            run.optimizer.step()
            plain.step()
        kept = [v.cpu() for p in others for v in plain.state[p].values()]
        assert_same(run.outcome(), [p.detach().cpu() for p in others] + kept)


@pytest.mark.parametrize("lanes", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clipping_rounds_as_torch_clips(dtype: torch.dtype, lanes: float) -> None:
    plain, clipped = Run(dtype, lanes), Run(dtype, lanes)
    for step in range(4):
        for run in (plain, clipped):
            run.fill(step)
        torch.nn.utils.clip_grad_norm_(plain.parameters, 1.5)
        clipped.optimizer.clip_grad_norm_(1.5)
        for run in (plain, clipped):
            run.optimizer.step()
    assert_same(plain.outcome(), clipped.outcome())
