"""Orders of calls that plain FSDP2 permits: in each overlap mode, the bits of plain FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from tests.fsdp import models
from tests.fsdp.models import Ranks, check
from tests.helpers.compare import bits

STEPS = 5
Order = Callable[[Any, Optimizer, int], None]


def evaluate(model: nn.Module) -> None:
    """FSDP2 leaves the root gathered."""
    with torch.no_grad():
        model(models.tokens(99))


def raise_in_forward(model: nn.Module) -> None:
    def fail(*_: object) -> None:
        raise ValueError("in forward")

    with model.head.register_forward_pre_hook(fail), pytest.raises(ValueError, match="in forward"):
        model(models.tokens(99))


def reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def zeros(model: Any, optimizer: Optimizer, step: int) -> None:
    """``backward`` leaves block 1 out of steps 1 and 5: its moments decay."""
    models.backward(model, step)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    norms = [p.grad.norm().item() for p in model.parameters() if p.grad is not None]
    check(norms and not any(norms), f"gradients of zeros: {norms}")


def both_zeros(model: Any, optimizer: Optimizer, step: int) -> None:
    models.backward(model, step)
    optimizer.step()
    optimizer.zero_grad(set_to_none=step % 2 == 1)


def eval_after_step(model: Any, optimizer: Optimizer, step: int) -> None:
    models.backward(model, step)
    optimizer.step()
    model.eval()
    evaluate(model)
    model.train()
    optimizer.zero_grad()


def eval_first(model: Any, optimizer: Optimizer, step: int) -> None:
    evaluate(model)
    models.backward(model, step)
    optimizer.step()
    optimizer.zero_grad()


def gathered_after_backward(model: Any, optimizer: Optimizer, step: int) -> None:
    """Weights of the step before are used by every other forward, as FSDP2 has it."""
    model.set_reshard_after_backward(step % 2 == 1)
    models.backward(model, step)
    optimizer.step()
    optimizer.zero_grad()


def forward_raises(model: Any, optimizer: Optimizer, step: int) -> None:
    models.backward(model, step)
    optimizer.step()
    optimizer.zero_grad()
    if step == 1:
        raise_in_forward(model)
        reshard(model)


def by_hand(model: Any, optimizer: Optimizer, step: int) -> None:
    """The parameter was frozen at wrapping; torch updates what has a gradient."""
    models.backward(model, step)
    frozen = model.frozen
    if step in (1, 2, 4):
        frozen.grad = torch.full_like(frozen.detach(), 1.0 + step)
    optimizer.step()
    optimizer.zero_grad()


ORDERS: dict[str, Order] = {
    order.__name__: order
    for order in (
        *(zeros, both_zeros, eval_after_step, eval_first, gathered_after_backward, forward_raises),
        by_hand,
    )
}


def trained(order: str, mode: str | None) -> list[Tensor]:
    model: Any = models.toy(models.flat_mesh(torch.distributed.get_world_size()))
    optimizer: Optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if mode is not None:
        optimizer = models.wrap(optimizer, model, overlap=mode)
    for step in range(STEPS):
        ORDERS[order](model, optimizer, step)
    reshard(model)
    return [bits(p).clone() for p in model.parameters()]


def compare(order: str) -> None:
    expected = trained(order, None)
    for mode in ("step", "forward", "backward"):
        same = map(torch.equal, trained(order, mode), expected)
        check(all(same), f"other bits of {order} with {mode}")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_the_bits_are_those_of_plain_fsdp2(ranks: Ranks, order: str, size: int) -> None:
    ranks(size).run(compare, order)
