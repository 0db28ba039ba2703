"""Run updates beside forward and backward, and gate readers of parameters.

``overlap="forward"``: ``step()`` returns when the updates are enqueued. Each FSDP2 group is a
*gate*: before an all-gather reads its shards, the reading stream waits for the updates of this
group only. All other code waits when it uses a shard or a gradient: see [Note: gated shards].

``overlap="backward"``: also takes a group's gradients after their reduction, and enqueues the
complete buckets at once, in order. ``step()`` does the rest. A taken gradient is *spent*: using it
is an error.

Parameters outside FSDP2 groups have no gate: the stream that called ``step()`` waits for them.

A CUDA graph that replays a forward or backward calls no Python, so it skips the gates. Therefore
the first capture that reaches a gate turns the optimizer to ``"step"`` for good.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from ..core import dtensor
from ..core.backend import Event, Stream
from ..core.config import OffloadConfig
from ..core.cuda_driver import beside_capture
from ..core.errors import ConfigError
from ..core.fsdp import Group, find_groups
from ..core.progress import is_rank_0, warn
from ..core.spent import SpentGradient, another_backward_error, changed_gradient_error, is_spent
from ..core.storage import span
from ..plan.residency import assumed_ready_ms
from ..update.params import ParamState, Work
from ..update.schema import is_torch_class, works_on_matrices
from .engine import Engine
from .gates import Gate, Times
from .gradients import gradient_of
from .lifecycle import Lifecycle

ASSUMED_MS_PER_BYTE: Final = 1 / 50e6
"""Assumed speed of the link, each way, until measured: PCIe 5 x16."""
ASSUMED_BACKWARD_SHARE: Final = 1 / 3
"""Assumed duration of a backward, as a share of the transfers, until measured."""
REORDER_AFTER: Final = frozenset((3, 6, 12, 48))
"""Steps after which the order follows measurements. Each reordering drains the transfers."""


class Owner(Protocol):
    """The optimizer as the hooks see it."""

    life: Lifecycle
    accumulating: int  # contexts in which backward only adds to .grad

    # Begins an iteration when its first gradients arrive. May reserve more state, and call
    # Overlap.attach. None: step() will refuse it.
    def begin_in_backward(self) -> Work | None: ...

    # Raises if an update has failed, or ``what`` needs offloaded memory.
    def check_present(self, what: str) -> None: ...


class Overlap:
    """Gates, spent gradients, and the iteration that began in backward. Does not keep the owner
    alive; ``in_backward`` takes gradients in backward."""

    def __init__(
        self, owner: Owner, groups: Sequence[Group], engine: Engine, *, in_backward: bool
    ) -> None:
        self._find_owner = weakref.ref(owner)
        self._engine, self._backend, self._in_backward = engine, engine.backend, in_backward
        self.gates = [Gate(group) for group in groups]
        self._ungated = Gate(None)
        self.is_off = False  # after a capture: step() waits for its updates
        self._warned = False
        self._spent: dict[Tensor, SpentGradient] = {}
        self._passed, self._steps = 0, 0  # gates that this forward has reached; steps so far
        self._watched: Times | None = None
        self.work: Work | None = None
        """The iteration that began in backward; ``step()`` ends it."""
        ends = contextlib.ExitStack()
        for index, group in enumerate(groups):
            ends.callback(group.watch(index, self, engine.backend))
        self.unwatch: Callable[[], object] = weakref.finalize(self, ends.close)

    def attach(self, params: Sequence[ParamState], engine: Engine) -> None:
        """Connect gates and buckets, after parameters were added."""
        self._engine = engine
        if self.work is not None:
            self.work.grow(len(params))
        by_parameter = {param.parameter: param for param in params}
        self._spent = {p: spent for p, spent in self._spent.items() if p in by_parameter}
        for rank, gate in enumerate(self.gates):
            assert gate.group is not None
            found = (by_parameter.pop(p, None) for p in gate.group.parameters)
            gate.params = [param for param in found if param is not None]
            gate.rank = rank
            dtensor.gate([param.parameter for param in gate.params], gate.gated)
        self._ungated.params = list(by_parameter.values())
        if self._in_backward:
            for param in params:
                if param.parameter not in self._spent and param.parameter not in by_parameter:
                    self._spent[param.parameter] = SpentGradient(param.parameter, param.fqn)
        engine.watch_gates([frozenset(r.index for r in gate.params) for gate in self._all_gates()])
        self._reorder(self._assumed_ready_ms(), ASSUMED_MS_PER_BYTE)

    def _all_gates(self) -> list[Gate]:
        return [*self.gates, self._ungated]

    # ------------------------------------------------------------------ taking gradients

    @property
    def has_taken(self) -> bool:
        """Whether gradients were consumed since the last ``step()``."""
        return self.work is not None

    def consume(self, params: Sequence[ParamState]) -> None:
        """Replace the gradients of ``params`` by stand-ins: the optimizer owns them now."""
        for param in params:
            if param.parameter.grad is not None:
                param.parameter.grad = self._spent.get(param.parameter)

    def clear_spent(self, *, set_to_none: bool = True) -> None:
        """Clear stand-ins, like ``zero_grad()``."""
        for parameter in self._spent:
            if is_spent(parameter.grad):
                parameter.grad = None if set_to_none else dtensor.zero_gradient(parameter)

    def check_taken(self, work: Work) -> None:
        """Refuse gradients that the caller replaced or cleared after their update.

        Raises:
            SpentGradientError: there is one. They are forgotten, so the next ``step()`` works.
        """
        taken = [r for gate in self.gates for r in gate.params if work.ready[r.index] is not None]
        if changed := [param for param in taken if not is_spent(param.parameter.grad)]:
            for param in changed:
                param.parameter.grad = self._spent.get(param.parameter)
            raise changed_gradient_error(changed[0].fqn)

    # ------------------------------------------------------------------ step()

    def begin(self) -> None:
        """Wait for leftovers of the last iteration before the first update."""
        self._engine.ring.complete()
        for index, gate in enumerate(self.gates):
            self._note_events(index)
            if gate.events:  # the forward has not reached it since
                for event in gate.events:
                    self._backend.current_stream().wait(event)
                self._open(gate)

    def close(self, work: Work) -> None:
        """Close the gates after ``step()`` has enqueued all updates."""
        current = self._backend.current_stream()
        if self.is_off:
            self._engine.finish(current)
        for index, gate in enumerate(() if self.is_off else self._all_gates()):
            if gate.group is None:
                for event in self._engine.updated(index):
                    current.wait(event)
                work.release(*(param.index for param in gate.params))
                continue
            gate.events, gate.is_pending, gate.is_asked, gate.is_taken = [], True, False, False
            # Keeps the work: the caller's stream owns its snapshot. Later parameters are not in it.
            gate.on_open = [functools.partial(work.release, *(r.index for r in gate.params))]
            if self._engine.has_enqueued(index):
                self._note_events(index)
            if gate.is_closed:
                gate.close(self._waiting(index), gradients=not self._in_backward)
            if self._in_backward:
                self.consume(gate.params)
        self.work, self._passed = None, 0
        self._steps += 1
        self._reorder_when_measured()

    def open_all(self) -> None:
        """Open all gates: everything has been waited for, or will be overwritten."""
        for gate in self.gates:
            self._open(gate)

    def give_up(self) -> None:
        """Drop running and failed updates, because everything will be overwritten."""
        self.work = None
        self.open_all()
        self.clear_spent()

    def let_read(self) -> None:
        """Stop gating shards, even after failed updates."""
        for gate in self.gates:
            gate.open()

    def enqueue(self, index: int | None = None) -> None:
        """Enqueue all updates of a gate, and more while queues have room; None: those of all gates.

        Raises:
            BusyError: a signal handler uses parameters while updates are being enqueued.
            LaneError: an update failed.
        """
        ring, owner = self._engine.ring, self._find_owner()
        is_due = index is not None and self.gates[index].is_pending
        if owner is None or not (is_due or ring.is_pending):
            return
        what = "an update beside forward or backward"
        if ring.is_busy:
            owner.life.check_free(what)
        with owner.life.inner_turn(what), owner.life.failing(what):
            if index is None:
                ring.complete()
            else:
                self._note_events(index)
            ring.advance()

    def is_pending(self, index: int) -> bool:
        """Return whether updates of a gate are not enqueued yet."""
        return self.gates[index].is_pending and not self._engine.has_enqueued(index)

    def _note_events(self, index: int) -> None:
        gate = self.gates[index]
        if gate.is_pending:
            gate.events, gate.is_pending = self._engine.updated(index), False
            if not gate.events:
                self._open(gate)

    @staticmethod
    def _open(gate: Gate) -> None:
        for drop in gate.on_open:
            drop()
        gate.events, gate.on_open, gate.is_taken, gate.is_pending = [], [], False, False
        gate.open()

    # ------------------------------------------------------------------ the lanes' order

    def _assumed_ready_ms(self) -> list[float]:
        if not self._in_backward:
            return [0.0] * len(self.gates)
        sizes = [float(sum(r.spec.state_bytes for r in gate.params)) for gate in self.gates]
        link_ms = sum(sizes) * ASSUMED_MS_PER_BYTE
        return assumed_ready_ms(sizes, link_ms * ASSUMED_BACKWARD_SHARE)

    def _reorder_when_measured(self) -> None:
        """Reorder by the times of an earlier iteration, once the device has finished it."""
        if self._steps in REORDER_AFTER:
            self._engine.ring.complete()
            reduced = [gate.reduced for gate in self.gates]
            self._watched = Times(reduced, self._engine.ring.marks)
        for gate in self.gates:
            gate.reduced = None
        if self._watched is None or not self._watched.are_known():
            return
        ready_ms, ms_per_byte = self._watched.ready_ms(), self._watched.ms_per_byte()
        self._watched = None
        self._engine.ring.complete()
        if not self._in_backward:
            self._reorder([0.0] * len(self.gates), ASSUMED_MS_PER_BYTE)
        elif ready_ms:  # without a measured link nothing moves
            self._reorder(ready_ms, ms_per_byte or ASSUMED_MS_PER_BYTE)

    def _reorder(self, ready_ms: Sequence[float], ms_per_byte: float) -> None:
        count = sum(len(gate.params) for gate in self._all_gates())
        # Ungated parameters come first, because the stream of step() waits for them.
        by_param, ranks = [max(ready_ms, default=0.0)] * count, [-1] * count
        for gate, ready in zip(self.gates, ready_ms, strict=True):
            for param in gate.params:
                by_param[param.index], ranks[param.index] = ready, gate.rank
        if not self._engine.ring.has_begun:
            self._engine.ring.reorder(by_param, ranks, ms_per_byte)

    # ------------------------------------------------------------------ Watcher

    @property
    def uses_link(self) -> bool:
        """See :class:`..core.fsdp.Watcher`."""
        return self._engine.uses_link

    def before_gather(self, index: int, stream: Stream) -> None:
        """See :class:`..core.fsdp.Watcher`."""
        self._turn_off_in_capture()
        self.gates[index].is_asked = True
        self.enqueue(index)
        self._wait(index, stream, "forward()")

    def _wait(self, index: int, stream: Stream, what: str) -> None:
        owner, gate = self._find_owner(), self.gates[index]
        if owner is None or not gate.is_closed:
            return
        self.enqueue(index)
        # Errors are raised by the thread that updates on the CPU.
        with span("wait"), owner.life.inner_turn(what), owner.life.failing(what):
            for event in gate.events:
                stream.wait(event)
            if gate.is_taken:
                self._engine.finish(stream)
        self.note_read([gate])

    def note_read(self, gates: Iterable[Gate]) -> None:
        """Warn, once, that shards are read before ``step()`` has ended their updates."""
        taken = next((gate for gate in gates if gate.is_taken), None)
        if taken is not None and not self._warned:
            self._warned = True
            warn(
                'overlap="backward": parameters are read between backward() and step(), and '
                "backward() has updated some of them (%s, ...). Remedy: read them after step(), "
                'or use overlap="forward"',
                taken.params[0].fqn,
            )

    def _turn_off_in_capture(self) -> None:
        """Turn overlap off, and make the host wait for running updates; see the module's
        docstring."""
        if self.is_off or not self._backend.is_capturing():
            return
        self.is_off, self._in_backward = True, False
        with beside_capture(self._backend.device):
            self._engine.ring.complete()
            for index, gate in enumerate(self.gates):
                self._note_events(index)
                for event in gate.events:
                    event.synchronize()
        self.open_all()
        warn(
            'overlap="step" from now on: a CUDA graph capture contains a forward '
            "or backward, and its replays cannot wait for updates"
        )

    def before_use(self, index: int) -> None:
        """Wait before user code uses a shard or a gradient of this gate."""
        if not self.gates[index].is_closed:
            return
        self._turn_off_in_capture()
        current = self._backend.current_stream()
        self._wait(index, current, "using a parameter or a gradient after step()")

    def _waiting(self, index: int) -> Callable[[], None]:
        return functools.partial(_wait, weakref.ref(self), index)

    def after_gather(self, index: int) -> None:
        """See :class:`..core.fsdp.Watcher`."""
        gate = self.gates[index]
        if gate.events and gate.is_asked:  # else the gather began before the updates
            gate.rank = self._passed
            self._passed += 1
            self._open(gate)
        self.enqueue(index)

    def before_reduce(self, index: int) -> None:
        """See :class:`..core.fsdp.Watcher`."""
        gate = self.gates[index]
        self._turn_off_in_capture()
        if not self._in_backward and gate.is_closed:  # another backward, without a forward
            self._wait(index, self._backend.current_stream(), "backward()")
            self._open(gate)
        for param in gate.params:
            if is_spent(param.parameter.grad):
                if (owner := self._find_owner()) is not None:
                    owner.life.check()
                raise another_backward_error(param.fqn, is_stepped=not self.has_taken)

    def after_reduce(
        self, index: int, reduced: Event, stream: Stream, *, is_last: bool = True
    ) -> None:
        """See :class:`..core.fsdp.Watcher`."""
        owner, gate = self._find_owner(), self.gates[index]
        if (
            owner is None
            or owner.accumulating
            or not (self._in_backward and is_last and gate.params)
        ):
            return
        if self._steps + 1 in REORDER_AFTER:
            gate.reduced = stream.record_timed()
        with owner.life.turn("an update in backward()"):
            owner.check_present("an update in backward()")
            self._take(index, reduced, owner)

    def _take(self, index: int, reduced: Event, owner: Owner) -> None:
        """Take a gate's gradients, final after ``reduced``, and update the complete buckets."""
        gate = self.gates[index]
        # step() decides that a parameter has no gradient.
        if all(gradient_of(param) is None for param in gate.params):
            return
        self.work = self.work or owner.begin_in_backward()  # may exchange gate.params
        if self.work is None or not gate.params:
            return
        with owner.life.failing("backward()"):
            for param in gate.params:
                if (gradient := gradient_of(param)) is not None:
                    self.work.put(param.index, gradient)
                    self.work.ready[param.index] = reduced
            self.consume(gate.params)
            gate.is_taken = True
            gate.close(self._waiting(index), gradients=False)
            self._engine.offer(self.work)


