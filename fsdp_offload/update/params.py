"""State of one parameter and inputs of one step, for updates.

A :class:`ParamState` represents one trainable parameter for the optimizer's life. Its ``tensors``
are the authoritative state: flat, shard-sized, in the arena (streamed, host) or on the device
(resident). Its *slices* lie in buckets: each has its own scalars (``step``), because the class
advances them once per call, and all slices of a parameter advance together. A :class:`Work` is one
call of ``step()``: gradients and a snapshot of the groups.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.backend import Event
from ..core.config import Lane, OffloadConfig
from ..core.dtensor import ShardInfo, first_index
from ..core.errors import ConfigError
from ..core.recorded import Taken
from ..plan import Kind, ParamSpec, Slice
from ..plan.layout import ALIGN_NUMEL, CUDA_TILE_NUMEL
from .moments import Moment, moments_of
from .rng_key import seed_of
from .schema import Schema, public_attributes, replaced


class MasterForm(Enum):
    """How the fp32 value of a parameter is stored."""

    SHARD = "shard"  # the shard itself is updated
    REMAINDER = "master_remainder"  # bf16 shard plus 16 more bits, exact: update/codec.py
    WHOLE = "master"  # a full copy in the compute dtype; the shard is its rounding


REMAINDER_KIND = Kind(MasterForm.REMAINDER.value, torch.bfloat16)


@dataclass(eq=False)
class ParamState:
    """One trainable parameter."""

    parameter: Tensor
    spec: ParamSpec  # its index is the position among all parameters
    group: int  # index of the param_group
    info: ShardInfo
    schema: Schema
    compute_dtype: torch.dtype
    lane: Lane
    form: MasterForm
    memory: tuple[int, int]  # the shard's, by dtensor.memory_of; updates are in place
    moments: tuple[Moment, ...] = ()  # like kinds that are stored in fewer bits
    host_shard: Tensor | None = None  # 1-D, if the weight lives in host memory
    tensors: dict[str, Tensor] = field(default_factory=dict)  # 1-D, numel of the kind
    slices: list[SliceState] = field(default_factory=list)

    @property
    def index(self) -> int:
        """Position among all parameters."""
        return self.spec.index

    @property
    def fqn(self) -> str:
        """Its name in the model."""
        return self.spec.fqn

    @property
    def kinds(self) -> tuple[tuple[Kind, int], ...]:
        """Stored kinds, each with its elements on this rank."""
        return self.spec.kinds

    @functools.cached_property
    def seed(self) -> int:
        """Seed of the random bits that round its moments."""
        return seed_of(self.fqn)

    @functools.cached_property
    def origin(self) -> int:
        """Index of the shard's first element in the global tensor, row-major.

        If the shard is a range of whole rows, so are all others, and random bits do not depend on
        the number of ranks.
        """
        return first_index(self.parameter)

    @property
    def emits_master(self) -> bool:
        """Whether the master has more bits than the shard, and belongs into a state dict."""
        return self.compute_dtype != self.info.dtype


@dataclass(eq=False)
class SliceState:
    """One slice of one parameter, as the shadow optimizer sees it."""

    param: ParamState
    slice: Slice
    tensor: Tensor  # the shadow's parameter: a view of shard, slot, scratch or arena
    state: dict[str, Any]  # the shadow's state: views for like kinds, own scalars and numbers
    stepped: bool = False  # False: the class initialises the state itself at the next update
    updates: int = 0  # updates of this parameter so far, if moments are packed


def cut_at(info: ShardInfo, lane: Lane, *, elementwise: bool) -> tuple[bool, int]:
    """Return whether a parameter may be cut, and the multiple of elements for cuts
    (plan/layout.py)."""
    if lane == "host" or info.device.type == "cpu":
        return elementwise, ALIGN_NUMEL
    return elementwise and info.local_numel % 4 == 0, CUDA_TILE_NUMEL


def master_form(shard: torch.dtype, compute: torch.dtype) -> MasterForm:
    """Choose how to store the master of a parameter."""
    if shard == compute:
        return MasterForm.SHARD
    return MasterForm.REMAINDER if shard == torch.bfloat16 else MasterForm.WHOLE


def state_kinds(
    info: ShardInfo,
    schema: Schema,
    form: MasterForm,
    compute: torch.dtype,
    moments: Sequence[Moment] = (),
) -> tuple[tuple[Kind, int], ...]:
    """List the stored kinds of a parameter, each with its elements on this rank."""
    kinds = _kept_kinds(schema, form, compute, moments)
    return tuple((kind, -(-info.local_numel // kind.block_numel)) for kind in kinds)


def bytes_per_element(
    schema: Schema, form: MasterForm, compute: torch.dtype, config: OffloadConfig
) -> float:
    """Return the bytes of state per element of a parameter, including scales."""
    kinds = _kept_kinds(schema, form, compute, moments_of(schema, compute, config.moments))
    return sum(kind.itemsize / kind.block_numel for kind in kinds)


def _kept_kinds(
    schema: Schema, form: MasterForm, compute: torch.dtype, moments: Sequence[Moment]
) -> list[Kind]:
    reduced = {moment.name: moment.kinds for moment in moments}
    kinds = list[Kind]()
    for kind in schema.role("like"):
        kinds += reduced.get(kind.name) or [Kind(kind.name, kind.dtype or compute)]
    if form is MasterForm.REMAINDER:
        kinds.append(REMAINDER_KIND)
    elif form is MasterForm.WHOLE:
        kinds.append(Kind(form.value, compute))
    return kinds


@dataclass
class Snapshot:
    """All group values at the call of ``step()``; buckets read only this.

    ``host_groups`` is the same with tensors on the CPU, for updates there. A class that is not
    torch's may change its groups or attributes: the first bucket of each group collects the
    changes, and they are written back once, after the step.
    """

    groups: list[dict[str, Any]]
    host_groups: list[dict[str, Any]]
    attributes: dict[str, Any]
    changed_groups: dict[int, dict[str, Any]] = field(default_factory=dict)
    changed_attributes: dict[str, Any] | None = None
    versions: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    cache: dict[object, Any] = field(default_factory=dict)
    """Per-step values that all buckets share; no tensors."""

    @classmethod
    def take(cls, optimizer: Optimizer, groups: list[dict[str, Any]], *, host: bool) -> Snapshot:
        """Copy the groups; clone tensors, because schedulers write into them in place."""
        copies = [
            {n: replaced(value, Tensor.clone) for n, value in group.items() if n != "params"}
            for group in groups
        ]
        on_host: list[dict[str, Any]] = replaced(copies, Tensor.cpu) if host else copies
        versions = [
            {n: (id(v), v._version) for n, v in group.items() if isinstance(v, Tensor)}
            for group in groups
        ]
        return cls(copies, on_host, public_attributes(optimizer), versions=versions)

    def write_back(self, groups: list[dict[str, Any]], optimizer: Optimizer) -> None:
        """Write back once what the user's own class changed in groups and attributes."""
        for index, changed in self.changed_groups.items():
            groups[index].update(changed)
        optimizer.__dict__.update(self.changed_attributes or {})

    def check_unchanged(self, groups: list[dict[str, Any]]) -> None:
        """Refuse hyper-parameters that changed after updates had used them.

        Raises:
            ConfigError: a hyper-parameter changed between backward and ``step()``.
        """
        for index, (group, before) in enumerate(zip(groups, self.groups, strict=True)):
            versions = self.versions[index]
            for name, value in group.items():
                if name == "params" or name not in before:  # such as a new scheduler's initial_lr
                    continue
                if isinstance(value, Tensor):
                    # The version tells without a device synchronisation; but some code writes the
                    # same value again, which is no change.
                    same = versions.get(name) == (id(value), value._version) or (
                        isinstance(before[name], Tensor) and torch.equal(value, before[name])
                    )
                else:
                    same = bool(before[name] == value)
                if not same:
                    raise ConfigError(
                        f"param_groups[{index}][{name!r}] changed to {value!r} before step()",
                        reason="backward has already updated parameters with the previous value",
                        remedy="change hyper-parameters after step(), before the next backward",
                    )


