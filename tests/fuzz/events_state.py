"""Events of values: weights and state written by hand, saved, loaded, moved away and back."""

from __future__ import annotations

import copy
import io
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fsdp_offload import checkpoint
from tests.helpers.compare import rounded

from .bits import joined, remainder_of
from .cases import Case
from .events_steps import gradients, may_start, train
from .kinds import event, generator_of
from .net import like, local
from .pair import READS, Pair


def _new_weights(pair: Pair, rng: random.Random) -> dict[int, Tensor]:
    """For some parameters; none of them zero."""
    generator = generator_of(rng)
    chosen = [i for i in range(len(pair.mine)) if rng.random() < 0.6]
    pair.say(f"parameters {chosen}")
    return {
        i: (torch.rand(local(pair.mine[i]).shape, generator=generator) + 0.1).to(p.dtype)
        for i, p in enumerate(pair.mine)
        if i in chosen
    }


@torch.no_grad()
def _write(pair: Pair, values: dict[int, Tensor]) -> None:
    for i, value in values.items():
        for parameter in (pair.mine[i], pair.carriers[i]):
            local(parameter).copy_(value)


@event(1)
def weights_written_and_told(pair: Pair, rng: random.Random) -> None:
    """By hand, and then resync(): all masters are the weights."""
    pair.wrapped.synchronize()
    _write(pair, _new_weights(pair, rng))
    pair.wrapped.resync()
    pair.reseed()


@event(1)
def weights_written(pair: Pair, rng: random.Random) -> None:
    """By hand, and nobody is told."""
    pair.wrapped.synchronize()
    _write_untold(pair, _new_weights(pair, rng))


@torch.no_grad()
def _write_untold(pair: Pair, values: dict[int, Tensor]) -> None:
    for i, value in values.items():
        theirs = pair.theirs[i]
        if theirs.dtype == pair.carriers[i].dtype:
            continue
        if pair.has_remainder(i):
            # Weight and remainder are the master: what the rounding had cut off stays.
            theirs.copy_(joined(value, remainder_of(theirs)))
        else:  # a weight that is written as it was is not seen
            unchanged = rounded(theirs, value.dtype) == value
            theirs.copy_(torch.where(unchanged, theirs, value.to(theirs.dtype)))
    _write(pair, values)


@event(1, needs=lambda case: case.gives_model)
def weights_loaded(pair: Pair, rng: random.Random) -> None:
    """By the module's own method: all masters are the weights."""
    if pair.has_loaded or not pair.reshard():
        return  # masters that were loaded belong to weights that are loaded next
    generator, weights = generator_of(rng), {}
    for name, parameter in pair.model.named_parameters():
        now = local(parameter)
        piece = (torch.rand(now.shape, generator=generator) + 0.1).to(parameter.dtype)
        # A weight that a load leaves as it is may keep a master that rounds to it.
        weights[name] = like(parameter, torch.where(piece == now, piece + 1, piece))
    for model in (pair.model, pair.twin):
        model.load_state_dict(weights)
    pair.reseed()


# --------------------------------------------------------------------------- state by hand


def _with_state(pair: Pair) -> list[int]:
    return [i for i in pair.plain_state() if i in pair.order and i not in pair.unrecorded]


def _is_like(pair: Pair, i: int, value: Any) -> bool:
    theirs = pair.theirs[i]
    return isinstance(value, Tensor) and value.shape == theirs.shape and value.dtype == theirs.dtype


@event(2)
@torch.no_grad()
def state_written(pair: Pair, rng: random.Random) -> None:
    """Tensors in place or replaced, step counts moved on."""
    found = [i for i in _with_state(pair) if pair.plain.state[pair.theirs[i]].get("step", 1) > 0]
    if not found:
        return
    i, replaces, generator = rng.choice(found), rng.random() < 0.4, generator_of(rng)
    face = rng.choice((pair.wrapped, pair.inner))
    pair.say(f"of {i}, {'replaced' if replaces else 'in place'}, wrapped: {face is pair.inner}")
    mine, plain = face.state[pair.mine[i]], pair.plain.state[pair.theirs[i]]
    for name, value in plain.items():
        if name == "step":
            new: Any = value + 3
        elif _is_like(pair, i, value) and value.dim():
            new = (torch.rand(value.shape, generator=generator) + 0.01).to(value.dtype)
        else:
            continue
        if not isinstance(value, Tensor):
            mine[name] = plain[name] = new
            continue
        value.copy_(new)
        if replaces:
            mine[name] = like(pair.mine[i], new.clone()) if value.dim() else new.clone()
        else:
            local(mine[name]).copy_(new)


