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
import functools
import inspect
import logging
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks

from ..core import dtensor
from ..core import storage as storages
from ..core.arguments import backend_of, modules_of
from ..core.backend import Event
from ..core.config import Lane, OffloadConfig, PrecisionConfig, TransferConfig, check_keywords
from ..core.errors import (
    AwayError,
    ConfigError,
    DeviceError,
    DeviceMemoryError,
    LaneError,
    SpentGradientError,
)
from ..core.interrupts import held_back
from ..core.offloadable import HostCopies
from ..memory.transfer import Handle, StorageBlock, Transfer, collect
from ..pipeline.engine import Engine
from ..pipeline.gradients import count_empty_shards, gradient_of
from ..pipeline.host import HostBucket
from ..pipeline.inventory import Inventory, Placed
from ..pipeline.native import OwnStep
from ..pipeline.overlap import Overlap, make_overlap
from ..update import state as state_io
from ..update.params import MasterForm, ParamState, Snapshot, Work
from ..update.schema import check_supported, is_torch_class
from ..update.shadow import step_idle_groups
from . import clipping, loading
from .device_state import DeviceState, tensors_on
from .lifecycle import Health
from .statistics import Statistics, gather
from .wrapping import (
    GroupedParameters,
    changed_groups_error,
    check_any_gradient,
    check_holds,
    check_wrappable,
    forward_bound_steps,
    make_inert,
    ordinary_tensors,
    share_hooks,
)

_log = logging.getLogger("fsdp_offload")


