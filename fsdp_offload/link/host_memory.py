"""Flat host memory for tensors: exact in size, near the device, page-locked.

torch's own pinned allocator rounds to powers of two and touches pages from one thread. Instead,
this module makes one anonymous private mapping, touches it from many threads, then registers it
with the driver in one call.

Lifetime: tensors hold a reference to the mapping, so it ends with the range *and* the last tensor
over it; `mmap.close` would unmap under living tensors, so nothing calls it. A forked child (a
DataLoader worker) does not inherit the mapping (``MADV_DONTFORK``): it costs the child nothing, and
a child that touches state tensors dies with SIGSEGV instead of changing a copy.
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
from ..core.config import MIB, TransferConfig, align, exact
from ..core.errors import HostMemoryError, PinningError
from ..core.progress import Progress, report
from .budget import cores_per_rank

HUGE_PAGE_BYTES: Final = 2 * MIB
# One torch call touches at most 16384 pages: from 32768 elements on, torch spreads an operation
# over its intra-op threads, whose number cannot be set for one thread alone (threads that start
# later inherit `set_num_threads`).
_CALL_BYTES: Final = 64 * MIB
_STALL_SECONDS: Final = 0.5
_MIN_THREADS: Final = 4


class _Mapping(mmap.mmap):
    """A mapping that belongs to the process that made it.

    A forked child lacks the range, and may map other memory there. So its copy of this object never
    unmaps anything.
    """

    _pid = 0  # not mapped yet

    def __init__(self, *_: object, **__: object) -> None:  # mmap takes them in __new__
        self._pid = os.getpid()

    def __del__(
        self,
        pid: Callable[[], int] = os.getpid,  # because modules are gone when the interpreter ends
        keep: Callable[[Any], object] = ctypes.pythonapi.Py_IncRef,
        made: Callable[[object], Any] = ctypes.py_object,
    ) -> None:
        if self._pid not in (0, pid()):
            keep(made(self))


class HostRange:
    """``n_bytes`` of zeroed host memory, viewed as 1-D tensors without a copy.

    Every page is in place when the constructor returns. :meth:`.HostPool.take` checks the host's
    free memory first.

    Args:
        n_bytes: exact size in bytes; 0 is allowed.
        device: the device on the other side of the link; decides which cores touch the memory.
        can_pin: whether the device's driver can register host memory.
        transfer: how to allocate the memory (``pin``).
        holder: name for the log.

    Raises:
        HostMemoryError: the kernel refused to map it.
        PinningError: the driver refused to register it and ``transfer.pin`` is ``"require"``. The
            memory is freed.
        ConfigError: ``LOCAL_WORLD_SIZE`` is not a number of ranks.
    """

    def __init__(
        self,
        n_bytes: int,
        *,
        device: torch.device,
        can_pin: bool,
        transfer: TransferConfig,
        holder: str = "a check",
    ) -> None:
        assert n_bytes >= 0, n_bytes
        self.n_bytes = n_bytes
        self._mapping: mmap.mmap | None = None
        self._unpin: weakref.finalize[..., HostRange] | None = None
        self.huge_pages = False  # whether the kernel gave them quickly enough
        self.threads = 0  # threads that touched the memory
        self.seconds = 0.0  # until every page was zeroed and page-locked
        if n_bytes == 0:
            return
        start = time.perf_counter()
        self._mapping, self.huge_pages = _map(n_bytes)
        with Progress(n_bytes, "allocating host memory") as bar:
            self._touch(device, bar.advance)
            if can_pin and transfer.pin != "never":
                # This takes about as long as touching, and cannot report progress.
                bar.describe("page-locking host memory")
                self._pin(device, required=transfer.pin == "require")
        self.seconds = time.perf_counter() - start
        done = "allocated" if self._unpin is None else "page-locked"
        report(f"{done} host memory ({holder})", n_bytes, self.seconds)

    def tensor(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor over ``numel`` elements, without a copy.

        Its storage is exactly these elements (storage offset 0), so that pickle, deepcopy and
        ``torch.save`` copy nothing else. It keeps the memory mapped, not pinned.
        """
        n_bytes = numel * dtype.itemsize
        assert numel >= 0, numel
        assert 0 <= offset_bytes <= self.n_bytes - n_bytes, (offset_bytes, n_bytes, self.n_bytes)
        assert offset_bytes % dtype.itemsize == 0, (offset_bytes, dtype)
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        assert self._mapping is not None, "the arena is closed"
        with torch.inference_mode(False):  # else it could not be written outside the mode
            return torch.frombuffer(self._mapping, dtype=dtype, count=numel, offset=offset_bytes)

    @property
    def pinned(self) -> bool:
        """Whether it is registered with the device's driver now."""
        return self._unpin is not None and self._unpin.alive

    def close(self) -> None:
        """Unregister the memory, and free it with the last tensor over it.

        The caller has waited for all transfers. Idempotent.
        """
        if self._unpin is not None:
            self._unpin()
        self._mapping = None

    def _touch(self, device: torch.device, advance: Callable[[int], None]) -> None:
        """Write to every page from several threads, so that it exists and lies near ``device``."""
        mapping = self._mapping
        assert mapping is not None
        cores = devices.cores_near(device)
        # This rank's share, at least a few: the other ranks may be done already.
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
                # On a fragmented host the kernel compacts memory for each huge page, which can take
                # far longer than all the rest.
                self.huge_pages = False
                _advise(mapping, "MADV_NOHUGEPAGE")
            return chunk.numel()

        def bind() -> None:
            with suppress(OSError):  # forbidden in some sandboxes; only placement suffers
                os.sched_setaffinity(0, cores)  # 0: the calling thread, which ends soon

        with ThreadPoolExecutor(self.threads, "fsdp_offload-touch", bind) as pool:
            for n_bytes in pool.map(touch, chunks):
                advance(n_bytes)

    def _pin(self, device: torch.device, *, required: bool) -> None:
        assert self._mapping is not None
        address = torch.frombuffer(self._mapping, dtype=torch.uint8, count=1).data_ptr()
        try:
            devices.pin(address, self.n_bytes, device)
        except PinningError as error:
            if required:
                self._mapping = None
                raise
            warnings.warn(
                f"{exact(self.n_bytes)} of host memory stay pageable, which makes transfers "
                f"slower: {error.reason}",
                RuntimeWarning,
                stacklevel=3,
            )
            return
        # The callback owns the mapping, so the memory is unregistered before it is unmapped. At
        # exit it runs before the device's context ends.
        self._unpin = weakref.finalize(
            self, _unpin, os.getpid(), address, self.n_bytes, device, self._mapping
        )


def _unpin(pid: int, address: int, n_bytes: int, device: torch.device, mapping: mmap.mmap) -> None:
    """Unregister memory. Never raises; does nothing in a forked child, which lacks memory and
    context."""
    if os.getpid() == pid:
        devices.unpin(address, n_bytes, device)


def _map(n_bytes: int) -> tuple[mmap.mmap, bool]:
    """Map ``n_bytes`` without touching them; also returns whether they get huge pages."""
    try:
        mapping = _Mapping(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise HostMemoryError(
            f"mapping {exact(n_bytes)} of host memory",
            reason=f"the kernel refused ({error})",
            remedy="offload less, or raise the limit on address space (ulimit -v, "
            "vm.overcommit_memory)",
        ) from None
    _advise(mapping, "MADV_DONTFORK")
    # The mapping ends with the last page in use, so a huge page never costs memory beyond it.
    return mapping, n_bytes >= HUGE_PAGE_BYTES and _advise(mapping, "MADV_HUGEPAGE")


def _advise(mapping: mmap.mmap, advice: str) -> bool:
    """Advise the kernel; returns whether it took the advice, which only affects speed."""
    try:
        mapping.madvise(getattr(mmap, advice))
    except (OSError, AttributeError):
        return False
    return True
