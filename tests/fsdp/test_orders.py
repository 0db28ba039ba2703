"""Orders of calls that plain FSDP2 permits: in each overlap mode, the bits of plain FSDP2."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from fsdp_offload import PhaseOffloader, SpentGradientError
from fsdp_offload.core import dtensor
from fsdp_offload.optimizer import overlap
from tests.fsdp import models
from tests.fsdp.models import Ranks, check
from tests.helpers.compare import bits
from tests.helpers.covering import covering
from tests.helpers.simulator import StreamSimulator

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
    optimizer.zero_grad(set_to_none=step == 3)
    norms = [p.grad.norm().item() for p in model.parameters() if p.grad is not None]
    check(bool(norms) == (step != 3) and not any(norms), f"gradients of zeros: {norms}")


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
        *(zeros, eval_after_step, eval_first, gathered_after_backward, forward_raises),
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


@pytest.mark.parametrize(("order", "size"), covering(itertools.product(ORDERS, (1, 2))))
def test_the_bits_are_those_of_plain_fsdp2(ranks: Ranks, order: str, size: int) -> None:
    ranks(size).run(compare, order)


# --------------------------------------------------------------------------- between two calls


def twins(mode: str, **options: Any) -> tuple[Any, Any, Any, Any]:
    """A plain job, and one that is wrapped."""
    mesh = models.flat_mesh(torch.distributed.get_world_size())
    plain, mine = models.toy(mesh, **options), models.toy(mesh, **options)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.05)
    inner = torch.optim.AdamW(mine.parameters(), lr=0.05)
    return plain, reference, mine, models.wrap(inner, mine, overlap=mode)


def check_same_bits(plain: Any, mine: Any, what: str) -> None:
    reshard(plain)
    reshard(mine)
    pairs = zip(plain.parameters(), mine.parameters(), strict=True)
    check(all(torch.equal(bits(a), bits(b)) for a, b in pairs), f"other bits {what}")


def read_early() -> None:
    """What has been updated in backward is read after its update, and one warning says so."""
    with StreamSimulator("lazy", inline_current=True), mock.patch.object(overlap, "warn") as warn:
        _, _, mine, optimizer = twins("backward")
        models.backward(mine, 0)
        optimizer.step()
        optimizer.zero_grad()

        def read() -> list[Tensor]:
            with torch.no_grad():
                found = mine(models.tokens(9))
            reshard(mine)
            return [found]

        before = read()
        models.backward(mine, 1)
        check(not warn.called, "warned before")
        for _ in range(2):
            check(not all(map(torch.equal, read(), before)), "weights of before the updates")
        check(warn.call_count == 1, f"{warn.call_count} warnings")
        optimizer.step()
        optimizer.close()


def test_a_forward_between_backward_and_step(ranks: Ranks) -> None:
    ranks(2).run(read_early)


def change_taken(drops: bool) -> None:
    plain, reference, mine, optimizer = twins("backward")
    for model in (plain, mine):
        models.backward(model, 0)
    reference.step()
    if drops:
        mine.zero_grad()
    else:
        mine.embed.weight.grad = torch.ones_like(mine.embed.weight.detach())
    with pytest.raises(SpentGradientError) as caught:
        optimizer.step()
    check("was replaced or cleared" in str(caught.value), str(caught.value))
    optimizer.step()
    check_same_bits(plain, mine, "after the step that ends the iteration")
    optimizer.close()


@pytest.mark.parametrize("drops", [True, False])
def test_gradients_that_are_changed_after_their_update(ranks: Ranks, drops: bool) -> None:
    ranks(2).run(change_taken, drops)


def offload_after_raise(reshard_after_forward: bool | None) -> None:
    plain, reference, mine, optimizer = twins(
        "forward", reshard_after_forward=reshard_after_forward
    )
    shards = list(mine.parameters())
    for model, its in ((plain, reference), (mine, optimizer)):
        models.backward(model, 0)
        its.step()
        its.zero_grad()
        raise_in_forward(model)
    phases = PhaseOffloader(mine, optimizer)
    raise_in_forward(mine)
    phases.offload()
    held = [p.to_local().untyped_storage().nbytes() for p in shards]
    check(not any(held), f"bytes of shards that stay: {held}")
    check(all(map(operator.is_, mine.parameters(), shards)), "gathered parameters stay")
    phases.reload()
    reshard(plain)
    for step in (1, 2):
        for model, its in ((plain, reference), (mine, optimizer)):
            models.backward(model, step)
            its.step()
            its.zero_grad()
    check_same_bits(plain, mine, "after the phase")
    phases.close()
    optimizer.close()


@pytest.mark.parametrize("reshard_after_forward", [None, False])
def test_a_phase_after_a_forward_that_raised(
    ranks: Ranks, reshard_after_forward: bool | None
) -> None:
    ranks(2).run(offload_after_raise, reshard_after_forward)


# --------------------------------------------------------------------------- captures


def replay(policy: str, mode: str, first: int) -> None:
    """A capture at step ``first``, then replays: the captured kernels read the shards' memory, and
    come to no gate. With one rank a shard is the whole parameter."""
    with (
        StreamSimulator(policy, inline_current=True) as simulator,
        mock.patch.object(overlap, "warn") as warn,
    ):
        plain, reference, mine, optimizer = twins(mode)
        gated, graph = list(mine.parameters()), models.Toy()
        for parameter, captured in zip(gated, graph.parameters(), strict=True):
            captured.data = dtensor.local(parameter)
        for step in range(first + 3):
            models.backward(plain, step)
            reference.step()
            reference.zero_grad()
            if step <= first:
                with mock.patch.object(simulator, "is_capturing", return_value=step == first):
                    models.backward(mine, step)
            else:
                graph.zero_grad()
                models.backward(graph, step)
                for parameter, captured in zip(gated, graph.parameters(), strict=True):
                    if captured.grad is not None:
                        parameter.grad = dtensor.like(parameter, captured.grad)
            optimizer.step()
            optimizer.zero_grad()
        check(optimizer.statistics().overlap == "step", "statistics()")
        check(warn.call_count == 1, f"{warn.call_count} lines")
        optimizer.synchronize()
        check_same_bits(plain, mine, f"after a capture at step {first}, {mode}, {policy}")
        optimizer.close()


@pytest.mark.parametrize(
    ("policy", "mode", "first"),
    covering(itertools.product(("lazy", "eager"), ("forward", "backward"), (0, 2))),
)
def test_a_capture_turns_the_optimizer_to_step(
    ranks: Ranks, policy: str, mode: str, first: int
) -> None:
    ranks(1).run(replay, policy, mode, first)
