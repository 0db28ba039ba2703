"""Access to the Triton kernels, if this build of torch has Triton."""

from __future__ import annotations

import functools
import warnings
from types import ModuleType

import torch


@functools.cache
def triton_kernels() -> ModuleType | None:
    """Return the module of CUDA kernels, or None if Triton is missing (CPU builds) or cannot
    compile, with a warning.

    Call it only with a CUDA tensor to work on.
    """
    try:
        return _tried()
    except ImportError:
        return None
    except torch.OutOfMemoryError:  # says nothing about kernels
        raise
    except Exception as error:  # Triton compiles when it first launches, and needs a C compiler
        warnings.warn(
            f"Triton kernels cannot be used, torch operations take their place: {error!r}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _tried() -> ModuleType:
    from . import elementwise

    value = torch.ones(64, dtype=torch.bfloat16, device="cuda")
    for _ in range(2):  # the second launch reuses a known variant (launching.py)
        master = torch.zeros(64, device="cuda")
        elementwise.decode(value, torch.zeros_like(value), master)
    if float(master.sum()) != 64:
        raise RuntimeError(f"64 masters of weight 1 have the sum {float(master.sum())}")
    return elementwise


@functools.cache
def moment_kernels() -> ModuleType | None:
    """Return the kernels of packed moments, or None: see :func:`triton_kernels`."""
    if triton_kernels() is None:
        return None
    from . import adam

    return adam
