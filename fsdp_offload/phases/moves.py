"""All that moves, of all kinds: out together, and back together or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from ..device import Gateway, free_bytes, release_cached
from ..errors import DeviceMemoryError
from ..memory.budget import size_text
from ..moving import (
    SPARE_BYTES,
    Block,
    Mover,
    StorageBlock,
    Trip,
    give_up,
    is_whole,
    join,
    missing_parts,
)
from .absences import Absences
from .contents import Contents
from .optimizers import OptimizerState, is_out_of_memory


class Return(NamedTuple):
    """What is on its way back."""

    trips: dict[str, Trip]
    """By kind."""

    away: Sequence[tuple[Block, int]]
    """What was away before: blocks and their pieces."""


class Departure(NamedTuple):
    """What is on its way out."""

    parameters: Mapping[str, Tensor]
    """All of the model, by name."""

    trips: Mapping[str, Trip]
    """By kind."""


class Moves:
    """Departures and returns of ``contents``. Readers know at any time what is away.

    Args:
        contents: what moves.
        optimizer: whose state moves, perhaps by itself.
        absences: of all of it.
        mover: of the blocks.
        gateway: of their device.
    """

    def __init__(
        self,
        contents: Contents,
        optimizer: OptimizerState,
        absences: Absences,
        mover: Mover,
        gateway: Gateway,
    ) -> None:
        self._contents, self._optimizer = contents, optimizer
        self._absences, self._mover, self._gateway = absences, mover, gateway
        self._begun: Return | None = None

    def reserve(self) -> None:
        """Host memory for what has none yet, in one piece."""
        blocks = self._contents.blocks
        self._mover.reserve([block for found in blocks.values() for block in found])
        self._optimizer.reserve()

    def find_places(self) -> None:
        """Make the views of host memory that readers are given, which the first departure would do
        before its first copy."""
        for holder, storages in self._contents.held():
            for each in storages:
                holder.place(each)

    def join(self) -> BaseException | None:
        """Let storages lie together, so that the first departure is like later ones, and give back
        what they lay in, which that would have to do: 47 ms for 12 GiB on an H200.

        Returns:
            What has kept some of it from coming back; then :meth:`back` tries again.
        """
        kinds = [self._contents.blocks[kind] for kind in ("params", "state")]  # as they come back
        own = [[block for block in found if isinstance(block, StorageBlock)] for found in kinds]
        self._optimizer.synchronize()
        try:
            for blocks in own:
                join(blocks, self._mover, self._gateway)
        except BaseException as error:
            self._mover.wait()
            if not all(is_whole(block) for blocks in own for block in blocks):
                self.tell()
                return error
            if not isinstance(error, torch.OutOfMemoryError):
                raise
        release_cached(self._gateway.device)
        return None

    # ------------------------------------------------------------------ out

    def out(
        self, prepare: Callable[[], None], beside: Callable[[], Collection[int]] | None = None
    ) -> Departure:
        """All leaves. If this raises, some may have: see :meth:`turn_back`.

        Args:
            prepare: called before most of it is looked up, when the first copies are under way.
            beside: called before that, if there are such copies; gives storages, by identity, that
                come and do not leave.
        """
        self._contents.forget()
        gone = self._contents.take_ahead()
        self._absences.enter(self._contents.held())
        ahead = self._mover.out(self._contents.blocks["state"])
        others = beside() if beside is not None and ahead.n_bytes else ()
        prepare()
        parameters = self._contents.parameters()
        self._contents.check_gradients(parameters)
        self._contents.collect(parameters, gone, others)
        self.reserve()  # whoever reads weights from here on looks into host memory
        self._absences.enter(self._contents.held())
        blocks, trips = self._contents.blocks, {}
        # The optimizer first: it may have updates of parameters under way.
        trips["state"] = self._optimizer.offload(self._mover, blocks["state"])
        trips["state"].include(ahead)
        trips["grads"] = self._mover.out(blocks["grads"])
        trips["params"] = self._mover.out(blocks["params"])
        return Departure(parameters, trips)

    def turn_back(self) -> None:
        """:meth:`out` has failed half-way: bring back what had left, and wait for it."""
        self._mover.wait()
        for trip in self.back(None).values():
            trip.wait()

    def stay_away(self) -> None:
        """:meth:`turn_back` has failed, too: what can leave after all does."""
        blocks = self._contents.blocks
        with contextlib.suppress(Exception):
            self._optimizer.offload(self._mover, blocks["state"]).wait()
            self._mover.out([*blocks["grads"], *blocks["params"]]).wait()
        self.tell()

    def tell(self) -> None:
        """Let readers know what is away now."""
        self._absences.match(self._contents.held())

    # ------------------------------------------------------------------ back

    def back(self, make_room: Callable[[], bool] | None) -> dict[str, Trip]:
        """All that is away comes, parameters in order of the current stream; or nothing does.

        Args:
            make_room: see :meth:`.moving.Mover.back`.

        Raises:
            DeviceMemoryError: there is no room.
        """
        begun = self._begun
        away = missing_parts(self._contents.every_block()) if begun is None else begun.away
        try:
            if begun is None:
                trips = self._bring(make_room)
            else:
                trips = {**begun.trips, "state": self._bring_state(make_room)}
            self._absences.end()
            current = self._gateway.current_stream()
            trips["params"].follow(current)
            trips["grads"].follow(current)
            self._begun = None
            return trips
        except BaseException as error:
            self._undo(away, error)

    def begin_back(self) -> set[int]:
        """:meth:`back` of the model as far as nobody notices: copies are under way, and for readers
        and for the current stream all is away, until :meth:`back` or :meth:`give_up_begun`.

        Returns:
            Storages that come, by identity.

        Raises:
            DeviceMemoryError: there is no room.
        """
        away = missing_parts(self._contents.every_block())
        try:
            self._begun = Return(self._bring_model(None), away)
        except BaseException as error:
            self._undo(away, error)
        return {each.storage._cdata for _, found in self._contents.held() for each in found}

    def give_up_begun(self) -> None:
        """Nothing comes after all. Does nothing where nothing has begun."""
        if self._begun is not None:
            self._go_again(self._begun.away)

    def may_begin(self, available_bytes: int | None) -> bool:
        """Whether :meth:`begin_back` can be expected to work; ``None``: there is no such figure."""
        blocks = self._contents.blocks
        needed = sum(block.n_bytes for kind in ("params", "grads") for block in blocks[kind])
        return available_bytes is None or available_bytes >= needed + SPARE_BYTES

    def _bring(self, make_room: Callable[[], bool] | None) -> dict[str, Trip]:
        """Parameters first; but where somebody else makes room: in the order in which it leaves, if
        state comes block by block."""
        if make_room is None or not self._contents.blocks["state"]:
            return {**self._bring_model(make_room), "state": self._bring_state(make_room)}
        state = self._bring_state(make_room)
        return {**self._bring_model(make_room), "state": state}

    def _bring_state(self, make_room: Callable[[], bool] | None) -> Trip:
        return self._optimizer.reload(self._mover, self._contents.blocks["state"], make_room)

    def _bring_model(self, make_room: Callable[[], bool] | None) -> dict[str, Trip]:
        """Enqueue all copies but the state's; if this raises, some are."""
        blocks, trips = self._contents.blocks, {}
        trips["params"] = self._mover.back(blocks["params"], make_room=make_room)
        trips["grads"] = self._mover.back(blocks["grads"], make_room=make_room, lasting=False)
        return trips

    def _undo(self, away: Sequence[tuple[Block, int]], error: BaseException) -> NoReturn:
        """Nothing has come: raises ``error``, or ours where memory was short."""
        self._go_again(away)
        if is_out_of_memory(error):
            raise self._no_room() from error
        raise error

    def _go_again(self, away: Sequence[tuple[Block, int]]) -> None:
        """Coming back has failed half-way: nobody has used what came, and places hold its bytes.
        What was here before has perhaps no copy."""
        self._begun = None
        self._mover.wait()
        give_up(away)
        self.tell()
        release_cached(self._gateway.device)

    def no_room_to_close(self, error: BaseException) -> DeviceMemoryError:
        """Storages at fixed addresses get ordinary memory one by one, beside the region's."""
        return DeviceMemoryError(
            f"close() on {self._gateway.device}",
            reason=f"there is no room beside the fixed addresses ({error}); nothing is lost",
            remedy="free device memory and call close() again",
        )

    def _no_room(self) -> DeviceMemoryError:
        needed = sum(block.n_bytes for block in self._contents.every_block())
        device = self._gateway.device
        free = free_bytes(device)
        known = "" if free is None else f", and {free} bytes ({size_text(free)}) are free"
        return DeviceMemoryError(
            f"reload of {needed} bytes ({size_text(needed)}) to {device}",
            reason=f"the device has no room for them{known}; all of it is still in host memory",
            remedy="free device memory, torch.cuda.empty_cache() in whoever took it, and call "
            "reload() again",
        )
