"""Events in which a PhaseOffloader takes everything, or the optimizer alone, away and back."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
import torch.distributed as dist

from fsdp_offload.core.storage import can_swap

from .bits import Mismatch
from .events_state import state_dropped
from .kinds import EVENTS, event
from .net import local
from .pair import Pair


def _while_away(pair: Pair, rng: random.Random) -> None:
    what = rng.choice(("nothing", "nothing", "state_dict", "load", "step", "zero_grad"))
    if what == "load" and pair.case.keeps_state_itself:
        what = "nothing"
    pair.say(what)
    if what == "state_dict":
        pair.wrapped.state_dict()
        pair.model.state_dict()
        pair.twin.state_dict()
    elif what == "load":
        loaded = copy.deepcopy(pair.wrapped.state_dict())
        pair.refused("use while away", lambda: pair.wrapped.load_state_dict(loaded))
    elif what == "step":
        pair.refused("use while away", pair.wrapped.step)
    elif what == "zero_grad":
        pair.zero_grad("wrapper")


@event(1)
def phase(pair: Pair, rng: random.Random) -> None:
    """A PhaseOffloader takes everything away and back."""
    if pair.is_spent:
        pair.zero_grad("wrapper")
    grads = rng.choice(("save", "keep", "drop"))
    options: dict[str, Any] = {"grads": grads}
    if rng.random() < 0.3:
        options["keep_addresses"] = can_swap()
        pair.end_phases()  # two cannot keep addresses of the same tensors
    pair.say(options)
    with pair.away(**options):
        if grads == "drop":
            for carrier in pair.carriers:
                carrier.grad = None
            pair.unused.clear()
        _while_away(pair, rng)
    if "keep_addresses" in options or rng.random() < 0.5:
        pair.end_phases()


@event(0.5, needs=EVENTS["state_dropped"].needs)
def phase_after_state_was_dropped(pair: Pair, rng: random.Random) -> None:
    """It is made anew from weights that are about to leave."""
    state_dropped(pair, rng)
    phase(pair, rng)


@event(1)
def phase_by_default(pair: Pair, rng: random.Random) -> None:
    """Nothing is said of gradients: those that no step has used are not lost without a word."""
    if pair.is_spent:
        pair.zero_grad("wrapper")
    # Nothing of an empty shard is lost.
    would_be_lost = {i for i in pair.unused if i in pair.order and local(pair.mine[i]).numel()}

    def leave() -> None:
        with pair.away():
            pass

    left = pair.attempt("leaving with gradients that no step has consumed", leave)
    everywhere = left if pair.mesh is None else _on_all_ranks(left)
    if left and would_be_lost:
        raise Mismatch(f"gradients of {sorted(would_be_lost)} are gone, and no step has used them")
    if not everywhere:  # each rank decides by its own shards
        if pair.mesh is not None:
            pair.zero_grad("wrapper")
        return
    for mine, carrier in zip(pair.mine, pair.carriers, strict=True):
        if mine.grad is None:
            carrier.grad = None


def _on_all_ranks(answer: bool) -> bool:
    count = torch.tensor(int(answer))
    dist.all_reduce(count)
    return int(count) == dist.get_world_size()


@event(1)
def phase_of_the_optimizer(pair: Pair, rng: random.Random) -> None:
    """Its memory alone goes."""
    with pair.away(params="keep", grads="keep"):
        _while_away(pair, rng)