@event(1)
@torch.no_grad()
def step_to_zero(pair: Pair, rng: random.Random) -> None:
    """A restart of bias correction: the moments stay."""
    for i in _with_state(pair):
        told_by = [pair.plain.state[pair.theirs[i]].get(name) for name in ("prev", "ax")]
        if any(value is not None and not value.any() for value in told_by):
            continue  # then nothing tells that Rprop or ASGD has updated the parameter
        for state in (pair.wrapped.state[pair.mine[i]], pair.plain.state[pair.theirs[i]]):
            if isinstance(state.get("step"), Tensor):
                state["step"].zero_()
            elif "step" in state:
                state["step"] = 0


@event(1)
@torch.no_grad()
def state_written_early(pair: Pair, rng: random.Random) -> None:
    """What Adagrad and others make at construction, set before the first step."""
    generator = generator_of(rng)
    for i in _with_state(pair):
        plain = pair.plain.state[pair.theirs[i]]
        if plain.get("step", 1) > 0:
            continue
        pair.say(f"of {i}")
        for name, value in plain.items():
            if _is_like(pair, i, value) and value.dim():
                value.copy_(torch.rand(value.shape, generator=generator) + 0.01)
                local(pair.wrapped.state[pair.mine[i]][name]).copy_(value)


def _makes_state_late(case: Case) -> bool:
    return case.name not in ("Adagrad", "EagerMomentum")


@event(1, needs=lambda case: _makes_state_late(case) and not case.keeps_state_itself)
def state_dropped(pair: Pair, rng: random.Random) -> None:
    """It starts anew."""
    found = _with_state(pair)
    if not found:
        return
    i, how = rng.choice(found), rng.choice(("clear", "del", "all"))
    pair.say(f"of {i} by {how}")
    wrapped = pair.wrapped.state
    if how == "clear":
        wrapped[pair.mine[i]].clear()
    elif how == "del":
        del wrapped[pair.mine[i]]
    else:
        wrapped.clear()
    for each in range(len(pair.mine)) if how == "all" else [i]:
        if each in pair.order:
            pair.plain.state.pop(pair.theirs[each], None)
            pair.reseed(each)


@event(1, needs=lambda case: _makes_state_late(case) and case.keeps_state_itself)
def own_state_dropped(pair: Pair, rng: random.Random) -> None:
    """The same of a class whose state stays on the device."""
    state_dropped(pair, rng)


@event(0, before_wrapping=True)
def start_with_step_zero(pair: Pair, rng: random.Random) -> None:
    """State that was taken over has its step count reset."""
    if may_start(pair.case):
        train(pair, rng)
        step_to_zero(pair, rng)


# --------------------------------------------------------------------------- saving and loading


@event(1)
def read(pair: Pair, rng: random.Random) -> None:
    """The wrapper and the optimizer that it wraps show the same; reading changes nothing."""
    what, face = rng.choice((*READS, "model")), rng.choice(("wrapper", "wrapped"))
    pair.say(f"{what} of the {face}")
    if what == "model":
        for model in (pair.model, pair.twin):
            model.state_dict()
        return
    found = list[dict[int, dict[str, Any]]]()
    pair.attempt("use between backward and step", lambda: found.append(pair.read(face, what)))
    if any(found):
        pair.check_state(found[0], pair.plain_state())


@dataclass
class Saved:
    """One moment of both sides."""

    weights: list[Tensor]
    masters: list[Tensor]
    state: dict[int, dict[str, Any]]  # of the plain optimizer
    groups: list[dict[str, Any]]
    order: list[int]
    unrecorded: set[int]
    own: dict[str, Any]  # of the wrapped one

    def fits(self, pair: Pair) -> bool:
        """Whether groups, and what is known of frozen parameters, are the same now."""
        return self.order == pair.order and self.unrecorded == pair.unrecorded


def save_both(pair: Pair, how: str) -> Saved:
    found = pair.wrapped.state_dict()
    if how == "torch.save":
        buffer = io.BytesIO()
        torch.save(found, buffer)
        buffer.seek(0)
        found = torch.load(buffer, weights_only=True)
    return Saved(
        [local(p).clone() for p in pair.mine],
        [p.detach().clone() for p in pair.theirs],
        pair.plain_state(cloned=True),
        _options(pair),
        pair.order,
        set(pair.unrecorded),
        copy.deepcopy(found),
    )


