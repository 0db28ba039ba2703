"""Flat host memory that tensors lie on: exact in size, near the device, page-locked.

torch's own pinned allocator rounds to powers of two and touches pages from one thread. The arena
is one anonymous private mapping instead, touched by many threads, then registered with the driver
in one call.

Notes on lifetime. Tensors hold a reference to the mapping, so it is unmapped when the arena *and*
the last tensor over it are gone, never earlier; `mmap.close` would unmap under living tensors and
is never called. A forked child (a DataLoader worker) does not get the mapping at all
(``MADV_DONTFORK``): it costs the child nothing, and a child that touches state tensors dies with
SIGSEGV instead of changing a copy of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

import torch

from ..core import devices
from ..core.config import MIB, TransferConfig, align
from ..core.errors import HostMemoryError, PinningError
from ..core.progress import progress, report
from .budget import cores_per_rank, size_text

HUGE_PAGE_BYTES: Final = 2 * MIB
# One torch call touches at most 16384 pages: from 32768 elements on torch spreads an operation over
# its intra-op threads, and their number cannot be set for one thread alone (`set_num_threads` also
# sets what threads started later inherit).
_CALL_BYTES: Final = 64 * MIB
_STALL_SECONDS: Final = 0.5
_MIN_THREADS: Final = 4


class _Mapping(mmap.mmap):
    """Memory of the process that made it.

    In a forked child the range is not mapped, and later mappings of the child may lie there: its
    copy of this object never ends, because the end would unmap them.
    """

    _pid = 0  # it is not mapped

    def __init__(self, *_: object, **__: object) -> None:  # mmap takes them when it is made
        self._pid = os.getpid()

    def __del__(
        self,
        pid: Callable[[], int] = os.getpid,  # as modules are no more when the interpreter ends
        keep: Callable[[Any], object] = ctypes.pythonapi.Py_IncRef,
        made: Callable[[object], Any] = ctypes.py_object,
    ) -> None:
        if self._pid not in (0, pid()):
            keep(made(self))


class HostRange:
    """``n_bytes`` of zeroed host memory, given out as 1D tensors without a copy.

    Every page is in place when the constructor returns. Nothing is checked against the host's free
    memory here; :meth:`.HostPool.take` does that first.

    Args:
        n_bytes: exact size in bytes; 0 is allowed.
        device: the device that the memory travels to and from; it decides which cores touch it.
        can_pin: whether the device's driver can register host memory.
        transfer: how to obtain the memory (``pin``).

    Raises:
        HostMemoryError: the kernel refused to map it.
        PinningError: the driver refused to register it and ``transfer.pin`` is ``"require"``. The
            memory is given back.
        ConfigError: ``LOCAL_WORLD_SIZE`` is no number of ranks.
    """

    def __init__(
        self,
        n_bytes: int,
        *,
        device: torch.device,
        can_pin: bool,
        transfer: TransferConfig,
    ) -> None:
        assert n_bytes >= 0, n_bytes
        self.n_bytes = n_bytes
        self._mapping: mmap.mmap | None = None
        self._unpin: weakref.finalize[..., HostRange] | None = None
        self.huge_pages = False  # the kernel was asked for them and was quick enough to give them
        self.threads = 0  # that touched the memory
        self.seconds = 0.0  # to have every page in place, zeroed, and page-locked
        if n_bytes == 0:
            return
        start = time.perf_counter()
        self._mapping, self.huge_pages = _map(n_bytes)
        with progress(n_bytes, "allocating host memory") as bar:
            self._touch(device, bar.advance)
            if can_pin and transfer.pin != "never":
                # This takes about as long as touching and cannot report how far it is.
                bar.describe("page-locking host memory")
                self._pin(device, required=transfer.pin == "require")
        self.seconds = time.perf_counter() - start
        done = "allocated" if self._unpin is None else "page-locked"
        report(f"{done} host memory", n_bytes, self.seconds)

    def tensor(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1D tensor over ``numel`` elements of the arena, without a copy.

        Its storage is exactly these elements (storage offset 0), so that pickle, deepcopy and
        ``torch.save`` take nothing else with them. It keeps the memory mapped, not pinned.
        """
        n_bytes = numel * dtype.itemsize
        assert numel >= 0, numel
        assert 0 <= offset_bytes <= self.n_bytes - n_bytes, (offset_bytes, n_bytes, self.n_bytes)
        assert offset_bytes % dtype.itemsize == 0, (offset_bytes, dtype)
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        assert self._mapping is not None, "the arena is closed"
        with torch.inference_mode(False):  # else it could not be written outside of the mode
            return torch.frombuffer(self._mapping, dtype=dtype, count=numel, offset=offset_bytes)

    @property
    def pinned(self) -> bool:
        """Whether it is registered with the device's driver at present."""
        return self._unpin is not None and self._unpin.alive

    def close(self) -> None:
        """Unregister the memory, and give it back when the last tensor over it is gone.

        The caller has waited for all transfers. Closing again does nothing.
        """
        if self._unpin is not None:
            self._unpin()
        self._mapping = None

    def _touch(self, device: torch.device, advance: Callable[[int], None]) -> None:
        """Write to every page from several threads, so that it exists and lies near ``device``."""
        mapping = self._mapping
        assert mapping is not None
        cores = devices.cores_near(device)
        # This rank's share, a few at least: the ranks beside it may be done already.
        threads = min(len(cores), max(cores_per_rank(), _MIN_THREADS))
        step = min(_CALL_BYTES, align(-(-self.n_bytes // threads), HUGE_PAGE_BYTES))
        chunks = range(0, self.n_bytes, step)
        self.threads = min(threads, len(chunks))
        memory = self.tensor(0, self.n_bytes, torch.uint8)

        def touch(begin: int) -> int:
            began = time.perf_counter()
            chunk = memory[begin : begin + step]
            chunk[:: mmap.PAGESIZE].zero_()  # without the GIL
            if self.huge_pages and time.perf_counter() - began > _STALL_SECONDS:
                # On a fragmented host the kernel compacts memory for each huge page, which can be
                # slower than everything else here by far.
                self.huge_pages = False
                _advise(mapping, "MADV_NOHUGEPAGE")
            return chunk.numel()

        def bind() -> None:
            with suppress(OSError):  # forbidden in some sandboxes; only placement suffers
                os.sched_setaffinity(0, cores)  # 0 is the calling thread, which ends soon

        with ThreadPoolExecutor(self.threads, "fsdp_offload-touch", bind) as pool:
            for n_bytes in pool.map(touch, chunks):
                advance(n_bytes)

    def _pin(self, device: torch.device, *, required: bool) -> None:
        """Register the whole range at once."""
        assert self._mapping is not None
        address = torch.frombuffer(self._mapping, dtype=torch.uint8, count=1).data_ptr()
        try:
            devices.pin(address, self.n_bytes, device)
        except PinningError as error:
            if required:
                self._mapping = None
                raise
            warnings.warn(
                f"{size_text(self.n_bytes)} of host memory stay pageable, which makes transfers "
                f"slower: {error.reason}",
                RuntimeWarning,
                stacklevel=3,
            )
            return
        # The callback owns the mapping: it is unregistered first and unmapped after. At exit it
        # runs before the device's context goes.
        self._unpin = weakref.finalize(
            self, _unpin, os.getpid(), address, self.n_bytes, device, self._mapping
        )


def _unpin(pid: int, address: int, n_bytes: int, device: torch.device, mapping: mmap.mmap) -> None:
    """Never raises. Does nothing in a forked child: it has neither the memory nor the context."""
    if os.getpid() == pid:
        devices.unpin(address, n_bytes, device)


def _map(n_bytes: int) -> tuple[mmap.mmap, bool]:
    """An untouched mapping of ``n_bytes``, and whether it will get huge pages."""
    try:
        mapping = _Mapping(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise HostMemoryError(
            f"mapping {size_text(n_bytes)} of host memory",
            reason=f"the kernel refused ({error})",
            remedy="offload less, or raise the limit on address space (ulimit -v, "
            "vm.overcommit_memory)",
        ) from None
    _advise(mapping, "MADV_DONTFORK")
    # The mapping ends with the payload's last page, so a huge page never costs memory beyond it.
    return mapping, n_bytes >= HUGE_PAGE_BYTES and _advise(mapping, "MADV_HUGEPAGE")


def _advise(mapping: mmap.mmap, advice: str) -> bool:
    """Whether the kernel knows and took the advice; none of them is needed for correctness."""
    try:
        mapping.madvise(getattr(mmap, advice))
    except (OSError, AttributeError):
        return False
    return True
