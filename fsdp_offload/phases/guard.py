"""Guard what is offloaded: refuse use, show host copies, and lose no gradient.

Each guard is a torch hook on a module or an optimizer, not a replaced method: hooks refuse forward,
``step()`` and loads before they touch anything, and put host copies into state dicts.

An offload drops only gradients that ``step()`` has consumed. After each step, a weak list remembers
the gradients and their version counters. ``offload()`` counts a gradient as consumed if it is on
that list and unchanged since: another backward makes a new one, or adds to it in place. A gradient
of zeros, as ``zero_grad(set_to_none=False)`` leaves it, has nothing to lose.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..core import dtensor
from ..core.backend import Backend, Event
from ..core.errors import AwayError, ConfigError, UnspentGradientError
from ..core.fsdp import Group
from ..core.offloadable import HostCopies, offloadable_of, remove_all
from ..core.spent import is_spent
from ..update.schema import replaced

_NEEDED_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_state_dict_post_hooks")


def _refuse(what: str) -> NoReturn:
    raise AwayError(
        what, reason="its memory is offloaded", remedy="call reload() of its PhaseOffloader first"
    )


class ModelGuard:
    """Installs hooks on all modules of ``models`` from :meth:`close` to :meth:`open`."""

    def __init__(self, models: Sequence[nn.Module], owner: object, *, allows_forward: bool) -> None:
        # Hooks keep the owner alive: only it can bring the memory back.
        self._models, self._owner, self._allows_forward = models, owner, allows_forward
        self._handles: list[RemovableHandle] = []
        self._copies: HostCopies | None = None

    def __reduce__(self) -> NoReturn:
        _refuse("a copy or a pickle of a model")  # its hooks would be copied with it

    def close(self, copies: HostCopies) -> None:
        """Install the hooks; state dicts show ``copies``."""
        self._copies = copies
        for module in dict.fromkeys(m for model in self._models for m in model.modules()):
            # torch sets an attribute on the hook, which a method does not allow.
            show = module.register_state_dict_post_hook(functools.partial(self._show))
            # At the front: hooks of others look at values.
            module._state_dict_hooks.move_to_end(show.id, last=False)  # type: ignore[attr-defined]
            self._handles += [show, module.register_load_state_dict_pre_hook(self._before_load)]
            if not self._allows_forward:  # at the front, too: FSDP2's own hook reads the shards
                hook = module.register_forward_pre_hook(self._before_forward, prepend=True)
                self._handles.append(hook)

    def open(self) -> None:
        """Remove the hooks. Idempotent."""
        remove_all(self._handles)
        self._copies = None

    def _before_forward(self, module: nn.Module, args: object) -> None:
        _refuse(f"forward of {type(module).__name__}")

    def _before_load(self, module: nn.Module, *_: object) -> None:
        _refuse(f"load_state_dict() of {type(module).__name__}")

    def _show(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object
    ) -> None:
        """Replace the module's entries by host copies; the outermost module's also under custom
        names."""
        copies = self._copies
        if copies is None:
            return
        copies.wait()
        if any(module is model for model in self._models):
            keys = [key for key in state_dict if key.startswith(prefix)]
        else:
            keys = [prefix + name for name in (*module._parameters, *module._buffers)]
        for key in keys:
            value = state_dict.get(key)
            # A Parameter: keep_vars=True asks for the objects, not for their values.
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                state_dict[key] = _shown(copies, value)


class PlainOptimizer:
    """Any other ``torch.optim.Optimizer`` as an :class:`.Offloadable`.

    Raises:
        ConfigError: it lacks torch's hooks.
    """

    def __init__(self, optimizer: Optimizer, backend: Backend) -> None:
        self._name = type(optimizer).__name__
        if not all(hasattr(optimizer, name) for name in _NEEDED_HOOKS):
            raise ConfigError(
                f"optimizer {self._name}",
                reason="it lacks torch's hooks: its class does not call Optimizer.__init__",
                remedy="pass the optimizer that it wraps",
            )
        self._optimizer, self._backend = optimizer, backend
        self._copies: HostCopies | None = None
        self._arrival: Event | None = None  # the caller's stream has yet to wait for it
        self._rates: list[Any] = []

    def hooks(self) -> list[RemovableHandle]:
        """Install the hooks; the caller removes them."""
        return [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_state_dict_post_hook(self._show),
            self._optimizer.register_load_state_dict_pre_hook(self._before_load),
        ]

    @property
    def is_away(self) -> bool:
        return self._copies is not None

    def turn(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return no turn: as with torch, threads do not wait for each other."""
        return contextlib.nullcontext()

    def prepare_offload(self) -> None:
        """Finish nothing: its work is on the current stream."""
        if offloadable_of(self._optimizer) is not None:
            raise ConfigError(
                f"PhaseOffloader of {self._name}",
                reason="HybridDeviceOptimizer has wrapped the optimizer since it was passed here",
                remedy="wrap first, then build PhaseOffloader(model, wrapper)",
            )

    def prepare_reload(self) -> None:
        """Do nothing: the caller's changes are already in the state."""

    def device_tensors(self) -> list[tuple[str, Tensor]]:
        state = self._optimizer.state
        return [
            (f"{index}.{count}", tensor)
            for index, parameter in enumerate(parameters_of(self._optimizer))
            for count, tensor in enumerate(_leaves(state.get(parameter)))
        ]

    def staging_buffers(self) -> Sequence[Tensor]:
        return ()

    def set_away(self, copies: HostCopies) -> None:
        self._copies = copies
        self._rates = [group.get("lr") for group in self._optimizer.param_groups]

    def set_present(self, arrival: Event | None) -> None:
        self._copies, self._arrival = None, arrival

    def _before_step(self, *_: object) -> None:
        if self._copies is not None:
            is_first = self._undo_initialisation()
            what = "a save or load before the first step()" if is_first else "step()"
            _refuse(f"{what} of {self._name}")
        self._follow()

    def _follow(self) -> None:
        if self._arrival is not None:
            self._backend.current_stream().wait(self._arrival)
            self._arrival = None

    def _undo_initialisation(self) -> bool:
        """Undo how ``torch.distributed.checkpoint.state_dict`` initialises state: a step with
        gradients and rates of 0, which it leaves behind if the step raises. False: it did not."""
        groups = self._optimizer.param_groups
        rates = [group.get("lr") for group in groups]
        # A warm-up may begin at a rate of 0: those gradients are the caller's.
        if rates == self._rates or self._optimizer.state or any(rate != 0.0 for rate in rates):
            return False
        for group, rate in zip(groups, self._rates, strict=False):
            if rate is not None:
                group["lr"] = rate
        self._optimizer.zero_grad()
        return True

    def _show(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        copies = self._copies
        if copies is not None:
            copies.wait()
            state_dict["state"] = replaced(state_dict["state"], lambda t: _shown(copies, t))
        self._follow()

    def _before_load(self, *_: object) -> None:
        if self._copies is not None:
            _refuse(f"load_state_dict() of {self._name}")
        self._follow()


def _shown(copies: HostCopies, tensor: Tensor) -> Tensor:
    copy = copies.of(tensor)
    return tensor if copy is None else copy


def parameters_of(optimizer: Optimizer | None) -> list[Tensor]:
    """List the parameters that it updates."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [parameter for group in groups for parameter in group["params"]]


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)


class Gradients:
    """``.grad`` of all parameters, and gradients that FSDP2 keeps for a later reduction.

    ``policy``: see ``grads`` of :class:`.PhaseOffloader`. Steps of ``optimizer`` consume gradients.
    """

    def __init__(
        self, policy: str | None, groups: Sequence[Group], optimizer: Optimizer | None
    ) -> None:
        self._policy, self._groups, self._optimizer = policy, groups, optimizer
        self._consumed: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by identity

    def hooks(self) -> list[RemovableHandle]:
        """Install hooks that watch steps; the caller removes them."""
        if self._policy is not None or self._optimizer is None:
            return []
        return [self._optimizer.register_step_post_hook(self._note_step)]

    def _note_step(self, *_: object) -> None:
        found = map(dtensor.raw_gradient, parameters_of(self._optimizer))
        self._consumed = {
            id(gradient): (weakref.ref(gradient), _version(gradient))
            for gradient in found
            if gradient is not None and not is_spent(gradient)
        }

    # Does not wait for running updates.
    _note_step.reads_parameters = False  # type: ignore[attr-defined]

    def check(self, parameters: Mapping[str, Tensor]) -> None:
        """Refuse to drop gradients that no step has consumed, unless the policy allows it.

        Raises:
            UnspentGradientError: a gradient would be lost.
        """
        if self._policy is not None:
            return
        for name, parameter in parameters.items():
            gradient = dtensor.raw_gradient(parameter)
            if gradient is not None and not self._is_consumed(gradient):
                raise self._unspent(name.partition(".")[2], parameter)
        if any(group.waiting_gradients for group in self._groups):
            raise UnspentGradientError(
                "offload() with gradients that FSDP2 has not reduced",
                reason="they would be dropped",
                remedy="call step() after a backward that reduces them, or build PhaseOffloader "
                'with grads="save"',
            )

    def _is_consumed(self, gradient: Tensor) -> bool:
        if is_spent(gradient):
            return True
        find, version = self._consumed.get(id(gradient), (None, 0))
        if find is not None and find() is gradient and _version(gradient) == version:
            return True
        # The host waits for the device here, but only for gradients that no step has seen.
        return gradient.layout is torch.strided and not bool(dtensor.local(gradient).any())

    def _unspent(self, fqn: str, parameter: Tensor) -> UnspentGradientError:
        if any(parameter is each for each in parameters_of(self._optimizer)):
            reason = "no step() has consumed it since this PhaseOffloader was built"
            remedy = 'call step() first, or zero_grad() to drop it, or build it with grads="save"'
        else:
            reason = "no optimizer that holds this parameter was passed"
            remedy = 'call model.zero_grad() first, or build PhaseOffloader with grads="drop"'
        return UnspentGradientError(
            f"offload() with the gradient of {fqn}",
            reason=f"it would be dropped, and {reason}",
            remedy=remedy,
        )

    def tensors(self, parameters: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        """List keys and tensors of the gradients that are kept."""
        if self._policy in (None, "drop"):
            return []
        found = [
            (name, gradient)
            for name, p in parameters.items()
            if (gradient := dtensor.raw_gradient(p)) is not None and not is_spent(gradient)
        ]
        for index, group in enumerate(self._groups):
            waiting = enumerate(group.waiting_gradients)
            found += [(f"group{index}.{i}", tensor) for i, tensor in waiting]
        return found

    def drop(self, parameters: Mapping[str, Tensor]) -> None:
        """Set dropped gradients to None. Idempotent."""
        if self._policy not in (None, "drop"):
            return
        for parameter in parameters.values():
            parameter.grad = None
            dtensor.clear_decoupled_gradient(parameter)
        for group in self._groups:
            group.drop_waiting_gradients()


def _version(gradient: Tensor) -> int:
    """Return a counter of writes, which includes FSDP2's into the shard of a DTensor."""
    shard = dtensor.local(gradient)
    return 0 if shard.is_inference() else shard._version
