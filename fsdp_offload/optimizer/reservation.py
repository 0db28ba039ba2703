"""State that is reserved: of which parameters, and how more comes to it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core import dtensor
from ..core.arguments import backend_of
from ..core.backend import Backend
from ..core.config import Lane, OffloadConfig
from ..core.errors import DeviceError, StateDictError
from ..core.gated import bring_back
from ..link import HostPool, allocating
from ..plan.residency import LEAST_SLOTS
from ..update import state as state_io
from ..update.params import MasterForm, ParamState
from ..update.schema import signature
from .engine import Engine
from .inventory import Inventory, Placed, missing_kinds
from .state_view import Groups, StateView
from .weights import Weights

IMPLEMENTATION_FLAGS: Final = frozenset(("foreach", "fused", "capturable", "differentiable"))
"""Group values that say how a kernel runs, not what it computes: a load keeps the current ones."""


class Reservation:
    """Parameters with state, and the engine that has it."""

    def __init__(
        self,
        inner: Optimizer,
        models: Sequence[nn.Module],
        config: OffloadConfig,
        backend: Backend,
        view: StateView,
    ) -> None:
        self.inner, self._models, self.config, self.view = inner, models, config, view
        self.backend = backend
        self.params: list[ParamState] = []
        self.never_have_gradients: list[ParamState] = []
        self._managed: set[Tensor] = set()  # parameters that are reserved, or left to the class
        self.weights: Weights | None = None
        self._start()

    def _start(self) -> None:
        """With nothing reserved yet."""
        self.inventory = Inventory(self.inner, self._models, self.config, self.backend.device)
        holder = f"HybridDeviceOptimizer: state of {type(self.inner).__name__}"
        self.pool = HostPool(holder, self.backend, self.config.transfer)
        self.engine = self._new_engine()

    def use(self, weights: Weights) -> None:
        """Let updates bring those along that are in host memory; nothing is reserved yet."""
        self.weights = weights
        self.engine.use(weights)

    def _new_engine(self) -> Engine:
        engine = Engine(self.config, self.backend, self.pool)
        if self.weights is not None:
            engine.use(self.weights)
        self._close_engine: Callable[[], object] = weakref.finalize(self, engine.close)
        return engine

    # ------------------------------------------------------------------ reserving

    def late(self) -> list[Placed]:
        """Parameters without state that were unfrozen, or given a gradient, after wrapping."""
        return [
            (parameter, group)
            for parameter, group in self.inventory.parameters()
            if parameter not in self._managed
            and (parameter.requires_grad or parameter.grad is not None)
        ]

    def is_fresh(self) -> bool:
        """Whether there is no state but what is shown before a first update."""
        others = self.view.unmanaged(self.params).values()
        return not any(others) and all(map(state_io.is_fresh, self.params))

    def extend(self, added: list[Placed], lanes: Mapping[Tensor, Lane] | None = None) -> None:
        """Reserve state for parameters, in ``lanes`` if they had some before; on error, such as
        DeviceMemoryError and HostMemoryError, everything is as before."""
        if not added:
            return
        trained = {} if self.weights is None else self.weights.trained
        backend = backend_of(parameter for parameter, _ in added)
        if backend.device != self.backend.device:
            raise DeviceError(
                f"parameters on {backend.device}",
                reason=f"this optimizer uses the link of {self.backend.device}",
                remedy="move them there, or wrap another optimizer for them",
            )
        params, natives = self.inventory.plan(added, lanes=lanes)
        for param in params:
            if param.lane == "streamed" and param.parameter in trained:
                param.host_shard = trained[param.parameter].shard
        with_state = {param.parameter for param in params if param.host_shard is not None}
        bring_back(dtensor.with_history(p) for p, _ in added if p not in with_state)
        for param in params:
            param.memory = dtensor.memory_of(param.parameter)
        shown = self.view.shown
        frozen = {p: shown[p] for p, _ in added if shown.get(p)}
        for param in params:
            state_io.check(param, frozen.get(param.parameter, {}))
        everything = [*self.params, *params]
        for index, param in enumerate(everything):
            param.spec = replace(param.spec, index=index)
        with (
            allocating(LEAST_SLOTS * self.config.bucket_bytes, "state", "a smaller bucket_bytes="),
            torch.no_grad(),
            self.engine.appending(self.inner, everything, params, natives, shown),
        ):
            for param in params:
                if found := frozen.get(param.parameter):
                    # It was trained before. Its weight may have been replaced meanwhile.
                    state_io.write(param, state_io.reconciled(param, found))
            exposed = {param.parameter: state_io.expose(param) for param in params}
        self.params = everything
        self.never_have_gradients = [
            param for param in everything if dtensor.never_has_gradient(param.parameter)
        ]
        shown.update(exposed)
        self._managed.update(parameter for parameter, _ in added)

    def take_over(self) -> None:
        """Copy state that the wrapped optimizer already has; it drops its own afterwards."""
        state = self.inner.state
        managed = {param.parameter for param in self.params}
        for param in self.params:
            state_io.check(param, state.get(param.parameter, {}))
        with torch.no_grad():
            for param in self.params:
                if found := state.get(param.parameter):
                    state_io.write(param, found)
            for parameter, found in state.items():
                if parameter not in managed:
                    self.view.shown[parameter].update(found)

    def renew(self) -> None:
        """Reserve anew, in the same lanes, what options have come to need."""
        kept = {param.parameter: state_io.copied(param) for param in self.params}
        # Frozen ones, too: they keep their state, and may be unfrozen.
        again = [placed for placed in self.inventory.parameters() if placed[0] in self._managed]
        lanes = {param.parameter: param.lane for param in self.params}
        self.close()
        self.engine = self._new_engine()
        for parameter in kept:
            del self.view.shown[parameter]
        self.extend(again, lanes)
        for param in self.params:
            state_io.write(param, kept[param.parameter])

    def exchange(self, config: OffloadConfig) -> None:
        """As at construction, for the parameters that the groups have now; there is no state."""
        groups = self.inner.param_groups
        self.backend = backend_of(p for group in groups for p in group["params"])
        self.config = config
        self.close()
        self._managed.clear()
        self.view.shown.clear()
        self._start()
        self.extend(self.inventory.trainable())

    def close(self) -> None:
        """Give all memory back. Idempotent."""
        self._close_engine()
        self.params, self.never_have_gradients = [], []
        self.pool.close()

    def checked_groups(self, saved: Sequence[Mapping[str, Any]]) -> Groups:
        """Group values of a load to take over.

        Raises:
            StateDictError: their flags need state that is not reserved (``amsgrad``, ...).
        """
        result = []
        pairs = zip(self.inner.param_groups, saved, strict=True)
        for index, (group, saved_group) in enumerate(pairs):
            values = {
                name: copy.deepcopy(value)
                for name, value in saved_group.items()
                if name != "params" and name not in IMPLEMENTATION_FLAGS
            }
            after = {**group, **values}
            param = next((r for r in self.params if r.group == index), None)
            if param is not None and signature(after) != signature(group):
                if missing := missing_kinds(param, self.inventory.schema(param, after)):
                    raise StateDictError(
                        f"param_groups[{index}] of the checkpoint",
                        reason=f"its options need state {missing}, which is not reserved",
                        remedy="build the optimizer with the options of the checkpoint",
                    )
            result.append(values)
        return result

    def mastered(self) -> list[ParamState]:
        """Parameters whose fp32 master is not the shard itself."""
        return [param for param in self.params if param.form is not MasterForm.SHARD]

    def natives(self) -> list[Tensor]:
        """Trainable parameters whose state the class makes and keeps."""
        managed = {param.parameter for param in self.params}
        return [p for p, _ in self.inventory.trainable() if p not in managed]
