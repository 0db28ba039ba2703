"""Tensors whose device memory can go and come back at the same address."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import torch
from torch import Tensor

from ..core.backend import backend_for
from ..core.config import TransferConfig
from ..core.errors import AwayError, ClosedError, ConfigError, DeviceMemoryError
from ..core.interrupts import held_back
from ..core.storage import tie
from ..memory.transfer import Figures, Handle, Transfer
from ..plan.layout import align
from . import pages
from .pages import Chunk, Pages

ALIGNMENT_BYTES: Final = 512
"""Of each tensor, as in torch's own allocator."""


class Extent:
    """A range of pages that storages are given out of, front to back."""

    def __init__(self, key: str, device: torch.device, n_bytes: int, chunk_bytes: int) -> None:
        self.pages: Pages = pages.make(device, n_bytes, chunk_bytes)
        self.chunks = [
            Chunk(f"{key}/{index}", self.pages, index) for index in range(len(self.pages.chunks))
        ]
        self.used_bytes = 0

    def fits(self, n_bytes: int) -> bool:
        """Whether :meth:`take` can give that much."""
        return self.used_bytes + n_bytes <= self.pages.n_bytes

    def take(self, n_bytes: int) -> torch.UntypedStorage:
        """A storage over the next bytes."""
        taken = self.pages.tensor(self.used_bytes, n_bytes).untyped_storage()
        self.used_bytes += align(n_bytes, ALIGNMENT_BYTES)
        return taken

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage lies here."""
        return 0 <= storage.data_ptr() - self.pages.address < self.pages.n_bytes


class Extents:
    """Device memory at addresses that stay; it grows by whole extents.

    Args:
        name: begins the keys of all chunks.
        device: CUDA or the CPU.
        chunk_bytes: memory comes and goes in parts of this size.

    Raises:
        DeviceError: the device cannot keep addresses.
    """

    def __init__(self, name: str, device: torch.device, chunk_bytes: int) -> None:
        pages.check(device)
        self.name, self._device, self._chunk_bytes = name, device, chunk_bytes
        self._extents: list[Extent] = []
        self._n_made = 0  # so far: no two have the same key

    def __iter__(self) -> Iterator[Extent]:
        return iter(self._extents)

    def grow(self, n_bytes: int) -> Extent:
        """Another one, of at least that many bytes, with memory.

        Raises:
            torch.OutOfMemoryError: there is none.
        """
        key = f"{self.name}/{self._n_made}"
        extent = Extent(key, self._device, max(n_bytes, 1), self._chunk_bytes)
        self._extents.append(extent)
        self._n_made += 1
        return extent

    def that_fits(self, n_bytes: int) -> Extent:
        """The first that has room, or another one; raises as :meth:`grow`."""
        found = (extent for extent in self._extents if extent.fits(n_bytes))
        return next(found, None) or self.grow(n_bytes)

    def drop(self, extent: Extent) -> None:
        """Forget one: its memory goes when nothing refers to it any more."""
        self._extents.remove(extent)

    def clear(self) -> None:
        """:meth:`drop` all."""
        self._extents.clear()

    def chunks(self) -> list[Chunk]:
        """All of the memory."""
        return [chunk for extent in self._extents for chunk in extent.chunks]

    def locate(self, storage: torch.UntypedStorage) -> tuple[str, int] | None:
        """The key of the first chunk of the extent in which a storage lies, and its first byte
        there; None: in none."""
        for extent in self._extents:
            if extent.holds(storage):
                return extent.chunks[0].key, storage.data_ptr() - extent.pages.address
        return None

    @property
    def n_bytes(self) -> int:
        """Whether it has memory or not."""
        return sum(extent.pages.n_bytes for extent in self._extents)

    @property
    def device_bytes(self) -> int:
        """Memory that it has now."""
        return sum(
            stop - start
            for extent in self._extents
            for index, (start, stop) in enumerate(extent.pages.chunks)
            if extent.pages.is_mapped(index)
        )


@dataclass(frozen=True)
class RegionStatistics:
    """What a region holds and what its moves took. Rates are 0 before the first copy."""

    n_bytes: int
    """Device memory of the whole region: what tensors take and what is left between them."""

    device_bytes: int
    """Device memory that it has now."""

    pinned_bytes: int
    """Host memory that is reserved for its contents; 0 before the first ``pause(save=True)``."""

    out_bytes: int
    """Copied out by the last pause that did."""

    out_seconds: float
    """From that call to when its memory was given up, as the host saw it."""

    back_bytes: int
    """Copied back by the last resume that did."""

    back_seconds: float
    """From that call to the end of the copies, as the host saw it."""

    @property
    def out_gbps(self) -> float:
        """10^9 bytes per second."""
        return Figures(self.out_bytes, self.out_seconds).gb_per_second

    @property
    def back_gbps(self) -> float:
        """10^9 bytes per second."""
        return Figures(self.back_bytes, self.back_seconds).gb_per_second


class FixedAddressRegion:
    """Device memory for tensors that keep their address while their memory is away.

    Example::

        region = FixedAddressRegion("kv")
        kv = region.empty((n, d), dtype=torch.bfloat16)
        region.pause(save=False)      # the memory is free for others
        region.resume()               # same data_ptr: CUDA graphs over it replay

    The region grows with :meth:`empty`. What a tensor took is not given out again when it dies:
    all memory goes back when the region and all of its tensors are gone.

    The caller does not use its tensors while it is paused: a kernel stops with an illegal access.

    Args:
        name: for statistics and error messages.
        device: where; ``None`` is the current accelerator, or the CPU where there is none.
        transfer: how to obtain host memory (``pin``, ``huge_pages``, ``numa``, ``host_budget``).
        chunk_bytes: memory comes and goes in parts of this size.

    Raises:
        DeviceError: the device cannot keep addresses (other than CUDA and the CPU).
        ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        name: str,
        device: torch.device | str | int | None = None,
        *,
        transfer: TransferConfig | None = None,
        chunk_bytes: int = pages.CHUNK_BYTES,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"name={name!r}", reason="no name", remedy='give one, such as "kv"')
        if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes <= 0:
            raise ConfigError(
                f"chunk_bytes={chunk_bytes!r}", reason="no size", remedy="use bytes above 0"
            )
        backend = backend_for(_device(device))
        self.name, self.device = name, backend.device
        self._backend, self._config = backend, transfer or TransferConfig()
        self._extents = Extents(name, self.device, chunk_bytes)
        self._transfer: Transfer | None = None  # until it is needed: it has streams
        self._is_paused = self._is_closed = False
        self._last_out = self._last_back = Handle()

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            f"a copy or a pickle of region {self.name!r}",
            reason="it owns its memory",
            remedy="copy its tensors",
        )

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "paused" if self._is_paused else "present"
        return f"FixedAddressRegion({self.name!r}, {self.device}, {self.n_bytes} bytes, {state})"

    @property
    def is_paused(self) -> bool:
        """Whether its tensors may not be used."""
        return self._is_paused

    @property
    def n_bytes(self) -> int:
        """Device memory of the whole region, whether it is there or not."""
        return self._extents.n_bytes

    @held_back()
    def empty(self, shape: int | Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
        """A contiguous tensor of the region, with any content.

        Args:
            shape: sizes, as of ``torch.empty``.
            dtype: any; ``None`` is torch's default.

        Raises:
            AwayError: the region is paused.
            ClosedError: it is closed.
            DeviceMemoryError: it cannot grow; nothing was taken.
            ConfigError: a size is negative.
        """
        sizes = torch.Size((shape,) if isinstance(shape, int) else shape)
        dtype = dtype or torch.get_default_dtype()
        if any(size < 0 for size in sizes):
            raise ConfigError(
                f"shape={tuple(sizes)}", reason="a size is negative", remedy="use 0 or more"
            )
        self._check_open("empty()")
        if self._is_paused:
            raise AwayError(
                f"empty() of region {self.name!r}",
                reason="it is paused, and a new tensor would have no memory",
                remedy="call resume() first",
            )
        n_bytes = math.prod(sizes) * dtype.itemsize
        with torch.inference_mode(False):
            tensor = torch.empty(0 if n_bytes else sizes, dtype=dtype, device=self.device)
            if not n_bytes:
                return tensor
            try:
                extent = self._extents.that_fits(n_bytes)
            except torch.OutOfMemoryError as error:
                raise DeviceMemoryError(
                    f"growing region {self.name!r} by {n_bytes} bytes",
                    reason=str(error),
                    remedy="free device memory and try again; the region is as before",
                ) from error
            storage = extent.take(n_bytes)
            tie(storage, extent.pages)  # a PhaseOffloader leaves it where it is
            strides = torch.empty(sizes, dtype=dtype, device="meta").stride()
            return tensor.set_(storage, 0, sizes, strides)

    @held_back()
    def reserve(self) -> None:
        """Take, and pin, host memory now instead of in the first ``pause(save=True)``.

        Raises:
            HostMemoryError: it does not fit.
            PinningError: the driver refused.
        """
        self._check_open("reserve()")
        self._mover().reserve(self._extents.chunks())

    @held_back()
    def pause(self, save: bool = True, wait: bool = True) -> Handle:
        """Give the device memory up. Paused already: nothing happens, whatever ``save`` is.

        It starts after what the caller's current stream has under way. Work of other streams on
        the region has to be waited for before (``torch.cuda.synchronize()``, or events).

        Args:
            save: copy the contents to host memory; False: they are undefined after
                :meth:`resume`.
            wait: return when the memory is free. False: :meth:`Handle.wait` or
                :meth:`Handle.is_done` gives up what has left by then.

        Raises:
            HostMemoryError: there is no host memory for the contents; nothing has moved.
            PinningError: likewise.
            ClosedError: the region is closed.
        """
        self._check_open("pause()")
        mover, chunks = self._mover(), self._extents.chunks()
        if not self._is_paused:
            if save:
                self._last_out = mover.out([("region", chunks)])
            else:
                mover.out([], dropped=chunks)
            self._is_paused = True
        return _ended(mover.handle, wait)

    @held_back()
    def resume(self, wait: bool = True) -> Handle:
        """Take the device memory back, with the contents if they were saved. Not paused: nothing.

        Args:
            wait: return when the contents are there. False: :meth:`Handle.wait` says so.

        Raises:
            DeviceMemoryError: there is no memory. The region stays paused, its contents stay in
                host memory; a later call may succeed.
            ClosedError: the region is closed.
        """
        self._check_open("resume()")
        mover = self._mover()
        if self._is_paused:
            try:
                handle = mover.back()
            except torch.OutOfMemoryError as error:
                raise DeviceMemoryError(
                    f"resuming region {self.name!r}, {self.n_bytes} bytes",
                    reason=str(error),
                    remedy="free device memory and call resume() again; contents that were saved "
                    "are still in host memory",
                ) from error
            if (arrival := handle.arrival()) is not None:
                self._backend.current_stream().wait(arrival)
            self._last_back = handle if handle.n_bytes else self._last_back
            self._is_paused = False
        return _ended(mover.handle, wait)

    def statistics(self) -> RegionStatistics:
        """Sizes, and the last moves' times."""
        return RegionStatistics(
            n_bytes=self.n_bytes,
            device_bytes=self._extents.device_bytes,
            pinned_bytes=0 if self._transfer is None else self._transfer.buffers.n_bytes,
            out_bytes=self._last_out.n_bytes,
            out_seconds=self._last_out.seconds,
            back_bytes=self._last_back.n_bytes,
            back_seconds=self._last_back.seconds,
        )

    @held_back()
    def close(self) -> None:
        """Give all memory back: the host's now, the device's when the last tensor is gone.

        Contents of tensors are lost if the region is paused. Idempotent.
        """
        if self._transfer is not None:
            self._transfer.close()
        self._is_closed = True
        self._extents.clear()

    def _mover(self) -> Transfer:
        if self._transfer is None:
            self._transfer = Transfer(self._backend, self._config)
        return self._transfer

    def _check_open(self, what: str) -> None:
        if self._is_closed:
            raise ClosedError(
                f"{what} of region {self.name!r}", reason="it is closed", remedy="make a new one"
            )


def _ended(handle: Handle, wait: bool) -> Handle:
    if wait:
        handle.wait()
    return handle


def _device(given: torch.device | str | int | None) -> torch.device:
    if given is not None:
        return torch.device(given)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
