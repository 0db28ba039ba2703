"""Copy a state dict into host memory, so that training continues while a thread saves it."""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import textwrap
from collections.abc import Callable, Iterator
from copy import deepcopy
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager

from ..core import dtensor
from ..core.backend import Event
from ..core.config import TransferConfig, align
from ..core.devices import backend_for
from ..core.errors import OffloadError, UnsupportedParameterError
from ..core.storage import as_bytes
from ..link import Block, HostPool, HostRange, Link, Residence
from .files import ALIGNMENT_BYTES, BLOCK_BYTES, run_all, without_class


class Stager(AsyncStager):
    """Copies a state dict into page-locked host memory, for ``dcp.async_save(async_stager=...)``.

    The first call reserves exactly the memory that it needs; :meth:`close` frees it. The copies
    stay until the next call: one save at a time.

    Raises:
        HostMemoryError: (in :meth:`stage`) the copies do not fit.
        UnsupportedParameterError: (in :meth:`stage`) a value cannot be copied.
    """

    def __init__(self) -> None:
        self._pool: HostPool | None = None
        self._arena: HostRange | None = None
        self._links: dict[torch.device, Link] = {}

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy ``state_dict`` deeply, with tensors in any container or object.

        Blocks until the copies are complete, after the work of the current stream. Dense tensors go
        to page-locked memory, equal views of one memory only once; sparse, quantized and strided
        nested tensors go to pageable memory.
        """
        finder = _Finder()
        with _refusing("a value in the state dict"):
            finder.dump(state_dict)
        sources: dict[object, Tensor] = {}

        def collect(plain: Tensor) -> Tensor:
            if _is_dense(plain):
                sources.setdefault(_place(plain), plain)
            return plain

        for tensor in finder.tensors:
            _with_copies(tensor, collect)
        copies = self._copies_of(sources)

        def copy(plain: Tensor) -> Tensor:
            if _is_dense(plain) and (place := _place(plain)) in copies:
                return copies[place]
            return plain.to("cpu", copy=True)

        # deepcopy() takes what its memo has, by id, and copies all around it.
        memo: dict[int, Any] = {id(each): _with_copies(each, copy) for each in finder.tensors}
        with _refusing("a value in the state dict"):
            return deepcopy(state_dict, memo)

    def _copies_of(self, sources: dict[object, Tensor]) -> dict[object, Tensor]:
        """Copy tensors into the arena, one behind the other; replace an arena that is too small."""
        nbytes = sum(align(source.nbytes, ALIGNMENT_BYTES) for source in sources.values())
        if self._arena is None or nbytes > self._arena.n_bytes:
            self.close()
            devices = [s.device for s in sources.values() if s.device.type != "cpu"]
            backend = backend_for(min(devices, key=str, default=torch.device("cpu")))
            self._pool = HostPool("async_save", backend, TransferConfig(pin="prefer"))
            self._arena = self._pool.take(nbytes)
        made: dict[object, Tensor] = {}
        pairs: list[tuple[Tensor, Tensor]] = []
        offset = 0
        for place, given in sources.items():
            source = given.resolve_conj().resolve_neg().contiguous()
            target = self._arena.tensor(offset, source.numel(), source.dtype)
            offset += align(source.nbytes, ALIGNMENT_BYTES)
            made[place] = target.view(source.shape)
            pairs.append((as_bytes(target), as_bytes(source)))
        self._fill(pairs)
        return made

    def _fill(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        jobs = [
            functools.partial(Tensor.copy_, *parts)
            for pair in pairs
            if pair[1].device.type == "cpu"
            for parts in zip(*(each.split(BLOCK_BYTES) for each in pair), strict=True)
        ]
        stored: list[Event] = []
        try:
            for device in {source.device for _, source in pairs if source.device.type != "cpu"}:
                backend = backend_for(device)
                if device not in self._links:
                    self._links[device] = Link(backend, "checkpoint", turn_bytes=None)
                mine = [(t, s) for t, s in pairs if s.device == device and s.nbytes]
                blocks = [Block([t], [s], Residence.DIRTY) for t, s in mine]
                written = backend.current_stream().record()
                stored.append(self._links[device].store(*blocks, after=[written]))
            run_all(jobs)
        finally:  # after an error, too: a later call could free the memory during a copy
            for event in stored:
                event.synchronize()

    def synchronize_staging(self) -> None:
        """Do nothing: :meth:`stage` returns when the copies are complete."""

    def close(self) -> None:
        """Free the memory of the copies."""
        self._pool = self._arena = None


# --------------------------------------------------------------------------- containers


class _Finder(pickle.Pickler):
    """Finds the tensors in containers and objects: it pickles all but their elements."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        """Note a tensor; leave out plain values, which may be long and hold none."""
        if isinstance(value, Tensor):
            self.tensors.append(value)
        is_plain = isinstance(value, Tensor | str | int | float | bytes | type | FunctionType)
        return 0 if is_plain else None


# --------------------------------------------------------------------------- tensors


def _place(plain: Tensor) -> object:
    form = plain.dtype, plain.shape, plain.stride(), plain.is_conj(), plain.is_neg()
    return plain.device, plain.data_ptr(), *form


def _with_copies(tensor: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
    """Rebuild ``tensor`` around ``copy`` of each tensor that it consists of."""
    with _refusing(f"a tensor of type {type(tensor).__name__}"):
        return dtensor.like(tensor, _local_copy(dtensor.local(tensor), copy))


def _local_copy(tensor: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
    if tensor.is_meta:
        return tensor
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        parts = {name: _local_copy(getattr(tensor, name), copy) for name in names}
        make: Any = type(tensor)
        return make.__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())  # type: ignore[no-any-return]
    if not _is_dense(tensor):
        return copy(tensor)
    copied = copy(without_class(tensor))
    return copied if type(tensor) is Tensor else copied.as_subclass(type(tensor))


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Raise any error of the caller's classes as one of this package."""
    try:
        yield
    except OffloadError:
        raise
    except Exception as error:
        raise UnsupportedParameterError(
            what,
            reason=f"copying it failed: {textwrap.shorten(str(error), 200)}",
            remedy="leave it out, or save plain tensors and values",
        ) from error
