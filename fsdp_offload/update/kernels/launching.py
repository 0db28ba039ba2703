"""Launch Triton kernels for several slices at once, reusing the variant that Triton chose before.

``kernel[grid](...)`` inspects every argument of every launch to choose a compiled variant: for the
Adam kernel's 20 arguments, that took longer than the rest of a slice's update. The variant depends
on dtypes, on alignment to 16 bytes, on the width of integers and whether they are 1 or divisible by
16, and on constants. If these occurred before, :class:`Kernel` launches the known variant with
addresses instead of tensors. That holds for NVIDIA's backend; AMD's also inspects the sizes of
storages, so Triton chooses each time. Source: ``triton/runtime/jit.py``, ``JITFunction.run``
(Triton 3.6).

For a small slice, a launch takes the host longer than the kernel takes the device, and the slices
of a bucket differ only in addresses and a few numbers. So a table on the device lists the addresses
of up to eight slices. Only gradients move in every step; their addresses are arguments of the
launch. Unaligned memory uses a variant of the kernel that assumes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor


class Kernel:
    """A Triton kernel whose parameters are pointers, then integers, then floats, then constants.

    Args:
        function: result of ``triton.jit``.
        ignores_integers: whether it declares their types and specializes none of them.
        options: compile options, such as ``enable_fp_fusion``.
    """

    def __init__(self, function: Any, *, ignores_integers: bool = False, **options: Any) -> None:
        self._function, self._options = function, options
        self._ignores_integers = ignores_integers
        # By Triton's specialization: the variant (CompiledKernel) and its constants.
        self._known: dict[object, tuple[Any, list[Any]]] = {}

    def launch(
        self,
        programs: int,
        tensors: Sequence[Tensor],
        integers: Sequence[int] = (),
        floats: Sequence[float] = (),
        **constants: Any,
    ) -> None:
        """Enqueue the kernel on the current stream of the tensors' device.

        Args:
            programs: size of the one-axis grid; 0 launches nothing.
            tensors: all on one device.
            integers: such as numbers of elements.
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
    """Encode Triton's specialization of an integer in one number."""
    is_short = -(1 << 31) <= integer < 1 << 31
    return (integer & 15 == 0) | (integer == 1) << 1 | is_short << 2


class AddressTable:
    """Addresses of up to ``MOST`` slices, none of them empty.

    A row is (int64): the slice's first program; addresses of vectors, then of scalars; elements;
    numbers. Rows without a slice begin after all programs.

    Args:
        vectors: per slice, equally many; the first one has the slice's elements.
        scalars: per slice, equally many; their alignment does not matter.
        numbers: per slice, equally many.
        tile_numel: elements that one program works on.
    """

    MOST: ClassVar = 8

    def __init__(
        self,
        vectors: Sequence[Sequence[Tensor]],
        scalars: Sequence[Sequence[Tensor]],
        numbers: Sequence[Sequence[int]],
        *,
        tile_numel: int,
    ) -> None:
        assert 0 < len(vectors) <= self.MOST
        self._tensors = [
            tensor for both in zip(vectors, scalars, strict=True) for row in both for tensor in row
        ]
        self._wide, self._numbers = len(vectors[0]), numbers
        self._numels = [row[0].numel() for row in vectors]
        tiles = [-(-numel // tile_numel) for numel in self._numels]
        assert all(tiles)
        *self._starts, self.programs = accumulate(tiles, initial=0)
        self.width = 2 + len(vectors[0]) + len(scalars[0]) + len(numbers[0])
        device = vectors[0][0].device
        self._rows = torch.empty(self.MOST * self.width, dtype=torch.int64, device=device)
        self._addresses: list[int] = []  # as on the device
        self._is_aligned = False

    def rows(self) -> tuple[Tensor, bool]:
        """Return the table, 1-D int64 on the device, valid on the current stream, and whether all
        vectors are aligned to 16 bytes and all numbers of elements divisible by 16."""
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        if addresses != self._addresses:
            self._write(addresses)
        return self._rows, self._is_aligned

    def _write(self, addresses: list[int]) -> None:
        count = len(self._numels)
        size, values, looked_at = len(addresses) // count, list[int](), [*self._numels]
        for index, numbers in enumerate(self._numbers):
            own = addresses[index * size : (index + 1) * size]
            values += [self._starts[index], *own, self._numels[index], *numbers]
            looked_at += own[: self._wide]
        values += [self.programs, *[0] * (self.width - 1)] * (self.MOST - count)
        self._is_aligned = not any(value % 16 for value in looked_at)
        # From pageable memory, which has been read when this returns, without waiting for a stream.
        self._rows.copy_(torch.tensor(values, dtype=torch.int64), non_blocking=True)
        self._addresses = addresses
