"""Adam and AdamW with moments in fewer bits: one kernel per slice does everything (CUDA).

[Note: one kernel]
Unpacked, an element costs about 70 bytes of device memory traffic: master, gradient and moments
go to scratch memory and back. The kernel keeps all of it in registers: 18 bytes with bf16 moments.
It computes in fp32 what ``torch._fused_adamw_`` computes partly in fp64, so masters differ from
those of the unpacked path by an fp32 rounding of the step, and a moment now and then by one step of
its own format. :func:`adam_plain` is its twin with the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import codec, moments
from .address_table import AddressTable, AddressTables
from .fused_adam import settings
from .kernels import moment_kernels
from .moments import Moment
from .params import SliceState, Snapshot
from .rng_key import RngKey, key_of

Kept = tuple[Tensor, Tensor | None]
"""Codes and scales."""
Operands = tuple[SliceState, list[Moment], Tensor, Tensor | None, list[Kept]]
"""A slice, how its moments are kept, its weight, remainder, and both moments."""


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


class ReducedAdam:
    """Updates the slices of a bucket without scratch memory.

    Args:
        slices: of one bucket, for which ``DirectAdam.make`` found torch's own Adam or AdamW.
        weights: their shards, bf16 with ``remainders``, fp32 without.
        remainders: bf16, or None for each.
        packed: both moments of each.
        update: :func:`adam`, or :func:`adam_plain`.
    """

    def __init__(
        self,
        slices: Sequence[SliceState],
        weights: Sequence[Tensor],
        remainders: Sequence[Tensor | None],
        packed: Sequence[Sequence[PackedMoment]],
        update: Callable[..., None],
    ) -> None:
        self._slices, self._update = slices, update
        self.groups = frozenset(sliced.param.group for sliced in slices)
        self._operands: list[Operands] = [
            (
                sliced,
                [each.moment for each in both],
                weight,
                remainder,
                [(each.codes, each.scales) for each in both],
            )
            for sliced, weight, remainder, both in zip(
                slices, weights, remainders, packed, strict=True
            )
        ]
        numels = [weight.numel() for weight in weights]
        self._tables = AddressTables(numels, functools.partial(table_of, self._operands))

    @staticmethod
    def is_for(slices: Sequence[SliceState]) -> bool:
        """Whether there is a kernel: both moments in fewer bits, on CUDA, no ``amsgrad``."""
        names = {"exp_avg", "exp_avg_sq"}
        fits = all(
            {m.name for m in p.param.moments} == names and p.state.keys() == names | {"step"}
            for p in slices
        )
        on_cuda = slices[0].tensor.device.type == "cuda"
        return fits and on_cuda and moment_kernels() is not None

    def fits(self, snapshot: Snapshot) -> bool:
        """Whether :meth:`run` does the update with these hyper-parameters."""
        return None not in self._constants(snapshot).values()

    def _constants(self, snapshot: Snapshot) -> dict[int, AdamConstants | None]:
        device = self._slices[0].tensor.device
        return {index: _constants_of(snapshot, index, device) for index in self.groups}

    def run(self, gradients: Sequence[Tensor | None], snapshot: Snapshot) -> bool:
        """Update all slices that have a gradient; False, and nothing done, if it has to be done
        by the class: hyper-parameters in tensors, or another implementation."""
        by_group = self._constants(snapshot)
        if None in by_group.values():
            return False
        if self._update is adam and len(self.groups) == 1:
            (constants,) = by_group.values()
            assert constants is not None
            if self._run_at_once(gradients, constants):
                return True
        for operands, gradient in zip(self._operands, gradients, strict=True):
            if gradient is None:
                continue
            sliced, both, weight, remainder, kept = operands
            sliced.updates += 1
            constants = by_group[sliced.param.group]
            assert constants is not None
            self._update(
                both, weight, remainder, gradient, *kept,
                sliced.state["step"], rng_key_of(sliced, 0), constants, sliced.updates,
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
        _, both, _, remainder, _ = self._operands[0]
        flags = {
            "BF16_WEIGHT": remainder is not None,
            "BF16_GRADIENT": given.dtype == torch.bfloat16,
            **constants.flags,
            "INT8": both[0].has_scales,
        }
        kernels = moment_kernels()
        assert kernels is not None
        for rows in tables:
            kernels.adam_of_table(*rows, updates + 1, constants.numbers(updates + 1), **flags)
        for sliced in self._slices:
            sliced.updates += 1
            sliced.stepped = True
        return True


def table_of(operands: Sequence[Operands], indices: Sequence[int]) -> AddressTable:
    """Rows: weight, remainder, codes and scales of both moments, step; elements, index of the first
    one in the global tensor, seed. What there is none of has the weight's address.

    ``indices``: which of the ``operands``.
    """
    kernels = moment_kernels()
    assert kernels is not None
    tensors, numbers = [], []
    for sliced, _, weight, remainder, kept in (operands[i] for i in indices):
        own = [weight, remainder, *kept[0], *kept[1], sliced.state["step"]]
        tensors.append([weight if tensor is None else tensor for tensor in own])
        numbers.append([sliced.param.origin + sliced.slice.start, sliced.param.seed])
    return AddressTable(tensors, numbers, tile_numel=kernels.TILE_NUMEL, free=(1, 2))


class AdamConstants:
    """The hyper-parameters of one group in one step, as the kernel takes them."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        self.flags = {
            "MAXIMIZE": bool(group["maximize"]),
            "DECOUPLED": bool(group["decoupled_weight_decay"]),
            "DECAY": group["weight_decay"] != 0,
        }
        self._group = group
        self._numbers: dict[int, tuple[float, ...]] = {}

    def numbers(self, updates: int) -> tuple[float, ...]:
        """:func:`numbers_of`."""
        if updates not in self._numbers:
            self._numbers[updates] = numbers_of(self._group, updates)
        return self._numbers[updates]


