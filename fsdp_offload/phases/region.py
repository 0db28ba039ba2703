"""Memory at fixed addresses: tensors of a region, and storages that move into such memory."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import torch
from torch import Tensor

from ..core import storage as storages
from ..core.config import TransferConfig, align, brief, parse_bytes
from ..core.devices import backend_for, default_device
from ..core.errors import (
    AwayError,
    ConfigError,
    DeviceError,
    DeviceMemoryError,
    check_open,
    copy_error,
)
from ..core.interrupts import defer_sigint
from ..link import address_range, held_bytes
from ..link.address_range import ALIGNMENT_BYTES, CHUNK_BYTES, AddressRange, Chunk
from ..link.block import OwnedBlock
from ..link.transfer import Figures, Handle, Transfer, batches

ROW_BYTES: Final = 512 << 20
"""Most bytes of storages that move together, and so of the extra device memory."""


class FixedMemory:
    """Address ranges of a device, added as needed, for tensors of a region or for storages of an
    ``owner``, a PhaseOffloader.

    Raises:
        DeviceError: the device cannot keep addresses.
    """

    def __init__(
        self, name: str, device: torch.device, chunk_bytes: int, owner: object = None
    ) -> None:
        address_range.driver_of(device)
        self._name, self._device, self._chunk_bytes = name, device, chunk_bytes
        self._owner = None if owner is None else weakref.ref(owner)
        # With the storages that moved in.
        self.ranges: dict[AddressRange, list[torch.UntypedStorage]] = {}

    def blocks(self) -> list[Chunk]:
        # A plain optimizer's load_state_dict() replaces its state: free what nothing else holds.
        self.ranges = {
            each: moved
            for each, moved in self.ranges.items()
            if not moved or any(map(storages.is_held, moved))
        }
        return [
            chunk
            for each, moved in self.ranges.items()
            for chunk in each.chunks([(s, s.data_ptr() - each.address) for s in moved])
        ]

    def grow(self, n_bytes: int) -> AddressRange:
        """Add a range; raises ``torch.OutOfMemoryError``."""
        driver, key = address_range.driver_of(self._device), f"{self._name}/{len(self.ranges)}"
        made = AddressRange(driver, key, n_bytes, self._chunk_bytes, self._owner)
        self.ranges[made] = []
        return made

    def move_in(self, found: Iterable[OwnedBlock]) -> None:
        """Move storages into the ranges, with their content, on the current stream.

        After an error, moved storages stay until :meth:`move_out`.

        Raises:
            torch.OutOfMemoryError: not enough memory for another row.
            DeviceError: this torch, or its allocator's settings, cannot do it.
        """
        if not storages.can_swap():
            if self._device.type == "cpu":
                raise DeviceError(
                    f"keep_addresses=True on the CPU with torch {torch.__version__}",
                    reason="this torch cannot exchange the memory of two storages",
                    remedy="use torch 2.13 or later, or leave keep_addresses out",
                )
            return self._move_through_pool(list(found))
        for row in batches(found, ROW_BYTES):
            addresses = self.grow(sum(align(block.n_bytes, ALIGNMENT_BYTES) for block in row))
            for block in row:
                fresh = addresses.take(block.n_bytes)
                storage, _ = block.storages[0]
                fresh.copy_(storage)
                storages.swap_memory(storage, fresh)
                self._note(storage, addresses)

    def _move_through_pool(self, found: list[OwnedBlock]) -> None:
        pool = storages.AddressPool(self._device, lambda n: self.grow(n).address)
        large = (block for block in found if not storages.is_small(block.n_bytes))
        small = (block for block in found if storages.is_small(block.n_bytes))
        # Storages share a segment only where the allocator cuts it exactly. Small ones never do: it
        # has segments of its own for them.
        row_bytes = ROW_BYTES if storages.cuts_segments(self._device) else 1
        for row in (*batches(large, row_bytes), *batches(small, 1)):
            moved = [storage for block in row for storage, _ in block.storages]
            pool.move(moved)
            for storage in moved:
                address = storage.data_ptr()
                found_in = (r for r in self.ranges if 0 <= address - r.address < r.n_bytes)
                if (addresses := next(found_in, None)) is None:
                    raise storages.elsewhere_error(storage.nbytes())
                self._note(storage, addresses)
        # The allocator did not need all segments.
        self.ranges = {each: moved for each, moved in self.ranges.items() if moved}

    def _note(self, storage: torch.UntypedStorage, addresses: AddressRange) -> None:
        storages.tie(storage, addresses)  # torch before 2.13 does not keep them alive
        self.ranges[addresses].append(storage)

    def move_out(self) -> None:
        """Move all storages to ordinary memory again, a row at a time. They are present.

        Raises:
            torch.OutOfMemoryError: not enough memory; the rest stays here, and a later call
                continues.
        """
        while self.ranges:
            addresses, moved = next(reversed(self.ranges.items()))
            while moved:
                _make_ordinary(moved[-1])
                moved.pop()
            # Its memory is freed after the copies: closing it waits for the device.
            del self.ranges[addresses]


def _make_ordinary(storage: torch.UntypedStorage) -> None:
    storages.renew(storage)
    storages.untie(storage)


def is_movable(storage: torch.UntypedStorage, offloader: object) -> bool:
    """Whether ``offloader`` moves a storage by itself, not with its address range.

    The owner of a region pauses its storages. ``offloader`` moves storages whose addresses it keeps
    in chunks. A storage whose offloader is dead gets ordinary memory.

    Raises:
        ConfigError: another PhaseOffloader keeps its address.
    """
    addresses = storages.owner_of(storage)
    if addresses is None:
        return True
    if addresses.owner is None:
        return False
    owner = addresses.owner()
    if owner is None:
        _make_ordinary(storage)
    elif owner is not offloader:
        raise ConfigError(
            f"a storage of {storage.nbytes()} bytes",
            reason="another PhaseOffloader keeps its address, and offloads it",
            remedy="close() that one first, or give both sets of tensors to one PhaseOffloader",
        )
    return owner is None


@dataclass(frozen=True)
class RegionStatistics:
    """Sizes of a region, and figures of its moves."""

    n_bytes: int  # device memory of the whole region, gaps between tensors included
    device_bytes: int  # device memory that is mapped now
    pinned_bytes: int  # host memory for its contents; 0 before the first pause(save=True)
    host_bytes_by_holder: dict[str, int]  # of this whole process; host_memory= bounds the sum
    offloaded: Figures  # last pause that copied, after it has been waited for
    reloaded: Figures  # last resume, after it has been waited for


class FixedAddressRegion:
    """Device memory for tensors that keep their address while the memory is freed.

    Example::

        region = FixedAddressRegion("kv")
        kv = region.empty((n, d), dtype=torch.bfloat16)
        region.pause(save=False)      # the memory is free for others
        region.resume()               # same data_ptr: CUDA graphs over it replay

    The region grows with :meth:`empty`. It does not reuse the memory of a dead tensor: all memory
    is freed when the region and all of its tensors are gone.

    Do not use its tensors while it is paused: a kernel would stop with an illegal access.

    Args:
        name: for statistics and error messages.
        device: ``None``: the current accelerator, else the CPU.
        transfer: how to allocate host memory (``pin``, ``host_memory``).
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
        state = "paused" if self._is_paused else "present"
        if self._is_paused:
            saved_bytes = sum(self._transfer.away_bytes.values())
            state += f", {brief(saved_bytes)} saved" if saved_bytes else ", not saved"
        state = "closed" if self._is_closed else f"{brief(self.n_bytes)} {state}"
        return f"FixedAddressRegion({self.name!r}, {self.device}, {state})"

    @property
    def is_paused(self) -> bool:
        """Whether its memory is unmapped, so that its tensors must not be used."""
        return self._is_paused

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole region, mapped or not."""
        return sum(each.n_bytes for each in self._memory.ranges)

    @defer_sigint()
    def empty(self, shape: int | Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate a contiguous tensor in the region, uninitialised.

        Args:
            shape: sizes, as in ``torch.empty``.
            dtype: any; ``None`` is torch's default.

        Raises:
            AwayError: the region is paused.
            ClosedError: the region is closed.
            DeviceMemoryError: the region cannot grow; nothing was taken.
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
                    f"growing region {self.name!r} by {brief(n_bytes)}",
                    reason=str(error),
                    remedy="free device memory and try again; the region has not changed",
                ) from error
            storage = addresses.take(n_bytes)
            storages.tie(storage, addresses)  # so that a PhaseOffloader does not move it
            tensor = torch.empty(0, dtype=dtype, device=self.device)
            contiguous = torch.empty(sizes, device="meta").stride()
            return tensor.set_(storage, 0, sizes, contiguous)

    @defer_sigint()
    def reserve(self) -> None:
        """Allocate and pin host memory now instead of in the first ``pause(save=True)``.

        Raises:
            HostMemoryError: it does not fit.
            PinningError: the driver refused.
        """
        self._check_open("reserve()")
        self._transfer.reserve(self._memory.blocks())

    @defer_sigint()
    def pause(self, save: bool = True, wait: bool = True) -> Handle:
        """Free the device memory. Does nothing if it is already paused.

        It runs after the work of the current stream. The caller has waited for the work of other
        streams on the region.

        Args:
            save: copy the contents to host memory; if False, they are undefined after
                :meth:`resume`.
            wait: return after the memory is free; if False, :meth:`Handle.wait` or
                :meth:`Handle.is_done` frees what has been copied.

        Raises:
            HostMemoryError, PinningError: no host memory for the contents; nothing moved.
            ClosedError: the region is closed, or belongs to another process.
        """
        self._check_open("pause()")
        if not self._is_paused:
            chunks = self._memory.blocks()
            self._transfer.out([("region", chunks)] if save else [], () if save else chunks)
            self._is_paused = True
        return self._transfer.last(wait=wait)

    @defer_sigint()
    def resume(self, wait: bool = True) -> Handle:
        """Map the device memory again, and restore saved contents. Does nothing if it is not
        paused.

        Args:
            wait: return after the contents are restored; if False, :meth:`Handle.wait` waits for
                them.

        Raises:
            DeviceMemoryError: device memory is short. The region stays paused, with its contents in
                host memory; a later call may succeed.
            ClosedError: the region is closed, or belongs to another process.
        """
        self._check_open("resume()")
        if self._is_paused:
            handle = self._transfer.back()
            if (arrival := handle.arrival()) is not None:
                self._backend.current_stream().wait(arrival)
            self._is_paused = False
        return self._transfer.last(wait=wait)

    def statistics(self) -> RegionStatistics:
        """Return sizes, and figures of the last moves."""
        return RegionStatistics(
            n_bytes=self.n_bytes,
            device_bytes=sum(each.mapped_bytes for each in self._memory.ranges),
            pinned_bytes=self._transfer.pool.n_bytes,
            host_bytes_by_holder=held_bytes(),
            offloaded=self._transfer.last_out.figures().get("region", Figures()),
            reloaded=self._transfer.last_back.figures().get("region", Figures()),
        )

    @defer_sigint()
    def close(self) -> None:
        """Free all memory: the host's now, the device's with the last tensor.

        A paused region loses its contents. Idempotent.
        """
        self._transfer.close()
        self._is_closed = True
        self._memory.ranges.clear()  # freed with the last reference

    def _check_open(self, what: str) -> None:
        check_open(f"{what} of region {self.name!r}", self._pid, is_closed=self._is_closed)
