"""Host memory that holds a copy of what is being saved, so that training may go on."""

from __future__ import annotations

import functools
import io
import pickle
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager

from ..core import dtensor
from ..core.backend import Event
from ..core.config import TransferConfig
from ..core.devices import backend_for
from ..core.errors import OffloadError, UnsupportedParameterError
from ..link import Block, HostPool, HostRange, Link, Residence
from .files import BLOCK_BYTES, aligned, as_bytes, run_all, without_class


class Stager(AsyncStager):
    """Copies a state dict into page-locked host memory, for ``dcp.async_save(async_stager=...)``.

    The memory is reserved at the first call, exactly as much as is needed, and kept until
    :meth:`close`. The copies stay until the next call: one save at a time.

    Raises:
        HostMemoryError: (in :meth:`stage`) the copies do not fit.
        UnsupportedParameterError: (likewise) a value cannot be copied; nothing was saved.
    """

    def __init__(self) -> None:
        self._pool: HostPool | None = None
        self._arena: HostRange | None = None
        self._links: dict[torch.device, Link] = {}

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A deep copy of ``state_dict``, tensors in any container or object included.

        The elements of dense tensors go to page-locked memory, once where two tensors are the same
        view of one memory. Sparse, quantized and strided nested tensors go to pageable memory.
        """
        pickled = io.BytesIO()
        finder = _Finder(pickled)
        try:
            finder.dump(state_dict)
        except Exception as error:  # whatever a class raises that is no value
            raise _uncopied("a value to be saved", error) from error
        tensors = [value for value in finder.found if isinstance(value, Tensor)]
        sources: dict[object, Tensor] = {}

        def collect(plain: Tensor) -> Tensor:
            if _is_dense(plain):
                sources.setdefault(_place(plain), plain)
            return plain

        for tensor in tensors:
            _with_copies(tensor, collect)
        copies = self._copies_of(sources)

        def copy(plain: Tensor) -> Tensor:
            if _is_dense(plain) and (place := _place(plain)) in copies:
                return copies[place]
            return plain.to("cpu", copy=True)

        values = [_with_copies(v, copy) if isinstance(v, Tensor) else v for v in finder.found]
        pickled.seek(0)
        try:
            return _Builder(pickled, values).load()  # type: ignore[no-any-return]
        except Exception as error:
            raise _uncopied("a value to be saved", error) from error

    def _copies_of(self, sources: dict[object, Tensor]) -> dict[object, Tensor]:
        """One behind the other in the arena, which is made larger if they do not fit."""
        nbytes = sum(aligned(source.nbytes) for source in sources.values())
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
            offset += aligned(source.nbytes)
            made[place] = target.view(source.shape)
            pairs.append((as_bytes(target), as_bytes(source)))
        self._fill(pairs)
        return made

    def _fill(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Copy: device memory by links, host memory meanwhile by threads."""
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
        finally:  # else a later call could give the memory back below a copy
            for event in stored:
                event.synchronize()

    def synchronize_staging(self) -> None:
        """Nothing is under way: :meth:`stage` returns when the copies are there."""

    def close(self) -> None:
        """Give the memory back; the copies are gone."""
        self._pool = self._arena = None


# --------------------------------------------------------------------------- containers


class _Finder(pickle.Pickler):
    """Walks through containers and objects as pickle does, and leaves out what ``found`` keeps."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.found: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        """Of a tensor; of plain values too, which stay the objects that they are."""
        if not isinstance(value, Tensor | str | int | float | bytes | type | FunctionType):
            return None
        self.found.append(value)
        return len(self.found) - 1


class _Builder(pickle.Unpickler):
    """Makes what a :class:`_Finder` has seen anew, around ``values``."""

    def __init__(self, file: io.BytesIO, values: list[Any]) -> None:
        super().__init__(file)
        self._values = values

    def persistent_load(self, index: int) -> Any:
        """The value of that number."""
        return self._values[index]


# --------------------------------------------------------------------------- tensors


def _place(plain: Tensor) -> object:
    """What two tensors have in common that are the same view of one memory."""
    form = plain.dtype, plain.shape, plain.stride(), plain.is_conj(), plain.is_neg()
    return plain.device, plain.data_ptr(), *form


def _with_copies(tensor: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
    """``tensor``, with what ``copy`` makes of each dense tensor that it consists of.

    Raises:
        UnsupportedParameterError: its elements are in no memory that it shows.
    """
    try:
        return dtensor.like(tensor, _local_copy(dtensor.local(tensor), copy))
    except OffloadError:
        raise
    except Exception as error:  # subclasses may refuse any operation
        raise _uncopied(f"a tensor of type {type(tensor).__name__}", error) from error


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
    """Whether its memory is what its shape, strides and dtype say."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def _uncopied(what: str, error: Exception) -> UnsupportedParameterError:
    return UnsupportedParameterError(
        what,
        reason=f"it cannot be copied: {textwrap.shorten(str(error), 200)}",
        remedy="leave it out of what is saved, or save it as plain tensors and values",
    )
