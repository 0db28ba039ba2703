"""The core of a ``HybridDeviceOptimizer``: state that is reserved for its parameters, the
iterations that update it, and what is waited for before others use either.

An iteration *begins* with the first gradient that is read (in ``step()``, or in backward), when
hyper-parameters are noted; it *collects* the gradients, and *runs* the updates. What can be refused
is refused before the first update; what fails after it leaves the optimizer *failed*.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.hooks import RemovableHandle

from ..core.arguments import backend_of, cpu_homes, leave_cpu
from ..core.backend import stream_to_wait
from ..core.config import OffloadConfig
from ..core.errors import SpentGradientError, StateSchemaError
from ..core.offloadable import remove_all
from ..core.progress import warn
from ..update import state as state_io
from ..update.params import Snapshot, Work
from ..update.schema import check_supported, is_torch_class, raw_step
from ..update.shadow import step_idle_groups
from .device_memory import DeviceMemory
from .device_state import DeviceState
from .gradients import count_empty_shards, gradient_of
from .host_gradients import HostGradients
from .inventory import Placed
from .lifecycle import SAVE, Lifecycle
from .masters import Masters, watch_reads
from .overlap import Overlap, make_overlap, with_overlap
from .reservation import Reservation
from .state_view import StateView, match
from .weights import Weights
from .whole_model import keep_on_host, send_gradients
from .wrapping import (
    GroupedParameters,
    changed_groups_error,
    check_any_gradient,
    check_no_scale,
    ordinary_tensors,
    warn_that_state_stays,
)


class Updates:
    """State of one optimizer, and the iterations that update it; an :class:`.overlap.Owner`.

    Args:
        inner: the wrapped optimizer; its groups are the wrapper's groups.
        models: see :class:`.HybridDeviceOptimizer`.
        config: the user's choices.
        steps_itself: the class runs its own step, and keeps its state: nothing is reserved.
    """

    def __init__(
        self,
        inner: Optimizer,
        models: Sequence[nn.Module],
        config: OffloadConfig,
        *,
        steps_itself: bool,
    ) -> None:
        self.inner, self.steps_itself = inner, steps_itself
        self._models, self._config = models, config
        self.life = Lifecycle(self.drain_quietly)
        self.hooks: list[RemovableHandle] = []  # of the models, until close()
        parameters = (p for group in inner.param_groups for p in group["params"])
        backend = backend_of(parameters, cpu_homes(models))
        config = with_overlap(config, inner, models)
        self.view = StateView(inner if steps_itself else None)
        self.reserved = Reservation(inner, models, config, backend, self.view)
        self.overlap: Overlap | None = None
        self.weights: Weights | None = None
        self.gradients: HostGradients | None = None
        self._may_send = config.offload == "all"  # gradients: _send_gradients() decides, once
        self.memory = DeviceMemory(backend) if config.device_memory == "auto" else None
        # It ends all work while masters can see the weights.
        self.device_state = DeviceState(self.reserved, finish=self.finish, turn=self.life.turn)
        self.masters = Masters(self.life, self.reserved, self.device_state)
        self._grouped = GroupedParameters(inner.param_groups)
        self._had_gradient = False  # of any parameter, in any step
        self.steps, self.step_ms, self.accumulating = 0, 0.0, 0

    def build(self) -> None:
        """Reserve state and take that of the wrapped optimizer over; on error all is given back."""
        try:
            with ordinary_tensors():
                self._make_overlap()
                if self._config.offload == "all":
                    self._keep_weights_on_host()
                if self.steps_itself:
                    warn_that_state_stays(self.inner, self._config, self.reserved.backend.device)
                else:
                    self._extend(self.reserved.inventory.trainable())
                    self.reserved.take_over()
                    if self.reserved.config.overlap != "backward":  # which uses them at once
                        self._send_gradients()
        except BaseException:
            self._give_back()
            raise

    def _keep_weights_on_host(self) -> None:
        reserved, steps_itself = self.reserved, self.steps_itself
        self.weights = keep_on_host(
            self._models, self.inner, reserved.backend, reserved.config, steps_itself=steps_itself
        )
        leave_cpu(self._models, 0 if self.weights is None else self.weights.moved_bytes)
        if self.weights is not None:
            reserved.use(self.weights)

    def _send_gradients(self) -> None:
        if self._may_send:
            reserved = self.reserved
            gradients = self.gradients = send_gradients(
                self._models, reserved.params, reserved.backend, reserved.config
            )
            self._may_send = False
            reserved.engine.ring.gradients = None if gradients is None else gradients.slots

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """See :meth:`.HybridDeviceOptimizer.accumulate`."""
        with self.life.turn("accumulate()"), ordinary_tensors():
            self._send_gradients()
        self.accumulating += 1
        try:
            yield
        finally:
            self.accumulating -= 1

    def _make_overlap(self) -> None:
        self.overlap = make_overlap(self, self.inner, self._models, self.reserved.engine)
        if self.overlap is not None:
            self.hooks += watch_reads(self._models, self._before_module_read)

    # ------------------------------------------------------------------ an iteration

    def run(self) -> None:
        """Update every parameter that has a gradient, with :attr:`life`'s turn taken."""
        self.check_present("step()")
        current, began = stream_to_wait(self.reserved.backend), time.perf_counter()
        work, engine = self._collect(), self.reserved.engine
        with self.life.failing("step()"):
            start = current.record()
            work.ready = [start if event is None else event for event in work.ready]
            if self.weights is not None:
                self.weights.begin_step()
            engine.run(work, start)
            if self.weights is not None:
                self.weights.passed_step()
            if self.gradients is not None:
                self.gradients.begin()
            self._end_updates(work)
            if self.memory is not None:
                self.memory.look(self.steps + 1, engine.ring)
            engine.ring.prefetch()
            step_idle_groups(self.inner, work.snapshot)
            work.snapshot.write_back(self.inner.param_groups, self.inner)
        self.masters.come_with_weights = False
        self._count_step(began)

    def run_class(self, closure: Callable[[], Any] | None) -> Any:
        """``step()`` of a class that is not torch's: its own, on the caller's stream."""
        if closure is None:
            self._check_first()
        self._had_gradient = True  # a closure's are still to come: they are not looked at
        began = time.perf_counter()
        step = raw_step(type(self.inner))
        loss = step(self.inner, *(() if closure is None else (self.life.outside(closure),)))
        self._count_step(began)
        return loss

    def _count_step(self, began: float) -> None:
        self.steps += 1
        # A scheduler built on the wrapped optimizer checks there that a step came first.
        self.inner.__dict__["_opt_called"] = True
        self.step_ms = (time.perf_counter() - began) * 1e3

    def _check_first(self) -> None:
        """Refuse a first update where the model trains other parameters; warn of no gradient."""
        if not self._had_gradient:
            names = self.reserved.inventory.names
            self._had_gradient = check_any_gradient(
                self.inner, self._models, names, warns=not self.steps
            )

    def _collect(self) -> Work:
        """Gradients and a snapshot; whatever can be refused is refused here."""
        check_no_scale(self.inner)
        self.follow_groups()
        self._extend(self.reserved.late())
        self._check_first()
        work = self.overlap.work if self.overlap is not None else None
        if work is None:
            work = self._begin()
        else:
            work.snapshot.check_unchanged(self.inner.param_groups)
        params = self.reserved.params
        if self.overlap is not None and self.overlap.has_taken:
            self.overlap.check_taken(work)
        for param in params:
            if work.ready[param.index] is None:
                work.put(param.index, gradient_of(param))
        count_empty_shards(params, self.reserved.never_have_gradients, work.gradients)
        self.reserved.engine.ring.begin(work)
        return work

    def _begin(self) -> Work:
        """An iteration, before its first gradient is read."""
        self.view.adopt_writes(self.reserved.params, is_away=False)
        self._follow_options()
        self.masters.changed()
        if self.overlap is not None:
            with self.life.failing("an update of the step before"):
                self.overlap.begin()
        if self.weights is not None:
            self.weights.exchange_written()
        engine = self.reserved.engine
        snapshot = Snapshot.take(self.inner, self.inner.param_groups, host=engine.host is not None)
        engine.prepare(snapshot)
        work = Work([], snapshot)
        work.grow(len(self.reserved.params))
        return work

    def begin_in_backward(self) -> Work | None:
        """See :class:`.overlap.Owner`."""
        try:
            self.follow_groups()
        except StateSchemaError:
            return None  # step() raises it: FSDP2 does not recover from an error in backward()
        work = self._begin()
        # What updates read besides gradients, such as a learning rate on the device, is there then.
        start = stream_to_wait(self.reserved.backend).record()
        self.reserved.engine.update.wait(start)
        return work

    def _end_updates(self, work: Work) -> None:
        """Make readers of parameters wait for the updates, and give the gradients up."""
        if self.overlap is None:
            self.reserved.engine.finish(self.reserved.backend.current_stream())
            return
        self.overlap.close(work)
        own = self.inner._optimizer_step_post_hooks
        hooks = (*own.values(), *_global_optimizer_post_hooks.values())
        if any(getattr(hook, "reads_parameters", True) for hook in hooks):
            self._drain()

    # ------------------------------------------------------------------ what is updated

    def follow_groups(self) -> None:
        """Follow parameters that the caller has exchanged in ``param_groups``.

        While nothing was updated or loaded, state is reserved anew; later it would be that of
        others.

        Raises:
            StateSchemaError: parameters were removed, replaced or moved, and there is state.
            AwayError: it is offloaded meanwhile.
        """
        groups = self.inner.param_groups
        if self.steps_itself or self._grouped.are_same(groups):
            return  # a class that steps itself looks at its groups itself
        if gone := self._grouped.gone(groups):
            is_begun = self.overlap is not None and self.overlap.has_taken
            is_updated = self.steps and self._had_gradient
            if is_updated or is_begun or self._has_state():
                raise changed_groups_error(gone, self.reserved.inventory.names)
            self.device_state.check("a change of param_groups")
            with ordinary_tensors():
                self.reserved.exchange(with_overlap(self._config, self.inner, self._models))
                if self.overlap is None:
                    self._make_overlap()
            self.masters.changed()
            self._attach()
        self._grouped = GroupedParameters(groups)

    def _has_state(self) -> bool:
        """Whether an update, a load or the caller has made some."""
        self.drain_quietly()
        is_away = self.device_state.is_away
        self.view.adopt_writes(self.reserved.params, is_away=is_away, again=True)
        return not self.reserved.is_fresh()

    @contextlib.contextmanager
    def adding_group(self) -> Iterator[None]:
        """Inside, a group is added: reserve state for it, or on error take it out again."""
        yield
        groups = self.inner.param_groups
        try:
            check_supported(self.inner)
            self._extend(self.reserved.late())
        except BaseException:
            groups.pop()
            raise
        finally:
            self._grouped = GroupedParameters(groups)

    def _extend(self, added: list[Placed]) -> None:
        """Reserve state for parameters; on error everything is as before."""
        if added:
            with ordinary_tensors():
                self.reserved.extend(added)
            self._attach()

    def _attach(self) -> None:
        gradients, ring = self.gradients, self.reserved.engine.ring
        ring.gradients = None if gradients is None else gradients.slots
        if self.overlap is not None:
            self.overlap.attach(self.reserved.params, self.reserved.engine)
        if self.weights is not None:
            self.weights.attach(self.reserved.params, ring.buckets, self.overlap)

    def _follow_options(self) -> None:
        """Reserve state that options have come to need, such as SGD's momentum where a scheduler
        sets it. All parameters are made anew, in the lanes that they were in."""
        if self.reserved.inventory.have_outgrown(self.reserved.params):
            self.finish()
            with self.life.failing("reserving more state"), torch.no_grad():
                self.reserved.renew()
                self.masters.changed()
            self._attach()

    # ------------------------------------------------------------------ what others read and write

    def finish(self, *, for_writing: bool = True) -> None:
        """Finish all transfers and follow outside writes, into weights too, as an update does:
        memory then says what the state is, and, with ``for_writing``, may be written into.

        Raises:
            SpentGradientError: between a backward that updated parameters and ``step()``.
            StateSchemaError: see :meth:`follow_groups`.
        """
        self.synchronize()
        self.follow_groups()
        self.refuse_if_taken("the optimizer's state, asked for before step()")
        if for_writing:
            self.reserved.engine.ring.discard()
        is_away = self.device_state.is_away
        self.view.adopt_writes(self.reserved.params, is_away=is_away, again=True)
        if not is_away:
            self.masters.follow_weights()

    @contextlib.contextmanager
    def replacing(self, what: str, *keep: type[Exception]) -> Iterator[None]:
        """Inside, all state is overwritten: an iteration that has begun is given up. Masters belong
        to the weights of now then.

        Raises:
            LaneError: see :meth:`.Lifecycle.failing`.
        """
        self.drain_quietly()
        self.reserved.engine.abort()
        if self.weights is not None:
            self.weights.slots.drop_incomplete()
        if self.overlap is not None:
            self.overlap.give_up()
        self.life.open()
        with self.life.failing(what, *keep), torch.no_grad():
            yield
            self.masters.changed()
        self.masters.come_with_weights = True

    def load(self, loaded: Mapping[str, Any]) -> None:
        """Copy a state dict into the reserved memory; see :meth:`.HybridDeviceOptimizer`'s.

        Raises:
            StateDictError: it does not fit; nothing was written.
        """
        self.follow_groups()
        params, current = self.reserved.params, self.inner.param_groups
        ids, values = match(current, loaded, params)
        groups = self.reserved.checked_groups(loaded["param_groups"])
        for param, found in zip(params, values, strict=True):
            state_io.check(param, found)
        with self.replacing("load_state_dict()"):
            values = state_io.resolve_aliases(params, values)
            for group, loaded_group in zip(current, groups, strict=True):
                group.update(loaded_group)
            for param, found in zip(params, values, strict=True):
                state_io.write(param, found)
                self.view.shown[param.parameter].update(state_io.expose(param))
            device, is_torchs = self.reserved.backend.device, is_torch_class(self.inner)
            self.view.load_unmanaged(
                loaded["state"], ids, params, device, steps_are_tensors=is_torchs
            )
        if seeded := sum(map(state_io.seeds_master, params, values)):
            warn(
                "no saved fp32 masters for %d parameters: masters were set from the weights",
                seeded,
            )

    def synchronize(self) -> None:
        """Block until parameters and state are final and host memory may be read."""
        self.life.check()
        with self.life.failing("synchronize()"):
            self._drain()
            self.reserved.engine.ring.flush()

    def _before_module_read(self) -> None:
        """A module's weights are about to be read or written."""
        if self.overlap is not None and self.life.is_ours:
            with self.life.turn("a read of the module's weights", within=SAVE):
                self.overlap.note_read(self.overlap.gates)
                self.drain_quietly()

    def _drain(self) -> None:
        with contextlib.ExitStack() as waits:  # runs all of them, even if one raises
            if self.overlap is not None:
                waits.callback(self.overlap.let_read)  # last
            waits.callback(self.reserved.engine.synchronize)
            waits.callback(self.device_state.wait)
            if self.gradients is not None:
                waits.callback(self.gradients.finish)
        if self.overlap is not None:
            self.overlap.open_all()

    def drain_quietly(self) -> None:
        """Wait for what can still be waited for: a failure was, or will be, reported elsewhere."""
        with contextlib.suppress(Exception):
            self._drain()

    # ------------------------------------------------------------------ whether it may be used

    def check_present(self, what: str, *, failed_ok: bool = False) -> None:
        """Refuse ``what`` while the optimizer is closed or away, or failed, but for a load.

        Raises:
            AwayError, ClosedError, LaneError: it is.
        """
        self.life.check(failed_ok=failed_ok)
        self.device_state.check(what)

    def refuse_if_taken(self, what: str) -> None:
        """Refuse what would leave an iteration that has begun in backward half done.

        Raises:
            SpentGradientError: there is one.
        """
        if self.overlap is not None and self.overlap.has_taken:
            self.life.check()
            raise SpentGradientError(
                what,
                reason="parameters were updated with these gradients in backward",
                remedy='call step() first; overlap="forward" can skip an update',
            )

    def close(self) -> None:
        """Finish all work and give all memory back. Idempotent.

        Raises:
            DeviceMemoryError: see :meth:`.Weights.bring_back`.
        """
        if self.life.closed or not self.life.is_ours:
            return
        with self.life.turn("close()"):
            self.drain_quietly()
            if self.weights is not None:  # state, which goes anyway, makes room for them
                with contextlib.suppress(Exception):  # after a failure
                    self.reserved.engine.ring.fit(0, self.steps)
            self._give_back()
            self.life.close()
            if not self.steps_itself:
                self.view.shown.clear()

    def _give_back(self) -> None:
        if self.gradients is not None:
            self.gradients.close()
        if self.weights is not None:  # before the rest goes, because it may raise
            self.weights.close()
        self.gradients = self.weights = None
        if self.overlap is not None:
            self.overlap.unwatch()
            self.overlap.clear_spent()
            self.overlap = None  # hooks that others have wrapped pass on from here
        self.reserved.close()
        remove_all(self.hooks)
