"""Copies by a kernel over the link, and what bulk leaves to copies of others."""

from __future__ import annotations

import pytest
import torch

from fsdp_offload import TransferConfig
from fsdp_offload.link import HostRange
from fsdp_offload.pipeline.link import copier, copy_by_kernel

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [1, 7, 8192, 8193, 4 * 8192 + 3, 3_000_001])
def test_every_word_crosses_in_both_directions(numel: int, dtype: torch.dtype) -> None:
    arena = HostRange(
        dtype.itemsize * (numel + 1), device=CUDA, can_pin=True, transfer=TransferConfig()
    )
    host = arena.tensor(0, numel + 1, dtype)
    there = torch.randint(-100, 100, (numel + 1,), device=CUDA).to(dtype)
    host.fill_(-5)

    assert copier(CUDA, pinned=True) is copy_by_kernel
    copy_by_kernel(there[:numel], host[:numel])
    torch.cuda.synchronize()
    assert torch.equal(host[:numel], there[:numel].cpu())
    assert host[numel] == -5

    back = torch.full_like(there, -7)
    for _ in range(3):  # what a kernel has read before is read anew
        host[:numel].add_(1)
        copy_by_kernel(host[:numel], back[:numel])
        torch.cuda.synchronize()
        assert torch.equal(back[:numel].cpu(), host[:numel])
    assert torch.equal(back[:numel], there[:numel] + 3)
    assert back[numel] == -7
    if numel > 1:  # not aligned to 16 bytes
        copy_by_kernel(host[1:numel], back[: numel - 1])
        torch.cuda.synchronize()
        assert torch.equal(back[: numel - 1].cpu(), host[1:numel])
    del host
    arena.close()
