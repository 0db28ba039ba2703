"""Run the wrapped optimizer's own step on views that this package owns.

A shadow is an instance of the wrapped class with the same settings whose parameters are plain views
and whose state entries point at slots, scratch, the arena or the device. It calls the step function
like torch, so the arithmetic is torch's own. Rules that keep it exact:

* slices are separate tensors in one call, never one tensor over two parameters;
* each slice has its own scalars; the call omits slices without gradient;
* a slice that has not stepped gets an empty state; the class initialises it, and the result is
  copied into the views (lazy state is not always zero);
* the implementation (``fused``, ``foreach``) is torch's choice for that device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.errors import StateSchemaError
from .params import SliceState, Snapshot
from .schema import host_overrides, is_torch_class, make_shadow, own_copy, raw_step


class Shadow:
    """One shadow optimizer over the slices of one bucket.

    Args:
        optimizer: the wrapped optimizer; only its class and settings are used.
        slices: the bucket's slices, in order.
        on_host: the slices are in host memory: read the snapshot's CPU copies of tensor
            hyper-parameters, and use the fused CPU kernel, see :func:`.schema.host_overrides`.
    """

    def __init__(
        self, optimizer: Optimizer, slices: list[SliceState], *, on_host: bool = False
    ) -> None:
        self.slices = slices
        self._on_host = on_host
        self._trusted = is_torch_class(optimizer)
        self._step = raw_step(type(optimizer))
        self._group_indices = sorted({sliced.param.group for sliced in slices})
        compute = slices[0].param.compute_dtype
        self._overrides = {
            index: host_overrides(optimizer, optimizer.param_groups[index], compute)
            for index in (self._group_indices if on_host else ())
        }
        groups = [
            {"params": [p.tensor for p in slices if p.param.group == index]}
            for index in self._group_indices
        ]
        self._shadow = make_shadow(optimizer, groups)
        self._has_all_state = False  # whether all slices have stepped

    def rebind(self) -> None:
        """Adopt new tensors and state of the slices."""
        self._shadow.state.clear()
        self._has_all_state = False
        for group, index in zip(self._shadow.param_groups, self._group_indices, strict=True):
            group["params"] = [p.tensor for p in self.slices if p.param.group == index]

    def step(self, gradients: list[Tensor | None], snapshot: Snapshot) -> None:
        """Update all slices that have a gradient (shaped like the slice's tensor)."""
        values = self._values(snapshot)
        present: list[tuple[SliceState, Tensor]] = [
            (sliced, gradient)
            for sliced, gradient in zip(self.slices, gradients, strict=True)
            if gradient is not None
        ]
        if self.slices[0].param.schema.elementwise:
            # One call never mixes slices with and without state, which fused SGD confuses.
            later = [pair for pair in present if pair[0].stepped]
            calls = [[pair for pair in present if not pair[0].stepped], later]
        else:
            # Updates of whole matrices may communicate, and buckets differ between ranks: one call
            # each keeps one order on all ranks.
            calls = [[pair] for pair in present]
        for some in filter(None, calls):
            if self._trusted:
                for group, own in zip(self._shadow.param_groups, values.values(), strict=True):
                    group.update(own)
                self._call(some)
            else:
                apply_own(self._shadow, values, snapshot)
                self._call(some)
                collect_changes(self._shadow, values, snapshot)

    def _values(self, snapshot: Snapshot) -> dict[int, dict[str, Any]]:
        if not self._on_host:
            return {index: snapshot.groups[index] for index in self._group_indices}
        return {
            index: {**snapshot.host_groups[index], **overrides}
            for index, overrides in self._overrides.items()
        }

    def _call(self, present: list[tuple[SliceState, Tensor]]) -> None:
        is_first = not present[0][0].stepped
        self._give_state(present, is_first=is_first)
        for sliced, gradient in present:
            sliced.tensor.grad = gradient
        try:
            with torch.no_grad():
                self._step(self._shadow)
        finally:
            for sliced, _ in present:
                sliced.tensor.grad = None
        if is_first or not self._trusted:
            for sliced, _ in present:
                self._adopt(sliced)

    def _give_state(self, present: list[tuple[SliceState, Tensor]], *, is_first: bool) -> None:
        state = self._shadow.state
        if is_first:
            self._has_all_state = False
            for sliced, _ in present:
                state.pop(sliced.tensor, None)
        elif not self._trusted:
            # The user's own class may replace entries of these copies; _adopt takes the new values.
            state.update((sliced.tensor, dict(sliced.state)) for sliced, _ in present)
        elif not self._has_all_state:  # torch's classes keep the dicts, so once is enough
            state.update((each.tensor, each.state) for each in self.slices if each.stepped)
            self._has_all_state = all(each.stepped for each in self.slices)

    def _adopt(self, sliced: SliceState) -> None:
        got = self._shadow.state[sliced.tensor]
        if self._trusted and not got:
            return  # SGD without momentum now: the class makes the buffer when it needs it
        # If an option was switched off before the first step, an entry stays unused.
        if got.keys() != sliced.state.keys() and not (
            self._trusted and got.keys() < sliced.state.keys()
        ):
            raise StateSchemaError(
                f"state of {sliced.param.fqn} with keys {sorted(got)}",
                reason=f"only {sorted(sliced.state)} were reserved when the optimizer was wrapped",
                remedy="leave out elementwise=True if the class is not torch's; otherwise "
                "wrap again",
            )
        for name, value in got.items():
            target = sliced.state[name]
            if isinstance(target, Tensor):
                if value is target:
                    continue
                if not isinstance(value, Tensor) or value.shape != target.shape:
                    raise StateSchemaError(
                        f"state {name!r} of {sliced.param.fqn}",
                        reason=f"shape {getattr(value, 'shape', None)}, "
                        f"but {tuple(target.shape)} was reserved",
                        remedy="leave out elementwise=True",
                    )
                target.copy_(value)
            else:
                sliced.state[name] = value
        sliced.stepped = True
        self._shadow.state[sliced.tensor] = sliced.state


def apply_own(shadow: Optimizer, values: dict[int, dict[str, Any]], snapshot: Snapshot) -> None:
    """Give the user's own class copies of attributes and groups, so that no bucket sees, and
    repeats, changes of another."""
    for name, value in snapshot.attributes.items():
        shadow.__dict__[name] = own_copy(value)
    for group, own in zip(shadow.param_groups, values.values(), strict=True):
        group.update({name: own_copy(value) for name, value in own.items()})


def collect_changes(
    shadow: Optimizer, values: dict[int, dict[str, Any]], snapshot: Snapshot
) -> None:
    """Record once per step what the user's own class wrote into its groups and attributes."""
    for group, (index, before) in zip(shadow.param_groups, values.items(), strict=True):
        if index not in snapshot.changed_groups:
            snapshot.changed_groups[index] = _changes(group, before, without=("params",))
    if snapshot.changed_attributes is None:
        own = {n: v for n, v in shadow.__dict__.items() if not n.endswith("_hooks")}
        without = ("state", "param_groups")
        snapshot.changed_attributes = _changes(own, snapshot.attributes, without=without)


def step_idle_groups(optimizer: Optimizer, snapshot: Snapshot) -> None:
    """Step groups without any gradient, because the user's own class may count steps."""
    if is_torch_class(optimizer):
        return
    groups = optimizer.param_groups
    idle = [i for i, group in enumerate(groups) if all(p.grad is None for p in group["params"])]
    if not idle:
        return
    shadow = make_shadow(optimizer, [{"params": groups[index]["params"]} for index in idle])
    values = {index: snapshot.groups[index] for index in idle}
    apply_own(shadow, values, snapshot)
    with torch.no_grad():
        raw_step(type(optimizer))(shadow)
    collect_changes(shadow, values, snapshot)


def _changes(
    now: dict[str, Any], before: dict[str, Any], *, without: tuple[str, ...]
) -> dict[str, Any]:
    return {
        name: value
        for name, value in now.items()
        if name not in without and _differs(value, before.get(name))
    }


def _differs(value: Any, before: Any) -> bool:
    if value is before:
        return False
    if isinstance(value, Tensor) and isinstance(before, Tensor):
        return not torch.equal(value, before)
    return isinstance(value, Tensor) or isinstance(before, Tensor) or bool(value != before)
