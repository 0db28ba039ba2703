"""The only backend to streams, events and pinning.

Everything that runs beside the host's own thread is *launched* on a :class:`Stream`:
``stream.launch(fn, *operands)`` runs ``fn(*operands)`` in order on that stream. Three backends
implement the same interface: the accelerator (CUDA streams), the CPU (every launch runs at once)
and the stream simulator of ``tests/helpers/simulator.py`` (launches are queued and run only when
something waits for them). A launched function must get every tensor it reads or writes as an
operand, not through a closure, because the simulator watches operands' lifetimes; tensors that
the package itself owns for the optimizer's lifetime (arena, slots, scratch) are exempt.

Notes on streams: no ``record_stream``. Order between streams is made by events alone, and a
tensor that a side stream reads is kept alive until the stream that allocated it has waited for
the reader (see ``docs/internals/overlap.md``).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import torch

from .cuda_driver import Commands as DriverCommands
from .errors import DeviceError, PinningError

POLL_SECONDS: Final = 1.0
"""How often a thread that waits for another one looks whether that is still alive."""


TURN_BYTES: Final = 32 << 20
"""Of a bulk copy; see [Note: taking turns]."""


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether all work before the point has completed."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until it has."""
        ...


class PendingEvent:
    """An event that another thread is going to record; streams and the host may wait for it.

    Args:
        advance: called before each blocking wait, and once in a while during it. It may do what
            is left to do on this thread, and raises if the thread that records is gone.
    """

    def __init__(self, advance: Callable[[PendingEvent], None]) -> None:
        self._advance = advance
        self._ended = threading.Event()
        self._event: Event | None = None
        self._error: BaseException | None = None

    def complete(self, event: Event) -> None:
        """It has been recorded."""
        self._event = event
        self._end()

    def fail(self, error: BaseException) -> None:
        """It never will be: code that waits gets ``error``."""
        if not self._ended.is_set():
            self._error = error
            self._end()

    def _end(self) -> None:
        self._advance = _nothing  # it may refer to what keeps this event
        self._ended.set()

    def is_recorded(self) -> bool:
        """Whether :meth:`recorded` returns, or raises, at once."""
        return self._ended.is_set()

    def recorded(self) -> Event:
        """The event itself: blocks the calling thread until it has been recorded.

        Raises:
            BaseException: what kept the other thread from recording it.
        """
        while not self._ended.is_set():
            self._advance(self)
            self._ended.wait(timeout=POLL_SECONDS)
        if self._event is None:
            assert self._error is not None
            raise self._error
        return self._event

    def query(self) -> bool:
        """See :class:`Event`. True after a failure, too: there is nothing to wait for."""
        return self._ended.is_set() and (self._event is None or self._event.query())

    def synchronize(self) -> None:
        """See :class:`Event`; raises as :meth:`recorded` does."""
        self.recorded().synchronize()


def _nothing(event: PendingEvent) -> None:
    """There is nothing left to do."""


class TimedEvent(Event, Protocol):
    """An event that also knows when it was reached."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to ``end_event``; both must have been reached."""
        ...


class Stream(Protocol):
    """Work that runs in order, beside other streams."""

    name: str

    def launch(self, fn: Callable[..., None], *operands: Any) -> None:
        """Run ``fn(*operands)`` after all that was launched or waited for here before."""
        ...

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy each source into its target, in order: 1-D, uint8, contiguous, of equal length.

        Unlike what is launched, they are operands that the caller keeps until it is done.
        """
        ...

    def wait(self, event: Event) -> None:
        """Let later work here start only after ``event``; the host does not wait.

        Of a :class:`PendingEvent` the host waits until it has been recorded.
        """
        ...

    def record(self) -> Event:
        """The event of everything launched here so far."""
        ...

    def record_timed(self) -> TimedEvent:
        """:meth:`record`, with the time."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until everything launched here has completed."""
        ...


Turns = Sequence[Sequence[torch.Tensor]]
"""Tensors in turns: see :func:`in_turns`."""


