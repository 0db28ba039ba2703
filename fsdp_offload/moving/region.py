"""Tensors whose device memory can go and come back at the same address."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import torch
from torch import Tensor

from ..config import TransferConfig
from ..device import gateway_for
from ..errors import AwayError, ClosedError, ConfigError, DeviceMemoryError
from ..interrupts import held_back
from ..plan.layout import align
from ..storages import AddressPool, own, renew, tie, untie
from . import pages
from .mover import Mover, Trip
from .pages import PageBlock, Pages
from .places import Places

ALIGNMENT_BYTES: Final = 512
"""Of each tensor, as in torch's own allocator."""


@dataclass(frozen=True)
class RegionStatistics:
    """What a region holds and what its trips took. Rates are 0 before the first copy."""

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
        return self.out_bytes / self.out_seconds / 1e9 if self.out_seconds else 0.0

    @property
    def back_gbps(self) -> float:
        """10^9 bytes per second."""
        return self.back_bytes / self.back_seconds / 1e9 if self.back_seconds else 0.0


class _Extent:
    """A range of pages that tensors are given out of, front to back."""

    def __init__(self, key: str, device: torch.device, n_bytes: int, chunk_bytes: int) -> None:
        self.block = PageBlock(key, pages.make(device, n_bytes, chunk_bytes))
        self.used_bytes = 0
        self.has_tensors = False
        """Others than storages that were moved there."""

    def has_room(self, n_bytes: int) -> bool:
        return self.used_bytes + n_bytes <= self.block.n_bytes

    def take(self, n_bytes: int) -> Tensor:
        """1-D uint8 over the next bytes."""
        tensor = self.block.pages.tensor(self.used_bytes, n_bytes)
        self.used_bytes += align(n_bytes, ALIGNMENT_BYTES)
        return tensor


