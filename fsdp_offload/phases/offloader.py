"""``PhaseOffloader``: parameters, gradients and optimizer state leave the device for a while."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from ..core import dtensor
from ..core import storage as storages
from ..core.arguments import backend_of, modules_of
from ..core.backend import Backend, free_bytes, release_cached
from ..core.config import TransferConfig
from ..core.errors import ClosedError, ConfigError, DeviceMemoryError, UnsupportedParameterError
from ..core.fsdp import find_groups
from ..core.interrupts import held_back
from ..core.offloadable import Offloadable
from ..memory.transfer import Block, Figures, Handle, StorageBlock, Transfer, collect
from .fixed import FixedMemory, movable
from .gradients import Gradients
from .guard import ModelGuard, PlainOptimizer

KINDS: Final = ("params", "grads", "state")
"""In the order in which they travel."""

_CHOICES: Final[dict[str, tuple[object, ...]]] = {
    "params": ("save", "keep"),
    "grads": (None, "drop", "save", "keep"),
    "state": ("save", "keep"),
    "keep_addresses": (True, False),
}


@dataclass(frozen=True)
class PhaseStatistics:
    """Figures of the last offload and the last reload that were waited for."""

    offloaded: Mapping[str, Figures]
    """By kind: ``params``, ``grads``, ``state``."""

    reloaded: Mapping[str, Figures]
    """The same, back."""

    offload_seconds: float
    """From the call to its end, as the host saw it."""

    reload_seconds: float
    """The same, back."""

    freed_bytes: int
    """Device memory that the last offload gave back, as the driver saw it; 0 on a CPU."""

    host_bytes: int
    """Host memory held for what leaves."""

    pinned_bytes: int
    """Page-locked part of ``host_bytes``."""

    pin_seconds: float
    """To obtain and page-lock it."""

    cycles: int
    """Reloads that have ended."""


class PhaseOffloader:
    """Moves what a model and its optimizer keep on the device to host memory, and back.

    While it is away, ``state_dict`` and checkpoints work from host memory; forward,
    ``optimizer.step()`` and loads raise :class:`AwayError`. Objects stay the same: parameters,
    gradients, views and DTensors; only their memory goes.

    Seen are calls of modules and of ``optimizer``. A tensor that is used by other ways while it is
    away (``print(model.weight)``, a kernel over it) has no memory, and the process may die of it.

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
        keep_addresses: move parameters, buffers and state that exist now to new addresses, once,
            here; they come back to these. Else addresses change with each cycle.
        transfer: how to obtain host memory (``pin``, ``huge_pages``, ``numa``, ``host_budget``).

    Raises:
        ConfigError: an argument is wrong, or another PhaseOffloader keeps addresses of the same
            tensors.
        DeviceError: several devices, one that torch cannot use, or that cannot keep addresses.
        UnsupportedParameterError: memory that torch does not own.
        UnsupportedTorchError: this version of torch lacks a private name of FSDP2.
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
        _check_choices(**self._policies, keep_addresses=keep_addresses)
        self._models = models = modules_of(model)
        tensors = [t for m in models for t in (*m.parameters(), *m.buffers())]
        if not tensors:
            raise ConfigError(
                "a model without parameters and buffers",
                reason="there is nothing to move",
                remedy="pass the module that holds them",
            )
        _check_optimizer(optimizer)
        parameters = [t for t in tensors if isinstance(t, nn.Parameter)]
        self._backend = backend = backend_of(parameters or tensors)
        self._device = device = backend.device
        self._optimizer = _offloadable(optimizer, backend)
        self._groups = groups = find_groups(models)
        self._gradients = Gradients(grads, groups, optimizer)
        self._fixed = {
            kind: FixedMemory(kind, device)
            for kind in ("params", "state")
            if keep_addresses and self._policies[kind] == "save"
        }
        self._transfer = Transfer(backend, transfer or TransferConfig(), self._locate)
        self._guard = ModelGuard(models, self)
        self._is_away = self._is_closed = self._has_optimizer = False
        self._lock, self._pid = threading.RLock(), os.getpid()
        self._last = PhaseStatistics({}, {}, 0.0, 0.0, 0, 0, 0, 0.0, 0)
        self._free_before: int | None = None
        with held_back():
            try:
                self._prepare()
                self._keep_addresses()
                batches = list(self._batches(self._parameters()))
                self._transfer.reserve([block for _, blocks in batches for block in blocks])
            except BaseException:
                self._give_back()
                raise

    # ------------------------------------------------------------------ surface

    @property
    def is_away(self) -> bool:
        """From the call of :meth:`offload` to the return of :meth:`reload`."""
        return self._is_away

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
            UnsupportedParameterError: there is memory that torch does not own.
            ClosedError: after :meth:`close`, or in a forked process.
        """
        with self._lock, held_back():
            self._check()
            if not self._is_away:
                self._leave()
            handle = self._transfer.handle
            if wait:
                handle.wait()
            return handle

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
        return self._reload(wait)

    def _reload(self, wait: bool, free_more: Callable[[], bool] | None = None) -> Handle:
        with self._lock, held_back():
            self._check()
            if self._is_away:
                self._come_back(free_more)
            handle = self._transfer.handle
            if wait:
                handle.wait()
            return handle

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

        With ``keep_addresses`` tensors get ordinary memory, and other addresses.

        Raises:
            DeviceMemoryError: it cannot come back, or needs room; call again when there is some.
        """
        with self._lock, held_back():
            if self._is_closed:
                return
            self.reload()
            try:
                for fixed in self._fixed.values():
                    fixed.move_out()
            except torch.OutOfMemoryError as error:
                raise DeviceMemoryError(
                    "close() of a PhaseOffloader with keep_addresses=True",
                    reason=f"no room for {fixed.extents.name} at other addresses ({error})",
                    remedy="free device memory, then call it again; everything is on the device",
                ) from error
            self._give_back()
            self._is_closed = True  # last: what has failed half-way goes on in the next call

    def statistics(self) -> PhaseStatistics:
        """Figures of the moves that have ended."""
        arenas = self._transfer.buffers.statistics()
        return replace(
            self._last,
            host_bytes=sum(arena.n_bytes for arena in arenas),
            pinned_bytes=sum(arena.n_bytes for arena in arenas if arena.pinned),
            pin_seconds=sum(arena.touch_seconds + arena.pin_seconds for arena in arenas),
        )

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "a copy or a pickle of a PhaseOffloader",
            reason="it owns host memory and stands before one model",
            remedy="build one for the other model",
        )

    # ------------------------------------------------------------------ out

    def _leave(self) -> None:
        # The user may have offloaded the optimizer alone: then it also comes back alone.
        optimizer = self._optimizer
        self._has_optimizer = optimizer is not None and not optimizer.is_away
        self._prepare()
        parameters = self._parameters()
        self._gradients.check(parameters)
        self._free_before = free_bytes(self._device)
        self._transfer.out(self._batches(parameters), self._staging(), self._has_left)
        # Everything is on its way: what follows only says so, and cannot fail.
        self._is_away = True
        self._guard.close(self._transfer)
        if self._has_optimizer and optimizer is not None:
            optimizer.set_away(self._transfer)
        self._gradients.leave(parameters)

    def _prepare(self) -> None:
        """Finish what is under way, and let FSDP2 give up gathered parameters."""
        if self._optimizer is not None:
            self._optimizer.prepare_offload()
        for group in self._groups:
            group.finish_gather()
        for module in (module for model in self._models for module in model.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()

    def _staging(self) -> list[Block]:
        if not self._has_optimizer or self._optimizer is None or self._policies["state"] != "save":
            return []
        return [*collect(("staging", tensor) for tensor in self._optimizer.staging_buffers())]

    def _has_left(self, handle: Handle) -> None:
        release_cached(self._device)
        free = free_bytes(self._device)
        known = free is not None and self._free_before is not None
        self._last = replace(
            self._last,
            offloaded=_by_kind(handle),
            offload_seconds=handle.seconds,
            freed_bytes=free - self._free_before if known else 0,  # type: ignore[operator]
        )

    # ------------------------------------------------------------------ what leaves

    def _parameters(self) -> dict[str, Tensor]:
        return {
            f"{index}.{name}": parameter
            for index, model in enumerate(self._models)
            for name, parameter in model.named_parameters()
        }

    def _named(self, kind: str, parameters: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        if kind == "grads":
            return self._gradients.named(parameters)
        if kind == "state":
            return () if self._optimizer is None else self._optimizer.device_tensors()
        buffers = (
            (f"{index}.buffer.{name}", buffer)
            for index, model in enumerate(self._models)
            for name, buffer in model.named_buffers()
        )
        return (*parameters.items(), *buffers)

    def _batches(self, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, list[Block]]]:
        """Kinds with what leaves of them; each storage once, and none that a kept kind shows."""
        known: set[int] = set()
        moving = [kind for kind in KINDS if self._policies[kind] != "keep"]
        for kind in KINDS:
            if kind not in moving:
                self._collect(kind, parameters, known)
        for kind in moving:
            fixed = self._fixed.get(kind)
            chunks = [] if fixed is None else fixed.extents.chunks()
            yield kind, [*chunks, *self._collect(kind, parameters, known)]

    def _collect(
        self, kind: str, parameters: Mapping[str, Tensor], known: set[int]
    ) -> list[StorageBlock]:
        """Storages on the device that ``known``, which is extended, does not have."""
        found: list[StorageBlock] = []
        fixed = list(self._fixed.values())
        is_kept = self._policies[kind] == "keep"
        for name, tensor in self._named(kind, parameters):
            for below, part in _dense(tensor):
                storage = part.untyped_storage()
                identity = storages.identity(storage)
                if storage.device != self._device or not storage.nbytes() or identity in known:
                    continue
                known.add(identity)
                if is_kept or not movable(storage, fixed):
                    continue
                if not storage.resizable():
                    if self._device.type == "cpu":
                        continue  # nothing is lost by leaving it
                    raise UnsupportedParameterError(
                        f"{kind} {name}",
                        reason="torch does not own its memory, so it cannot be given up",
                        remedy="clone() it once after loading",
                    )
                found.append(StorageBlock(f"{kind}.{name}{below}", storage))
        return found

    def _keep_addresses(self) -> None:
        if not self._fixed:
            return
        self._backend.current_stream().synchronize()
        batches = dict(self._batches(self._parameters()))
        try:
            for kind, fixed in self._fixed.items():
                blocks = (block for block in batches[kind] if isinstance(block, StorageBlock))
                fixed.move_in([block.storage for block in blocks])
        except BaseException as error:
            for fixed in self._fixed.values():
                fixed.move_out()
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            raise DeviceMemoryError(
                "PhaseOffloader(keep_addresses=True)",
                reason=f"no device memory to move tensors with ({error}); all is as before",
                remedy="free some, or leave keep_addresses out",
            ) from error
        self._backend.current_stream().synchronize()
        release_cached(self._device)

    def _locate(self, storage: torch.UntypedStorage) -> tuple[str, int] | None:
        found = (fixed.extents.locate(storage) for fixed in self._fixed.values())
        return next((place for place in found if place is not None), None)

    # ------------------------------------------------------------------ back

    def _come_back(self, free_more: Callable[[], bool] | None) -> None:
        optimizer = self._optimizer if self._has_optimizer else None
        if optimizer is not None:
            optimizer.prepare_reload()
        try:
            handle = self._transfer.back(free_more, self._has_returned)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"reload of {self._transfer.away_bytes} bytes",
                reason=f"the device has no room for them ({error}); they are in host memory",
                remedy="free device memory, in other processes too, then call reload() again",
            ) from error
        self._is_away = False
        self._guard.open()
        if (arrival := handle.arrival("params", "grads")) is not None:
            self._backend.current_stream().wait(arrival)
        if optimizer is not None:
            optimizer.set_present(handle.arrival())
        self._gradients.come_back()

    def _has_returned(self, handle: Handle) -> None:
        self._last = replace(
            self._last,
            reloaded=_by_kind(handle),
            reload_seconds=handle.seconds,
            cycles=self._last.cycles + 1,
        )

    def _give_back(self) -> None:
        self._transfer.close()
        self._gradients.close()
        if isinstance(self._optimizer, PlainOptimizer):
            self._optimizer.close()

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
    """Let one set leave while another comes: an offload and a reload beside each other.

    Args:
        out: goes away.
        in_: comes back; where device memory is short, into what ``out`` has left.
        wait: as of :meth:`PhaseOffloader.reload`. The call itself waits for as much of ``out`` to
            leave as ``in_`` needs room for.

    Returns:
        The handles of ``out`` and of ``in_``.

    Raises:
        DeviceMemoryError: ``in_`` does not fit although ``out`` has left; both are away.
        HostMemoryError, PinningError, UnspentGradientError: ``out`` cannot leave, see
            :meth:`PhaseOffloader.offload`; it stays, and ``in_`` is away.
        ClosedError: one of them is closed; nothing was moved.
    """
    in_._check()
    with contextlib.ExitStack() as entered:
        # In one order: another thread may swap them the other way.
        for each in sorted((out, in_), key=id):
            entered.enter_context(each._lock)
        entered.enter_context(held_back())
        going = out.offload(wait=False)
        try:
            coming = in_._reload(False, going.release_next)
        except BaseException:
            going.wait()
            raise
        if wait:
            going.wait()
            coming.wait()
    return going, coming


