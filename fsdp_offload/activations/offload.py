"""``ActivationOffload``: move what autograd saves to host memory until its backward."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import Counter
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..core import storage as storages
from ..core.config import MIB, TransferConfig, parse_bytes
from ..core.devices import backend_for
from ..core.errors import ActivationError, ConfigError, DeviceError, check_open, copy_error
from ..link import HostPool, held_bytes
from .batches import BatchCopies, SavedRange
from .handles import SavedTensor, Saver, unpack
from .selection import ByteRange, View, span_or_reason

_log = logging.getLogger("fsdp_offload")

BATCH_BYTES: Final = 64 * MIB
"""Least bytes that are copied together: a link needs 4 MiB to be fast."""
LEAST_BYTES: Final = MIB // 4
"""Least bytes of a memory range: a smaller one takes longer to enqueue than to copy."""


@dataclass(frozen=True)
class OffloadStatistics:
    """Counters and memory of an :class:`ActivationOffload`."""

    iterations: int  # entered while nothing was offloaded
    inactive: int  # entered inside activation checkpointing or other hooks: no effect
    taken: int  # saved tensors that went into batches
    ranges: int  # memory ranges of these tensors
    kept: dict[str, int]  # saved tensors that stayed on the device, by reason
    kept_bytes: dict[str, int]
    full_batches: int  # batches that stayed on the device, because host memory was full
    live_batches: int  # batches before their backward
    sent_bytes: int  # to host memory
    returned_bytes: int
    waits_for_room: int  # times the device waited, because copies held too much memory
    host_bytes: int  # page-locked memory taken
    used_host_bytes: int  # now
    most_host_bytes: int
    host_bytes_by_holder: dict[str, int]  # of this whole process; host_memory= bounds the sum


class _Known(NamedTuple):
    """A span seen in this iteration."""

    storage: weakref.ref[torch.UntypedStorage]
    span: ByteRange
    version: int
    found: weakref.ref[SavedRange]


class ActivationOffload(Saver):
    """Moves what autograd saves to host memory during the forward, and back during the backward.

    Example::

        offload = ActivationOffload(host_memory="48GiB")
        for batch in data:
            with offload:
                loss = model(batch)
            loss.backward()

    Args:
        host_memory: page-locked memory of this rank, allocated at once. Tensors that do not fit
            stay on the device.
        share: share of batches to move, from 0 to 1; 0.5 moves every second one.
        device: the model's device; ``None``: the current one.
        inflight_bytes: device memory that running copies may hold. Beyond that, the device waits
            for the oldest.
        transfer: how to allocate host memory.

    Raises:
        ConfigError: an argument is wrong.
        DeviceError: torch cannot use the device here.
        HostMemoryError, PinningError: not enough host memory; nothing was taken.
    """

    def __init__(
        self,
        host_memory: int | str,
        share: float = 1.0,
        *,
        device: torch.device | str | None = None,
        inflight_bytes: int | str = "512MiB",
        transfer: TransferConfig | None = None,
    ) -> None:
        n_bytes = parse_bytes(host_memory, "host_memory")
        inflight = parse_bytes(inflight_bytes, "inflight_bytes")
        _check(host_memory, n_bytes, share)
        found = torch.accelerator.current_accelerator() if device is None else device
        self._backend = backend_for(torch.device(found or "cpu"))
        pool = HostPool("ActivationOffload", self._backend, transfer or TransferConfig())
        is_moved = partial(_is_moved, share)
        self._copies = BatchCopies(self._backend, pool, n_bytes, inflight, is_moved)
        self._hooks: list[torch.autograd.graph.saved_tensors_hooks | None] = []
        self._known: dict[int, list[_Known]] = {}  # by storage
        self._counts: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()
        self._kept_bytes: Counter[str] = Counter()
        self._ranges_before = 0  # this iteration
        self._pid, self._thread, self._is_closed = os.getpid(), 0, False

    def __reduce__(self) -> NoReturn:
        raise copy_error(self, "make another one, and keep it outside of modules that are copied")

    # ------------------------------------------------------------------ forward

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __enter__(self) -> ActivationOffload:
        self._check_usable()
        if storages.saved_tensor_hook() is not None:
            self._hooks.append(None)
            self._counts["inactive"] += 1
            if self._counts["inactive"] == 1:
                _log.info(
                    "ActivationOffload: does nothing inside activation checkpointing or "
                    "other hooks for saved tensors"
                )
            return self
        if not self._copies.live():
            self._begin_iteration()  # or continue one that has saved nothing
        hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, unpack)
        hooks.__enter__()
        self._hooks.append(hooks)
        return self

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        hooks = self._hooks.pop()
        if hooks is not None:
            hooks.__exit__(kind, error, traceback)
            self._copies.end_forward()

    def _check_usable(self) -> None:
        check_open("an ActivationOffload", self._pid, is_closed=self._is_closed)
        self._thread = self._thread or threading.get_ident()
        if self._thread != threading.get_ident():
            raise ActivationError(
                "an ActivationOffload used in a second thread",
                reason="batches follow the order of one stream",
                remedy="use one ActivationOffload per thread",
            )
        if self._backend.is_capturing():
            raise DeviceError(
                "an ActivationOffload inside a CUDA graph capture",
                reason="the host decides in each iteration where batches go",
                remedy="capture without it; a PagedStash can be captured",
            )

    def _begin_iteration(self) -> None:
        copies, counts = self._copies, self._counts
        if counts["iterations"] and counts["ranges"] == self._ranges_before:
            return  # nothing was saved, as in an evaluation
        counts["iterations"] += 1
        copies.first_index, self._ranges_before = copies.counts["batches"], counts["ranges"]
        self._known.clear()

    def save(self, handle: SavedTensor) -> None:
        """As of :class:`.Saver`."""
        tensor = handle.tensor
        assert tensor is not None
        span = span_or_reason(tensor, self._backend.device, LEAST_BYTES)
        if isinstance(span, ByteRange) and self._backend.is_capturing():
            span = "a CUDA graph capture"
        if isinstance(span, str):
            self._kept[span] += 1
            self._kept_bytes[span] += tensor.numel() * tensor.itemsize
            handle.keep()
            return
        self._counts["taken"] += 1
        memory, span = self._range_of(tensor, span)
        handle.take(memory, View.of(tensor, span))
        if self._copies.open.n_bytes >= BATCH_BYTES:
            self._copies.send()

    def _range_of(self, tensor: Tensor, span: ByteRange) -> tuple[SavedRange, ByteRange]:
        """Return the range that contains a span, a new one or a known one."""
        storage = tensor.untyped_storage()
        entries = self._known.setdefault(storages.identity(storage), [])
        if entries and entries[0].storage() is not storage:
            entries.clear()  # entries of a dead storage
        for known in entries:
            is_inside = known.span[0] <= span[0] and span[1] <= known.span[1]
            if is_inside and known.version == tensor._version:
                if (memory := known.found()) is not None:
                    return memory, known.span
        self._counts["ranges"] += 1
        found = self._copies.open.add(tensor, span)
        entries.append(_Known(weakref.ref(storage), span, tensor._version, weakref.ref(found)))
        return found, span

    # ------------------------------------------------------------------ the rest

    def statistics(self) -> OffloadStatistics:
        """Return counters and memory. Also releases device memory whose copies have ended."""
        copies, own = self._copies, ("iterations", "inactive", "taken", "ranges")
        live = len(copies.live())
        others = ("full_batches", "waits_for_room")
        return OffloadStatistics(
            **{name: self._counts[name] for name in own},
            **{name: copies.counts[name] for name in others},
            sent_bytes=copies.link.stored_bytes,
            returned_bytes=copies.link.fetched_bytes,
            kept=dict(self._kept),
            kept_bytes=dict(self._kept_bytes),
            live_batches=live,
            host_bytes=copies.intervals.n_bytes,
            used_host_bytes=copies.intervals.used_bytes,
            most_host_bytes=copies.intervals.most_used_bytes,
            host_bytes_by_holder=held_bytes(),
        )

    def close(self) -> None:
        """Free the host memory. Idempotent. A backward that needs it raises."""
        if not self._is_closed:
            self._is_closed = True
            self._copies.close()


def _is_moved(share: float, number: int) -> bool:
    # Moved batches are spread over the forward. If the first ones moved, they would queue up on the
    # link, and all be needed at the end of the backward.
    return int((number + 1) * share) > int(number * share)


def _check(host_memory: object, n_bytes: int, share: object) -> None:
    if not n_bytes:
        raise ConfigError(
            f"host_memory={host_memory!r}",
            reason="nothing can move without host memory",
            remedy='give a size such as "48GiB", or use no ActivationOffload',
        )
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError(
            f"share={share!r}",
            reason="it must be a number from 0 to 1",
            remedy="use 1.0 to move everything",
        )
