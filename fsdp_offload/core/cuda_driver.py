"""CUDA driver functions: mapping memory into address ranges, and copies.

``ctypes`` binds ``libcuda.so.1``, which exists wherever torch finds a CUDA device. That adds no
dependency and costs less per call than generated bindings. The structures belong to the driver's
binary interface, unchanged since CUDA 10.2; the newest function came with 11.0.

A step enqueues thousands of copies, and on the CPU of a GPU machine each ``Tensor.copy_`` took 13
us, an event with its record 4 us (docs/internals/ring.md). :class:`Commands` calls the driver's
functions behind them, on the same streams and events, so both kinds mix. They only enqueue, so they
keep the interpreter lock: threads that update on the CPU would take it after each call, and hold it
longer than the call lasts. (All Python threads wait if a stream has no room for another command, or
if memory is not page-locked, with ``pin="never"``.)
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from .errors import DeviceError

OUT_OF_MEMORY: Final = 2
# CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
_RECOMMENDED: Final = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_RDMA_WITH_VMM: Final = 110  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED

_word, _size, _int = ctypes.c_ulonglong, ctypes.c_size_t, ctypes.c_int
_NOTHING: Final = nullcontext()


class _Properties(ctypes.Structure):
    """CUmemAllocationProp, with the structures inside of it laid out in line."""

    _fields_ = [
        ("type", _int),
        ("handle_types", _int),
        ("location_type", _int),
        ("location_id", _int),
        ("win32", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc, likewise."""

    _fields_ = [("location_type", _int), ("location_id", _int), ("flags", _int)]


_SIGNATURES: Final[dict[str, list[Any]]] = {
    "cuInit": [ctypes.c_uint],
    "cuDeviceGetAttribute": [ctypes.POINTER(_int), _int, _int],
    "cuMemGetAllocationGranularity": [ctypes.POINTER(_size), ctypes.POINTER(_Properties), _int],
    "cuMemAddressReserve": [ctypes.POINTER(_word), _size, _size, _word, _word],
    "cuMemAddressFree": [_word, _size],
    "cuMemCreate": [ctypes.POINTER(_word), _size, ctypes.POINTER(_Properties), _word],
    "cuMemRelease": [_word],
    "cuMemMap": [_word, _size, _size, _word, _word],
    "cuMemUnmap": [_word, _size],
    "cuMemSetAccess": [_word, _size, ctypes.POINTER(_Access), _size],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(_word), _int],
    "cuCtxGetCurrent": [ctypes.POINTER(_word)],
    "cuCtxPushCurrent_v2": [_word],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(_word)],
    "cuMemcpyAsync": [_word, _word, _size, _word],
    "cuStreamWaitEvent": [_word, _word, ctypes.c_uint],
    "cuEventRecord": [_word, _word],
    "cuThreadExchangeStreamCaptureMode": [ctypes.POINTER(_int)],
}


