"""Tables of slices: what rows say, when they are written, whether everything is aligned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdp_offload.update.kernels.launching import AddressTable

WIDTH = 11


def tensor(numel: int, dtype: torch.dtype, shift: int = 0) -> Tensor:
    """At an address that is ``shift`` bytes behind a multiple of 16."""
    memory = torch.zeros(numel * dtype.itemsize + 32, dtype=torch.uint8)
    start = -memory.data_ptr() % 16 + shift
    return memory[start : start + numel * dtype.itemsize].view(dtype)


def piece(numel: int, *, shift: int = 0) -> list[Tensor]:
    dtypes = (torch.int16, torch.int8, torch.int32, torch.uint8, torch.int32)
    weight = tensor(numel, torch.bfloat16, shift)
    return [weight, *[tensor(numel, dtype) for dtype in dtypes], tensor(1, torch.float32, 4)]


def table_of(pieces: list[list[Tensor]]) -> AddressTable:
    vectors, scalars = [own[:-1] for own in pieces], [own[-1:] for own in pieces]
    numbers = [[100 * i, 7 + i] for i in range(len(pieces))]
    return AddressTable(vectors, scalars, numbers, tile_numel=1024)


def test_a_row_says_where_a_piece_lies_and_which_programs_it_has() -> None:
    pieces = [piece(1024), piece(16), piece(2064)]
    table = table_of(pieces)
    rows, is_aligned = table.rows()
    assert is_aligned
    assert table.programs == 1 + 1 + 3
    found = rows.view(-1, WIDTH).tolist()
    for index, (own, start) in enumerate(zip(pieces, (0, 1, 2), strict=True)):
        addresses = [t.data_ptr() for t in own]
        assert found[index] == [start, *addresses, own[0].numel(), 100 * index, 7 + index]
    assert [row[0] for row in found[3:]] == [5] * 5


def test_rows_are_written_again_when_memory_has_moved() -> None:
    pieces = [piece(64), piece(128)]
    table = table_of(pieces)
    first, _ = table.rows()
    before = first.tolist()
    first.zero_()
    again, _ = table.rows()
    assert again is first
    assert not any(first.tolist()), "nothing has moved"
    weight = pieces[1][0]
    weight.set_(tensor(128, torch.bfloat16).untyped_storage(), 0, (128,))
    _, is_aligned = table.rows()
    assert is_aligned == (weight.data_ptr() % 16 == 0)
    assert first.tolist() == [
        *before[: WIDTH + 1], weight.data_ptr(), *before[WIDTH + 2 :]
    ]  # fmt: skip


@pytest.mark.parametrize("bad", [piece(64, shift=4), piece(72)], ids=["address", "elements"])
def test_one_slice_that_is_not_aligned_is_enough(bad: list[Tensor]) -> None:
    assert table_of([piece(64), piece(64)]).rows()[1]
    assert not table_of([piece(64), bad]).rows()[1]
