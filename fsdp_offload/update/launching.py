"""Launches of Triton kernels, with what Triton found out about their arguments before.

[Note: cached launches]
``kernel[grid](...)`` looks at every argument of every launch, to choose a compiled variant: for the
20 of the Adam kernel that took longer than all the rest of an update of one slice. The variant
depends on dtypes, on alignment to 16 bytes, on whether integers are 1 or divisible by 16 and how
wide they are, and on constants: where these were met before, the variant that was chosen then is
launched, with addresses in place of tensors. So it is with NVIDIA's backend; AMD's looks at the
sizes of storages, too, and is asked each time. Source: ``triton/runtime/jit.py``,
``JITFunction.run`` (Triton 3.6).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


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


def if_usable(make: Callable[[], T]) -> T | None:
    """What ``make`` gives, which imports kernels and tries one; None where Triton is missing (CPU
    builds) or cannot compile: that is worth a warning."""
    try:
        return make()
    except ImportError:
        return None
    except torch.OutOfMemoryError:  # says nothing of kernels
        raise
    except Exception as error:  # Triton compiles when it first launches, and needs a C compiler
        warnings.warn(
            f"Triton kernels cannot be used, torch operations take their place: {error!r}",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def _class_of(integer: int) -> int:
    """All that Triton looks at, in one number."""
    is_short = -(1 << 31) <= integer < 1 << 31
    return (integer & 15 == 0) | (integer == 1) << 1 | is_short << 2
