"""Launches of Triton kernels: for several slices at once, and with what Triton found out before.

``kernel[grid](...)`` looks at every argument of every launch, to choose a compiled variant: for the
20 of the Adam kernel that took longer than all the rest of an update of one slice. The variant
depends on dtypes, on alignment to 16 bytes, on whether integers are 1 or divisible by 16 and how
wide they are, and on constants: where these were met before, the variant that was chosen then is
launched, with addresses in place of tensors. So it is with NVIDIA's backend; AMD's looks at the
sizes of storages, too, and is asked each time. Source: ``triton/runtime/jit.py``,
``JITFunction.run`` (Triton 3.6).

A launch costs the host more than the kernel takes on the device for a small slice, and the slices
of a bucket differ in nothing but addresses and a few numbers. Only gradients lie elsewhere in every
step; their addresses go along with the launch.
So a table on the device says where up to eight slices of a bucket lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor

_READ: Final = frozenset((torch.bfloat16, torch.float32))
"""Dtypes of gradients that kernels read."""


class Kernel:
    """A Triton kernel whose parameters are pointers, then integers, then floats, then constants.

    Args:
        function: what ``triton.jit`` made.
        ignores_integers: it declares their types and specializes none of them.
        options: of its compilation, such as ``enable_fp_fusion``.
    """

    def __init__(self, function: Any, *, ignores_integers: bool = False, **options: Any) -> None:
        self._function, self._options = function, options
        self._ignores_integers = ignores_integers
        # By what Triton looks at: the variant (CompiledKernel), and its constants.
        self._known: dict[object, tuple[Any, list[Any]]] = {}

    def launch(
        self,
        programs: int,
        tensors: Sequence[Tensor],
        integers: Sequence[int] = (),
        floats: Sequence[float] = (),
        **constants: Any,
    ) -> None:
        """Enqueue it on the current stream of the tensors' device.

        Args:
            programs: in the grid, which has one axis; 0: nothing is launched.
            tensors: all on one device.
            integers: numbers of elements and the like.
            floats: each a ``float``.
            constants: by name, in the order of the kernel's parameters.
        """
        if not programs:
            return
        device = tensors[0].device  # Triton launches on the current device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.launch(programs, tensors, integers, floats, **constants)
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        key = (
            device.index,
            bits & 15,
            *[tensor.dtype for tensor in tensors],
            *(() if self._ignores_integers else map(_class_of, integers)),
            *constants.values(),
        )
        known = self._known.get(key)
        if known is not None:
            variant, values = known
            variant[programs, 1, 1](*addresses, *integers, *floats, *values)
            return
        assert list(constants) == list(self._function.arg_names[-len(constants) :])
        compiled = self._function[programs,](
            *tensors, *integers, *floats, **constants, **self._options
        )
        # None: Triton's interpreter.
        if bits & 15 == 0 and compiled is not None and torch.version.hip is None:
            self._known[key] = compiled, list(constants.values())


def _class_of(integer: int) -> int:
    """All that Triton looks at, in one number."""
    is_short = -(1 << 31) <= integer < 1 << 31
    return (integer & 15 == 0) | (integer == 1) << 1 | is_short << 2


class AddressTable:
    """Up to ``MOST`` slices, none of them empty.

    A row is (int64): the slice's first program; addresses; elements; numbers. Rows without one
    begin after all programs.

    Args:
        tensors: per slice, equally many: what has an address in its row; the first one has as many
            elements as the slice.
        numbers: per slice, equally many.
        tile_numel: elements that one program works on.
        free: how many addresses, the last ones, and numbers likewise, may be any.
    """

    MOST: ClassVar = 8

    def __init__(
        self,
        tensors: Sequence[Sequence[Tensor]],
        numbers: Sequence[Sequence[int]],
        *,
        tile_numel: int,
        free: tuple[int, int] = (0, 0),
    ) -> None:
        assert 0 < len(tensors) <= self.MOST
        self._tensors = [tensor for row in tensors for tensor in row]
        self._per_slice, self._free = len(tensors[0]), free
        self._numbers = [[row[0].numel(), *own] for row, own in zip(tensors, numbers, strict=True)]
        tiles = [-(-own[0] // tile_numel) for own in self._numbers]
        assert all(tiles)
        *self._starts, self.programs = accumulate(tiles, initial=0)
        self.width = 1 + self._per_slice + len(self._numbers[0])
        device = tensors[0][0].device
        self._rows = torch.empty(self.MOST * self.width, dtype=torch.int64, device=device)
        self._addresses: list[int] = []  # that are on the device
        self._fits = False

    @property
    def count(self) -> int:
        """Pieces."""
        return len(self._numbers)

    def rows(self) -> Tensor | None:
        """The table, 1-D int64 on the device, as the current stream sees it; None: an address is
        not aligned to 16 bytes, or a number not divisible by 16."""
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        if addresses != self._addresses:
            self._write(addresses)
        return self._rows if self._fits else None

    def _write(self, addresses: list[int]) -> None:
        size, values, looked_at = self._per_slice, list[int](), list[int]()
        for index, numbers in enumerate(self._numbers):
            own = addresses[index * size : (index + 1) * size]
            values += [self._starts[index], *own, *numbers]
            looked_at += own[: size - self._free[0]]
            looked_at += numbers[: len(numbers) - self._free[1]]
        values += [self.programs, *[0] * (self.width - 1)] * (self.MOST - self.count)
        self._fits = not any(value % 16 for value in looked_at)
        # Pageable memory: it has been read when this returns, and no stream is waited for.
        self._rows.copy_(torch.tensor(values, dtype=torch.int64), non_blocking=True)
        self._addresses = addresses


class TableRows(NamedTuple):
    """What a launch for the slices of one table takes."""

    table: AddressTable
    rows: Tensor
    gradients: list[int]  # addresses


class AddressTables:
    """All slices of a bucket, up to ``AddressTable.MOST`` in a table; empty ones are in none.

    Args:
        numels: elements of each slice.
        make: the table of the slices with these indices; called when it is first used.
    """

    def __init__(self, numels: Sequence[int], make: Callable[[list[int]], AddressTable]) -> None:
        # No method of the tables' owner: a cycle would keep device memory until it is collected.
        self._numels, self._make = numels, make
        self._tables: list[tuple[list[int], AddressTable]] | None = None  # with indices of slices

    def rows_of(self, gradients: Sequence[Tensor | None]) -> list[TableRows] | None:
        """One per table; None where something is out of the ordinary: a gradient is missing, they
        are of several dtypes or of one that kernels do not read, or something is not aligned."""
        present = [gradient for gradient in gradients if gradient is not None]
        dtypes = {gradient.dtype for gradient in present}
        if len(present) < len(gradients) or len(dtypes) > 1 or not dtypes <= _READ:
            return None
        if self._tables is None:
            self._tables = self._make_all()
        found = []
        for indices, table in self._tables:
            rows, addresses = table.rows(), addresses_of([present[i] for i in indices])
            if rows is None or addresses is None:
                return None
            found.append(TableRows(table, rows, addresses))
        return found

    def _make_all(self) -> list[tuple[list[int], AddressTable]]:
        filled = [index for index, numel in enumerate(self._numels) if numel]
        starts = range(0, len(filled), AddressTable.MOST)
        indices = [filled[start : start + AddressTable.MOST] for start in starts]
        return [(some, self._make(some)) for some in indices]


def addresses_of(gradients: Sequence[Tensor]) -> list[int] | None:
    """What goes along with a launch: ``MOST`` addresses; None: not all aligned to 16 bytes."""
    addresses, bits = [], 0
    for gradient in gradients:
        address = gradient.data_ptr()
        bits |= address
        addresses.append(address)
    return None if bits & 15 else addresses + [0] * (AddressTable.MOST - len(addresses))
