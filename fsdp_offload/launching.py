"""Launches of Triton kernels, with what Triton found out about their arguments before.

[Note: cached launches]
``kernel[grid](...)`` looks at every argument of every launch, to choose a compiled variant: for the
20 of the Adam kernel that took longer than all the rest of an update of one piece. The variant
depends on dtypes, on alignment to 16 bytes, on whether integers are 1 or divisible by 16 and how
wide they are, and on constants: where these were met before, the variant that was chosen then is
launched, with addresses in place of tensors: by the driver's own function (:class:`.driver.Launch`)
where the variant needs nothing else, because ``triton.compiler.CompiledKernel`` does more (hooks,
a dictionary of metadata, the interpreter lock given back): 0.1 ms on a slow host. So it is
with NVIDIA's backend; AMD's looks at the sizes of storages, too, and is asked each time.
Source: ``triton/runtime/jit.py``, ``JITFunction.run``, ``triton/compiler/compiler.py`` and
``triton/backends/nvidia/driver.py`` (Triton 3.6). Hooks on Triton's launches are not called.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from .driver import Launch
from .errors import DeviceError

T = TypeVar("T")

_CODES: Final = {"i32": "i", "i64": "q", "fp32": "f"}
"""Of the types that kernels declare, but for pointers; as ``struct`` has them."""
_WARP_THREADS: Final = 32
_NEEDS_MORE: Final = (
    "launch_cooperative_grid",
    "launch_pdl",
    "global_scratch_size",
    "profile_scratch_size",
)
"""What of a variant's metadata asks for more than a grid and parameters, unless it is false."""


class _Variant:
    """What Triton has compiled for some arguments.

    Args:
        compiled: ``triton.compiler.CompiledKernel``.
        constants: values of the constants.
    """

    def __init__(self, compiled: Any, constants: Sequence[Any]) -> None:
        self._compiled, self._constants = compiled, constants
        self._launch, self._kept = _direct(compiled)

    def launch(self, programs: int, device: int, arguments: list[Any]) -> None:
        """Enqueue it on the current stream; ``arguments``: all but the constants."""
        if self._launch is not None:
            values = arguments if self._kept is None else [arguments[i] for i in self._kept]
            if self._launch(programs, _current_stream()(device), values):
                return
        self._compiled[programs, 1, 1](*arguments, *self._constants)


@functools.cache
def _current_stream() -> Callable[[int], int]:
    """The driver's handle of the current stream, by the device's index."""
    from triton.runtime import driver

    found: Callable[[int], int] = driver.active.get_current_stream
    return found


def _direct(compiled: Any) -> tuple[Launch | None, list[int] | None]:
    """How to launch a variant without Triton, and which arguments it takes (None: all); no launch
    where it is not known how."""
    try:
        types, metadata = list(compiled.src.signature.values()), compiled.metadata
        codes = ["Q" if type_[:1] == "*" else _CODES.get(type_, type_) for type_ in types]
        kept = [index for index, code in enumerate(codes) if code != "constexpr"]
        codes = [codes[index] for index in kept]
        if not all(len(code) == 1 for code in codes) or metadata.num_ctas != 1:
            return None, None
        if any(getattr(metadata, name, False) for name in _NEEDS_MORE):
            return None, None
        launch = Launch(
            int(compiled.function), codes, threads=_WARP_THREADS * metadata.num_warps,
            shared_bytes=metadata.shared,
        )  # fmt: skip
        _current_stream()
    except (ImportError, AttributeError, TypeError, ValueError, DeviceError):  # another Triton
        return None, None
    return launch, None if kept == list(range(len(kept))) else kept


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
        self._known: dict[object, _Variant] = {}

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
            known.launch(programs, device.index, [*addresses, *integers, *floats])
            return
        assert list(constants) == list(self._function.arg_names[-len(constants) :])
        compiled = self._function[programs,](
            *tensors, *integers, *floats, **constants, **self._options
        )
        # None: Triton's interpreter.
        if bits & 15 == 0 and compiled is not None and torch.version.hip is None:
            self._known[key] = _Variant(compiled, list(constants.values()))


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
