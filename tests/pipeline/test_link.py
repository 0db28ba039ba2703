"""Which copies over the link are left to a kernel, and by what words it copies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fsdp_offload.pipeline import link

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


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
    source = torch.arange(1, numel + 1).to(dtype)
    target = torch.zeros_like(source)
    link.copy_by_kernel(source, target)
    assert torch.equal(target, source)
    assert words == [word]


def test_what_is_too_long_for_a_kernel_is_left_to_torch(
    words: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "MOST_WORDS", 8)
    source, target = torch.arange(8.0), torch.zeros(8)
    link.copy_by_kernel(source, target)
    assert torch.equal(target, source)
    assert words == []


@pytest.mark.parametrize("works", [False, True])
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_a_kernel_is_for_page_locked_memory_of_a_gpu_on_which_it_works(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, *, pinned: bool, works: bool
) -> None:
    monkeypatch.setattr(link, "_kernel_works", lambda _: works)
    found = link.copier(device, pinned=pinned)
    by_kernel = device == CUDA and pinned and works
    assert found is (link.copy_by_kernel if by_kernel else link.copy_by_torch)


def test_without_triton_no_kernel_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "triton_kernels", lambda: None)
    link._kernel_works.cache_clear()
    assert not link._kernel_works(CUDA)
    link._kernel_works.cache_clear()
    target = torch.zeros(5)
    link.copy_by_torch(torch.arange(5.0), target)
    assert target.tolist() == [0, 1, 2, 3, 4]
