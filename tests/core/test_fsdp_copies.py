"""Copies without tables have the bits of FSDP2's own, and stand before them only inside."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # it defines the operations
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fsdp_offload.core.fsdp import CopyWithoutTables, chunk_cat, split_with_sizes_copy

BF16, FP16, FP32, UINT8 = torch.bfloat16, torch.float16, torch.float32, torch.uint8
SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3)


def random(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randint(0, 200, shape).to(dtype)


def nothing(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.full(shape, 255 if dtype is UINT8 else -1, dtype=dtype)


# --------------------------------------------------------------------------- gradients


@given(
    st.integers(1, 5),
    st.lists(SHAPES, min_size=1, max_size=5),
    st.sampled_from([(BF16, BF16), (FP32, FP32), (BF16, FP32), (FP16, FP32)]),
)
@settings(deadline=None)
def test_gradients_are_packed_as_by_torch(
    ranks: int, shapes: list[list[int]], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    gradients = [random(ranks * first, *rest, dtype=dtypes[0]) for first, *rest in shapes]
    numel = sum(gradient.numel() for gradient in gradients)
    mine, expected = (nothing(ranks, numel // ranks, dtype=dtypes[1]) for _ in range(2))
    assert chunk_cat(gradients, dim=0, num_chunks=ranks, out=mine)
    torch._chunk_cat(gradients, 0, ranks, out=expected)
    assert torch.equal(mine, expected)


@pytest.mark.parametrize(
    ("gradients", "out"),
    [
        pytest.param([random(4, 3), random(3)], nothing(2, 8), id="padded"),
        pytest.param([random(4, 3)], nothing(2, 6, dtype=BF16), id="narrowed"),
        pytest.param([random(4, 3, dtype=BF16)], nothing(2, 6, dtype=FP16), id="cast"),
        pytest.param([random(4, 3), random(2, dtype=BF16)], nothing(2, 7), id="two dtypes"),
        pytest.param([random(3, 4).t()], nothing(2, 6), id="strided"),
        pytest.param([random(4, 3), random(0, 3)], nothing(2, 6), id="empty"),
        pytest.param([random(4, 3), torch.tensor(1.0)], nothing(2, 7), id="no dimension"),
        pytest.param([random(4, 3)], nothing(12), id="flat"),
        pytest.param([random(4, 3)], nothing(2, 7), id="too large"),
        pytest.param([random(4, 3)], nothing(6, 2).t(), id="strided target"),
        pytest.param([nn.Parameter(random(4, 3))], nothing(2, 6), id="subclass"),
        pytest.param([], nothing(2, 0), id="none"),
    ],
)
def test_other_gradients_are_left_to_torch(gradients: list[Tensor], out: Tensor) -> None:
    before = out.clone()
    assert not chunk_cat(gradients, dim=0, num_chunks=2, out=out)
    assert torch.equal(out, before)
    assert not chunk_cat([random(2, 4)], 1, 2, out=nothing(2, 4))


# --------------------------------------------------------------------------- parameters


@given(
    st.integers(1, 5),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.sampled_from([BF16, FP32, UINT8]),
)
@settings(deadline=None)
def test_parameters_are_unpacked_as_by_torch(
    ranks: int, sizes: list[int], dtype: torch.dtype
) -> None:
    gathered = random(ranks, sum(sizes), dtype=dtype)
    mine, expected = ([nothing(ranks, s, dtype=dtype) for s in sizes] for _ in range(2))
    assert split_with_sizes_copy(gathered, sizes, dim=1, out=mine)
    torch.split_with_sizes_copy(gathered, sizes, dim=1, out=expected)
    assert all(map(torch.equal, mine, expected))


@pytest.mark.parametrize(
    ("gathered", "sizes", "out"),
    [
        pytest.param(random(2, 5), [2, 3], [nothing(2, 2), nothing(2, 3, dtype=BF16)], id="cast"),
        pytest.param(random(5, 2).t(), [5], [nothing(2, 5)], id="strided"),
        pytest.param(random(2, 5), [5], [nothing(5, 2).t()], id="strided target"),
        pytest.param(random(2, 5), [2, 3], [nothing(2, 5)], id="fewer"),
        pytest.param(random(2, 4), [4], [nothing(4, 2)], id="another shape"),
        pytest.param(random(2, 5), [5, 0], [nothing(2, 5), nothing(2, 0)], id="empty"),
        pytest.param(random(2, 5), [2, 3], [nothing(2, 3), nothing(2, 2)], id="swapped"),
        pytest.param(random(2, 0), [], [], id="none"),
    ],
)
def test_other_parameters_are_left_to_torch(
    gathered: Tensor, sizes: list[int], out: list[Tensor]
) -> None:
    before = [part.clone() for part in out]
    assert not split_with_sizes_copy(gathered, sizes, dim=1, out=out)
    assert all(map(torch.equal, out, before))
    assert not split_with_sizes_copy(random(4, 2), [4], out=[nothing(4, 2)])


# --------------------------------------------------------------------------- where they stand


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations of torch that were called."""
    names: list[str] = []
    for operation in ("_chunk_cat", "split_with_sizes_copy"):
        original = getattr(torch, operation)

        def call(*args: Any, name: str = operation, original: Any = original, **how: Any) -> Any:
            names.append(name)
            return original(*args, **how)

        monkeypatch.setattr(torch, operation, call)
    return names


def pack(gradients: Sequence[Tensor], ranks: int) -> Tensor:
    out = nothing(ranks, sum(-(-g.size(0) // ranks) * g[0].numel() for g in gradients))
    torch.ops.fsdp.chunk_cat(gradients, dim=0, num_chunks=ranks, out=out)
    return out


def test_only_inside_and_on_this_thread(passed: list[str]) -> None:
    gradients = [random(4, 3), random(2, 2)]
    expected = pack(gradients, 2)
    copies = CopyWithoutTables()
    assert passed == ["_chunk_cat"]
    with copies:
        with copies:
            pass
        assert torch.equal(pack(gradients, 2), expected)
        assert passed == ["_chunk_cat"]
        thread = threading.Thread(target=pack, args=(gradients, 2))
        thread.start()
        thread.join()
        assert passed == ["_chunk_cat"] * 2
    assert torch.equal(pack(gradients, 2), expected)
    assert passed == ["_chunk_cat"] * 3


def test_torch_does_what_ours_refuses(passed: list[str]) -> None:
    with CopyWithoutTables():
        packed = pack([random(3, 2) + 1, random(2)], 2)
    assert packed.shape == (2, 5)
    assert packed[1, 2:4].tolist() == [0, 0]  # padding
    assert passed == ["_chunk_cat"]


def test_version_counters_stay(passed: list[str]) -> None:
    """FSDP2 keeps those of the parameters, which autograd has saved."""
    whole = nothing(6)
    with CopyWithoutTables(), torch.autograd._unsafe_preserve_version_counter((whole,)):
        out = [whole.view(2, 3)]
        torch.ops.fsdp.split_with_sizes_copy(random(2, 3), [3], dim=1, out=out)
    assert not passed
    assert whole._version == 0
    assert (whole >= 0).all()
