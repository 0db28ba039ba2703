"""Interfaces of one device: streams, events, memory.

All asynchronous work is *launched* on a :class:`Stream`: ``stream.launch(fn, *operands)`` runs
``fn(*operands)`` in order on that stream. Three backends implement the same interface: the
accelerator (CUDA streams), the CPU (every launch runs at once) and the stream simulator of
``tests/helpers/simulator.py`` (launches are queued and run only when something waits for them). A
launched function must get every tensor it reads or writes as an operand, not through a closure,
because the simulator watches operands' lifetimes; tensors that the package itself owns for the
optimizer's lifetime (arena, slots, scratch) are exempt.

The package does not use ``record_stream``. Events alone order streams. A tensor that a side stream
reads stays alive until the stream that allocated it has waited for the reader
(``docs/internals/overlap.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Final, NamedTuple, Protocol

import torch

from .errors import DeviceError

TURN_BYTES: Final = 32 << 20
"""Size of one turn of a bulk copy; see core/devices.py."""


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether all work before the point has completed."""

    def synchronize(self) -> None:
        """Block the calling thread until that work has completed."""


class PendingEvent:
    """An event that another thread will record; streams and the host may wait for it.

    Args:
        future: result of the call that records the event and returns it.
    """

    def __init__(self, future: Future[Event]) -> None:
        self._future = future

    def recorded(self) -> Event:
        """Return the event; blocks the calling thread until it has been recorded.

        Raises:
            BaseException: the error that kept the other thread from recording the event.
        """
        return self._future.result()

    def query(self) -> bool:
        """See :class:`Event`. True after a failure, too, since nothing is left to wait for."""
        if not self._future.done():
            return False
        return self._future.exception() is not None or self._future.result().query()

    def synchronize(self) -> None:
        """See :class:`Event`; raises like :meth:`recorded`."""
        self.recorded().synchronize()


class TimedEvent(Event, Protocol):
    """An event that also records the time."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to ``end_event``; both must have been reached."""


Turns = Sequence[Sequence[torch.Tensor]]
"""Tensors in turns: see :func:`in_turns`."""


class Stream(Protocol):
    """Work that runs in order, beside other streams."""

    name: str

    def launch(self, fn: Callable[..., None], *operands: Any) -> None:
        """Run ``fn(*operands)`` after all earlier launches and waits on this stream."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy each source into its target, in order: 1-D, uint8, contiguous, of equal length.

        Unlike a launch, the caller keeps these tensors alive until the copies are done.
        """

    def copy_in_turns(self, targets: Turns, sources: Turns) -> None:
        """As :meth:`copy`. On a bulk stream, turns may overlap, and other copies get through
        between them."""

    def keep_order(self) -> None:
        """Order later copies after all earlier ones, because they may share targets."""

    def wait(self, event: Event) -> None:
        """Make later work on this stream wait for ``event``; the host does not wait.

        For a :class:`PendingEvent`, the host waits until it has been recorded.
        """

    def record(self) -> Event:
        """Return an event after everything launched so far."""

    def record_timed(self) -> TimedEvent:
        """As :meth:`record`, with the time."""

    def synchronize(self) -> None:
        """Block the calling thread until everything launched has completed."""


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Enqueue all copies on torch's current stream."""
    if targets:  # no state at all: SGD without momentum
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


def in_turns(
    tensors: Sequence[torch.Tensor], turn_bytes: int = TURN_BYTES
) -> list[list[torch.Tensor]]:
    """Split 1-D uint8 tensors into lists of about ``turn_bytes``: cut large ones, join small ones.

    Tensors of the same lengths give parts of the same lengths.
    """
    turns: list[list[torch.Tensor]] = [[]]
    room = turn_bytes
    for tensor in tensors:
        # Equal lengths, so that no turn is much shorter than the others.
        count = max(-(-tensor.numel() // turn_bytes), 1)
        for part in tensor.split(max(-(-tensor.numel() // count), 1)):
            if part.numel() > room and turns[-1]:
                turns.append([])
                room = turn_bytes
            turns[-1].append(part)
            room -= part.numel()
    return turns


class AllocatorFigures(NamedTuple):
    """Figures of torch's allocator for one device."""

    reserved_bytes: int
    """Memory that it holds from the driver now."""
    allocated_peak_bytes: int
    """Peak in use since the last reset of torch's peaks."""
    unused_bytes: int
    """Peak reserved minus peak in use."""
    retries: int
    """How often it released cached memory to serve a request."""


class Backend(Protocol):
    """Interface of one device."""

    device: torch.device
    can_pin: bool
    """Whether the driver of this device can page-lock host memory."""

    def stream(self, name: str, *, is_urgent: bool = False) -> Stream:
        """Make a new stream; ``name`` appears in traces and in the simulator. Kernels of an urgent
        one go before others that are ready."""

    def bulk_stream(self, name: str) -> Stream:
        """Make a new stream for bulk copies in one direction that let copies of others through."""

    def current_stream(self) -> Stream:
        """Return the stream that the caller's torch operations run on."""

    def is_capturing(self) -> bool:
        """Whether a CUDA graph captures the caller's current stream."""

    def adopt_stream(self, raw: Any) -> Stream:
        """Wrap a stream that another library (FSDP2) made, such as ``torch.cuda.Stream``."""

    def adopt_event(self, raw: Any) -> Event:
        """Wrap an event that another library recorded, such as ``torch.cuda.Event``."""

    def executor(self, name: str, set_up: Callable[[], None]) -> Executor:
        """Make an executor with one thread of that name, which first calls ``set_up``."""

    def allocate(self, n_bytes: int) -> torch.Tensor:
        """Allocate 1-D uint8 device memory, uninitialised, aligned to at least 256 bytes."""

    def allocator(self) -> AllocatorFigures | None:
        """Return figures of torch's allocator; None if the device has none."""

    def free_and_total(self) -> tuple[int, int]:
        """Return the bytes that torch's allocator can still get from the driver, and its limit."""


def refuse_capture(backend: Backend, what: str) -> None:
    """Refuse ``what``, the caller's action, inside a CUDA graph capture.

    Raises:
        DeviceError: the current stream is being captured.
    """
    if backend.is_capturing():
        raise DeviceError(
            f"{what} inside a CUDA graph capture",
            reason="a graph cannot replay what the host decides or waits for",
            remedy=f"capture forward and backward, and call {what} outside the graph",
        )


def stream_to_wait(backend: Backend, what: str = "step()") -> Stream:
    """As :meth:`Backend.current_stream`, after :func:`refuse_capture`."""
    refuse_capture(backend, what)
    return backend.current_stream()
