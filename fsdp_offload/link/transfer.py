"""Offload device memory to the host and bring it back.

``out`` enqueues every copy before it frees the first byte: until then an exception leaves
everything on the device, and freeing cannot fail. If ``back`` runs out of memory, it frees what it
has taken: the host still has all bytes.

Each transfer has a link, so that two of them (a swap) use both directions at once. The host frees
device memory after its copy: each call of a :class:`Handle` does what is due.
docs/internals/link.md has more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..core import dtensor
from ..core import storage as storages
from ..core.backend import Backend, Event, TimedEvent, stream_to_wait
from ..core.config import TransferConfig, align, brief
from ..core.devices import free_bytes, release_cached
from ..core.errors import DeviceMemoryError
from ..core.interrupts import defer_sigint
from .block import OwnedBlock, StorageBlock
from .host_memory import HostRange
from .host_pool import HostPool
from .link import Link

BATCH_BYTES: Final = 128 << 20
"""Size of a batch of blocks with one event: copies without an event in between follow each other
closely."""
SEGMENT_BYTES: Final = 512 << 20
AHEAD_BYTES: Final = 256 << 20
"""Bytes that are allocated before the copy into the first of them is enqueued. Mapping memory waits
for the running copy; if others are queued behind that one, the link does not idle."""
_ALIGNMENT_BYTES: Final = 64  # alignment of a block in host memory


@dataclass(frozen=True)
class Figures:
    """Bytes and time of one kind of memory in one direction."""

    n_bytes: int = 0
    seconds: float = 0.0  # from the first copy's start to the last one's end, on the device

    @property
    def gb_per_second(self) -> float:
        """10**9 bytes per second; 0 if nothing was copied."""
        return self.n_bytes / self.seconds / 1e9 if self.seconds else 0.0


class _Copies(NamedTuple):
    """The copies of one kind."""

    n_bytes: int
    first: TimedEvent
    last: TimedEvent


class Handle:
    """A transfer in progress. Any thread may use it."""

    def __init__(
        self,
        copies: Mapping[str, _Copies] | None = None,
        releases: Iterable[tuple[Event, Sequence[OwnedBlock]]] = (),
        *,
        began: float = 0.0,
        used: object = None,
        emptied: torch.device | None = None,
    ) -> None:
        self._by_kind = dict(copies or {})
        self.n_bytes = sum(each.n_bytes for each in self._by_kind.values())  # copied
        self.seconds = 0.0  # from the call to the end of wait(), on the host
        self.freed_bytes = 0  # device memory that the driver gained
        self._releases = deque(releases)  # in the order of the copies, released as these complete
        self._used = used  # blocks with their memory on both sides, kept until the copies end
        self._began, self._emptied = began, emptied
        self._free_before = None if emptied is None else free_bytes(emptied)
        self._is_over, self._lock = not self._by_kind and not self._releases, threading.RLock()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{kind} {brief(each.n_bytes)}" for kind, each in self._by_kind.items())
        state = "copied; call wait()" if self._is_copied() else "copying"
        if self._is_over:
            state = f"done in {self.seconds:.2f} s"
        if self.freed_bytes > 0:
            state += f", freed {brief(self.freed_bytes)}"
        return f"Handle({sizes or 'nothing'}: {state})"

    def _is_copied(self) -> bool:
        return all(each.last.query() for each in self._by_kind.values())

    def is_done(self) -> bool:
        """Whether everything was copied. Does not block. Frees memory whose copy is complete to
        torch's allocator (:meth:`wait` frees it to the driver, for which CUDA waits for all work).
        """
        if not self._lock.acquire(blocking=False):
            return False  # another thread is waiting
        try:
            with defer_sigint():
                while self._releases and self._releases[0][0].query():
                    self._release()
                return not self._releases and self._is_copied()
        finally:
            self._lock.release()

    def wait(self) -> None:
        """Block until everything was copied, and freed memory is back at the driver. Idempotent."""
        with self._lock, defer_sigint():
            if self._is_over:
                return
            while self.release_next():
                pass
            for each in self._by_kind.values():
                each.last.synchronize()
            self._is_over, self._used = True, None
            if self._emptied is not None:
                release_cached(self._emptied)
                self.freed_bytes = (free_bytes(self._emptied) or 0) - (self._free_before or 0)
            self.seconds = time.perf_counter() - self._began

    def release_next(self) -> bool:
        """Wait for the next batch and free its memory; False if none is left."""
        with self._lock:
            if not self._releases:
                return False
            self._releases[0][0].synchronize()
            self._release()
            return True

    def _release(self) -> None:
        for block in self._releases[0][1]:
            block.release()
            block.forget()
        self._releases.popleft()

    def arrival(self, *kinds: str) -> Event | None:
        """Return an event after the copies of ``kinds``, or of all; None without copies."""
        found = [each.last for kind, each in self._by_kind.items() if not kinds or kind in kinds]
        return found[-1] if found else None  # one stream: the last one ends last

    def figures(self) -> dict[str, Figures]:
        """Return figures by copied kind; empty before :meth:`wait` has returned."""
        return {
            kind: Figures(each.n_bytes, each.first.elapsed_time(each.last) / 1e3)
            for kind, each in self._by_kind.items()
            if self._is_over
        }


class Transfer:
    """Moves blocks of one device out and back. Calls come from one thread at a time.

    Args:
        backend: gives streams and device memory.
        config: how to allocate host memory (``pin``, ``host_memory``).
        holder: name for errors and statistics.
        empties_cache: whether :meth:`out` ends by releasing torch's cached memory to the driver.
    """

    def __init__(
        self,
        backend: Backend,
        config: TransferConfig | None,
        holder: str,
        *,
        empties_cache: bool = False,
    ) -> None:
        self.pool = HostPool(holder, backend, config)
        # By block key: host memory, first byte in it, and capacity.
        self._buffers: dict[str, tuple[HostRange, int, int]] = {}
        self.handle = Handle()  # of the last transfer
        self.last_out, self.last_back = Handle(), Handle()  # the last ones that copied
        self._backend = backend
        self._emptied = backend.device if empties_cache else None
        self.link = Link(backend, "phase", turn_bytes=None)
        self._away: dict[str, Sequence[OwnedBlock]] = {}  # by kind, in the order of the reload
        self._dropped: Sequence[OwnedBlock] = ()
        # Offloaded storages by identity: host buffer, first byte in it, bytes.
        self._places: dict[int, tuple[str, int, int]] = {}
        # Copies without a wait so far may still use host buffers.
        self.link.end_with(self, self.pool)

    @property
    def is_away(self) -> bool:
        """Whether blocks are offloaded: from :meth:`out` to :meth:`back`."""
        return bool(self._away or self._dropped)

    @property
    def away_bytes(self) -> dict[str, int]:
        """Bytes by kind that are only in host memory, or moving there."""
        return {kind: _bytes_of(blocks) for kind, blocks in self._away.items()}

    def reserve(self, blocks: Sequence[OwnedBlock]) -> None:
        """Reserve host memory for each block; new blocks are contiguous, in order.

        A key may have another size at each offload: FSDP2 reduces the gradients of a group in one
        buffer, whose size depends on the parameters that took part. A buffer serves any block that
        fits. A block that outgrows its buffer gets a new one.

        Args:
            blocks: blocks with different keys.

        Raises:
            HostMemoryError, PinningError: see :meth:`.HostPool.take`; nothing has changed.
        """
        known = self._buffers
        missing = [b for b in blocks if b.key not in known or b.n_bytes > known[b.key][2]]
        if not missing:
            return
        sizes = [align(block.n_bytes, _ALIGNMENT_BYTES) for block in missing]
        memory, start = self.pool.take(sum(sizes)), 0
        before = {buffer[0] for buffer in known.values()}
        for block, size in zip(missing, sizes, strict=True):
            known[block.key] = memory, start, size
            start += size
        # A tensor over freed memory keeps it mapped.
        for unused in before - {buffer[0] for buffer in known.values()}:
            self.pool.give(unused)

    def _host(self, key: str, start: int, n_bytes: int) -> Tensor:
        """Return 1-D uint8 from byte ``start`` of a buffer on, also across following buffers."""
        memory, first, _ = self._buffers[key]
        return memory.tensor(first + start, n_bytes, torch.uint8)

    def out(
        self,
        found: Iterable[tuple[str, Sequence[OwnedBlock]]],
        dropped: Sequence[OwnedBlock] = (),
    ) -> Handle:
        """Copy blocks to their host buffers and free their device memory.

        The caller has waited for work on them by streams other than its current one, and does not
        write to them until :meth:`Handle.wait`. If this raises, nothing was freed.

        Args:
            found: kinds with their blocks; copies of one kind run while the next is collected.
            dropped: blocks to free without a copy, after the caller's current stream.

        Raises:
            HostMemoryError, PinningError: host memory is short.
        """
        self.handle.wait()
        assert not self.is_away, list(self._away)
        began = time.perf_counter()
        copies: dict[str, _Copies] = {}
        releases: list[tuple[Event, Sequence[OwnedBlock]]] = []
        away: dict[str, Sequence[OwnedBlock]] = {}
        try:
            # All memory that is read below was last written before now.
            self.link.follow(self._now(), fetches=False)
            for kind, blocks in found:
                away[kind] = blocks
                if not blocks:
                    continue
                self.reserve(blocks)
                first = self.link.time_stores()
                for batch in batches(blocks, BATCH_BYTES):
                    stored = self._copy(batch, self.link.store)
                    releases.append((stored, batch))
                copies[kind] = _Copies(_bytes_of(blocks), first, self.link.time_stores())
        except BaseException:
            self.link.finish_stores()  # memory of the copies may be freed from here on
            raise
        if dropped:
            releases.append((self._now(), dropped))
        self._away, self._dropped = away, dropped
        self._places = {
            storages.identity(storage): (block.key, start, storage.nbytes())
            for blocks in away.values()
            for block in blocks
            for storage, start in block.storages
        }
        used = list(away.values())
        self.handle = Handle(copies, releases, began=began, used=used, emptied=self._emptied)
        self.last_out = self.handle if copies else self.last_out
        return self.handle

    def back(self, free_more: Callable[[], bool] | None = None) -> Handle:
        """Copy everything back to the device. Host buffers stay reserved.

        The caller's current stream does not wait: see :meth:`Handle.arrival`. If this raises,
        everything is still offloaded.

        Args:
            free_more: called while device memory is short; returns whether it freed some.

        Raises:
            DeviceMemoryError: device memory is short.
        """
        self.handle.wait()
        began = time.perf_counter()
        copies: dict[str, _Copies] = {}
        taken: list[OwnedBlock] = []
        segments: dict[str, int] = {}

        def restore(block: OwnedBlock) -> None:
            self._take_segment(segments.pop(block.key, 0))
            _restore(block, free_more)
            taken.append(block)

        try:
            # Memory that is allocated below was freed before now, in order of the caller's stream.
            self.link.follow(self._now(), stores=False)
            for kind, blocks in self._away.items():
                if not blocks:
                    continue
                first = self.link.time_fetches()
                segments |= _segments(blocks)
                for batch in _restored(blocks, restore):
                    self._copy(batch, self.link.fetch)
                copies[kind] = _Copies(_bytes_of(blocks), first, self.link.time_fetches())
            for block in self._dropped:
                restore(block)
        except BaseException as error:
            self.link.synchronize()
            for block in taken:
                block.release()
                block.forget()
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            raise DeviceMemoryError(
                f"reload of {sum(self.away_bytes.values()) + _bytes_of(self._dropped)} bytes",
                reason=f"the device has too little free memory ({error}); nothing is lost",
                remedy="free device memory, in other processes too, then call it again",
            ) from error
        used = list(self._away.values())
        self._away, self._dropped, self._places = {}, (), {}
        self.handle = Handle(copies, began=began, used=used)
        self.last_back = self.handle if copies else self.last_back
        return self.handle

    def _now(self) -> Event:
        return stream_to_wait(self._backend, "an offload or a reload").record()

    def _take_segment(self, n_bytes: int) -> None:
        """Make torch's allocator cut the next storages from one segment. It frees segments one by
        one, while nothing is copied, so few segments make the next offload faster."""
        if n_bytes and storages.may_cut(self._backend.device):
            with contextlib.suppress(torch.OutOfMemoryError):  # then each storage gets its own
                self._backend.allocate(n_bytes)

    def _copy(self, batch: Sequence[OwnedBlock], copy: Callable[..., Event]) -> Event:
        """Enqueue the copies of a batch; returns an event after them.

        The handle keeps the blocks until the copies have ended, so an owner may drop its tensors.
        """
        for block in batch:
            block.host, block.device = [self._host(block.key, 0, block.n_bytes)], [block.view()]
        ended = copy(*batch)
        for block in batch:
            block.device = ()  # a view of a chunk would keep its whole range alive
        return ended

    def last(self, *, wait: bool) -> Handle:
        """Return the handle of the last transfer; ``wait``: after it has ended."""
        if wait:
            self.handle.wait()
        return self.handle

    # ------------------------------------------------------------------ while it is away

    def of(self, tensor: Tensor) -> Tensor | None:
        """See :class:`.HostCopies`."""
        replaced = False

        def host(plain: Tensor) -> Tensor:
            nonlocal replaced
            place = self._places.get(storages.identity(plain.untyped_storage()))
            if place is None:
                return plain
            replaced = True
            return storages.view_over(self._host(*place), plain)

        if tensor.layout is not torch.strided:
            return None
        found = dtensor.rebuilt(dtensor.local(tensor), host)
        return dtensor.like(tensor, found) if replaced else None

    def wait(self) -> None:
        """See :class:`.HostCopies`."""
        self.handle.wait()

    def close(self) -> None:
        """Free host memory, with all offloaded contents. Idempotent."""
        self.handle.wait()
        self._away, self._dropped, self._places = {}, (), {}
        self._buffers.clear()
        self.pool.close()


def _bytes_of(blocks: Iterable[OwnedBlock]) -> int:
    return sum(block.n_bytes for block in blocks)


def batches(blocks: Iterable[OwnedBlock], most_bytes: int) -> Iterator[list[OwnedBlock]]:
    """Group consecutive blocks of at most ``most_bytes``, or one that is larger."""
    batch: list[OwnedBlock] = []
    n_bytes = 0
    for block in blocks:
        if batch and n_bytes + block.n_bytes > most_bytes:
            yield batch
            batch, n_bytes = [], 0
        batch.append(block)
        n_bytes += block.n_bytes
    if batch:
        yield batch


def _segments(blocks: Iterable[OwnedBlock]) -> dict[str, int]:
    """Return the bytes of each shared segment, by the key of the first block restored in it."""
    large = (
        block
        for block in blocks
        if isinstance(block, StorageBlock) and not storages.is_small(block.n_bytes)
    )
    return {
        batch[0].key: sum(storages.block_bytes(block.n_bytes) for block in batch)
        for batch in batches(large, SEGMENT_BYTES)
    }


def _restore(block: OwnedBlock, free_more: Callable[[], bool] | None) -> None:
    while True:
        try:
            return block.restore()
        except torch.OutOfMemoryError:
            if free_more is None or not free_more():
                raise


def _restored(
    blocks: Iterable[OwnedBlock], restore: Callable[[OwnedBlock], None]
) -> Iterator[list[OwnedBlock]]:
    waiting: deque[list[OwnedBlock]] = deque()
    ahead_bytes = 0
    for batch in batches(blocks, BATCH_BYTES):
        for block in batch:
            restore(block)
        waiting.append(batch)
        ahead_bytes += _bytes_of(batch)
        while ahead_bytes >= AHEAD_BYTES:
            ahead_bytes -= _bytes_of(waiting[0])
            yield waiting.popleft()
    yield from waiting
