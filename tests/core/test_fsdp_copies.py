"""Copies without tables: the bits of FSDP2's own, for buffers of collectives alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # it defines the operations
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fsdp_offload.core.comm_buffers import (
    CommBuffer,
    chunk_cat,
    copies_without_tables,
    split_with_sizes_copy,
)

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


def pack(gradients: Sequence[Tensor], ranks: int, kind: type[Tensor] = Tensor) -> Tensor:
    out = nothing(ranks * sum(-(-g.size(0) // ranks) * g[0].numel() for g in gradients))
    buffer = out.as_subclass(kind).view(ranks, -1)
    torch.ops.fsdp.chunk_cat(gradients, dim=0, num_chunks=ranks, out=buffer)
    return out.view(ranks, -1)


def test_buffers_are_filled_without_a_table_and_nothing_else_is(passed: list[str]) -> None:
    gradients = [random(4, 3), random(2, 2)]
    assert torch.equal(pack(gradients, 2, CommBuffer), pack(gradients, 2))
    assert passed == ["_chunk_cat"]


def test_torch_does_what_ours_refuses(passed: list[str]) -> None:
    packed = pack([random(3, 2) + 1, random(2)], 2, CommBuffer)
    assert packed.shape == (2, 5)
    assert packed[1, 2:4].tolist() == [0, 0]  # padding
    assert passed == ["_chunk_cat"]


def test_version_counters_stay(passed: list[str]) -> None:
    """FSDP2 keeps those of the parameters, which autograd has saved."""
    whole, buffer = nothing(6), random(6).as_subclass(CommBuffer)
    with torch.autograd._unsafe_preserve_version_counter((whole,)):
        out = [whole.view(2, 3)]
        torch.ops.fsdp.split_with_sizes_copy(buffer.view(2, -1), [3], dim=1, out=out)
    assert not passed
    assert whole._version == 0
    assert (whole >= 0).all()


def test_what_is_computed_from_a_buffer_is_plain() -> None:
    buffer = random(6).as_subclass(CommBuffer)
    assert {type(made) for made in (buffer / 2, buffer[:3], buffer.clone())} == {Tensor}


def test_the_first_buffer_alone_is_marked_and_the_rest_is_the_collectives() -> None:
    class Comm:
        def allocate(self, size: Sequence[int], *, dtype: torch.dtype) -> Tensor:
            return torch.empty(*size, dtype=dtype)

        def __call__(self, *, output_tensor: Tensor) -> str:
            return f"{output_tensor.numel()} elements"

    group = type("Raw", (), {})()
    group.comm = comm = Comm()
    with copies_without_tables(group, "comm"):
        first, second = (group.comm.allocate((4,), dtype=BF16) for _ in range(2))
        assert (type(first), first.shape, first.dtype) == (CommBuffer, (4,), BF16)
        assert type(second) is Tensor
        assert group.comm(output_tensor=first) == "4 elements"
    assert group.comm is comm
