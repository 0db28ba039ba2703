"""A stream simulator: a forgotten wait, or an operand dropped too early, gives wrong numbers.

:class:`StreamSimulator` is a backend (see :mod:`.core.backend`) without any device. What is
launched on a stream is queued, and runs only when the host waits for something, in an order that a
*policy* chooses among all orders that the events allow. Code whose events are complete gives the
same numbers under every policy; code that forgot one gives other numbers under some policy, every
time, on a laptop.

What is built inside ``with StreamSimulator(policy)`` takes the simulator. A test launches its own
work on ``current_stream()``, so that it is queued as well, and synchronizes before it reads.
A real model's forward and backward are not launched, they run at once. For them
``StreamSimulator(policy, inline_current=True)`` keeps the current stream up with the host: its
entries run when they are enqueued, and a wait on it first runs what it waits for. All other
streams still lag or lead as the policy says.

To know that a test would notice a missing wait, remove each one in turn: run once and read
``len(simulator.wait_log)``, then run with ``skip_wait=k`` for each k and see some policy fail.
``skip_sync=k`` does the same for the host's ``event.synchronize()``.

Policies (:data:`ADVERSARIES` holds a set that needs no knowledge of the stream names):

* ``"lazy"``: only what the host waits for runs, as late as possible.
* ``"eager"``: when the host waits, all other streams first run as far as their waits allow.
* ``"immediate"``: everything runs as soon as it is allowed to, as on an idle device.
* ``"immediate:<stream>"``: this stream runs whatever it may at once, the others are lazy.
* ``"lag:<stream>"``: this stream is lazy, the others run whatever they may at once.
* ``"random:<seed>"``: a random legal order with streams of very different speeds.

``<stream>`` is a name, or the number of the stream in order of creation (the current stream is 0).

Lifetimes. The simulator models a caching allocator. A launched tensor's memory belongs to the
current stream. When the queues alone hold that memory, it may be reused by whatever
the current stream does next, so a *poison* entry is enqueued there, which fills it with NaN
(0x7F bytes in integers). A reader on another stream sees right values if the current stream had
waited for it before the drop, and may see NaN if not; each such use is also listed in
``late_uses``. So that the queues hold memory and not tensor objects, launched functions get *equal
views, not the same objects*: no ``.grad``, no ``requires_grad``, no ``Parameter``, new lists,
tuples and dicts around them. Everything else is passed as it is and without watching: containers
without tensors, other objects, tensor subclasses such as ``DTensor``, and what a closure holds.
Memory that torch did not allocate (``from_numpy``, ``frombuffer``) is never poisoned.

What it cannot show: races inside of one launch (between the blocks of a kernel), races between
host threads (:class:`WaitingExecutor` has none), real timing, overlap and speed, operations that
are not launched, and host memory that is freed while a copy uses it (all memory is treated as the
device's). A program passes when no policy that was tried finds an error, which is evidence and
no proof; random seeds add evidence.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol
from unittest import mock

import torch

from fsdp_offload.core import devices
from fsdp_offload.core.backend import (
    AllocatorFigures,
    Backend,
    Event,
    PendingEvent,
    Turns,
    copy_all,
)
from fsdp_offload.core.errors import ConfigError, DeviceError
from fsdp_offload.core.storage import identity, owners

__all__ = ["ADVERSARIES", "StreamSimulator"]

ADVERSARIES: tuple[str, ...] = (
    "lazy",
    "eager",
    "immediate",
    *(f"immediate:{index}" for index in range(8)),
    *(f"lag:{index}" for index in range(8)),
    *(f"random:{seed}" for seed in range(8)),
)
"""Policies that together find most missing waits of programs with up to eight streams."""


# --------------------------------------------------------------------------- memory


class _Memory:
    """One storage that queued entries use, and who else holds it."""

    __slots__ = ("fill", "poison_queued", "reused", "storage", "users")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.users = 0  # queued entries that read or write it
        self.fill = 0x7F  # the poison's byte; 0xFF is NaN in every float format of torch
        self.poison_queued = False
        self.reused = False  # the poison ran: later uses are errors of the program

    def references(self) -> tuple[int, int]:
        # The first figure counts tensors, the second holders of the Python storage object itself.
        return owners(self.storage), sys.getrefcount(self.storage)

    def is_held_outside(self) -> bool:
        count, python_count = self.references()
        return count > _ALONE[0] or python_count > _ALONE[1]

    def poison(self) -> None:
        self.poison_queued = False
        if self.is_held_outside():
            # A launched function kept a view. On a device it would have done so at the launch,
            # that is before the drop, so this memory was never free.
            return
        self.reused = True
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(self.storage).fill_(self.fill)


def _alone() -> tuple[int, int]:
    """The counts of a storage that only a :class:`_Memory` holds; they differ between versions."""
    tensor = torch.empty(1, device="cpu")
    memory = _Memory(tensor.untyped_storage())
    del tensor
    return memory.references()


_ALONE = _alone()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a dtype, a size, strides and an offset into CPU memory are all there is to it."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


_Rebuild = Callable[[], Any]
_Hold = Callable[[torch.Tensor], _Memory]


def _freeze(value: Any, hold: _Hold) -> _Rebuild | None:
    """How to make ``value`` again when its entry runs; None: it holds no tensor to watch."""
    if isinstance(value, torch.Tensor):
        return _freeze_tensor(value, hold) if _is_plain(value) else None
    if type(value) is dict:
        keys, values = list(value), _freeze_all(list(value.values()), hold)
        return None if values is None else lambda: dict(zip(keys, values(), strict=True))
    if type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        items = _freeze_all(value, hold)
        make = getattr(type(value), "_make", type(value))
        return None if items is None else lambda: make(items())
    return None


def _freeze_all(values: Sequence[Any], hold: _Hold) -> Callable[[], list[Any]] | None:
    frozen = [_freeze(value, hold) for value in values]
    if not any(frozen):
        return None
    # A frozen value must not be in the list itself: that would be one more holder of its memory.
    kept = [value if part is None else None for part, value in zip(frozen, values, strict=True)]

    def rebuild() -> list[Any]:
        return [part() if part else value for part, value in zip(frozen, kept, strict=True)]

    return rebuild


def _freeze_tensor(tensor: torch.Tensor, hold: _Hold) -> _Rebuild:
    memory = hold(tensor)
    dtype, size, stride = tensor.dtype, tensor.size(), tensor.stride()
    offset = tensor.storage_offset()
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    n_bytes = 0 if 0 in size else (last + 1) * tensor.element_size()

    def rebuild() -> torch.Tensor:
        # `set_` would grow a storage that is too small.
        assert memory.storage.nbytes() >= n_bytes, (
            f"a storage was resized to {memory.storage.nbytes()} bytes while a launch that needs "
            f"{n_bytes} of them was pending"
        )
        view = torch.empty(0, dtype=dtype, device="cpu")
        return view.set_(memory.storage, offset, size, stride)

    return rebuild


# --------------------------------------------------------------------------- streams


class _Entry(NamedTuple):
    label: str
    run: Callable[[], None]
    after: SimulatedEvent | None = None
    """An event that must be reached before the entry may run."""
    uses: tuple[_Memory, ...] = ()


class SimulatedEvent:
    """A position in a simulated stream's queue."""

    def __init__(self, stream: SimulatedStream, position: int) -> None:
        self.stream, self.position = stream, position

    def __repr__(self) -> str:
        return f"event {self.position} of {self.stream.name!r}"

    def reached(self) -> bool:
        """Whether every entry before the position has run."""
        return self.stream.n_run >= self.position

    def query(self) -> bool:
        """Whether every entry before the position has run; runs nothing."""
        self.stream.simulator._poll(run=False)
        return self.reached()

    def synchronize(self) -> None:
        """Run what the policy chooses until the position is reached."""
        self.stream.simulator._synchronize(self)

    def elapsed_time(self, end_event: SimulatedEvent) -> float:
        return 0.0


