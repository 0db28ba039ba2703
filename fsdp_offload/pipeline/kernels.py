"""Where the Triton kernels come from, if this build of torch has Triton."""

from __future__ import annotations

import functools
from types import ModuleType


@functools.cache
def triton_kernels() -> ModuleType | None:
    """The module of CUDA kernels, or None where Triton is not installed (CPU builds)."""
    try:
        from . import kernels_triton
    except ImportError:
        return None
    return kernels_triton
