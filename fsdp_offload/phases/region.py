"""Tensors whose device memory is given up and taken back at the same address."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from ..core.config import TransferConfig, parse_bytes
from ..core.devices import backend_for, default_device
from ..core.errors import AwayError, ConfigError, DeviceMemoryError, check_open, copy_error
from ..core.interrupts import held_back
from ..core.storage import tie
from ..link import held_bytes
from ..link.address_range import CHUNK_BYTES
from ..link.transfer import Figures, Handle, Transfer
from .fixed import FixedMemory


@dataclass(frozen=True)
class RegionStatistics:
    """What a region holds and what its moves took."""

    n_bytes: int  # device memory of the whole region, with what lies between tensors
    device_bytes: int  # that it has now
    pinned_bytes: int  # host memory for its contents; 0 before the first pause(save=True)
    host_bytes_by_holder: dict[str, int]  # of all that this process holds; host_memory= bounds it
    offloaded: Figures  # of the last pause that copied, once it was waited for
    reloaded: Figures  # of the last resume, likewise


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
        transfer: how to obtain host memory (``pin``, ``host_memory``).
        chunk_bytes: memory is mapped and unmapped in chunks of this size.

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
        chunk_bytes: int | str = CHUNK_BYTES,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"name={name!r}",
                reason="it must be a non-empty string",
                remedy='use one such as "kv"',
            )
        chunk = parse_bytes(chunk_bytes, "chunk_bytes")
        if not chunk:
            raise ConfigError("chunk_bytes=0", reason="it must be positive", remedy="leave it out")
        if device is None:
            device = default_device()
        self._backend = backend = backend_for(torch.device(device))
        self.name, self.device = name, backend.device
        self._memory = FixedMemory(name, backend.device, chunk)
        self._transfer = Transfer(backend, transfer, f"FixedAddressRegion: {name}")
        self._is_paused = self._is_closed = False
        self._pid = os.getpid()

    def __reduce__(self) -> NoReturn:
        raise copy_error(self, "copy its tensors")

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "paused" if self._is_paused else "present"
        return f"FixedAddressRegion({self.name!r}, {self.device}, {self.n_bytes} bytes, {state})"

    @property
    def is_paused(self) -> bool:
        """Whether its tensors may not be used."""
        return self._is_paused

    @property
    def n_bytes(self) -> int:
        """Device memory of the whole region, whether it is present or not."""
        return self._memory.n_bytes

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
            reason = "it is paused, and a new tensor would have no memory"
            raise AwayError(
                f"empty() of region {self.name!r}", reason=reason, remedy="call resume() first"
            )
        n_bytes = math.prod(sizes) * dtype.itemsize
        with torch.inference_mode(False):
            if not n_bytes:
                return torch.empty(sizes, dtype=dtype, device=self.device)
            rest = (r for r in self._memory.ranges if r.used_bytes + n_bytes <= r.n_bytes)
            try:
                addresses = next(rest, None) or self._memory.grow(n_bytes)
            except torch.OutOfMemoryError as error:
                raise DeviceMemoryError(
                    f"growing region {self.name!r} by {n_bytes} bytes",
                    reason=str(error),
                    remedy="free device memory and try again; the region has not changed",
                ) from error
            storage = addresses.take(n_bytes)
            tie(storage, addresses)  # a PhaseOffloader leaves it where it is
            tensor = torch.empty(0, dtype=dtype, device=self.device)
            return tensor.set_(storage, 0, sizes, torch.empty(sizes, device="meta").stride())

    @held_back()
    def reserve(self) -> None:
        """Take, and pin, host memory now instead of in the first ``pause(save=True)``.

        Raises:
            HostMemoryError: it does not fit.
            PinningError: the driver refused.
        """
        self._check_open("reserve()")
        self._transfer.reserve(self._memory.blocks())

    @held_back()
    def pause(self, save: bool = True, wait: bool = True) -> Handle:
        """Give the device memory up. Paused already: nothing happens, whatever ``save`` is.

        It starts after what the current stream has under way. The caller has waited for the work
        of other streams on the region.

        Args:
            save: copy the contents to host memory; False: they are undefined after
                :meth:`resume`.
            wait: return when the memory is free. False: :meth:`Handle.wait` or
                :meth:`Handle.is_done` gives up what was copied by then.

        Raises:
            HostMemoryError, PinningError: no host memory for the contents; nothing has moved.
            ClosedError: the region is closed, or of another process.
        """
        self._check_open("pause()")
        if not self._is_paused:
            chunks = self._memory.blocks()
            self._transfer.out([("region", chunks)] if save else [], () if save else chunks)
            self._is_paused = True
        return self._transfer.last(wait=wait)

    @held_back()
    def resume(self, wait: bool = True) -> Handle:
        """Take the device memory back, with the contents if they were saved. Not paused: nothing.

        Args:
            wait: return when the contents are there. False: :meth:`Handle.wait` says so.

        Raises:
            DeviceMemoryError: there is no memory. The region stays paused, and its contents in host
                memory; a later call may succeed.
            ClosedError: as of :meth:`pause`.
        """
        self._check_open("resume()")
        if self._is_paused:
            handle = self._transfer.back()
            if (arrival := handle.arrival()) is not None:
                self._backend.current_stream().wait(arrival)
            self._is_paused = False
        return self._transfer.last(wait=wait)

    def statistics(self) -> RegionStatistics:
        """Sizes, and the last moves' times."""
        return RegionStatistics(
            n_bytes=self.n_bytes,
            device_bytes=sum(each.mapped_bytes for each in self._memory.ranges),
            pinned_bytes=self._transfer.pool.n_bytes,
            host_bytes_by_holder=held_bytes(),
            offloaded=self._transfer.last_out.figures().get("region", Figures()),
            reloaded=self._transfer.last_back.figures().get("region", Figures()),
        )

    @held_back()
    def close(self) -> None:
        """Give all memory back: the host's now, the device's when the last tensor is gone.

        Contents of tensors are lost if the region is paused. Idempotent.
        """
        self._transfer.close()
        self._is_closed = True
        self._memory.ranges.clear()  # it goes when nothing refers to it any more

    def _check_open(self, what: str) -> None:
        check_open(f"{what} of region {self.name!r}", self._pid, is_closed=self._is_closed)
