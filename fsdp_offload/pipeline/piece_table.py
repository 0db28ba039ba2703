"""Several pieces of a bucket for one kernel: a table on the device says where each of them lies.

A launch costs the host more than the kernel takes on the device for a small piece, and the pieces
of a bucket differ in nothing but addresses and a few numbers. Only gradients lie elsewhere in every
step; their addresses go along with the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

import torch
from torch import Tensor

TILE_NUMEL: Final = 1024
"""Elements that one program of the kernel updates."""


class PieceTable:
    """Up to ``MOST`` pieces, none of them empty, all with remainders or all without.

    A row is (int64): the piece's first program; addresses of weight, remainder, first moment, its
    scales, second moment, its scales, step; elements; index of the first one in the global tensor;
    seed. What a piece does not have is the address of something else. Rows without a piece begin
    after all programs.

    Args:
        tensors: per piece weight, remainder, codes and scales of both moments, step.
        firsts: per piece, index of its first element in the global tensor.
        seeds: per piece.
    """

    MOST: ClassVar = 8
    WIDTH: ClassVar = 11

    def __init__(
        self,
        tensors: Sequence[Sequence[Tensor | None]],
        firsts: Sequence[int],
        seeds: Sequence[int],
    ) -> None:
        assert 0 < len(tensors) <= self.MOST
        weight, remainder, codes, scales, *_ = tensors[0]
        assert weight is not None
        assert codes is not None
        self.has_remainders, self.is_int8 = remainder is not None, scales is not None
        self._tensors = [weight if t is None else t for row in tensors for t in row]
        self._numels = [t.numel() for t in self._tensors[:: len(tensors[0])]]
        self._firsts, self._seeds = firsts, seeds
        self._starts = [0]
        for numel in self._numels:
            self._starts.append(self._starts[-1] - -numel // TILE_NUMEL)
        self.programs = self._starts.pop()
        self._addresses: list[int] = []  # that are on the device
        self._rows = torch.empty(self.MOST * self.WIDTH, dtype=torch.int64, device=weight.device)
        self._fits = False

    def rows(self) -> Tensor | None:
        """The table, 1-D int64 on the device, as the current stream sees it; None: an address is
        not aligned to 16 bytes, or a number of elements not divisible by 16."""
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        if addresses != self._addresses:
            self._write(addresses)
        return self._rows if self._fits else None

    def _write(self, addresses: list[int]) -> None:
        per_piece = len(addresses) // len(self._numels)
        values: list[int] = []
        self._fits = True
        for index, numel in enumerate(self._numels):
            own = addresses[index * per_piece : (index + 1) * per_piece]
            self._fits &= not any(address % 16 for address in own[:-1]) and numel % 16 == 0
            values += [self._starts[index], *own, numel, self._firsts[index], self._seeds[index]]
        missing = self.MOST - len(self._numels)
        values += [self.programs, *[0] * (self.WIDTH - 1)] * missing
        # Pageable memory: it has been read when this returns, and no stream is waited for.
        self._rows.copy_(torch.tensor(values, dtype=torch.int64), non_blocking=True)
        self._addresses = addresses
