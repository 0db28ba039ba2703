"""``HybridDeviceOptimizer``: any dense torch optimizer with its state in host memory.

Usage::

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    optimizer = HybridDeviceOptimizer(optimizer, model)

Guarantees: the numbers are those of the wrapped optimizer (bit for bit in the device lanes; of
torch's CPU kernel in the host lane); a parameter without gradient is not touched; shards are
written in place; ``step()`` issues no collective for element-wise optimizers.

Limits, each refused with a typed error: LBFGS, SparseAdam, ``differentiable=True``, sparse
gradients, non-contiguous shards, ``CPUOffloadPolicy``, parameters on several devices, CUDA graph
capture of ``step()``, copying or pickling the wrapper, use in a forked process.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.hooks import RemovableHandle

from ..core import dtensor
from ..core.arguments import backend_of, modules_of
from ..core.backend import stream_to_wait
from ..core.config import OffloadConfig, TransferConfig, check_keywords
from ..core.errors import ConfigError, SpentGradientError, copy_error
from ..core.progress import is_rank_0, warn
from ..pipeline.gradients import count_empty_shards, gradient_of
from ..pipeline.inventory import Placed
from ..pipeline.overlap import Overlap, make_overlap, with_overlap
from ..update import state as state_io
from ..update.params import Snapshot, Work
from ..update.schema import check_supported, is_torch_class, raw_step
from ..update.shadow import step_idle_groups
from . import clipping
from .checkpoint_view import CheckpointView
from .device_memory import DeviceMemory
from .device_state import DeviceState
from .lifecycle import SAVE, Lifecycle
from .masters import Masters, remove_all, watch_loads, watch_reads
from .reservation import Reservation
from .state_view import Groups, StateView, checked_groups, match, name_masters
from .statistics import Statistics, gather
from .wrapping import (
    GroupedParameters,
    changed_groups_error,
    check_any_gradient,
    check_holds,
    check_no_scale,
    check_wrappable,
    forward_bound_steps,
    make_face,
    ordinary_tensors,
    warn_that_state_stays,
    without_face,
)

_log = logging.getLogger("fsdp_offload")


class HybridDeviceOptimizer(Optimizer):
    """Wraps ``optimizer`` and keeps its state in host memory.

    Args:
        optimizer: any dense torch optimizer: fresh, stepped or loaded. From here on it is another
            name of the wrapper: state, groups, methods and hooks are the wrapper's.
        model: the module (or modules) whose parameters it holds: gives names, the update order,
            and lets loads into the module be noticed.
        elementwise: for a class that is not torch's: each element's update depends on that element
            and its own state alone, and state is made at a parameter's first step. Without it such
            a class runs its own step on the device, and its state stays there.
        offload_fraction: share of state bytes, 0 to 1 (default), that leaves the device; met
            within the largest parameter.
        device_memory: bytes (or "8GiB") that offloaded state may take on each device, where it
            travels through, and where some of it stays. ``"auto"`` (default): what is to spare,
            looked at after steps, and given back when memory is short. 0: as little as possible.
            Bits do not depend on it.
        host_memory: bytes that all ranks of this host may use together, for this and everything
            else of this package; None: what is free.
        update_on: where offloaded state is updated: ``"device"`` (default), or ``"host"``: torch's
            CPU kernels on this rank's cores.
        overlap: ``"step"``: updates run inside ``step()``. ``"forward"``: it returns at once, each
            FSDP2 module of ``model`` waits for its own parameters, and other code that uses a
            parameter or its gradient waits, too. ``"backward"``: besides, parameters are updated
            as their gradients arrive; using ``.grad`` raises :class:`SpentGradientError` from then
            on. None (default): ``"forward"`` where all parameters are in FSDP2 modules of
            ``model``, and the class is one of torch's that works element by element; else
            ``"step"``.
        moments: how state is kept: ``"fp32"``, ``"bf16"``, ``"int8"`` or a dtype; None: as torch
            does, in fp32 where there is a master.
        master_weights: keep an fp32 master for each parameter with a bf16 or fp16 shard. False:
            update in the shard's own dtype, as torch would.
        transfer: see :class:`TransferConfig`.

    Raises:
        ConfigError: an argument is wrong, or the optimizer holds no parameter of ``model``;
            ``UnsupportedOptimizerError`` and ``UnsupportedParameterError`` are kinds of it.
        UnsupportedTorchError: this version of torch lacks a private name of FSDP2.
        DeviceError: a device that torch cannot use here, or parameters on several devices.
        HostMemoryError: the state does not fit into host memory.
        PinningError: the driver refused to page-lock it.
        StateSchemaError: the class's step fails on a dense scratch parameter.
        StateDictError: state that the optimizer already has does not fit its parameters.
    """

    is_offloaded = True
    """Not an optimizer that another one may wrap."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | Sequence[nn.Module] | None = None,
        *,
        elementwise: bool = False,
        device_memory: int | str = "auto",
        host_memory: int | str | None = None,
        overlap: str | None = None,
        update_on: str = "device",
        moments: torch.dtype | str | None = None,
        master_weights: bool = True,
        offload_fraction: float | None = None,
        transfer: TransferConfig | None = None,
        **unknown: object,
    ) -> None:
        check_keywords(unknown, inspect.signature(type(self)).parameters)
        self._config = OffloadConfig.make(
            device_memory=device_memory,
            host_memory=host_memory,
            overlap=overlap,
            update_on=update_on,
            moments=moments,
            master_weights=master_weights,
            offload_fraction=offload_fraction,
            transfer=transfer,
        )
        check_wrappable(optimizer)
        self._models = models = modules_of(model)
        check_holds(optimizer, models)
        self._wrapped, self._inner = optimizer, without_face(optimizer)
        self._life = Lifecycle()
        self._hooks: list[RemovableHandle] = []
        backend = backend_of(p for group in optimizer.param_groups for p in group["params"])
        self._view = StateView()
        config = with_overlap(self._config, optimizer, models)
        self._reserved = Reservation(self._inner, models, config, backend, self._view)
        self._steps_itself = not (elementwise or is_torch_class(optimizer))
        self._overlap: Overlap | None = None
        self._memory = DeviceMemory(backend) if config.device_memory == "auto" else None
        # It ends all work while masters can see the weights.
        self._device_state = DeviceState(
            self._reserved, self._view, finish=self._finish, turn=self._turn
        )
        self._masters = Masters(
            self._life, self._reserved, self._view, self._device_state, self._drain_quietly
        )
        self._named_masters = False
        self._had_gradient = False  # of any parameter, in any step
        self._steps, self._step_ms = 0, 0.0
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._grouped = GroupedParameters(self.param_groups)
        try:
            self._build()
        except BaseException:
            self._give_back()
            raise
        self._connect()

    def _build(self) -> None:
        """Reserve state and take that of the wrapped optimizer over."""
        with ordinary_tensors():
            self._make_overlap()
            if self._steps_itself:
                self._view.shown = self._inner.state
                warn_that_state_stays(self._inner, self._config, self.device)
            else:
                self._extend(self._reserved.inventory.trainable())
                self._reserved.take_over()

    def _make_overlap(self) -> None:
        self._overlap = make_overlap(self, self._inner, self._models, self._reserved.engine)
        if self._overlap is not None:
            self._hooks += watch_reads(self._models, self._before_module_read)

    def _connect(self) -> None:
        """Let the wrapped optimizer and the models speak to this one, and the caller use it."""
        self._inner.state = self._view.shown
        if not self._steps_itself:
            forward_bound_steps(self._wrapped, self._inner, self)
        make_face(self._wrapped, self._inner, self)
        self._hooks += watch_loads(self._models, self._masters)
        weakref.finalize(self, remove_all, self._hooks)
        if not self._steps_itself:
            weakref.finalize(self, self._view.shown.clear)
        self._life.open()
        if is_rank_0():
            _log.info("%s", self.statistics())

    # ------------------------------------------------------------------ the step

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's loss, if any.

        When it returns, parameters are ready for the current stream (``overlap="step"``), or each
        FSDP2 module waits for its own (else; :meth:`synchronize` waits for all).

        Raises:
            ConfigError: a hyper-parameter changed since backward updated parameters with it.
            AwayError: this optimizer, a shard or a gradient is offloaded; nothing was touched.
            DeviceMemoryError: no room for scratch memory, which bf16 shards and moments in fewer
                bits need once hyper-parameters are tensors; nothing was updated.
            LaneError: this or an earlier update failed; only a load makes the optimizer usable.
            BusyError: a signal handler called it in the middle of a call; so do other methods.
            StateSchemaError, UnsupportedParameterError: refused, nothing was updated.
        """
        self._check_present("step()")
        if self._steps_itself:
            with self._life.turn("step()"):
                return self._step_by_class(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._life.turn("step()"):
            self._check_present("step()")
            self._update()
        return loss

    def _update(self) -> None:
        current, began = stream_to_wait(self._reserved.backend), time.perf_counter()
        work = self._collect()
        with self._failing("step()"):
            start = current.record()
            work.ready = [start if event is None else event for event in work.ready]
            self._reserved.engine.run(work, start)
            self._end_updates(work)
            if self._memory is not None:
                self._memory.look(self._steps + 1, self._reserved.engine.ring)
            self._reserved.engine.ring.prefetch()
            step_idle_groups(self._inner, work.snapshot)
            work.snapshot.write_back(self.param_groups, self._inner)
        self._masters.come_with_weights = False
        self._count_step(began)

    def _step_by_class(self, closure: Callable[[], Any] | None) -> Any:
        """``step()`` of a class that is not torch's: its own, on the caller's stream."""
        if closure is None:
            self._check_first()
        self._had_gradient = True  # a closure's are still to come: they are not looked at
        began = time.perf_counter()
        step = raw_step(type(self._inner))
        loss = step(self._inner, *(() if closure is None else (self._life.outside(closure),)))
        self._view.shown = self._inner.state
        self._count_step(began)
        return loss

    def _count_step(self, began: float) -> None:
        self._steps += 1
        # A scheduler built on the wrapped optimizer checks there that a step came first.
        self._inner.__dict__["_opt_called"] = True
        self._step_ms = (time.perf_counter() - began) * 1e3

    def _check_first(self) -> None:
        """Refuse a first update where the model trains other parameters; warn of no gradient."""
        if not self._had_gradient:
            names = self._reserved.inventory.names
            self._had_gradient = check_any_gradient(
                self._inner, self._models, names, warns=not self._steps
            )

    def _collect(self) -> Work:
        """Gradients and a snapshot; whatever can be refused is refused here."""
        check_no_scale(self._inner)
        self._follow_groups()
        self._extend(self._reserved.late())
        self._check_first()
        work = self._overlap.work if self._overlap is not None else None
        if work is None:
            work = self._begin()
        else:
            work.snapshot.check_unchanged(self.param_groups)
        params = self._reserved.params
        work.grow(len(params))
        if self._overlap is not None and self._overlap.has_taken:
            self._overlap.check_taken(work)
        for param in params:
            if work.ready[param.index] is None:
                work.gradients[param.index] = gradient_of(param)
        count_empty_shards(params, self._reserved.never_have_gradients, work.gradients)
        return work

    def _follow_groups(self) -> None:
        """Follow parameters that the caller has exchanged in ``param_groups``.

        While nothing was updated or loaded, state is reserved anew; later it would be that of
        others.

        Raises:
            StateSchemaError: parameters were removed, replaced or moved, and there is state.
            AwayError: it is offloaded meanwhile.
        """
        if self._steps_itself:
            return  # it looks at its groups itself
        if self._grouped.are_same(self.param_groups):
            return
        if gone := self._grouped.gone(self.param_groups):
            is_begun = self._overlap is not None and self._overlap.has_taken
            is_updated = self._steps and self._had_gradient
            if is_updated or is_begun or self._has_state():
                raise changed_groups_error(gone, self._reserved.inventory.names)
            self._device_state.check("a change of param_groups")
            with ordinary_tensors():
                self._reserved.exchange(with_overlap(self._config, self._inner, self._models))
                if self._overlap is None:
                    self._make_overlap()
            self._masters.changed()
            self._attach()
        self._grouped = GroupedParameters(self.param_groups)

    def _has_state(self) -> bool:
        """Whether an update, a load or the caller has made some."""
        self._drain_quietly()
        is_away = self._device_state.is_away
        self._view.adopt_writes(self._reserved.params, is_away=is_away, again=True)
        return not self._reserved.is_fresh()

    def _extend(self, added: list[Placed]) -> None:
        """Reserve state for parameters; on error everything is as before."""
        if added:
            with ordinary_tensors():
                self._reserved.extend(added)
            self._attach()

    def _attach(self) -> None:
        if self._overlap is not None:
            self._overlap.attach(self._reserved.params, self._reserved.engine)

    def _begin(self) -> Work:
        """An iteration, before its first gradient is read."""
        self._view.adopt_writes(self._reserved.params, is_away=False)
        self._follow_options()
        self._masters.changed()
        if self._overlap is not None:
            with self._failing("an update of the step before"):
                self._overlap.begin()
        engine = self._reserved.engine
        snapshot = Snapshot.take(self._inner, self.param_groups, host=engine.host is not None)
        engine.prepare(snapshot)
        work = Work([], snapshot)
        work.grow(len(self._reserved.params))
        return work

    def _follow_options(self) -> None:
        """Reserve state that options have come to need, such as SGD's momentum where a scheduler
        sets it. All parameters are made anew, in the lanes that they were in."""
        if self._reserved.inventory.have_outgrown(self._reserved.params):
            self._finish()
            with self._failing("reserving more state"), torch.no_grad():
                self._reserved.renew()
                self._masters.changed()
            self._attach()

    def _failing(
        self, what: str, *keep: type[Exception]
    ) -> contextlib.AbstractContextManager[None]:
        """See :meth:`.Lifecycle.failing`."""
        return self._life.failing(what, self._drain_quietly, keep=keep)

    def _begin_in_backward(self) -> Work:
        """See :class:`.overlap.Owner`."""
        work = self._begin()
        # What updates read besides gradients, such as a learning rate on the device, is there then.
        start = stream_to_wait(self._reserved.backend).record()
        self._reserved.engine.update.wait(start)
        return work

    def _end_updates(self, work: Work) -> None:
        """Whom the updates that are under way concern, and what becomes of the gradients."""
        if self._overlap is None:
            self._reserved.engine.finish(self._reserved.backend.current_stream())
            return
        self._overlap.close(work)
        hooks = (*self._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values())
        if any(getattr(hook, "reads_parameters", True) for hook in hooks):
            self._drain()

    # ------------------------------------------------------------------ torch.optim.Optimizer

    @property
    def state(self) -> defaultdict[Tensor, dict[str, Any]]:
        """Live state per parameter, after all transfers: tensors over host or device memory."""
        if self._life.is_built:
            with self._life.turn("optimizer.state"):
                self._finish()
                if self._steps_itself:
                    self._view.shown = self._inner.state
                self._view.show(self._reserved.params)
        return self._view.shown

    @state.setter
    def state(self, value: object) -> None:
        if self._life.is_built and self._steps_itself:
            self._inner.state = value  # type: ignore[assignment]
        elif self._life.is_built:
            raise ConfigError(
                "assignment to optimizer.state",
                reason="updates use memory that was reserved for the state, and no other dict",
                remedy="call optimizer.state.clear() to go on without state, or load_state_dict()",
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; its state is reserved at once."""
        if not self._life.is_built:
            super().add_param_group(param_group)
            return
        self._check_present("add_param_group()")
        with self._life.turn("add_param_group()"):
            self._add_group(param_group)

    def _add_group(self, param_group: dict[str, Any]) -> None:
        self._follow_groups()
        self._refuse_if_taken("add_param_group() before step()")
        if self._steps_itself:
            type(self._inner).add_param_group(self._inner, param_group)
            return
        super().add_param_group(param_group)
        try:
            check_supported(self._inner)
            self._extend(self._reserved.late())
        except BaseException:
            self.param_groups.pop()
            raise
        finally:
            self._grouped = GroupedParameters(self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; Megatron-FSDP's ``decoupled_grad`` goes as well.

        Raises:
            SpentGradientError: between a backward that updated parameters and ``step()``.
        """
        with self._life.turn("zero_grad()"):
            if self._overlap is not None:
                if self._overlap.has_taken:
                    self._life.check()
                self._refuse_if_taken("zero_grad() before step()")
                self._overlap.clear_spent(set_to_none=set_to_none)
            super().zero_grad(set_to_none)
            for group in self.param_groups:
                for parameter in group["params"]:
                    dtensor.clear_decoupled_gradient(parameter)

    def _refuse_if_taken(self, what: str) -> None:
        """Refuse what would leave an iteration that has begun in backward half done."""
        if self._overlap is not None and self._overlap.has_taken:
            raise SpentGradientError(
                what,
                reason="parameters were updated with these gradients in backward",
                remedy='call step() first; overlap="forward" can skip an update',
            )

    def state_dict(self) -> dict[str, Any]:
        """As torch's: integer ids and live tensors, which the plain optimizer accepts.

        Parameters with bf16 or fp16 shards and an fp32 master have one more entry,
        ``master_remainder`` (bits) or ``master`` (fp32), which plain optimizers ignore.
        """
        self._life.check()
        if self._steps_itself:
            return type(self._inner).state_dict(self._wrapped)  # reads self.state
        if not self._named_masters:
            self._named_masters = True
            name_masters(self._reserved.params)
        with self._life.held("state_dict()"):  # hooks may use the optimizer
            return super().state_dict()  # reads self.state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy a state dict into the reserved memory, in place; dtypes and devices stay.

        Accepts integer ids or FQN strings, of this class or of the plain optimizer. Parameters
        are matched by position, as in torch. Load the model's weights first.

        Raises:
            StateDictError: groups, keys, shapes or placements do not fit; nothing was written.
        """
        self._life.check(failed_ok=True)
        self._device_state.check("load_state_dict()")
        if self._steps_itself:
            with self._life.held("load_state_dict()"):  # hooks may use the optimizer
                type(self._inner).load_state_dict(self._inner, dict(state_dict))
            self.param_groups, self._view.shown = self._inner.param_groups, self._inner.state
            return
        loaded: Any = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, loaded)
            loaded = loaded if replaced is None else replaced
        with self._life.turn("load_state_dict()"):
            self._load(loaded)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load(self, loaded: Any) -> None:
        self._follow_groups()
        params, saved = self._reserved.params, loaded.get("state")
        ids, values = match(self.param_groups, loaded, params)
        groups = self._checked_groups(loaded["param_groups"])
        for param, found in zip(params, values, strict=True):
            state_io.check(param, found)
        self._start_over()
        with self._failing("load_state_dict()"), torch.no_grad():
            values = state_io.apart(params, values)
            for group, loaded_group in zip(self.param_groups, groups, strict=True):
                group.update(loaded_group)
            for param, found in zip(params, values, strict=True):
                state_io.write(param, found)
                self._view.shown[param.parameter].update(state_io.expose(param))
            self._view.load_unmanaged(
                saved, ids, params, self.device, steps_are_tensors=is_torch_class(self._inner)
            )
            self._masters.changed()
        self._masters.come_with_weights = True
        if seeded := sum(map(state_io.seeds_master, params, values)):
            warn(
                "%d parameters came without a saved fp32 master: masters were set from the weights",
                seeded,
            )

    # ------------------------------------------------------------------ the wrapper's own

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """As ``torch.nn.utils.clip_grad_norm_`` over all parameters, with its bits, in place.

        Parameters that lie on several meshes, which torch refuses, count together.

        Returns:
            The norm before clipping: 0-dim, a replicated DTensor if all gradients are on one mesh.

        Raises:
            SpentGradientError: with ``overlap="backward"``: they have been used by then.
            NonFiniteGradientError: if asked for, where the norm is not finite.
        """
        with self._life.turn("clip_grad_norm_()"):  # no longer: other ranks take part
            self._life.check()
        gradients = clipping.gradients_of(p for g in self.param_groups for p in g["params"])
        norm = clipping.total_norm(gradients, norm_type, error_if_nonfinite=error_if_nonfinite)
        clipping.scale(gradients, clipping.coefficient(norm, max_norm))
        return norm

    @property
    def device(self) -> torch.device:
        """Where the shards live."""
        return self._reserved.backend.device

    def _checked_groups(self, saved: Groups) -> Groups:
        reserved = self._reserved
        return checked_groups(self.param_groups, saved, reserved.inventory, reserved.params)

    def synchronize(self) -> None:
        """Block until parameters and state are final and host memory may be read."""
        with self._life.turn("synchronize()"):
            self._synchronize()

    def _synchronize(self) -> None:
        self._life.check()
        with self._failing("synchronize()"):
            self._drain()
            self._reserved.engine.ring.flush()

    def resync(self) -> None:
        """Set every master equal to its weight, after writing into parameters by hand.

        Not needed for loads into the module given as ``model=``. Without it bf16 masters are at
        most half a bf16 ulp off.
        """
        self._device_state.check("resync()")
        with self._life.turn("resync()"):
            self._finish()
            self._masters.set_from_weights(self._reserved.params)
            self._masters.forget_frozen()

    def statistics(self) -> Statistics:
        """What is held where, and what the last step did."""
        with self._life.turn("statistics()"):
            return gather(self)

    def close(self) -> None:
        """Finish all work and give host memory, slots and the host thread back. Idempotent."""
        if self._life.closed or not self._life.is_ours:
            return
        with self._life.turn("close()"):
            self._drain_quietly()
            self._life.close()
            if not self._steps_itself:
                self._view.shown.clear()
            self._give_back()

    def __repr__(self) -> str:
        shown = super().__repr__()
        is_open = self._life.is_built and not self._life.closed
        return f"{shown}\n{self.statistics()}" if is_open else shown

    def __getattr__(self, name: str) -> Any:
        """What the wrapped class has besides: ``train()`` and ``eval()`` of some."""
        inner = self.__dict__.get("_inner")
        if inner is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        getattr(inner, name)  # raises where neither has it
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What is not this class's own is the wrapped class's, whose code reads it."""
        life = self.__dict__.get("_life")
        is_built = life is not None and life.is_built
        is_shared = is_built and name[0] != "_" and not hasattr(type(self), name)
        if is_shared:
            setattr(self._inner, name, value)
        if not is_shared or name in self.__dict__:
            super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: object) -> NoReturn:  # copy.deepcopy calls it, too
        raise copy_error(self, "save state_dict() and load it into a new wrapper")

    @property
    def _for_checkpoints(self) -> CheckpointView:
        """For :mod:`fsdp_offload.checkpoint`."""
        return CheckpointView(self)

    @property
    def _offloadable(self) -> DeviceState:
        """For a ``PhaseOffloader``: see ``core/offloadable.py``."""
        return self._device_state

    # ------------------------------------------------------------------ for local snapshots

    def _finish(self, *, for_writing: bool = True) -> None:
        """Finish all transfers and follow outside writes, into weights too, as an update does:
        memory then says what the state is, and, with ``for_writing``, may be written into.

        Raises:
            SpentGradientError: between a backward that updated parameters and ``step()``.
            StateSchemaError: see :meth:`_follow_groups`.
        """
        self._synchronize()
        self._follow_groups()
        self._refuse_if_taken("the optimizer's state, asked for before step()")
        if for_writing:
            self._reserved.engine.ring.discard()
        is_away = self._device_state.is_away
        self._view.adopt_writes(self._reserved.params, is_away=is_away, again=True)
        if not is_away:
            self._masters.follow_weights()

    def _start_over(self) -> None:
        """All state is about to be replaced: an iteration that has begun is given up."""
        self._drain_quietly()
        self._reserved.engine.abort()
        if self._overlap is not None:
            self._overlap.work = None
            self._overlap.open_all()  # an update that failed is waited for no more
            self._overlap.clear_spent()
        self._life.open()

    def _check_usable(self) -> None:
        """See :class:`.overlap.Owner`."""
        self._life.check()

    def _turn(self, what: str) -> contextlib.AbstractContextManager[None]:
        """See :meth:`.Lifecycle.turn`."""
        return self._life.turn(what)

    def _check_present(self, what: str) -> None:
        """Refuse ``what`` while the optimizer is failed, closed or away.

        Raises:
            AwayError, ClosedError, LaneError: it is.
        """
        self._life.check()
        self._device_state.check(what)

    # ------------------------------------------------------------------ building and failing

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """Inside, backward passes only add to ``.grad``: for all micro-batches but the last.

        Needed with ``overlap="backward"`` alone, and not if the caller says so to FSDP2
        (``set_requires_gradient_sync(False)`` or ``set_is_last_backward(False)``).
        """
        return contextlib.nullcontext() if self._overlap is None else self._overlap.accumulate()

    def _before_module_read(self) -> None:
        """A module's weights are about to be read or written."""
        if self._overlap is not None and self._life.is_ours:
            with self._life.turn("a read of the module's weights", within=SAVE):
                self._drain_quietly()

    def _drain(self) -> None:
        with contextlib.ExitStack() as waits:  # runs all of them, even if one raises
            if self._overlap is not None:
                waits.callback(self._overlap.let_read)  # last
            waits.callback(self._reserved.engine.synchronize)
            waits.callback(self._device_state.wait)
        if self._overlap is not None:
            self._overlap.open_all()

    def _drain_quietly(self) -> None:
        """Wait for what can still be waited for: a failure was, or will be, reported elsewhere."""
        with contextlib.suppress(Exception):
            self._drain()

    def _give_back(self) -> None:
        if self._overlap is not None:
            self._overlap.unwatch()
            self._overlap.clear_spent()
            self._overlap = None  # hooks that others have wrapped pass on from here
        self._reserved.close()
        remove_all(self._hooks)
