"""A small expert layer whose buffers have the worst case's rows, and a model of a few."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_offload import PagedStash

CPU = torch.device("cpu")
DIM, WIDTH, TOKENS, CAPACITY = 16, 24, 12, 40


def poisoned(x: Tensor, count: Tensor, value: float = float("nan")) -> Tensor:
    """With ``value`` beyond the count."""
    tail = torch.arange(x.shape[0], device=x.device) >= count
    return x.masked_fill(tail[:, None], value)


class Matmul(torch.autograd.Function):
    """A product that, as a grouped one, reads no row beyond the count."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, count)
        return poisoned(poisoned(x, count, 0.0) @ weight, count)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, count = ctx.saved_tensors
        gradient, x = poisoned(gradient, count, 0.0), poisoned(x, count, 0.0)
        return poisoned(gradient @ weight.T, count), x.T @ gradient, None


class MoE(nn.Module):
    """Tokens whose first feature is positive have two rows, others one: rows vary."""

    def __init__(self, dim: int = DIM, width: int = WIDTH, capacity: int = CAPACITY) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(dim, 2 * width) / dim**0.5)
        self.down = nn.Parameter(torch.randn(width, dim) / width**0.5)
        self.capacity = capacity
        self.stash: PagedStash | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.stash is None:
            return self.inside(x, lambda rows, count: None)
        with self.stash.group() as group:
            return self.inside(x, group.rows)

    def inside(self, x: Tensor, say: Callable[[Tensor, Tensor], None]) -> Tensor:
        routed, place, count = dispatch(F.rms_norm(x, x.shape[1:]), self.capacity)
        say(routed, count)
        gate, up = self.product(routed, self.gate_up, count).chunk(2, dim=-1)
        out = self.product(F.silu(gate) * up, self.down, count)
        moved = combine(out, place, x.shape[0])
        return x + F.pad(moved[:, 1:], (1, 0))  # each layer has the same rows

    @staticmethod
    def product(x: Tensor, weight: Tensor, count: Tensor) -> Tensor:
        return Matmul.apply(x, weight, count)  # type: ignore[no-any-return]


def dispatch(x: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in a buffer, the token that each is of (the last: none), and how many there are."""
    tokens = x.shape[0]
    twice = x.detach()[:, 0] > 0
    slots = torch.cat([torch.ones_like(twice), twice])
    count = slots.sum()
    where = torch.where(slots, slots.cumsum(0) - 1, capacity)  # those that do not exist: behind
    place = x.new_full((capacity + 1,), tokens, dtype=torch.int64)
    place = place.index_put(
        (where.clamp(max=capacity),), torch.arange(2 * tokens, device=x.device) % tokens
    )
    place = torch.where(torch.arange(capacity, device=x.device) < count, place[:capacity], tokens)
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
    return padded[place], place, count


def combine(out: Tensor, place: Tensor, tokens: int) -> Tensor:
    """Sums of each token's rows."""
    sums = out.new_zeros(tokens + 1, out.shape[1])
    return sums.index_add(0, place, out)[:tokens]


class Model(nn.Module):
    """Layers of them."""

    def __init__(self, layers: int = 3, **sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MoE(**sizes) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def use(self, stash: PagedStash | None) -> Model:
        """In all layers."""
        for layer in self.layers:
            assert isinstance(layer, MoE)
            layer.stash = stash
        return self


def model(layers: int = 3, **sizes: int) -> Model:
    """Always the same."""
    torch.manual_seed(1)
    return Model(layers, **sizes)


def batch(seed: int, tokens: int = TOKENS, dim: int = DIM) -> Tensor:
    """Tokens that take other numbers of rows with each seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, dim, generator=generator)


def gradients(module: nn.Module, x: Tensor, around: Any = None) -> list[Tensor]:
    """Loss and gradients of one iteration, with a context around its forward."""
    module.zero_grad()
    with around or nullcontext():
        loss = module(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Bit for bit, without a NaN."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def several(module: nn.Module, batches: list[Tensor], order: str, around: Any = nullcontext) -> Any:
    """Gradients of several iterations; the second place of a batch in ``order`` is its backward."""
    module.zero_grad()
    losses: dict[str, Tensor] = {}
    for name in order:
        if name in losses:
            losses.pop(name).backward()
            continue
        torch.manual_seed(int(name))
        with around():
            losses[name] = module(batches[int(name)]).square().mean()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def second_derivative(around: Any) -> list[Tensor]:
    """Of five rows, and first derivatives before and after it."""
    x, count = batch(0).requires_grad_(), torch.tensor(5)
    buffer = poisoned(torch.cat([x, x]), count)
    with around(buffer, count):
        y = (buffer * buffer.sin() * buffer)[:5].sum()
    (first,) = torch.autograd.grad(y, buffer, create_graph=True)
    (second,) = torch.autograd.grad(first[:5].sum(), buffer, retain_graph=True)
    (again,) = torch.autograd.grad(y, buffer)
    return [first[:5].detach(), second[:5], again[:5]]


def compiled(around: Any) -> list[Tensor]:
    """Gradient of seven rows through a compiled function."""
    torch._dynamo.reset()
    function = torch.compile(lambda x, w: (x @ w).sin() * x, backend="aot_eager")
    x, weight = batch(1, CAPACITY).requires_grad_(), nn.Parameter(batch(2, DIM))
    with around(x, torch.tensor(7)):
        y = function(x, weight)
    (gradient,) = torch.autograd.grad(y[:7].sum(), x)
    return [gradient[:7]]
