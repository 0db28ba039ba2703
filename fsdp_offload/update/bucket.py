"""The update of one bucket: unpack masters, step the shadow, pack masters.

Its state views lie on the device (resident state), in a slot (streamed state, with shards that come
along) or in host memory (updates on the CPU, with copies of the shards). If possible, one kernel
does everything: see :mod:`.one_kernel`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core import dtensor
from ..plan import Bucket, Kind, Slice
from . import codec
from .moments import Kept, Moment, PackedMoment, pack, unpack
from .one_kernel import OneKernelAdam, StepPowers
from .params import REMAINDER_KIND, MasterForm, ParamState, SliceState, Snapshot
from .rng_key import key_of
from .shadow import Shadow

StateView = Callable[[Slice, Kind, int], Tensor]
"""(slice, kind, elements of the kind in the whole parameter) -> 1-D view of the slice's state."""

FEW: Final = 3
"""Up to this many tensors, one kernel launch each is cheaper than gathering them for one launch."""


@dataclass(frozen=True)
class Scratch:
    """Device memory for the updates on one stream, one bucket after another."""

    memory: Tensor  # uint8, 1-D, alone in its storage
    powers: StepPowers

    def release(self) -> None:
        """Free the memory; its views are invalid until :meth:`fill`."""
        self.memory.untyped_storage().resize_(0)

    def fill(self) -> None:
        """Reallocate on the current stream if released."""
        storage = self.memory.untyped_storage()
        if storage.nbytes() < self.memory.nbytes:
            storage.resize_(self.memory.nbytes)

    @staticmethod
    def bytes_of(param: ParamState, numel: int) -> int:
        """Return the bytes for a bucket of ``numel`` elements of parameters like ``param``."""
        per_numel = len(param.moments) * param.compute_dtype.itemsize
        if param.form is not MasterForm.SHARD:  # master and gradient, and a gathered shard
            per_numel += 2 * param.compute_dtype.itemsize + param.info.dtype.itemsize
        return numel * per_numel

    def cut(self, numel: int, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Cut one 1-D view of ``numel`` elements per dtype, one after the other."""
        views, at = [], 0
        for dtype in dtypes:
            size = numel * dtype.itemsize
            views.append(self.memory[at : at + size].view(dtype))
            at += size
        return views


def slice_state(
    param: ParamState, slice_: Slice, tensor: Tensor, unpacked: Mapping[str, Tensor]
) -> SliceState:
    """Make a slice with its own scalars; :meth:`BucketUpdate.bind` adds views of like kinds.

    ``unpacked``: memory for moments that are stored in fewer bits.
    """
    state: dict[str, Any] = dict(unpacked)
    for kind in param.schema.kinds:
        if kind.role == "number":
            state[kind.name] = 0
        elif kind.role == "scalar":
            device = tensor.device if kind.on_device else torch.device("cpu")
            state[kind.name] = torch.full((), kind.initial, dtype=kind.dtype, device=device)
    made = SliceState(
        param, slice_, as_parameter_shape(param, tensor), state, stepped=param.schema.eager
    )
    param.slices.append(made)
    return made


def state_views(param: ParamState, slice_: Slice, view: StateView) -> dict[str, Tensor]:
    """View the like kinds of one slice as the class sees them, except packed ones."""
    reduced = {moment.name for moment in param.moments}
    like = {kind.name for kind in param.schema.role("like")} - reduced
    return {
        kind.name: as_parameter_shape(param, view(slice_, kind, numel))
        for kind, numel in param.kinds
        if kind.name in like
    }


def as_parameter_shape(param: ParamState, flat: Tensor) -> Tensor:
    """Return a flat view as the class sees it: whole parameters in shape and placement."""
    if param.schema.elementwise:
        return flat
    return dtensor.like(param.parameter, flat.view(param.info.local_shape))


def copy_present(
    targets: Sequence[Tensor],
    sources: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
) -> None:
    """Copy (and cast) each source into its target if the slice has a gradient.

    Args:
        targets: 1-D, contiguous, of one dtype.
        sources: 1-D, contiguous.
        gradients: one per slice; None skips it.
    """
    if any(gradient is None for gradient in gradients):
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        targets, sources = [targets[i] for i in present], [sources[i] for i in present]
    if targets:
        some: Any = sources
        torch._foreach_copy_(list(targets), some)


class BucketUpdate:
    """The update of one bucket, on the device or the CPU, wherever its state is.

    All parameters of the bucket share shard dtype, compute dtype and :class:`MasterForm`.

    Args:
        optimizer: the wrapped optimizer.
        bucket: slices of the parameters.
        params: all parameters; slices name them by index.
        view: locates the state of a slice; see :meth:`bind`.
        scratch: shared by all buckets that are updated on one stream.
        flat_remainder: see :meth:`bind`.
        shards: see :meth:`bind`.
        on_host: whether it runs on the CPU for parameters on a device.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        bucket: Bucket,
        params: list[ParamState],
        view: StateView,
        scratch: Scratch,
        *,
        flat_remainder: Tensor | None = None,
        shards: Sequence[Tensor | None] | None = None,
        on_host: bool = False,
    ) -> None:
        first = params[bucket.slices[0].spec.index]
        self.bucket = bucket
        self._form = first.form
        self._whole_master = Kind(MasterForm.WHOLE.value, first.compute_dtype)
        self._is_shaped = not first.schema.elementwise
        self._shards = [
            dtensor.local(params[s.spec.index].parameter).view(-1)[s.start : s.stop]
            if given is None
            else given
            for s, given in zip(bucket.slices, shards or [None] * len(bucket.slices), strict=True)
        ]
        self._masters: list[Tensor] = self._shards
        self._gradients: list[Tensor] | None = None  # in the compute dtype
        self._remainders: list[Tensor | None] = [None] * len(self._shards)
        self._gathered: list[Tensor] = []  # contiguous copies of the shards
        self._together: tuple[Tensor, ...] = ()  # these copies, and the masters
        self._codes: list[tuple[Tensor, Tensor, Tensor]] = []  # (bf16, bf16, fp32) each 1-D
        self._packed: list[list[PackedMoment]] = []  # per slice
        self._reduced: OneKernelAdam | None = None
        self._powers = scratch.powers
        unpacked = self._cut_scratch(scratch, first)
        self.slices = [
            slice_state(params[s.spec.index], s, master, values)
            for s, master, values in zip(bucket.slices, self._masters, unpacked, strict=True)
        ]
        self._bind_state(view, flat_remainder)
        self._shadow = Shadow(optimizer, self.slices, on_host=on_host)
        unpacks = self._form is MasterForm.REMAINDER or bool(first.moments)
        has_kernel = unpacks and self._form is not MasterForm.WHOLE
        if has_kernel and OneKernelAdam.is_for(optimizer, self.slices):
            self._reduced = self._one_kernel()

    def bind(
        self,
        view: StateView,
        flat_remainder: Tensor | None = None,
        shards: Sequence[Tensor | None] | None = None,
    ) -> None:
        """Point the update at state in other memory, such as another slot. Nothing may be in
        flight.

        Looks up like kinds, remainders and whole masters again. Slices keep their scalars, such as
        ``step``, and whether they have stepped.

        Args:
            view: (slice, kind, elements of the kind in the parameter) -> 1-D view of the state.
            flat_remainder: all remainders of the bucket as one view, laid out like scratch memory,
                so that one kernel unpacks many small shards.
            shards: per slice, the 1-D tensor to read and write instead of the shard; None: the
                shard.
        """
        for index, shard in enumerate(shards or ()):
            if shard is not None:
                self._shards[index] = shard
                if self._form is MasterForm.SHARD:  # self._masters is the same list
                    self.slices[index].tensor = as_parameter_shape(self.slices[index].param, shard)
        self._bind_state(view, flat_remainder)
        self._shadow.rebind()
        if self._reduced is not None:
            self._reduced = self._one_kernel()

    def _bind_state(self, view: StateView, flat_remainder: Tensor | None) -> None:
        if self._form is MasterForm.WHOLE:
            kind = self._whole_master
            self._masters = [view(s, kind, s.spec.numel) for s in self.bucket.slices]
            for sliced, master in zip(self.slices, self._masters, strict=True):
                sliced.tensor = as_parameter_shape(sliced.param, master)
        for sliced in self.slices:
            sliced.state.update(state_views(sliced.param, sliced.slice, view))
        if self._form is MasterForm.REMAINDER:
            self._bind_remainders(view, flat_remainder)
        self._packed = [
            [self._packed_moment(sliced, moment, view) for moment in sliced.param.moments]
            for sliced in self.slices
        ]

    @property
    def groups_without_scratch(self) -> frozenset[int]:
        """Return the parameter groups on which :meth:`needs_scratch` depends; empty: always
        true."""
        return frozenset() if self._reduced is None else self._reduced.groups

    def needs_scratch(self, snapshot: Snapshot) -> bool:
        """Whether an update with these hyper-parameters uses scratch memory."""
        return self._reduced is None or not self._reduced.fits(snapshot)

    def _one_kernel(self) -> OneKernelAdam:
        kept: list[tuple[Kept, Kept]] = []
        for sliced, packed in zip(self.slices, self._packed, strict=True):
            average, square = [own for _, own, _ in packed] or [
                (sliced.state[name], None) for name in ("exp_avg", "exp_avg_sq")
            ]
            kept.append((average, square))
        return OneKernelAdam(self.slices, self._shards, self._remainders, kept, self._powers)

    def _bind_remainders(self, view: StateView, flat_remainder: Tensor | None) -> None:
        remainders = [view(s, REMAINDER_KIND, s.spec.numel) for s in self.bucket.slices]
        self._remainders = list(remainders)
        if flat_remainder is not None and len(self.bucket.slices) > FEW:
            # For many small shards: one gather, one kernel, one scatter.
            if not self._gathered:  # once, because released memory cannot be cut
                numel = flat_remainder.numel()
                self._gathered = self._cut(self._flat_value)
                self._together = self._flat_value[:numel], self._flat_master[:numel]
            value, master = self._together
            self._codes = [(value, flat_remainder, master)]
        else:
            self._codes = list(zip(self._shards, remainders, self._masters, strict=True))

    @staticmethod
    def _packed_moment(sliced: SliceState, moment: Moment, view: StateView) -> PackedMoment:
        numel = sliced.slice.spec.numel
        codes, *scales = [
            view(sliced.slice, kind, -(-numel // kind.block_numel)) for kind in moment.kinds
        ]
        kept = codes, scales[0] if scales else None
        return moment, kept, sliced.state[moment.name]

    def _cut_scratch(self, scratch: Scratch, first: ParamState) -> list[dict[str, Tensor]]:
        """Point gradients and unpacked masters at scratch memory; returns the moments' part by
        name, for each slice."""
        compute, names = first.compute_dtype, [moment.name for moment in first.moments]
        dtypes = [compute] * len(names)
        if self._form is not MasterForm.SHARD:
            dtypes += [compute, compute, first.info.dtype]
        views = scratch.cut(self.bucket.scratch_numel, dtypes)
        if self._form is not MasterForm.SHARD:
            self._flat_master, self._flat_gradient, self._flat_value = views[len(names) :]
            self._gradients = self._cut(self._flat_gradient)
        if self._form is MasterForm.REMAINDER:
            self._masters = self._cut(self._flat_master)
        cuts = [self._cut(flat) for flat in views[: len(names)]]
        return [
            {name: cut[index] for name, cut in zip(names, cuts, strict=True)}
            for index in range(len(self.bucket.slices))
        ]

    def _cut(self, flat: Tensor) -> list[Tensor]:
        return [flat[s.scratch_start : s.scratch_start + s.numel] for s in self.bucket.slices]

    def run(self, gradients: list[Tensor | None], snapshot: Snapshot) -> None:
        """Update the bucket's parameters and state. ``gradients``: per slice, 1-D or None."""
        if self._reduced is not None and self._reduced.run(gradients, snapshot):
            return
        self._unpack_moments(gradients)
        is_complete = all(gradient is not None for gradient in gradients)
        self._unpack()  # also slices without a gradient: one kernel for all costs less
        self._shadow.step(self._prepare(gradients, is_complete), snapshot)
        self._pack(gradients, is_complete)
        self._pack_moments(gradients)

    def _unpack_moments(self, gradients: list[Tensor | None]) -> None:
        for sliced, gradient, packed in zip(self.slices, gradients, self._packed, strict=True):
            if gradient is not None and sliced.stepped:
                for moment, kept, values in packed:
                    unpack(moment, *kept, values)

    def _pack_moments(self, gradients: list[Tensor | None]) -> None:
        for sliced, gradient, packed in zip(self.slices, gradients, self._packed, strict=True):
            if gradient is None or not packed:
                continue
            sliced.updates += 1
            first = sliced.param.origin + sliced.slice.start
            for moment, kept, values in packed:
                key = key_of(sliced.param.seed, sliced.updates, moment.position // 2)
                pack(moment, values, *kept, (key, first))

    def _unpack(self) -> None:
        if self._form is MasterForm.WHOLE:
            for shard, master in zip(self._shards, self._masters, strict=True):
                codec.reseed_where_changed(shard, master)
        if self._gathered:
            torch._foreach_copy_(self._gathered, self._shards)
        for value, remainder, master in self._codes:
            codec.decode(value, remainder, master)

    def _prepare(self, gradients: list[Tensor | None], is_complete: bool) -> list[Tensor | None]:
        given = gradients
        if self._gradients is not None:
            copy_present(self._gradients, gradients, gradients)
            gradients = list(self._gradients)
        if not is_complete or self._is_shaped:
            gradients = [
                None
                if had is None or gradient is None
                else as_parameter_shape(sliced.param, gradient)
                for had, gradient, sliced in zip(given, gradients, self.slices, strict=True)
            ]
        return gradients

    def _pack(self, gradients: list[Tensor | None], is_complete: bool) -> None:
        if self._form is MasterForm.WHOLE:
            copy_present(self._shards, self._masters, gradients)
        if self._form is not MasterForm.REMAINDER:
            return
        for index, (value, remainder, master) in enumerate(self._codes):
            # Gathered slices without a gradient get the remainder that they had: its bits are the
            # low half of the master, which no update has changed.
            if self._gathered or is_complete or gradients[index] is not None:
                codec.encode(master, value, remainder)
        if self._gathered:
            copy_present(self._shards, self._gathered, gradients)
