"""Host memory that holds a copy of what is being saved, so that training may go on."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ..config import TransferConfig
from ..device import Gateway
from ..memory import HostArena, check_host_budget, local_ranks
from .blocks import BLOCK_BYTES, TensorSource, run_all

ALIGNMENT_BYTES = 64


class Staging:
    """An arena of a fixed size, pinned if the device can.

    Args:
        nbytes: its size.
        gateway: of the device that the copies come from.

    Raises:
        HostMemoryError: it does not fit.
    """

    def __init__(self, nbytes: int, gateway: Gateway) -> None:
        check_host_budget(nbytes, local_ranks=local_ranks(), budget_bytes=None)
        self.nbytes = nbytes
        self._arena = HostArena(
            nbytes,
            device=gateway.device,
            can_pin=gateway.can_pin,
            transfer=TransferConfig(pin="prefer"),
        )

    def choose(self, sizes: Sequence[int]) -> list[bool]:
        """Which of values with these ``sizes`` in bytes fit, the largest first."""
        chosen, free = [False] * len(sizes), self.nbytes
        for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            if aligned(sizes[index]) <= free:
                chosen[index] = True
                free -= aligned(sizes[index])
        return chosen

    def copy(self, sources: Sequence[TensorSource]) -> list[TensorSource]:
        """Copies of ``sources``; they stay until the next call."""
        copies, jobs, offset = [], [], 0
        for source in sources:
            region = self._arena.tensor(offset, source.nbytes, torch.uint8)
            offset += aligned(source.nbytes)
            copies.append(TensorSource(region))
            jobs += [
                functools.partial(_copy, source, region, start)
                for start in range(0, source.nbytes, BLOCK_BYTES)
            ]
        run_all(jobs)
        return copies

    def close(self) -> None:
        """Give the memory back."""
        self._arena.close()


def aligned(nbytes: int) -> int:
    """Bytes that a value takes in the arena."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _copy(source: TensorSource, region: torch.Tensor, start: int) -> None:
    stop = min(start + BLOCK_BYTES, source.nbytes)
    with torch.no_grad():
        region[start:stop].copy_(source.block(start, stop))
