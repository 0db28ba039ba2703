"""Text of the Python standard library as byte tokens: a real text that needs no download."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

MAX_BYTES = 16 << 20
VOCABULARY = 256
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests"})
VALIDATION_SHARE = 20  # one part of so many, at the end


def standard_library(max_bytes: int = MAX_BYTES) -> Tensor:
    """The first ``max_bytes`` of its modules in sorted order, uint8, 1D."""
    root = Path(sysconfig.get_paths()["stdlib"])
    data = bytearray()
    for file in sorted(root.rglob("*.py")):
        if len(data) >= max_bytes:
            break
        if file.is_file() and _LEFT_OUT.isdisjoint(file.relative_to(root).parts):
            with file.open("rb") as stream:
                content = stream.read(max_bytes - len(data))
            if b"\0" not in content:
                data += content
    return torch.frombuffer(data, dtype=torch.uint8)


def split(data: Tensor) -> tuple[Tensor, Tensor]:
    """Text to train on, and text to validate with."""
    at = len(data) * (VALIDATION_SHARE - 1) // VALIDATION_SHARE
    return data[:at], data[at:]


def windows(data: Tensor, starts: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 ``(len(starts), seq)``, cut out of ``data`` on its device."""
    rows = data[starts[:, None] + torch.arange(seq + 1, device=data.device)].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def random_starts(data: Tensor, steps: int, batch: int, seq: int, seed: int) -> Tensor:
    """Where the rows of each step begin, int64 ``(steps, batch)`` on the data's device."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - seq, (steps, batch), generator=generator)
    return starts.to(data.device)


def even_starts(data: Tensor, count: int, seq: int) -> Tensor:
    """``count`` beginnings spread evenly over ``data``."""
    last = len(data) - seq - 1
    return torch.linspace(0, last, count, dtype=torch.float64).long().to(data.device)
