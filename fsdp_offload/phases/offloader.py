"""``PhaseOffloader``: parameters, gradients and optimizer state leave the device for a while."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from .. import shards
from ..config import TransferConfig
from ..device import free_bytes, release_cached
from ..errors import (
    AwayError,
    ClosedError,
    ConfigError,
    DeviceMemoryError,
)
from ..groups import find_groups
from ..memory.budget import size_text
from ..moving import (
    Absence,
    Block,
    Mover,
    Places,
    Settle,
    StorageBlock,
    Trip,
    collect,
    give_up,
    is_whole,
    join,
)
from ..patching import Patch, remove_all
from ..wrapping import gateway_of, modules_of
from .gradients import Gradients
from .guard import ModuleGuard
from .handle import Handle, PhaseStatistics, Transfer
from .optimizers import find_state
from .policies import Policies
from .rebuilding import Rebuilding
from .seats import KINDS, make_seats

_log = logging.getLogger("fsdp_offload")

AHEAD_BYTES: Final = 2 << 30
"""Of state whose copies begin before all else is looked up: the link takes 40 ms for it."""


class PhaseOffloader:
    """Moves what a model and its optimizer keep on the device to host memory, and back.

    While it is away, ``state_dict``, checkpoints and loads work from and into host memory; forward
    and ``optimizer.step()`` raise :class:`AwayError`, or bring everything back first. Objects stay
    the same: parameters, gradients, views and DTensors; only their memory goes.

    Seen are calls of modules, of FSDP2 and of optimizers. A tensor that is used by other ways
    while it is away (``print(model.weight)``, a kernel over it) has no memory, and the process may
    die of it.

    Addresses change with each cycle, and once at construction: storages that torch has allocated
    one by one leave and come back there, about 1 GiB at a time, to lie in few segments, which the
    driver takes back faster. So work on other streams has to be waited for before, and CUDA graphs
    over them are captured afterwards, with ``fixed_address``. Where device memory has no room for
    it, or allocator settings forbid it, they stay where they are. In the rare case that somebody
    else takes the room just then, or that it is interrupted, the offloader begins with ``is_away``,
    and says so in the log.

    Args:
        model: the module or modules; FSDP2 modules are resharded by each offload.
        optimizer: a :class:`HybridDeviceOptimizer`, any ``torch.optim.Optimizer``, or None.
        params: parameters and buffers. ``"save"``: copied out and in. ``"rebuild"``: where the
            optimizer keeps a whole fp32 master in host memory, the shard is not copied out but
            written from it; others are saved. ``"keep"``: they stay on the device.
        grads: ``"drop"``: ``.grad`` is None afterwards. ``"save"``: comes back as it was.
            ``"keep"``: stays on the device.
        state: of the optimizer: ``"save"`` or ``"keep"``.
        on_use: ``"error"``: use while away raises. ``"reload"``: it brings everything back.
        fixed_address: bring parameters, buffers and a plain optimizer's state back to the
            addresses that they had; they move to new ones once, here or when they are first seen.
            The state of a :class:`HybridDeviceOptimizer` has ``state_region=`` for it.
        transfer: how to obtain host memory (``pin``, ``huge_pages``, ``numa``, ``host_budget``).

    Raises:
        ConfigError: an argument is wrong.
        DeviceError: several devices, or none that torch can use.
        UnsupportedParameterError: a storage that cannot be given up and restored.
        HostMemoryError: host memory is short; nothing has changed.
        PinningError: the driver refused to page-lock it; nothing has changed.
        DeviceMemoryError: others took device memory while a :class:`HybridDeviceOptimizer`'s state
            was moved (see its ``reserve_offload()``), which is away: ``optimizer.reload()``.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | None = None,
        *,
        params: str = "save",
        grads: str = "drop",
        state: str = "save",
        on_use: str = "error",
        fixed_address: bool = False,
        transfer: TransferConfig | None = None,
    ) -> None:
        self._policies = Policies(params, grads, state, on_use)
        self._models = modules_of(model)
        self._optimizer = find_state(optimizer, self._policies)
        tensors = [t for m in self._models for t in (*m.parameters(), *m.buffers())]
        if not tensors:
            raise ConfigError(
                "a model without parameters and buffers",
                reason="there is nothing to move",
                remedy="pass the module that holds them",
            )
        parameters = [t for t in tensors if isinstance(t, nn.Parameter)]
        self._gateway = gateway_of(parameters or tensors)
        self._device = self._gateway.device
        transfer = transfer or TransferConfig()
        self._places = Places(self._gateway, transfer)
        self._seats = make_seats(
            self._policies, self._gateway, self._places, transfer, fixed_address=fixed_address
        )
        self._mover = Mover(self._gateway, self._places)
        groups = find_groups(self._models)
        self._groups, self._guard = groups, ModuleGuard(self._models, groups)
        self._gradients = Gradients(grads, groups)
        self._rebuilding = Rebuilding(self._optimizer, self._mover, enabled=params == "rebuild")
        self._storages: dict[str, list[StorageBlock]] = {}
        self._blocks: dict[str, list[Block]] = {}  # what moves for them
        self._earlier: dict[str, list[StorageBlock]] = {}  # of the last departure
        self._absences: dict[int, Absence] = {}  # by the storage's identity
        self._patches: list[Patch] = []
        self._settled = Settle(functools.partial(_call, weakref.WeakMethod(self._settle)))
        self._handle = Handle({})
        self._is_away = self._is_closed = False
        self._lock, self._pid = threading.RLock(), os.getpid()
        self._last = _Last()
        try:
            self._reshard()
            self._collect()
            self._reserve()
            self._join()
        except BaseException:
            for seats in self._seats.values():
                seats.close()
            self._places.close()
            raise

    # ------------------------------------------------------------------ out and back

    @property
    def is_away(self) -> bool:
        """From the call of :meth:`offload` to the return of :meth:`reload`."""
        return self._is_away

    def offload(self, *, wait: bool = True) -> Handle:
        """Copy everything to host memory and give its device memory up. Does nothing while away.

        Args:
            wait: return when the memory is the driver's again. Else copies run beside what
                follows; memory becomes torch's as :meth:`Handle.is_done` finds them complete, and
                the driver's with :meth:`Handle.wait`.

        Raises:
            HostMemoryError, PinningError: there is something new to hold; what had begun to leave
                is back, or if device memory is short by then, it is away.
            DeviceMemoryError: the same, of a :class:`HybridDeviceOptimizer` with new state.
            ClosedError: after :meth:`close`, or in a forked process.
        """
        return self._offload(wait, None)

    def _offload(self, wait: bool, beside: Callable[[Handle], None] | None) -> Handle:
        with self._lock:
            self._check()
            self._handle.wait()
            if not self._is_away:
                with _collector_paused():
                    self._leave(beside)
            elif beside is not None:
                beside(self._handle)
            if wait:
                self._handle.wait()
            return self._handle

    def reload(self, *, wait: bool = True) -> Handle:
        """Bring everything back, parameters first. Does nothing while it is here.

        Args:
            wait: return when everything has arrived. Else the current stream waits for the
                parameters, so a forward may be launched at once, and ``optimizer.step()`` waits
                for the state.

        Raises:
            DeviceMemoryError: device memory is short. Everything is still in host memory; call
                again when there is room.
            ClosedError: in a forked process.
        """
        return self._reload(wait, None)

    def _reload(self, wait: bool, make_room: Callable[[], bool] | None) -> Handle:
        with self._lock:
            self._check()
            self._handle.wait()
            if self._is_away:
                with _collector_paused():
                    self._come_back(make_room)
            if wait:
                self._handle.wait()
            return self._handle

    @contextlib.contextmanager
    def away(self) -> Iterator[Handle]:
        """:meth:`offload` at the beginning and :meth:`reload` at the end, also of exceptions."""
        handle = self.offload()
        try:
            yield handle
        finally:
            self.reload()

    def close(self) -> None:
        """Bring everything back and give all host memory up. Idempotent.

        Raises:
            DeviceMemoryError: it cannot come back; everything is as before, call again.
        """
        with self._lock:
            if self._is_closed:
                return
            self.reload()
            self._is_closed = True
            self._storages.clear()
            self._blocks.clear()
            for seats in self._seats.values():
                seats.close()
            self._places.close()

    def statistics(self) -> PhaseStatistics:
        """Figures of the moves that have ended."""
        arenas = self._places.statistics()
        last = self._last
        return PhaseStatistics(
            offloaded=dict(last.offloaded),
            reloaded=dict(last.reloaded),
            offload_seconds=last.offload_seconds,
            reload_seconds=last.reload_seconds,
            freed_bytes=last.freed_bytes,
            host_bytes=sum(arena.n_bytes for arena in arenas),
            pinned_bytes=sum(arena.n_bytes for arena in arenas if arena.pinned),
            pin_seconds=sum(arena.touch_seconds + arena.pin_seconds for arena in arenas),
            cycles=last.cycles,
        )

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "a copy or a pickle of a PhaseOffloader",
            reason="it owns host memory and stands before one model",
            remedy="build one for the other model",
        )

    # ------------------------------------------------------------------ leaving

    def _leave(self, beside: Callable[[Handle], None] | None) -> None:
        """``beside``: called as soon as the copies are under way, before all else is done; then
        memory stays torch's, for what comes meanwhile."""
        self._free_before = free_bytes(self._device)
        self._optimizer.synchronize()
        trips: dict[str, Trip] = {}
        handle: Handle | None = None
        try:
            self._forget()
            gone, ahead = self._send_ahead()
            self._reshard()
            parameters = self._collect(gone)
            self._reserve()
            self._enter_absent()
            # The optimizer first: it may have updates of parameters under way.
            trips["state"] = self._optimizer.offload(self._mover, self._blocks["state"])
            trips["state"].include(ahead)
            trips["grads"] = self._mover.out(self._blocks["grads"])
            trips["params"] = self._mover.out(self._blocks["params"])
            dropped = self._mover.drop(self._rebuilding.blocks)
            finish = functools.partial(self._has_left, to_driver=beside is None)
            handle = Handle(trips, finish, dropped=dropped, finish_blocks=beside is None)
            if beside is not None:
                beside(handle)
            self._has_gone(handle, parameters)
        except BaseException:
            if handle is None:
                self._stay()
            else:  # all is on its way: no use, and perhaps no room, to turn back
                self._has_gone(handle, parameters)
            raise

    def _has_gone(self, handle: Handle, parameters: Mapping[str, Tensor]) -> None:
        """All is away when ``handle`` is done. Idempotent."""
        self._become_away(handle)
        self._gradients.leave(parameters)

    def _stay(self) -> None:
        """Leaving has failed half-way: bring back what has left already, or be away with it."""
        try:
            self._mover.wait()
            for trip in self._bring_back(None).values():
                trip.wait()
        except BaseException as error:
            # Nothing is lost, and reload() tries again. What can leave after all does.
            with contextlib.suppress(Exception):
                self._optimizer.offload(self._mover, self._blocks["state"]).wait()
                self._mover.out([*self._blocks["grads"], *self._blocks["params"]]).wait()
            self._match_absent()
            self._become_away(Handle({}))
            if self._policies.grads == "save":
                self._gradients.leave(self._parameters())
            if not isinstance(error, torch.OutOfMemoryError | DeviceMemoryError):
                raise

    def _become_away(self, handle: Handle) -> None:
        self._is_away, self._handle = True, handle  # first: reload() undoes the rest, or a part
        self._guard.close(self._before_use, self._lock)
        remove_all(self._patches)
        self._patches = []
        self._optimizer.close(self._before_use, self._patches)

    def _forget(self) -> None:
        """What leaves is not known yet. What did so before may be in somebody else's care now."""
        self._earlier = self._storages
        self._storages, self._blocks = {k: [] for k in KINDS}, {k: [] for k in KINDS}
        self._rebuilding.take((), ())

    def _reshard(self) -> None:
        for group in self._groups:
            group.settle()
        for model in self._models:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _collect(self, gone: Sequence[StorageBlock] = ()) -> Mapping[str, Tensor]:
        """The blocks that leave now, by kind, each storage once; all parameters by name.

        ``gone``: state that is on its way already.
        """
        known = {block.storage._cdata for block in gone}
        earlier = {b.storage._cdata: b for found in self._earlier.values() for b in found}
        parameters = self._parameters()
        named = self._named(parameters)
        kept = [
            tensor for kind, pairs in named.items() for _, tensor in pairs if not self._moves(kind)
        ]
        collect([("", tensor) for tensor in kept], self._device, known=known)
        for kind, pairs in named.items():
            found: list[StorageBlock] = []
            if self._moves(kind):
                found = collect(pairs, self._device, known=known, earlier=earlier)
            if kind == "params":
                found = self._rebuilding.take(found, pairs)
            self._storages[kind], self._blocks[kind] = self._seats[kind].take(
                found, gone if kind == "state" else ()
            )
        self._earlier.clear()  # it keeps memory
        return parameters

    def _named(self, parameters: Mapping[str, Tensor]) -> dict[str, list[tuple[str, Tensor]]]:
        params = [(f"params.{name}", tensor) for name, tensor in parameters.items()]
        for index, model in enumerate(self._models):
            params += [
                (f"buffers.{index}.{name}", buffer) for name, buffer in model.named_buffers()
            ]
        return {
            "params": params,
            "grads": self._gradients.named(parameters),
            "state": list(self._optimizer.named()),
        }

    def _parameters(self) -> dict[str, Tensor]:
        return {
            f"{index}.{name}": parameter
            for index, model in enumerate(self._models)
            for name, parameter in model.named_parameters()
        }

    def _moves(self, kind: str) -> bool:
        return bool(getattr(self._policies, kind) != "keep")

    def _reserve(self) -> None:
        """Host memory for what has none yet, in one piece."""
        self._mover.reserve([block for found in self._blocks.values() for block in found])
        self._optimizer.reserve()

    def _join(self) -> None:
        """Let storages lie together, so that the first offload is like later ones."""
        kinds = [self._blocks[kind] for kind in ("params", "state")]  # as they come back
        own = [[block for block in found if isinstance(block, StorageBlock)] for found in kinds]
        self._optimizer.synchronize()
        try:
            for blocks in own:
                join(blocks, self._mover, self._gateway)
        except BaseException as error:
            self._mover.wait()
            if all(is_whole(block) for blocks in own for block in blocks):
                if isinstance(error, torch.OutOfMemoryError):
                    return
                raise
            # Its bytes are in host memory, which raising would give up: reload() tries again.
            _log.warning("the offloader begins with is_away: %r; call reload()", error)
            self._match_absent()
            self._become_away(Handle({}))

    def _send_ahead(self) -> tuple[list[StorageBlock], Trip]:
        """Begin to copy some of the state: to look up all that leaves takes up to 50 us per
        parameter. Storages of it, and their trip."""
        policies = self._policies
        if policies.state == "keep" or policies.params == "keep" or policies.grads != "drop":
            return [], Trip()  # a kept storage stays, whoever else looks at it
        known = self._earlier["state"]
        parameters = {shards.storage_of(p)._cdata for p in self._optimizer.parameters()}
        if not known or any(block.storage._cdata in parameters for block in known):
            return [], Trip()  # nor does one that has become a parameter's leave with the state
        storages, blocks = self._seats["state"].still(known, self._optimizer.named(), AHEAD_BYTES)
        self._storages["state"], self._blocks["state"] = storages, blocks
        self._enter_absent_of("state", storages)
        return storages, self._mover.out(blocks)

    def _enter_absent(self) -> None:
        """All that is not absent already."""
        for kind in ("params", "state"):
            self._enter_absent_of(kind, self._storages[kind])
        self._rebuilding.enter_absent(self._rebuilding.blocks, self._settled, self._absences)

    def _enter_absent_of(self, kind: str, storages: Sequence[StorageBlock]) -> None:
        seats = self._seats[kind]
        for block in storages:
            if block.storage._cdata not in self._absences:
                self._absences[block.storage._cdata] = Absence(
                    block.storage, seats.place(block), self._settled, seats.presence(block)
                )

    def _match_absent(self) -> None:
        """Let absent be what has no memory, and nothing else: others need not have places."""
        self._absences = {k: each for k, each in self._absences.items() if not each.is_over()}
        for kind in ("params", "state"):
            is_present = self._seats[kind].is_present
            self._enter_absent_of(kind, [b for b in self._storages[kind] if not is_present(b)])
        gone = [block for block in self._rebuilding.blocks if not is_whole(block)]
        self._rebuilding.enter_absent(gone, self._settled, self._absences)

    def _leave_absent(self) -> None:
        for absence in self._absences.values():
            absence.end()
        self._absences.clear()

    def _settle(self) -> None:
        """Somebody reads host memory: it holds the bytes when this returns."""
        with self._lock:
            handle = self._handle
        handle.wait()

    def _has_left(self, handle: Handle, *, to_driver: bool) -> None:
        if to_driver:
            release_cached(self._device)
        self._last.offloaded = handle.transfers()
        self._last.offload_seconds = handle.seconds
        free = free_bytes(self._device)
        if free is not None and self._free_before is not None:
            self._last.freed_bytes = free - self._free_before

    # ------------------------------------------------------------------ coming back

    def _come_back(self, make_room: Callable[[], bool] | None) -> None:
        trips: dict[str, Trip] | None = None
        try:
            trips = self._bring_back(make_room)
            self._become_present(trips)
        except BaseException:
            if trips is not None:
                self._become_present(trips)
            raise

    def _become_present(self, trips: Mapping[str, Trip]) -> None:
        """All is here when ``trips`` are done. Idempotent."""
        self._guard.open()
        remove_all(self._patches)
        self._gradients.come_back()
        self._storages["grads"], self._blocks["grads"] = [], []  # others may drop them
        self._handle = Handle(trips, self._has_returned)
        self._patches = []
        self._optimizer.follow(self._handle, trips["state"], self._gateway, self._patches)
        self._is_away = False

    def _bring_back(self, make_room: Callable[[], bool] | None) -> dict[str, Trip]:
        """All that is away, parameters in order of the current stream; or nothing, if it raises."""
        trips: dict[str, Trip] = {}
        away = [block for block in self._all_blocks() if not is_whole(block)]
        try:
            trips["params"] = self._mover.back(self._blocks["params"], make_room=make_room)
            self._rebuilding.renew(make_room)
            trips["grads"] = self._mover.back(
                self._blocks["grads"], make_room=make_room, lasting=False
            )
            state = self._blocks["state"]
            trips["state"] = self._optimizer.reload(self._mover, state, make_room)
            self._leave_absent()
            current = self._gateway.current_stream()
            trips["params"].follow(current)
            trips["grads"].follow(current)
            self._rebuilding.write()
            return trips
        except BaseException as error:
            self._go_again(away)
            if isinstance(error, torch.OutOfMemoryError | DeviceMemoryError):
                raise self._no_room() from error
            raise

    def _go_again(self, away: Sequence[Block]) -> None:
        """Coming back has failed half-way: nobody has used what came, and places hold its bytes."""
        self._mover.wait()
        self._gateway.current_stream().synchronize()  # it may be writing what is rebuilt
        give_up(away)
        self._match_absent()
        release_cached(self._device)

    def _all_blocks(self) -> list[Block]:
        found = [block for kind in KINDS for block in self._blocks[kind]]
        return [*found, *self._rebuilding.blocks]

    def _no_room(self) -> DeviceMemoryError:
        needed = sum(block.n_bytes for block in self._all_blocks())
        free = free_bytes(self._device)
        known = "" if free is None else f", and {free} bytes ({size_text(free)}) are free"
        return DeviceMemoryError(
            f"reload of {needed} bytes ({size_text(needed)}) to {self._device}",
            reason=f"the device has no room for them{known}; all of it is still in host memory",
            remedy="free device memory, torch.cuda.empty_cache() in whoever took it, and call "
            "reload() again",
        )

    def _has_returned(self, handle: Handle) -> None:
        remove_all(self._patches)
        self._last.reloaded = handle.transfers()
        self._last.reload_seconds = handle.seconds
        self._last.cycles += 1

    # ------------------------------------------------------------------ use

    def _before_use(self, what: str) -> None:
        """Something is used that is away, or shares a model with what is."""
        if not self._is_away:
            return
        if self._policies.on_use == "reload":
            self.reload(wait=False)
            return
        raise AwayError(
            what,
            reason="the model's memory is offloaded",
            remedy='reload() first, or build PhaseOffloader with on_use="reload"',
        )

    def _check(self) -> None:
        if self._is_closed:
            raise ClosedError(
                "a closed PhaseOffloader", reason="its memory was given back", remedy="build one"
            )
        if os.getpid() != self._pid:
            raise ClosedError(
                f"a PhaseOffloader of process {self._pid} used in process {os.getpid()}",
                reason="its memory is not inherited by forked processes",
                remedy="offload and reload in the process that built it",
            )