def _options(pair: Pair) -> list[dict[str, Any]]:
    groups = [pair.plain_groups(i)[0] for i in range(len(pair.groups))]
    return [copy.deepcopy({k: v for k, v in g.items() if k != "params"}) for g in groups]


@event(2)
def save(pair: Pair, rng: random.Random) -> None:
    """A state dict of each side is kept; loaded later, or never."""
    how = rng.choice(("copy", "torch.save"))
    pair.say(how)
    pair.saved[rng.randrange(2)] = save_both(pair, how)


@event(2)
def load(pair: Pair, rng: random.Random) -> None:
    """What was kept, weights first: by hand or by the module."""
    saved, by_module = pair.saved.get(rng.randrange(2)), rng.random() < 0.5
    if saved is None or not saved.fits(pair):
        return
    pair.say(f"weights by {'the module' if by_module else 'hand'}")
    if pair.is_spent:
        pair.zero_grad("wrapper")  # a load drops them
    _restore_weights(pair, saved, by_module=by_module)
    pair.wrapped.load_state_dict(copy.deepcopy(saved.own))
    _restore_plain(pair, saved, by_class=True)


@event(1)
def load_and_put_weights_back(pair: Pair, rng: random.Random) -> None:
    """What was kept, and then by hand the weights from before: masters follow these."""
    pair.wrapped.synchronize()
    now = {i: local(p).detach().clone() for i, p in enumerate(pair.mine)}
    load(pair, rng)
    _write_untold(pair, now)


@event(1)
def load_plain(pair: Pair, rng: random.Random) -> None:
    """The plain optimizer's state dict: masters become the weights."""
    saved = pair.saved.get(rng.randrange(2))
    if saved is None or not saved.fits(pair):
        return
    _restore_weights(pair, saved, by_module=False)
    pair.wrapped.load_state_dict(_as_plain_dict(pair, saved))
    _restore_plain(pair, saved, by_class=True)
    pair.reseed()


@event(0.5)
def load_live(pair: Pair, rng: random.Random) -> None:
    """The optimizer's own live tensors: nothing changes."""
    if pair.is_spent:
        pair.zero_grad("wrapper")  # a load drops them
    pair.wrapped.load_state_dict(pair.wrapped.state_dict())
    pair.has_loaded = True


@event(0.5, needs=lambda case: not case.keeps_state_itself)
def load_swapped(pair: Pair, rng: random.Random) -> None:
    """Live tensors, two of them under each other's name: what is read was not written before."""
    places = {i: n for n, i in enumerate(pair.order)}
    alike = [
        (i, j)
        for i in _with_state(pair)
        for j in _with_state(pair)
        if i < j and pair.theirs[i].dtype == pair.theirs[j].dtype
    ]
    alike = [(i, j) for i, j in alike if pair.mine[i].shape == pair.mine[j].shape]
    if not alike or any(map(pair.case.has_master, places)):
        return
    i, j = rng.choice(alike)
    pair.say(f"{i} and {j}")
    found = pair.wrapped.state_dict()
    state = found["state"] = dict(found["state"])
    state[places[i]], state[places[j]] = state[places[j]], state[places[i]]
    pair.wrapped.load_state_dict(found)
    kept = pair.plain_state(cloned=True)
    kept[i], kept[j] = kept[j], kept[i]
    pair.set_plain_state(kept)
    pair.has_loaded = True


@event(0.5, needs=lambda case: case.gives_model and not case.later)
def load_by_helpers(pair: Pair, rng: random.Random) -> None:
    """torch's get_ and set_optimizer_state_dict, in place."""
    if pair.is_spent:
        pair.zero_grad("wrapper")
    if not pair.reshard():
        return
    if not all(pair.mine[i].requires_grad for i in pair.order) or pair.unrecorded:
        return  # torch leaves out what is frozen
    if pair.case.keeps_state_itself and len(_with_state(pair)) < len(pair.order):
        return  # torch makes a step to have state to fill
    if any(p.grad is not None for p in pair.mine):
        return  # torch refuses where it has to make state
    found = copy.deepcopy(get_optimizer_state_dict(pair.model, pair.wrapped))
    set_optimizer_state_dict(pair.model, pair.wrapped, found)
    pair.has_loaded = True


def _as_plain_dict(pair: Pair, saved: Saved) -> dict[str, Any]:
    """What the plain optimizer's state_dict() would be, placed as the wrapped side's."""
    position = {i: n for n, i in enumerate(pair.order)}
    groups, start = [], 0
    for group, options in zip(pair.groups, saved.groups, strict=True):
        groups.append({**copy.deepcopy(options), "params": list(range(start, start + len(group)))})
        start += len(group)
    state = {
        position[i]: {name: pair.like_mine(i, value) for name, value in values.items()}
        for i, values in saved.state.items()
    }
    return {"state": state, "param_groups": groups}


