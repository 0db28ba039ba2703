"""``PhaseOffloader``: move parameters, gradients and optimizer state to host memory for a phase."""

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
from ..core.arguments import backend_of, check_holds, check_optimizer, modules_of
from ..core.config import TransferConfig, brief, check_choice, check_keywords
from ..core.devices import release_cached
from ..core.errors import (
    ConfigError,
    DeviceMemoryError,
    UnsupportedParameterError,
    check_open,
    copy_error,
)
from ..core.fsdp import find_groups
from ..core.interrupts import defer_sigint
from ..core.offloadable import Offloadable, offloadable_of, remove_all
from ..link import address_range, held_bytes
from ..link.block import OwnedBlock, StorageBlock, collect, in_order
from ..link.transfer import Figures, Handle, Transfer
from .guard import Gradients, ModelGuard, PlainOptimizer
from .region import FixedMemory, is_movable

KINDS: Final = ("params", "grads", "state")
"""Kinds of memory, in the order in which they move."""

_CHOICES: Final[dict[str, tuple[object, ...]]] = {
    "params": ("save", "keep"),
    "grads": (None, "drop", "save", "keep"),
    "state": ("save", "keep"),
    "keep_addresses": (True, False),
}


@dataclass(frozen=True)
class PhaseStatistics:
    """Figures of the last offload and the last reload that copied, after they have been waited
    for."""

    offloaded: Mapping[str, Figures]  # by kind: params, grads, state
    reloaded: Mapping[str, Figures]
    offload_seconds: float  # from the call to its end, on the host
    reload_seconds: float
    freed_bytes: int  # that the offload returned to the driver; 0 on a CPU
    host_bytes: int  # host memory for offloaded contents
    pinned_bytes: int  # page-locked part of host_bytes
    pin_seconds: float  # to allocate and page-lock it
    host_bytes_by_holder: dict[str, int]  # of this whole process; host_memory= bounds the sum
    cycles: int  # reloads

    def __str__(self) -> str:
        out = _move(self.offloaded, self.offload_seconds)
        back = _move(self.reloaded, self.reload_seconds)
        return f"out: {out}; back: {back}; {brief(self.host_bytes)} reserved on the host"


