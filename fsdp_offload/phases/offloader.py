"""``PhaseOffloader``: parameters, gradients and optimizer state leave the device for a while."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from ..config import TransferConfig
from ..device import available_bytes, free_bytes, release_cached
from ..errors import AwayError, ClosedError, ConfigError, DeviceMemoryError
from ..groups import find_groups
from ..interrupts import held_back
from ..moving import Mover, Pages, Places, Spares
from ..patching import Patch, remove_all
from ..wrapping import gateway_of, modules_of
from .absences import Absences
from .contents import Contents
from .gradients import Gradients
from .guard import ModuleGuard
from .handle import Handle, PhaseStatistics, Transfer
from .moves import Moves
from .optimizers import find_state
from .policies import Policies
from .seats import make_seats

_log = logging.getLogger("fsdp_offload")


class PhaseOffloader:
    """Moves what a model and its optimizer keep on the device to host memory, and back.

    While it is away, ``state_dict``, checkpoints and loads work from and into host memory; forward
    and ``optimizer.step()`` raise :class:`AwayError`, or bring everything back first. Objects stay
    the same: parameters, gradients, views and DTensors; only their memory goes.

    Seen are calls of modules, of FSDP2 and of optimizers. A tensor that is used by other ways
    while it is away (``print(model.weight)``, a kernel over it) has no memory, and the process may
    die of it.

    Addresses of parameters change with each cycle, and once at construction: storages that torch
    has allocated one by one leave and come back there, about 1 GiB at a time, to lie in few
    segments, which the driver takes back faster. The state of a plain optimizer moves once to
    addresses that stay (``fixed_address``), from where its memory goes back to the driver while
    copies run. So work on other streams has to be waited for before, and CUDA graphs over them are
    captured afterwards. Where device memory has no room for it, or allocator settings forbid it,
    they stay where they are. In the rare case that another process or thread takes the room just
    then, the offloader begins with ``is_away``, and says so in the log.

    Ctrl-C (SIGINT) during a move arrives when the move has ended.

    Args:
        model: the module or modules; FSDP2 modules are resharded by each offload.
        optimizer: a :class:`HybridDeviceOptimizer`, any ``torch.optim.Optimizer``, or None.
        params: parameters and buffers. ``"save"``: copied out and in. ``"keep"``: they stay on the
            device.
        grads: ``None``: ``.grad`` is None afterwards; a gradient that no ``step()`` of the
            optimizer has consumed is an error. ``"drop"``: that one is dropped, too. ``"save"``:
            comes back as it was. ``"keep"``: stays on the device.
        state: of the optimizer: ``"save"`` or ``"keep"``.
        on_use: ``"error"``: use while away raises. ``"reload"``: it brings everything back.
        fixed_address: what comes back to the addresses that it had; it moves to new ones once, here
            or when it is first seen. ``"state"``: a plain optimizer's state, where the device and
            torch can do it and there is room. ``True``: parameters and buffers, too, or an error.
            ``False``: nothing. The state of a :class:`HybridDeviceOptimizer` has ``state_region=``.
        transfer: how to obtain host memory (``pin``, ``huge_pages``, ``numa``, ``host_budget``).

    Raises:
        ConfigError: an argument is wrong.
        DeviceError: several devices, or none that torch can use.
        UnsupportedParameterError: a storage that cannot be given up and restored.
        UnsupportedTorchError: this version of torch lacks a private name of FSDP2.
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
        grads: str | None = None,
        state: str = "save",
        on_use: str = "error",
        fixed_address: bool | str = "state",
        transfer: TransferConfig | None = None,
    ) -> None:
        self._policies = policies = Policies(params, grads, state, on_use, fixed_address)
        self._models = models = modules_of(model)
        self._optimizer = own = find_state(optimizer, policies)
        tensors = [t for m in models for t in (*m.parameters(), *m.buffers())]
        if not tensors:
            raise ConfigError(
                "a model without parameters and buffers",
                reason="there is nothing to move",
                remedy="pass the module that holds them",
            )
        parameters = [t for t in tensors if isinstance(t, nn.Parameter)]
        self._gateway = gateway = gateway_of(parameters or tensors)
        self._device = device = gateway.device
        transfer = transfer or TransferConfig()
        self._places = places = Places(gateway, transfer)
        seats = make_seats(policies, gateway, places, transfer)
        self._groups = groups = find_groups(models)
        self._guard, self._gradients = ModuleGuard(models, groups), Gradients(grads, groups, own)
        mover, absences = Mover(gateway, places), Absences(self._settle)
        self._contents = Contents(models, own, self._gradients, seats, policies, device)
        self._moves = Moves(self._contents, own, absences, mover, gateway)
        self._patches: list[Patch] = []
        self._handle = Handle({})
        self._is_away = self._is_closed = False
        self._lock, self._pid = threading.RLock(), os.getpid()
        self._last = _Last()
        with held_back():
            try:
                self._reshard()
                self._contents.collect(self._contents.parameters())
                self._moves.reserve()
                self._moves.find_places()
                self._join()
            except BaseException:
                self._contents.close()
                self._places.close()
                raise
        ends = [own.around_load(self._forget_state, self._release_state)]
        if grads is None:
            ends.append(own.after_steps(self._gradients.note_step))
        self._end_hooks = weakref.finalize(self, _call_all, ends)

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
            UnspentGradientError: a gradient would be lost, see ``grads``; nothing has moved.
            ClosedError: after :meth:`close`, or in a forked process.
        """
        return self._offload(wait, None)

    def _offload(self, wait: bool, beside: _Coming | None) -> Handle:
        with self._lock, held_back():
            self._check()
            self._handle.wait()
            if not self._is_away:
                self._leave(beside)
            elif beside is not None:
                beside.come(self._handle)
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
        with self._lock, held_back():
            self._check()
            self._handle.wait()
            if self._is_away:
                self._come_back(make_room)
            if wait:
                self._handle.wait()
            return self._handle

    @contextlib.contextmanager
    def away(self) -> Iterator[Handle]:
        """:meth:`offload` at the beginning and :meth:`reload` at the end, also of exceptions.

        What was away before stays so: an inner one leaves the reload to the outer one.
        """
        was_away = self._is_away
        try:
            yield self.offload()
        finally:
            if self._is_away and not was_away:
                self.reload()

    def close(self) -> None:
        """Bring everything back and give all host memory up. Idempotent.

        Raises:
            DeviceMemoryError: it cannot come back; everything is as before, call again.
        """
        with self._lock, held_back():
            if self._is_closed:
                return
            self.reload()
            try:
                self._contents.close()
            except torch.OutOfMemoryError as error:
                raise self._moves.no_room_to_close(error) from error
            self._places.close()
            self._end_hooks()
            self._is_closed = True  # last: what has failed half-way goes on in the next call

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

    def _leave(self, beside: _Coming | None) -> None:
        """``beside``: comes as soon as copies are under way, before all else is done; then memory
        stays torch's, for that."""
        self._free_before = free_bytes(self._device)
        self._optimizer.synchronize()
        try:
            parameters, trips = self._moves.out(
                self._reshard, None if beside is None else beside.begin
            )
        except BaseException:
            if beside is not None:
                beside.give_up()  # it has taken room
            self._stay()
            raise
        finish = functools.partial(self._has_left, to_driver=beside is None)
        handle = Handle(trips, finish, finish_blocks=beside is None)
        try:
            if beside is not None:
                beside.come(handle)
        finally:  # all is on its way: no use, and perhaps no room, to turn back
            self._become_away(handle)
            self._gradients.leave(parameters)

    def _stay(self) -> None:
        """Leaving has failed half-way: bring back what has left already, or be away with it."""
        try:
            self._moves.turn_back()
        except BaseException as error:
            self._moves.stay_away()  # nothing is lost, and reload() tries again
            self._become_away(Handle({}))
            if self._policies.grads == "save":
                self._gradients.leave(self._contents.parameters())
            if not isinstance(error, torch.OutOfMemoryError | DeviceMemoryError):
                raise

    def _become_away(self, handle: Handle) -> None:
        self._is_away, self._handle = True, handle
        self._guard.close(self._before_use, self._lock)
        self._patches = []
        self._optimizer.close(self._before_use, self._patches)

    def _reshard(self) -> None:
        for group in self._groups:
            group.settle()
        for model in self._models:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _join(self) -> None:
        error = self._moves.join()
        if error is not None:
            # Its bytes are in host memory, which raising would give up.
            _log.warning("the offloader begins with is_away: %r; call reload()", error)
            self._become_away(Handle({}))

    def _settle(self) -> None:
        """Somebody reads host memory: it holds the bytes when this returns."""
        with self._lock:
            handle = self._handle
        handle.wait()

    def _forget_state(self) -> None:
        with self._lock:
            if not self._is_away:
                self._contents.forget_state()

    def _release_state(self) -> None:
        with self._lock, held_back():
            self._handle.wait()  # torch's own method may have been called, which does not
            if not self._is_away:
                self._contents.release_state()

    def _has_left(self, handle: Handle, *, to_driver: bool) -> None:
        if to_driver:
            release_cached(self._device)
        self._last.offloaded = handle.transfers()
        self._last.offload_seconds = handle.seconds
        free = free_bytes(self._device)
        if free is not None and self._free_before is not None:
            self._last.freed_bytes = free - self._free_before

    # ------------------------------------------------------------------ coming back

    def _begin_to_come(self) -> set[int]:
        """Let copies begin that a later :meth:`_reload` waits for, if there is room for them; gives
        their storages, by identity."""
        self._handle.wait()
        if self._is_away and self._moves.may_begin(available_bytes(self._device)):
            with contextlib.suppress(DeviceMemoryError):  # it is in pieces
                return self._moves.begin_back()
        return set()

    def _come_back(self, make_room: Callable[[], bool] | None) -> None:
        trips = self._moves.back(make_room)
        self._guard.open()
        remove_all(self._patches)
        self._gradients.come_back()
        self._contents.forget_gradients()
        self._handle = Handle(trips, self._has_returned)
        self._patches = []
        self._optimizer.follow(self._handle, trips["state"], self._gateway, self._patches)
        self._is_away = False

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
    Memory at fixed addresses is exchanged chunk by chunk; what ``in_`` does not take of it goes to
    the driver.

    Args:
        out: goes away.
        in_: comes back.
        wait: as of :meth:`PhaseOffloader.reload`. The call itself waits for as much of ``out`` to
            leave as ``in_`` needs room for.

    Returns:
        The handles of ``out`` and of ``in_``.

    Raises:
        DeviceMemoryError: ``in_`` does not fit although ``out`` has left; both are away.
        HostMemoryError, PinningError: ``out`` has something new to hold, and stays, and ``in_`` is
            away.
        UnspentGradientError: likewise, of a gradient that ``out`` would drop.
        ClosedError: one of them is closed; nothing was moved.
    """
    in_._check()
    with contextlib.ExitStack() as locks:
        # In one order: another thread may swap them the other way.
        for each in sorted((out, in_), key=id):
            locks.enter_context(each._lock)
        locks.enter_context(held_back())
        coming = _Coming(in_, out)
        try:
            coming.begin_exchange()
            leaving = out._offload(False, coming)
        except BaseException:
            if out.is_away:
                out.offload()  # waits for it
            raise
        finally:
            coming.end()
        assert coming.handle is not None
        if wait:
            leaving.wait()
            coming.handle.wait()
    return leaving, coming.handle


class _Coming:
    """The way back of one offloader, which is locked, while another one leaves.

    Args:
        offloader: comes, to fixed addresses with the memory that ``out`` has at such ones.
        out: locked, too.
    """

    def __init__(self, offloader: PhaseOffloader, out: PhaseOffloader) -> None:
        self._offloader, self._out = offloader, out
        self._pages: list[Pages] = []  # that take part in the exchange
        self._spares = Spares()
        self.handle: Handle | None = None

    def begin_exchange(self) -> None:
        """From now on memory that leaves fixed addresses is kept for what comes, until
        :meth:`end`."""
        if self._offloader._device == self._out._device:
            self._pages = self._out._contents.pages()
            self._spares.await_from(self._pages)

    def begin(self) -> set[int]:
        """The first copies out are under way. To look all the others up takes as long as some
        GiB need on the link: what has room does not wait for that.

        Returns:
            Storages that come, by identity.
        """
        return self._offloader._begin_to_come()

    def come(self, leaving: Handle) -> None:
        """All copies out are under way; ``leaving`` can make room."""

        def make_room() -> bool:
            # None is left to leave, so what has not found memory there gets the driver's.
            return leaving._release_next() or self._spares.close()

        if self._pages:
            found = self._offloader._contents.pages()
            self._pages += found
            for pages in found:
                pages.spares = self._spares
        self.handle = self._offloader._reload(False, make_room)

    def give_up(self) -> None:
        """What had begun stays away."""
        self._offloader._moves.give_up_begun()

    def end(self) -> None:
        """What leaves from now on goes to the driver."""
        self._spares.close()
        for pages in self._pages:
            pages.spares = None


def _call_all(ends: Sequence[Callable[[], None]]) -> None:
    for end in ends:
        end()


class _Last:
    """Figures of the moves that have ended."""

    def __init__(self) -> None:
        self.offloaded: Mapping[str, Transfer] = {}
        self.reloaded: Mapping[str, Transfer] = {}
        self.offload_seconds = self.reload_seconds = 0.0
        self.freed_bytes = self.cycles = 0
