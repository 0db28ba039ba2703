"""Events of training: gradients, steps, hyper-parameters, which parameters train."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler

from tests.helpers.optimizer_table import ELEMENTWISE

from .bits import Mismatch
from .cases import COMMON, FLAGS, HALF, Case
from .kinds import EVENTS, event, generator_of
from .net import ModelError, like, local
from .pair import LOSS, Pair


def may_start(case: Case) -> bool:
    """Fused SGD on the CPU leaves elements of half precision out (pytorch #191763): what stands in
    its momentum is then whatever was in memory."""
    half = any(dtype in HALF for dtype in case.dtypes)
    return not case.sharded and not (case.apart and half)


@event(0, before_wrapping=True)
def start_stepped(pair: Pair, rng: random.Random) -> None:
    """The optimizer has stepped before it is wrapped."""
    if may_start(pair.case):
        train(pair, rng)


@event(0, before_wrapping=True)
def start_frozen(pair: Pair, rng: random.Random) -> None:
    """A parameter is frozen when its optimizer is wrapped."""
    freeze(pair, rng)


# --------------------------------------------------------------------------- gradients, steps


def _present(pair: Pair, rng: random.Random) -> list[bool]:
    likely = rng.choice((1.0, 1.0, 0.6, 0.6, 0.2))
    if not pair.is_wrapped and pair.case.apart:
        likely = 1.0  # plain fused SGD needs all or none
    return [rng.random() < likely for _ in pair.mine]


def gradients(
    pair: Pair, rng: random.Random, *, laid_out: bool = False, of_all: bool = False
) -> None:
    """New gradients in the place of those that were there."""
    present = [True] * len(pair.mine) if of_all else _present(pair, rng)
    scale = 10.0 ** rng.randint(-1, 1)
    layout = rng.choice(("", "", "", "transposed", "strided"))
    # Sums over an element's neighbours depend on the order of elements in memory.
    layout = layout if laid_out and pair.is_wrapped and pair.case.name in ELEMENTWISE else ""
    pair.say(f"gradients of {[i for i, has in enumerate(present) if has]}")
    by_hand = pair.mesh is None and rng.random() < 0.8
    if by_hand or (pair.mesh is None and not pair.is_wrapped):
        pair.set_gradients(generator_of(rng), present, scale, layout=layout)
        return
    if not pair.has_taken:
        pair.zero_grad("wrapper", to_none=rng.random() < 0.7)
    pair.backward(generator_of(rng), present, scale)


@event(26)
def train(pair: Pair, rng: random.Random) -> None:
    """A whole iteration: gradients, now and then in two backward passes or clipped, and a step."""
    accumulates, clips, to_none = rng.random() < 0.15, rng.random() < 0.3, rng.random() < 0.8
    if accumulates and pair.in_backward:
        pair.zero_grad("wrapper")
        with pair.wrapped.accumulate():
            gradients(pair, rng)
        pair.has_taken = False
        pair.backward(generator_of(rng), _present(pair, rng), 1.0)
    else:
        gradients(pair, rng, laid_out=to_none and not clips)
        if accumulates:
            _more(pair, rng)
    clips = clips and not pair.in_backward and pair.is_wrapped
    if clips:
        _clip(pair, rng)
    if pair.is_wrapped and rng.random() < 0.3:
        name = rng.choice(BEFORE_STEP)
        pair.say(name)
        pair.count(name, "between backward and step()")
        EVENTS[name].run(pair, rng)
    pair.step(rng.getrandbits(31))
    if clips or pair.mesh is None or rng.random() < 0.5:
        pair.zero_grad("wrapper", to_none=to_none)


BEFORE_STEP = (
    "evaluation", "forward_raises", "zero_grad", "gradients_by_hand", "freeze", "unfreeze", "read",
)  # fmt: skip
"""Events that may come between a backward and its step()."""


@event(2)
def evaluation(pair: Pair, rng: random.Random) -> None:
    """A forward that keeps no graph; the models may stay in evaluation mode."""
    for model in (pair.model, pair.twin):
        model.train(pair.model.training if rng.random() < 0.5 else not pair.model.training)
    pair.evaluate(generator_of(rng), _present(pair, rng))


@event(1)
def forward_raises(pair: Pair, rng: random.Random) -> None:
    """In the middle of the model."""
    pair.fail(generator_of(rng), _present(pair, rng), "forward")


@event(1, needs=lambda case: not case.sharded)
def backward_raises(pair: Pair, rng: random.Random) -> None:
    """Some gradients are there. FSDP2 itself cannot go on then."""
    pair.fail(generator_of(rng), _present(pair, rng), "backward")


@event(1)
def step_raises(pair: Pair, rng: random.Random) -> None:
    """A closure or a hook of the caller's raises: nothing is updated."""

    def fails(*_: object) -> None:
        raise ModelError("on purpose")

    by_hook = rng.random() < 0.5
    pair.say("hook" if by_hook else "closure")
    if pair.is_spent:
        pair.zero_grad("wrapper")
    face = rng.choice((pair.wrapped, pair.inner))
    handle = face.register_step_pre_hook(fails) if by_hook else None
    try:
        pair.wrapped.step(*(() if by_hook else (fails,)))
    except ModelError:
        return
    finally:
        if handle is not None:
            handle.remove()
    raise Mismatch("what a closure or a hook raises does not come out of step()")


@event(2)
def gradients_by_hand(pair: Pair, rng: random.Random) -> None:
    """Of some parameters, also of frozen ones; in an iteration, of those that have none."""
    if pair.is_spent:
        pair.zero_grad("wrapper")
    generator = generator_of(rng)
    for i in pair.order:
        mine, carrier = pair.mine[i], pair.carriers[i]
        if rng.random() < 0.5 or (pair.has_taken and mine.grad is not None):
            continue
        piece = torch.randn(local(mine).shape, generator=generator).to(mine.dtype)
        mine.grad, carrier.grad = like(mine, piece), like(carrier, piece.clone())
        pair.say(f"parameter {i}{'' if mine.requires_grad else ', which is frozen'}")
        if not mine.requires_grad:
            pair.count("gradient by hand", "of a frozen parameter")
        pair.unused.add(i)


@event(2)
def train_by_closure(pair: Pair, rng: random.Random) -> None:
    """step() calls what makes the gradients."""

    def closure() -> float:
        gradients(pair, rng, of_all=True)
        return LOSS

    if pair.is_spent:
        pair.zero_grad("wrapper")
    pair.step(rng.getrandbits(31), closure)
    pair.zero_grad("wrapper")


def _more(pair: Pair, rng: random.Random) -> None:
    if pair.mesh is None:
        pair.add_gradients(generator_of(rng), in_place=rng.random() < 0.5)
    else:
        pair.backward(generator_of(rng), _present(pair, rng), 1.0)


def _clip(pair: Pair, rng: random.Random) -> None:
    orders = (2.0, 2.0, 1.0, 3.0) if pair.case.sharded else (2.0, 2.0, 1.0, float("inf"))
    if any(0 in shape for shape in pair.case.shapes):
        orders = (2.0,)  # torch has no other norm of nothing
    limit, order, by_wrapper = rng.choice((0.1, 1.0, 10.0)), rng.choice(orders), rng.random() < 0.6
    pair.say(f"clipped to {limit} in norm {order} by {'the wrapper' if by_wrapper else 'torch'}")
    pair.clip(limit, order, by_wrapper=by_wrapper)


def _may_touch_gradients(pair: Pair) -> bool:
    """With ``"backward"``, gradients are not there once they were used."""
    return not pair.is_spent and pair.case.overlap != "backward"


@event(3)
def step_alone(pair: Pair, rng: random.Random) -> None:
    """With whatever gradients there are."""
    if not pair.is_spent:
        pair.step(rng.getrandbits(31))


@event(2)
def gradients_alone(pair: Pair, rng: random.Random) -> None:
    """Gradients that the next event finds."""
    if pair.case.overlap != "backward":
        gradients(pair, rng)


@event(1)
def gradients_added(pair: Pair, rng: random.Random) -> None:
    """A further backward."""
    if _may_touch_gradients(pair):
        _more(pair, rng)


@event(2)
def zero_grad(pair: Pair, rng: random.Random) -> None:
    """By the wrapper, the model, or by hand."""
    if pair.has_taken:
        pair.attempt("use between backward and step", pair.wrapped.zero_grad)
        return
    how = rng.choice(("wrapper", "model", "hand"))
    to_none = rng.random() < 0.6
    pair.say(f"by {how}, to None: {to_none}")
    if pair.is_spent or not pair.reshard():  # a model that is gathered has other parameters
        how = "wrapper"
    pair.zero_grad(how, to_none=to_none)


@event(2)
def clip_alone(pair: Pair, rng: random.Random) -> None:
    """Clipping in any order with all the others: twice, before other gradients, after a step."""
    if _may_touch_gradients(pair) and any(p.grad is not None for p in pair.mine):
        _clip(pair, rng)


# --------------------------------------------------------------------------- hyper-parameters


def _both(pair: Pair, index: int | None, name: str, change: Callable[[Any], Any]) -> None:
    for i, group in enumerate(pair.wrapped.param_groups):
        if index in (None, i):
            for each in (group, *pair.plain_groups(i)):
                each[name] = change(each[name])


@event(4)
def set_lr(pair: Pair, rng: random.Random) -> None:
    """In place where it is a tensor."""
    factor, index = rng.choice((0.5, 1.5, 2.0)), rng.choice((None, 0))
    pair.say(f"times {factor}")

    def change(lr: Any) -> Any:
        return lr.mul_(factor) if isinstance(lr, Tensor) else lr * factor

    _both(pair, index, "lr", change)


@event(3, needs=lambda case: case.is_torchs)
def set_option(pair: Pair, rng: random.Random) -> None:
    """Another hyper-parameter than lr."""
    case = pair.case
    known = {**FLAGS[case.name], **COMMON}
    if pair.wrapped.param_groups[0].get("momentum") and "centered" not in known:
        known["momentum"] = [0.3, 0.95]
    names = sorted(name for name in known if name in pair.wrapped.param_groups[0])
    if case.kwargs.get("dampening"):
        names.remove("maximize")  # see _draw_class()
    name = rng.choice(names)
    value, index = rng.choice(known[name]), rng.choice((None, 0))
    pair.say(f"{name} = {value}")
    _both(pair, index, name, lambda _: value)


@event(1, needs=lambda case: case.name == "SGD" and not case.kwargs.get("momentum"))
def momentum_on(pair: Pair, rng: random.Random) -> None:
    """Momentum where there was none: state that was not needed before."""
    _both(pair, None, "momentum", lambda _: 0.9)


@event(3)
def scheduler(pair: Pair, rng: random.Random) -> None:
    """One of torch's schedulers, made now or moved on."""
    if not pair.schedulers or rng.random() < 0.2:
        _schedule(pair, rng.choice(("StepLR", "ExponentialLR", "CosineAnnealingLR", "LambdaLR")))
    for each in pair.schedulers:
        each.step()


@event(1, needs=lambda case: case.name in ("Adam", "AdamW", "SGD", "RMSprop", "NAdam"))
def scheduler_of_momentum(pair: Pair, rng: random.Random) -> None:
    """OneCycleLR moves momentum or betas, too."""
    defaults = pair.wrapped.param_groups[0]
    if defaults.get("momentum", 1) and pair.case.name != "RMSprop":
        _schedule(pair, "OneCycleLR")


@event(1, needs=lambda case: case.name == "SGD" and not case.kwargs.get("momentum"))
def scheduler_of_no_momentum(pair: Pair, rng: random.Random) -> None:
    """OneCycleLR gives momentum to an SGD that was built without."""
    _schedule(pair, "OneCycleLR")


def _schedule(pair: Pair, name: str) -> None:
    arguments: dict[str, dict[str, Any]] = {
        "StepLR": {"step_size": 2, "gamma": 0.5},
        "ExponentialLR": {"gamma": 0.9},
        "CosineAnnealingLR": {"T_max": 5},
        "LambdaLR": {"lr_lambda": _decay},
        "OneCycleLR": {"max_lr": 0.05, "total_steps": 100},
    }
    if name == "OneCycleLR" and any(isinstance(g["lr"], Tensor) for g in pair.plain.param_groups):
        return  # torch cannot on CPU tensors of another dtype
    pair.say(name)
    made = getattr(lr_scheduler, name)
    for optimizer in (pair.wrapped, pair.plain):
        for group in optimizer.param_groups:
            group.pop("initial_lr", None)
    pair.schedulers = [made(o, **arguments[name]) for o in (pair.wrapped, pair.plain)]


def _decay(epoch: int) -> float:
    return 0.95**epoch


# --------------------------------------------------------------------------- parameters


@event(1.5)
def freeze(pair: Pair, rng: random.Random) -> None:
    """One parameter needs no gradient from now on."""
    found = [i for i in pair.order if pair.mine[i].requires_grad]
    if len(found) < 2 or (pair.mesh is not None and pair.has_run):
        return  # FSDP2 looks at it in its first forward
    keeps_gradient = pair.has_taken or rng.random() < 0.3
    _require_grad(pair, rng.choice(found), False, keeps_gradient=keeps_gradient)


@event(2)
def unfreeze(pair: Pair, rng: random.Random) -> None:
    """One parameter needs gradients again."""
    found = [i for i in pair.order if not pair.mine[i].requires_grad]
    if found and (pair.mesh is None or not pair.has_run):
        _require_grad(pair, rng.choice(found), True)


def _require_grad(pair: Pair, index: int, needed: bool, *, keeps_gradient: bool = False) -> None:
    pair.say(f"parameter {index}")
    for tensor in (pair.mine[index], pair.carriers[index]):
        tensor.requires_grad_(needed)
        if not keeps_gradient:
            pair.unused.discard(index)
            tensor.grad = None


@event(1.5, needs=lambda case: bool(case.later))
def add_group(pair: Pair, rng: random.Random) -> None:
    """Parameters that were in no group."""
    if pair.later:
        pair.add_group()
