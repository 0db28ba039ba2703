"""Adam and AdamW with ``fused=True`` over fp32 masters: one kernel does everything (CUDA).

Unpacked, an element costs 50 bytes of device memory traffic and more: master and gradient, and
moments in fewer bits, go to scratch memory and back. The kernel keeps all of it in registers: 26
bytes with fp32 moments, 18 with bf16. Its bits are those of the unpacked path, which calls
``torch._fused_adamw_``. Adam with a decay in the gradient is left to torch: its kernel contracts
that sum in some of the elements and not in others.

The bias corrections take beta ** step, and ``powf`` of Triton and of the CUDA that torch was
compiled with differ in the last bits. So torch computes the powers, from the steps on the device:
of all slices that are updated on one stream at once, before the first of them. By bucket it would
be four launches for each, and where they wait behind the link, CUDA's queue fills: the host would
be held up in ``step()``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from . import moments
from .kernels import moment_kernels
from .kernels.launching import AddressTable, AddressTables
from .moments import Moment
from .params import SliceState, Snapshot
from .rng_key import RngKey, key_of
from .schema import raw_step, torch_class

_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_NUMBERS: Final = ("lr", "weight_decay", "eps", "amsgrad", "maximize")
Kept = tuple[Tensor, Tensor | None]
"""Codes and scales."""
Operands = tuple[SliceState, Tensor, Tensor | None, tuple[Kept, Kept]]
"""A slice, its weight, remainder, and both moments."""


@dataclass(frozen=True)
class PackedMoment:
    """Where one moment of one slice is kept, and where it is unpacked to."""

    moment: Moment
    codes: Tensor
    scales: Tensor | None
    values: Tensor  # fp32, in scratch memory

    def unpack(self) -> None:
        """See :func:`.moments.unpack`."""
        moments.unpack(self.moment, self.codes, self.scales, self.values)

    def pack(self, rng_key: RngKey) -> None:
        """See :func:`.moments.pack`."""
        moments.pack(self.moment, self.values, self.codes, self.scales, rng_key)


def rng_key_of(sliced: SliceState, pair: int) -> RngKey:
    """Random bits of the update that a slice is in; ``pair``: of moments."""
    key = key_of(sliced.param.seed, sliced.updates, pair)
    return RngKey(key, sliced.param.origin + sliced.slice.start)


class StepPowers:
    """Powers of the betas for slices that are updated on one stream; see the module's docstring.

    Args:
        count: of the slices.
        device: theirs.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._slices: list[SliceState] = []
        self._rows: dict[int, int] = {}  # by the slice's id
        self._counts = torch.zeros(count, device=device)
        self._powers: dict[int, Tensor] = {}  # by group

    def row(self, sliced: SliceState) -> Tensor:
        """Where the powers of a slice are: fp32, of beta1, beta2, and two that mean nothing."""
        if id(sliced) not in self._rows:
            self._rows[id(sliced)] = len(self._slices)
            self._slices.append(sliced)
        group = sliced.param.group
        if group not in self._powers:  # rows of 16 bytes: see update/kernels/launching.py
            self._powers[group] = self._counts.new_ones(len(self._counts), 4)
        return self._powers[group][self._rows[id(sliced)]]

    def compute(self, group: int, betas: tuple[float, float], snapshot: Snapshot) -> None:
        """For the iteration of ``snapshot``, unless it was done for it already."""
        key = (StepPowers, id(self), group)
        if key in snapshot.derived:
            return
        snapshot.derived[key] = True
        counts = self._counts[: len(self._slices)]
        torch.stack([sliced.state["step"] for sliced in self._slices], out=counts)
        counts += 1
        for column, beta in enumerate(betas):
            torch.pow(beta, counts, out=self._powers[group][: len(counts), column])


