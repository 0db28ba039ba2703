"""One Adam step as the CUDA kernel computes it, in torch operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_offload.update import codec, moments
from fsdp_offload.update.moments import Moment
from fsdp_offload.update.one_kernel import AdamConstants, Operands
from fsdp_offload.update.rng_key import key_of


def adam_plain(
    both: Sequence[Moment],
    operands: Operands,
    gradient: Tensor,
    updates: int,
    constants: AdamConstants,
) -> None:
    """As ``one_kernel.AdamLaunch.run`` of one slice. ``both``: how the moments are kept; empty: in
    fp32."""
    weight, remainder, average, square, step, powers, origin, seed = operands
    rng_key = (key_of(seed, updates, 0), origin)
    lr, beta1, beta2, decay, eps = (
        torch.tensor(number, dtype=torch.float32, device=weight.device) for number in constants[:5]
    )
    master = weight
    if remainder is not None:
        master = torch.empty_like(weight, dtype=torch.float32)
        codec.decode_plain(weight, remainder, master)
    g = gradient.float()
    g = -g if constants.maximize else g
    m, v = (torch.empty_like(g) for _ in range(2)) if both else (average[0], square[0])
    for moment, kept, values in zip(both, (average, square), (m, v), strict=False):
        moments.unpack_plain(moment, *kept, values)
    if constants.decay:
        master = _fma(-(lr * decay), master, master)
    squared = g * g
    m = _fma(beta1, m, _fma(-beta1, g, g))
    v = _fma(beta2, v, _fma(-beta2, squared, squared))
    step += 1
    root = v.double().sqrt().float()  # correctly rounded; in fp32 torch may be one ulp off
    correction = (1 - powers[1]).double().sqrt().float()
    step_size = lr / (1 - powers[0])
    master = master - step_size * m / (root / correction + eps)
    if remainder is None:
        weight.copy_(master)
    else:
        codec.encode_plain(master, weight, remainder)
    for moment, kept, values in zip(both, (average, square), (m, v), strict=False):
        moments.pack_plain(moment, values, *kept, rng_key)
    if not both:
        average[0].copy_(m)
        square[0].copy_(v)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c``, rounded once (but for a tie in 2^29)."""
    return (a.double() * b.double() + c.double()).float()
