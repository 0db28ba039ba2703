"""Triton kernels (CUDA) for moments, and for a whole Adam step. Plain forms: ``moments.*_plain``
and ``tests/helpers/adam_plain.py``.

Divisions and roots round correctly, or are corrected to an exact integer, and only explicit
``tl.fma`` contracts multiplications and additions, so each operation rounds like the torch
operation. Only packing flushes numbers below the normal ones to zero.

``_update`` computes like torch's fused CUDA kernel from 2.11 on
(ATen/native/cuda/fused_adam_utils.cuh): everything in fp32, averages by two fused multiply-adds,
the decay contracted as nvcc does. ``tests/gpu`` compares all bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from ..rng_key import KEY_STEP, signed
from .elementwise import decoded, encoded, pick, pointer, row_of
from .launching import AddressTable, Kernel

COLUMNS: Final = 64
ROWS: Final = 16
"""Blocks of 64 elements per program."""
TILE_NUMEL: Final = ROWS * COLUMNS
_INFINITY: Final = tl.constexpr(0x7F800000)
_LARGEST: Final = tl.constexpr(0x7E800000)  # see moments._LARGEST
_SMALLEST: Final = tl.constexpr(0x00800000)
_GOLDEN: Final = tl.constexpr(0x9E3779B9 - (1 << 32))
_FIRST: Final = tl.constexpr(0x7FEB352D)
_SECOND: Final = tl.constexpr(0x846CA68B - (1 << 32))
_THIRD: Final = tl.constexpr(0x21F0AAAD)
_FOURTH: Final = tl.constexpr(0x735A2D97)


@triton.jit
def _hashed(at, key):  # type: ignore[no-untyped-def]
    mixed = at.to(tl.int32) ^ key
    mixed += (at >> 32).to(tl.int32) * _GOLDEN
    mixed ^= (mixed >> 16) & 0xFFFF
    mixed *= _FIRST
    mixed ^= (mixed >> 15) & 0x1FFFF
    mixed *= _SECOND
    mixed ^= (mixed >> 16) & 0xFFFF
    return mixed


@triton.jit
def _half(hashed, HIGH: tl.constexpr):  # type: ignore[no-untyped-def]
    if HIGH:
        hashed = hashed >> 16
    return hashed & 0xFFFF


@triton.jit
def _store_bf16(values, random, codes, at, inside, STOCHASTIC: tl.constexpr):  # type: ignore[no-untyped-def]
    word = values.to(tl.int32, bitcast=True)
    high = word >> 16
    if STOCHASTIC:
        added = random
    else:
        added = 0x7FFF + (high & 1)
    is_nan = (word & 0x7FFFFFFF) > _INFINITY
    rounded = tl.where(is_nan, high | 0x40, (word + added) >> 16)
    tl.store(codes + at, rounded.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)


@triton.jit
def _load_bf16(codes, at, inside):  # type: ignore[no-untyped-def]
    word = tl.load(codes + at, mask=inside, other=0.0).to(tl.int16, bitcast=True)
    return (word.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _store_codes(  # type: ignore[no-untyped-def]
    values, random, codes, scales, at, rows, inside, blocks, STEPS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Encode like ``moments._to_codes``; ``values`` (rows, 64) are zero outside."""
    word = values.to(tl.int32, bitcast=True)
    size = word & 0x7FFFFFFF
    top = tl.max(size, axis=1)
    is_good = (top >= _SMALLEST) & (top < _LARGEST)
    scale = tl.where(top >= _SMALLEST, top.to(tl.float32, bitcast=True), 0.0)
    tl.store(scales + rows, tl.where(top >= _LARGEST, float("nan"), scale), mask=rows < blocks)
    divisor = tl.where(is_good, scale, 1.0)
    inverse = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
    squares = size.to(tl.float32, bitcast=True) * inverse[:, None] * (STEPS * STEPS * 1.0)
    squares = tl.where(size == top[:, None], STEPS * STEPS * 1.0, squares)
    squares = tl.where(is_good[:, None], squares, 0.0)
    code = tl.floor(tl.sqrt(squares))  # whole numbers, exact in fp32; possibly off by one
    code = tl.where(code * code > squares, code - 1.0, code)
    code = tl.where((code + 1.0) * (code + 1.0) <= squares, code + 1.0, code)
    code = tl.minimum(code, STEPS - 1.0)
    if STOCHASTIC:
        share = random.to(tl.float32) * (1.0 / 65536)
    else:
        share = 0.5
    up = share * (2.0 * code + 1.0) < squares - code * code
    code = tl.where(up, code + 1.0, code)
    if STEPS == 255:
        code = tl.where((size > 0) & is_good[:, None], tl.maximum(code, 1.0), code)
        tl.store(codes + at, code.to(tl.uint8), mask=inside)
    else:
        code = tl.where(word < 0, -code, code)
        tl.store(codes + at, code.to(tl.int8), mask=inside)