class OneKernelAdam:
    """Updates the slices of a bucket without scratch memory.

    Args:
        slices: of one bucket, as :meth:`is_for` wants them.
        weights: their shards, bf16 with ``remainders``, fp32 without.
        remainders: bf16, or None for each.
        kept: both moments of each.
        powers: for all slices on this stream.
    """

    def __init__(
        self,
        slices: Sequence[SliceState],
        weights: Sequence[Tensor],
        remainders: Sequence[Tensor | None],
        kept: Sequence[tuple[Kept, Kept]],
        powers: StepPowers,
    ) -> None:
        self._slices, self._powers = slices, powers
        self.groups = frozenset(sliced.param.group for sliced in slices)
        self._operands: list[Operands] = [
            (sliced, weight, remainder, both)
            for sliced, weight, remainder, both in zip(
                slices, weights, remainders, kept, strict=True
            )
        ]
        for sliced in slices:
            powers.row(sliced)
        numels = [weight.numel() for weight in weights]
        self._tables = AddressTables(numels, functools.partial(table_of, self._operands, powers))

    @staticmethod
    def is_for(optimizer: Optimizer, slices: Sequence[SliceState]) -> bool:
        """Whether there is a kernel: on CUDA, over fp32 masters; both moments in fewer bits or
        none."""
        if slices[0].tensor.device.type != "cuda" or not _is_torchs_adam(optimizer, slices):
            return False
        fits = all(
            p.tensor.dtype == torch.float32
            and {m.name for m in p.param.moments} in (set(_MOMENTS), set())
            for p in slices
        )
        return fits and moment_kernels() is not None

    def fits(self, snapshot: Snapshot) -> bool:
        """Whether the kernel computes with these hyper-parameters."""
        return self._constants(snapshot) is not None

    def _constants(self, snapshot: Snapshot) -> dict[int, AdamConstants] | None:
        """By group; None where the class has to update one of them."""
        found = {index: _constants_of(snapshot, index) for index in self.groups}
        every = {index: constants for index, constants in found.items() if constants is not None}
        return every if len(every) == len(found) else None

    def run(self, gradients: Sequence[Tensor | None], snapshot: Snapshot) -> bool:
        """Update all slices that have a gradient; False, and nothing done, if it has to be done
        by the class: hyper-parameters in tensors, or another implementation."""
        by_group = self._constants(snapshot)
        if by_group is None:
            return False
        for group, constants in by_group.items():
            self._powers.compute(group, constants.betas, snapshot)
        if len(by_group) == 1 and self._run_at_once(gradients, *by_group.values()):
            return True
        for operands, gradient in zip(self._operands, gradients, strict=True):
            if gradient is None:
                continue
            sliced, weight, remainder, kept = operands
            sliced.updates += 1
            adam(
                weight, remainder, gradient, *kept, sliced.state["step"], self._powers.row(sliced),
                rng_key_of(sliced, 0), by_group[sliced.param.group],
            )  # fmt: skip
            sliced.stepped = True
        return True

    def _run_at_once(self, gradients: Sequence[Tensor | None], constants: AdamConstants) -> bool:
        """:meth:`run` with one launch for up to eight slices; False, and nothing done, where
        something is out of the ordinary."""
        updates, given = self._slices[0].updates, gradients[0]
        if given is None or any(p.updates != updates for p in self._slices):
            return False
        tables = self._tables.rows_of(gradients)
        if tables is None:
            return False
        _, _, remainder, kept = self._operands[0]
        flags = {
            "BF16_WEIGHT": remainder is not None,
            "BF16_GRADIENT": given.dtype == torch.bfloat16,
            **constants.flags,
            "BITS": 8 * kept[0][0].itemsize,
        }
        kernels = moment_kernels()
        assert kernels is not None
        for rows in tables:
            kernels.adam_of_table(*rows, updates + 1, constants.numbers, **flags)
        for sliced in self._slices:
            sliced.updates += 1
            sliced.stepped = True
            if not sliced.slice.numel:  # no program counts it
                sliced.state["step"] += 1
        return True


def table_of(
    operands: Sequence[Operands], powers: StepPowers, indices: Sequence[int]
) -> AddressTable:
    """Rows: weight, remainder, codes and scales of both moments, step, powers; elements, index of
    the first one in the global tensor, seed. What there is none of has the weight's address.

    ``indices``: which of the ``operands``.
    """
    kernels = moment_kernels()
    assert kernels is not None
    tensors, numbers = [], []
    for sliced, weight, remainder, kept in (operands[i] for i in indices):
        step, power = sliced.state["step"], powers.row(sliced)
        own = [weight, remainder, *kept[0], *kept[1], step, power]
        tensors.append([weight if tensor is None else tensor for tensor in own])
        numbers.append([sliced.param.origin + sliced.slice.start, sliced.param.seed])
    return AddressTable(tensors, numbers, tile_numel=kernels.TILE_NUMEL, free=(2, 2))


class AdamConstants:
    """The hyper-parameters of one group in one step, as the kernel takes them."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        self.flags = {
            "MAXIMIZE": bool(group["maximize"]),
            "DECAY": group["weight_decay"] != 0,
        }
        beta1, beta2 = map(float, group["betas"])
        self.betas = beta1, beta2
        lr, decay, eps = float(group["lr"]), float(group["weight_decay"]), float(group["eps"])
        self.numbers = lr, beta1, beta2, decay, eps
        """The kernel rounds them to fp32."""


def _is_torchs_adam(optimizer: Optimizer, slices: Sequence[SliceState]) -> bool:
    """Whether Adam or AdamW updates them by torch's own step: flat, without amsgrad."""
    step = raw_step(type(optimizer))
    return (
        torch_class(optimizer) in (Adam, AdamW)
        and (step.__module__, step.__qualname__) == ("torch.optim.adam", "Adam.step")
        and all(
            type(p.tensor) is Tensor
            and p.param.schema.elementwise
            and p.state.keys() == {"step", *_MOMENTS}
            and p.state["step"].device == p.tensor.device
            for p in slices
        )
    )