@functools.cache
def _library(kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    """``ctypes.PyDLL``: calls keep the interpreter lock."""
    try:
        library = kind("libcuda.so.1")
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _int
    except (OSError, AttributeError) as error:
        raise DeviceError(
            "the CUDA driver (libcuda.so.1)",
            reason=f"it lacks virtual memory management: {error}",
            remedy="install an NVIDIA driver of CUDA 11.0 or later, or do without fixed addresses",
        ) from None
    return library


class Driver:
    """Maps memory of one CUDA device. No call needs a current context.

    Args:
        device: ``cuda`` with an index.

    Raises:
        DeviceError: the driver is missing, or the device cannot map memory.
    """

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda", device
        assert device.index is not None, device
        self._lib = _library()
        self.device = device
        self._access = _Access(_ON_DEVICE, device.index, _READ_WRITE)
        self._properties = _Properties(_PINNED, 0, _ON_DEVICE, device.index)
        _check(self._lib.cuInit(0), "cuInit", device)
        rdma = _int()
        code = self._lib.cuDeviceGetAttribute(ctypes.byref(rdma), _RDMA_WITH_VMM, device.index)
        if code == 0 and rdma.value:  # so that network cards reach it, like torch's memory
            self._properties.rdma = 1
        granularity = _size()
        code = self._lib.cuMemGetAllocationGranularity(
            ctypes.byref(granularity), ctypes.byref(self._properties), _RECOMMENDED
        )
        _check(code, "cuMemGetAllocationGranularity", device)
        self.granularity_bytes = int(granularity.value)

    def reserve(self, n_bytes: int) -> int:
        """Reserve an address range without memory; returns its address.

        Raises:
            DeviceError: the driver refused.
        """
        address = _word()
        code = self._lib.cuMemAddressReserve(ctypes.byref(address), n_bytes, 0, 0, 0)
        _check(code, f"cuMemAddressReserve of {n_bytes} bytes", self.device)
        return int(address.value)

    def map(self, address: int, n_bytes: int) -> None:
        """Map memory at ``address``.

        Raises:
            torch.OutOfMemoryError: no memory, even after torch has emptied its cache.
            DeviceError: the driver refused for another reason. Either error maps nothing.
        """
        code = self._map(address, n_bytes)
        if code == OUT_OF_MEMORY:
            torch.cuda.empty_cache()
            code = self._map(address, n_bytes)
        if code == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"no {n_bytes} bytes of memory on {self.device}")
        _check(code, f"mapping {n_bytes} bytes", self.device)

    def _map(self, address: int, n_bytes: int) -> int:
        handle = _word()
        code = self._lib.cuMemCreate(
            ctypes.byref(handle), n_bytes, ctypes.byref(self._properties), 0
        )
        return int(code) or self._put(address, n_bytes, handle.value)

    def unmap(self, address: int, n_bytes: int) -> None:
        """Unmap what one :meth:`map` mapped. All work on it has completed.

        Raises:
            DeviceError: the driver refused; the memory is still mapped.
        """
        code = self._lib.cuMemUnmap(address, n_bytes)
        _check(code, f"unmapping {n_bytes} bytes", self.device)

    def tensor(self, address: int, n_bytes: int, owner: object) -> Tensor:
        """Return a 1-D uint8 tensor over mapped memory; its storage keeps ``owner`` alive."""
        array = {"shape": (n_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        source = SimpleNamespace(__cuda_array_interface__=array, owner=owner)
        return torch.as_tensor(source, device=self.device)  # its storage keeps the source

    def close(self, address: int, n_bytes: int, mapped: dict[int, int]) -> None:
        """Free an unused range and its mappings (bytes by address). Never raises, because it runs
        when tensors are collected."""
        try:
            if torch.cuda.is_current_stream_capturing():
                return  # waiting would end the capture, so the range stays
            torch.cuda.synchronize(self.device)  # the last tensor may go before kernels that use it
            while mapped:
                self.unmap(*mapped.popitem())
            self._lib.cuMemAddressFree(address, n_bytes)
        except Exception:  # a failed device: the range stays
            return

    def _put(self, address: int, n_bytes: int, handle: int) -> int:
        code = self._lib.cuMemMap(address, n_bytes, 0, handle, 0)
        # From here on the mapping owns the memory; if mapping failed, it is freed at once.
        self._lib.cuMemRelease(handle)
        if code:
            return int(code)
        code = self._lib.cuMemSetAccess(address, n_bytes, ctypes.byref(self._access), 1)
        if code:
            self._lib.cuMemUnmap(address, n_bytes)
        return int(code)


class Commands:
    """Enqueues copies and waits on one CUDA device for little host time.

    Args:
        device: ``cuda`` with an index; torch has initialised it.

    Raises:
        DeviceError: the driver is missing.
    """

    def __init__(self, device: torch.device) -> None:
        self._lib, self.device = _library(ctypes.PyDLL), device
        _check(self._lib.cuInit(0), "cuInit", device)
        context = _word()  # torch's own, which lives as long as the process
        code = self._lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), device.index)
        _check(code, "cuDevicePrimaryCtxRetain", device)
        self._context = context.value

    def here(self) -> AbstractContextManager[object]:
        """Let this thread call the other methods inside the context."""
        current = _word()
        self._lib.cuCtxGetCurrent(ctypes.byref(current))
        return _NOTHING if current.value == self._context else self._made_current()

    @contextmanager
    def _made_current(self) -> Iterator[None]:
        self._lib.cuCtxPushCurrent_v2(self._context)
        try:
            yield
        finally:
            self._lib.cuCtxPopCurrent_v2(ctypes.byref(_word()))

    def copy(self, stream: Any, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Enqueue copies: contiguous, of equal bytes, between the device and host memory.

        Args:
            stream: ``torch.cuda.Stream`` of the device.
            targets: the caller keeps them, with their memory, until the copies have completed.
            sources: the caller keeps them, too.
        """
        enqueue, handle = self._lib.cuMemcpyAsync, stream.cuda_stream
        for target, source in zip(targets, sources, strict=True):
            n_bytes = target.nbytes
            if n_bytes == 0:
                continue
            code = enqueue(target.data_ptr(), source.data_ptr(), n_bytes, handle)
            if code:
                _check(code, f"a copy of {n_bytes} bytes", self.device)

    def wait(self, stream: Any, event: Any) -> None:
        """Make later work of ``stream`` wait for a recorded ``torch.cuda.Event``."""
        code = self._lib.cuStreamWaitEvent(stream.cuda_stream, event.cuda_event, 0)
        if code:
            _check(code, "cuStreamWaitEvent", self.device)

    def record(self, event: Any, stream: Any) -> None:
        """Record a ``torch.cuda.Event`` that torch has recorded before, so that it exists."""
        code = self._lib.cuEventRecord(event.cuda_event, stream.cuda_stream)
        if code:
            _check(code, "cuEventRecord", self.device)


@contextmanager
def beside_capture(device: torch.device) -> Iterator[None]:
    """Let this thread wait for work outside a CUDA graph capture in progress, which CUDA would end
    otherwise."""
    if device.type != "cuda" or torch.version.hip is not None:
        yield
        return
    mode = _int(_RELAXED)
    _library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # mode: that of before
    try:
        yield
    finally:
        _library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _check(code: int, what: str, device: torch.device) -> None:
    if code:
        raise DeviceError(
            f"{what} on {device}",
            reason=f"the CUDA driver answered {code}",
            remedy="look the number up under CUresult in the driver API's reference",
        )