@triton.jit
def _load_codes(codes, scales, at, rows, inside, blocks, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + rows, mask=rows < blocks, other=0.0)
    return (code * tl.abs(code)).to(tl.float32) * (1 / (STEPS * STEPS)) * scale[:, None]


@triton.jit
def _unpack_codes(codes, scales, values, numel, STEPS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * 64 + tl.arange(0, 64)[None, :]
    inside = at < numel
    blocks = (numel + 63) // 64
    value = _load_codes(codes, scales, at, rows, inside, blocks, STEPS)
    tl.store(values + at, value, mask=inside)


@triton.jit(do_not_specialize=["key", "first"])
def _pack(  # type: ignore[no-untyped-def]
    values, codes, scales, numel, key, first, STEPS: tl.constexpr, HIGH: tl.constexpr,
    STOCHASTIC: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * 64 + tl.arange(0, 64)[None, :]
    inside = at < numel
    value = tl.load(values + at, mask=inside, other=0.0)
    random = _half(_hashed(at + first, key), HIGH)
    if STEPS == 0:
        _store_bf16(value, random, codes, at, inside, STOCHASTIC)
    else:
        blocks = (numel + 63) // 64
        _store_codes(
            value, random, codes, scales, at, rows, inside, blocks, STEPS, STOCHASTIC
        )  # fmt: skip


@triton.jit
def _stepped(  # type: ignore[no-untyped-def]
    value, g, m, v, power1, power2, lr, beta1, beta2, decay, eps, DECAY: tl.constexpr
):  # fmt: skip
    """Compute one Adam step like torch's fused CUDA kernel."""
    if DECAY:
        value = tl.fma(-(lr * decay), value, value)
    squared = g * g
    m = tl.fma(beta1, m, tl.fma(-beta1, g, g))
    v = tl.fma(beta2, v, tl.fma(-beta2, squared, squared))
    step_size = tl.div_rn(lr, 1.0 - power1)
    correction = tl.sqrt_rn(1.0 - power2)
    denominator = tl.div_rn(tl.sqrt_rn(v), correction) + eps
    return value - tl.div_rn(step_size * m, denominator), m, v


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    weight, remainder, gradient, average, average_scales, square, square_scales, step, powers,
    program, numel, key, first, lr, beta1, beta2, decay, eps,
    BF16_WEIGHT: tl.constexpr, MAXIMIZE: tl.constexpr,
    DECAY: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Update one slice (:class:`..one_kernel.Operands`); ``program`` selects ``ROWS`` blocks."""
    rows = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * 64 + tl.arange(0, 64)[None, :]
    inside = at < numel
    blocks = (numel + 63) // 64
    if BF16_WEIGHT:
        upper = tl.load(weight + at, mask=inside, other=0.0).to(tl.int16, bitcast=True)
        rest = tl.load(remainder + at, mask=inside, other=0)
        value = decoded(upper, rest).to(tl.float32, bitcast=True)
    else:
        value = tl.load(weight + at, mask=inside, other=0.0)
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    if MAXIMIZE:
        g = -g
    if BITS == 8:
        m = _load_codes(average, average_scales, at, rows, inside, blocks, 127)
        v = _load_codes(square, square_scales, at, rows, inside, blocks, 255)
    elif BITS == 16:
        m = _load_bf16(average, at, inside)
        v = _load_bf16(square, at, inside)
    else:
        m = tl.load(average + at, mask=inside, other=0.0)
        v = tl.load(square + at, mask=inside, other=0.0)
    value, m, v = _stepped(
        value, g, m, v, tl.load(powers), tl.load(powers + 1), lr, beta1, beta2, decay, eps, DECAY
    )
    if BF16_WEIGHT:
        upper, rest = encoded(value.to(tl.int32, bitcast=True))
        tl.store(weight + at, upper.to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(remainder + at, rest, mask=inside)
    else:
        tl.store(weight + at, value, mask=inside)
    if BITS == 8:
        hashed = _hashed(at + first, key)
        m = tl.where(inside, m, 0.0)
        v = tl.where(inside, v, 0.0)
        low, high = _half(hashed, False), _half(hashed, True)
        _store_codes(
            m, low, average, average_scales, at, rows, inside, blocks, 127, True
        )  # fmt: skip
        _store_codes(
            v, high, square, square_scales, at, rows, inside, blocks, 255, True
        )  # fmt: skip
    elif BITS == 16:
        hashed = _hashed(at + first, key)
        _store_bf16(m, _half(hashed, False), average, at, inside, True)
        _store_bf16(v, _half(hashed, True), square, at, inside, True)
    else:
        tl.store(average + at, m, mask=inside)
        tl.store(square + at, v, mask=inside)
    if program == 0:
        tl.store(step, tl.load(step) + 1.0)


@triton.jit
def _key(seed, updates):  # type: ignore[no-untyped-def]
    """As ``rng_key.key_of``, for the first pair; ``updates`` times its factor. All int32."""
    mixed = seed + updates
    mixed = (mixed ^ ((mixed >> 16) & 0xFFFF)) * _THIRD
    mixed = (mixed ^ ((mixed >> 15) & 0x1FFFF)) * _FOURTH
    return mixed ^ ((mixed >> 15) & 0x1FFFF)


@triton.jit
def _numel(at, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the number at ``at``; ``ALIGNED`` declares it a multiple of 16, which the compiler
    accepts only where the number is loaded."""
    found = tl.load(at)
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit(do_not_specialize=["updates", "g0", "g1", "g2", "g3", "g4", "g5", "g6", "g7"])
def _adam(  # type: ignore[no-untyped-def]
    table, updates: tl.int32, g0: tl.int64, g1: tl.int64, g2: tl.int64, g3: tl.int64,
    g4: tl.int64, g5: tl.int64, g6: tl.int64, g7: tl.int64,
    lr, beta1, beta2, decay, eps,
    BF16_WEIGHT: tl.constexpr, BF16_GRADIENT: tl.constexpr, MAXIMIZE: tl.constexpr,
    DECAY: tl.constexpr, BITS: tl.constexpr, ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Update up to eight slices; ``table`` has vectors (weight, remainder, codes and scales of both
    moments), scalars (step and powers) and numbers (first index and seed)."""
    program = tl.program_id(0)
    which = row_of(program, table, WIDTH)
    gradient = pick(which, g0, g1, g2, g3, g4, g5, g6, g7)
    row = table + which * WIDTH
    weight_type: tl.constexpr = tl.bfloat16 if BF16_WEIGHT else tl.float32
    gradient_type: tl.constexpr = tl.bfloat16 if BF16_GRADIENT else tl.float32
    wide: tl.constexpr = tl.bfloat16 if BITS == 16 else tl.float32
    average_type: tl.constexpr = tl.int8 if BITS == 8 else wide
    square_type: tl.constexpr = tl.uint8 if BITS == 8 else wide
    _update(
        pointer(tl.load(row + 1), weight_type, ALIGNED),
        pointer(tl.load(row + 2), tl.int16, ALIGNED),
        pointer(gradient, gradient_type, ALIGNED),
        pointer(tl.load(row + 3), average_type, ALIGNED),
        pointer(tl.load(row + 4), tl.float32, ALIGNED),
        pointer(tl.load(row + 5), square_type, ALIGNED),
        pointer(tl.load(row + 6), tl.float32, ALIGNED),
        pointer(tl.load(row + 7), tl.float32, False),
        pointer(tl.load(row + 8), tl.float32, False),
        program - tl.load(row).to(tl.int32), _numel(row + 9, ALIGNED),
        _key(tl.load(row + 11).to(tl.int32), updates), tl.load(row + 10),
        lr, beta1, beta2, decay, eps,
        BF16_WEIGHT, MAXIMIZE, DECAY, BITS, ROWS,
    )  # fmt: skip


_UNPACK, _PACK = (Kernel(kernel, enable_fp_fusion=False) for kernel in (_unpack_codes, _pack))
_ADAM = Kernel(_adam, ignores_integers=True, enable_fp_fusion=False)


def _programs(numel: int) -> int:
    return int(triton.cdiv(numel, TILE_NUMEL))


def unpack_codes(codes: Tensor, scales: Tensor, values: Tensor, steps: int) -> None:
    """As :func:`..moments.unpack`; ``steps``: the largest code."""
    numel = values.numel()
    _UNPACK.launch(_programs(numel), (codes, scales, values), (numel,), STEPS=steps, ROWS=ROWS)


def pack_moment(
    values: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    steps: int,
    key: int,
    first: int,
    half: int,
    *,
    stochastic: bool,
) -> None:
    """As :func:`..moments.pack`; ``steps``: the largest code, or 0 for bf16."""
    some, numel = values if scales is None else scales, values.numel()
    _PACK.launch(
        _programs(numel), (values, codes, some), (numel, key, first),
        STEPS=steps, HIGH=bool(half), STOCHASTIC=stochastic, ROWS=ROWS,
    )  # fmt: skip


def adam(
    table: AddressTable,
    gradients: Sequence[Tensor],
    updates: int,
    numbers: tuple[float, ...],
    **flags: bool | int,
) -> None:
    """Update all slices of a table, for :meth:`..one_kernel.AdamLaunch.run`.

    ``numbers``: lr, both betas, decay, eps. ``flags``: the constants BF16_WEIGHT, BF16_GRADIENT,
    MAXIMIZE, DECAY and BITS, in this order.
    """
    rows, is_aligned = table.rows()
    addresses = [gradient.data_ptr() for gradient in gradients]
    for address in addresses:
        is_aligned &= not address & 15
    addresses += [0] * (table.MOST - len(addresses))
    _ADAM.launch(
        table.programs, (rows,), (signed(updates * KEY_STEP), *addresses), numbers,
        **flags, ALIGNED=is_aligned, WIDTH=table.width, ROWS=ROWS,
    )  # fmt: skip
