"""Moments in fewer bits: codes, scales, rounding, and the random bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdp_offload.update import moments, rng_key
from fsdp_offload.update.moments import STEPS, Moment
from fsdp_offload.update.rng_key import RngKey, random_bits

BF16, INT8, UINT8 = torch.bfloat16, torch.int8, torch.uint8
NUMEL = 1000


def values_for(dtype: torch.dtype, numel: int = NUMEL) -> Tensor:
    """Of very different sizes, with a block of zeros."""
    values = torch.randn(numel) * torch.rand(numel) ** 4
    values[64:128] = 0
    return values.square() if dtype == UINT8 else values


def packed(
    values: Tensor, dtype: torch.dtype, draw: RngKey | None, half: int = 0
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Codes, scales, and what they stand for."""
    moment = Moment("x", dtype, half)
    codes = torch.empty(values.numel(), dtype=dtype)
    scales = torch.empty(-(-values.numel() // 64)) if moment.has_scales else None
    moments.pack(moment, values, codes, scales, draw)
    again = torch.empty_like(values)
    moments.unpack(moment, codes, scales, again)
    return codes, scales, again


@pytest.mark.parametrize("numel", [1, 63, 64, 65, NUMEL, 0])
@pytest.mark.parametrize("dtype", [BF16, INT8, UINT8])
def test_rounding_what_was_unpacked_to_nearest_gives_the_same_codes(
    dtype: torch.dtype, numel: int
) -> None:
    values = values_for(dtype, numel)
    for draw in (None, (7, 3)):
        codes, scales, again = packed(values, dtype, draw)
        twice, same_scales, final = packed(again, dtype, None)
        assert torch.equal(codes.view(torch.uint8), twice.view(torch.uint8))
        assert scales is None or torch.equal(scales, same_scales)
        assert torch.equal(again, final)


@pytest.mark.parametrize("dtype", [INT8, UINT8])
def test_every_code_comes_back(dtype: torch.dtype) -> None:
    """For many scales: also where a division and a product do not cancel exactly."""
    moment = Moment("x", dtype, 0)
    steps = STEPS[dtype]
    low = 0 if dtype == UINT8 else -steps
    for start in range(low, steps + 1, 63):
        codes = torch.arange(start, start + 64).clamp(max=steps)
        codes[0] = steps  # the block's largest
        codes = codes.repeat(500).to(dtype)
        scales = torch.rand(500) * torch.exp2(torch.randint(-60, 60, (500,)))
        values = torch.empty(codes.numel())
        moments.unpack(moment, codes, scales, values)
        again, same_scales, _ = packed(values, dtype, None)
        assert torch.equal(scales, same_scales)
        assert torch.equal(codes, again)


@pytest.mark.parametrize(("dtype", "limit"), [(BF16, 2**-7), (INT8, 1 / 127), (UINT8, 1 / 255)])
def test_errors_are_bounded(dtype: torch.dtype, limit: float) -> None:
    values = values_for(dtype)
    _, scales, near = packed(values, dtype, None)
    _, _, random = packed(values, dtype, (1, 0))
    step, least = values.abs() * limit, torch.zeros(())
    if scales is not None:  # neighbours of s * (k / n)^2 are s * (2k + 1) / n^2 apart
        top = scales.repeat_interleave(64)[:NUMEL]
        least = top * limit**2  # small second moments become this
        step = 2 * (values.abs() * top).sqrt() * limit + least
    assert bool(((near - values).abs() <= step * 0.5001 + least).all())
    assert bool(((random - values).abs() <= step * 1.0001).all())


@pytest.mark.parametrize("dtype", [BF16, INT8, UINT8])
def test_stochastic_rounding_is_right_in_the_mean(dtype: torch.dtype) -> None:
    values = values_for(dtype, 64)
    if dtype == UINT8:
        values.clamp_(min=float(values.max()) * 1e-3)  # see the floor of small second moments
    total, rounds = torch.zeros(64, dtype=torch.float64), 1000
    spread = 2 * torch.maximum(values.abs(), values.abs().max() * 0.02)
    for update in range(rounds):
        draw = (rng_key.key_of(5, update, 0), 0)
        total += packed(values, dtype, draw)[2]
    # A step is at most 2 % of the spread; the mean of 1000 is within 5 of its deviations.
    assert bool(((total / rounds - values).abs() <= spread * 0.02 * 5 / rounds**0.5).all())


def test_a_second_moment_never_becomes_zero_and_zero_stays() -> None:
    values = torch.zeros(64)
    values[0], values[1:20] = 1.0, 1e-12
    for update in range(20):
        codes, _, again = packed(values, UINT8, (update, 0))
        assert bool((codes[1:20] > 0).all())
        assert bool((again[20:] == 0).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e38])
@pytest.mark.parametrize("dtype", [INT8, UINT8])
def test_what_is_not_finite_spoils_its_block_only(dtype: torch.dtype, bad: float) -> None:
    values = values_for(dtype)
    values[200] = bad
    for draw in (None, (3, 0)):
        again = packed(values, dtype, draw)[2]
        assert bool(again[192:256].isnan().all())
        assert bool(again[:192].isfinite().all())
        assert bool(again[256:].isfinite().all())


def test_bf16_keeps_nan_and_infinity_and_rounds_as_torch() -> None:
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 3.4e38, 1.00390625])
    bits = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    values = torch.cat([values, bits, torch.randn(500)])
    for draw in (None, (9, 0)):
        codes = packed(values, BF16, draw)[0]
        assert torch.equal(codes.isnan(), values.isnan())
        assert torch.equal(codes[1:4].float(), values[1:4])
    number = ~values.isnan()
    nearest = packed(values, BF16, None)[0]
    assert torch.equal(nearest[number], values.bfloat16()[number])


def test_random_bits_follow_the_element_and_not_the_cut() -> None:
    whole = random_bits((123, 1000), 300, 0, torch.device("cpu"))
    for start in (0, 64, 128):
        part = random_bits((123, 1000 + start), 100, 0, torch.device("cpu"))
        assert torch.equal(part, whole[start : start + 100])


def test_random_bits_are_the_ones_that_checkpoints_were_trained_with() -> None:
    """A change of the hash changes the bits of every resumed run."""
    device = torch.device("cpu")
    assert rng_key.seed_of("layers.0.weight") == 3843510026
    assert rng_key.key_of(7, 1, 0) == -456573687
    assert random_bits((-5, (1 << 33) + 9), 4, 0, device).tolist() == [46019, 27989, 52717, 64765]
    assert random_bits((-5, (1 << 33) + 9), 4, 1, device).tolist() == [603, 19800, 44084, 50409]


def test_random_bits_are_uniform_and_independent() -> None:
    device, numel = torch.device("cpu"), 1 << 16
    draws = []
    for update in (1, 2):
        draw = (rng_key.key_of(1, update, 0), 0)
        draws += [random_bits(draw, numel, half, device) for half in (0, 1)]
    draws.append(random_bits((rng_key.key_of(2, 1, 0), 0), numel, 0, device))
    draws.append(random_bits((rng_key.key_of(1, 1, 1), 0), numel, 0, device))
    for drawn in draws:
        assert 0 <= int(drawn.min())
        assert int(drawn.max()) <= 0xFFFF
        counts = torch.bincount(drawn >> 8, minlength=256).double()
        assert float((counts - 256).square().sum() / 256) < 370  # chi squared, 255 degrees: 6 sigma
        assert abs(_correlation(drawn[:-1], drawn[1:])) < 6 / numel**0.5
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert abs(_correlation(a, b)) < 6 / numel**0.5


def _correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])
