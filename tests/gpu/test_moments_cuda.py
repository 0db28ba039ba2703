"""On CUDA: Triton kernels of moments in fewer bits give the bits of their twins on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from fsdp_offload.update import moments, one_kernel
from fsdp_offload.update.kernels import moment_kernels
from fsdp_offload.update.moments import Moment
from fsdp_offload.update.one_kernel import AdamConstants, AdamLaunch, Operands
from tests.helpers.adam_plain import adam_plain

BF16, INT8, UINT8, FP16, FP32 = (
    torch.bfloat16, torch.int8, torch.uint8, torch.float16, torch.float32,
)  # fmt: skip
NUMELS = (1, 63, 64, 1024, 5000, 3 * 1024 + 65)
FAR = (1 << 33) - 700
"""A first index whose upper word changes on the way."""
GROUP: dict[str, Any] = {
    "lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1,
    "decoupled_weight_decay": True, "maximize": False, "fused": True,
    "amsgrad": False, "foreach": None, "differentiable": False, "capturable": False,
}  # fmt: skip


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal bits, on any device; NaNs are one."""
    if a is None or b is None:
        return a is b
    a, b = a.cpu(), b.cpu()
    if a.is_floating_point():
        is_nan = a.isnan()
        if not torch.equal(is_nan, b.isnan()):
            return False
        a, b = a[~is_nan] + 0, b[~is_nan] + 0
    return torch.equal(a, b)


def values_for(dtype: torch.dtype, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator) ** 4
    for at, value in ((70, 0.0), (300, torch.nan), (700, torch.inf), (900, -torch.inf)):
        if at < numel:
            values[at] = value
    values[128:192] = 0
    return values.abs() if dtype == UINT8 else values


def room(moment: Moment, numel: int, device: str) -> tuple[Tensor, Tensor | None]:
    scales = torch.zeros(-(-numel // 64), device=device) if moment.has_scales else None
    return torch.zeros(numel, dtype=moment.dtype, device=device), scales


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("dtype", [BF16, INT8, UINT8])
def test_packing_has_the_bits_of_the_twin(dtype: torch.dtype, numel: int) -> None:
    assert moment_kernels() is not None
    for half, draw in itertools.product((0, 1), (None, (-77, FAR), (1, 0))):
        moment = Moment("x", dtype, half)
        values = values_for(dtype, numel)
        here, there = room(moment, numel, "cpu"), room(moment, numel, "cuda")
        moments.pack(moment, values, *here, draw)
        moments.pack(moment, values.cuda(), *there, draw)
        assert same(here[0], there[0])
        assert same(here[1], there[1])
        again, on_device = torch.empty(numel), torch.empty(numel, device="cuda")
        moments.unpack(moment, *here, again)
        moments.unpack(moment, *there, on_device)
        assert same(again, on_device)
        plain = room(moment, numel, "cuda")  # torch operations on CUDA, where Triton is missing
        moments.pack_plain(moment, values.cuda(), *plain, draw)
        assert same(plain[0], here[0])


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize(("weight", "gradient"), [(BF16, BF16), (FP32, FP32), (BF16, FP32)])
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (INT8, UINT8), ()])
def test_the_kernel_of_all_in_one_has_the_bits_of_its_twin(
    dtypes: tuple[torch.dtype, ...],
    weight: torch.dtype,
    gradient: torch.dtype,
    numel: int,
) -> None:
    both = [
        Moment(name, dtype, draw)
        for draw, (name, dtype) in enumerate(zip(("exp_avg", "exp_avg_sq"), dtypes, strict=False))
    ]

    def operands() -> tuple[Operands, Tensor]:
        device = "cuda"
        torch.manual_seed(numel)
        w = torch.randn(numel).to(weight)
        low = torch.randint(-30000, 30000, (numel,), dtype=torch.int16).view(BF16)
        g = torch.randn(numel).to(gradient)
        kept = []
        for moment in both:
            codes, scales = room(moment, numel, "cpu")
            values = torch.randn(numel).square() if moment.position else torch.randn(numel)
            moments.pack_plain(moment, values, codes, scales, None)
            kept.append((codes.to(device), None if scales is None else scales.to(device)))
        if not both:
            values = [torch.randn(numel).to(device), torch.randn(numel).square().to(device)]
            kept = [(value, None) for value in values]
        rest = low.to(device) if weight == BF16 else None
        powers = torch.tensor([0.9**4, 0.99**4], device=device)
        step = torch.tensor(3.0, device=device)
        return Operands(w.to(device), rest, *kept, step, powers, FAR, 99), g.to(device)

    for group in (GROUP, GROUP | {"weight_decay": 0.0, "maximize": True}):
        (here, gradient), (there, _) = operands(), operands()
        constants = AdamConstants.of(group)
        assert constants is not None
        adam_plain(both, here, gradient, 4, constants)
        AdamLaunch([there]).run([gradient], 4, constants)
        flat = [[*made[:2], *made.average, *made.square, made.step] for made in (here, there)]
        for index, (a, b) in enumerate(zip(*flat, strict=True)):
            assert same(a, b), (index, group)


