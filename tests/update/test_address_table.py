"""Tables of pieces: what rows say, when they are written, when they cannot be used; all pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdp_offload.update.kernels.launching import AddressTable, AddressTables, addresses_of

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
    numbers = [[100 * i, 7 + i] for i in range(len(pieces))]
    return AddressTable(pieces, numbers, tile_numel=1024, free=(1, 2))


def test_a_row_says_where_a_piece_lies_and_which_programs_it_has() -> None:
    pieces = [piece(1024), piece(16), piece(2064)]
    table = table_of(pieces)
    rows = table.rows()
    assert rows is not None
    assert table.programs == 1 + 1 + 3
    found = rows.view(-1, WIDTH).tolist()
    for index, (own, start) in enumerate(zip(pieces, (0, 1, 2), strict=True)):
        addresses = [t.data_ptr() for t in own]
        assert found[index] == [start, *addresses, own[0].numel(), 100 * index, 7 + index]
    assert [row[0] for row in found[3:]] == [5] * 5


def test_rows_are_written_again_when_memory_has_moved() -> None:
    pieces = [piece(64), piece(128)]
    table = table_of(pieces)
    first = table.rows()
    assert first is not None
    before = first.tolist()
    first.zero_()
    again = table.rows()
    assert again is first
    assert not any(first.tolist()), "nothing has moved"
    weight = pieces[1][0]
    weight.set_(tensor(128, torch.bfloat16).untyped_storage(), 0, (128,))
    moved = table.rows()
    if weight.data_ptr() % 16 == 0:
        assert moved is not None
    assert first.tolist() == [
        *before[: WIDTH + 1], weight.data_ptr(), *before[WIDTH + 2 :]
    ]  # fmt: skip


@pytest.mark.parametrize("bad", [piece(64, shift=4), piece(72)], ids=["address", "elements"])
def test_what_is_not_aligned_has_no_rows(bad: list[Tensor]) -> None:
    assert table_of([piece(64), piece(64)]).rows() is not None
    assert table_of([piece(64), bad]).rows() is None


def test_addresses_of_gradients() -> None:
    some = [tensor(64, torch.bfloat16), tensor(16, torch.bfloat16)]
    assert addresses_of(some) == [some[0].data_ptr(), some[1].data_ptr(), 0, 0, 0, 0, 0, 0]
    assert addresses_of([*some, tensor(16, torch.bfloat16, 8)]) is None


# --------------------------------------------------------------------------- all pieces

NUMELS = [16 * (i + 1) for i in range(19)]
EMPTY = (0, 5, 18)
for at in EMPTY:
    NUMELS[at] = 0


class All:
    """Tables of pieces of ``NUMELS``, and which of them were made."""

    def __init__(self) -> None:
        self.slices = [piece(numel) for numel in NUMELS]
        self.made: list[list[int]] = []
        self.tables = AddressTables(NUMELS, self._make)

    def _make(self, members: list[int]) -> AddressTable:
        self.made.append(members)
        return table_of([self.slices[i] for i in members])

    @staticmethod
    def gradients(dtype: torch.dtype = torch.bfloat16) -> list[Tensor | None]:
        return [tensor(numel, dtype) for numel in NUMELS]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_filled_pieces_lie_in_tables_of_eight(dtype: torch.dtype) -> None:
    every = All()
    gradients = every.gradients(dtype)
    assert not every.made
    parts = every.tables.rows_of(gradients)
    filled = [i for i in range(19) if i not in EMPTY]
    assert every.made == [filled[:8], filled[8:]]
    assert parts is not None
    for part, members in zip(parts, every.made, strict=True):
        rows = part.rows.view(-1, WIDTH).tolist()
        for row, i in zip(rows, members, strict=True):
            assert row[1] == every.slices[i][0].data_ptr()
            assert row[8] == NUMELS[i]
        assert part.gradients == [gradients[i].data_ptr() for i in members]
        assert part.table.count == len(members)


@pytest.mark.parametrize("at", [0, 1, 18])
@pytest.mark.parametrize("other", [None, torch.float32, torch.float16])
def test_pieces_whose_gradients_differ_have_no_parts(other: torch.dtype | None, at: int) -> None:
    every, gradients = All(), All.gradients()
    gradients[at] = None if other is None else tensor(NUMELS[at], other)
    assert every.tables.rows_of(gradients) is None
    assert not every.made


@pytest.mark.parametrize("at", [1, 17])
def test_one_gradient_or_piece_that_is_not_aligned_is_enough(at: int) -> None:
    every, gradients = All(), All.gradients()
    gradients[at] = tensor(NUMELS[at], torch.bfloat16, 8)
    assert every.tables.rows_of(gradients) is None
    every.slices[at] = piece(NUMELS[at], shift=4)
    every.tables = AddressTables(NUMELS, every._make)
    assert every.tables.rows_of(All.gradients()) is None
