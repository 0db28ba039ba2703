"""One bucket's update, without lanes: bound to other memory, clipped, called directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_offload.core import dtensor
from fsdp_offload.core.config import PrecisionConfig
from fsdp_offload.plan import Kind, ParamSpec, Slice, make_layout
from fsdp_offload.plan.layout import kind_range
from fsdp_offload.update import fused_adam
from fsdp_offload.update.bucket import BucketUpdate, Scratch
from fsdp_offload.update.params import (
    REMAINDER_KIND,
    MasterForm,
    ParamState,
    Snapshot,
    cut_at,
    master_form,
    state_kinds,
)
from fsdp_offload.update.schema import schema_of
from fsdp_offload.update.state import write_master

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
NUMELS = (70, 5, 192, 0, 33)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (FP32, BF16, FP16)

Build = Callable[[list[Any]], Optimizer]


def adamw(**options: Any) -> Build:
    options = {"lr": 0.01, "fused": True, **options}
    return lambda params: torch.optim.AdamW(params, **options)


class One:
    """All parameters in one bucket whose state lies in ``memory``, laid out as in a slot."""

    def __init__(self, build: Build, dtype: torch.dtype, numels: tuple[int, ...] = NUMELS) -> None:
        generator = torch.Generator().manual_seed(1)
        self.parameters = [
            nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in numels
        ]
        self.optimizer = build(self.parameters)
        self.params = [self._state(i, p) for i, p in enumerate(self.parameters)]
        self.layout = make_layout([r.spec for r in self.params], bucket_bytes=1 << 20)
        (self.bucket,) = self.layout.buckets
        first = self.params[0]
        scratch_bytes = Scratch.bytes_for(self.bucket.scratch_numel, first.compute_dtype, dtype)
        self.memory = torch.zeros(self.layout.arena_stop, dtype=torch.uint8)
        self._use(self.memory)
        for record in self.params:
            if record.form is MasterForm.WHOLE:
                write_master(record, {})
        scratch = Scratch(torch.full((scratch_bytes,), 0xFF, dtype=torch.uint8))
        self.update = BucketUpdate(
            self.optimizer,
            self.bucket,
            self.params,
            self._view,
            scratch,
            flat_remainder=self._remainder(),
        )

    def _state(self, index: int, parameter: nn.Parameter) -> ParamState:
        info = dtensor.shard_info(parameter, f"p{index}")
        compute = PrecisionConfig().compute_dtype(info.dtype)
        group = next(
            i
            for i, g in enumerate(self.optimizer.param_groups)
            if any(p is parameter for p in g["params"])
        )
        schema = schema_of(self.optimizer, self.optimizer.param_groups[group], compute, CPU)
        form = master_form("streamed", info.dtype, compute)
        spec = ParamSpec(
            index,
            info.local_numel,
            state_kinds(info, schema, form, compute),
            *cut_at(info, "streamed", elementwise=schema.elementwise),
            fqn=f"p{index}",
        )
        memory = dtensor.memory_of(parameter)
        return ParamState(
            parameter, spec, group, info, schema, compute, "streamed", form, memory
        )  # fmt: skip

    def _use(self, memory: Tensor) -> None:
        self.memory = memory
        for record in self.params:
            for kind, numel in record.kinds:
                start = self.layout.offsets[record.index, kind.name]
                stop = start + numel * kind.itemsize
                record.tensors[kind.name] = memory[start:stop].view(kind.dtype)

    def _view(self, piece: Slice, kind: Kind, numel: int) -> Tensor:
        start, stop = kind_range(piece, kind, numel, self.layout.offsets)
        return self.memory[start:stop].view(kind.dtype)

    def _remainder(self) -> Tensor | None:
        spans = [span for span in self.bucket.spans if span.kind == REMAINDER_KIND]
        if not spans:
            return None
        stop = spans[0].arena_start + spans[0].n_bytes
        return self.memory[spans[0].arena_start : stop].view(REMAINDER_KIND.dtype)

    def move(self) -> None:
        """State into other memory; the old one is spoiled."""
        before, self.memory = self.memory, self.memory.clone()
        self._use(self.memory)
        self.update.bind(self._view, self._remainder())
        before.fill_(0xFF)

    def step(self, gradients: list[Tensor | None]) -> None:
        snapshot = Snapshot.take(self.optimizer, self.optimizer.param_groups, host=False)
        with torch.no_grad():
            self.update.run(gradients, snapshot)

    def bits(self) -> list[Tensor]:
        """Shards, state and step counts, as bytes."""
        found = [p.detach().view(torch.uint8) for p in self.parameters]
        found += [r.tensors[k.name].view(torch.uint8) for r in self.params for k, _ in r.kinds]
        return found + [p.state["step"].view(1) for p in self.update.slices if "step" in p.state]


def gradients_of(one: One, step: int, *, missing: bool = False) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(10 + step)
    made = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in one.parameters]
    return [None if missing and step and (step + i) % 3 == 0 else g for i, g in enumerate(made)]


def assert_same(a: One, b: One) -> None:
    for mine, other in zip(a.bits(), b.bits(), strict=True):
        assert torch.equal(mine, other)


# --------------------------------------------------------------------------- bind


@pytest.mark.parametrize("numels", [NUMELS, (200,)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bucket_that_moves_between_updates_gives_the_same_bits(
    dtype: torch.dtype, numels: tuple[int, ...]
) -> None:
    stays, moves = (One(adamw(amsgrad=True), dtype, numels) for _ in "ab")
    for step in range(5):
        for one in (stays, moves):
            one.step(gradients_of(one, step))
        moves.move()
        assert_same(stays, moves)


def test_moving_before_the_first_update_leaves_the_state_to_the_class() -> None:
    """SGD's first momentum is the gradient: a piece that has not stepped must stay so."""

    def sgd(params: list[Any]) -> Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5)

    stays, moves = One(sgd, FP32), One(sgd, FP32)
    moves.move()
    for step in range(3):
        for one in (stays, moves):
            one.step(gradients_of(one, step))
    assert_same(stays, moves)


