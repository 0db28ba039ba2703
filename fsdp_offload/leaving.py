"""``offload()`` and ``reload()``: the part of the optimizer's surface that phases of a job use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .absence import OptimizerAbsence
from .device import Gateway
from .health import Health
from .interrupts import held_back
from .moving import Trip
from .pipeline import state as state_io
from .pipeline.engine import Segment
from .pipeline.records import Record


class Leaving:
    """What an optimizer with device memory of its own can do with it between steps.

    A base of :class:`.HybridDeviceOptimizer` alone, which has what is declared here.
    """

    _absence: OptimizerAbsence
    _gateway: Gateway
    _health: Health
    _records: list[Record]
    _segments: list[Segment]
    _shown: defaultdict[Tensor, dict[str, Any]]
    _state_was_read: bool

    def _settle(self) -> None:
        raise NotImplementedError

    def _adopt_writes(self) -> None:
        raise NotImplementedError

    def synchronize(self) -> None:
        """See :meth:`.HybridDeviceOptimizer.synchronize`."""
        raise NotImplementedError

    @property
    def is_away(self) -> bool:
        """Whether device memory was given up by :meth:`offload`."""
        return self._absence.is_away

    @property
    def state_device(self) -> torch.device:
        """Where state of native parameters belongs now: the device, or while away the CPU."""
        return torch.device("cpu") if self.is_away else self._gateway.device

    def is_on_host(self, state: dict[str, Any], name: str) -> bool:
        """Whether a native parameter's state tensor is kept in host memory by its class."""
        return state[name].device.type == "cpu" and not self._absence.holds(state, name)

    @held_back()
    def reserve_offload(self) -> None:
        """Take the host memory of :meth:`offload` now, for the state that exists now.

        On CUDA, state on the device that other memory lies between moves together, so that the
        first :meth:`offload` gives the driver as much as later ones.

        Raises:
            SpentGradientError: between a backward that updated parameters and ``step()``.
            HostMemoryError, PinningError: as of the constructor; nothing was taken.
            DeviceMemoryError: others took device memory meanwhile: all is away, :meth:`reload` can
                be tried again.
            LaneError: an earlier update failed.
        """
        self._settle()
        if not self._absence.is_reserved(self._records, self._shown):
            self._at_rest(self._absence.reserve)

    @held_back()
    def offload(self, *, wait: bool = True) -> Trip:
        """Give up all device memory of the optimizer; its state stays readable, in host memory.

        State on the device is copied to page-locked host memory, which is taken at the first
        call and kept until :meth:`close`; staging buffers are just released. Until
        :meth:`reload`, ``step()`` raises, and ``state``, state dicts, loads and checkpoints work
        in host memory: what is loaded comes back with the reload. State tensors that were read
        before must not be used meanwhile. Released memory is torch's; ``torch.cuda.empty_cache()``
        gives it to other processes. While it is away already nothing happens.

        Args:
            wait: until the copies have ended. If not, memory is released as they end: call the
                trip's ``advance()`` or ``wait()``.

        Raises:
            SpentGradientError: between a backward that updated parameters and ``step()``.
            HostMemoryError, PinningError: no room in host memory; nothing was touched.
            DeviceMemoryError: no room on the device to pack small tensors in.
            LaneError: an earlier update failed.
        """
        self._settle()
        if not self._absence.is_away:
            self._at_rest(self._absence.leave)
        return self._absence.trip(wait=wait)

    @held_back()
    def reload(self, *, wait: bool = True) -> Trip:
        """Take device memory again and bring the state back. When it is back already, nothing
        happens.

        Args:
            wait: until the copies have ended. If not, ``step()`` follows them on the device, and
                whatever reads state waits for them.

        Raises:
            DeviceMemoryError: not enough device memory: all stays away, and a later call works.
            ClosedError: after :meth:`close`.
        """
        self._health.check(failed_ok=True)
        if self._absence.is_away:
            self._absence.arrive()
            was_read = self._state_was_read
            self._adopt_writes()
            self._state_was_read = was_read
            try:
                self._absence.come_back(self._records, self._shown, self._segments)
            finally:
                self._show_all()
        return self._absence.trip(wait=wait)

    def _at_rest(self, move: Callable[..., object]) -> None:
        """``move`` state, which is settled, while nothing uses staging; show what it replaced."""
        for segment in self._segments:
            segment.idle()
        try:
            move(self._records, self._shown, self._segments)
        finally:
            self._show_all()

    def _show_all(self) -> None:
        """State tensors are others than before."""
        for record in self._records:
            self._shown[record.parameter].update(state_io.expose(record))

    def check_present(self, what: str) -> None:
        """Refuse ``what`` while the optimizer is failed, closed or away.

        Raises:
            AwayError, ClosedError, LaneError: it is.
        """
        self._health.check()
        self._absence.check(what)
        self._absence.tidy()
