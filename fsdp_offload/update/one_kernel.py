"""Adam and AdamW over remainders or moments in fewer bits: one kernel does everything (CUDA).

[Note: one kernel]
Unpacked, an element costs 50 bytes of device memory traffic and more: master and gradient, and
moments in fewer bits, go to scratch memory and back. The kernel keeps all of it in registers: 26
bytes with fp32 moments, 18 with bf16. Its bits are those of the unpacked path, which calls
``torch._fused_adamw_``; :func:`adam_plain` has them, too. Adam with a decay in the gradient is left
to torch: its kernel contracts that sum in some of the elements and not in others.

[Note: powers]
The bias corrections take beta ** step, and ``powf`` of Triton and of the CUDA that torch was
compiled with differ in the last bits. So torch computes the powers, from the steps on the device:
of all slices that are updated on one stream at once, before the first of them. By bucket it would
be four launches for each, and where they wait behind the link, CUDA's queue fills: the host would
be held up in ``step()``.
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


class StepPowers:
    """Powers of the betas for slices that are updated on one stream; see [Note: powers].

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
        if group not in self._powers:  # rows of 16 bytes: see [Note: cached launches]
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
        slices: of one bucket, for which ``DirectAdam.make`` found torch's own Adam or AdamW.
        weights: their shards, bf16 with ``remainders``, fp32 without.
        remainders: bf16, or None for each.
        kept: both moments of each.
        powers: for all slices on this stream.
        update: :func:`adam`, or :func:`adam_plain`.
    """

    def __init__(
        self,
        slices: Sequence[SliceState],
        weights: Sequence[Tensor],
        remainders: Sequence[Tensor | None],
        kept: Sequence[Sequence[Kept]],
        powers: StepPowers,
        update: Callable[..., None],
    ) -> None:
        self._slices, self._powers, self._update = slices, powers, update
        self.groups = frozenset(sliced.param.group for sliced in slices)
        self._operands: list[Operands] = [
            (
                sliced,
                list(sliced.param.moments),
                weight,
                remainder,
                list(both),
            )
            for sliced, weight, remainder, both in zip(
                slices, weights, remainders, kept, strict=True
            )
        ]
        for sliced in slices:
            powers.row(sliced)
        numels = [weight.numel() for weight in weights]
        self._tables = AddressTables(numels, functools.partial(table_of, self._operands, powers))

    @staticmethod
    def is_for(slices: Sequence[SliceState]) -> bool:
        """Whether there is a kernel: on CUDA, both moments in fewer bits or none, no amsgrad."""
        names = {"exp_avg", "exp_avg_sq"}
        fits = all(
            {m.name for m in p.param.moments} in (names, set())
            and p.state.keys() == names | {"step"}
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
        for group, constants in by_group.items():
            assert constants is not None
            self._powers.compute(group, constants.betas, snapshot)
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
                both, weight, remainder, gradient, *kept, sliced.state["step"],
                self._powers.row(sliced), rng_key_of(sliced, 0), constants,
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
        _, _, _, remainder, kept = self._operands[0]
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
    for sliced, _, weight, remainder, kept in (operands[i] for i in indices):
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


def _constants_of(snapshot: Snapshot, index: int, device: torch.device) -> AdamConstants | None:
    """Of a group; None where the class has to update it."""
    key = (AdamConstants, index)
    if key not in snapshot.derived:
        group = snapshot.groups[index]
        values = settings(group, device)
        fits = (
            values
            and not values["amsgrad"]
            and not isinstance(values["lr"], Tensor)
            and (group["decoupled_weight_decay"] or group["weight_decay"] == 0)
        )
        snapshot.derived[key] = AdamConstants(group) if fits else None
    constants: AdamConstants | None = snapshot.derived[key]
    return constants


def adam(
    both: Sequence[Moment],
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
        both: how the first and the second moment are kept; empty: in fp32.
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


def adam_plain(
    both: Sequence[Moment],
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
    """:func:`adam` in torch operations; slow, for tests."""
    flags, device = constants.flags, weight.device
    lr, beta1, beta2, decay, eps = (
        torch.tensor(number, dtype=torch.float32, device=device) for number in constants.numbers
    )
    master = weight
    if remainder is not None:
        master = torch.empty_like(weight, dtype=torch.float32)
        codec.decode_plain(weight, remainder, master)
    g = gradient.float()
    g = -g if flags["MAXIMIZE"] else g
    m, v = (torch.empty_like(g) for _ in range(2)) if both else (average[0], square[0])
    for moment, kept, values in zip(both, (average, square), (m, v), strict=False):
        moments.unpack_plain(moment, *kept, values)
    if flags["DECAY"]:
        master = _fma(-(lr * decay), master, master)
    squared = g * g
    m = _fma(beta1, m, _fma(-beta1, g, g))
    v = _fma(beta2, v, _fma(-beta2, squared, squared))
    step += 1
    root = v.double().sqrt().float()  # correctly rounded; in fp32 torch may be one ulp off
    correction = (1 - powers[1]).double().sqrt().float()
    step_size = lr / (1 - powers[0])
    master = master - step_size * m / (root / correction + eps)
    if remainder is None:
        weight.copy_(master)
    else:
        codec.encode_plain(master, weight, remainder)
    for moment, kept, values in zip(both, (average, square), (m, v), strict=False):
        moments.pack_plain(moment, values, *kept, rng_key)
    if not both:
        average[0].copy_(m)
        square[0].copy_(v)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c``, rounded once (but for a tie in 2^29)."""
    return (a.double() * b.double() + c.double()).float()
