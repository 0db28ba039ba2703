"""State of a ``HybridDeviceOptimizer`` on the device: listed, and replaced while offloaded.

Each holder of a state tensor on the device (a parameter, a slice, the class's own dict) holds the
host copy instead while it is offloaded. So all readers of state (``state``, state dicts,
checkpoints) read host memory without knowing. Views cut at construction stay: the storage object is
the same, and nothing reads them between steps.

This covers state without a host copy, state that classes keep themselves, and step counts that a
kernel reads on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor

from ..core import dtensor
from ..core import storage as storages
from ..core.backend import Event
from ..core.errors import AwayError
from ..core.offloadable import HostCopies
from ..update.params import ParamState
from .reservation import Reservation

Shown = Mapping[Tensor, dict[str, Any]]


class Held(NamedTuple):
    """A tensor that may be offloaded, as ``holder[name]``."""

    key: str  # the same at each offload
    holder: dict[str, Any]
    name: str


def held_by(params: Sequence[ParamState], shown: Shown) -> Iterator[Held]:
    """Yield all state tensors that can lie on the device."""
    for param in params:
        key = f"{param.index}"
        if param.lane == "resident":
            for name in param.tensors:
                yield Held(f"{key}.{name}", param.tensors, name)
        if param.lane != "host":
            for kind in param.schema.role("scalar"):
                for index, sliced in enumerate(param.slices):
                    yield Held(f"{key}.{kind.name}.{index}", sliced.state, kind.name)
    managed = {param.parameter for param in params}
    others = [state for parameter, state in shown.items() if parameter not in managed]
    for index, state in enumerate(others):  # the class's own, and of frozen parameters
        for name, value in state.items():
            if isinstance(value, Tensor):
                yield Held(f"own.{index}.{name}", state, name)


class DeviceState:
    """State of one optimizer on the device; an :class:`.Offloadable`.

    ``finish`` completes all work, so that memory is up to date; ``turn``: see
    :class:`.Offloadable`.
    """

    def __init__(
        self,
        reserved: Reservation,
        *,
        finish: Callable[[], None],
        turn: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._reserved, self._view = reserved, reserved.view
        self.turn = turn
        self._finish = finish
        self._copies: HostCopies | None = None
        self._arrival: Event | None = None
        self._replaced: list[tuple[Held, Tensor]] = []

    @property
    def is_away(self) -> bool:
        """Whether device memory is offloaded."""
        return self._copies is not None

    @property
    def shows_copies(self) -> bool:
        """Whether host copies stand in for device state."""
        return bool(self._replaced)

    def check(self, what: str) -> None:
        """Refuse ``what`` while the optimizer is offloaded.

        Raises:
            AwayError: it is offloaded.
        """
        if self._copies is not None:
            raise AwayError(
                f"{what} of an offloaded optimizer",
                reason="its state has left the device; nothing was changed",
                remedy="call reload() of its PhaseOffloader first",
            )

    def wait(self) -> None:
        """Block until the copies, out or back, are complete."""
        if self._copies is not None:
            self._copies.wait()
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None

    def prepare_offload(self) -> None:
        """See :class:`.Offloadable`."""
        self._finish()
        # Discarded prefetches may still be running.
        self._reserved.engine.ring.finish_transfers()

    def prepare_reload(self) -> None:
        """See :class:`.Offloadable`."""
        self.wait()
        self._view.adopt_writes(self._reserved.params, is_away=True, again=True)

    def device_tensors(self) -> list[tuple[str, Tensor]]:
        """See :class:`.Offloadable`. Omits weights and gradients that a class keeps in its state,
        which the optimizer must not move."""
        params, shown = self._reserved.params, self._view.shown
        device = self._reserved.backend.device
        foreign: set[int] = set()
        for parameter in {*shown, *(param.parameter for param in params)}:
            for tensor in (parameter, parameter.grad):
                if tensor is not None:
                    found = dtensor.plain_tensors(tensor)
                    foreign.update(storages.identity(t.untyped_storage()) for _, t in found)
        return [
            (f"{held.key}{below}", plain)
            for held in held_by(params, shown)
            for below, plain in dtensor.plain_tensors(held.holder[held.name])
            if plain.device == device and storages.identity(plain.untyped_storage()) not in foreign
        ]

    def staging_buffers(self) -> list[Tensor]:
        """See :class:`.Offloadable`."""
        return self._reserved.engine.staging()

    def set_away(self, copies: HostCopies) -> None:
        """See :class:`.Offloadable`."""
        params = self._reserved.params
        for held in list(held_by(params, self._view.shown)):
            original = held.holder[held.name]
            if (copy := copies.of(original)) is not None:
                held.holder[held.name] = copy
                self._replaced.append((held, original))
        self._copies, self._arrival = copies, None
        self._view.refresh(params)

    def set_present(self, arrival: Event | None) -> None:
        """See :class:`.Offloadable`."""
        for held, original in self._replaced:
            held.holder[held.name] = original
        self._replaced.clear()
        self._copies, self._arrival = None, arrival
        ready = self._reserved.backend.current_stream().record()
        self._reserved.engine.follow(ready if arrival is None else arrival, ready)
        self._view.refresh(self._reserved.params)
