"""Guard models and optimizers while their memory is offloaded: refuse use, show host copies.

Each guard is a torch hook on a module or an optimizer, not a replaced method: hooks refuse forward,
``step()`` and loads before they touch anything, and put host copies into state dicts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..core.backend import Backend, Event
from ..core.errors import AwayError, ConfigError
from ..core.offloadable import HostCopies, remove_all

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
        """Do nothing: its work is on the current stream."""

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
            state_dict["state"] = _mapped(state_dict["state"], lambda t: _shown(copies, t))
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


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped(each, change) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(each, change) for each in value)
    return value
