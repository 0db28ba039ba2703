"""``PhaseOffloader``: parameters, gradients and optimizer state in host memory for a while."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core import dtensor
from ..core import storage as storages
from ..core.arguments import backend_of, check_optimizer, modules_of
from ..core.config import TransferConfig, check_choice
from ..core.devices import release_cached
from ..core.errors import (
    ConfigError,
    DeviceMemoryError,
    UnsupportedParameterError,
    check_open,
    copy_error,
)
from ..core.fsdp import find_groups
from ..core.interrupts import held_back
from ..core.offloadable import offloadable_of
from ..link import address_range, held_bytes
from ..link.block import OwnedBlock, StorageBlock, collect, in_order
from ..link.transfer import Figures, Handle, Transfer
from .fixed import FixedMemory, is_movable
from .gradients import Gradients
from .guard import ModelGuard, PlainOptimizer, remove_all

KINDS: Final = ("params", "grads", "state")
"""In the order in which they travel."""

_CHOICES: Final[dict[str, tuple[tuple[object, ...], str]]] = {
    "params": (("save", "keep"), "parameters are needed again, so they are copied out, or stay"),
    "grads": ((None, "drop", "save", "keep"), "it says what becomes of .grad, by name"),
    "state": (("save", "keep"), "state is needed again, so it is copied out, or stays"),
    "keep_addresses": ((True, False), "neither True nor False"),
}
"""With why there are no others."""


@dataclass(frozen=True)
class PhaseStatistics:
    """Figures of the last offload and the last reload that copied, once they were waited for."""

    offloaded: Mapping[str, Figures]  # by kind: params, grads, state
    reloaded: Mapping[str, Figures]
    offload_seconds: float  # from the call to its end, as the host saw it
    reload_seconds: float
    freed_bytes: int  # that the driver got back at the end of the offload; 0 on a CPU
    host_bytes: int  # held for what is offloaded
    pinned_bytes: int  # page-locked part of host_bytes
    pin_seconds: float  # to obtain and page-lock it
    host_bytes_by_holder: dict[str, int]  # of all that this process holds; host_memory= bounds it
    cycles: int  # reloads


class PhaseOffloader:
    """Moves what a model and its optimizer keep on the device to host memory, and back.

    While it is away, ``state_dict`` and checkpoints work from host memory; forward,
    ``optimizer.step()`` and loads raise :class:`AwayError`. Objects stay the same: parameters,
    gradients, views and DTensors; only their memory goes.

    Seen are calls of modules and of ``optimizer``. A tensor that is used by other ways while it is
    away (``print(model.weight)``, a kernel over it) has no memory, and the process may die of it.

    Ctrl-C (SIGINT) during a move arrives when the move has ended. Calls come from one thread at a
    time.

    Args:
        model: the module or modules; FSDP2 modules are resharded by each offload.
        optimizer: a :class:`HybridDeviceOptimizer`, any ``torch.optim.Optimizer``, or None.
        params: parameters and buffers. ``"save"``: copied out and in. ``"keep"``: they stay on the
            device, and forward works while the rest is away, unless gradients are saved.
        grads: ``None``: ``.grad`` is None afterwards; a gradient that no ``step()`` of the
            optimizer has consumed is an error. ``"drop"``: that one is dropped, too. ``"save"``:
            copied out and in. ``"keep"``: stays on the device.
        state: of the optimizer: ``"save"`` or ``"keep"``.
        keep_addresses: move parameters, buffers and state that exist now to new addresses, once,
            here, where each reload puts them. Else addresses change with each cycle.
        transfer: how to obtain host memory (``pin``, ``host_memory``).

    Raises:
        ConfigError: an argument is wrong, or another PhaseOffloader keeps addresses of the same
            tensors.
        DeviceError: several devices, one that torch cannot use, or that cannot keep addresses.
        UnsupportedParameterError: memory that torch does not own.
        UnsupportedTorchError: this version of torch lacks a private name of FSDP2.
        SpentGradientError: between a backward that updated parameters and ``step()``.
        HostMemoryError: host memory is short; nothing has changed.
        PinningError: the driver refused to page-lock it; nothing has changed.
        DeviceMemoryError: ``keep_addresses`` needs some 0.5 GiB beside; nothing has changed.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | None = None,
        *,
        params: str = "save",
        grads: str | None = None,
        state: str = "save",
        keep_addresses: bool = False,
        transfer: TransferConfig | None = None,
    ) -> None:
        self._policies = {"params": params, "grads": grads, "state": state}
        given = {**self._policies, "keep_addresses": keep_addresses}
        for name, (choices, why) in _CHOICES.items():
            check_choice(name, given[name], choices, why)
        self._models = models = modules_of(model)
        tensors = [t for m in models for t in (*m.parameters(), *m.buffers())]
        if not tensors:
            raise ConfigError(
                "a model without parameters and buffers",
                reason="there is nothing to move",
                remedy="pass the module that holds them",
            )
        check_optimizer(
            optimizer,
            several="move the others by PhaseOffloader(model, other, params='keep', grads='keep')",
        )
        parameters = [t for t in tensors if isinstance(t, nn.Parameter)]
        self._backend = backend = backend_of(parameters or tensors)
        self._optimizer = offloadable_of(optimizer)
        if self._optimizer is None and optimizer is not None:
            self._optimizer = PlainOptimizer(optimizer, backend)
        self._groups = groups = find_groups(models)
        self._gradients = Gradients(grads, groups, optimizer)
        self._fixed = {
            kind: FixedMemory(kind, backend.device, address_range.CHUNK_BYTES, owner=self)
            for kind in ("params", "state")
            if keep_addresses and self._policies[kind] == "save"
        }
        saved = ", ".join(kind for kind in KINDS if self._policies[kind] == "save") or "nothing"
        self._transfer = Transfer(backend, transfer, f"PhaseOffloader: {saved}", empties_cache=True)
        self._guard = ModelGuard(models, self, allows_forward=params == "keep" and grads != "save")
        self._is_away = self._is_closed = self._moves_optimizer = False
        self._pid, self._cycles = os.getpid(), 0
        with held_back():
            self._reserve()
            hooks = self._gradients.hooks()
            if isinstance(self._optimizer, PlainOptimizer):
                hooks += self._optimizer.hooks()
            self._unhook = weakref.finalize(self, remove_all, hooks)

    def _reserve(self) -> None:
        """Move what keeps its addresses, and take host memory for all that moves now."""
        try:
            with self._turn("PhaseOffloader()"):
                self._prepare()
                self._keep_addresses()
            found = [b for _, blocks in self._blocks(self._parameters()) for b in blocks]
            self._transfer.reserve(found)
        except BaseException:
            self._transfer.close()
            for memory in self._fixed.values():
                memory.move_out()
            raise

    # ------------------------------------------------------------------ surface

    @property
    def is_away(self) -> bool:
        """From the call of :meth:`offload` to the return of :meth:`reload`."""
        return self._is_away

    @held_back()
    def offload(self, *, wait: bool = True) -> Handle:
        """Copy everything to host memory and give its device memory up. Does nothing while away.

        If this raises, everything is on the device as before.

        Args:
            wait: return when the memory is the driver's again. Else copies run beside what
                follows; memory becomes torch's as :meth:`Handle.is_done` finds them complete, and
                the driver's with :meth:`Handle.wait`.

        Raises:
            HostMemoryError, PinningError: there is something new to hold.
            UnspentGradientError: a gradient would be lost, see ``grads``.
            SpentGradientError: between a backward that updated parameters and ``step()``.
            UnsupportedParameterError: there is memory that torch does not own.
            ClosedError: after :meth:`close`, or in a forked process.
        """
        self._check()
        with self._turn("offload()"), storages.span("offload"):
            self._offload()
        return self._transfer.last(wait=wait)

    def _offload(self) -> None:
        if not self._is_away:
            optimizer = self._optimizer
            # Another offloader may have it away, and then that one reloads it.
            self._moves_optimizer = optimizer is not None and not optimizer.is_away
            self._prepare()
            parameters = self._parameters()
            self._gradients.check(parameters)
            self._transfer.out(self._blocks(parameters), self._staging())
            # All copies are enqueued: what follows only says so, and cannot fail.
            self._is_away = True
            self._guard.close(self._transfer)
            if self._moves_optimizer and optimizer is not None:
                optimizer.set_away(self._transfer)
            self._gradients.drop(parameters)

    def _turn(self, what: str) -> contextlib.AbstractContextManager[None]:
        optimizer = self._optimizer
        return contextlib.nullcontext() if optimizer is None else optimizer.turn(what)

    @held_back()
    def reload(self, *, wait: bool = True) -> Handle:
        """Bring everything back, parameters first. Does nothing while it is present.

        Args:
            wait: return when everything was copied. Else the current stream waits for the
                parameters, so a forward may be launched at once, and ``optimizer.step()`` waits
                for the state.

        Raises:
            DeviceMemoryError: device memory is short. Everything is still in host memory; call
                again when there is some.
            ClosedError: in a forked process.
        """
        with self._turn("reload()"), storages.span("reload"):
            return self._reload(wait)

    def _reload(self, wait: bool, free_more: Callable[[], bool] | None = None) -> Handle:
        self._check()
        if self._is_away:
            optimizer = self._optimizer if self._moves_optimizer else None
            if optimizer is not None:
                optimizer.prepare_reload()
            handle = self._transfer.back(free_more)
            self._is_away = False
            self._cycles += 1
            self._guard.open()
            if (arrival := handle.arrival("params", "grads")) is not None:
                self._backend.current_stream().wait(arrival)
            if optimizer is not None:
                optimizer.set_present(handle.arrival())
        return self._transfer.last(wait=wait)

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

    @held_back()
    def close(self) -> None:
        """Bring everything back and give all host memory up. Idempotent.

        With ``keep_addresses`` tensors get ordinary memory, and other addresses.

        Raises:
            DeviceMemoryError: device memory is short; call again when there is some.
        """
        if self._is_closed:
            return
        self.reload()
        try:
            for memory in self._fixed.values():
                memory.move_out()
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                "close() of a PhaseOffloader with keep_addresses=True",
                reason=f"the device has no room at other addresses ({error})",
                remedy="free device memory, then call it again; everything is on the device",
            ) from error
        self._transfer.close()
        self._unhook()
        self._is_closed = True  # last: what has failed half-way goes on in the next call

    def statistics(self) -> PhaseStatistics:
        """Figures of the moves that have ended."""
        pool = self._transfer.pool
        last_out, last_back = self._transfer.last_out, self._transfer.last_back
        out, back = last_out.figures(), last_back.figures()
        return PhaseStatistics(
            offloaded={kind: out.get(kind, Figures()) for kind in KINDS},
            reloaded={kind: back.get(kind, Figures()) for kind in KINDS},
            offload_seconds=last_out.seconds,
            reload_seconds=last_back.seconds,
            freed_bytes=last_out.freed_bytes,
            host_bytes=pool.n_bytes,
            pinned_bytes=pool.pinned_bytes,
            pin_seconds=pool.seconds,
            host_bytes_by_holder=held_bytes(),
            cycles=self._cycles,
        )

    def __reduce__(self) -> NoReturn:
        raise copy_error(self, "build one for the other model")

    def _check(self) -> None:
        check_open("a PhaseOffloader", self._pid, is_closed=self._is_closed)

    # ------------------------------------------------------------------ what moves

    def _prepare(self) -> None:
        """Finish what is under way, and let FSDP2 give up gathered parameters."""
        if self._optimizer is not None:
            self._optimizer.prepare_offload()
        for group in self._groups:
            group.reshard()

    def _parameters(self) -> dict[str, Tensor]:
        return {
            f"{index}.{name}": parameter
            for index, model in enumerate(self._models)
            for name, parameter in model.named_parameters()
        }

    def _staging(self) -> list[StorageBlock]:
        optimizer = self._optimizer if self._moves_optimizer else None
        if optimizer is None or self._policies["state"] == "keep":
            return []
        return collect(("staging", tensor) for tensor in optimizer.staging_buffers())

    def _tensors(self, kind: str, parameters: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        if kind == "grads":
            return self._gradients.tensors(parameters)
        if kind == "state":
            return () if self._optimizer is None else self._optimizer.device_tensors()
        buffers = (
            (f"{index}.buffer.{name}", buffer)
            for index, model in enumerate(self._models)
            for name, buffer in model.named_buffers()
        )
        return (*parameters.items(), *buffers)

    def _blocks(self, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, list[OwnedBlock]]]:
        """Kinds with what moves of them; each storage once, and none that a kept kind shows."""
        known: set[int] = set()
        kept = [kind for kind in KINDS if self._policies[kind] == "keep"]
        for kind in kept:
            list(self._storages(kind, parameters, known))
        for kind in (kind for kind in KINDS if kind not in kept):
            chunks = self._fixed[kind].blocks() if kind in self._fixed else ()
            found: list[StorageBlock] = []
            for name, storage in self._storages(kind, parameters, known):
                if not is_movable(storage, self):
                    continue
                if storage.resizable():
                    found.append(StorageBlock(f"{kind}.{name}", storage))
                elif self._backend.device.type != "cpu":  # there nothing is lost if it stays
                    raise UnsupportedParameterError(
                        f"{kind} {name}",
                        reason="torch does not own its memory, so it cannot free it",
                        remedy="clone() it once after loading",
                    )
            yield kind, [*chunks, *in_order(found)]

    def _storages(
        self, kind: str, parameters: Mapping[str, Tensor], known: set[int]
    ) -> Iterator[tuple[str, torch.UntypedStorage]]:
        """Storages of a kind on the device that ``known``, which is extended, does not have."""
        device = self._backend.device
        for name, tensor in self._tensors(kind, parameters):
            for below, plain in dtensor.plain_tensors(tensor):
                storage = plain.untyped_storage()
                identity = storages.identity(storage)
                if storage.device == device and storage.nbytes() and identity not in known:
                    known.add(identity)
                    yield f"{name}{below}", storage

    def _keep_addresses(self) -> None:
        if not self._fixed:
            return
        self._backend.current_stream().synchronize()
        found = dict(self._blocks(self._parameters()))
        try:
            for kind, memory in self._fixed.items():
                memory.move_in(found[kind])
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                "PhaseOffloader(keep_addresses=True)",
                reason=f"the device has no room to move tensors ({error}); nothing has changed",
                remedy="free device memory, or leave keep_addresses out",
            ) from error
        self._backend.current_stream().synchronize()
        release_cached(self._backend.device)


def swap(*, out: PhaseOffloader, in_: PhaseOffloader, wait: bool = True) -> tuple[Handle, Handle]:
    """An offload of one set and a reload of another beside each other.

    Args:
        out: is offloaded.
        in_: is reloaded; where device memory is short, into what ``out`` has given up.
        wait: as of :meth:`PhaseOffloader.reload`. The call itself waits until ``out`` has given up
            as much as ``in_`` needs.

    Returns:
        The handles of ``out`` and of ``in_``.

    Raises:
        DeviceMemoryError: ``in_`` does not fit in the place of ``out``; both are away.
        HostMemoryError, PinningError, UnspentGradientError, SpentGradientError: ``out`` cannot be
            offloaded, see :meth:`PhaseOffloader.offload`; it stays, and ``in_`` is away.
        ClosedError: one of them is closed; nothing was moved.
    """
    in_._check()
    with held_back():
        one = out.offload(wait=False)
        try:
            with in_._turn("reload()"):
                other = in_._reload(False, one.release_next)
        except BaseException:
            one.wait()
            raise
        if wait:
            one.wait()
            other.wait()
    return one, other