def _wait(find: Callable[[], Overlap | None], index: int) -> None:
    """Wait before a shard is used; a dead optimizer has waited for its updates."""
    if (overlap := find()) is not None:
        overlap.before_use(index)


def can_overlap(inner: Optimizer) -> bool:
    """Whether its updates may overlap other work: slice by slice, without a collective."""
    return is_torch_class(inner) and not works_on_matrices(inner)


def with_overlap(
    config: OffloadConfig, inner: Optimizer, models: Sequence[nn.Module]
) -> OffloadConfig:
    """Set ``overlap`` as requested, else to ``"forward"`` if FSDP2 modules hold all trained
    parameters."""
    if config.overlap is not None:
        return config
    gated = {p for group in find_groups(models) for p in group.parameters}
    trained = [p for group in inner.param_groups for p in group["params"] if p.requires_grad]
    is_gated = bool(trained) and gated.issuperset(trained)
    if models and not gated and can_overlap(inner) and is_rank_0():
        logging.getLogger("fsdp_offload").info(
            "step() waits for all transfers: to hide them, shard the model first, by "
            "fsdp_offload.shard(model) or your trainer's FSDP2"
        )
    return replace(config, overlap="forward" if is_gated and can_overlap(inner) else "step")


def make_overlap(
    owner: Owner,
    inner: Optimizer,
    models: Sequence[nn.Module],
    engine: Engine,
) -> Overlap | None:
    """Build the overlap of ``config.overlap``; None if ``step()`` waits for everything.

    Raises:
        ConfigError: no FSDP2 module, or ``inner`` cannot update slice by slice.
    """
    mode = engine.config.overlap
    if mode == "step":
        return None
    groups = find_groups(models)
    if not groups:
        raise ConfigError(
            f"overlap={mode!r} without an FSDP2 module in model=",
            reason="only FSDP2 modules wait for their own parameters",
            remedy='call fsdp_offload.shard(model) first and pass model=, or use overlap="step"',
        )
    if not can_overlap(inner):
        raise ConfigError(
            f"overlap={mode!r} with {type(inner).__name__}",
            reason="only torch.optim's element-wise classes can update slice by slice, "
            "beside other work",
            remedy='use overlap="step"',
        )
    return Overlap(owner, groups, engine, in_backward=mode == "backward")
