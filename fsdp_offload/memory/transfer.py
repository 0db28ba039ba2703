"""Copies of device memory to host memory and back, with the memory given up in between.

[Note: all or nothing]
``out`` enqueues every copy before the first byte is given up: until then an exception leaves
everything on the device, and giving up fails no more. ``back`` gives up what it has taken if it
runs out of memory half-way: the host has all bytes still.

[Note: order]
One stream per direction, so that two transfers (a swap) use both directions of the link. A stream
starts behind what the caller's current stream has been given, and the caller's waits for what came
back. Device memory goes when its own copy has completed, which is the host's work: each call of a
:class:`Handle` does what is due. Memory that comes back is allocated in order of the caller's
stream, so the copies into it wait for that, too.

[Note: packing]
A small copy costs more than its bytes. Blocks below ``PACK_BELOW_BYTES`` are gathered into one
staging buffer on the device and travel as one copy of up to ``PACK_BYTES``; their host buffers lie
side by side. Gathering takes a hundredth of the copy's time, so it runs on the same stream, where
the next group waits until the buffer is free. Without device memory for it, each travels alone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core import dtensor
from ..core import storage as storages
from ..core.backend import Backend, Event, Stream, TimedEvent, copy_all
from ..core.config import TransferConfig
from ..core.interrupts import held_back
from .buffers import HostBuffers, aligned

PACK_BELOW_BYTES: Final = 2 << 20
PACK_BYTES: Final = 32 << 20
AHEAD_BYTES: Final = 256 << 20
"""Of memory that is taken before the copy into the first of it is enqueued. Mapping memory waits
for the copy that runs; with others behind that one, the link does not."""


class Block(Protocol):
    """Bytes of device memory that leave and come back together."""

    key: str
    """What it is, the same at each offload: it gets the host buffer that it had."""
    n_bytes: int

    def view(self) -> Tensor:
        """Its bytes: 1-D uint8 on the device. It must be present."""
        ...

    def release(self) -> None:
        """Give its memory up. All work on it has completed."""
        ...

    def restore(self) -> None:
        """Take memory for it again, with any content, in order of the current stream.

        Raises:
            torch.OutOfMemoryError: there is none; it is as before.
        """
        ...


class StorageBlock:
    """A storage of torch's, resized to 0 and back, so its address changes.

    It moves once, with all of its bytes: views, tied weights and the padding of FSDP2's shards
    stay what they are, because the storage object stays and only its memory goes.
    """

    def __init__(self, key: str, storage: torch.UntypedStorage) -> None:
        self.key, self.storage = key, storage
        self.n_bytes = storage.nbytes()

    @torch.inference_mode(False)
    def view(self) -> Tensor:
        empty = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return empty.set_(self.storage)

    def release(self) -> None:
        self.storage.resize_(0)

    def restore(self) -> None:
        self.storage.resize_(self.n_bytes)


def collect(named: Iterable[tuple[str, Tensor]]) -> list[StorageBlock]:
    """Storages of plain tensors, each once, that torch can give up and that nothing else moves."""
    found: dict[int, StorageBlock] = {}
    for key, tensor in named:
        storage = tensor.untyped_storage()
        is_own = storage.resizable() and storages.owner_of(storage) is None
        if storage.nbytes() and is_own:
            found.setdefault(storages.identity(storage), StorageBlock(key, storage))
    return list(found.values())


@dataclass(frozen=True)
class Figures:
    """What one kind of memory took in one direction."""

    n_bytes: int
    """Copied."""

    seconds: float
    """From its first copy's start to its last one's end, as the device saw it."""

    @property
    def gb_per_second(self) -> float:
        """10**9 bytes per second; 0 where nothing was copied."""
        return self.n_bytes / self.seconds / 1e9 if self.seconds else 0.0


class _Copies(NamedTuple):
    """The copies of one kind."""

    n_bytes: int
    first: TimedEvent
    last: TimedEvent


class Handle:
    """A transfer under way. Any thread may use it."""

    def __init__(
        self,
        copies: Mapping[str, _Copies] | None = None,
        releases: Iterable[tuple[Event, Sequence[Block]]] = (),
        *,
        began: float = 0.0,
        used: object = None,
        finish: Callable[[Handle], None] | None = None,
    ) -> None:
        self._by_kind = dict(copies or {})
        self.n_bytes = sum(each.n_bytes for each in self._by_kind.values())
        """Bytes that are copied."""
        self.seconds = 0.0
        """From the call to its end, as the host saw it; 0 before :meth:`wait` returns."""
        self._releases = deque(releases)  # in order of the copies; released as these complete
        self._used = used  # what copies read and write besides, kept until they have completed
        self._began, self._finish = began, finish
        self._is_over, self._lock = not self._by_kind and not self._releases, threading.RLock()

    def is_done(self) -> bool:
        """Whether everything has arrived. Does not block; what has left so far is given up, to
        torch's allocator (:meth:`wait` gives it to the driver, for which CUDA waits for all work).
        """
        if not self._lock.acquire(blocking=False):
            return False  # another thread waits for it
        try:
            with held_back():
                while self._releases and self._releases[0][0].query():
                    self._release()
                return not self._releases and all(
                    each.last.query() for each in self._by_kind.values()
                )
        finally:
            self._lock.release()

    def wait(self) -> None:
        """Block until everything has arrived, and what left is the driver's again. Idempotent."""
        with self._lock, held_back():
            if self._is_over:
                return
            while self.release_next():
                pass
            for each in self._by_kind.values():
                each.last.synchronize()
            self._is_over, self._used = True, None
            self.seconds = time.perf_counter() - self._began
            if self._finish is not None:
                self._finish(self)
                self._finish = None

    def release_next(self) -> bool:
        """Wait for the next memory that leaves and give it up; False: none is left to leave."""
        with self._lock:
            if not self._releases:
                return False
            self._releases[0][0].synchronize()
            self._release()
            return True

    def _release(self) -> None:
        for block in self._releases[0][1]:
            block.release()
        self._releases.popleft()

    def arrival(self, *kinds: str) -> Event | None:
        """The end of the copies of ``kinds``, or of all; None: there are none."""
        found = [each.last for kind, each in self._by_kind.items() if not kinds or kind in kinds]
        return found[-1] if found else None  # one stream: the last is behind the others

    def figures(self) -> dict[str, Figures]:
        """By kind, of those that were copied; wait first."""
        return {
            kind: Figures(each.n_bytes, each.first.elapsed_time(each.last) / 1e3)
            for kind, each in self._by_kind.items()
        }