def _fits(group: Mapping[str, Any]) -> bool:
    """Whether a fused kernel takes these hyper-parameters as they are."""
    return (
        group["fused"] is True
        and not any(group[o] for o in ("amsgrad", "foreach", "differentiable", "capturable"))
        and not any(isinstance(number, Tensor) for number in (group["lr"], *group["betas"]))
        and (group["decoupled_weight_decay"] or group["weight_decay"] == 0)
    )


def _constants_of(snapshot: Snapshot, index: int) -> AdamConstants | None:
    """Of a group; None where the class has to update it."""
    key = (AdamConstants, index)
    if key not in snapshot.derived:
        group = snapshot.groups[index]
        snapshot.derived[key] = AdamConstants(group) if _fits(group) else None
    constants: AdamConstants | None = snapshot.derived[key]
    return constants


def adam(
    weight: Tensor,
    remainder: Tensor | None,
    gradient: Tensor,
    average: Kept,
    square: Kept,
    step: Tensor,
    powers: Tensor,
    rng_key: RngKey,
    constants: AdamConstants,
) -> None:
    """One update of one slice, in place; 1-D, contiguous, of one numel.

    Args:
        weight: bf16 with ``remainder`` (bf16), or fp32 without.
        gradient: floating; stays as it is.
        average: the first moment.
        square: the second.
        step: 0-dim fp32; becomes one more.
        powers: fp32, of both betas; the exponent is how many updates there were, with this one.
        rng_key: random bits.
        constants: hyper-parameters.
    """
    if not weight.numel():  # no program would count the step
        step += 1
        return
    kernels = moment_kernels()
    assert kernels is not None
    kernels.adam(
        weight, remainder, gradient, average, square, step, powers, rng_key.key, rng_key.first,
        constants.numbers, **constants.flags,
    )  # fmt: skip


class FusedAdam:
    """Where nothing is unpacked, and on the CPU: torch's fused kernel, on lists that are made once.

    The class makes its lists anew in every step, for 3.5 us per slice; an update of 4,096 elements
    on the CPU takes 10. One kernel takes eight slices per launch, which costs the host 1.2 to 1.4
    times as much (one H100, 100 and 300 parameters).
    """

    def __init__(self, slices: Sequence[SliceState]) -> None:
        self._slices = slices
        self._lists: dict[int, list[list[Any]]] = {}  # by group: positions, then operands

    @staticmethod
    def is_for(optimizer: Optimizer, slices: Sequence[SliceState]) -> bool:
        """Whether :meth:`run` may be tried."""
        return _is_torchs_adam(optimizer, slices) and all(
            p.tensor.is_floating_point()
            and {p.state[name].dtype for name in _MOMENTS} == {p.tensor.dtype}
            for p in slices
        )

    def rebind(self) -> None:
        """Forget tensors: the slices got others."""
        self._lists = {}

    def run(self, gradients: Sequence[Tensor | None], groups: Mapping[int, Any]) -> bool:
        """Update all slices; False, and nothing done, if the class has to: a gradient is missing
        or of another dtype, it is a first update, or hyper-parameters are not numbers."""
        for sliced, gradient in zip(self._slices, gradients, strict=True):
            if not sliced.stepped or gradient is None or gradient.dtype != sliced.tensor.dtype:
                return False
        if not all(map(_fits, groups.values())):
            return False
        if not self._lists:
            for index, p in enumerate(self._slices):
                own = self._lists.setdefault(p.param.group, [[], [], [], [], []])
                tensors = (p.tensor, *(p.state[name] for name in (*_MOMENTS, "step")))
                for some, each in zip(own, (index, *tensors), strict=True):
                    some.append(each)
        with torch.no_grad():
            for index, (positions, weights, *moments_, steps) in self._lists.items():
                group = groups[index]
                beta1, beta2 = group["betas"]
                decoupled = group["decoupled_weight_decay"]
                function: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
                torch._foreach_add_(steps, 1)
                function(
                    weights, [gradients[i] for i in positions], *moments_, [], steps,
                    **{name: group[name] for name in _NUMBERS}, beta1=beta1, beta2=beta2,
                )  # fmt: skip
        return True