@dataclass
class Work:
    """One call of ``step()``."""

    gradients: list[Tensor | None]  # per param: 1-D, contiguous, or None
    snapshot: Snapshot
    ready: list[Event | None] = field(default_factory=list)
    """Per parameter, the event after which its gradient may be read; None: it may be incomplete."""

    taken: dict[int, Taken] = field(default_factory=dict)
    """Gradients in host memory, by parameter; :attr:`gradients` has views of them."""

    def put(self, index: int, gradient: Tensor | Taken | None) -> None:
        """Set the gradient of a parameter."""
        self.taken.pop(index, None)
        if isinstance(gradient, Taken):
            self.taken[index] = gradient
            gradient = gradient.place.host.view(-1)
        self.gradients[index] = gradient

    def release(self, *indices: int) -> None:
        """Forget the values of gradients that nothing reads any more; they still count as there."""
        nothing = torch.empty(0, device="cpu")
        for index in indices:
            if self.gradients[index] is not None:
                self.gradients[index] = nothing

    def grow(self, count: int) -> None:
        """Extend to ``count`` parameters."""
        missing = count - len(self.gradients)
        self.gradients += [None] * missing
        self.ready += [None] * missing

    def of(self, slices: Sequence[Slice]) -> list[Tensor | None]:
        """Return the gradient of each slice."""
        found: list[Tensor | None] = []
        for each in slices:
            gradient = self.gradients[each.spec.index]
            # Most parameters are whole slices: no view is made for them.
            if gradient is not None and each.cut is not None:
                gradient = gradient[each.cut]
            found.append(gradient)
        return found