class Transfer:
    """Moves blocks of one device out and back. Calls come from one thread at a time.

    Args:
        backend: where streams and device memory come from.
        config: how to obtain host memory (``pin``, ``huge_pages``, ``numa``, ``host_budget``).
        locate: of a storage that is no block of its own: the key of the block in which it begins,
            or that of one before, and its first byte from there on; None where it is in none.
    """

    def __init__(
        self,
        backend: Backend,
        config: TransferConfig,
        locate: Callable[[torch.UntypedStorage], tuple[str, int] | None] | None = None,
    ) -> None:
        self.buffers = HostBuffers(backend, config)
        self.handle = Handle()
        """Of the last transfer."""
        self._backend, self._locate = backend, locate
        self._out, self._in = backend.stream("phase_out"), backend.stream("phase_in")
        self._away: dict[str, list[Block]] = {}  # by kind, in the order of the way back
        self._dropped: list[Block] = []
        self._blocks_away: dict[int, StorageBlock] = {}  # that are away, by the storage's identity
        self._kernels_are_loaded = False
        # Copies that the caller has not waited for still use staging and host buffers.
        weakref.finalize(self, _synchronize, (self._out, self._in), os.getpid()).atexit = False

    @property
    def is_away(self) -> bool:
        """From :meth:`out` to :meth:`back`."""
        return bool(self._away or self._dropped)

    @property
    def away_bytes(self) -> int:
        """What is in host memory only, or is under way there."""
        return sum(block.n_bytes for blocks in self._away.values() for block in blocks)

    def reserve(self, blocks: Sequence[Block], taken_bytes: int = 0) -> None:
        """Take host memory for blocks ahead; ``taken_bytes``: see :meth:`.HostBuffers.reserve`.

        Raises:
            HostMemoryError, PinningError: there is none; nothing was taken.
        """
        self.buffers.reserve(_in_order(blocks), taken_bytes)
        if not self._kernels_are_loaded and sum(map(_is_small, blocks)) > 1:
            self._load_kernels()

    def _load_kernels(self) -> None:
        """CUDA loads a kernel with its first launch, which then waits for all copies under way:
        40 ms of the first offload, measured on an H200."""
        try:
            memory = self._backend.allocate(6 * 8)
        except torch.OutOfMemoryError:
            return  # then nothing is packed either
        views = [memory[start : start + n] for n in (8, 7) for start in range(0, 6 * 8, 8)]
        for targets, sources in _by_width(views[::2], views[1::2]):
            self._backend.current_stream().launch(copy_all, targets, sources)
        self._kernels_are_loaded = True

    # ------------------------------------------------------------------ out

    def out(
        self,
        batches: Iterable[tuple[str, Sequence[Block]]],
        dropped: Sequence[Block] = (),
        finish: Callable[[Handle], None] | None = None,
    ) -> Handle:
        """Copy blocks to their host buffers and give up their device memory.

        Until :meth:`Handle.wait` the caller does not write to them, and before it has waited for
        work on them by streams other than its current one. If this raises, nothing was given up.

        Args:
            batches: kinds with their blocks; copies of one run while the next is looked up.
            dropped: given up without a copy, behind the caller's current stream.
            finish: called by :meth:`Handle.wait` when everything has left.

        Raises:
            HostMemoryError, PinningError: there is no host memory.
        """
        self.handle.wait()
        assert not self._away, list(self._away)
        assert not self._dropped
        began = time.perf_counter()
        copies: dict[str, _Copies] = {}
        releases: list[tuple[Event, Sequence[Block]]] = []
        used: list[Tensor | None] = []
        away: dict[str, list[Block]] = {}
        try:
            # Whatever memory is read, or taken for staging, below was last used before now.
            self._out.wait(self._backend.current_stream().record())
            for kind, blocks in batches:
                away[kind] = ordered = _in_order(blocks)
                if ordered:
                    copies[kind] = self._send(ordered, releases, used)
        except BaseException:
            self._out.synchronize()  # what the copies read, and write, may go from here on
            raise
        if dropped:
            releases.append((self._backend.current_stream().record(), dropped))
        self._away, self._dropped = away, list(dropped)
        every = (block for blocks in away.values() for block in blocks)
        self._blocks_away = {
            storages.identity(block.storage): block
            for block in every
            if isinstance(block, StorageBlock)
        }
        self.handle = Handle(copies, releases, began=began, used=used, finish=finish)
        return self.handle

    def _send(
        self,
        blocks: Sequence[Block],
        releases: list[tuple[Event, Sequence[Block]]],
        used: list[Tensor | None],
    ) -> _Copies:
        self.reserve(blocks)
        groups = list(self._groups(blocks))
        staging = self._staging(groups)
        used.append(staging)
        first = self._out.record_timed()
        for group in groups:
            views = [block.view() for block in group]
            if staging is None or len(group) == 1:
                self._out.launch(copy_all, [self.buffers.of(block) for block in group], views)
            else:
                whole, parts = _cut(staging, group)
                for targets, sources in _by_width(parts, views):
                    self._out.launch(copy_all, targets, sources)
                self._out.launch(copy_all, [self._joined(group)], [whole])
            releases.append((self._out.record(), group))
        return _Copies(sum(b.n_bytes for b in blocks), first, self._out.record_timed())

    # ------------------------------------------------------------------ back

    def back(
        self,
        free_more: Callable[[], bool] | None = None,
        finish: Callable[[Handle], None] | None = None,
    ) -> Handle:
        """Bring everything back. Host buffers stay reserved.

        The caller's current stream waits for nothing: see :meth:`Handle.arrival`. If this raises,
        everything is away as before.

        Args:
            free_more: called where device memory is short, until it returns False: whether it gave
                some back.
            finish: called by :meth:`Handle.wait` when everything has arrived.

        Raises:
            torch.OutOfMemoryError: there is no device memory.
        """
        self.handle.wait()
        began = time.perf_counter()
        copies: dict[str, _Copies] = {}
        used: list[Tensor | None] = []
        taken: list[Block] = []

        def restore(block: Block) -> None:
            while True:
                try:
                    block.restore()
                    break
                except torch.OutOfMemoryError:
                    if free_more is None or not free_more():
                        raise
            taken.append(block)

        try:
            # Memory that is taken below was freed before now, in order of the caller's stream.
            self._in.wait(self._backend.current_stream().record())
            for kind, blocks in self._away.items():
                if blocks:
                    copies[kind] = self._fetch(blocks, restore, used)
            for block in self._dropped:
                restore(block)
        except BaseException:
            self._in.synchronize()
            for block in taken:
                block.release()
            raise
        self._away, self._dropped, self._blocks_away = {}, [], {}
        self.handle = Handle(copies, began=began, used=used, finish=finish)
        return self.handle

    def _fetch(
        self,
        blocks: Sequence[Block],
        restore: Callable[[Block], None],
        used: list[Tensor | None],
    ) -> _Copies:
        groups = list(self._groups(blocks))
        staging = self._staging(groups)
        used.append(staging)
        first = self._in.record_timed()
        waiting: deque[list[Block]] = deque()
        ahead_bytes = 0
        for group in groups:
            for block in group:
                restore(block)
                ahead_bytes += block.n_bytes
            waiting.append(group)
            while ahead_bytes > AHEAD_BYTES:
                ahead_bytes -= sum(block.n_bytes for block in waiting[0])
                self._fill(waiting.popleft(), staging)
        for group in waiting:
            self._fill(group, staging)
        return _Copies(sum(b.n_bytes for b in blocks), first, self._in.record_timed())

    def _fill(self, group: Sequence[Block], staging: Tensor | None) -> None:
        views = [block.view() for block in group]
        if staging is None or len(group) == 1:
            self._in.launch(copy_all, views, [self.buffers.of(block) for block in group])
            return
        whole, parts = _cut(staging, group)
        self._in.launch(copy_all, [whole], [self._joined(group)])
        for targets, sources in _by_width(views, parts):
            self._in.launch(copy_all, targets, sources)

    # ------------------------------------------------------------------ while it is away

    def of(self, tensor: Tensor) -> Tensor | None:
        """See :class:`.HostCopies`."""
        replaced = False

        def host(part: Tensor) -> Tensor:
            nonlocal replaced
            memory = self._copy_of(part.untyped_storage())
            if memory is None:
                return part
            replaced = True
            return storages.view_over(memory, part)

        if tensor.layout is not torch.strided:
            return None
        shard = dtensor.local(tensor)
        found = dtensor.rebuilt(shard, host)
        return dtensor.like(tensor, found) if replaced else None

    def _copy_of(self, storage: torch.UntypedStorage) -> Tensor | None:
        block = self._blocks_away.get(storages.identity(storage))
        if block is not None:
            return self.buffers.of(block)
        place = None if self._locate is None or not self._away else self._locate(storage)
        return None if place is None else self.buffers.span(*place, storage.nbytes())

    def wait(self) -> None:
        """See :class:`.HostCopies`."""
        self.handle.wait()

    def close(self) -> None:
        """Give host memory back; what is away is lost. Idempotent."""
        self.handle.wait()
        self._away, self._dropped, self._blocks_away = {}, [], {}
        self.buffers.close()

    # ------------------------------------------------------------------ packing

    def _groups(self, blocks: Sequence[Block]) -> Iterator[list[Block]]:
        """Blocks that travel together: small ones whose buffers lie side by side."""
        group: list[Block] = []
        group_bytes = 0
        for block in blocks:
            fits = bool(group) and _is_small(block) and _is_small(group[-1])
            fits = fits and group_bytes + aligned(block.n_bytes) <= PACK_BYTES
            if group and not (fits and self.buffers.are_side_by_side(group[-1], block)):
                yield group
                group, group_bytes = [], 0
            group.append(block)
            group_bytes += aligned(block.n_bytes)
        if group:
            yield group

    def _staging(self, groups: Sequence[Sequence[Block]]) -> Tensor | None:
        """Device memory for the largest group that travels as one, if there is any."""
        sizes = [sum(aligned(b.n_bytes) for b in group) for group in groups if len(group) > 1]
        if not sizes:
            return None
        try:
            return self._backend.allocate(max(sizes))
        except torch.OutOfMemoryError:
            return None

    def _joined(self, group: Sequence[Block]) -> Tensor:
        return self.buffers.span(group[0].key, 0, sum(aligned(b.n_bytes) for b in group))


