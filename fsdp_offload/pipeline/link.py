"""Copies between device and page-locked host memory by a kernel instead of a copy engine.

[Note: copy engines]
A copy waits for everything in the same hardware queue before it, whichever stream that belongs to,
and an engine stays with a queue as long as that has copies ready. Behind what the streamed lane has
enqueued, buckets of the host lane waited for up to 150 ms (docs/internals/pipeline.md). A
kernel reads and writes page-locked memory over the same link, and waits in no such queue.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from ..update.kernels import triton_kernels

Copy = Callable[[Tensor, Tensor], None]
"""(source, target), 1-D, contiguous, of one dtype, one on the host: on the current stream."""

WORDS: Final = (torch.int32, torch.int16, torch.int8)
"""What a kernel may copy by: one that divides the bytes, and where they start in storages."""
MOST_WORDS: Final = 1 << 31
_PROBE_NUMEL: Final = 20_000


def copier(device: torch.device, *, pinned: bool) -> Copy:
    """How to copy between ``device`` and host memory, which is page-locked if ``pinned``.

    By a kernel where that works, else as torch does.
    """
    if device.type == "cuda" and pinned and _kernel_works(device):
        return copy_by_kernel
    return copy_by_torch


def copy_by_torch(source: Tensor, target: Tensor) -> None:
    """See :data:`Copy`."""
    target.copy_(source, non_blocking=True)


def copy_by_kernel(source: Tensor, target: Tensor) -> None:
    """See :data:`Copy`. The one on the host is page-locked, the other one of a CUDA device."""
    kernels = triton_kernels()
    n_bytes = source.numel() * source.itemsize
    starts = (int(tensor.storage_offset()) * tensor.itemsize for tensor in (source, target))
    places = (n_bytes, *starts)
    word = next(word for word in WORDS if not any(place % word.itemsize for place in places))
    if kernels is None or n_bytes // word.itemsize >= MOST_WORDS:
        copy_by_torch(source, target)
    else:
        kernels.copy_across(source.view(word), target.view(word))


@functools.cache
def _kernel_works(device: torch.device) -> bool:
    """Whether words come through in both directions, on the first launch and on later ones."""
    if triton_kernels() is None or torch.version.hip is not None:  # not tried with AMD's
        return False
    try:
        with torch.cuda.device(device):
            here = torch.arange(_PROBE_NUMEL, dtype=torch.int32).pin_memory()
            for _ in range(2):
                there, back = torch.zeros_like(here, device=device), torch.zeros_like(here)
                back = back.pin_memory()
                copy_by_kernel(here, there)
                copy_by_kernel(there, back)
                torch.cuda.current_stream().synchronize()
                if not torch.equal(back, here):
                    raise RuntimeError("other words than were sent")
    except Exception as error:
        warnings.warn(
            f"kernels cannot copy over the link, copy engines do: {error!r}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
