"""The rows of ``fsdp-offload bench`` for models of other shapes.

    python docs/benchmarks/shapes.py unequal --layers 38 --dim 4096 --tokens 16384 --checkpointed

``unequal``: blocks have MLPs of half the width and of one and a half in turns.
``experts``: 16 experts of a sixteenth of the width in place of each MLP. Each expert takes an
eighth of the tokens, those that its router scores highest, so all shapes are known. The block's
GELU follows the experts.
``lora``: all weights are frozen; each linear layer of a block has an adapter of rank 16.
All other arguments are those of ``fsdp-offload bench``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_offload.bench.iteration import run_rows
from fsdp_offload.bench.machine import Row
from fsdp_offload.bench.model import GPT, Job
from fsdp_offload.cli.main import parser

EXPERTS: Final = 16
EXPERTS_PER_TOKEN: Final = 2
RANK: Final = 16


class Experts(nn.Module):
    """Experts that choose their tokens, in place of an MLP of width ``4 * dim``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.empty(EXPERTS, dim, 4 * dim // EXPERTS))
        self.down = nn.Parameter(torch.empty(EXPERTS, 4 * dim // EXPERTS, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, seq, dim)`` to the same shape."""
        flat = x.flatten(0, 1)
        each = flat.shape[0] * EXPERTS_PER_TOKEN // EXPERTS
        weights, chosen = self.router(flat).T.softmax(0).topk(each, dim=1)
        rows = torch.bmm(F.gelu(torch.bmm(flat[chosen], self.up)), self.down)
        rows = (rows * weights[..., None]).flatten(0, 1)
        return torch.zeros_like(flat).index_add(0, chosen.flatten(), rows).view_as(x)


class Adapted(nn.Module):
    """A frozen linear layer and its adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.narrow = nn.Linear(base.in_features, RANK, bias=False)
        self.wide = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the adapter's output to the layer's."""
        out: Tensor = self.base(x) + self.wide(self.narrow(x))
        return out


def unequal(model: GPT, dim: int) -> None:
    for index, block in enumerate(model.blocks):
        width = 2 * dim if index % 2 else 6 * dim
        block.up = nn.Linear(dim, width, bias=False)
        block.down = nn.Linear(width, dim, bias=False)


def experts(model: GPT, dim: int) -> None:
    for block in model.blocks:
        block.up, block.down = Experts(dim), nn.Identity()


def lora(model: GPT, dim: int) -> None:
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, Adapted(getattr(block, name)))


SHAPES: Final[dict[str, Callable[[GPT, int], None]]] = {
    "unequal": unequal,
    "experts": experts,
    "lora": lora,
}


@dataclass(frozen=True)
class ShapedJob(Job):
    """The job with a model of another shape."""

    shape: str = "unequal"

    @property
    def params(self) -> int:
        """Parameters of the whole model."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.model().parameters())

    def model(self) -> GPT:
        """Build the model, and change its blocks."""
        model = super().model()
        SHAPES[self.shape](model, self.dim)
        return model


def main(words: Sequence[str]) -> Row:
    """Run the rows of the shape that the first word names."""
    if not words or words[0] not in SHAPES:
        sys.exit(f"usage: shapes.py {{{','.join(SHAPES)}}} [options of fsdp-offload bench]")
    options = parser().parse_args(["bench", *words[1:]])
    options.shape = words[0]
    return run_rows(options, ShapedJob)


if __name__ == "__main__":
    main(sys.argv[1:])
