"""The optimizer's own device memory, away and back.

[Note: saved and dropped]
*Saved*, copied to places in host memory: state that lives on the device, which is that of the
resident lane, what native parameters' classes made, and step counts that a kernel wants there.
*Dropped*, given up and taken again without a copy, because nothing in it but copies outlives a
step: slots, scratch, the host lane's staging buffers. What stays: a checksum and a flag per host
bucket.

[Note: away, state is host memory]
Whoever holds a saved tensor (a record, a piece, the class's state dict) holds its *twin* over the
place instead while it is away. So whatever reads or writes state (``state``, state dicts, loads,
checkpoints) goes to host memory without knowing, and what was written there comes back with the
reload. Views that the lanes cut at construction stay: the storage object is the same, and nobody
looks at them between steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from . import shards
from .config import TransferConfig
from .device import Gateway
from .errors import AwayError, DeviceMemoryError
from .moving import (
    Block,
    Mover,
    Places,
    StorageBlock,
    Trip,
    collect,
    give_up,
    is_whole,
    join,
    missing_parts,
)
from .moving.whereabouts import twin, twin_at
from .pipeline.engine import Segment
from .pipeline.records import Record

Shown = Mapping[Tensor, dict[str, Any]]


class StateRegion(Protocol):
    """Device memory at addresses that stay, for state of the resident lane."""

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Uninitialised, contiguous device memory."""
        ...

    def blocks(self) -> Sequence[Block]:
        """All of the region's memory."""
        ...


@dataclass(frozen=True)
class Held:
    """A tensor that may have to leave, as ``holder[name]``."""

    key: str  # the same at each departure
    holder: dict[str, Any]
    name: str


@dataclass(frozen=True)
class _Swapped:
    """What a holder had, and what it has while that is away."""

    held: Held
    original: Tensor
    twin: Tensor

    @property
    def is_untouched(self) -> bool:
        """Whether nobody has put another object there."""
        return self.held.holder.get(self.held.name) is self.twin


def held_of(record: Record) -> Iterator[Held]:
    """State of one record that may lie on the device."""
    key = f"{record.index}"
    if record.lane == "resident":
        for name in record.tensors:
            yield Held(f"{key}.{name}", record.tensors, name)
    if record.lane != "host":
        for kind in record.schema.role("scalar"):
            for index, piece in enumerate(record.pieces):
                yield Held(f"{key}.{kind.name}.{index}", piece.state, kind.name)


def unrecorded(records: Sequence[Record], shown: Shown) -> list[tuple[Tensor, dict[str, Any]]]:
    """State without a record: of native parameters, and of frozen ones."""
    recorded = {record.parameter for record in records}
    return [(p, state) for p, state in shown.items() if p not in recorded]


@dataclass(frozen=True)
class _Departure:
    """What leaves: blocks, and where the storages of held tensors lie in them."""

    blocks: list[Block]
    origins: dict[int, tuple[Block, int]]  # by the storage's identity: block, first byte in it

    def has(self, part: Tensor) -> bool:
        """Whether a plain tensor's memory is in one of the blocks."""
        return part.untyped_storage()._cdata in self.origins

    def gone(self) -> _Departure:
        """What lies in blocks without memory."""
        origins = {k: v for k, v in self.origins.items() if not is_whole(v[0])}
        return _Departure(self.blocks, origins)

    @property
    def n_bytes(self) -> int:
        """Of all blocks."""
        return sum(block.n_bytes for block in self.blocks)


def _departure(
    held: Sequence[Held],
    parameters: Iterable[Tensor],
    device: torch.device,
    region: StateRegion | None,
) -> _Departure:
    """Blocks of what is held and lies on the device.

    Weights and gradients, which a class may keep in its state, are not the optimizer's to move.
    """
    parts = [
        (f"{each.key}{below}", part)
        for each in held
        for below, part in shards.plain_parts(each.holder[each.name])
    ]
    origins: dict[int, tuple[Block, int]] = {}
    blocks: list[Block] = [] if region is None else list(region.blocks())
    ranges = [(block.view(0).data_ptr(), block) for block in blocks if block.is_present(0)]
    for storage in (part.untyped_storage() for _, part in parts if ranges):
        for start, block in ranges:
            if start <= storage.data_ptr() < start + block.n_bytes:
                origins[storage._cdata] = (block, storage.data_ptr() - start)
    known = set(origins)
    for parameter in parameters:
        for tensor in (parameter, parameter.grad):
            if tensor is not None:
                known |= {p.untyped_storage()._cdata for _, p in shards.plain_parts(tensor)}
    movable = [(key, part) for key, part in parts if part.untyped_storage().resizable()]
    for found in collect(movable, device, known=known):
        origins[found.storage._cdata] = (found, 0)
        blocks.append(found)
    return _Departure(blocks, origins)


