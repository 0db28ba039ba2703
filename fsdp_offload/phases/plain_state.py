"""A plain optimizer's state while it is away: shown, loaded and kept from being stepped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import shards
from ..moving import absent
from ..patching import Patch


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

    def _show(self, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        live = self._optimizer.state
        shown: defaultdict[Tensor, Any] = defaultdict(dict)
        shown.update({p: _mapped(values, absent.present) for p, values in live.items()})
        self._optimizer.state = shown
        try:
            return original()
        finally:
            self._optimizer.state = live

    @torch.no_grad()
    def _load(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """torch puts what it loads where the parameters are: for the time of the load, here."""
        before = self._optimizer.state
        with _host_parameters(self._optimizer) as parameters:
            original(*args, **kwargs)
        loaded = self._optimizer.state
        if loaded is before:
            return
        state: defaultdict[Any, Any] = defaultdict(dict)
        for key, values in loaded.items():
            parameter = parameters.get(key, key)
            state[parameter] = values
            if key not in parameters:
                continue
            for name, value in values.items():
                kept = _written(before.get(parameter, {}).get(name), value)
                values[name] = kept
                if kept is value and _belongs_on_device(self._optimizer, parameter, name):
                    self._arrivals.append((parameter, name))
        self._optimizer.state = state


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


@contextmanager
def _host_parameters(optimizer: Optimizer) -> Iterator[dict[Any, Tensor]]:
    """Inside, groups hold empty host parameters of the same dtypes, which are the keys given."""
    groups = [group["params"] for group in optimizer.param_groups]
    stand_ins: dict[Any, Tensor] = {}
    try:
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            fakes = [nn.Parameter(torch.empty(0, dtype=p.dtype), False) for p in parameters]
            stand_ins.update(zip(fakes, parameters, strict=True))
            group["params"] = fakes
        yield stand_ins
    finally:
        # A load makes new groups, around the same lists.
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters


def _written(old: Any, new: Any) -> Any:
    """``old`` with the values of ``new``, if it is away and fits, else ``new``."""
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return new
    view = absent.host_view(old)
    fits = view is not None and (view.shape, view.dtype) == (new.shape, new.dtype)
    if view is None or not fits or not shards.same_placement(old, new):
        return new
    target, source = shards.local(view), shards.local(new)
    if target.shape != source.shape:
        return new
    target.copy_(source)
    return old


def _belongs_on_device(optimizer: Optimizer, parameter: Tensor, name: Any) -> bool:
    """torch's rule of where a load puts state."""
    if name != "step":
        return True
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    return bool(group.get("capturable") or group.get("fused"))


def _to_device(value: Any, parameter: Tensor) -> Any:
    device = shards.local(parameter).device

    def move(tensor: Tensor) -> Tensor:
        shard = shards.local(tensor)
        return tensor if shard.device == device else shards.like(tensor, shard.to(device))

    return _mapped(value, move)
