"""Run Adam and AdamW with ``fused=True`` on CUDA in one kernel for many slices, without the class.

If masters or moments are unpacked through scratch memory, an element costs at least 50 bytes of
device memory traffic. The Triton kernel keeps everything in registers: 26 bytes with fp32 moments,
18 with bf16. Its bits are those of the unpacked path, which calls ``torch._fused_adamw_``. The
class runs Adam with a decay in the gradient: torch's kernel contracts that sum in some elements and
not in others.

The bias corrections take beta ** step, and ``powf`` of Triton and of the CUDA that torch was
compiled with differ in the last bits. So torch computes the powers from the steps on the device,
for all slices of a stream before the first update. Four launches per bucket would wait behind the
link, fill CUDA's queue and block the host in ``step()``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from .kernels import moment_kernels
from .kernels.launching import AddressTable
from .moments import Kept
from .params import SliceState, Snapshot
from .schema import raw_step, torch_class

AT_ONCE: Final = AddressTable.MOST
"""Slices per launch."""
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_READ: Final = frozenset((torch.bfloat16, torch.float32))
"""Dtypes of gradients that the kernel reads."""


class AdamConstants(NamedTuple):
    """The hyper-parameters of one group in one step; the kernel rounds them to fp32."""

    lr: float
    beta1: float
    beta2: float
    decay: float
    eps: float
    maximize: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> AdamConstants | None:
        """Read a group; None if fused kernels do not take its options as they are."""
        lr, betas, decay = group["lr"], group["betas"], group["weight_decay"]
        if (
            group["fused"] is not True
            or any(group[o] for o in ("amsgrad", "foreach", "differentiable", "capturable"))
            or any(isinstance(number, Tensor) for number in (lr, *betas))
            or not (group["decoupled_weight_decay"] or decay == 0)
        ):
            return None
        numbers = float(lr), float(betas[0]), float(betas[1]), float(decay), float(group["eps"])
        return cls(*numbers, bool(group["maximize"]))


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
        """Return the powers of a slice: fp32, of beta1, beta2, and two unused ones."""
        if id(sliced) not in self._rows:
            self._rows[id(sliced)] = len(self._slices)
            self._slices.append(sliced)
        group = sliced.param.group
        if group not in self._powers:  # rows of 16 bytes: see update/kernels/launching.py
            self._powers[group] = self._counts.new_ones(len(self._counts), 4)
        return self._powers[group][self._rows[id(sliced)]]

    def compute(self, group: int, betas: tuple[float, float], snapshot: Snapshot) -> None:
        """Compute the powers for the step of ``snapshot``, once."""
        key = (StepPowers, id(self), group)
        if key in snapshot.cache:
            return
        snapshot.cache[key] = True
        # The updates of the step before read these rows on the same stream, so they are over.
        counts = self._counts[: len(self._slices)]
        torch.stack([sliced.state["step"] for sliced in self._slices], out=counts)
        counts += 1
        for column, beta in enumerate(betas):
            torch.pow(beta, counts, out=self._powers[group][: len(counts), column])


class Operands(NamedTuple):
    """The kernel's operands for one slice; 1-D, contiguous, of one numel."""

    weight: Tensor  # bf16 with a remainder, or fp32 without
    remainder: Tensor | None  # bf16
    average: Kept  # the first moment
    square: Kept  # the second
    step: Tensor  # 0-dim fp32
    powers: Tensor  # fp32, of both betas to the step that this update makes
    first: int  # index of the first element in the global tensor
    seed: int  # of the parameter's random bits


class AdamLaunch:
    """One launch of the kernel for up to ``AT_ONCE`` slices of one group, none of them empty."""

    def __init__(self, operands: Sequence[Operands]) -> None:
        self.operands = operands
        self._table: AddressTable | None = None

    def run(self, gradients: Sequence[Tensor], updates: int, constants: AdamConstants) -> None:
        """Update the slices in place.

        Args:
            gradients: per slice, 1-D, floating, of one dtype; they stay as they are.
            updates: of each slice, with this one.
            constants: of the group.
        """
        kernels = moment_kernels()
        assert kernels is not None
        if self._table is None:
            self._table = AddressTable(
                [_vectors(each) for each in self.operands],
                [[each.step, each.powers] for each in self.operands],
                [[each.first, each.seed] for each in self.operands],
                tile_numel=kernels.TILE_NUMEL,
            )
        if gradients[0].dtype not in _READ:
            gradients = [gradient.float() for gradient in gradients]
        first = self.operands[0]
        kernels.adam(
            self._table, gradients, updates, constants[:5],
            BF16_WEIGHT=first.remainder is not None,
            BF16_GRADIENT=gradients[0].dtype == torch.bfloat16,
            MAXIMIZE=constants.maximize, DECAY=constants.decay != 0,
            BITS=8 * first.average[0].itemsize,
        )  # fmt: skip


