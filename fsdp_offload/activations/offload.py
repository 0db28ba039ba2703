"""``ActivationOffload``: move what autograd saves to host memory until its backward."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Final, NoReturn

import torch
from torch import Tensor

from ..core import storage as storages
from ..core.config import MIB, TransferConfig, brief, parse_bytes
from ..core.devices import backend_for, default_device
from ..core.errors import ActivationError, ConfigError, DeviceError, check_open, copy_error
from ..link import HostPool, held_bytes
from .batches import BatchCopies, SavedRange
from .saved import ByteRange, SavedTensor, View, note_inactive, span_or_reason, unpack

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
    kept_bytes: dict[str, int]  # of saved tensors that stayed on the device, by reason
    full_batches: int  # batches that stayed on the device, because host memory was full
    live_batches: int  # batches before their backward
    sent_bytes: int  # to host memory
    returned_bytes: int
    waits_for_room: int  # times the device waited, because copies held too much memory
    host_bytes: int  # page-locked memory taken
    used_host_bytes: int  # now
    most_host_bytes: int
    host_bytes_by_holder: dict[str, int]  # of this whole process; host_memory= bounds the sum


class ActivationOffload:
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
        self._backend = backend_for(default_device() if device is None else torch.device(device))
        pool = HostPool("ActivationOffload", self._backend, transfer)
        self._copies = BatchCopies(self._backend, pool, n_bytes, inflight, share)
        self._hooks: list[torch.autograd.graph.saved_tensors_hooks | None] = []
        self._known: dict[int, list[weakref.ref[SavedRange]]] = {}  # this iteration's, by storage
        self._counts = self._copies.counts
        self._kept_bytes: Counter[str] = Counter()
        self._ranges_before = 0  # this iteration
        self._pid, self._thread, self._is_closed = os.getpid(), 0, False

    def __reduce__(self) -> NoReturn:
        raise copy_error(self, "make another one, and keep it outside of modules that are copied")

    def __repr__(self) -> str:
        device, copies = self._backend.device, self._copies
        if self._is_closed:
            return f"ActivationOffload({device}, closed)"
        used, most = copies.intervals.used_bytes, copies.intervals.n_bytes
        return (
            f"ActivationOffload({device}, {brief(used)} of {brief(most)} of host memory in use, "
            f"{brief(copies.sending_bytes)} of device memory held by copies; "
            f"{brief(copies.link.stored_bytes)} moved so far)"
        )

    # ------------------------------------------------------------------ forward

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __enter__(self) -> ActivationOffload:
        self._check_usable()
        if storages.saved_tensor_hook() is not None:
            self._hooks.append(None)
            note_inactive(self._counts, "inactive", "an ActivationOffload")
            return self
        if not self._copies.live():
            self._begin_iteration()  # or continue one that has saved nothing
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)
        hooks.__enter__()
        self._hooks.append(hooks)
        return self

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __exit__(self, *error: object) -> None:
        hooks = self._hooks.pop()
        if hooks is not None:
            hooks.__exit__(*error)
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
        counts = self._counts
        if counts["iterations"] and counts["ranges"] == self._ranges_before:
            return  # nothing was saved, as in an evaluation
        counts["iterations"] += 1
        self._copies.first_index, self._ranges_before = counts["batches"], counts["ranges"]
        self._known.clear()

    def _pack(self, tensor: Tensor) -> SavedTensor:
        handle = SavedTensor(tensor)
        self.save(handle)
        return handle

    def save(self, handle: SavedTensor) -> None:
        """Take the handle's tensor, or let the handle keep it."""
        tensor = handle.tensor
        assert tensor is not None
        span = span_or_reason(tensor, self._backend.device, LEAST_BYTES)
        if isinstance(span, ByteRange) and self._backend.is_capturing():
            span = "a CUDA graph capture"
        if isinstance(span, str):
            self._kept_bytes[span] += tensor.numel() * tensor.itemsize
            handle.keep()
            return
        self._counts["taken"] += 1
        memory = self._range_of(tensor, span)
        handle.take(memory, View.of(tensor, memory.span))
        if self._copies.open.n_bytes >= BATCH_BYTES:
            self._copies.send()

    def _range_of(self, tensor: Tensor, span: ByteRange) -> SavedRange:
        """Return the range that contains a span, a new one or a known one."""
        storage = tensor.untyped_storage()
        entries = self._known.setdefault(storages.identity(storage), [])
        # A new storage may have the identity of a dead one.
        known = [each for find in entries if (each := find()) and each.storage() is storage]
        for each in known:
            is_inside = each.span[0] <= span[0] and span[1] <= each.span[1]
            if is_inside and each.version == tensor._version:
                return each
        self._counts["ranges"] += 1
        found = self._copies.open.add(tensor, span)
        entries[:] = [weakref.ref(each) for each in (*known, found)]
        return found

    # ------------------------------------------------------------------ the rest

    def statistics(self) -> OffloadStatistics:
        """Return counters and memory. Also releases device memory whose copies have ended."""
        copies, counts = self._copies, self._counts
        live = len(copies.live())
        return OffloadStatistics(
            iterations=counts["iterations"],
            inactive=counts["inactive"],
            taken=counts["taken"],
            ranges=counts["ranges"],
            full_batches=counts["full_batches"],
            waits_for_room=counts["waits_for_room"],
            sent_bytes=copies.link.stored_bytes,
            returned_bytes=copies.link.fetched_bytes,
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
