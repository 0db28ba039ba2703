"""Comparison of values by their bits, and fp32 masters that bf16 weights and remainders make."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from tests.helpers.compare import rounded

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Mismatch(AssertionError):
    """The two sides differ."""


def master_of(shard: Tensor, state: dict[str, Any]) -> Tensor:
    """The fp32 value that a shard and its remainder, or a whole master, stand for."""
    if "master" in state:
        return state["master"]
    return joined(shard, state["master_remainder"].contiguous().view(torch.int16))


def joined(shard: Tensor, remainder: Tensor) -> Tensor:
    """bf16 and the low half of an fp32 word, added as integers; a zero stays one."""
    value = shard.contiguous().view(torch.int16).to(torch.int32) << 16
    words = value + remainder.to(torch.int32)
    return torch.where(value << 1 == 0, value, words).view(torch.float32)


def remainder_of(master: Tensor) -> Tensor:
    """What bf16 rounding leaves of each number: int32, to be added to the rounding's word."""
    value = rounded(master, torch.bfloat16).contiguous().view(torch.int16).to(torch.int32) << 16
    return master.contiguous().view(torch.int32) - value


def check_same(mine: Any, plain: Any, what: str) -> None:
    """Equal dtype, shape and bits; any NaN equals any other."""
    if not isinstance(plain, Tensor) or not isinstance(mine, Tensor):
        if isinstance(mine, Tensor) or isinstance(plain, Tensor) or mine != plain:
            raise Mismatch(f"{what}: {mine!r}, plain {plain!r}")
        return
    if (mine.dtype, mine.shape) != (plain.dtype, plain.shape):
        raise Mismatch(
            f"{what}: {mine.dtype} {tuple(mine.shape)}, plain {plain.dtype} {tuple(plain.shape)}"
        )
    if torch.equal(_bits(mine), _bits(plain)):
        return
    wrong = (mine != plain) | (mine.signbit() != plain.signbit())
    wrong &= ~(mine.isnan() & plain.isnan())
    if wrong.any():
        first = int(wrong.reshape(-1).nonzero()[0])
        values = [t.reshape(-1)[first].item() for t in (mine, plain)]
        raise Mismatch(
            f"{what}: {int(wrong.sum())} of {mine.numel()} elements differ, "
            f"element {first} is {values[0]!r}, plain {values[1]!r}"
        )


def _bits(tensor: Tensor) -> Tensor:
    """As integers, so that signed zeros are told apart."""
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(_INTEGERS[tensor.itemsize])
