"""Copies without tables on a GPU: the bits of torch's own, and nothing is sent to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_offload import plain_copies
from fsdp_offload.plain_copies import all_gather_copy_in, chunk_cat, split_with_sizes_copy
from tests.profiled import copies_to_device

kernels_rows = pytest.importorskip(
    "fsdp_offload.kernels_rows", reason="needs Triton", exc_type=ImportError
)

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


@pytest.mark.parametrize("dtype", [BF16, FP32, torch.uint8, torch.int64])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("count", [1, 16, 17, 40])
def test_one_launch_for_sixteen_parts(
    monkeypatch: pytest.MonkeyPatch, ranks: int, dtype: torch.dtype, count: int
) -> None:
    """Widths of less than a tile, of one, and of more; several launches; not a copy of torch's."""
    words = 16 // dtype.itemsize
    sizes = [(1, 5, 511, 512, 513, 1700)[i % 6] * words for i in range(count)]
    gathered = random(ranks, sum(sizes), dtype=dtype)
    expected = [part.clone() for part in gathered.split(sizes, dim=1)]
    cut, whole = [torch.zeros_like(part) for part in expected], torch.zeros_like(gathered)
    assert plain_copies._row_kernel(gathered.device) is not None  # tried by what is taken away here
    for name in ("cat", "_foreach_copy_"):
        monkeypatch.setattr(torch, name, None)
    launches: list[int] = []
    launch = kernels_rows._COPY_ROWS.launch

    def counted(programs: int, *how: Any, **flags: Any) -> None:
        launches.append(programs)
        launch(programs, *how, **flags)

    monkeypatch.setattr(kernels_rows._COPY_ROWS, "launch", counted)
    assert split_with_sizes_copy(gathered, sizes, dim=1, out=cut)
    assert all(map(torch.equal, cut, expected))
    assert chunk_cat(expected, 0, ranks, out=whole)
    assert torch.equal(whole, gathered)
    shards = [part[0] for part in expected]
    whole.zero_()
    assert all_gather_copy_in(shards, whole.view(-1), sizes, sum(sizes), ranks - 1)
    assert torch.equal(whole[-1], gathered[0])
    assert not whole[:-1].any()
    assert len(launches) == 3 * -(-count // 16)


@pytest.mark.parametrize("shift", [1, 8])
def test_what_is_not_aligned_is_copied_by_torch(shift: int) -> None:
    """A kernel that moves 16 bytes at once cannot."""
    sizes = [24, 40, 8 + 8 // shift]
    gathered = random(2 * sum(sizes) + shift, dtype=BF16)[shift:].view(2, -1)
    expected = [part.clone() for part in gathered.split(sizes, dim=1)]
    cut, whole = [torch.zeros_like(part) for part in expected], torch.zeros_like(gathered)
    assert split_with_sizes_copy(gathered, sizes, dim=1, out=cut)
    assert all(map(torch.equal, cut, expected))
    assert chunk_cat(expected, 0, 2, out=whole)
    assert torch.equal(whole, gathered)
    copy_rows = plain_copies._row_kernel(gathered.device)
    assert copy_rows is not None
    assert not copy_rows(gathered, cut, into_matrix=False)


@pytest.mark.parametrize("kernel", [None, "broken"])
def test_without_the_kernel_torch_copies(
    monkeypatch: pytest.MonkeyPatch, kernel: str | None
) -> None:
    if kernel is None:
        monkeypatch.setattr(plain_copies, "_row_kernel", lambda device: None)
    else:
        monkeypatch.setattr(plain_copies, "_row_kernel", plain_copies._row_kernel.__wrapped__)
        monkeypatch.setattr(kernels_rows, "copy_rows", lambda *args, **how: True)
        with pytest.warns(RuntimeWarning, match="other words than its source"):
            assert plain_copies._row_kernel(torch.device("cuda", 0)) is None
        monkeypatch.setattr(plain_copies, "_row_kernel", lambda device: None)
    parts = [random(2, 8, dtype=FP32), random(2, 24, dtype=FP32)]
    whole = torch.zeros(2, 32, device="cuda")
    assert chunk_cat(parts, 0, 2, out=whole)
    assert torch.equal(whole, torch.cat(parts, dim=1))
