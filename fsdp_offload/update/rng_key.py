"""Random bits for rounding moments.

They are a hash of (parameter's name, number of its updates, index of the element in the global
tensor), not a generator, so replicas, any division into buckets, and resumed runs get the same
bits. One 32-bit hash serves two kinds of state; the first uses the lower half.
"""

from __future__ import annotations

import hashlib
from typing import Final

import torch
from torch import Tensor

RngKey = tuple[int, int]
"""Selects the random bits of one update: an int32 of :func:`key_of`, and the index of the first
element in the global tensor."""

_MASK: Final = 0xFFFFFFFF


def seed_of(fqn: str) -> int:
    """Hash a parameter's name to 32 bits."""
    return int.from_bytes(hashlib.blake2b(fqn.encode(), digest_size=4).digest(), "little")


KEY_STEP: Final = 0x9E3779B9
"""Difference between the seeds of two updates."""


def key_of(seed: int, updates: int, pair: int) -> int:
    """Return the int32 key of the random bits of one update. ``pair``: pair of kinds, 0 for the
    first two."""
    mixed = (seed + updates * KEY_STEP + pair * 0x85EBCA6B) & _MASK
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & _MASK
    return signed(mixed ^ (mixed >> 15))


def signed(word: int) -> int:
    """Return the low 32 bits as int32."""
    word &= _MASK
    return word - (1 << 32) if word >> 31 else word


def random_bits(rng_key: RngKey, numel: int, half: int, device: torch.device) -> Tensor:
    """Return 16 bits per element, as int32 in [0, 65535]: the Triton hash in torch operations."""
    key, first = rng_key
    at = torch.arange(first, first + numel, dtype=torch.int64, device=device)
    mixed = _low_word(at) ^ key
    mixed += _low_word(at >> 32) * (0x9E3779B9 - (1 << 32))
    mixed ^= (mixed >> 16) & 0xFFFF
    mixed *= 0x7FEB352D
    mixed ^= (mixed >> 15) & 0x1FFFF
    mixed *= 0x846CA68B - (1 << 32)
    mixed ^= (mixed >> 16) & 0xFFFF
    return (mixed >> 16 if half else mixed) & 0xFFFF


def _low_word(at: Tensor) -> Tensor:
    return at.view(torch.int32)[::2].clone()
