"""What one sequence is about: it follows from its seed alone."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch.optim import Optimizer

from fsdp_offload.optimizer.ring import AHEAD
from tests.helpers import own_optimizers as own
from tests.helpers.optimizer_table import (
    ELEMENTWISE,
    FOREACH,
    FUSED,
    IMPLEMENTATIONS,
    SETTINGS,
)

LANES: Final = ("resident", "streamed", "host")
FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
HALF: Final = (BF16, FP16)
SHAPES: Final = (
    (), (1,), (5,), (64,), (129,), (200,), (700,), (2, 3), (7, 9), (3, 5, 7), (13, 11), (40, 5),
    (1, 40), (33, 31),
)  # fmt: skip
MATRICES: Final = ((7, 9), (13, 11), (40, 5), (1, 40), (33, 31), (2, 3))
ELEMENTWISE_OWN: Final = (own.Lion, own.NumberState, own.GroupCounter)
WHOLE_OWN: Final = (
    own.Lamb, own.Factored, own.Clipping, own.Langevin, own.Stateless, own.EagerMomentum,
)  # fmt: skip

FLAGS: Final[dict[str, dict[str, list[Any]]]] = {
    "Adadelta": {"rho": [0.8], "eps": [1e-3]},
    "Adafactor": {"beta2_decay": [-0.5], "d": [1.3]},
    "Adagrad": {"lr_decay": [0.1], "eps": [1e-5]},
    "Adam": {"betas": [(0.8, 0.95), (0.0, 0.5)], "eps": [1e-3]},
    "AdamW": {"betas": [(0.8, 0.95), (0.0, 0.5)], "eps": [1e-3]},
    "Adamax": {"betas": [(0.8, 0.95)], "eps": [1e-3]},
    "ASGD": {"lambd": [0.01], "alpha": [0.5], "t0": [2.0]},
    "Muon": {"momentum": [0.8]},
    "NAdam": {"betas": [(0.8, 0.95)], "momentum_decay": [0.01]},
    "RAdam": {"betas": [(0.5, 0.6)], "eps": [1e-3]},
    "RMSprop": {"alpha": [0.5], "eps": [1e-3]},
    "Rprop": {"etas": [(0.4, 1.3)], "step_sizes": [(1e-3, 1.0)]},
    "SGD": {},
}
"""Hyper-parameters besides lr that may have any of these values at construction or later."""
COMMON: Final[dict[str, list[Any]]] = {"weight_decay": [0.0, 0.1], "maximize": [True, False]}


@dataclass(frozen=True)
class Event:
    """One call into :mod:`.events`: what it does follows from its own seed."""

    name: str
    seed: int


@dataclass(frozen=True)
class Case:
    """A model, two equal optimizers over it, how one of them is wrapped, and what happens."""

    seed: int
    ranks: int
    cls: type[Optimizer]
    kwargs: dict[str, Any]
    implementation: str
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    layers: list[list[int]]  # parameters of each FSDP2 group
    groups: list[list[int]]  # parameters of each param group
    later: list[int]  # parameters that a group added later has
    lanes: tuple[str, ...]  # those in use
    wrap: dict[str, Any]  # arguments of the wrapper, but the model and lanes
    transfer: dict[str, Any]
    slots: int = 4
    ahead: int = AHEAD  # updates that the host enqueues before they must be
    gives_model: bool = True
    mastered: bool = True
    watched: bool = False  # state is read after every event
    sharded: bool = False  # by FSDP2, also on a single rank
    reshard: bool | None = None
    half_compute: bool = False
    events: list[Event] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of the optimizer class."""
        return self.cls.__name__

    @property
    def is_torchs(self) -> bool:
        """Whether torch has the class."""
        return self.name in SETTINGS

    @property
    def overlap(self) -> str:
        """The wrapper's mode."""
        return self.wrap.get("overlap", "step")

    @property
    def keeps_state_itself(self) -> bool:
        """Whether the wrapper leaves state as the class makes it, on the device."""
        if self.is_torchs:
            return self.name == "Adafactor"
        return "elementwise" not in self.wrap

    @property
    def plain_fused(self) -> bool:
        """The host lane takes the fused kernel where the class has one and the user none."""
        return "host" in self.lanes and self.implementation == "open" and self.name in FUSED

    @property
    def apart(self) -> bool:
        """Plain fused SGD refuses parameters with and without momentum in one group."""
        return self.name == "SGD" and (self.plain_fused or self.implementation == "fused")

    def arguments(self, *, plain: bool = False) -> dict[str, Any]:
        """Of the optimizer's constructor; tensors are its own."""
        flags = IMPLEMENTATIONS["fused" if plain and self.plain_fused else self.implementation]
        kwargs = {**flags, **self.kwargs}
        return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}

    def has_master(self, index: int) -> bool:
        """Whether the wrapper updates parameter ``index`` in fp32."""
        return self.mastered and self.dtypes[index] in HALF

    def without(self, dropped: Collection[int]) -> Case:
        """The same without some events."""
        kept = [e for i, e in enumerate(self.events) if i not in dropped]
        return replace(self, events=kept)

    def __str__(self) -> str:
        shown = {
            "class": f"{self.name}-{self.implementation}",
            "kwargs": self.kwargs,
            "parameters": [
                f"{s}:{str(d)[6:]}" for s, d in zip(self.shapes, self.dtypes, strict=True)
            ],
            "layers": self.layers if self.sharded else "plain",
            "groups": self.groups,
            "later": self.later,
            "lanes": self.lanes,
            "wrap": self.wrap,
            "transfer": self.transfer,
            "gives_model": self.gives_model,
            "mastered": self.mastered,
            "watched": self.watched,
            "ahead": self.ahead,
            "reshard": self.reshard,
            "half_compute": self.half_compute or None,
        }
        return "\n".join(f"  {k}: {v}" for k, v in shown.items() if v is not None)


