"""Where the Triton kernels come from, if this build of torch has Triton."""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from .launching import if_usable


@functools.cache
def triton_kernels() -> ModuleType | None:
    """The module of CUDA kernels, or None as of :func:`.update.launching.if_usable`.

    Asked for when there is a CUDA tensor to work on.
    """
    return if_usable(_tried)


def _tried() -> ModuleType:
    from . import kernels_triton

    total = torch.zeros((), dtype=torch.int64, device="cuda")
    ones = torch.ones(64, dtype=torch.int32, device="cuda")
    for _ in range(2):  # the second launch is of a variant that is known (launching.py)
        kernels_triton.checksum(ones, total)
    if int(total) != 2 * 64 * 64:
        raise RuntimeError(f"a checksum is {int(total) / 2}, not {64 * 64}")
    return kernels_triton


@functools.cache
def moment_kernels() -> ModuleType | None:
    """The kernels of moments in fewer bits, or None as of :func:`triton_kernels`."""
    if triton_kernels() is None:
        return None
    from . import kernels_moments

    return kernels_moments
