"""A plain optimizer and a wrapped one over equal parameters, fed equal gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_offload import TransferConfig
from tests.helpers.compare import assert_same, master_of, rounded
from tests.helpers.lanes import in_lanes

SMALL: Final = TransferConfig(bucket_bytes="4KiB", host_threads=1)
"""512 elements of two fp32 kinds per bucket: large parameters are cut, small ones share one."""

SHAPES: Final = ((70, 50), (129,), (), (0, 5), (7, 3, 4), (64,), (33, 31))
GRADIENTS: Final = (
    "1111110111",
    "1010100101",
    "0001110110",  # a late first gradient
    "1101110111",
    "0000000000",  # never
    "1001010001",
    "1100110010",
)
"""Per parameter, whether it has a gradient in each of ten steps; in step 7 none has."""
MATRICES: Final = ((70, 50), (9, 65), (33, 31), (1, 40))
COMPARED_AFTER: Final = (1, 2, 10)
MASTERS: Final = ("master_remainder", "master")

Build = Callable[[list[dict[str, Any]]], Any]
"""Makes an optimizer (or :class:`Apart`) from groups of parameters."""


class Apart:
    """One plain optimizer per parameter, under one roof.

    For references that torch cannot give in one call: fused SGD refuses parameters with and
    without momentum together.
    """

    def __init__(self, build: Callable[[list[dict[str, Any]]], Optimizer], groups: Any) -> None:
        together = build(groups)
        self.parts: list[Optimizer] = []
        for group in together.param_groups:
            settings = {name: value for name, value in group.items() if name != "params"}
            for parameter in group["params"]:
                alone = build([{"params": [parameter]}])
                alone.param_groups[0].update(copy.deepcopy(settings))
                self.parts.append(alone)
        self.param_groups = [part.param_groups[0] for part in self.parts]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Of all parts."""
        return {p: state for part in self.parts for p, state in part.state.items()}

    def step(self) -> None:
        """Of every part."""
        for part in self.parts:
            part.step()


class SideBySide:
    """Runs both optimizers in step and compares them.

    Args:
        build: makes an optimizer from two groups of parameters; called once per twin.
        shapes: of the parameters; every second one goes into the second group.
        dtypes: of the parameters, repeated as needed.
        plain_dtypes: of the plain twin's parameters, likewise; empty for those of the wrapped.
        plain_build: for the plain twin, where it differs (``fused=True`` for the host lane).
        second: what differs in the second group, as factors on the first group's numbers.
        **wrap: arguments of ``HybridDeviceOptimizer``.
    """

    def __init__(
        self,
        build: Build,
        *,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        dtypes: Sequence[torch.dtype] = (torch.float32,),
        plain_dtypes: Sequence[torch.dtype] = (),
        plain_build: Build | None = None,
        **wrap: Any,
    ) -> None:
        self.generator = torch.Generator().manual_seed(len(shapes))
        values = [
            torch.randn(s, generator=self.generator, dtype=torch.float64).to(
                dtypes[i % len(dtypes)]
            )
            for i, s in enumerate(shapes)
        ]
        self.mine = [nn.Parameter(v.clone()) for v in values]
        plain = plain_dtypes or dtypes
        self.theirs = [
            nn.Parameter(v.to(plain[i % len(plain)], copy=True)) for i, v in enumerate(values)
        ]
        self.plain = (plain_build or build)(two_groups(self.theirs))
        wrap.setdefault("transfer", SMALL)
        self.wrapped = in_lanes(build(two_groups(self.mine)), **wrap)
        self.steps_done = 0

    def set_gradients(self, present: Iterable[bool]) -> None:
        """Equal gradients for both, as in mixed precision: rounded to the shard's dtype."""
        scale = 10.0 ** ((self.steps_done % 3) - 1)
        for mine, theirs, has in zip(self.mine, self.theirs, present, strict=True):
            gradient = torch.randn(mine.shape, generator=self.generator, dtype=torch.float64)
            gradient = (gradient * scale).to(mine.dtype)
            mine.grad = gradient if has else None
            theirs.grad = gradient.to(theirs.dtype, copy=True) if has else None

    def scale_lr(self, factor: float) -> None:
        """A scheduler's change: in place where the lr is a tensor."""
        for optimizer in (self.wrapped, self.plain):
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].mul_(factor)
                else:
                    group["lr"] *= factor

    def step(self, present: Iterable[bool]) -> None:
        """One step of both."""
        self.set_gradients(present)
        self.wrapped.step()
        self.plain.step()
        self.steps_done += 1

    def run(self, steps: int = 10) -> None:
        """Ten steps (or fewer) with missing gradients and two changes of lr, then compared."""
        for step in range(steps):
            if step in (0, 4):
                self.scale_lr(1.5 if step == 0 else 0.5)
            self.step(GRADIENTS[i % len(GRADIENTS)][step] == "1" for i in range(len(self.mine)))
            if self.steps_done in COMPARED_AFTER:
                self.compare()

    def compare(self) -> None:
        """Parameters and state, bit for bit."""
        shown = self.wrapped.state
        for index, (mine, theirs) in enumerate(zip(self.mine, self.theirs, strict=True)):
            what = f"step {self.steps_done}, parameter {index} of shape {tuple(mine.shape)}"
            master = master_of(mine, shown[mine])
            assert_same(master, theirs.detach(), f"{what}, value")
            assert_same(mine.detach(), rounded(master, mine.dtype), f"{what}, shard")
            if plain := self.plain.state.get(theirs):
                state = {k: v for k, v in shown[mine].items() if k not in MASTERS}
                assert state.keys() == plain.keys(), what
                for name, value in plain.items():
                    assert_same(state[name], value, f"{what}, {name}")

    def change(self, **values: Any) -> None:
        """Set hyper-parameters of every group of both."""
        for optimizer in (self.wrapped, self.plain):
            for group in optimizer.param_groups:
                for name, value in values.items():
                    group[name] = value.clone() if isinstance(value, Tensor) else value

    def lanes(self) -> set[str]:
        """Lanes in use."""
        return set(self.wrapped.statistics().parameters)


def two_groups(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Alternating, so that neighbours in a bucket differ in hyper-parameters."""
    groups: list[dict[str, Any]] = [
        {"params": list(parameters[::2])},
        {"params": list(parameters[1::2])},
    ]
    return [group for group in groups if group["params"]]