class PhaseOffloader:
    """Moves a model's and its optimizer's device memory to the host, and back.

    While the memory is offloaded, ``state_dict`` and checkpoints read host memory; forward,
    ``optimizer.step()`` and loads raise :class:`AwayError`. Parameters, gradients, views and
    DTensors stay the same objects; only their memory is freed.

    The offloader notices calls of modules and of ``optimizer``. Any other use of an offloaded
    tensor (``print(model.weight)``, a kernel over it) accesses no memory, and may crash the
    process.

    Ctrl-C (SIGINT) during a move takes effect after the move. Call it from one thread at a time.

    Args:
        model: the module, or a list of modules; FSDP2 modules are resharded by each offload.
        optimizer: a :class:`HybridDeviceOptimizer`, any ``torch.optim.Optimizer``, or None.
        params: parameters and buffers. ``"save"`` copies them out and in. ``"keep"`` leaves them on
            the device, and forward works while the rest is away, unless gradients are saved.
        grads: ``None`` drops gradients, and raises if no ``step()`` has consumed one. ``"drop"``
            drops those, too. ``"save"`` copies them out and in. ``"keep"`` leaves them on the
            device.
        state: optimizer state: ``"save"`` or ``"keep"``.
        keep_addresses: move existing parameters, buffers and state to new addresses once, now, and
            restore them there at each reload. Otherwise addresses change with each cycle.
        transfer: how to allocate host memory (``pin``, ``host_memory``).

    Raises:
        ConfigError: an argument is wrong, another PhaseOffloader keeps addresses of the same
            tensors, or ``keep_addresses`` comes before the first ``step()`` of a plain optimizer.
        DeviceError: tensors on several devices, or the device is unusable or cannot keep addresses.
        UnsupportedParameterError: torch does not own a tensor's memory.
        UnsupportedTorchError: this version of torch lacks a private name of FSDP2.
        SpentGradientError: called between a backward that updated parameters and ``step()``.
        HostMemoryError: host memory is short; nothing has changed.
        PinningError: the driver refused to page-lock it; nothing has changed.
        DeviceMemoryError: ``keep_addresses`` needs about 0.5 GiB more; nothing has changed.
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
        **unknown: object,
    ) -> None:
        check_keywords("PhaseOffloader", unknown, (*_CHOICES, "transfer"))
        self._policies = {"params": params, "grads": grads, "state": state}
        given = {**self._policies, "keep_addresses": keep_addresses}
        for name, choices in _CHOICES.items():
            check_choice(name, given[name], choices, "not one of its values")
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
        if optimizer is not None:
            check_holds(optimizer, models)
            self._optimizer = self._optimizer or PlainOptimizer(optimizer, backend)
        self._groups = groups = find_groups(models)
        self._gradients = Gradients(grads, groups, optimizer)
        self._fixed = {
            kind: FixedMemory(kind, backend.device, address_range.CHUNK_BYTES, owner=self)
            for kind in ("params", "state")
            if keep_addresses and self._policies[kind] == "save"
        }
        kinds = [kind for kind in KINDS if optimizer is not None or kind != "state"]
        saved = ", ".join(kind for kind in kinds if self._policies[kind] == "save") or "nothing"
        self._transfer = Transfer(backend, transfer, f"PhaseOffloader: {saved}", empties_cache=True)
        self._guard = ModelGuard(models, self, allows_forward=params == "keep" and grads != "save")
        self._moved: Offloadable | None = None  # the optimizer, if this one has offloaded it
        self._is_away = self._is_closed = False
        self._pid, self._cycles = os.getpid(), 0
        with defer_sigint():
            self._reserve()
            hooks = self._gradients.hooks()
            if isinstance(self._optimizer, PlainOptimizer):
                hooks += self._optimizer.hooks()
            self._unhook = weakref.finalize(self, remove_all, hooks)

    def _reserve(self) -> None:
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
        """Whether memory is offloaded: from the call of :meth:`offload` to the return of
        :meth:`reload`."""
        return self._is_away

    @defer_sigint()
    def offload(self, *, wait: bool = True) -> Handle:
        """Copy everything to host memory and free its device memory. Does nothing while offloaded.

        If this raises, everything is still on the device.

        Args:
            wait: return after the memory is back at the driver. Otherwise copies overlap later
                work; :meth:`Handle.is_done` frees completed ones to torch's allocator, and
                :meth:`Handle.wait` all of them to the driver.

        Raises:
            HostMemoryError, PinningError: new contents do not fit into host memory.
            UnspentGradientError: a gradient would be lost; see ``grads``.
            SpentGradientError: called between a backward that updated parameters and ``step()``.
            UnsupportedParameterError: torch does not own some memory.
            ConfigError: the optimizer was wrapped after it was passed.
            ClosedError: called after :meth:`close`, or in a forked process.
        """
        self._check()
        with self._turn("offload()"), storages.span("offload"):
            if not self._is_away:
                self._offload()
        return self._transfer.last(wait=wait)

    def _offload(self) -> None:
        # Another offloader may have offloaded the optimizer, and then reloads it.
        is_mine = self._optimizer is not None and not self._optimizer.is_away
        self._moved = self._optimizer if is_mine else None
        self._prepare()
        parameters = self._parameters()
        self._gradients.check(parameters)
        staging: list[StorageBlock] = []
        if self._moved is not None and self._policies["state"] == "save":
            staging = collect(("staging", tensor) for tensor in self._moved.staging_buffers())
        self._transfer.out(self._blocks(parameters), staging)
        # All copies are enqueued; the rest only records that, and cannot fail.
        self._is_away = True
        self._guard.close(self._transfer)
        if self._moved is not None:
            self._moved.set_away(self._transfer)
        self._gradients.drop(parameters)

    def _turn(self, what: str) -> contextlib.AbstractContextManager[None]:
        optimizer = self._optimizer
        return contextlib.nullcontext() if optimizer is None else optimizer.turn(what)

    @defer_sigint()
    def reload(self, *, wait: bool = True) -> Handle:
        """Copy everything back to the device, parameters first. Does nothing while present.

        Args:
            wait: return after everything was copied. Otherwise the current stream waits for the
                parameters, so a forward may follow at once, and ``optimizer.step()`` waits for the
                state.

        Raises:
            DeviceMemoryError: device memory is short. Everything is still in host memory; free some
                and call again.
            ClosedError: called in a forked process.
        """
        with self._turn("reload()"), storages.span("reload"):
            return self._reload(wait)

    def _reload(self, wait: bool, free_more: Callable[[], bool] | None = None) -> Handle:
        self._check()
        if self._is_away:
            if (optimizer := self._moved) is not None:
                optimizer.prepare_reload()
            handle = self._transfer.back(free_more)
            self._is_away = False
            self._cycles += 1
            self._guard.open()
            # step() waits for the state, so a forward need not.
            if (arrival := handle.arrival("params", "grads")) is not None:
                self._backend.current_stream().wait(arrival)
            if optimizer is not None:
                optimizer.set_present(handle.arrival())
        return self._transfer.last(wait=wait)

    @contextlib.contextmanager
    def away(self) -> Iterator[Handle]:
        """Call :meth:`offload` at the beginning and :meth:`reload` at the end, also after
        exceptions.

        Memory that was offloaded before stays so: an inner context leaves the reload to the outer
        one.
        """
        was_away = self._is_away
        try:
            yield self.offload()
        finally:
            if self._is_away and not was_away:
                self.reload()

    @defer_sigint()
    def close(self) -> None:
        """Copy everything back and free all host memory. Idempotent.

        With ``keep_addresses``, tensors move to ordinary memory, and get other addresses.

        Raises:
            DeviceMemoryError: device memory is short; free some and call again.
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
        self._is_closed = True  # last, so that another call continues after a failure

    def statistics(self) -> PhaseStatistics:
        """Return figures of the moves that have ended."""
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

    def __repr__(self) -> str:
        device = self._backend.device
        if self._is_closed:
            return f"PhaseOffloader({device}, closed)"
        here, away = _sizes(self._device_bytes()), _sizes(self._transfer.away_bytes)
        shown = f"away: {away}; on the device: {here}" if self._is_away else f"present: {here}"
        reserved = brief(self._transfer.pool.n_bytes)
        return f"PhaseOffloader({device}, {shown}; {reserved} reserved on the host)"

    def _device_bytes(self) -> dict[str, int]:
        """Bytes by kind that are on the device, without gradients that an offload drops."""
        parameters, known = self._parameters(), set[int]()
        return {
            kind: sum(
                storage.nbytes()
                for _, storage in self._storages(kind, parameters, known)
                if getattr(storages.owner_of(storage), "is_present", True)
            )
            for kind in KINDS
        }

    def _check(self) -> None:
        check_open("PhaseOffloader", self._pid, is_closed=self._is_closed)

    # ------------------------------------------------------------------ what moves

    def _prepare(self) -> None:
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

    def _tensors(self, kind: str, parameters: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        if kind == "grads":
            return self._gradients.tensors(parameters)
        if kind == "state":
            return () if self._optimizer is None else self._optimizer.device_tensors()
        buffers = (
            (f"{index}.{name}", buffer)  # no parameter has the same name
            for index, model in enumerate(self._models)
            for name, buffer in model.named_buffers()
        )
        return (*parameters.items(), *buffers)

    def _blocks(self, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, list[OwnedBlock]]]:
        """Yield each kind with the blocks that move. A storage moves once, and not at all if a kept
        kind has it."""
        known: set[int] = set()
        kept = [kind for kind in KINDS if self._policies[kind] == "keep"]
        for kind in kept:
            list(self._storages(kind, parameters, known))  # fills `known`
        for kind in (kind for kind in KINDS if kind not in kept):
            chunks = self._fixed[kind].blocks() if kind in self._fixed else ()
            found: list[StorageBlock] = []
            for name, storage in self._storages(kind, parameters, known):
                if not is_movable(storage, self):
                    continue
                if storage.resizable():
                    found.append(StorageBlock(f"{kind}.{name}", storage))
                elif self._backend.device.type != "cpu":  # on the CPU it can stay
                    raise UnsupportedParameterError(
                        f"{kind} {name}",
                        reason="torch does not own its memory, so it cannot free it",
                        remedy="clone() it once after loading",
                    )
            yield kind, [*chunks, *in_order(found)]

    def _storages(
        self, kind: str, parameters: Mapping[str, Tensor], known: set[int]
    ) -> Iterator[tuple[str, torch.UntypedStorage]]:
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
        plain = self._optimizer if isinstance(self._optimizer, PlainOptimizer) else None
        if plain is not None and "state" in self._fixed and not plain.device_tensors():
            raise ConfigError(
                "keep_addresses=True with an optimizer that has no state",
                reason="state that step() makes would get another address at each reload",
                remedy='build the PhaseOffloader after the first step(), or pass state="keep"',
            )
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


