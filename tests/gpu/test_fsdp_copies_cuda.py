"""Copies without tables on a GPU: the bits of torch's own, and nothing is sent to the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fsdp_offload.core.comm_buffers import chunk_cat, split_with_sizes_copy
from tests.helpers.profile import copies_to_device

BF16, FP32 = torch.bfloat16, torch.float32
LAYER = ((768, 256), (256, 256), (1024, 256), (256, 1024), (256,), (256,))


def sent(run: Callable[[], object]) -> int:
    """Copies to the device that ``run`` made."""
    run()  # warm
    return copies_to_device(run)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-999, 999, shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, FP32), (BF16, FP32)])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_gradients_are_packed_without_a_table(
    ranks: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    gradients = [random(*shape, dtype=dtypes[0]) for shape in LAYER]
    numel = sum(gradient.numel() for gradient in gradients)
    mine, expected = (torch.zeros(ranks, numel // ranks, dtype=dtypes[1]).cuda() for _ in range(2))
    assert sent(lambda: torch._chunk_cat(gradients, 0, ranks, out=expected)) == 1
    assert sent(lambda: chunk_cat(gradients, 0, ranks, out=mine)) == 0
    assert torch.equal(mine, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_parameters_are_unpacked_without_a_table(ranks: int, dtype: torch.dtype) -> None:
    sizes = [shape[0] * (shape[1] if len(shape) > 1 else 1) // ranks for shape in LAYER]
    gathered = random(ranks, sum(sizes), dtype=dtype)
    mine, expected = ([torch.zeros(ranks, s, dtype=dtype).cuda() for s in sizes] for _ in range(2))
    operation = torch.split_with_sizes_copy
    assert sent(lambda: operation(gathered, sizes, dim=1, out=expected)) == 1
    assert sent(lambda: split_with_sizes_copy(gathered, sizes, dim=1, out=mine)) == 0
    assert all(map(torch.equal, mine, expected))
