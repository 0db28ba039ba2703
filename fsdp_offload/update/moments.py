"""Moments in fewer bits: unpacked to fp32 before an update, and packed after it.

A value is rounded to bf16. *Nearest* stalls: with ``beta2 = 0.999`` a squared average moves by a
thousandth of its distance, which is less than half a bf16 step (1/512 to 1/256 of the value), so it
stops following. *Stochastic* rounding rounds up with a probability equal to the part that is cut
off, so the average is right in expectation.

Blocks of 64 elements share one fp32 scale, the largest magnitude of the block. Codes are spaced by
squares: code k stands for ``scale * (k / 127)^2`` with the sign of k (first moment, int8), or for
``scale * (k / 255)^2`` (second moment, uint8), so that small values next to a large one keep their
relative precision. The stochastic choice between two neighbouring codes is unbiased in the value,
not in the code. A second moment that is not zero never becomes zero, because one over its root
scales the step. A block with a NaN or an infinity becomes all NaN. Rounding decoded values to
nearest gives the same codes and scales again, so checkpoints save decoded values.

Two implementations give the same bits: torch operations (``*_plain``) and Triton (CUDA).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ..plan import Kind
from .codec import QUIET_BIT
from .kernels import moment_kernels
from .rng_key import RngKey, random_bits
from .schema import Schema

BLOCK_NUMEL: Final = 64
"""Elements that share a scale. Divides every cut between buckets, so no block spans two."""
STEPS: Final = {torch.int8: 127, torch.uint8: 255}
"""The largest code."""
CODED: Final = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
"""State that ``moments="int8"`` packs, with the dtype of codes; other state keeps its dtype."""
SCALE: Final = "_scale"

_LARGEST: Final = 0x7E800000  # 2^126: below it, the inverse is a normal number
_SMALLEST: Final = 0x00800000  # the smallest normal number; kernels flush smaller ones to zero


@dataclass(frozen=True)
class Moment:
    """How one kind of state is stored in fewer bits."""

    name: str
    dtype: torch.dtype  # bf16, int8 (signed) or uint8 (never negative)
    position: int  # among the moments of its parameter; chooses its 16 random bits

    @property
    def has_scales(self) -> bool:
        """Whether blocks have a scale, stored as one more kind."""
        return self.dtype in STEPS

    @property
    def scale_kind(self) -> Kind:
        """Kind of the stored scales."""
        return Kind(self.name + SCALE, torch.float32, BLOCK_NUMEL)

    @property
    def kinds(self) -> list[Kind]:
        """Stored kinds: codes, and scales if blocks have them."""
        return [Kind(self.name, self.dtype), *([self.scale_kind] if self.has_scales else [])]


Kept = tuple[Tensor, Tensor | None]
"""Codes and scales."""


PackedMoment = tuple[Moment, Kept, Tensor]
"""Packed memory of one moment of one slice, and its values: fp32, in scratch memory."""


def moments_of(
    schema: Schema, compute: torch.dtype, chosen: torch.dtype | str | None
) -> tuple[Moment, ...]:
    """Choose the kinds of ``schema`` to store in fewer bits than the update uses: bf16, or
    "int8"."""
    if chosen is None or compute != torch.float32 or not schema.elementwise:
        return ()
    kinds = [kind for kind in schema.role("like") if (kind.dtype or compute) == torch.float32]
    dtypes: dict[str, torch.dtype] = {kind.name: torch.bfloat16 for kind in kinds}
    if chosen == "int8":
        # Without a step count, negative zeros mark state that was never set.
        has_step = any(kind.name == "step" for kind in schema.kinds)
        dtypes = {k.name: CODED[k.name] for k in kinds if k.name in CODED and has_step}
    return tuple(
        Moment(name, dtype, position) for position, (name, dtype) in enumerate(dtypes.items())
    )


# --------------------------------------------------------------------------- pack and unpack


def unpack(moment: Moment, codes: Tensor, scales: Tensor | None, values: Tensor) -> None:
    """Decode the codes into ``values`` (1-D, fp32); ``scales``: one per 64 elements."""
    if values.is_cuda and moment.has_scales and (kernels := moment_kernels()) is not None:
        kernels.unpack_codes(codes, scales, values, STEPS[moment.dtype])
    else:
        unpack_plain(moment, codes, scales, values)


def pack(
    moment: Moment, values: Tensor, codes: Tensor, scales: Tensor | None, rng_key: RngKey | None
) -> None:
    """Encode ``values`` (1-D, fp32) as codes and scales; ``rng_key``: None for nearest."""
    if values.is_cuda and (kernels := moment_kernels()) is not None:
        key, first = rng_key or (0, 0)
        kernels.pack_moment(
            values, codes, scales, STEPS.get(moment.dtype, 0), key, first, moment.position % 2,
            stochastic=rng_key is not None,
        )  # fmt: skip
    else:
        pack_plain(moment, values, codes, scales, rng_key)


def unpack_plain(moment: Moment, codes: Tensor, scales: Tensor | None, values: Tensor) -> None:
    """As :func:`unpack`, in torch operations."""
    if not moment.has_scales:
        values.copy_(codes)
        return
    assert scales is not None
    steps = STEPS[moment.dtype]
    wide = codes.to(torch.int32)
    shares = (wide * wide.abs()).to(torch.float32) * (1 / (steps * steps))  # 1 for the largest
    values.copy_(shares * _per_element(scales, codes.numel()))


def pack_plain(
    moment: Moment, values: Tensor, codes: Tensor, scales: Tensor | None, rng_key: RngKey | None
) -> None:
    """As :func:`pack`, in torch operations."""
    random = None
    if rng_key is not None:
        random = random_bits(rng_key, values.numel(), moment.position % 2, values.device)
    if not moment.has_scales:
        codes.view(torch.int16).copy_(_to_bf16(values, random))
        return
    assert scales is not None
    scales.copy_(_scales(values))
    codes.copy_(_to_codes(values, _per_element(scales, values.numel()), random, moment.dtype))


def _floor_root(squares: Tensor) -> Tensor:
    root = squares.sqrt().to(torch.int32)  # possibly off by one
    root -= ((root * root).to(torch.float32) > squares).to(torch.int32)
    return root + (((root + 1) * (root + 1)).to(torch.float32) <= squares).to(torch.int32)


def _to_bf16(values: Tensor, random: Tensor | None) -> Tensor:
    word = values.view(torch.int32)
    high = word >> 16
    added = random if random is not None else 0x7FFF + (high & 1)
    return torch.where(values.isnan(), high | QUIET_BIT, (word + added) >> 16).to(torch.int16)


def _per_element(scales: Tensor, numel: int) -> Tensor:
    return scales.repeat_interleave(BLOCK_NUMEL)[:numel]


def _scales(values: Tensor) -> Tensor:
    """Return the largest magnitude of each block; NaN from 2^126 on, 0 below the normal numbers."""
    blocks = torch.nn.functional.pad(values.abs(), (0, -values.numel() % BLOCK_NUMEL))
    words = blocks.view(torch.int32).view(-1, BLOCK_NUMEL)
    top = words.amax(dim=1) if words.numel() else words[:, 0]
    scales = torch.where(top < _SMALLEST, 0.0, top.view(torch.float32))
    return torch.where(top >= _LARGEST, torch.nan, scales)


def _to_codes(values: Tensor, scales: Tensor, random: Tensor | None, dtype: torch.dtype) -> Tensor:
    steps = STEPS[dtype]
    magnitudes = values.abs()
    inverse = torch.ones_like(scales) / torch.where(scales > 0, scales, 1.0)
    squares = magnitudes * inverse * float(steps * steps)
    squares = torch.where(magnitudes == scales, float(steps * steps), squares)
    squares = torch.where(scales > 0, squares, 0.0)
    below = _floor_root(squares).clamp(max=steps - 1)
    odd = (2 * below + 1).to(torch.float32)  # between the squares of two neighbours
    share = 0.5 if random is None else random.to(torch.float32) * (1.0 / 65536)
    up = share * odd < squares - (below * below).to(torch.float32)
    codes = below + up.to(torch.int32)
    if dtype == torch.uint8:
        return torch.where((magnitudes > 0) & (scales > 0), codes.clamp(min=1), codes)
    return torch.where(values.view(torch.int32) < 0, -codes, codes)