def _vectors(each: Operands) -> list[Tensor]:
    found = (each.weight, each.remainder, *each.average, *each.square)
    return [each.weight if tensor is None else tensor for tensor in found]


class OneKernelAdam:
    """Updates the slices of a bucket without scratch memory.

    Args:
        slices: slices of one bucket that pass :meth:`is_for`.
        weights: their shards, bf16 with ``remainders``, fp32 without.
        remainders: bf16, or None for each.
        kept: both moments of each slice.
        powers: powers for all slices on this stream.
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
        self._operands = [
            Operands(
                weight, remainder, *both, sliced.state["step"], powers.row(sliced),
                sliced.param.origin + sliced.slice.start, sliced.param.seed,
            )
            for sliced, weight, remainder, both in zip(
                slices, weights, remainders, kept, strict=True
            )
        ]  # fmt: skip
        by_group: dict[int, list[int]] = {}
        for index, sliced in enumerate(slices):
            by_group.setdefault(sliced.param.group, [])
            if sliced.slice.numel:  # a table has no empty rows
                by_group[sliced.param.group].append(index)
        self.groups = frozenset(by_group)
        self._together = self._cut(by_group, AT_ONCE)
        self._alone = self._cut(by_group, 1)

    @staticmethod
    def is_for(optimizer: Optimizer, slices: Sequence[SliceState]) -> bool:
        """Whether there is a kernel: on CUDA, for torch's own step of Adam or AdamW without
        amsgrad, over flat fp32 masters; both moments in fewer bits or none."""
        step = raw_step(type(optimizer))
        return (
            slices[0].tensor.device.type == "cuda"
            and torch_class(optimizer) in (Adam, AdamW)
            and (step.__module__, step.__qualname__) == ("torch.optim.adam", "Adam.step")
            and all(
                type(p.tensor) is Tensor
                and p.tensor.dtype == torch.float32
                and p.param.schema.elementwise
                and p.state.keys() == {"step", *_MOMENTS}
                and p.state["step"].device == p.tensor.device
                and {m.name for m in p.param.moments} in (set(_MOMENTS), set())
                for p in slices
            )
            and moment_kernels() is not None
        )

    def fits(self, snapshot: Snapshot) -> bool:
        """Whether the kernel computes with these hyper-parameters."""
        return self._constants(snapshot) is not None

    def run(self, gradients: Sequence[Tensor | None], snapshot: Snapshot) -> bool:
        """Update all slices that have a gradient; False, and nothing done, if the class has to:
        hyper-parameters are tensors, or an option asks for another implementation."""
        by_group = self._constants(snapshot)
        if by_group is None:
            return False
        for group, constants in by_group.items():
            self._powers.compute(group, (constants.beta1, constants.beta2), snapshot)
        for sliced, gradient in zip(self._slices, gradients, strict=True):
            if gradient is not None:
                sliced.updates += 1
                sliced.stepped = True
                if not sliced.slice.numel:  # no program counts it
                    sliced.state["step"] += 1
        for indices, launch in self._launches(gradients):
            given = [gradient for i in indices if (gradient := gradients[i]) is not None]
            if given:
                first = self._slices[indices[0]]
                launch.run(given, first.updates, by_group[first.param.group])
        return True

    def _constants(self, snapshot: Snapshot) -> dict[int, AdamConstants] | None:
        """Return constants by group, computed once per step; None if the class has to update a
        group."""
        found = {}
        for index in self.groups:
            key = (AdamConstants, index)
            if key not in snapshot.cache:
                snapshot.cache[key] = AdamConstants.of(snapshot.groups[index])
            if (constants := snapshot.cache[key]) is None:
                return None
            found[index] = constants
        return found

    def _cut(
        self, by_group: Mapping[int, list[int]], most: int
    ) -> list[tuple[list[int], AdamLaunch]]:
        """Make launches of up to ``most`` slices each, with the slices' indices."""
        cuts = [
            indices[start : start + most]
            for indices in by_group.values()
            for start in range(0, len(indices), most)
        ]
        return [(cut, AdamLaunch([self._operands[i] for i in cut])) for cut in cuts]

    def _launches(self, gradients: Sequence[Tensor | None]) -> list[tuple[list[int], AdamLaunch]]:
        """Put many slices into one launch, unless gradients differ in dtype, one is missing, or
        slices differ in their number of updates, which a launch takes once."""
        found = {
            None if gradient is None else (gradient.dtype, sliced.updates)
            for sliced, gradient in zip(self._slices, gradients, strict=True)
        }
        return self._together if len(found) == 1 else self._alone