class OptimizerAbsence:
    """Where the device memory of an optimizer is.

    Args:
        gateway: of its device.
        transfer: how to obtain host memory.
        region: which holds the resident lane's state; all of its memory leaves.
    """

    def __init__(
        self, gateway: Gateway, transfer: TransferConfig, region: StateRegion | None = None
    ) -> None:
        self._gateway, self._transfer, self._region = gateway, transfer, region
        self._mover: Mover | None = None  # until it is needed: it has streams
        self._trip = Trip(0)
        self._swapped: list[_Swapped] = []
        self._blocks: list[Block] = []  # that are away
        self._dropped: list[StorageBlock] = []
        self.is_away = False

    def check(self, what: str) -> None:
        """Refuse ``what`` while the state is away.

        Raises:
            AwayError: it is.
        """
        if self.is_away:
            raise AwayError(
                f"{what} of an optimizer that is offloaded",
                reason="its device memory was given up; nothing was touched",
                remedy="call reload() first",
            )

    def arrive(self) -> None:
        """Block until what is under way has arrived."""
        self._trip.wait()

    def holds(self, holder: dict[str, Any], name: str) -> bool:
        """Whether ``holder[name]`` stands for a tensor that is away."""
        return any(s.held.holder is holder and s.held.name == name for s in self._swapped)

    def trip(self, *, wait: bool) -> Trip:
        """The last one, out or back."""
        if wait:
            self._trip.wait()
        return self._trip

    def tidy(self) -> None:
        """Give up what copies that have ended needed. Does not block."""
        self._trip.advance()

    @property
    def reserved_bytes(self) -> int:
        """Host memory kept for what leaves."""
        return 0 if self._mover is None else self._mover.places.n_bytes

    @property
    def away_bytes(self) -> int:
        """State that is in host memory only because it is away."""
        return sum(block.n_bytes for block in self._blocks)

    # ------------------------------------------------------------------ out

    def is_reserved(self, records: Sequence[Record], shown: Shown) -> bool:
        """Whether all state has host memory to leave to, or is there."""
        if self.is_away:
            return True
        blocks = self._departure(_all_held(records, shown), records, shown).blocks
        return not blocks or (self._mover is not None and all(map(self._mover.places.has, blocks)))

    def reserve(self, records: Sequence[Record], shown: Shown, segments: Sequence[Segment]) -> None:
        """Take host memory for all state that is on the device now, and let it lie together there,
        so that the first departure gives as much memory up as later ones. No work is under way.

        Raises:
            HostMemoryError, PinningError: see :class:`.moving.Places`; nothing was taken.
            DeviceMemoryError: somebody else took device memory in the middle: all is away.
        """
        mover, held = self._mover_of(segments), _all_held(records, shown)
        departure = self._departure(held, records, shown)
        mover.reserve(departure.blocks)
        try:
            join([b for b in departure.blocks if isinstance(b, StorageBlock)], mover, self._gateway)
        except BaseException as error:
            self._blocks, self.is_away = departure.blocks, True
            self._undo(mover, held, departure)
            if self.is_away and _is_oom(error):
                raise _out_of_memory(departure.n_bytes, error) from error
            if not _is_oom(error):
                raise

    def leave(self, records: Sequence[Record], shown: Shown, segments: Sequence[Segment]) -> Trip:
        """Copy state out and give up its memory; all work on it has been waited for.

        If this raises, everything is on the device as before; or, if there is no room for that
        any more, it is away and whole.

        Raises:
            HostMemoryError, PinningError: there is no room for it; nothing was touched.
            DeviceMemoryError: no room on the device to pack small tensors in.
        """
        mover, held = self._mover_of(segments), _all_held(records, shown)
        departure = self._departure(held, records, shown)
        mover.reserve(departure.blocks)
        staging = [t.untyped_storage() for segment in segments for t in segment.staging()]
        self._dropped = [StorageBlock("", storage) for storage in staging if storage.nbytes()]
        try:
            self._blocks, self.is_away = departure.blocks, True  # before the first byte is given up
            give_up((block, 0) for block in self._dropped)
            self._trip = mover.out(departure.blocks)
            self._swap_out(held, departure)
        except BaseException as error:
            self._undo(mover, held, departure)
            if not _is_oom(error):
                raise
            raise _out_of_memory(departure.n_bytes, error) from error
        return self._trip

    def _undo(self, mover: Mover, held: Sequence[Held], departure: _Departure) -> None:
        """Some blocks have left: bring them back, or, without room for that, be away with them."""
        try:
            self._bring_back(departure.blocks).wait()
        except DeviceMemoryError:
            mover.out([block for block in departure.blocks if not is_whole(block)]).wait()
            self._swap_out(held, departure.gone())
        else:
            self._gateway.current_stream().synchronize()  # the memory may have been in use
            self._swap_in()
            self._forget()

    def _departure(
        self, held: Sequence[Held], records: Sequence[Record], shown: Shown
    ) -> _Departure:
        parameters = {*shown, *(record.parameter for record in records)}
        return _departure(held, parameters, self._gateway.device, self._region)

    def _mover_of(self, segments: Sequence[Segment]) -> Mover:
        if self._mover is None:
            self._mover = Mover(self._gateway, Places(self._gateway, self._transfer))
        arenas = [a for segment in segments for a in segment.arena_statistics()]
        self._mover.places.taken_bytes = sum(arena.n_bytes for arena in arenas)
        return self._mover

    def _swap_out(self, held: Sequence[Held], departure: _Departure) -> None:
        """Let holders have the places of what is gone."""
        assert self._mover is not None
        places = self._mover.places

        def twin_of(part: Tensor) -> Tensor:
            origin = departure.origins.get(part.untyped_storage()._cdata)
            if origin is None:
                return part
            block, start = origin
            if isinstance(block, StorageBlock):
                return twin(part, places.of(block))
            first = start + int(part.storage_offset()) * part.itemsize
            return twin_at(part, places.of(block), first)

        for each in held:
            value = each.holder[each.name]
            if any(departure.has(part) for _, part in shards.plain_parts(value)):
                replaced = shards.rebuilt(value, twin_of)
                self._swapped.append(_Swapped(each, value, replaced))
                each.holder[each.name] = replaced

    # ------------------------------------------------------------------ back

    def come_back(
        self, records: Sequence[Record], shown: Shown, segments: Sequence[Segment]
    ) -> Trip:
        """Take device memory again and copy state back; streams of the segments follow.

        Raises:
            DeviceMemoryError: there is not enough; all is away as before.
        """
        self.arrive()
        loaded = [state for _, state in unrecorded(records, shown)]
        try:
            fresh = self._on_device(loaded)
            trip = self._bring_back(self._still_wanted())
        except torch.OutOfMemoryError as error:
            raise _out_of_memory(self.away_bytes, error) from error
        self._trip = trip
        self._swap_in()
        for state, name, value in fresh:
            state[name] = value
        ready = self._gateway.current_stream().record()
        for segment in segments:
            segment.follow(ready, trip)
        self._forget()
        return trip

    def _swap_in(self) -> None:
        """Let holders have their own again, but for what somebody has replaced."""
        for each in self._swapped:
            if each.is_untouched:
                each.held.holder[each.held.name] = each.original

    def _bring_back(self, blocks: Sequence[Block]) -> Trip:
        """All of it, or nothing.

        Raises:
            DeviceMemoryError: there is not enough memory.
        """
        assert self._mover is not None
        try:
            for block, index in missing_parts(self._dropped):
                block.restore(index)
            return self._mover.back(blocks)
        except BaseException as error:
            give_up((block, 0) for block in self._dropped)
            if _is_oom(error):
                raise _out_of_memory(self.away_bytes, error) from error
            raise

    def _still_wanted(self) -> list[Block]:
        """Blocks without those whose tensors were all replaced while they were away."""
        kept: set[int] = set()
        replaced: set[int] = set()
        for each in self._swapped:
            found = {p.untyped_storage()._cdata for _, p in shards.plain_parts(each.original)}
            (kept if each.is_untouched else replaced).update(found)
        gone = replaced - kept
        return [
            block
            for block in self._blocks
            if not (isinstance(block, StorageBlock) and block.storage._cdata in gone)
        ]

    def _on_device(
        self, states: Sequence[dict[str, Any]]
    ) -> list[tuple[dict[str, Any], str, Tensor]]:
        """What was put into the state of native parameters while they were away, on the device.

        Step counts are where they were: classes keep them on the host if they like.
        """
        device = self._gateway.device
        twins = {id(each.twin) for each in self._swapped}
        was_here = {(id(each.held.holder), each.held.name) for each in self._swapped}
        return [
            (state, name, shards.rebuilt(value, lambda part: part.to(device)))
            for state in states
            for name, value in state.items()
            if isinstance(value, Tensor)
            and id(value) not in twins
            and (name != "step" or (id(state), name) in was_here)
        ]

    def _forget(self) -> None:
        self._swapped, self._blocks, self._dropped, self.is_away = [], [], [], False

    def close(self) -> None:
        """Give host memory back; what is away is lost. Idempotent."""
        with contextlib.suppress(Exception):  # in a forked child, or at exit
            self.arrive()
        self._forget()
        if self._mover is not None:
            self._mover.places.close()
            self._mover = None


def _all_held(records: Sequence[Record], shown: Shown) -> list[Held]:
    """All state tensors, wherever they are."""
    found = [held for record in records for held in held_of(record)]
    for index, (_, state) in enumerate(unrecorded(records, shown)):
        tensors = (name for name, value in state.items() if isinstance(value, Tensor))
        found += [Held(f"native.{index}.{name}", state, name) for name in tensors]
    return found


def _is_oom(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError)


def _out_of_memory(n_bytes: int, error: BaseException) -> DeviceMemoryError:
    return DeviceMemoryError(
        f"optimizer state of {n_bytes} bytes",
        reason=f"the device has no room for it ({error}); nothing of it is lost",
        remedy="free device memory, then call again",
    )
