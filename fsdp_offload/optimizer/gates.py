"""Gates of FSDP2 groups: events to wait for before shards are read, and measured times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from ..core import dtensor
from ..core.backend import Event, TimedEvent
from ..core.fsdp import Group
from ..update.params import ParamState
from .ring import Mark


@dataclass(eq=False)
class Gate:
    """One FSDP2 group: events to wait for before its shards are read."""

    group: Group | None  # None: the parameters outside groups
    params: list[ParamState] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    is_pending: bool = False  # updates are not enqueued yet, so there are no events
    on_open: list[Callable[[], None]] = field(default_factory=list)  # drops what updates read
    is_asked: bool = False  # whether a stream waits, or has waited, for the events
    is_taken: bool = False  # its gradients were taken, and step() is still to come
    rank: int = 0  # position of the gate in the forward
    reduced: TimedEvent | None = None  # after this backward's reduction
    gated: dtensor.Gated = field(default_factory=list)
    gradients: dtensor.GatedGradients = field(default_factory=dtensor.GatedGradients)
    has_stand_ins: bool = False  # for shards or gradients

    @property
    def is_closed(self) -> bool:
        """Whether shards may not be read without a wait."""
        return bool(self.events or self.is_pending or self.is_taken)

    def close(self, wait: Callable[[], None], *, gradients: bool) -> None:
        """Make user code call ``wait`` before each use of a shard, or of a gradient."""
        self.has_stand_ins = True
        dtensor.close_gate(self.gated, wait)
        if gradients:
            self.gradients.close([param.parameter for param in self.params], wait)

    def open(self) -> None:
        """Stop gating shards and gradients."""
        if self.has_stand_ins:  # a state dict of the model asks once per module
            dtensor.open_gate(self.gated)
            self.gradients.open()
            self.has_stand_ins = False

    def __del__(self) -> None:
        self.open()  # the dead optimizer has waited for its updates


@dataclass(frozen=True)
class Times:
    """Measurements of one iteration, which the device may not have finished yet."""

    reduced: list[TimedEvent | None]  # per gate
    marks: list[Mark]  # of the ring

    def are_known(self) -> bool:
        """Whether the device has reached all of them."""
        events = [event for event in self.reduced if event is not None]
        events += [time for _, time in self.marks[-1:]]
        return all(event.query() for event in events)

    def ready_ms(self) -> list[float]:
        """Return times per gate since the first gradients of the backward; empty if nothing was
        measured."""
        known = [event for event in self.reduced if event is not None]
        times = [None if e is None else known[0].elapsed_time(e) for e in self.reduced]
        reached = [time for time in times if time is not None]
        if not reached:
            return []
        # Parameters without gradient are decided in step(), after all others.
        return [(max(reached) if time is None else time) - min(reached) for time in times]

    def ms_per_byte(self) -> float | None:
        """Return the link's best speed between two marks, each way."""
        spans = [(a[1].elapsed_time(b[1]), b[0] - a[0]) for a, b in pairwise(self.marks)]
        return min((ms / n_bytes for ms, n_bytes in spans if n_bytes), default=None) or None