def draw_case(seed: int, ranks: int = 1) -> Case:
    """The case of ``seed``, without events."""
    rng = random.Random(seed * 8 + ranks)
    sharded = ranks > 1 or rng.random() < 0.45
    cls, kwargs, implementation = _draw_class(rng, sharded)
    name, is_own = cls.__name__, cls.__name__ not in SETTINGS
    count = rng.choice((1, 2, 2, 3, 3, 4))
    shapes = [rng.choice(MATRICES if name == "Muon" else SHAPES) for _ in range(count)]
    if sharded:
        shapes = [s if s else (3,) for s in shapes]  # FSDP2 refuses 0-dim parameters
    elif rng.random() < 0.1 and name not in ("Adafactor", "Muon", "Lamb"):
        shapes[rng.randrange(count)] = (0, 5)
    elementwise = name in ELEMENTWISE or (cls in ELEMENTWISE_OWN and rng.random() < 0.5)
    half_allowed = not is_own or elementwise
    dtypes = _draw_dtypes(rng, count, name, half_allowed, alike=sharded)
    mastered = rng.random() < 0.85 and name != "Adafactor"
    layers = _split(rng, list(range(count)))
    later = [rng.randrange(count)] if count > 2 and rng.random() < 0.3 else []
    if name == "EagerMomentum":
        later = []  # makes no state for them
    groups = _split(rng, [i for i in range(count) if i not in later], 2)
    overlap = "step"
    if sharded and name in ELEMENTWISE:
        overlap = rng.choice(("step", "forward", "forward", "backward", "backward"))
    lanes = _draw_lanes(rng, elementwise)
    half_alone = not mastered and any(d in HALF for d in dtypes)
    if name in FUSED and (half_alone or (implementation == "open" and "host" in lanes[1:])):
        # One kernel for all parameters, so that the plain optimizer can be told which; and torch's
        # fused and foreach kernels give half precision other bits in other company.
        implementation = "for-loop"
    wrap: dict[str, Any] = {}
    if name == "Adafactor" or (is_own and not elementwise):  # where their state lies is no choice
        lanes, wrap["offload_fraction"] = ("streamed",), 1.0
    elif lanes == ("host",) and (later or name in FUSED):
        # Beside a list of lanes, parameters that come later are updated on the device.
        wrap["offload_fraction"] = 1.0
    elif len(lanes) == 1 and rng.random() < 0.3:
        fraction = {"resident": 0.0, "streamed": 1.0, "host": 1.0}[lanes[0]]
        wrap["offload_fraction"] = rng.choice((fraction, 0.5)) if lanes[0] != "host" else fraction
    wrap["overlap"] = overlap
    wrap["device_memory"] = rng.choice(("auto", 0, "20000B", "60000B", "1MiB"))
    if is_own and elementwise:
        wrap["elementwise"] = True
    case = Case(
        seed=seed,
        ranks=ranks,
        cls=cls,
        kwargs=kwargs,
        implementation=implementation,
        shapes=shapes,
        dtypes=dtypes,
        layers=layers,
        groups=groups,
        later=later,
        lanes=lanes,
        wrap=wrap,
        transfer=_draw_transfer(rng),
        slots=rng.choice((1, 2, 3)),
        gives_model=overlap != "step" or rng.random() < 0.8,
        mastered=mastered,
        watched=rng.random() < 0.4,
        sharded=sharded,
        reshard=rng.choice((None, True, False)),
        half_compute=sharded and dtypes[0] == FP32 and rng.random() < 0.2,
    )
    if sharded and case.gives_model and rng.random() < 0.7:
        wrap["offload"] = "all"
        wrap["device_memory"] = rng.choice((0, wrap["device_memory"]))
    return replace(case, ahead=rng.choice((0, AHEAD)))