def _by_kind(handle: Handle) -> dict[str, Figures]:
    found = handle.figures()
    return {kind: found.get(kind, Figures(0, 0.0)) for kind in KINDS}


def _dense(tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The plain, strided tensors that hold its elements here, with a name each."""
    shard = dtensor.with_history(tensor)
    if type(shard) in (Tensor, nn.Parameter) and shard.layout is torch.strided:  # nearly always
        return [("", shard)]
    return dtensor.plain_tensors(tensor)


def _offloadable(optimizer: Any, backend: Backend) -> Offloadable | None:
    if optimizer is None or isinstance(optimizer, Offloadable):
        return optimizer
    return PlainOptimizer(optimizer, backend)


def _check_choices(**given: object) -> None:
    for name, choices in _CHOICES.items():
        value = given[name]
        if value not in choices or not isinstance(value, str | bool | None):  # 1 is no True
            quoted = (f'"{each}"' if isinstance(each, str) else str(each) for each in choices)
            raise ConfigError(
                f"{name}={value!r}", reason="unknown choice", remedy="use " + " or ".join(quoted)
            )


def _check_optimizer(optimizer: object) -> None:
    """Refuse what is no optimizer, or one that is wrapped."""
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer of type {type(optimizer).__name__}",
            reason="not a torch.optim.Optimizer",
            remedy="pass the optimizer itself, or None",
        )
    if getattr(getattr(optimizer, "__dict__", {}).get("step"), "forwards_to_wrapper", False):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__}",
            reason="it is wrapped: its HybridDeviceOptimizer holds the state",
            remedy="pass the wrapper",
        )
