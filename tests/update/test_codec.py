from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdp_offload.update import codec

REMAINDERS = (-32768, -32767, -1, 0, 1, 32766, 32767)
BLOCK = 1 << 18


def from_bits(bits: Tensor) -> Tensor:
    """fp32 numbers of int64 (or int32) bit patterns."""
    return bits.to(torch.int32).view(torch.float32)


def to_bits(master: Tensor) -> Tensor:
    return master.view(torch.int32)


def encoded(master: Tensor) -> tuple[Tensor, Tensor]:
    """The value, and the remainder as the int16 that it is."""
    value = torch.empty(master.numel(), dtype=torch.bfloat16)
    remainder = torch.empty_like(value)
    codec.encode(master, value, remainder)
    return value, remainder.view(torch.int16)


def decoded(value: Tensor, remainder: Tensor) -> Tensor:
    return codec.decoded(value, remainder.view(torch.bfloat16))


def all_values() -> Tensor:
    """The 65536 bf16 patterns."""
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def check_round_trip(master: Tensor) -> None:
    """Exact for every number; every NaN stays one, in the value and in the decoded master."""
    value, remainder = encoded(master)
    again = decoded(value, remainder)
    is_nan = master.isnan()
    assert torch.equal(value.isnan(), is_nan)
    assert torch.equal(again.isnan(), is_nan)
    unchanged = to_bits(again) == to_bits(master)
    assert bool((unchanged | is_nan).all())


def check_half_ulp(master: Tensor) -> None:
    """A finite value is at most half a bf16 ulp away, and is what rounding to nearest gives."""
    value, _ = encoded(master)
    exact, near = master.double(), value.double()
    exponent = torch.frexp(master).exponent.clamp(min=-125).double()  # of [0.5, 1)
    half_ulp = torch.exp2(exponent - 9)
    finite = near.isfinite() & exact.isfinite()
    assert bool(((near - exact).abs() <= half_ulp)[finite].all())
    tie = (to_bits(master) & 0xFFFF) == 0x8000
    to_nearest = (value.view(torch.int16) == master.bfloat16().view(torch.int16)) | tie
    assert bool(to_nearest[~exact.isnan()].all())


def test_decoding_adds_the_remainder_to_the_bits_of_the_value() -> None:
    values = all_values()
    for remainder in REMAINDERS:
        expected = (values.view(torch.int16).to(torch.int64) << 16) + remainder
        found = decoded(values, torch.full((1 << 16,), remainder, dtype=torch.int16))
        right = to_bits(found) == expected.to(torch.int32)
        assert bool(right[values != 0].all())
        assert remainder < 0 or bool(right.all())


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_weight_set_to_zero_from_outside_is_a_number_whatever_it_was(zero: float) -> None:
    remainders = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    master = decoded(torch.full((1 << 16,), zero, dtype=torch.bfloat16), remainders)
    assert float(master.abs().max()) < 1e-40
    assert bool((master.signbit() == (str(zero) == "-0.0")).all())


def test_a_sample_of_every_exponent_is_exact_and_within_half_an_ulp() -> None:
    """16.7 million patterns: every high half with 256 low halves, the boundaries among them."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 1 << 16, (65536, 250), generator=generator, dtype=torch.int32)
    fixed = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    low = torch.cat([drawn, fixed.expand(65536, 6)], dim=1)
    bits = (torch.arange(1 << 16, dtype=torch.int32)[:, None] << 16) + low
    master = bits.flatten().view(torch.float32)
    assert master.numel() >= 1 << 24
    check_round_trip(master)
    check_half_ulp(master.view(-1, 16)[:, 15].contiguous())


@pytest.mark.long
@pytest.mark.parametrize("sixteenth", range(16))
def test_every_fp32_pattern_is_exact(sixteenth: int) -> None:
    """And so within half an ulp: the remainder is the distance in fp32 patterns."""
    for block in range(sixteenth << 28, (sixteenth + 1) << 28, BLOCK):
        check_round_trip(from_bits(torch.arange(block, block + BLOCK)))


def test_empty_tensors_are_fine() -> None:
    value, remainder = encoded(torch.empty(0))
    assert decoded(value, remainder).numel() == 0
    codec.reseed_where_changed(torch.empty(0, dtype=torch.float16), torch.empty(0))


# --------------------------------------------------------------------------- fp16 masters


def half(bits: Tensor) -> Tensor:
    """fp16 numbers of integer bit patterns."""
    return bits.to(torch.int16).view(torch.float16)


def test_masters_that_round_to_their_shard_are_kept() -> None:
    """Every finite fp16 value, with masters up to half an ulp away on both sides."""
    values = half(torch.arange(1 << 16))
    values = values[values.isfinite()]
    for offset in (-0.49, -1e-4, 0.0, 1e-4, 0.49):
        up = torch.nextafter(values, torch.full_like(values, torch.inf)).double()
        down = torch.nextafter(values, torch.full_like(values, -torch.inf)).double()
        exact = values.double()
        gap = torch.minimum(up - exact, exact - down)
        master = (exact + offset * gap).float()
        kept = master.half().view(torch.int16) == values.view(torch.int16)
        expected = torch.where(kept, master, values.float())
        assert float(kept.double().mean()) > 0.99
        codec.reseed_where_changed(values, master)
        assert torch.equal(to_bits(master), to_bits(expected))


def test_masters_of_weights_written_from_outside_are_replaced_one_by_one() -> None:
    master = torch.tensor([1.0001, 2.0002, 3.0003, 1e-9, -1e-9])
    shard = master.half()
    shard[1] = 5.0
    shard[3] = -0.0  # the master rounds to +0
    expected = [master[0].item(), 5.0, master[2].item(), 0.0, master[4].item()]
    codec.reseed_where_changed(shard, master)
    assert master.tolist() == expected
    assert bool(master[3].signbit())