def swap(*, out: PhaseOffloader, in_: PhaseOffloader, wait: bool = True) -> tuple[Handle, Handle]:
    """Let one set leave while another comes, each in the other's room.

    Memory that ``out`` leaves stays with torch's allocator: for ``in_``, and for the next swap.

    Args:
        out: goes away.
        in_: comes back.
        wait: as of :meth:`PhaseOffloader.reload`. The call itself waits for as much of ``out`` to
            leave as ``in_`` needs room for.

    Returns:
        The handles of ``out`` and of ``in_``.

    Raises:
        DeviceMemoryError: ``in_`` does not fit although ``out`` has left; both are away.
        ClosedError: one of them is closed; nothing was moved.
    """
    in_._check()
    coming: list[Handle] = []

    def come(leaving: Handle) -> None:
        coming.append(in_._reload(False, leaving._release_next))

    try:
        leaving = out._offload(False, come)
    except BaseException:
        if out.is_away:
            out.offload()  # waits for it
        raise
    if wait:
        leaving.wait()
        coming[0].wait()
    return leaving, coming[0]


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Python's collector has no turn inside: objects are made for each module and storage, and a
    full collection (0.1 s and more) would come between copies. It comes while they run."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _call(find: Callable[[], Callable[[], None] | None]) -> None:
    """Call a method whose object may be gone."""
    method = find()
    if method is not None:
        method()


class _Last:
    """Figures of the moves that have ended."""

    def __init__(self) -> None:
        self.offloaded: Mapping[str, Transfer] = {}
        self.reloaded: Mapping[str, Transfer] = {}
        self.offload_seconds = self.reload_seconds = 0.0
        self.freed_bytes = self.cycles = 0