def _synchronize(streams: Iterable[Stream], pid: int) -> None:
    """Never raises: it runs when a :class:`Transfer` is collected, in a forked process too."""
    with contextlib.suppress(Exception):
        for stream in streams if pid == os.getpid() else ():
            stream.synchronize()


def _cut(staging: Tensor, group: Sequence[Block]) -> tuple[Tensor, list[Tensor]]:
    """The part of ``staging`` that a group needs, and each block's part of that."""
    starts = [0, *itertools.accumulate(aligned(block.n_bytes) for block in group)]
    whole = staging[: starts.pop()]
    return whole, [whole[s : s + b.n_bytes] for s, b in zip(starts, group, strict=True)]


def _by_width(
    targets: Sequence[Tensor], sources: Sequence[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Pairs as 8-byte words where they have whole ones: a kernel moves elements, not bytes."""
    pairs = list(zip(targets, sources, strict=True))
    words = [pair for pair in pairs if pair[0].numel() % 8 == 0]
    others = [pair for pair in pairs if pair[0].numel() % 8]
    if words:
        yield [t.view(torch.int64) for t, _ in words], [s.view(torch.int64) for _, s in words]
    if others:
        yield [t for t, _ in others], [s for _, s in others]


def _is_small(block: Block) -> bool:
    # A chunk stays where its neighbours are: a tensor may reach over several.
    return isinstance(block, StorageBlock) and block.n_bytes < PACK_BELOW_BYTES


def _in_order(blocks: Iterable[Block]) -> list[Block]:
    """Blocks of some size as they travel: the small ones last, else in the order given."""
    return sorted((block for block in blocks if block.n_bytes), key=_is_small)
