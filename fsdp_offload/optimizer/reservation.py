"""State that is reserved: engines, the parameters in them, and how more comes to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core import dtensor
from ..core.arguments import backend_of
from ..core.backend import Backend
from ..core.config import Lane, OffloadConfig
from ..core.errors import DeviceError
from ..link import HostPool
from ..pipeline.engine import Engine
from ..pipeline.inventory import Inventory, Placed
from ..update import state as state_io
from ..update.params import MasterForm, ParamState
from .state_view import StateView


class Reservation:
    """One engine for the parameters given at construction, one more for each later addition."""

    def __init__(
        self,
        inner: Optimizer,
        models: Sequence[nn.Module],
        config: OffloadConfig,
        backend: Backend,
        view: StateView,
    ) -> None:
        self.inner, self._models, self.config, self._view = inner, models, config, view
        self.backend = backend
        self.engines: list[Engine] = []
        self.params: list[ParamState] = []
        self.never_have_gradients: list[ParamState] = []
        self._managed: set[Tensor] = set()  # parameters that are reserved, or left to the class
        self._closers: list[Callable[[], object]] = []  # each gives memory back, once
        self.inventory = self._new_inventory()
        self.pool = self._new_pool()

    def _new_pool(self) -> HostPool:
        holder = f"HybridDeviceOptimizer: state of {type(self.inner).__name__}"
        return HostPool(holder, self.backend, self.config.transfer)

    def _new_inventory(self) -> Inventory:
        return Inventory(self.inner, self._models, self.config, self.backend.device)

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
        others = self._view.unmanaged(self.params).values()
        return not any(others) and all(map(state_io.is_fresh, self.params))

    def extend(self, added: list[Placed], lanes: Mapping[Tensor, Lane] | None = None) -> None:
        """Reserve state for parameters, in ``lanes`` if they had some before; on error everything
        is as before."""
        if not added:
            return
        backend = backend_of(parameter for parameter, _ in added)
        if backend.device != self.backend.device:
            raise DeviceError(
                f"parameters on {backend.device}",
                reason=f"this optimizer streams over the link of {self.backend.device}",
                remedy="move them there, or wrap another optimizer for them",
            )
        params, natives = self.inventory.plan(added, lanes=lanes)
        shown = self._view.shown
        frozen = {p: shown[p] for p, _ in added if shown.get(p)}
        for param in params:
            state_io.check(param, frozen.get(param.parameter, {}))
        everything = [*self.params, *params]
        for index, param in enumerate(everything):
            param.spec = replace(param.spec, index=index)
        taken = sum(engine.own_bytes for engine in self.engines)
        with torch.no_grad():
            engine = Engine(
                self.inner,
                everything,
                params,
                natives,
                self.config,
                self.backend,
                device_bytes=self.config.first_device_bytes - taken,
                pool=self.pool,
                native_state=shown,
            )
            try:
                for param in params:
                    if found := frozen.get(param.parameter):
                        # It was trained before. Its weight may have been replaced meanwhile.
                        state_io.write(param, state_io.agreeing(param, found))
                exposed = {param.parameter: state_io.expose(param) for param in params}
            except BaseException:
                engine.close()
                raise
        self._closers.append(weakref.finalize(self, engine.close))
        self.engines.append(engine)
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
                    self._view.shown[parameter].update(found)

    def renew(self) -> None:
        """Reserve anew, in the same lanes, what options have come to need."""
        kept = {param.parameter: state_io.copied(param) for param in self.params}
        # Frozen ones, too: they keep their state, and may be unfrozen.
        again = [placed for placed in self.inventory.parameters() if placed[0] in self._managed]
        lanes = {param.parameter: param.lane for param in self.params}
        self.close()
        for parameter in kept:
            del self._view.shown[parameter]
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
        self._view.shown.clear()
        self.inventory = self._new_inventory()
        self.pool = self._new_pool()
        self.extend(self.inventory.trainable())

    def close(self) -> None:
        """Give all memory back. Idempotent."""
        for close in self._closers:
            close()
        self._closers.clear()
        self.engines, self.params, self.never_have_gradients = [], [], []
        self.pool.close()

    # ------------------------------------------------------------------ all engines

    def mastered(self) -> list[ParamState]:
        """Parameters whose fp32 master is not the shard itself."""
        return [param for param in self.params if param.form is not MasterForm.SHARD]

    def natives(self) -> list[Tensor]:
        """Trainable parameters whose state the class makes and keeps."""
        managed = {param.parameter for param in self.params}
        return [p for p, _ in self.inventory.trainable() if p not in managed]

    def discard(self) -> None:
        """Forget state that was fetched ahead: it is about to be written into."""
        for engine in self.engines:
            engine.discard()