@torch.no_grad()
def _restore_weights(pair: Pair, saved: Saved, *, by_module: bool) -> None:
    pair.wrapped.synchronize()
    if by_module and pair.reshard():
        named = zip(pair.model.named_parameters(), saved.weights, strict=True)
        pair.model.load_state_dict({name: like(p, value) for (name, p), value in named})
    else:
        for parameter, value in zip(pair.mine, saved.weights, strict=True):
            local(parameter).copy_(value)
    for parameter, value in zip(pair.carriers, saved.weights, strict=True):
        local(parameter).copy_(value)


@torch.no_grad()
def _restore_plain(pair: Pair, saved: Saved, *, by_class: bool = False) -> None:
    for theirs, value in zip(pair.theirs, saved.masters, strict=True):
        theirs.copy_(value)
    pair.set_plain_state(saved.state)
    for i, options in enumerate(saved.groups):
        for group in pair.plain_groups(i):
            if by_class and not pair.case.is_torchs and pair.case.keeps_state_itself:
                # torch replaces the groups, the wrapper's own load updates them.
                for name in group.keys() - options.keys() - {"params"}:
                    del group[name]
            pair.set_group(group, options)
    pair.has_loaded = True
    if pair.is_spent:  # a load has dropped the wrapped one's
        for carrier in pair.carriers:
            carrier.grad = None
    pair.is_spent = pair.has_taken = False


@event(2, needs=lambda case: case.overlap == "backward")
def backward_given_up(pair: Pair, rng: random.Random) -> None:
    """After a backward that has updated parameters, a load in the place of step()."""
    if pair.is_spent:
        pair.zero_grad("wrapper")
    saved = save_both(pair, "copy")
    gradients(pair, rng, of_all=True)
    pair.refused("use between backward and step", lambda: pair.wrapped.state)
    pair.refused("use between backward and step", pair.wrapped.zero_grad)
    _restore_weights(pair, saved, by_module=False)
    pair.wrapped.load_state_dict(copy.deepcopy(saved.own))
    _restore_plain(pair, saved)
    pair.zero_grad("wrapper")


@event(1)
def checkpoint_saved(pair: Pair, rng: random.Random) -> None:
    """checkpoint.save, now and then async_save."""
    how = rng.choice(("save", "save", "async_save"))
    pair.say(how)
    saved = save_both(pair, "copy")
    path = pair.folder / "checkpoint"
    if how == "save":
        checkpoint.save(path, pair.model, pair.wrapped, overwrite=True)
    else:
        checkpoint.async_save(path, pair.model, pair.wrapped, overwrite=True).result()
    pair.twin.state_dict()  # FSDP2 reshards for it
    pair.saved[2] = saved


@event(1)
def checkpoint_loaded(pair: Pair, rng: random.Random) -> None:
    """The last one."""
    saved = pair.saved.get(2)
    if saved is None or not saved.fits(pair):
        return
    if pair.is_spent:
        pair.zero_grad("wrapper")
    checkpoint.load(pair.folder / "checkpoint", pair.model, pair.wrapped)
    loaded(pair, saved)


@torch.no_grad()
def loaded(pair: Pair, saved: Saved) -> None:
    """The plain side follows a load of the wrapped one."""
    pair.twin.state_dict()  # FSDP2 reshards for it
    for parameter, value in zip(pair.carriers, saved.weights, strict=True):
        local(parameter).copy_(value)
    _restore_plain(pair, saved)


@event(1)
def rewrapped(pair: Pair, rng: random.Random) -> None:
    """Closed, built anew in other lanes, and loaded."""
    if not pair.reshard():
        return
    if pair.is_spent:
        pair.zero_grad("wrapper")
    pair.end_phases()
    kept = copy.deepcopy(pair.wrapped.state_dict())
    inner = pair.rebuilt_inner()
    pair.wrapped.close()
    if len(pair.lanes) > 1:
        rng.shuffle(pair.lanes)
    elif not pair.case.plain_fused and pair.lanes != ["host"]:
        pair.lanes = rng.choice((["resident"], ["streamed"]))
    pair.say(f"lanes {pair.lanes}")
    pair.rewrap(inner)
    pair.wrapped.load_state_dict(kept)
    pair.has_loaded, pair.is_spent = True, False