def _constants_of(snapshot: Snapshot, index: int, device: torch.device) -> AdamConstants | None:
    """Of a group; None where the class has to update it."""
    key = (AdamConstants, index)
    if key not in snapshot.derived:
        group = snapshot.groups[index]
        values = settings(group, device)
        fits = values and not values["amsgrad"] and not isinstance(values["lr"], Tensor)
        snapshot.derived[key] = AdamConstants(group) if fits else None
    constants: AdamConstants | None = snapshot.derived[key]
    return constants


def numbers_of(group: Mapping[str, Any], updates: int) -> tuple[float, ...]:
    """What the kernel takes of the hyper-parameters: beta1, 1 - beta1, beta2, 1 - beta2, eps,
    weight decay (times lr where it is decoupled), lr over bias correction 1, inverse root of
    bias correction 2. ``updates``: with this one."""
    lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
    decay = float(group["weight_decay"])
    return (
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        float(group["eps"]),
        lr * decay if group["decoupled_weight_decay"] else decay,
        lr / (1 - beta1**updates),
        (1 - beta2**updates) ** -0.5,
    )


def adam(
    both: Sequence[Moment],
    weight: Tensor,
    remainder: Tensor | None,
    gradient: Tensor,
    average: Kept,
    square: Kept,
    step: Tensor,
    rng_key: RngKey,
    constants: AdamConstants,
    updates: int,
) -> None:
    """One update of one slice, in place; 1-D, contiguous, of one numel.

    Args:
        both: how the first and the second moment are kept.
        weight: bf16 with ``remainder`` (bf16), or fp32 without.
        gradient: floating; stays as it is.
        average: the first moment.
        square: the second.
        step: 0-dim fp32; becomes one more.
        rng_key: random bits.
        constants: hyper-parameters.
        updates: of this parameter, with this one.
    """
    kernels = moment_kernels()
    assert kernels is not None
    kernels.adam(
        weight, remainder, gradient, average, square, step, rng_key.key, rng_key.first,
        constants.numbers(updates), **constants.flags,
    )  # fmt: skip


def adam_plain(
    both: Sequence[Moment],
    weight: Tensor,
    remainder: Tensor | None,
    gradient: Tensor,
    average: Kept,
    square: Kept,
    step: Tensor,
    rng_key: RngKey,
    constants: AdamConstants,
    updates: int,
) -> None:
    """:func:`adam` in torch operations; the slow twin, for tests."""
    numbers, flags = constants.numbers(updates), constants.flags
    beta1, rest1, beta2, rest2, eps, decay, step_size, inverse_root = numbers
    master = weight
    if remainder is not None:
        master = torch.empty_like(weight, dtype=torch.float32)
        codec.decode_plain(weight, remainder, master)
    g = gradient.float()
    g = -g if flags["MAXIMIZE"] else g
    m, v = torch.empty_like(g), torch.empty_like(g)
    for moment, kept, values in zip(both, (average, square), (m, v), strict=True):
        moments.unpack_plain(moment, *kept, values)
    if decay and flags["DECOUPLED"]:
        master = master - decay * master
    elif decay:
        g = g + decay * master
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    root = v.double().sqrt().float()  # correctly rounded; in fp32 torch may be one ulp off
    master = master - step_size * m / (root * inverse_root + eps)
    if remainder is None:
        weight.copy_(master)
    else:
        codec.encode_plain(master, weight, remainder)
    for moment, kept, values in zip(both, (average, square), (m, v), strict=True):
        moments.pack_plain(moment, values, *kept, rng_key)
    step += 1