class FixedAddressRegion:
    """Device memory for tensors that keep their address while their memory is away.

    Example::

        region = FixedAddressRegion("kv")
        kv = region.empty((n, d), dtype=torch.bfloat16)
        region.pause(save=False)      # the memory is free for others
        region.resume()               # same data_ptr: CUDA graphs over it replay

    The region grows with :meth:`empty`. What a tensor took is not given out again when it dies:
    all memory goes back when the region and all of its tensors are gone.

    While it is paused, nobody may use its tensors: on a GPU a kernel stops with an illegal access.

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
        self.name = name
        gateway = gateway_for(_device(device))
        self.device = gateway.device
        pages.check(self.device)
        self._gateway, self._chunk_bytes = gateway, chunk_bytes
        self._places = Places(gateway, transfer or TransferConfig())
        self._extents: list[_Extent] = []
        self._n_extents = 0  # so far: no two have the same key
        self._is_paused = self._is_closed = False
        self._is_saved = True  # whether the places hold what is away
        self._last = self._last_out = self._last_back = Trip()
        self._settled: list[tuple[torch.UntypedStorage, Pages]] = []
        self._pool: AddressPool | None = None
        self.is_half_vacated = False
        """Whether :meth:`vacate` has stopped half-way."""
        self.before_hand_over: Callable[[], None] = _nothing
        """Called by :meth:`hand_over`: who moves the blocks forgets them."""

    @functools.cached_property
    def _mover(self) -> Mover:
        """Made when it is needed: who moves the blocks with another one needs no streams here."""
        return Mover(self._gateway, self._places)

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            f"a copy or a pickle of region {self.name!r}",
            reason="it owns its memory",
            remedy="copy its tensors",
        )

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "paused" if self.is_paused else "present"
        return f"FixedAddressRegion({self.name!r}, {self.device}, {self.n_bytes} bytes, {state})"

    # ---- tensors

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
        self._check_present("empty()")
        n_bytes = math.prod(sizes) * dtype.itemsize
        with torch.inference_mode(False):
            if n_bytes == 0:
                return torch.empty(sizes, dtype=dtype, device=self.device)
            extent = self._extent(n_bytes)
            extent.has_tensors = True
            storage = extent.take(n_bytes).untyped_storage()
            tie(storage, extent.block.pages)
            tensor = torch.empty(0, dtype=dtype, device=self.device)
            strides = torch.empty(sizes, dtype=dtype, device="meta").stride()
            return tensor.set_(storage, 0, sizes, strides)

    @held_back()
    def grow(self, n_bytes: int) -> None:
        """Take device memory for tensors of ``n_bytes`` in all ahead, in one range.

        Raises:
            AwayError, ClosedError, DeviceMemoryError: as :meth:`empty`.
        """
        self._check_present("grow()")
        if n_bytes > 0:
            self._extent(n_bytes)

    def blocks(self) -> list[PageBlock]:
        """Its memory as blocks that a :class:`Mover` moves; later growth adds to them.

        Who moves them calls neither :meth:`pause` nor :meth:`resume` meanwhile.
        """
        return [extent.block for extent in self._extents]

    # ---- storages of others, for settling.py

    def room(self, n_bytes: int) -> torch.UntypedStorage:
        """A storage over the region's next bytes. Raises as :meth:`empty` does."""
        self._check_present("a storage")
        return self._extent(n_bytes).take(n_bytes).untyped_storage()

    def pool(self) -> AddressPool:
        """A pool of torch's allocator over memory of the region."""
        self._check_present("a storage")
        if self._pool is None:
            self._pool = AddressPool(self.device, self._segment)
        return self._pool

    def adopt(self, storage: torch.UntypedStorage, pages: Pages) -> None:
        """The storage's memory is the region's from now on, until :meth:`vacate`."""
        self._settled.append((storage, pages))
        # Without a swap nothing else ties the range's life to the storage's.
        tie(storage, pages)
        own(storage, self)

    def vacate(self) -> None:
        """Storages that were moved here get ordinary memory, and the ranges that held nothing else
        go, each as soon as it is empty and nobody else refers to it.

        Raises:
            AwayError: the region is paused, and there are such storages.
            ClosedError: it is closed.
            torch.OutOfMemoryError: ``is_half_vacated`` says so, and a later call goes on.
        """
        if not self._settled:
            return
        self._check_present("vacate()")
        self.synchronize()
        self.is_half_vacated = True
        left = Counter(id(pages) for _, pages in self._settled)
        while self._settled:
            storage, pages = self._settled[-1]
            renew(storage)
            untie(storage)
            self._settled.pop()
            left[id(pages)] -= 1
            if not left[id(pages)]:
                self._drop(pages)
            del storage, pages
        if self._pool is not None:
            self._pool.start_anew()
        self._drop()
        if not self._extents:
            self._n_extents = 0  # the same keys again, which have places
        self.is_half_vacated = False

    def hand_over(self) -> None:
        """:meth:`vacate`, because somebody else is going to move what was moved here."""
        self.before_hand_over()
        self.vacate()

    def _drop(self, empty: Pages | None = None) -> None:
        """A range in which no moved storage lies any more, or, by default, all of them."""

        def stays(extent: _Extent) -> bool:
            return extent.has_tensors or empty not in (None, extent.block.pages)

        self._extents = list(filter(stays, self._extents))

    def trim(self) -> None:
        """Give back what was taken for the pool and is not needed."""
        if self._pool is not None:
            unused = self._pool.forget_spare()
            self._extents = [e for e in self._extents if e.block.pages.address not in unused]

    def synchronize(self) -> None:
        """Wait for the caller's current stream."""
        self._gateway.current_stream().synchronize()

    def _segment(self, n_bytes: int) -> int:
        """The address of memory that is given to the pool as a whole."""
        extent = self._grown(n_bytes)
        extent.used_bytes = extent.block.n_bytes
        return extent.block.pages.address

    def _extent(self, n_bytes: int) -> _Extent:
        for extent in self._extents:
            if extent.has_room(n_bytes):
                return extent
        return self._grown(n_bytes)

    def _grown(self, n_bytes: int) -> _Extent:
        key = f"{self.name}/{self._n_extents}"
        try:
            extent = _Extent(key, self.device, max(n_bytes, 1), self._chunk_bytes)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"growing region {self.name!r} by {n_bytes} bytes",
                reason=str(error),
                remedy="free device memory and try again; the region is as before",
            ) from error
        self._extents.append(extent)
        self._n_extents += 1
        return extent

    # ---- going and coming back

    @property
    def is_paused(self) -> bool:
        """Whether its tensors may not be used."""
        return self._is_paused or self.device_bytes < self.n_bytes

    @property
    def n_bytes(self) -> int:
        """Device memory of the whole region, whether it is there or not."""
        return sum(extent.block.n_bytes for extent in self._extents)

    @property
    def device_bytes(self) -> int:
        """Device memory that it has now."""
        return sum(
            stop - start
            for extent in self._extents
            for index, (start, stop) in enumerate(extent.block.pieces)
            if extent.block.is_present(index)
        )

    @held_back()
    def reserve(self) -> None:
        """Take, and pin, host memory now instead of in the first ``pause(save=True)``.

        Raises:
            HostMemoryError: it does not fit.
            PinningError: the driver refused.
        """
        self._check_open("reserve()")
        self._mover.reserve(self.blocks())

    @held_back()
    def pause(self, save: bool = True, wait: bool = True) -> Trip:
        """Give the device memory up. Paused already: nothing happens, whatever ``save`` is.

        It starts after what the caller's current stream has under way. Work of other streams on
        the region has to be waited for before (``torch.cuda.synchronize()``, or events).

        Args:
            save: copy the contents to host memory; False: they are undefined after
                :meth:`resume`.
            wait: return when the memory is free. False: the caller's ``Trip.wait()`` or
                ``Trip.advance()`` gives up what has left by then.

        Returns:
            The trip, with its bytes and seconds.

        Raises:
            HostMemoryError: there is no host memory for the contents; nothing has moved.
            PinningError: likewise.
            ClosedError: the region is closed.
        """
        self._check_open("pause()")
        if self._is_paused:
            return self._ended(self._last, wait)
        self._is_saved = save or (self._is_saved and self.is_paused)
        leave = self._mover.out if self._is_saved else self._mover.drop
        trip = leave(self.blocks())
        self._is_paused = True
        if self._is_saved:
            self._last_out = trip
        return self._ended(trip, wait)

    @held_back()
    def resume(self, wait: bool = True) -> Trip:
        """Take the device memory back, with the contents if they were saved. Not paused: nothing.

        Args:
            wait: return when the contents are there. False: ``Trip.wait()`` says so.

        Raises:
            DeviceMemoryError: there is no memory. The region stays paused, its contents stay in
                host memory; a later call may succeed.
            ClosedError: the region is closed.
        """
        self._check_open("resume()")
        if not self.is_paused:
            return self._ended(self._last, wait)
        missing_bytes = self.n_bytes - self.device_bytes
        try:
            if self._is_saved:
                trip = self._last_back = self._mover.back(self.blocks())
            else:
                self._mover.renew(self.blocks())
                trip = Trip()
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"resuming region {self.name!r}, {missing_bytes} bytes",
                reason=str(error),
                remedy="free device memory and call resume() again; contents that were saved are "
                "still in host memory",
            ) from error
        self._is_paused = False
        return self._ended(trip, wait)

    def statistics(self) -> RegionStatistics:
        """Sizes, and the last trips' times."""
        return RegionStatistics(
            n_bytes=self.n_bytes,
            device_bytes=self.device_bytes,
            pinned_bytes=self._places.n_bytes,
            out_bytes=self._last_out.n_bytes,
            out_seconds=self._last_out.seconds,
            back_bytes=self._last_back.n_bytes,
            back_seconds=self._last_back.seconds,
        )

    @held_back()
    def close(self) -> None:
        """Give all memory back: the host's now, the device's when the last tensor is gone.

        Storages that were moved here get ordinary memory. Contents of other tensors are lost if
        the region is paused. Idempotent.

        Raises:
            AwayError: the region is paused and storages were moved here.
        """
        if self._is_closed:
            return
        if "_mover" in vars(self):
            self._mover.wait()
        self.vacate()
        self._pool = None
        self._is_closed = True
        self._places.close()
        self._extents.clear()

    def _ended(self, trip: Trip, wait: bool) -> Trip:
        self._last = trip
        if wait:
            trip.wait()
        return trip

    def _check_open(self, what: str) -> None:
        if self._is_closed:
            raise ClosedError(
                f"{what} of region {self.name!r}", reason="it is closed", remedy="make a new one"
            )

    def _check_present(self, what: str) -> None:
        self._check_open(what)
        if self.is_paused:
            raise AwayError(
                f"{what} of region {self.name!r}",
                reason="it is paused, and a new tensor would have no memory",
                remedy="call resume() first",
            )


def _nothing() -> None:
    """Nobody moves the blocks."""


def _device(given: torch.device | str | int | None) -> torch.device:
    if given is not None:
        return torch.device(given)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