def _move(by_kind: Mapping[str, Figures], seconds: float) -> str:
    whole = Figures(sum(each.n_bytes for each in by_kind.values()), seconds)
    return f"{brief(whole.n_bytes)} in {seconds:.2f} s, {whole.gb_per_second:.1f} GB/s"


def _sizes(by_kind: Mapping[str, int]) -> str:
    sizes = (f"{kind} {brief(n_bytes)}" for kind, n_bytes in by_kind.items() if n_bytes)
    return ", ".join(sizes) or "nothing"


def swap(*, out: PhaseOffloader, in_: PhaseOffloader, wait: bool = True) -> tuple[Handle, Handle]:
    """Offload one set and reload another at the same time.

    Args:
        out: the set to offload.
        in_: the set to reload; if device memory is short, into memory that ``out`` has freed.
        wait: see :meth:`PhaseOffloader.reload`. The call itself waits until ``out`` has freed as
            much as ``in_`` needs.

    Returns:
        The handles of ``out`` and of ``in_``.

    Raises:
        DeviceMemoryError: ``in_`` does not fit in the memory of ``out``; both are offloaded.
        HostMemoryError, PinningError, UnspentGradientError, SpentGradientError: see
            :meth:`PhaseOffloader.offload`; ``out`` stays on the device, and ``in_`` is offloaded.
        ClosedError: one of them is closed; nothing moved.
    """
    in_._check()
    with defer_sigint():
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