def _draw_class(rng: random.Random, sharded: bool) -> tuple[type[Optimizer], dict[str, Any], str]:
    if rng.random() < 0.1:
        # Shards of a matrix are no matrices: whole-matrix classes have no plain twin there.
        known = ELEMENTWISE_OWN if sharded else (*ELEMENTWISE_OWN, *WHOLE_OWN)
        return rng.choice(known), {}, "open"
    names = sorted(ELEMENTWISE) if sharded else sorted(SETTINGS)
    name = rng.choice([*names, "Adam", "AdamW", "AdamW", "SGD", "SGD"])
    possible = ["open", "open"]
    possible += ["for-loop", "foreach"] if name in FOREACH else []
    possible += ["fused"] if name in FUSED else []
    implementation = rng.choice(possible)
    kwargs = dict(rng.choice(SETTINGS[name]))
    kwargs.pop("capturable", None)
    extra = {**FLAGS[name], **({} if name in ("Rprop", "Muon", "Adafactor") else COMMON)}
    for flag, values in extra.items():
        if rng.random() < 0.25:
            kwargs[flag] = rng.choice(values)
    if kwargs.get("dampening"):  # zeros would make a momentum of -0.0: docs/optimizers.md
        kwargs["maximize"] = False
    if implementation == "foreach" and isinstance(kwargs.get("lr"), torch.Tensor):
        implementation = "for-loop"  # torch refuses it
    return getattr(torch.optim, name), kwargs, implementation


def _draw_dtypes(
    rng: random.Random, count: int, name: str, half_allowed: bool, *, alike: bool
) -> list[torch.dtype]:
    weighted = [FP32, FP32, FP32, *(HALF if half_allowed else ()), FP64]
    if name == "Muon":
        weighted = [FP32, FP32, BF16]
    if alike or rng.random() < 0.7 or name == "Adafactor":
        # Adafactor takes the epsilon of the first parameter's dtype for all in a call.
        return [rng.choice(weighted[:-1] if alike else weighted)] * count
    return [rng.choice(weighted) for _ in range(count)]


def _draw_lanes(rng: random.Random, elementwise: bool) -> tuple[str, ...]:
    known = LANES if elementwise else LANES[:2]
    if rng.random() < 0.6:
        return (rng.choice(known),)
    return tuple(sorted(rng.sample(known, rng.randint(2, len(known))), reverse=True))


def _draw_transfer(rng: random.Random) -> dict[str, Any]:
    transfer: dict[str, Any] = {
        "bucket_bytes": rng.choice(("4KiB", "4KiB", "4KiB", "1MiB")),
        "host_threads": 1,
    }
    if rng.random() < 0.9:  # reading what is free takes a while
        transfer["host_memory"] = 1 << 30
    return transfer


def _split(rng: random.Random, items: list[int], most: int = 3) -> list[list[int]]:
    """A few parts, none empty, that keep the order."""
    parts = rng.randint(1, min(most, len(items)))
    cuts = sorted(rng.sample(range(1, len(items)), parts - 1))
    return [items[a:b] for a, b in zip([0, *cuts], [*cuts, len(items)], strict=True)]
