"""All copies between host memory and one device.

Each client has a link with two streams, one per direction, so that both directions are busy at once
and no client waits behind another client's copies. A link orders its own copies; producers and
readers of the bytes exchange events with it::

    producer --updated--> store --stored--> who reads the host, or uses the device memory again
    host memory --------> fetch --arrived--> who reads the device

Only :meth:`Link.synchronize` and :meth:`Link.finish_stores` block the host. Threads that write or
read files wait for their copies: :func:`on_host`, :func:`fill`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from ..core.backend import TURN_BYTES, Backend, Event, Stream, TimedEvent
from ..core.config import brief
from ..core.errors import DeviceMemoryError
from ..core.storage import span
from .block import Block, Residence

buffers = threading.local()  # pageable, for blocks of files


class Link:
    """Both directions between host memory and a device, for one client.

    Args:
        backend: of the device.
        client: name in traces and in the simulator; its streams are ``client:in`` and
            ``client:out``.
        turn_bytes: size of a turn of a fetch, between which other copies to the device get through;
            None: this client uses the link alone, and whole spans are faster.
    """

    def __init__(
        self, backend: Backend, client: str, *, turn_bytes: int | None = TURN_BYTES
    ) -> None:
        self._turn_bytes = turn_bytes
        make = backend.stream if turn_bytes is None else backend.bulk_stream
        self._in = make(f"{client}:in")
        self._out = backend.stream(f"{client}:out")
        self._backend = backend
        self.fetched_bytes = self.stored_bytes = 0  # so far

    def fetch(self, *blocks: Block, after: Iterable[Event | None] = ()) -> Event:
        """Copy blocks to their device memory, after these events; returns ``arrived``.

        Raises:
            AssertionError: the device's bytes are newer than the host's, or equal.
        """
        with span("fetch"):
            for event in after:
                if event is not None:
                    self._in.wait(event)
            for block in blocks:
                assert block.residence in (Residence.HOST, Residence.STORING), block.residence
                if self._turn_bytes is None:  # not turns(), which a block keeps: spans may change
                    self._in.copy(block.device, block.host)
                else:
                    self._in.copy_in_turns(*block.turns(self._turn_bytes))
                self.fetched_bytes += block.n_bytes
            arrived = self._in.record()
            for block in blocks:
                block.arrived, block.residence = arrived, Residence.FETCHING
        return arrived

    def store(self, *blocks: Block, after: Iterable[Event | None] = ()) -> Event:
        """Copy blocks to their host memory, after these events and ``updated``; returns ``stored``.

        Raises:
            AssertionError: the host already has the bytes.
        """
        with span("store"):
            for event in (*after, *dict.fromkeys(block.updated for block in blocks)):
                if event is not None:
                    self._out.wait(event)
            for block in blocks:
                assert block.residence in (Residence.DIRTY, Residence.DEVICE), block.residence
            self._out.copy(
                [tensor for block in blocks for tensor in block.host],
                [tensor for block in blocks for tensor in block.device],
            )
            stored = self._out.record()
            for block in blocks:
                self.stored_bytes += block.n_bytes
                block.stored, block.residence = stored, Residence.STORING
                block.stores += 1
        return stored

    @functools.cached_property
    def update(self) -> Stream:
        """Stream for kernels that update fetched bytes, beside both directions; created on first
        use. Urgent: else each waits for a whole kernel of the model, and the link for it."""
        return self._backend.stream("update", is_urgent=True)

    def keep_order(self) -> None:
        """Order later fetches after all earlier ones, because they may share device memory."""
        self._in.keep_order()

    def follow(self, *events: Event, fetches: bool = True, stores: bool = True) -> None:
        """Make later copies in these directions wait for ``events``."""
        for event in events:
            if fetches:
                self._in.wait(event)
            if stores:
                self._out.wait(event)

    def time_stores(self) -> TimedEvent:
        """Return an event after all stores so far, with the time."""
        return self._out.record_timed()

    def time_fetches(self) -> TimedEvent:
        """Return an event after all fetches so far, with the time."""
        return self._in.record_timed()

    def finish_stores(self) -> None:
        """Block until all stores so far have ended."""
        self._out.synchronize()

    def synchronize(self) -> None:
        """Block until all copies so far have ended."""
        self._in.synchronize()
        self._out.synchronize()

    def end_with(self, owner: object, *memory: object) -> None:
        """When ``owner`` goes, block until all copies have ended, and only then let go of
        ``memory`` and of what else ``owner`` has."""
        weakref.finalize(owner, _end, self, os.getpid(), memory).atexit = False


def _end(link: Link, pid: int, _memory: object) -> None:
    if os.getpid() == pid:  # a forked child has neither the copies nor their memory
        with contextlib.suppress(Exception):
            link.synchronize()


@contextlib.contextmanager
def allocating(n_bytes: int, what: str, remedy: str) -> Iterator[None]:
    """Inside, device memory is taken for what is in host memory.

    Raises:
        DeviceMemoryError: the device has no room.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"{brief(n_bytes)} on the device for {what}",
            reason=f"there is no room ({error}); what has not moved stays where it is",
            remedy=f"free device memory and try again, or {remedy}",
        ) from error


def scratch(n_bytes: int) -> Tensor:
    """Return this thread's buffer, 1-D uint8 of ``n_bytes``, which the next call reuses."""
    own = getattr(buffers, "own", None)
    if own is None or own.numel() < n_bytes:
        own = buffers.own = torch.empty(n_bytes, dtype=torch.uint8)
    return own[:n_bytes]


def on_host(block: Tensor) -> Tensor:
    """Return ``block`` (1-D uint8), or its copy in this thread's scratch if it is on a device."""
    return block if block.device.type == "cpu" else scratch(block.numel()).copy_(block)


def fill(target: Tensor, read: Callable[[Tensor], None]) -> None:
    """Fill ``target`` (1-D uint8) with ``read``, through scratch if it is on a device."""
    block = target if target.device.type == "cpu" else scratch(target.numel())
    read(block)
    if block is not target:
        target.copy_(block)
