"""What of the saved tensors is taken, and why others are kept: one case for each rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import PagedStash
from fsdp_offload.activations.saved import (
    ByteRange,
    View,
    rows_or_reason,
    span_or_reason,
)
from tests.activations.moe import CPU

CAPACITY = 8


def all_rows(start: int, row_bytes: int) -> ByteRange:
    return ByteRange(start, start + CAPACITY * row_bytes)


def of(tensor: Tensor) -> ByteRange | str:
    return rows_or_reason(tensor, CAPACITY, CPU)


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(CAPACITY, *shape, dtype=dtype)


TAKEN: dict[str, tuple[Callable[[], Tensor], ByteRange]] = {
    "fp32": (lambda: rows(4), all_rows(0, 16)),
    "bf16": (lambda: rows(8, dtype=torch.bfloat16), all_rows(0, 16)),
    "fp16": (lambda: rows(24, dtype=torch.float16), all_rows(0, 48)),
    "fp8 e4m3": (lambda: rows(16, dtype=torch.float8_e4m3fn), all_rows(0, 16)),
    "fp8 e5m2": (lambda: rows(32, dtype=torch.float8_e5m2), all_rows(0, 32)),
    "several dims": (lambda: rows(2, 3, 4), all_rows(0, 96)),
    "one number per row": (
        lambda: torch.zeros(CAPACITY, dtype=torch.complex128).real,
        all_rows(0, 16),
    ),
    "left chunk": (lambda: rows(16).chunk(2, dim=-1)[0], all_rows(0, 64)),
    "right chunk": (lambda: rows(16).chunk(2, dim=-1)[1], all_rows(0, 64)),
    "chunk that was detached": (lambda: rows(16).chunk(2, dim=-1)[1].detach(), all_rows(0, 64)),
    "chunk of rows behind others": (
        lambda: torch.zeros(3 * CAPACITY, 16)[CAPACITY : 2 * CAPACITY].clone().chunk(2, -1)[1],
        all_rows(0, 64),
    ),
    "rows behind others": (
        lambda: torch.zeros(3 * CAPACITY, 4)[CAPACITY:-CAPACITY],
        all_rows(128, 16),
    ),
    "every second row": (lambda: torch.zeros(2 * CAPACITY, 4)[::2], all_rows(0, 32)),
    "dims exchanged inside of a row": (lambda: rows(2, 8).transpose(1, 2), all_rows(0, 64)),
    "computed from a parameter and rows": (
        lambda: rows(CAPACITY).requires_grad_() @ nn.Parameter(torch.zeros(CAPACITY, CAPACITY)),
        all_rows(0, 32),
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str) -> None:
    make, expected = TAKEN[name]
    tensor = make()
    assert of(tensor) == expected
    with torch.no_grad():  # a view of other memory with the same content is the same tensor
        words = torch.zeros(expected.n_bytes // 8, dtype=torch.int64)
        numbers = torch.arange(tensor.numel()).reshape(tensor.shape) % 8
        tensor.copy_(numbers)
        storage = tensor.untyped_storage()
        words.untyped_storage().copy_(storage[expected.start_bytes :][: words.numel() * 8])
        other = View.of(tensor, expected).over(words)
        assert other.stride() == tensor.stride()
        assert torch.equal(other.float(), numbers.float())


def cast() -> Tensor:
    """As autocast makes one of a weight with as many outputs as the buffer has rows."""
    return nn.Linear(8, CAPACITY).weight.to(torch.bfloat16)


KEPT: dict[str, tuple[Callable[[], Tensor], str]] = {
    "parameter": (lambda: nn.Parameter(rows(4)), "a parameter"),
    "view of a parameter": (lambda: nn.Parameter(torch.zeros(4, CAPACITY)).t(), "a parameter"),
    "cast of a parameter": (cast, "a parameter"),
    "view of a cast": (lambda: cast()[:], "a parameter"),
    "computed of a parameter alone": (lambda: cast().exp().sin(), "a parameter"),
    "computed of a parameter and numbers": (lambda: 1 + cast() * torch.ones(8), "a parameter"),
    "subclass": (lambda: rows(4).as_subclass(type("Sub", (Tensor,), {})), "a subclass"),
    "sparse": (lambda: torch.eye(CAPACITY).to_sparse(), "a subclass"),
    "other device": (lambda: torch.zeros(CAPACITY, 4, device="meta"), "another device"),
    "integers": (lambda: rows(4, dtype=torch.int32), "not floating"),
    "bool": (lambda: rows(16, dtype=torch.bool), "not floating"),
    "other rows": (lambda: torch.zeros(CAPACITY + 1, 4), "other rows"),
    "no rows": (lambda: torch.tensor(0.0), "other rows"),
    "empty rows": (lambda: rows(0), "other rows"),
    "expanded": (lambda: torch.zeros(1, 4).expand(CAPACITY, 4), "rows apart"),
    "transposed": (lambda: torch.zeros(4, CAPACITY).t(), "rows apart"),
    "columns of more rows": (lambda: torch.zeros(2 * CAPACITY, 8)[:CAPACITY, :4], "rows apart"),
    "row of 12 bytes": (lambda: rows(3), "rows of no multiple of 16 bytes"),
    "no aligned address": (lambda: torch.zeros(8 * 4 + 1)[1:].view(8, 4),
                           "rows of no multiple of 16 bytes"),
}  # fmt: skip


SPANS: dict[str, tuple[Callable[[], Tensor], ByteRange | str]] = {
    "all": (lambda: torch.zeros(8, 16), ByteRange(0, 512)),
    "transposed": (lambda: torch.zeros(16, 8).t(), ByteRange(0, 512)),
    "rows": (lambda: torch.zeros(32, 16)[8:16], ByteRange(512, 1024)),
    "a chunk": (lambda: torch.zeros(8, 32).chunk(2, -1)[1], ByteRange(0, 1024)),
    "a chunk that was detached": (
        lambda: torch.zeros(8, 32).chunk(2, -1)[0].detach(),
        ByteRange(0, 1024),
    ),
    "a chunk of rows": (lambda: torch.zeros(32, 32)[8:16].chunk(2, -1)[1], ByteRange(1088, 2048)),
    "expanded": (lambda: torch.zeros(1, 128).expand(8, 128), ByteRange(0, 512)),
    "not aligned": (lambda: torch.zeros(129)[1:], ByteRange(0, 516)),
    "small": (lambda: torch.zeros(127), "small"),
    "empty": (lambda: torch.zeros(0, 16), "small"),
    "negative": (lambda: torch.zeros(128, dtype=torch.complex64).conj().imag, "a subclass"),
}


@pytest.mark.parametrize("name", SPANS)
def test_spans(name: str) -> None:
    make, expected = SPANS[name]
    tensor = make()
    span = span_or_reason(tensor, CPU, 512)
    assert span == expected
    if isinstance(span, ByteRange):
        words = torch.zeros(span.end_bytes - span.start_bytes, dtype=torch.uint8)
        view = View.of(tensor, span).over(words)
        assert (view.shape, view.stride()) == (tensor.shape, tensor.stride())
        view.fill_(1)
        assert bool((view == 1).all())


@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str) -> None:
    make, reason = KEPT[name]
    assert of(make()) == reason


def test_reasons_are_counted_and_what_is_asked_for_is_kept() -> None:
    stash = PagedStash(CPU)
    x, count = rows(4).requires_grad_(), torch.tensor(3)
    index = torch.zeros(CAPACITY, 4, dtype=torch.int64)
    with stash.group(x, count) as group:
        y = (x * 2).sin()
        scale = torch.full((CAPACITY, 4), 2.0)
        group.keep(scale)
        z = y.gather(1, index) * scale
    assert stash.statistics().kept_bytes == {"not floating": index.numel() * 8, "asked for": 128}
    z.sum().backward()
    assert x.grad is not None
