"""What the package needs of a device: streams, events, memory.

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

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Final, NamedTuple, Protocol

import torch

from .errors import DeviceError

TURN_BYTES: Final = 32 << 20
"""Of a bulk copy; see core/devices.py."""


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether all work before the point has completed."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until it has."""
        ...


class PendingEvent:
    """An event that a thread is going to record; streams and the host may wait for it.

    Args:
        future: of the call that records and returns it.
    """

    def __init__(self, future: Future[Event]) -> None:
        self._future = future

    def recorded(self) -> Event:
        """The event itself: blocks the calling thread until it has been recorded.

        Raises:
            BaseException: what kept the other thread from recording it.
        """
        return self._future.result()

    def query(self) -> bool:
        """See :class:`Event`. True after a failure, too: there is nothing to wait for."""
        if not self._future.done():
            return False
        return self._future.exception() is not None or self._future.result().query()

    def synchronize(self) -> None:
        """See :class:`Event`; raises as :meth:`recorded` does."""
        self.recorded().synchronize()


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
    """One device as this package sees it."""

    device: torch.device
    can_pin: bool
    """Whether host memory can be registered with this device's driver."""

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

    def executor(self, name: str, set_up: Callable[[], None]) -> Executor:
        """One thread of that name, which first calls ``set_up``."""
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
            reason="a graph cannot replay transfers and their scheduling",
            remedy=f"capture forward and backward, and call {what} outside the graph",
        )
    return backend.current_stream()