# --------------------------------------------------------------------------- the direct call


class Spy:
    """Counts direct calls, and may forbid them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.forbidden = 0, False
        call, values = fused_adam._call, fused_adam.settings
        monkeypatch.setattr(fused_adam, "_call", lambda *a: self._counted(call, *a))
        monkeypatch.setattr(
            fused_adam, "settings", lambda *a: None if self.forbidden else values(*a)
        )

    def _counted(self, call: Callable[..., None], *args: Any) -> None:
        self.calls += 1
        call(*args)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def two_groups(**options: Any) -> Build:
    def build(params: list[Any]) -> Optimizer:
        groups = [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, fused=True, **{"lr": 0.01, **options})

    return build


DIRECT = {
    "plain": adamw(),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.1, fused=True),
    "amsgrad": adamw(amsgrad=True),
    "maximize": adamw(maximize=True, betas=(0.8, 0.95), eps=1e-5),
    "lr in a tensor": adamw(lr=torch.tensor(0.01)),
    "two groups": two_groups(),
}


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("build", DIRECT.values(), ids=DIRECT)
def test_direct_calls_give_the_bits_of_the_class(
    spy: Spy, build: Build, dtype: torch.dtype, missing: bool
) -> None:
    direct, by_class = One(build, dtype), One(build, dtype)
    for step in range(4):
        spy.calls, spy.forbidden = 0, False
        direct.step(gradients_of(direct, step, missing=missing))
        groups = len(direct.optimizer.param_groups)
        assert spy.calls == (groups if step else 0), "the first step is the class's"
        spy.forbidden = True
        by_class.step(gradients_of(by_class, step, missing=missing))
        for one in (direct, by_class):
            for group in one.optimizer.param_groups:
                group["lr"] = group["lr"] * 0.9
    assert_same(direct, by_class)


class Changed(torch.optim.AdamW):
    """A class of the user's own."""

    def _init_group(self, *args: Any) -> bool:
        return super()._init_group(*args)


UNUSUAL = {
    "foreach": adamw(fused=False, foreach=True),
    "open": adamw(fused=None),
    "betas in tensors": adamw(betas=(torch.tensor(0.9), torch.tensor(0.999))),
    "capturable": adamw(capturable=True),
    "another class": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "subclass": lambda params: Changed(params, fused=True),
}


@pytest.mark.parametrize("build", UNUSUAL.values(), ids=UNUSUAL)
def test_whatever_is_unusual_is_left_to_the_class(spy: Spy, build: Build) -> None:
    one = One(build, FP32)
    for step in range(2):
        one.step(gradients_of(one, step))
    assert not spy.calls
