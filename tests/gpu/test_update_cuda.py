"""On CUDA: one bucket's update, called directly, clipped inside, and moved to other memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from fsdp_offload.pipeline import codec, fused_adam
from fsdp_offload.pipeline.bucket import BucketUpdate, copy_present

SHAPES = [(300, 70), (7,), (0,), (129, 65), (1000,), (64, 64), (3, 5, 7)]
SMALL = TransferConfig(bucket_bytes=64 << 10, slots=3)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Run:
    """A wrapped optimizer whose steps are recorded as parameters and state."""

    def __init__(
        self, dtype: torch.dtype, lanes: float, shapes: Sequence[Any] = SHAPES, **options: Any
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator) for shape in shapes]
        self.parameters = [nn.Parameter(value.to("cuda", dtype)) for value in values]
        inner = torch.optim.AdamW(self.parameters, fused=True, **{"lr": 0.01, **options})
        self.optimizer = HybridDeviceOptimizer(inner, offload_fraction=lanes, transfer=SMALL)

    def fill(self, step: int) -> None:
        generator = torch.Generator().manual_seed(50 + step)
        for index, parameter in enumerate(self.parameters):
            value = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.grad = None if step and (step + index) % 4 == 3 else value

    def outcome(self) -> list[torch.Tensor]:
        state = self.optimizer.state
        found = [p.detach().cpu() for p in self.parameters]
        return found + [v.cpu() for p in self.parameters for v in state[p].values()]


def assert_same(a: Run, b: Run) -> None:
    for mine, other in zip(a.outcome(), b.outcome(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("lanes", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "maximize": True}, {"lr": "tensor"}])
def test_direct_calls_give_the_bits_of_the_class(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], dtype: torch.dtype, lanes: float
) -> None:
    if options.get("lr") == "tensor":
        options = {"lr": torch.tensor(0.01, device="cuda")}
    direct, by_class = Run(dtype, lanes, **options), Run(dtype, lanes, **options)
    settings, call, calls = fused_adam.settings, fused_adam._call, []
    monkeypatch.setattr(fused_adam, "_call", lambda *a: (calls.append(a), call(*a)))
    for step in range(5):
        direct.fill(step)
        direct.optimizer.step()
        by_class.fill(step)
        with monkeypatch.context() as patch:
            patch.setattr(fused_adam, "settings", lambda *a: None)
            by_class.optimizer.step()
    assert calls
    assert settings is fused_adam.settings
    assert_same(direct, by_class)


@pytest.mark.parametrize("lanes", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clipping_inside_the_update_rounds_as_torch_clips(dtype: torch.dtype, lanes: float) -> None:
    plain, clipped = Run(dtype, lanes), Run(dtype, lanes)
    for step in range(4):
        for run in (plain, clipped):
            run.fill(step)
        gradients = [p.grad for p in plain.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        clip = torch.clamp(1.5 / (norm + 1e-6), max=1.0)
        torch.nn.utils.clip_grads_with_norm_(plain.parameters, 1.5, norm)
        plain.optimizer.step()
        clipped.optimizer._clip = clip
        clipped.optimizer.step()
    assert_same(plain, clipped)


MANY = [(16, 16)] * 30 + [(256, 300), (48,), (1024,), (100, 64)]
"""All divisible by 16; the first ones are more than a table has rows, the last ones are cut."""


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("lanes", [0.0, 1.0])
def test_masters_at_once_have_the_bits_of_masters_one_by_one(
    monkeypatch: pytest.MonkeyPatch, lanes: float, clipped: bool
) -> None:
    at_once, one_by_one = (Run(torch.bfloat16, lanes, MANY) for _ in "ab")
    unpack, counts = BucketUpdate._unpack_at_once, []

    def counted(self: BucketUpdate, parts: Any, *rest: Any) -> Any:
        counts.extend(part.table.count for part in parts)
        return unpack(self, parts, *rest)

    monkeypatch.setattr(BucketUpdate, "_unpack_at_once", counted)
    for step in range(6):
        for run in (at_once, one_by_one):
            run.fill(step)
            if clipped:
                run.optimizer.clip_grad_norm_(0.5)
        at_once.optimizer.step()
        before = len(counts)
        with monkeypatch.context() as patch:
            patch.setattr(BucketUpdate, "_parts_at_once", lambda *args: None)
            one_by_one.optimizer.step()
        assert len(counts) == before
    assert max(counts) == 8, "several pieces went at once"
    assert_same(at_once, one_by_one)


@pytest.mark.parametrize("count", [2, 9])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_copies_have_the_bits_of_foreach(
    dtype: torch.dtype, scale_dtype: torch.dtype, count: int
) -> None:
    sources = [torch.randn(5000, device="cuda").to(dtype) for _ in range(count)]
    gradients = [None if i == 1 else g for i, g in enumerate(sources)]
    flat = torch.full((5056 * count,), 7.0, device="cuda")
    targets = [flat[5056 * i : 5056 * i + 5000] for i in range(count)]
    scale = torch.tensor(0.3337, dtype=scale_dtype, device="cuda")
    expected = [g.clone() for g in sources]
    torch._foreach_mul_(expected, scale)
    copy_present(targets, gradients, gradients, scale, flat)
    for i, (target, value) in enumerate(zip(targets, expected, strict=True)):
        if i != 1:
            assert torch.equal(target, value.float()), i


@pytest.mark.parametrize("rounding", [torch.bfloat16, torch.float16])
def test_the_kernel_of_scaled_copies_equals_its_plain_twin(
    monkeypatch: pytest.MonkeyPatch, rounding: torch.dtype
) -> None:
    every = torch.arange(-32768, 32768, dtype=torch.int32, device="cuda").to(torch.int16)
    source = every.view(rounding)
    scale = torch.tensor(0.7531, dtype=rounding, device="cuda")
    by_kernel, plain = (torch.empty(1 << 16, device="cuda") for _ in "ab")
    codec.copy_scaled(source, scale, by_kernel, rounding)
    monkeypatch.setattr(codec, "triton_kernels", lambda: None)
    codec.copy_scaled(source, scale, plain, rounding)
    number = ~plain.isnan()
    assert torch.equal(by_kernel[number], plain[number])
    assert bool(by_kernel[~number].isnan().all())
