"""Host memory that holds a copy of what is being saved, so that training may go on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager

from ..core import dtensor
from ..core.backend import backend_for
from ..core.config import TransferConfig
from ..link import HostPool, HostRange
from .files import BLOCK_BYTES, aligned, as_bytes, run_all


class Stager(AsyncStager):
    """Copies a state dict into page-locked host memory, for ``dcp.async_save(async_stager=...)``.

    The memory is reserved at the first call, exactly as much as is needed, and kept until
    :meth:`close`. The copies stay until the next call: one save at a time.

    Raises:
        HostMemoryError: (in :meth:`stage`) the copies do not fit.
    """

    def __init__(self) -> None:
        self._pool: HostPool | None = None
        self._arena: HostRange | None = None

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """``state_dict`` with a copy in place of each tensor; dicts and lists are new ones."""
        found: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        self._replace(state_dict, note)
        self._reserve(found)
        jobs: list[Callable[[], None]] = []
        offset = 0

        def copy(tensor: Tensor) -> Tensor:
            nonlocal offset
            assert self._arena is not None
            source = tensor.detach().resolve_conj().resolve_neg().contiguous()
            target = self._arena.tensor(offset, source.numel(), source.dtype).view(source.shape)
            offset += aligned(source.nbytes)
            given, taken = as_bytes(source), as_bytes(target)
            jobs.extend(
                functools.partial(_copy, given, taken, start)
                for start in range(0, source.nbytes, BLOCK_BYTES)
            )
            return target

        staged = self._replace(state_dict, copy)
        for device in {tensor.device for tensor in found}:
            # Other threads read, on streams of their own.
            backend_for(device).current_stream().synchronize()
        run_all(jobs)
        return staged  # type: ignore[no-any-return]

    def _reserve(self, tensors: list[Tensor]) -> None:
        nbytes = sum(aligned(tensor.numel() * tensor.element_size()) for tensor in tensors)
        if self._arena is not None and nbytes <= self._arena.n_bytes:
            return
        self.close()
        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        backend = backend_for(min(devices, key=str, default=torch.device("cpu")))
        self._pool = HostPool("async_save", backend, TransferConfig(pin="prefer"))
        self._arena = self._pool.take(nbytes)

    def _replace(self, value: Any, copy: Callable[[Tensor], Tensor]) -> Any:
        if isinstance(value, dict):
            return {key: self._replace(each, copy) for key, each in value.items()}
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(self._replace(each, copy) for each in value)
        if isinstance(value, Tensor):
            return dtensor.like(value, copy(dtensor.local(value)))
        return value

    def synchronize_staging(self) -> None:
        """Nothing is under way: :meth:`stage` returns when the copies are there."""

    def close(self) -> None:
        """Give the memory back; the copies are gone."""
        self._pool = self._arena = None


def _copy(source: Tensor, target: Tensor, start: int) -> None:
    target[start : start + BLOCK_BYTES].copy_(source[start : start + BLOCK_BYTES])