SHAPES = [(300, 70), (7,), (0,), (129, 65), (1000,), (64, 64), (3, 5, 7)]
SMALL = TransferConfig(bucket_bytes="64KiB")


class Run:
    """A wrapped AdamW and its steps."""

    def __init__(
        self, dtype: torch.dtype, kept: Any, lanes: float, shapes: Sequence[Any] = SHAPES
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator) for shape in shapes]
        self.parameters = [nn.Parameter(value.to("cuda", dtype)) for value in values]
        self.optimizer = HybridDeviceOptimizer(
            torch.optim.AdamW(self.parameters, lr=0.01, fused=True),
            offload_fraction=lanes,
            transfer=SMALL,
            moments=kept,
        )

    def step(self, step: int, max_norm: float | None = None) -> None:
        generator = torch.Generator().manual_seed(50 + step)
        for index, parameter in enumerate(self.parameters):
            value = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.grad = None if step and (step + index) % 4 == 3 else value
        if max_norm is not None:
            self.optimizer.clip_grad_norm_(max_norm)
        self.optimizer.step()

    def kept(self) -> list[Tensor]:
        self.optimizer.synchronize()
        found = [p.detach().cpu() for p in self.parameters]
        for record in self.optimizer._updates.reserved.params:
            for name, tensor in record.tensors.items():
                words = tensor.view(torch.int16) if name == "master_remainder" else tensor
                found.append(words.cpu())
        return found


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize(
    ("kept", "dtype"),
    [(None, BF16), (BF16, BF16), ("int8", BF16), (BF16, FP32), ("int8", FP32)],
)
@pytest.mark.parametrize("shapes", [SHAPES, [(1 << 22,), (4096, 3000)]], ids=["small", "large"])
def test_the_kernel_of_all_in_one_has_the_bits_of_torchs_step(
    monkeypatch: pytest.MonkeyPatch, shapes: Any, kept: Any, dtype: torch.dtype, clipped: bool
) -> None:
    found = []
    for is_class in (True, False):
        with monkeypatch.context() as patch:
            if is_class:
                patch.setattr(one_kernel.OneKernelAdam, "is_for", lambda *args: False)
            run = Run(dtype, kept, 1.0, shapes)
            for step in range(12):
                run.step(step, 0.5 if clipped else None)
            found.append(run.kept())
            run.optimizer.close()
    assert all(same(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("kept", [BF16, "int8"])
def test_lanes_and_buckets_have_the_same_bits(kept: Any, dtype: torch.dtype) -> None:
    runs = [Run(dtype, kept, lanes) for lanes in (0.0, 0.5, 1.0)]
    for step in range(6):
        for run in runs:
            run.step(step)
    first, *others = (run.kept() for run in runs)
    for other in others:
        assert all(same(a, b) for a, b in zip(first, other, strict=True))


MANY = [(16, 16)] * 30 + [(256, 300), (48,), (1024,), (100, 64)]
"""All divisible by 16; the first ones are more than a table has rows, the last ones are cut."""


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize(
    ("kept", "dtype"),
    [(None, BF16), (BF16, BF16), ("int8", BF16), (BF16, FP32), ("int8", FP32)],
)
def test_pieces_at_once_have_the_bits_of_pieces_one_by_one(
    monkeypatch: pytest.MonkeyPatch, kept: Any, dtype: torch.dtype, clipped: bool
) -> None:
    run, calls = AdamLaunch.run, []

    def counted(launch: AdamLaunch, *given: Any) -> None:
        calls.append(len(launch.operands))
        run(launch, *given)

    monkeypatch.setattr(AdamLaunch, "run", counted)
    runs = [Run(dtype, kept, lanes, MANY) for lanes in (1.0, 0.0)]
    one_by_one = mock.patch.object(one_kernel, "AT_ONCE", 1)  # a bucket in another slot asks again
    with one_by_one:
        runs.append(Run(dtype, kept, 1.0, MANY))
    max_norm = 0.5 if clipped else None
    for step in range(7):
        for each in runs[:2]:
            each.step(step, max_norm)
        before = len(calls)
        with one_by_one:
            runs[2].step(step, max_norm)
        assert set(calls[before:]) == {1}
    assert max(calls) == 8, "several pieces went at once"
    first, *others = (run.kept() for run in runs)
    for other in others:
        assert all(same(a, b) for a, b in zip(first, other, strict=True))