class SimulatedStream:
    """A queue of launches, waits and poisons that run in order."""

    def __init__(self, simulator: StreamSimulator, name: str, index: int) -> None:
        self.simulator, self.name, self.index = simulator, name, index
        self.entries: deque[_Entry] = deque()
        self.n_enqueued = 0
        self.n_run = 0
        self.running: str | None = None
        """The label of the entry that is running now."""

    def launch(self, fn: Callable[..., None], *operands: Any) -> None:
        """Queue ``fn`` with views equal to ``operands``."""
        self.simulator._launch(self, fn, operands)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Queue the copies as one launch."""
        self.launch(copy_all, targets, sources)

    def copy_in_turns(self, targets: Turns, sources: Turns) -> None:
        """Queue the copies as one launch."""
        self.copy([t for turn in targets for t in turn], [s for turn in sources for s in turn])

    def keep_order(self) -> None:
        """One launch at a time anyway."""

    def wait(self, event: Event) -> None:
        """Block later entries of this stream until ``event`` is reached."""
        self.simulator._wait(self, event.recorded() if isinstance(event, PendingEvent) else event)

    def record(self) -> SimulatedEvent:
        """The event of everything enqueued here so far."""
        self.simulator._poll()
        return SimulatedEvent(self, self.n_enqueued)

    def record_timed(self) -> SimulatedEvent:
        return self.record()

    def synchronize(self) -> None:
        """Run until everything enqueued here so far has run; not counted by ``sync_log``."""
        self.simulator._poll()
        self.simulator._complete(SimulatedEvent(self, self.n_enqueued))

    def is_runnable(self) -> bool:
        """Whether the first entry may run now."""
        if not self.entries or self.running is not None:
            return False
        after = self.entries[0].after
        return after is None or after.reached()

    def blocker(self) -> str:
        """Why nothing here can run, for error messages."""
        if self.running is not None:
            return f"stream {self.name!r} is inside of {self.running!r}, which waits on the host"
        return f"stream {self.name!r} at entry {self.n_run} waits for {self.entries[0].after!r}"


# --------------------------------------------------------------------------- policies


class _Policy(Protocol):
    def ahead(self, runnable: list[SimulatedStream]) -> SimulatedStream | None:
        """The stream to advance by one entry without a host wait; None: no (further) one."""
        ...

    def pick(
        self, runnable: list[SimulatedStream], needed: SimulatedStream, target: SimulatedStream
    ) -> SimulatedStream:
        """The stream to advance by one while the host waits for ``target``.

        ``needed`` is the first runnable stream of the chain that the target waits for.
        """
        ...


class _Ahead:
    """Some streams run as soon as they may, the others only what is needed."""

    def __init__(self, is_ahead: Callable[[SimulatedStream], bool]) -> None:
        self._is_ahead = is_ahead

    def ahead(self, runnable: list[SimulatedStream]) -> SimulatedStream | None:
        return next(filter(self._is_ahead, runnable), None)

    def pick(
        self, runnable: list[SimulatedStream], needed: SimulatedStream, target: SimulatedStream
    ) -> SimulatedStream:
        return needed


class _Eager:
    """While the host waits, everything beside the target's stream comes first."""

    def ahead(self, runnable: list[SimulatedStream]) -> SimulatedStream | None:
        return None

    def pick(
        self, runnable: list[SimulatedStream], needed: SimulatedStream, target: SimulatedStream
    ) -> SimulatedStream:
        return next((stream for stream in runnable if stream is not target), needed)