class BulkStream(Stream, Protocol):
    """A stream for bulk copies between host and device, in one direction."""

    def copy_in_turns(self, targets: Turns, sources: Turns) -> None:
        """:meth:`copy`; between two turns, copies of others get through, and one may run beside
        the next."""
        ...

    def keep_order(self) -> None:
        """Later copies come after all so far: they may have the same targets."""
        ...


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Enqueue all copies on torch's current stream."""
    if targets:  # no state at all: SGD without momentum
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


def in_turns(
    tensors: Sequence[torch.Tensor], turn_bytes: int = TURN_BYTES
) -> list[list[torch.Tensor]]:
    """1-D uint8 tensors in lists of about ``turn_bytes``: large ones cut, small ones together.

    Tensors of the same lengths give parts of the same lengths.
    """
    turns: list[list[torch.Tensor]] = [[]]
    room = turn_bytes
    for tensor in tensors:
        count = max(-(-tensor.numel() // turn_bytes), 1)
        for part in tensor.split(max(-(-tensor.numel() // count), 1)):
            if part.numel() > room and turns[-1]:
                turns.append([])
                room = turn_bytes
            turns[-1].append(part)
            room -= part.numel()
    return turns


class AllocatorFigures(NamedTuple):
    """What torch's allocator says of one device."""

    reserved_bytes: int
    """That it has of the driver now."""
    allocated_peak_bytes: int
    """The most that was in use, since the caller reset torch's peaks."""
    unused_bytes: int
    """The most that it had, less the most that was in use."""
    retries: int
    """How often it gave cached memory back to serve a request."""


class Backend(Protocol):
    """One device as the pipeline sees it."""

    device: torch.device
    can_pin: bool
    """Whether host memory can be registered with this device's driver."""
    has_threads: bool
    """Whether the host lane runs on a thread of its own (the simulator runs it inline)."""

    def stream(self, name: str) -> Stream:
        """A new stream; ``name`` is for traces and the simulator."""
        ...

    def bulk_stream(self, name: str) -> BulkStream:
        """A new stream for bulk copies, among which small ones of others get through."""
        ...

    def current_stream(self) -> Stream:
        """The stream that the caller's own torch operations go to."""
        ...

    def is_capturing(self) -> bool:
        """Whether what the caller's current stream is given goes into a CUDA graph."""
        ...

    def adopt_stream(self, raw: Any) -> Stream:
        """A stream that another library (FSDP2) made, such as ``torch.cuda.Stream``."""
        ...

    def adopt_event(self, raw: Any) -> Event:
        """An event that another library recorded, such as ``torch.cuda.Event``."""
        ...

    def enter_thread(self) -> None:
        """Make this device the calling thread's own: a new thread starts with device 0, and work
        there would cost that device's memory for a context."""
        ...

    def allocate(self, n_bytes: int) -> torch.Tensor:
        """uint8 device memory, 1D, uninitialised, aligned to at least 256 bytes."""
        ...

    def allocator(self) -> AllocatorFigures | None:
        """Of torch's allocator; None where there are no such figures."""
        ...

    def free_and_total(self) -> tuple[int, int]:
        """Bytes that torch's allocator could get of the driver, and all there are for it."""
        ...


# --------------------------------------------------------------------------- accelerator


class _TorchCommands:
    """What :class:`.cuda_driver.Commands` does, on any accelerator, by torch's own calls."""

    def here(self) -> AbstractContextManager[object]:
        return nullcontext()

    def copy(
        self, stream: Any, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        with stream:
            copy_all(targets, sources)

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def record(self, event: Any, stream: Any) -> None:
        event.record(stream)


_Commands = _TorchCommands | DriverCommands


def _recorded(event: Event) -> Event:
    """The event that a raw stream can wait for."""
    return event.recorded() if isinstance(event, PendingEvent) else event


class _AcceleratorStream:
    def __init__(self, raw: Any, module: Any, name: str, commands: _Commands) -> None:
        self.raw, self._module, self.name = raw, module, name
        self._commands = commands

    def launch(self, fn: Callable[..., None], *operands: Any) -> None:
        with self.raw:
            fn(*operands)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        with self._commands.here():
            self._commands.copy(self.raw, targets, sources)

    def wait(self, event: Event) -> None:
        self.raw.wait_event(_recorded(event))

    def record(self) -> Event:
        event = self._module.Event()
        event.record(self.raw)
        return event  # type: ignore[no-any-return]

    def record_timed(self) -> TimedEvent:
        event = self._module.Event(enable_timing=True)
        event.record(self.raw)
        return event  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        self.raw.synchronize()


class _TakingTurns(_AcceleratorStream):
    """Bulk copies on three streams that take turns, so that copies of others get through.

    [Note: taking turns]
    A copy engine stays with a hardware queue as long as that has copies ready, and a kernel that
    follows a copy in a stream waits that long. So the bulk is cut into turns; turn ``k`` goes to
    stream ``k % 3`` and waits for turn ``k - 2``: one runs and one is ready, always. A copy in
    another queue then waits for about four turns: 3 ms instead of 21 ms for all of 1 GiB, measured
    on an H200 (docs/internals/pipeline.md, which also says how streams share queues).

    What is launched, recorded or waited for here comes after all copies so far.
    """

    def __init__(self, raws: list[Any], module: Any, name: str, commands: _Commands) -> None:
        super().__init__(raws[0], module, name, commands)
        self._raws, self._turn = raws, 0
        self._ends: list[Any] = [module.Event() for _ in raws]  # of the last turn on each
        for end, raw in zip(self._ends, raws, strict=True):
            end.record(raw)  # from now on it exists for the driver, too

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self.copy_in_turns([targets], [sources])

    def copy_in_turns(self, targets: Turns, sources: Turns) -> None:
        raws, ends, commands = self._raws, self._ends, self._commands
        count = len(raws)
        with commands.here():
            for some, others in zip(targets, sources, strict=True):
                turn = self._turn
                raw = raws[turn]
                commands.wait(raw, ends[turn - 2])
                commands.copy(raw, some, others)
                commands.record(ends[turn], raw)  # who waits has taken the last record already
                self._turn = (turn + 1) % count

    def keep_order(self) -> None:
        self.wait(self.record())

    def wait(self, event: Event) -> None:
        recorded = _recorded(event)
        for raw in self._raws:
            raw.wait_event(recorded)

    def launch(self, fn: Callable[..., None], *operands: Any) -> None:
        self._join()
        super().launch(fn, *operands)
        self.wait(super().record())

    def record(self) -> Event:
        self._join()
        return super().record()

    def record_timed(self) -> TimedEvent:
        self._join()
        return super().record_timed()

    def synchronize(self) -> None:
        for raw in self._raws:
            raw.synchronize()

    def _join(self) -> None:
        """Point ``raw`` at the stream of the last turn, after all turns so far."""
        count = len(self._raws)
        last = (self._turn - 1) % count
        self.raw = self._raws[last]
        self.raw.wait_event(self._ends[(last - 1) % count])


class AcceleratorBackend:
    """Streams and events of ``torch.cuda`` (or another device module with the same surface)."""

    has_threads = True

    def __init__(self, device: torch.device) -> None:
        if device.type == "meta":
            raise DeviceError(
                "parameters on the meta device",
                reason="they have no memory yet",
                remedy="materialise them (model.to_empty, then initialise or load) before wrapping",
            )
        self._module = torch.get_device_module(device)
        if not self._module.is_available():
            raise DeviceError(
                f"device {device}",
                reason=f"torch sees no usable {device.type} device in this process",
                remedy="run on a machine with one, or keep the parameters on the CPU",
            )
        index = device.index if device.index is not None else self._module.current_device()
        self.device = torch.device(device.type, index)
        self.can_pin = device.type == "cuda"
        self._commands = _commands_for(self.device)

    def stream(self, name: str) -> Stream:
        return self._wrapped(self._module.Stream(device=self.device), name)

    def bulk_stream(self, name: str) -> BulkStream:
        raws = [self._module.Stream(device=self.device) for _ in range(3)]
        return _TakingTurns(raws, self._module, name, self._commands)

    def _wrapped(self, raw: Any, name: str) -> _AcceleratorStream:
        return _AcceleratorStream(raw, self._module, name, self._commands)

    def current_stream(self) -> Stream:
        raw = self._module.current_stream(self.device.index)  # torch is slow with a device
        return self._wrapped(raw, "current")

    def adopt_stream(self, raw: Any) -> Stream:
        return self._wrapped(raw, "adopted")

    def adopt_event(self, raw: Any) -> Event:
        return raw  # type: ignore[no-any-return]

    def is_capturing(self) -> bool:
        if self.device.type != "cuda":
            return False
        with torch.cuda.device(self.device.index):
            return torch.cuda.is_current_stream_capturing()

    def enter_thread(self) -> None:
        self._module.set_device(self.device)

    def allocate(self, n_bytes: int) -> torch.Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, device=self.device)

    def allocator(self) -> AllocatorFigures | None:
        if self.device.type != "cuda":
            return None
        # Asked for in every step: memory_stats() would flatten and sort some 200 figures.
        figures = torch.cuda.memory_stats_as_nested_dict(self.device)
        reserved, allocated = (
            figures[f"{kind}_bytes"]["all"] for kind in ("reserved", "allocated")
        )
        peak = allocated["peak"]
        unused, retries = reserved["peak"] - peak, figures["num_alloc_retries"]
        return AllocatorFigures(reserved["current"], peak, unused, retries)

    def free_and_total(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.device)
        fraction = torch.cuda.get_per_process_memory_fraction(self.device)
        if fraction == 1:
            return free, total
        limit = int(fraction * total)  # of what torch's allocator reserves
        return max(0, min(free, limit - torch.cuda.memory_reserved(self.device))), limit


@functools.cache
def _commands_for(device: torch.device) -> _Commands:
    if device.type == "cuda" and torch.version.hip is None:
        with contextlib.suppress(DeviceError):  # an unusual driver
            return DriverCommands(device)
    return _TorchCommands()


# --------------------------------------------------------------------------- CPU


class _DoneEvent:
    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end_event: _DoneEvent) -> float:
        return (end_event._seconds - self._seconds) * 1e3


class _CpuStream:
    _done = _DoneEvent()

    def __init__(self, name: str) -> None:
        self.name = name

    def launch(self, fn: Callable[..., None], *operands: Any) -> None:
        fn(*operands)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        copy_all(targets, sources)

    def copy_in_turns(self, targets: Turns, sources: Turns) -> None:
        for some, others in zip(targets, sources, strict=True):
            copy_all(some, others)

    def keep_order(self) -> None:
        return None

    def wait(self, event: Event) -> None:
        event.synchronize()

    def record(self) -> Event:
        return self._done

    def record_timed(self) -> TimedEvent:
        return _DoneEvent()

    def synchronize(self) -> None:
        return None


class CpuBackend:
    """CPU tensors as the "device": every launch runs at once, on the calling thread."""

    can_pin = False
    has_threads = True

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cpu")

    def stream(self, name: str) -> Stream:
        return _CpuStream(name)

    def bulk_stream(self, name: str) -> BulkStream:
        return _CpuStream(name)

    def current_stream(self) -> Stream:
        return _CpuStream("current")

    def is_capturing(self) -> bool:
        return False

    def adopt_stream(self, raw: Any) -> Stream:
        return _CpuStream("adopted")

    def adopt_event(self, raw: Any) -> Event:
        return _CpuStream._done

    def enter_thread(self) -> None:
        return None

    def allocate(self, n_bytes: int) -> torch.Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8)

    def allocator(self) -> AllocatorFigures | None:
        return None

    def free_and_total(self) -> tuple[int, int]:
        return 0, 0


# --------------------------------------------------------------------------- choosing one

_override: Backend | None = None


@contextmanager
def use_backend(backend: Backend) -> Iterator[Backend]:
    """Make optimizers built inside the block use ``backend`` (the stream simulator does)."""
    global _override
    previous, _override = _override, backend
    try:
        yield backend
    finally:
        _override = previous


def backend_for(device: torch.device) -> Backend:
    """The backend for ``device``.

    Raises:
        DeviceError: the device type is not usable in this process.
    """
    if _override is not None:
        return _override
    if device.type == "cpu":
        return CpuBackend(device)
    return AcceleratorBackend(device)


def stream_to_wait(backend: Backend, what: str = "step()") -> Stream:
    """:meth:`Backend.current_stream`, for work that a CUDA graph cannot hold.

    Args:
        backend: of the device.
        what: what the caller does, for the message.

    Raises:
        DeviceError: the stream is being captured.
    """
    if backend.is_capturing():
        raise DeviceError(
            f"{what} inside a CUDA graph capture",
            reason="host transfers and lane decisions cannot be replayed",
            remedy=f"capture forward and backward, and call {what} outside of the graph",
        )
    return backend.current_stream()


# --------------------------------------------------------------------------- device memory


def free_bytes(device: torch.device) -> int | None:
    """What the driver could still give out on ``device``; ``None`` where there is no such figure.

    A small constant of CUDA's context is the driver's own; other processes' use counts as used.
    """
    module = None if device.type == "cpu" else torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    return int(module.mem_get_info(device)[0])  # type: ignore[union-attr]


def release_cached(device: torch.device) -> None:
    """Let torch's allocator give unused memory back to the driver, so that others can have it."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


# --------------------------------------------------------------------------- pinning and NUMA


def pin(address: int, n_bytes: int, device: torch.device | None = None) -> None:
    """Register ``[address, address + n_bytes)`` with the CUDA driver as page-locked.

    Args:
        address: first byte; a multiple of the page size.
        n_bytes: length in bytes.
        device: the device whose context is used. ``None`` is the current device, which is device 0
            on a rank that never chose one, and a context there costs its memory.

    Raises:
        PinningError: the driver refused; nothing stays registered.
    """
    if n_bytes == 0:
        return
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostRegister(address, n_bytes, 0))
        if code != 0:
            _clear_last_error()
    if code != 0:
        raise PinningError(
            f"{n_bytes} bytes of host memory",
            reason=f"cudaHostRegister answered {code}",
            remedy="raise the locked-memory limit (ulimit -l), offload less, or allow "
            'pageable memory with TransferConfig(pin="prefer")',
        )


def unpin(address: int, n_bytes: int, device: torch.device | None = None) -> None:
    """Undo :func:`pin`. Never raises: it runs in finalizers, when the context may be gone."""
    if n_bytes == 0:
        return
    try:
        with torch.cuda.device(device):
            if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
                _clear_last_error()
    except Exception:  # a failed device or an interpreter on its way out: nothing is left to undo
        return


def _clear_last_error() -> None:
    """Take the refused call's code out of the runtime, so that no later check reports it.

    torch binds no ``cudaGetLastError``. It calls it after each kernel launch, which then raises
    with the old code; a synchronisation does not.
    """
    try:
        torch.ones(1, device="cuda")
    except RuntimeError:
        return


def cores_near(device: torch.device) -> frozenset[int]:
    """Cores of this process next to ``device``, or all of its cores where that is unknown.

    Source: Linux ``/sys/bus/pci/devices/<id>/local_cpulist``.
    """
    allowed = frozenset(os.sched_getaffinity(0))
    if device.type != "cuda":
        return allowed
    properties = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if not all(hasattr(properties, name) for name in names):
        return allowed  # an older torch; zeros would name the host bridge
    domain, bus, slot = (int(getattr(properties, name)) for name in names)
    try:
        address = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
        text = Path(f"/sys/bus/pci/devices/{address}/local_cpulist").read_text()
    except OSError:
        return allowed
    return (allowed & parse_cpu_list(text)) or allowed


def parse_cpu_list(text: str) -> frozenset[int]:
    """Cores named by a kernel list such as ``"0-3,8"``."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)
