"""Which copies over the link are left to a kernel, and by what words it copies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fsdp_offload.pipeline import link


class OnDevice(Tensor):
    """Plays a tensor on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Of each copy that a kernel was asked for."""
    seen: list[torch.dtype] = []

    def copy(source: Tensor, target: Tensor) -> None:
        assert source.dtype == target.dtype
        seen.append(source.dtype)
        target.copy_(source)

    monkeypatch.setattr(link, "triton_kernels", lambda: SimpleNamespace(copy_across=copy))
    return seen


@pytest.mark.parametrize(
    ("dtype", "numel", "word"),
    [
        (torch.float32, 7, torch.int32),
        (torch.int64, 1, torch.int32),
        (torch.bfloat16, 8, torch.int32),
        (torch.bfloat16, 199, torch.int16),
        (torch.bool, 3, torch.int8),
        (torch.float32, 0, torch.int32),
    ],
)
def test_a_kernel_copies_every_byte_by_the_largest_words_that_fit(
    words: list[torch.dtype], dtype: torch.dtype, numel: int, word: torch.dtype
) -> None:
    host = torch.arange(1, numel + 1).to(dtype)
    there = torch.zeros(numel, dtype=dtype).as_subclass(OnDevice)
    link.copy_across(host, there, pinned=True)
    back = torch.zeros_like(host)
    link.copy_across(there, back, pinned=True)
    assert torch.equal(back, host)
    assert words == [word] * 2


@pytest.mark.parametrize("pinned", [False, True])
def test_pageable_memory_and_the_cpu_are_left_to_torch(
    words: list[torch.dtype], *, pinned: bool
) -> None:
    source = torch.arange(5.0)
    target = torch.zeros(5)
    link.copy_across(source, target if pinned else target.as_subclass(OnDevice), pinned=pinned)
    assert torch.equal(target, source)
    assert words == []