class _Random:
    """Any legal order; speeds differ up to 100 times, since equal ones rarely hit a race."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._pace = self._random.choice((0.0, 0.2, 0.5))
        self._weights: dict[int, int] = {}

    def ahead(self, runnable: list[SimulatedStream]) -> SimulatedStream | None:
        return self._choose(runnable) if self._random.random() < self._pace else None

    def pick(
        self, runnable: list[SimulatedStream], needed: SimulatedStream, target: SimulatedStream
    ) -> SimulatedStream:
        return self._choose(runnable)

    def _choose(self, runnable: list[SimulatedStream]) -> SimulatedStream:
        if self._random.random() < 0.05:
            self._weights.clear()  # so that the fast and the slow change places in a long run
        for stream in runnable:
            if stream.index not in self._weights:
                self._weights[stream.index] = self._random.choice((1, 10, 100))
        weights = [self._weights[stream.index] for stream in runnable]
        return self._random.choices(runnable, weights)[0]


def _parse_policy(text: str) -> _Policy:
    kind, colon, choice = text.partition(":")

    def is_named(stream: SimulatedStream) -> bool:
        return choice in (stream.name, str(stream.index))

    if not colon:
        if kind == "lazy":
            return _Ahead(lambda stream: False)
        if kind == "eager":
            return _Eager()
        if kind == "immediate":
            return _Ahead(lambda stream: True)
    elif kind == "immediate" and choice:
        return _Ahead(is_named)
    elif kind == "lag" and choice:
        return _Ahead(lambda stream: not is_named(stream))
    elif kind == "random" and choice.isdecimal():
        return _Random(int(choice))
    raise ConfigError(
        f"policy={text!r}",
        reason="there is no such policy",
        remedy='use "lazy", "eager", "immediate", "immediate:<stream>", "lag:<stream>" or '
        '"random:<seed>"',
    )


# --------------------------------------------------------------------------- simulator


@contextmanager
def use_backend(backend: Backend) -> Iterator[Backend]:
    """Let what is built inside use ``backend``, for whatever device."""
    with mock.patch.multiple(
        devices, CpuBackend=lambda _: backend, AcceleratorBackend=lambda _: backend
    ):
        yield backend


class WaitingExecutor(Executor):
    """Runs what was submitted, in order, when something waits for any of it, on that thread."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:  # type: ignore[override]
        future = WaitedFor(self)
        self._calls.append((future, fn, args))
        return future

    def run(self) -> None:
        while self._calls:
            future, fn, args = self._calls.popleft()
            try:
                future.set_result(fn(*args))
            except BaseException as error:
                future.set_exception(error)


