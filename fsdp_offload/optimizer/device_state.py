"""State of a ``HybridDeviceOptimizer`` that lies on the device: listed, and replaced while away.

[Note: away, state is host memory]
What holds a state tensor on the device (a parameter, a slice, the class's own dict) holds its host
copy instead while it is away. So whatever reads state (``state``, state dicts, checkpoints) goes to
host memory without knowing. Views that the lanes cut at construction stay: the storage object is
the same, and nothing looks at them between steps.

Offloaded are the resident lane's state, what classes keep by themselves, and step counts that a
kernel wants on the device. What stays: a checksum and a flag per host bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import dtensor
from ..core import storage as storages
from ..core.backend import Event
from ..core.errors import AwayError
from ..core.offloadable import HostCopies
from ..update.params import ParamState

Shown = Mapping[Tensor, dict[str, Any]]


class Held(NamedTuple):
    """A tensor that may be offloaded, as ``holder[name]``."""

    key: str  # the same at each offload
    holder: dict[str, Any]
    name: str


def held_by(params: Sequence[ParamState], shown: Shown) -> Iterator[Held]:
    """All state tensors that can lie on the device."""
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
    for index, state in enumerate(others):  # kept by the class itself, or of frozen parameters
        for name, value in state.items():
            if isinstance(value, Tensor):
                yield Held(f"own.{index}.{name}", state, name)


def tensors_on(
    device: torch.device, params: Sequence[ParamState], shown: Shown
) -> list[tuple[str, Tensor]]:
    """Plain tensors of state on ``device``, without weights and gradients, which a class may keep
    in its state and which are not the optimizer's to move."""
    foreign: set[int] = set()
    for parameter in {*shown, *(param.parameter for param in params)}:
        for tensor in (parameter, parameter.grad):
            if tensor is not None:
                found = dtensor.plain_tensors(tensor)
                foreign.update(storages.identity(plain.untyped_storage()) for _, plain in found)
    return [
        (f"{held.key}{below}", plain)
        for held in held_by(params, shown)
        for below, plain in dtensor.plain_tensors(held.holder[held.name])
        if plain.device == device and storages.identity(plain.untyped_storage()) not in foreign
    ]


class DeviceState:
    """Whether state is away, and its host copies."""

    def __init__(self) -> None:
        self._copies: HostCopies | None = None
        self._arrival: Event | None = None
        self._replaced: list[tuple[Held, Tensor]] = []

    @property
    def is_away(self) -> bool:
        """Whether device memory was given up."""
        return self._copies is not None

    @property
    def shows_copies(self) -> bool:
        """Whether some of it is in host memory for now."""
        return bool(self._replaced)

    def check(self, what: str) -> None:
        """Refuse ``what`` while it is.

        Raises:
            AwayError: it is.
        """
        if self._copies is not None:
            raise AwayError(
                f"{what} of an optimizer that is offloaded",
                reason="its device memory was given up; nothing was touched",
                remedy="call reload() first, of the optimizer or of its PhaseOffloader",
            )

    def offload(self, params: Sequence[ParamState], shown: Shown, copies: HostCopies) -> None:
        """Put host copies in the place of what ``copies`` has."""
        for held in list(held_by(params, shown)):
            original = held.holder[held.name]
            if (copy := copies.of(original)) is not None:
                held.holder[held.name] = copy
                self._replaced.append((held, original))
        self._copies, self._arrival = copies, None

    def reload(self, arrival: Event | None) -> None:
        """Put the tensors back, whose content is there after ``arrival``."""
        for held, original in self._replaced:
            held.holder[held.name] = original
        self._replaced.clear()
        self._copies, self._arrival = None, arrival

    def wait(self) -> None:
        """Block until the copies, out or back, are complete."""
        if self._copies is not None:
            self._copies.wait()
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None
