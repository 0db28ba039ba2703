"""``HybridDeviceOptimizer``: offload the state of any dense torch optimizer to host memory.

Usage::

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    optimizer = HybridDeviceOptimizer(optimizer, model)

Guarantees: results equal the wrapped optimizer's bit for bit (with ``update_on="host"``, those of
torch's CPU kernel); parameters without gradient stay untouched; shards are written in place;
``step()`` issues no collective for element-wise optimizers.

Limits, each refused with a typed error: LBFGS, SparseAdam, ``differentiable=True``, sparse
gradients, non-contiguous shards, parameters on several devices, CUDA graph capture of ``step()``,
copying or pickling the wrapper, use in a forked process.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core import dtensor
from ..core.arguments import check_holds, leave_cpu, modules_of
from ..core.config import OffloadConfig, TransferConfig, check_keywords
from ..core.errors import ConfigError, copy_error
from ..core.offloadable import check_tensors, remove_all
from ..core.progress import is_rank_0, warn
from ..update.schema import is_torch_class
from .checkpoint_view import CheckpointView
from .device_state import DeviceState
from .gradients import clip
from .masters import watch_loads
from .statistics import Statistics, gather
from .updates import Updates
from .wrapping import check_wrappable, forward_bound_steps, make_face, without_face

_log = logging.getLogger("fsdp_offload")


class HybridDeviceOptimizer(Optimizer):
    """Wraps ``optimizer`` and keeps its state in host memory.

    Args:
        optimizer: any dense torch optimizer: fresh, stepped or loaded. From now on it acts as
            another name of the wrapper: state, groups, methods and hooks are the wrapper's.
        model: the module (or modules) with its parameters: gives names and the update order, and
            makes loads into the module visible. Weights of FSDP2's ``CPUOffloadPolicy`` move to the
            device.
        offload: ``"state"`` (default): optimizer state leaves the device. ``"all"``: also weights
            of FSDP2 modules, fetched before each gather, and gradients, from their reduction to
            their update.
        elementwise: declares that a class that is not torch's updates each element from that
            element and its state alone, and makes state at a parameter's first step. Without it,
            such a class runs its own step on the device, and its state stays there.
        offload_fraction: share of state bytes, 0 to 1 (default), that leaves the device; exact to
            the largest parameter.
        device_memory: bytes (or "8GiB") on each device for what is offloaded, to stream through
            and to stay in. ``"auto"`` (default) takes spare memory after a few steps, and gives it
            back when memory is short. 0: as little as possible. Does not change bits.
        host_memory: bytes that all objects of this package may use together, on all ranks of this
            host; None: free memory.
        update_on: where to update offloaded state: ``"device"`` (default), or ``"host"``, with
            torch's CPU kernels on this rank's cores.
        overlap: ``"step"``: updates run inside ``step()``. ``"forward"``: ``step()`` returns at
            once; each FSDP2 module of ``model`` waits for its own parameters, and other code waits
            when it uses a parameter or its gradient. ``"backward"``: also updates parameters as
            their gradients arrive; a later use of ``.grad`` raises :class:`SpentGradientError`.
            None (default): ``"forward"`` if all parameters are in FSDP2 modules of ``model`` and
            the class is an element-wise one of torch's; else ``"step"``.
        moments: how to store state: ``"fp32"``, ``"bf16"``, ``"int8"`` or a dtype; None: like
            torch, or fp32 beside a master.
        master_weights: keep an fp32 master for each parameter with a bf16 or fp16 shard. False:
            update in the shard's dtype, like torch.
        transfer: see :class:`TransferConfig`.

    Raises:
        ConfigError: an argument is wrong, or the optimizer holds no parameter of ``model``; also
            its subclasses ``UnsupportedOptimizerError`` and ``UnsupportedParameterError``.
        UnsupportedTorchError: this version of torch lacks a private name of FSDP2.
        DeviceError: torch cannot use the device here, or parameters are on several devices.
        HostMemoryError: what leaves the device does not fit into host memory.
        PinningError: the driver refused to page-lock it.
        DeviceMemoryError: the device has no memory left for slots.
        StateSchemaError: the class's step fails on a dense scratch parameter.
        StateDictError: the optimizer's existing state does not fit its parameters.
    """

    is_offloaded = True
    """Marks an optimizer that must not be wrapped again."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | Sequence[nn.Module] | None = None,
        *,
        offload: str = "state",
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
        check_keywords("HybridDeviceOptimizer", unknown, inspect.signature(type(self)).parameters)
        config = OffloadConfig.make(
            device_memory=device_memory,
            host_memory=host_memory,
            overlap=overlap,
            update_on=update_on,
            moments=moments,
            master_weights=master_weights,
            offload_fraction=offload_fraction,
            offload=offload,
            transfer=transfer,
        )
        check_wrappable(optimizer)
        models = modules_of(model)
        if models:
            check_holds(optimizer, models)
        else:
            warn(
                "HybridDeviceOptimizer without model=: it knows no parameter names, "
                "overlaps nothing, and misses loads into the module. Remedy: pass "
                "the module, HybridDeviceOptimizer(optimizer, model)"
            )
        if config.offload == "state":
            leave_cpu(models)  # else group by group, on the way to host memory
        self._wrapped, self._inner = optimizer, without_face(optimizer)
        steps_itself = not (elementwise or is_torch_class(optimizer))
        self._updates = Updates(self._inner, models, config, steps_itself=steps_itself)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._updates.build()
        self._connect(models)

    def _connect(self, models: Sequence[nn.Module]) -> None:
        updates = self._updates
        self._inner.state = updates.view.shown
        if not updates.steps_itself:
            forward_bound_steps(self._wrapped, self._inner, self)
            weakref.finalize(self, updates.view.shown.clear)
        make_face(self._wrapped, self._inner, self)
        updates.hooks += watch_loads(models, updates.masters)
        weakref.finalize(self, remove_all, updates.hooks)
        updates.life.open()
        if is_rank_0():
            _log.info("%s", self.statistics())

    # ------------------------------------------------------------------ the step

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, and return the closure's loss, if any.

        With ``overlap="step"``, parameters are ready for the current stream when it returns.
        Otherwise each FSDP2 module waits for its own; :meth:`synchronize` waits for all.

        Raises:
            ConfigError: a hyper-parameter changed after backward updated parameters with it.
            AwayError: this optimizer, a shard or a gradient is offloaded; nothing was changed.
            DeviceMemoryError: no room for gradients that come from host memory, or for scratch
                memory, which bf16 shards and packed moments need if hyper-parameters are tensors;
                nothing was updated.
            LaneError: this or an earlier update failed; only a load makes the optimizer usable.
            BusyError: a signal handler called this, or another method, in the middle of a call.
            StateSchemaError, UnsupportedParameterError: refused; nothing was updated.
        """
        self._updates.check_present("step()")
        if self._updates.steps_itself:
            with self._updates.life.turn("step()"):
                return self._updates.run_class(closure)
        with torch.enable_grad():
            loss = None if closure is None else closure()
        with self._updates.life.turn("step()"):
            self._updates.run()
        return loss

    # ------------------------------------------------------------------ torch.optim.Optimizer

    @property
    def state(self) -> defaultdict[Tensor, dict[str, Any]]:
        """Live state per parameter, after all transfers, as tensors over host or device memory."""
        updates = self._updates
        if updates.life.is_built:
            with updates.life.turn("optimizer.state"):
                updates.finish()
                updates.view.show(updates.reserved.params)
        return updates.view.shown

    @state.setter
    def state(self, value: object) -> None:
        if self._updates.life.is_built and self._updates.steps_itself:
            self._inner.state = value  # type: ignore[assignment]
        elif self._updates.life.is_built:
            raise ConfigError(
                "assignment to optimizer.state",
                reason="updates use the memory reserved for the state, not another dict",
                remedy="call optimizer.state.clear() to continue without state, or "
                "load_state_dict()",
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group like torch, and reserve its state at once."""
        if not self._updates.life.is_built:
            super().add_param_group(param_group)
            return
        self._updates.check_present("add_param_group()")
        with self._updates.life.turn("add_param_group()"):
            self._updates.follow_groups()
            self._updates.refuse_if_taken("add_param_group() before step()")
            if self._updates.steps_itself:
                type(self._inner).add_param_group(self._inner, param_group)
                return
            with self._updates.adding_group():
                super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients like torch, and Megatron-FSDP's ``decoupled_grad``.

        Raises:
            SpentGradientError: called between a backward that updated parameters and ``step()``.
            AwayError: a gradient to fill with zeros is offloaded.
        """
        with self._updates.life.turn("zero_grad()"):
            self._updates.refuse_if_taken("zero_grad() before step()")
            if self._updates.overlap is not None:
                self._updates.overlap.clear_spent(set_to_none=set_to_none)
            if not set_to_none:
                gradients = (p.grad for group in self.param_groups for p in group["params"])
                check_tensors("zero_grad(set_to_none=False)", gradients)
            super().zero_grad(set_to_none)
            for group in self.param_groups:
                for parameter in group["params"]:
                    dtensor.clear_decoupled_gradient(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict like torch's: integer ids and live tensors, which the plain optimizer
        accepts.

        Parameters with an fp32 master have one more entry, ``master_remainder`` (bits) or
        ``master`` (fp32), which plain optimizers ignore.
        """
        updates = self._updates
        updates.life.check()
        if updates.steps_itself:
            return type(self._inner).state_dict(self._wrapped)  # reads self.state
        updates.view.name_masters(updates.reserved.params)
        with updates.life.held("state_dict()"):  # hooks may use the optimizer
            return super().state_dict()  # reads self.state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict into the reserved memory, in place; dtypes and devices stay.

        Accepts integer ids or FQN strings, from this class or the plain optimizer, and matches
        parameters by position, like torch. Load the model's weights first.

        Raises:
            StateDictError: groups, keys, shapes or placements do not fit; nothing was written.
        """
        updates = self._updates
        updates.check_present("load_state_dict()", failed_ok=True)
        if updates.steps_itself:
            with updates.life.held("load_state_dict()"):  # hooks may use the optimizer
                type(self._inner).load_state_dict(self._inner, dict(state_dict))
            self.param_groups = self._inner.param_groups
            return
        loaded: Any = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, loaded)
            loaded = loaded if replaced is None else replaced
        with updates.life.turn("load_state_dict()"):
            updates.load(loaded)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    # ------------------------------------------------------------------ the wrapper's own

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip all gradients in place, with the bits of ``torch.nn.utils.clip_grad_norm_``.

        Also accepts parameters on several meshes, which torch refuses.

        Returns:
            The norm before clipping: 0-dim, a replicated DTensor if all gradients are on one mesh.

        Raises:
            SpentGradientError: with ``overlap="backward"``, because backward has used the
                gradients.
            NonFiniteGradientError: ``error_if_nonfinite`` is set and the norm is not finite.
        """
        with self._updates.life.turn("clip_grad_norm_()"):  # given up for the collectives below
            self._updates.life.check()
        parameters = (p for group in self.param_groups for p in group["params"])
        return clip(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    @property
    def device(self) -> torch.device:
        """Device of the shards."""
        return self._updates.reserved.backend.device

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """Make backward only add to ``.grad`` inside, for all micro-batches but the last.

        Only ``overlap="backward"`` needs it, unless the caller already tells FSDP2
        (``set_requires_gradient_sync(False)`` or ``set_is_last_backward(False)``). With
        ``offload="all"``, gradients leave the device from the first call on, as with the other
        overlaps.

        Raises:
            HostMemoryError, PinningError: what leaves does not fit into host memory.
        """
        updates = self._updates
        return contextlib.nullcontext() if updates.overlap is None else updates.accumulate()

    def synchronize(self) -> None:
        """Block until parameters and state are final, and host memory may be read."""
        with self._updates.life.turn("synchronize()"):
            self._updates.synchronize()

    def resync(self) -> None:
        """Set every master equal to its weight, after the caller wrote into parameters.

        Loads into the module given as ``model=`` do not need it. Without it, bf16 masters are at
        most half a bf16 ulp off.
        """
        updates = self._updates
        updates.device_state.check("resync()")
        with updates.life.turn("resync()"):
            updates.finish()
            updates.masters.set_from_weights(updates.reserved.params)
            updates.masters.forget_frozen()

    def statistics(self) -> Statistics:
        """Return memory by place, and figures of the last step."""
        with self._updates.life.turn("statistics()"):
            return gather(self._updates)

    def close(self) -> None:
        """Finish all work and free host memory, slots and the host thread. Idempotent.

        Raises:
            DeviceMemoryError: no room for weights that come back; free memory and call it again.
        """
        self._updates.close()

    def __repr__(self) -> str:
        shown, life = super().__repr__(), self._updates.life
        if life.closed:
            return f"{shown}\nclosed"
        return f"{shown}\n{self.statistics()}" if life.is_built else shown

    def __getattr__(self, name: str) -> Any:
        """Forward other attributes to the wrapped class, such as ``train()`` and ``eval()``."""
        inner = self.__dict__.get("_inner")
        if inner is None or name.startswith("_") or not hasattr(inner, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Forward attributes that this class lacks to the wrapped class, whose code reads them."""
        updates = self.__dict__.get("_updates")
        is_built = updates is not None and updates.life.is_built
        is_shared = is_built and name[0] != "_" and not hasattr(type(self), name)
        if is_shared:
            setattr(self._inner, name, value)
        if not is_shared or name in self.__dict__:
            super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: object) -> NoReturn:  # copy.deepcopy also calls it
        raise copy_error(self, "save state_dict() and load it into a new wrapper")

    @property
    def _for_checkpoints(self) -> CheckpointView:
        return CheckpointView(self, self._updates)

    @property
    def _offloadable(self) -> DeviceState:
        return self._updates.device_state
