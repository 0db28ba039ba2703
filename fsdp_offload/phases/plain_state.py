"""A plain optimizer's state while it is away: shown, loaded and kept from being stepped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import shards
from ..interrupts import held_back
from ..moving import absent
from ..overwriting import is_same, kept_apart
from ..patching import Patch, remove_all


class PlainState:
    """State tensors of any ``torch.optim.Optimizer``.

    Args:
        optimizer: not wrapped.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._arrivals: list[tuple[Tensor, Any]] = []

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Keys and tensors of the state that exists now."""
        state = self._optimizer.state
        for index, parameter in enumerate(parameters_of(self._optimizer)):
            for path, tensor in _leaves(state.get(parameter, {})):
                yield f"state.{index}.{path}", tensor

    def close(self, patches: list[Patch]) -> None:
        """Show host tensors to ``state_dict()``, and load into them, until ``patches``, which get
        what does, are removed."""
        Patch(self._optimizer, "state_dict", self._show, patches)
        Patch(self._optimizer, "load_state_dict", self._load, patches)

    def arrive(self) -> None:
        """Bring to the device what was loaded in the place of nothing.

        Raises:
            torch.OutOfMemoryError: nothing was moved.
        """
        state = self._optimizer.state
        moved = [
            (state[parameter], name, _to_device(state[parameter][name], parameter))
            for parameter, name in self._arrivals
            if name in state.get(parameter, {})
        ]
        for values, name, value in moved:
            values[name] = value
        self._arrivals.clear()

    @held_back()
    def _show(self, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        live = self._optimizer.state
        shown: defaultdict[Tensor, Any] = defaultdict(dict)
        shown.update({p: _mapped(values, absent.present) for p, values in live.items()})
        self._optimizer.state = shown
        try:
            return original()
        finally:
            self._optimizer.state = live

    @held_back()
    @torch.no_grad()
    def _load(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """torch puts what it loads where the parameters are: for the time of the load, here.

        The load's post hooks see the parameters themselves, and values in host memory.

        Whatever raises, a hook too: the optimizer is as it was before the load until all is loaded,
        into host memory of its own. Then it is loaded: what raises while values go on from there to
        the places of those that are away leaves each of them, wherever it is by then, as loaded.
        """
        optimizer, arrivals, patches = self._optimizer, self._arrivals, list[Patch]()
        before, stand_ins = optimizer.state, _StandIns(optimizer)

        def set_state(set_all: Callable[[Any], None], state: Any) -> None:
            set_all(state)
            stand_ins.leave()  # post hooks come next

        try:
            Patch(optimizer, "__setstate__", set_state, patches)
            stand_ins.enter()
            original(*args, **kwargs)
            stand_ins.leave()  # an optimizer may have a load of its own
            remove_all(patches)
            if optimizer.state is before:
                return
            fits, others = self._sorted(before)
            # All of them, as long as no value has gone to its place.
            self._arrivals = [*others, *(each.key for each in fits if each.belongs_on_device)]
        except BaseException:
            stand_ins.undo()
            self._arrivals = arrivals
            remove_all(patches)
            raise
        for fit in fits:
            if not is_same(fit.target, fit.source):
                fit.target.copy_(fit.source)
            fit.values[fit.key[1]] = fit.old
        self._arrivals = others

    def _sorted(self, before: Any) -> tuple[list[_Fit], list[tuple[Tensor, Any]]]:
        """Loaded values that fit those of ``before`` that are away, and others that belong on the
        device."""
        optimizer, fits, others = self._optimizer, list[_Fit](), list[tuple[Tensor, Any]]()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                values, earlier = optimizer.state.get(parameter, {}), before.get(parameter, {})
                for name, value in values.items():
                    if isinstance(value, Tensor) and absent.is_absent(value):
                        continue  # a hook has put it back: it comes by itself
                    key, moves = (parameter, name), _belongs_on_device(group, name)
                    pair = _pair(earlier.get(name), value)
                    if pair is not None:
                        fits.append(_Fit(values, key, earlier[name], *pair, moves))
                    elif moves:
                        others.append(key)
        sources = kept_apart([fit.target for fit in fits], [fit.source for fit in fits])
        return [fit._replace(source=s) for fit, s in zip(fits, sources, strict=True)], others


class _Fit(NamedTuple):
    """A loaded value for which there is a place."""

    values: dict[Any, Any]
    """That it is among."""

    key: tuple[Tensor, Any]
    """Its parameter, and its name in ``values``."""

    old: Tensor
    """Whose place it is, and who takes the value's."""

    target: Tensor
    source: Tensor
    belongs_on_device: bool


class _StandIns:
    """Empty host parameters of the same dtypes, in the place of an optimizer's, for a load.

    Args:
        optimizer: not changed before :meth:`enter`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state, self._groups = optimizer.state, optimizer.param_groups
        self._parameters: list[list[Tensor]] = [group["params"] for group in self._groups]
        self._stand_for: dict[Any, Tensor] = {}
        self._are_in = False

    def enter(self) -> None:
        """From now on groups have them."""
        self._are_in = True
        for group, parameters in zip(self._groups, self._parameters, strict=True):
            made = [nn.Parameter(torch.empty(0, dtype=p.dtype), False) for p in parameters]
            self._stand_for.update(zip(made, parameters, strict=True))
            group["params"] = made

    def leave(self) -> None:
        """Groups have parameters again, and state that was loaded for stand-ins is theirs.
        Idempotent."""
        if not self._are_in:
            return
        # A load makes new groups, around the same lists.
        for groups in (self._groups, self._optimizer.param_groups):
            for group, parameters in zip(groups, self._parameters, strict=True):
                group["params"] = parameters
        loaded = self._optimizer.state
        if any(key in self._stand_for for key in loaded):
            state: defaultdict[Any, Any] = defaultdict(dict)
            state.update({self._stand_for.get(key, key): each for key, each in loaded.items()})
            self._optimizer.state = state
        self._are_in = False

    def undo(self) -> None:
        """Groups and state are those from before."""
        for group, parameters in zip(self._groups, self._parameters, strict=True):
            group["params"] = parameters
        for key in self._stand_for:  # a pre hook that looks for state makes an entry
            self._state.pop(key, None)
        self._optimizer.param_groups, self._optimizer.state = self._groups, self._state


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _leaves(each, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{path}.{index}")


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped(each, change) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(each, change) for each in value)
    return value


def _pair(old: Any, new: Any) -> tuple[Tensor, Tensor] | None:
    """Where ``old`` is and what of ``new`` goes there, if it is away and fits."""
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return None
    view = absent.host_view(old)
    fits = view is not None and (view.shape, view.dtype) == (new.shape, new.dtype)
    if view is None or not fits or not shards.same_placement(old, new):
        return None
    target, source = shards.local(view), shards.local(new)
    return (target, source) if target.shape == source.shape else None


def _belongs_on_device(group: dict[str, Any], name: Any) -> bool:
    """torch's rule of where a load puts state."""
    return name != "step" or bool(group.get("capturable") or group.get("fused"))


def _to_device(value: Any, parameter: Tensor) -> Any:
    device = shards.local(parameter).device

    def move(tensor: Tensor) -> Tensor:
        shard = shards.local(tensor)
        return tensor if shard.device == device else shards.like(tensor, shard.to(device))

    return _mapped(value, move)