class HybridDeviceOptimizer(Optimizer):
    """Wraps ``optimizer`` and keeps its state in host memory.

    Args:
        optimizer: any dense torch optimizer: fresh, stepped or loaded. It becomes inert: its
            ``step``, ``zero_grad``, ``state_dict``, ``load_state_dict`` and ``add_param_group``
            forward to the wrapper; hooks and group dicts are shared.
        model: the module (or modules) whose parameters it holds: gives names, the update order,
            and lets loads into the module be noticed.
        elementwise: for a class that is not torch's: each element's update depends on that element
            and its own state alone, and state is made at a parameter's first step. Without it such
            a class runs its own step on the device, and its state stays there.
        offload_fraction: share of state bytes, 0 to 1 (default), that leaves the device; met
            within the largest parameter.
        device_budget: instead of it, bytes (or "8GiB") of state that may stay on each device.
        update_on: where offloaded state is updated: ``"device"`` (default: the same bits on every
            machine), ``"host"``, ``"auto"`` (both, or the one that the measured rates of this
            machine favour), or one lane name per trainable parameter in ``param_groups`` order.
        overlap: ``"step"`` (default): all transfers run inside ``step()``. ``"forward"``: it
            returns at once, and each FSDP2 module of ``model`` waits for its own parameters.
            ``"backward"``: besides, parameters are updated as their gradients arrive. With both,
            ``.grad`` is spent from then on: using it raises :class:`SpentGradientError`.
        precision: see :class:`PrecisionConfig`.
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
        offload_fraction: float | None = None,
        device_budget: int | str | None = None,
        update_on: str | Sequence[str] = "device",
        overlap: str = "step",
        precision: PrecisionConfig | None = None,
        transfer: TransferConfig | None = None,
        **unknown: object,
    ) -> None:
        check_keywords(unknown, inspect.signature(type(self)).parameters)
        self._config = OffloadConfig.make(
            offload_fraction=offload_fraction,
            device_budget=device_budget,
            update_on=update_on,
            overlap=overlap,
            precision=precision,
            transfer=transfer,
        )
        check_wrappable(optimizer)
        self._models = models = modules_of(model)
        check_holds(optimizer, models)
        if not models:
            _log.warning(
                "HybridDeviceOptimizer without model=: no parameter names, no overlap with forward "
                "and backward, and loads into the module are not noticed"
            )
        self._backend = backend_of(p for group in optimizer.param_groups for p in group["params"])
        self._inner, self._health = optimizer, Health()
        self._engines: list[Engine] = []
        self._closers: list[Callable[[], object]] = []  # each gives memory back, once
        self._params: list[ParamState] = []
        self._never_have_gradients: list[ParamState] = []
        self._reserved: set[Tensor] = set()
        self._own_step = None if elementwise or is_torch_class(optimizer) else OwnStep(optimizer)
        self._shown: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        self._built = self._loaded_since_step = self._state_was_read = False
        self._named_masters = False
        self._weights_before: Tensor | None = None
        self._followed: Tensor | None = None  # checksums of weights that masters agree with
        self._overlap: Overlap | None = None
        self._device_state = DeviceState()
        self._transfer: Transfer | None = None  # until it is needed: it has streams
        self._steps, self._step_ms = 0, 0.0
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._grouped = GroupedParameters(self.param_groups)
        self._had_gradient = False  # of any parameter, in any step
        self._inventory = self._new_inventory()
        try:
            with ordinary_tensors():
                self._build()
        except BaseException:
            self._give_back()
            raise
        self._connect()
        self._built = True

    def _build(self) -> None:
        """Reserve state and take that of the wrapped optimizer over."""
        self._overlap = make_overlap(self, self._inner, self._models, self._config, self._backend)
        if self._own_step is None:
            self._extend(self._inventory.trainable())
            self._take_over()
        else:
            self._shown = self._inner.state
            self._own_step.warn(self._config, self._backend.device)

    def _connect(self) -> None:
        """Let the wrapped optimizer and the models speak to this one."""
        optimizer, models = self._inner, self._models
        share_hooks(optimizer, self)
        make_inert(optimizer, self)
        optimizer.state = self._shown
        loading.watch_module_loads(
            models, self, before="_before_module_load", after="_after_module_load"
        )
        if self._overlap is not None:
            loading.watch_module_reads(models, self, before="_before_module_read")
        if self._own_step is None:
            weakref.finalize(self, self._shown.clear)
            forward_bound_steps(optimizer, self)

    # ------------------------------------------------------------------ the step

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's loss, if any.

        When it returns, parameters are ready for the current stream (``overlap="step"``), or each
        FSDP2 module waits for its own (else; :meth:`synchronize` waits for all).

        Raises:
            ConfigError: a hyper-parameter changed since backward updated parameters with it.
            AwayError: this optimizer, a shard or a gradient is offloaded; nothing was touched.
            DeviceMemoryError: no room for scratch memory, which moments in fewer bits need once
                hyper-parameters are tensors; nothing was updated.
            LaneError: this or an earlier update failed; only a load makes the optimizer usable.
            StateSchemaError, UnsupportedParameterError: refused, nothing was updated.
        """
        self.check_present("step()")
        if self._own_step is not None:
            return self._step_by_class(closure)
        self._backend.current_stream()  # refuses a graph capture before anything is touched
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        began = time.perf_counter()
        work = self._collect()
        with self._health.failing("step()", self._drain_quietly):
            start = self._backend.current_stream().record()
            work.ready = [start if event is None else event for event in work.ready]
            for engine in self._engines:
                engine.run(work, start)
            self._end_updates(work)
            for engine in self._engines:
                engine.prefetch()
            step_idle_groups(self._inner, work.snapshot)
            self._write_back(work.snapshot)
        self._steps += 1
        self._loaded_since_step = False
        # A scheduler built on the wrapped optimizer checks there that a step came first.
        self._inner.__dict__["_opt_called"] = True
        self._step_ms = (time.perf_counter() - began) * 1e3
        return loss

    def _step_by_class(self, closure: Callable[[], Any] | None) -> Any:
        """``step()`` of a class that is not torch's."""
        assert self._own_step is not None
        if closure is None and not self._had_gradient:
            self._check_first()
        began = time.perf_counter()
        loss = self._own_step.step(closure if self._had_gradient else self._checked(closure))
        self._shown = self._inner.state
        self._steps += 1
        self._inner.__dict__["_opt_called"] = True
        self._step_ms = (time.perf_counter() - began) * 1e3
        return loss

    def _checked(self, closure: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """``closure``, after which gradients are there that a first step needs."""

        def call(*args: Any, **kwargs: Any) -> Any:
            assert closure is not None
            loss = closure(*args, **kwargs)
            if not self._had_gradient:
                self._check_first()
            return loss

        return None if closure is None else functools.wraps(closure)(call)

    def _collect(self) -> Work:
        """Gradients and a snapshot; whatever can be refused is refused here."""
        self._follow_groups()
        if late := [m for m in self._inventory.trainable() if m[0] not in self._reserved]:
            with ordinary_tensors():
                self._extend(late)  # unfrozen after wrapping
        if not self._had_gradient:
            self._check_first()
        work = self._overlap.work if self._overlap is not None else None
        if work is None:
            work = self._begin()
        else:
            work.snapshot.check_unchanged(self.param_groups)
        work.grow(len(self._params))
        for param in self._params:
            if work.ready[param.index] is None:
                work.gradients[param.index] = gradient_of(param)
        count_empty_shards(self._params, self._never_have_gradients, work.gradients)
        return work

    def _check_first(self) -> None:
        """Refuse to update nothing at all, or not what the model trains: see the error.

        The decision is this rank's own, so shards that are empty here say nothing.
        """
        held = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        found = any(dtensor.whole_gradient(p) is not None for p in held)
        if found or any(dtensor.local(p).numel() for p in held):
            if not any(map(dtensor.never_has_gradient, held)):
                check_any_gradient(self._inner, self._models, self._inventory.names)
        self._had_gradient = found

    def _follow_groups(self) -> None:
        """Follow parameters that the caller has exchanged in ``param_groups``.

        Before the first update, state is reserved anew; later it would be that of others.

        Raises:
            ConfigError: ``param_groups`` is another list.
            StateSchemaError: parameters were removed, replaced or moved after an update.
            AwayError: it is offloaded meanwhile.
        """
        if self._own_step is not None:
            return  # it looks at its groups itself
        if self._inner.param_groups is not self.param_groups:
            raise ConfigError(
                "assignment to param_groups",
                reason="the wrapper and the optimizer that it wraps share one list of groups",
                remedy="change groups in place: optimizer.param_groups[:] = ...",
            )
        if self._grouped.are_same(self.param_groups):
            return
        if gone := self._grouped.gone(self.param_groups):
            is_new = not self._steps and (self._overlap is None or not self._overlap.has_taken)
            if not is_new or self._is_needed(gone):
                raise changed_groups_error(gone, self._inventory.names)
            self._device_state.check("a change of param_groups")
            self._reserve_anew()
        self._grouped = GroupedParameters(self.param_groups)

    def _is_needed(self, gone: Sequence[Tensor]) -> bool:
        """Whether parameters that no group has any more come with state of an earlier run."""
        kept = {id(p) for group in self.param_groups for p in group["params"]}
        lost = {p for p in gone if id(p) not in kept}
        return any(
            param.parameter in lost and not state_io.is_fresh(param) for param in self._params
        )

    def _reserve_anew(self) -> None:
        """As at construction, for the parameters that the groups have now; state is kept."""
        self._drain_quietly()
        self._adopt_writes()
        kept = {id(p): p for group in self.param_groups for p in group["params"]}
        recorded = {param.parameter for param in self._params}
        state = {p: s for p, s in self._shown.items() if s and id(p) in kept and p not in recorded}
        for param in self._params:
            if id(param.parameter) in kept and not state_io.is_fresh(param):
                shown = state_io.expose(param)
                state_io.show(param, shown)
                state[param.parameter] = {
                    n: v.clone() if isinstance(v, Tensor) else v for n, v in shown.items()
                }
        backend = backend_of(kept.values())
        for close in self._closers:
            close()
        for holder in (self._closers, self._engines, self._params, self._reserved, self._shown):
            holder.clear()
        self._backend, self._followed = backend, None
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None
        self._shown.update(state)
        self._inventory = self._new_inventory()
        with ordinary_tensors():
            self._extend(self._inventory.trainable())

    def _new_inventory(self) -> Inventory:
        return Inventory(self._inner, self._models, self._config, self._backend.device)

    def _begin(self) -> Work:
        """An iteration, before its first gradient is read."""
        self._adopt_writes()
        self._follow_options()
        self._followed = None
        if self._overlap is not None:
            with self.failing("an update of the step before"):
                self._overlap.begin()
        host = any(engine.host is not None for engine in self._engines)
        snapshot = Snapshot.take(self._inner, self.param_groups, host=host)
        for engine in self._engines:
            engine.prepare(snapshot)
        work = Work([], snapshot)
        work.grow(len(self._params))
        return work

    def _follow_options(self) -> bool:
        """Reserve state that options have come to need, such as SGD's momentum where a scheduler
        sets it. All parameters are made anew, in the lanes that they were in; returns whether."""
        if not self._inventory.have_outgrown(self._params):
            return False
        self._finish_and_follow()
        with self._health.failing("reserving more state", self._drain_quietly), torch.no_grad():
            kept = {param.parameter: state_io.copied(param) for param in self._params}
            # Frozen ones, too: they keep their state, and may be unfrozen.
            again = [p for p in self._inventory.parameters() if p[0] in self._reserved]
            for engine in self._engines:
                engine.close()
            self._inventory.start_anew(self._params)
            self._engines, self._params = [], []
            for parameter in kept:
                del self._shown[parameter]
            self._extend(again)
            for param in self._params:
                state_io.write(param, kept[param.parameter])
            self._trust_shards()
        return True

    def failing(self, what: str) -> contextlib.AbstractContextManager[None]:
        """An exception inside makes the optimizer failed and is raised as :class:`LaneError`."""
        return self._health.failing(what, self._drain_quietly)

    def take_gradients(self, params: Sequence[ParamState], reduced: Event) -> None:
        """In backward: gradients of ``params`` are final after ``reduced``; update with them."""
        self.check_present("an update in backward()")
        assert self._overlap is not None
        if self._overlap.work is None and self._follow_options():
            by_parameter = {param.parameter: param for param in self._params}
            params = [by_parameter[param.parameter] for param in params]
        gradients = [(param, gradient_of(param)) for param in params]
        # Where there is none now, it is decided at step() that there is none.
        taken = [(param, gradient) for param, gradient in gradients if gradient is not None]
        if not taken:
            return
        work = self._overlap.work
        if work is None:
            work = self._overlap.work = self._begin()
            start = self._backend.current_stream().record()
            for engine in self._engines:
                engine.begin(start)
        with self.failing("backward()"):
            for param, gradient in taken:
                work.gradients[param.index] = gradient
                work.ready[param.index] = reduced
            self._overlap.spend(params)
            for engine in self._engines:
                engine.offer(work)

    def _end_updates(self, work: Work) -> None:
        """Whom the updates that are under way concern, and what becomes of the gradients."""
        if self._overlap is None:
            for engine in self._engines:
                engine.finish()
            return
        self._overlap.close(work, self._engines)
        hooks = (*self._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values())
        if any(getattr(hook, "reads_parameters", True) for hook in hooks):
            self._drain()

    def _write_back(self, snapshot: Snapshot) -> None:
        """What a class of the user's own changed in its groups and attributes, once."""
        for index, changed in snapshot.changed_groups.items():
            self.param_groups[index].update(changed)
        self._inner.__dict__.update(snapshot.changed_attributes or {})

    # ------------------------------------------------------------------ torch.optim.Optimizer

    @property
    def state(self) -> defaultdict[Tensor, dict[str, Any]]:
        """Live state per parameter, after all transfers: tensors over host or device memory."""
        if self._built:
            self._finish_and_follow()
            self._state_was_read = True
            for param in self._params:
                state_io.show(param, self._shown[param.parameter])
        return self._shown

    @state.setter
    def state(self, value: object) -> None:
        if self._built:
            raise ConfigError(
                "assignment to optimizer.state",
                reason="state lives in memory that was reserved at construction",
                remedy="use load_state_dict(), or write into the tensors in place",
            )

    def state_to_read(self) -> dict[Tensor, dict[str, Any]]:
        """What :attr:`state` shows, for a caller who does not write into it: what was fetched ahead
        stays, and nobody looks for writes in the next step."""
        self._finish_and_follow(for_writing=False)
        return {**self._shown, **self.exposed_state()}

    def exposed_state(self) -> dict[Tensor, dict[str, Any]]:
        """State that is offloaded, by parameter, as its memory is now: without waiting, also after
        a failure, for a load that writes all of it."""
        exposed = {param.parameter: state_io.expose(param) for param in self._params}
        for param in self._params:
            state_io.show(param, exposed[param.parameter])
        return exposed

    def _finish_and_follow(self, *, for_writing: bool = True) -> None:
        """:meth:`_finish`, and whole masters follow weights that the caller has written, as they do
        in an update."""
        self._finish(for_writing=for_writing)
        gone = (storages.is_empty(dtensor.with_history(r.parameter)) for r in self._params)
        if self.is_away or any(gone):
            return  # nothing can have been written into what has no memory
        with torch.no_grad():
            for bucket in self._host_buckets():
                if int(bucket.observe()) != int(bucket.expected):
                    bucket.reseed()
                    bucket.trust_shards()
            params = [r for r in self._params if r.form is MasterForm.WHOLE and r.lane != "host"]
            if not params:
                return
            # On the device: a loop that reads the state of one parameter after the other would
            # else compare all masters each time.
            now = loading.weight_checksums(params)
            if self._followed is None or not torch.equal(now, self._followed):
                self._discard()
                for param in params:
                    state_io.follow_shard(param)
            self._followed = now

    def _adopt_writes(self) -> None:
        """Follow what the caller did to the state that it was shown: written, or dropped."""
        if not self._state_was_read:
            return
        with torch.no_grad():
            found = [self._shown.get(param.parameter) or {} for param in self._params]
            for param, shown, apart in zip(
                self._params, found, state_io.apart(self._params, found), strict=True
            ):
                if shown:
                    shown.update(apart)
                    state_io.adopt_writes(param, shown)
                elif not self.is_away:  # else once its weight can be read
                    state_io.reset(param)
                    self._shown[param.parameter] = state_io.expose(param)
        self._state_was_read = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; its state is reserved at once."""
        if self._built:
            self.check_present("add_param_group()")
            self._follow_groups()
            self._refuse_if_taken("add_param_group() before step()")
        if self._built and self._own_step is not None:
            self._own_step.call("add_param_group", param_group)
            return
        super().add_param_group(param_group)
        if not self._built:
            return
        self._grouped = GroupedParameters(self.param_groups)
        group = len(self.param_groups) - 1
        try:
            check_supported(self._inner)
            with ordinary_tensors():
                self._extend([m for m in self._inventory.trainable() if m[1] == group])
        except BaseException:
            self.param_groups.pop()
            self._grouped = GroupedParameters(self.param_groups)
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; Megatron-FSDP's ``decoupled_grad`` goes as well.

        Raises:
            SpentGradientError: between a backward that updated parameters and ``step()``.
        """
        if self._overlap is not None:
            if self._overlap.has_taken:
                self._health.check()
            self._refuse_if_taken("zero_grad() before step()")
            self._overlap.clear_spent()
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
        self._health.check()
        if self._own_step is not None:
            saved: dict[str, Any] = self._own_step.call("state_dict")
            return saved
        if not self._named_masters:
            self._named_masters = True
            loading.name_masters(self._params)
        return super().state_dict()  # reads self.state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy a state dict into the reserved memory, in place; dtypes and devices stay.

        Accepts integer ids or FQN strings, of this class or of the plain optimizer. Parameters
        are matched by position, as in torch. Load the model's weights first.

        Raises:
            StateDictError: groups, keys, shapes or placements do not fit; nothing was written.
        """
        self._health.check(failed_ok=True)
        self._device_state.check("load_state_dict()")
        if self._own_step is not None:
            self._own_step.call("load_state_dict", state_dict)
            self.param_groups, self._shown = self._inner.param_groups, self._inner.state
            return
        self._follow_groups()
        loaded: Any = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, loaded)
            loaded = loaded if replaced is None else replaced
        ids = loading.match_ids(self.param_groups, loaded)
        entries = [loaded["state"].get(ids[r.parameter], {}).items() for r in self._params]
        # Where a flattened checkpoint lacks an entry, torch's unflattening puts an empty dict.
        values: Sequence[Mapping[str, Any]]
        values = [{n: v for n, v in found if not isinstance(v, dict)} for found in entries]
        saved = loaded["param_groups"]
        groups = loading.checked_groups(self.param_groups, saved, self._inventory, self._params)
        for param, found in zip(self._params, values, strict=True):
            state_io.check(param, found)
        self._start_over()
        with self._health.failing("load_state_dict()", self._drain_quietly), torch.no_grad():
            values = state_io.apart(self._params, values)
            for group, loaded_group in zip(self.param_groups, groups, strict=True):
                group.update(loaded_group)
            for param, found in zip(self._params, values, strict=True):
                state_io.write(param, found)
                self._shown[param.parameter].update(state_io.expose(param))
            self._load_natives(loaded["state"], ids)
            self._trust_shards()
        self._loaded_since_step = True
        seeded = [state_io.seeds_master(*pair) for pair in zip(self._params, values, strict=True)]
        if any(seeded):
            _log.warning(
                "%d parameters came without a saved fp32 master: masters were set from the weights",
                sum(seeded),
            )
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load_natives(self, saved: Mapping[Any, Any], ids: Mapping[Tensor, Any]) -> None:
        """State that is not managed: of native parameters, and of frozen ones."""
        recorded = {param.parameter for param in self._params}
        for parameter, saved_id in ids.items():
            found = saved.get(saved_id, {})
            if parameter in recorded or not (found or parameter in self._shown):
                continue
            fresh = {n: loading.native_value(self._backend.device, n, v) for n, v in found.items()}
            self._shown[parameter].clear()
            if not fresh:
                del self._shown[parameter]
            else:
                self._shown[parameter].update(fresh)

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
        self._health.check()
        gradients = clipping.gradients_of(
            [p for group in self.param_groups for p in group["params"]]
        )
        norm = clipping.total_norm(gradients, norm_type, error_if_nonfinite=error_if_nonfinite)
        clipping.scale(gradients, clipping.coefficient(norm, max_norm))
        return norm

    @property
    def inner_class(self) -> type[Optimizer]:
        """Class of the wrapped optimizer."""
        return type(self._inner)

    @property
    def lanes(self) -> list[Lane]:
        """The lane of each trainable parameter, in ``param_groups`` order. ``update_on=`` takes
        such a list: it repeats the choice of an earlier run, and with it that run's bits."""
        known = {param.parameter: param.lane for param in self._params}
        return [known.get(p, "resident") for p, _ in self._inventory.trainable()]

    @property
    def device(self) -> torch.device:
        """Where the shards live."""
        return self._backend.device

    @property
    def params(self) -> Sequence[ParamState]:
        """What is offloaded, per parameter, in update order; for checkpoints."""
        return self._params

    def check_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Refuse options of a checkpoint, one mapping per group, that need other state.

        Raises:
            StateDictError: such as ``amsgrad`` where it was off when the optimizer was built.
        """
        saved = [dict(group) for group in groups]
        loading.checked_groups(self.param_groups, saved, self._inventory, self._params)

    def synchronize(self) -> None:
        """Block until parameters and state are final and host memory may be read."""
        self._health.check()
        with held_back(), self._health.failing("synchronize()", self._drain_quietly):
            self._drain()

    def resync(self) -> None:
        """Set every master equal to its weight, after writing into parameters by hand.

        Not needed for loads into the module given as ``model=``, and host-lane writes are
        noticed by value; without it bf16 masters are at most half a bf16 ulp off.
        """
        self._device_state.check("resync()")
        self._finish()
        self._set_masters_from_weights(self._params)
        self._forget_frozen_masters()

    def statistics(self) -> Statistics:
        """What is held where, and what the last step did."""
        return gather(
            self._engines,
            self._params,
            self._device_state,
            self._transfer,
            self._natives(),
            self._shown,
            steps=self._steps,
            step_ms=self._step_ms,
        )

    def _natives(self) -> list[Tensor]:
        """Trainable parameters whose state the class makes and keeps."""
        recorded = {param.parameter for param in self._params}
        return [p for p, _ in self._inventory.trainable() if p not in recorded]

    def close(self) -> None:
        """Finish all work and give host memory, slots and the thread back. Idempotent."""
        if self._health.closed or not self._health.is_ours:
            return
        self._drain_quietly()
        self._health.close()
        if self._own_step is None:
            self._shown.clear()
        self._give_back()

    def __getattr__(self, name: str) -> Any:
        """What the wrapped class has besides: ``train()`` and ``eval()`` of some."""
        inner = self.__dict__.get("_inner")
        if inner is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(inner, name)

    def __deepcopy__(self, memo: object) -> NoReturn:
        self._refuse_copy()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse_copy()

    def _refuse_copy(self) -> NoReturn:
        raise ConfigError(
            f"copy or pickle of {type(self).__name__}",
            reason="its state is memory of this process",
            remedy="save state_dict() and load it into a new wrapper",
        )

    # ------------------------------------------------------------------ phases

    @property
    def is_away(self) -> bool:
        """Whether device memory was given up, by :meth:`offload` or a ``PhaseOffloader``."""
        return self._device_state.is_away

    @held_back()
    def reserve_offload(self) -> None:
        """Take the host memory of :meth:`offload` now, for the state that exists now.

        Raises:
            SpentGradientError: between a backward that updated parameters and ``step()``.
            HostMemoryError, PinningError: as of the constructor; nothing was taken.
            LaneError: an earlier update failed.
        """
        self._health.check()
        if not self.is_away:
            self._finish()
            self._reserve_offload()

    def _reserve_offload(self) -> tuple[Transfer, list[StorageBlock]]:
        if self._transfer is None:
            self._transfer = Transfer(self._backend, self._config.transfer)
        arenas = [a for engine in self._engines for a in engine.arena_statistics()]
        blocks = collect(self.device_tensors())
        self._transfer.reserve(blocks, taken_bytes=sum(arena.n_bytes for arena in arenas))
        return self._transfer, blocks

    @held_back()
    def offload(self, *, wait: bool = True) -> Handle:
        """Give up all device memory of the optimizer; its state stays readable, in host memory.

        State on the device is copied to page-locked host memory, which is taken at the first
        call and kept until :meth:`close`; staging buffers are just released. Until
        :meth:`reload`, ``step()`` and loads raise; ``state``, state dicts and checkpoints show
        host memory. State tensors that were read before must not be used meanwhile. Released
        memory is torch's; ``torch.cuda.empty_cache()`` gives it to other processes. While it is
        away already nothing happens.

        Args:
            wait: until the copies have ended. If not, memory is released as they end: call
                ``is_done()`` or ``wait()`` of what this returns.

        Raises:
            SpentGradientError: between a backward that updated parameters and ``step()``.
            HostMemoryError, PinningError: no room in host memory; nothing was touched.
            LaneError: an earlier update failed.
        """
        self._health.check()
        if not self.is_away:
            self.prepare_offload()
            transfer, blocks = self._reserve_offload()
            staging = collect(("staging", tensor) for tensor in self.staging_buffers())
            transfer.out([("state", blocks)], dropped=staging)
            self.set_away(transfer)
        return self._last_transfer(wait=wait)

    @held_back()
    def reload(self, *, wait: bool = True) -> Handle:
        """Take device memory again and bring the state back. When it is back already, nothing
        happens.

        Args:
            wait: until the copies have ended. If not, ``step()`` follows them on the device, and
                whatever reads state waits for them.

        Raises:
            DeviceMemoryError: not enough device memory: all stays away, and a later call works.
            AwayError: a ``PhaseOffloader`` has it away.
            ClosedError: after :meth:`close`.
        """
        self._health.check(failed_ok=True)
        if self.is_away:
            transfer = self._transfer
            if transfer is None or not transfer.is_away:
                raise AwayError(
                    "reload() of an optimizer",
                    reason="a PhaseOffloader has offloaded it",
                    remedy="call reload() of that one",
                )
            self.prepare_reload()
            try:
                handle = transfer.back()
            except torch.OutOfMemoryError as error:
                raise DeviceMemoryError(
                    f"optimizer state of {transfer.away_bytes} bytes",
                    reason=f"the device has no room for it ({error}); nothing of it is lost",
                    remedy="free device memory, then call reload() again",
                ) from error
            self.set_present(handle.arrival())
        return self._last_transfer(wait=wait)

    def _last_transfer(self, *, wait: bool) -> Handle:
        handle = Handle() if self._transfer is None else self._transfer.handle
        if wait:
            handle.wait()
        return handle

    def prepare_offload(self) -> None:
        """See :class:`.Offloadable`."""
        self._finish_and_follow()  # while they can see the weights
        for engine in self._engines:
            engine.idle()

    def prepare_reload(self) -> None:
        """See :class:`.Offloadable`."""
        if not self._health.closed:
            self._device_state.wait()
            self._adopt_shown()

    def device_tensors(self) -> list[tuple[str, Tensor]]:
        """See :class:`.Offloadable`."""
        return tensors_on(self._backend.device, self._params, self._shown)

    def staging_buffers(self) -> list[Tensor]:
        """See :class:`.Offloadable`."""
        return [tensor for engine in self._engines for tensor in engine.staging()]

    def set_away(self, copies: HostCopies) -> None:
        """See :class:`.Offloadable`."""
        self._device_state.leave(self._params, self._shown, copies)
        self._show_all()

    def set_present(self, arrival: Event | None) -> None:
        """See :class:`.Offloadable`."""
        self._device_state.come_back(arrival)
        ready = self._backend.current_stream().record()
        for engine in self._engines:
            engine.follow(ready if arrival is None else arrival, ready)
        self._show_all()

    def _show_all(self) -> None:
        """State tensors are others than before."""
        for param in self._params:
            if shown := self._shown.get(param.parameter):  # else the caller has dropped it
                shown.update(state_io.expose(param))

    def _adopt_shown(self) -> None:
        """:meth:`_adopt_writes`; what was shown may be written into again."""
        was_read = self._state_was_read
        self._adopt_writes()
        self._state_was_read = was_read

    # ------------------------------------------------------------------ for local snapshots

    def _finish(self, *, for_writing: bool = True) -> None:
        """Finish all transfers and follow outside writes: memory then says what the state is,
        and, with ``for_writing``, may be written into.

        Raises:
            SpentGradientError: between a backward that updated parameters and ``step()``.
            StateSchemaError: see :meth:`_follow_groups`.
        """
        self.synchronize()
        self._follow_groups()
        if self._overlap is not None and self._overlap.has_taken:
            raise SpentGradientError(
                "the optimizer's state, asked for before step()",
                reason="backward has updated some parameters, and step() is to update the others",
                remedy="call step() first",
            )
        if for_writing:
            self._discard()
        self._adopt_shown()

    def _discard(self) -> None:
        """Forget state that was fetched ahead: it is about to be written into."""
        for engine in self._engines:
            engine.discard()

    def _start_over(self) -> None:
        """All state is about to be replaced: an iteration that has begun is given up."""
        self._drain_quietly()
        for engine in self._engines:
            engine.abort()
        if self._overlap is not None:
            self._overlap.work = None
            self._overlap.open_all()  # an update that failed is waited for no more
            self._overlap.clear_spent()
        self._health.recover()

    def check_present(self, what: str) -> None:
        """Refuse ``what`` while the optimizer is failed, closed or away.

        Raises:
            AwayError, ClosedError, LaneError: it is.
        """
        self._health.check()
        self._device_state.check(what)

    def check_loadable(self, what: str) -> None:
        """Refuse a load while away; a failed optimizer is what a load is for.

        Raises:
            AwayError: it is.
        """
        self._device_state.check(what)

    def check_usable(self, *, failed_ok: bool = False) -> None:
        """Refuse use of an optimizer that is closed, inherited by a fork, or failed.

        Raises:
            ClosedError, LaneError: see :class:`.lifecycle.Health`.
        """
        self._health.check(failed_ok=failed_ok)

    @contextlib.contextmanager
    def _replacing_all(self, what: str, *, keep: type[Exception]) -> Iterator[None]:
        """Inside, all state and weights are overwritten; masters belong to the weights then.

        Errors make the optimizer failed; those of class ``keep`` stay what they are.
        """
        self._health.check(failed_ok=True)
        self._device_state.check(what)
        self._start_over()
        with self._failing(what, keep=keep), torch.no_grad():
            yield
            for param in self._params:
                self._shown[param.parameter] = state_io.expose(param)
            self._trust_shards()
        self._loaded_since_step, self._weights_before = True, None

    @contextlib.contextmanager
    def _failing(self, what: str, *, keep: type[Exception]) -> Iterator[None]:
        try:
            with self._health.failing(what, self._drain_quietly):
                yield
        except LaneError as error:
            if isinstance(cause := error.__cause__, keep):
                raise cause from cause.__cause__
            raise

    # ------------------------------------------------------------------ building and failing

    def _extend(self, added: list[Placed]) -> None:
        """Reserve state for parameters; on error everything is as before."""
        if not added:
            return
        self._check_device(added)
        params, natives = self._inventory.plan(added, first=not self._engines)
        frozen = {m[0]: self._shown[m[0]] for m in added if self._shown.get(m[0])}
        for param in params:
            state_io.check(param, frozen.get(param.parameter, {}))
        everything = [*self._params, *params]
        for index, param in enumerate(everything):
            param.spec = replace(param.spec, index=index)
        rank0 = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        with torch.no_grad():
            engine = Engine(
                self._inner,
                everything,
                params,
                natives,
                self._config,
                self._backend,
                show_progress=rank0,
                native_state=self._shown,
            )
            try:
                shown = self._first_state(params, frozen)
            except BaseException:
                engine.close()
                raise
        self._closers.append(weakref.finalize(self, engine.close))
        self._engines.append(engine)
        self._params = everything
        self._never_have_gradients = [
            r for r in everything if dtensor.never_has_gradient(r.parameter)
        ]
        if self._overlap is not None:
            self._overlap.attach(everything, self._engines)
        self._shown.update(shown)
        self._reserved.update(parameter for parameter, _ in added)
        self._inventory.commit(params, natives)

    @staticmethod
    def _first_state(
        params: list[ParamState], frozen: Mapping[Tensor, dict[str, Any]]
    ) -> dict[Tensor, dict[str, Any]]:
        """What is shown of new ones; ``frozen``: trained before, frozen, now trained again."""
        for param in params:
            if found := frozen.get(param.parameter):
                # Its weight may have been replaced meanwhile, and nobody compared the two.
                state_io.write(param, state_io.agreeing(param, found))
        return {param.parameter: state_io.expose(param) for param in params}

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """Inside, backward passes only add to ``.grad``: for all micro-batches but the last.

        Needed with ``overlap="backward"`` alone, and not if FSDP2 is told
        (``set_requires_gradient_sync(False)`` or ``set_is_last_backward(False)``).
        """
        return contextlib.nullcontext() if self._overlap is None else self._overlap.accumulate()

    def _check_device(self, added: list[Placed]) -> None:
        backend = backend_of(parameter for parameter, _ in added)
        if backend.device != self._backend.device:
            raise DeviceError(
                f"parameters on {backend.device}",
                reason=f"this optimizer streams over the link of {self._backend.device}",
                remedy="move them there, or wrap another optimizer for them",
            )

    def _take_over(self) -> None:
        """Copy state that the wrapped optimizer already has; it drops its own afterwards."""
        known = {param.parameter for param in self._params}
        for param in self._params:
            state_io.check(param, self._inner.state.get(param.parameter, {}))
        with torch.no_grad():
            for param in self._params:
                if found := self._inner.state.get(param.parameter):
                    state_io.write(param, found)
            for parameter, found in self._inner.state.items():
                if parameter not in known:
                    self._shown[parameter].update(found)
            self._trust_shards()

    def _before_module_read(self) -> None:
        """A module's weights are about to be read or written."""
        if self._overlap is not None and self._health.is_ours and not self._health.closed:
            self._drain_quietly()

    def _before_module_load(self) -> None:
        """See :meth:`_after_module_load`."""
        if self._mastered():
            self._device_state.check("a load into the model")
        self._weights_before = None
        # torch's helpers show the state, load weights and state into it in place, and only then
        # call the load methods, the module's first. So where state was shown, masters may have
        # come with these weights, and only a change that this very load makes is a new weight.
        if self._state_was_read and not self._ignores_module_loads() and self._mastered():
            self._weights_before = loading.weight_checksums(self._mastered())

    def _after_module_load(self) -> None:
        """A module was loaded: masters become its weights."""
        if self._ignores_module_loads():
            return
        self._drain_quietly()
        self._discard()
        before, self._weights_before = self._weights_before, None
        params = self._mastered()
        if before is not None:
            changed = (loading.weight_checksums(params) != before).tolist()
            params = [r for r, differs in zip(params, changed, strict=True) if differs]
        else:
            self._forget_frozen_masters()
        self._set_masters_from_weights(params)

    def _ignores_module_loads(self) -> bool:
        """After a load of ours, until the next step, masters belong to the weights to come."""
        health = self._health
        return health.closed or self._loaded_since_step or not health.is_ours

    def _mastered(self) -> list[ParamState]:
        return [r for r in self._params if r.form is not MasterForm.SHARD]

    def _set_masters_from_weights(self, params: list[ParamState]) -> None:
        with torch.no_grad():
            for param in params:
                state_io.write_master(param, {})
            for bucket in self._host_buckets():
                bucket.reseed()  # of other parameters, too: from here on their shards are trusted
            self._trust_shards()

    def _forget_frozen_masters(self) -> None:
        """Masters that were loaded for parameters which are not trained now."""
        if not is_torch_class(self._inner):
            return  # its state may have entries of these names
        for parameter, shown in self._shown.items():
            if parameter not in self._reserved:
                for form in (MasterForm.REMAINDER, MasterForm.WHOLE):
                    shown.pop(form.value, None)

    def _host_buckets(self) -> Iterator[HostBucket]:
        for engine in self._engines:
            yield from engine.host.buckets if engine.host is not None else ()

    def _trust_shards(self) -> None:
        self._followed = None
        for engine in self._engines:
            engine.trust_shards()

    def _drain(self) -> None:
        with contextlib.ExitStack() as waits:  # runs all of them, even if one raises
            if self._overlap is not None:
                waits.callback(self._overlap.let_read)  # last
            for engine in self._engines:
                waits.callback(engine.synchronize)
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
        for engine in self._engines:
            engine.close()
        self._engines.clear()
        self._params.clear()
        self._reserved.clear()
        if self._transfer is not None:
            self._transfer.close()