class WaitedFor(Future[Any]):
    def __init__(self, executor: WaitingExecutor) -> None:
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> Any:
        self._executor.run()
        return super().result(timeout)


class StreamSimulator:
    """A backend whose streams run only when the host waits; see the module's description.

    Args:
        policy: what runs, and in which order, when the host waits.
        skip_wait: ignore the ``stream.wait`` with this index in :attr:`wait_log`.
        skip_sync: ignore the ``event.synchronize`` with this index in :attr:`sync_log`.
        inline_current: run the current stream's entries as they are enqueued, because the test's
            own torch operations run at once and stand in no queue.
    """

    device = torch.device("cpu")
    can_pin = False

    def __init__(
        self,
        policy: str = "lazy",
        *,
        skip_wait: int | None = None,
        skip_sync: int | None = None,
        inline_current: bool = False,
    ) -> None:
        self.policy, self.skip_wait, self.skip_sync = policy, skip_wait, skip_sync
        self.inline_current = inline_current
        self.wait_log: list[tuple[str, str]] = []
        """(name of the waiting stream, name of the event's stream) per ``stream.wait``."""
        self.sync_log: list[str] = []
        """Name of the event's stream per ``event.synchronize``."""
        self.late_uses: list[str] = []
        """Entries that ran with memory which the allocator had given away meanwhile."""
        self._policy = _parse_policy(policy)
        self._memories: dict[int, _Memory] = {}  # by the address of torch's storage object
        self._current = SimulatedStream(self, "current", 0)
        self._streams = [self._current]
        self._installed = ExitStack()

    def __enter__(self) -> StreamSimulator:
        self._installed.enter_context(use_backend(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._installed.close()

    # ---- the backend

    def stream(self, name: str, *, is_urgent: bool = False) -> SimulatedStream:
        """A new stream with an empty queue."""
        self._poll()
        self._streams.append(SimulatedStream(self, name, len(self._streams)))
        return self._streams[-1]

    def bulk_stream(self, name: str) -> SimulatedStream:
        """As :meth:`stream`: one queue, which is all that its users may rely on."""
        return self.stream(name)

    def current_stream(self) -> SimulatedStream:
        """The one stream that stands for the caller's own torch operations."""
        self._poll()
        return self._current

    def is_capturing(self) -> bool:
        return False

    def adopt_stream(self, raw: object) -> SimulatedStream:
        """The current stream: what others do is not launched here, it runs at once."""
        return self.current_stream()

    def adopt_event(self, raw: object) -> SimulatedEvent:
        """Everything that the current stream has been given so far."""
        return self.current_stream().record()

    def executor(self, name: str, set_up: Callable[[], None]) -> WaitingExecutor:
        return WaitingExecutor()

    def allocate(self, n_bytes: int) -> torch.Tensor:
        """uint8 memory filled with 0xFF, which reads as NaN in every float format."""
        self._poll()
        return torch.full((n_bytes,), 0xFF, dtype=torch.uint8, device="cpu")

    def allocator(self) -> AllocatorFigures | None:
        return None

    def free_and_total(self) -> tuple[int, int]:
        return 0, 0

    # ---- for tests

    def reset_counters(self) -> None:
        """Forget the waits so far: ``skip_wait`` and ``skip_sync`` count from here."""
        self.wait_log.clear()
        self.sync_log.clear()

    def synchronize(self) -> None:
        """Run everything that was enqueued on any stream."""
        self._poll()
        for stream in tuple(self._streams):
            self._complete(SimulatedEvent(stream, stream.n_enqueued))

    # ---- enqueueing

    def _launch(
        self, stream: SimulatedStream, fn: Callable[..., None], operands: tuple[Any, ...]
    ) -> None:
        self._poll()
        used: dict[int, _Memory] = {}

        def hold(tensor: torch.Tensor) -> _Memory:
            memory = self._memory_of(tensor)
            used[id(memory)] = memory
            return memory

        rebuild = _freeze(list(operands), hold)
        unwatched = () if rebuild else operands
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def run() -> None:
            # The modes of the launch: on a device, `fn` runs there and then.
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                fn(*(rebuild() if rebuild else unwatched))

        for memory in used.values():
            memory.users += 1
        label = str(getattr(fn, "__qualname__", type(fn).__qualname__))
        self._enqueue(stream, _Entry(label, run, uses=tuple(used.values())))

    def _wait(self, stream: SimulatedStream, event: Event) -> None:
        self._poll()
        if not isinstance(event, SimulatedEvent) or event.stream.simulator is not self:
            raise DeviceError(
                f"{stream.name!r}.wait({event!r})",
                reason="the event does not belong to this simulator",
                remedy="build the optimizer and its streams inside one simulator's with block",
            )
        self.wait_log.append((stream.name, event.stream.name))
        if self.skip_wait != len(self.wait_log) - 1:
            self._enqueue(stream, _Entry("wait", lambda: None, after=event))

    def _enqueue(self, stream: SimulatedStream, entry: _Entry, *, run: bool = True) -> None:
        stream.entries.append(entry)
        stream.n_enqueued += 1
        if not run:
            return
        if self.inline_current and stream is self._current and stream.running is None:
            self._complete(SimulatedEvent(stream, stream.n_enqueued))
        self._run_ahead()

    # ---- running

    def _synchronize(self, event: SimulatedEvent) -> None:
        self._poll()
        self.sync_log.append(event.stream.name)
        if self.skip_sync != len(self.sync_log) - 1:
            self._complete(event)

    def _complete(self, event: SimulatedEvent) -> None:
        while not event.reached():
            needed = self._needed(event)
            self._step(self._policy.pick(self._runnable(), needed, event.stream))
            self._run_ahead()
        self._run_ahead()

    def _run_ahead(self) -> None:
        while runnable := self._runnable():
            stream = self._policy.ahead(runnable)
            if stream is None:
                return
            self._step(stream)

    def _runnable(self) -> list[SimulatedStream]:
        return [stream for stream in self._streams if stream.is_runnable()]

    def _needed(self, event: SimulatedEvent) -> SimulatedStream:
        """The stream whose first entry must run for ``event`` and can run now."""
        chain: list[SimulatedStream] = []
        for stream in _chain(event):
            if stream.is_runnable():
                return stream
            chain.append(stream)
        raise AssertionError(
            f"deadlock: {event!r} cannot be reached, because "
            + ", and ".join(stream.blocker() for stream in chain)
        )

    def _step(self, stream: SimulatedStream) -> None:
        entry = stream.entries.popleft()
        stream.running = entry.label
        for memory in entry.uses:
            if memory.reused:
                self.late_uses.append(
                    f"{entry.label!r} on stream {stream.name!r} used memory that was dropped "
                    "before the current stream had waited for it"
                )
        try:
            entry.run()
        finally:
            # Also after an error: the entry counts as run, so that the rest can be drained.
            stream.running = None
            stream.n_run += 1
            for memory in entry.uses:
                memory.users -= 1
            self._forget_unused(entry.uses)

    # ---- lifetimes

    def _memory_of(self, tensor: torch.Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        memory = self._memories.setdefault(identity(storage), _Memory(storage))
        if tensor.is_floating_point() or tensor.is_complex():
            memory.fill = 0xFF
        return memory

    def _poll(self, *, run: bool = True) -> None:
        """Enqueue a poison for memory that only the queues hold any more."""
        for memory in tuple(self._memories.values()):
            # Not resizable: memory of another library, which stays as it is when torch lets it go.
            is_ours = memory.storage.resizable()
            if not is_ours or memory.poison_queued or memory.reused or memory.is_held_outside():
                continue
            memory.poison_queued = True
            self._enqueue(self._current, _Entry("poison", memory.poison), run=run)

    def _forget_unused(self, memories: tuple[_Memory, ...]) -> None:
        for memory in memories:
            if memory.users == 0:
                self._memories.pop(identity(memory.storage), None)


def _chain(event: SimulatedEvent) -> Iterator[SimulatedStream]:
    """The event's stream, then the one that its first entry waits for, and so on.

    It ends, because an event is recorded before anything can wait for it.
    """
    next_event: SimulatedEvent | None = event
    while next_event is not None:
        stream = next_event.stream
        yield stream
        is_stuck = stream.running is not None or not stream.entries
        next_event = None if is_stuck else stream.entries[0].after
