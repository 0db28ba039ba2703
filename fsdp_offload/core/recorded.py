"""Stand-ins for local shards of gradients in host memory.

A stand-in answers clipping, ``GradScaler`` and ``zero_grad()`` without moving the gradient. Norms
were computed when the gradients were reduced, with the kernel that torch would have used. A
multiplication is recorded, with a copy of its factor, and the same operation runs when the values
are fetched: the bits are the same.

All other code gets a copy, like that of a weight in host memory (:mod:`.gated`). If the use wrote
into the copy, or its result may share memory with it, the copy becomes the gradient, stays on the
device, and the update reads it there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from .backend import Event
from .gated import GatedShard, name_of

ORDERS: Final = (2.0, torch.inf)
"""Orders of the recorded norms."""


Operation = tuple[Callable[..., object], Any]
"""A recorded in-place operation on gradients that their values still need: a function of a list of
tensors, with its operand."""
Operations = tuple[Operation, ...]


@torch.no_grad()
def apply_all(pending: Sequence[tuple[Sequence[Tensor], Operations]]) -> None:
    """Apply recorded operations to lists of tensors, each of one dtype."""
    for tensors, operations in pending:
        for apply, operand in operations:
            apply(list(tensors), operand)


def _each(func: Callable[..., object], tensors: list[Tensor], factor: Any) -> None:
    for tensor in tensors:
        func(tensor, factor)


def _unscale(func: Callable[..., object], tensors: list[Tensor], inverse: Tensor) -> None:
    func(tensors, torch.zeros_like(inverse), inverse)


_ZERO: Final = functools.partial(_each, Tensor.fill_), 0.0


@dataclass
class Place:
    """A gradient's values in host memory."""

    host: Tensor  # of the shard's shape and dtype
    start: int  # byte in the memory of gradients that leave together
    norms: Tensor  # one per order, on the device; the next reduction overwrites them
    normed: Event  # after it, the norms are valid
    stored: Event  # after it, the values are valid
    read: Event | None = None  # after it, the memory may be overwritten


class Taken(NamedTuple):
    """A gradient as an update reads it, independent of later changes by the caller."""

    place: Place
    operations: Operations


class Record:
    """One gradient in host memory; the :class:`.Keeper` of its stand-in.

    Args:
        fetch: copies the values to the device, for the current stream.
        wait: makes the current stream wait.
        place: see :meth:`store`.
    """

    def __init__(
        self, fetch: Callable[[Record], Tensor], wait: Callable[[Event], None], place: Place
    ) -> None:
        self.fetch, self.wait = fetch, wait
        self._copied_version = self.version = 0  # the latter counts recorded operations
        self.store(place)

    def store(self, place: Place) -> None:
        """Set the place of new values."""
        self.place, self._has_norms = place, True
        self.operations: Operations = ()
        self.real: Tensor | None = None  # the values, while they are on the device
        self.version += 1

    def note(self, *operations: Operation) -> None:
        """Record in-place operations, while the values are away."""
        self.operations, self._has_norms = operations, False
        self.version += 1

    def keep(self, values: Tensor) -> Tensor:
        """Keep ``values`` on the device, and apply the recorded operations to them."""
        apply_all([([values], self.operations)])
        self.real, self.operations, self._has_norms = values, (), False
        return values

    @property
    def taken(self) -> Taken:
        """Return its present state, for an update."""
        return Taken(self.place, self.operations)

    @property
    def is_zero(self) -> bool:
        """Whether zeroing has made the stored values useless."""
        return self.operations[:1] == (_ZERO,)

    def norm(self, order: float) -> Tensor | None:
        """Return the recorded norm: 0-dim, valid after ``normed``, until the next reduction."""
        is_known = self._has_norms and order in ORDERS
        return self.place.norms[ORDERS.index(order)] if is_known else None

    # ------------------------------------------------------------------ Keeper

    def take(self) -> Tensor:
        """See :class:`.Keeper`."""
        if self.real is not None:
            return self.real
        values = self.fetch(self)
        apply_all([([values], self.operations)])
        self._copied_version = values._version
        return values

    def used(self, shard: Tensor, *, is_shared: bool, is_written: bool = False) -> None:
        """See :class:`.Keeper`."""
        is_kept = is_shared or is_written or shard._version != self._copied_version
        if shard is not self.real and is_kept:
            self.operations = ()
            self.keep(shard)

    def bring_back(self) -> None:
        """See :class:`.Keeper`."""
        self.local()

    def local(self) -> Tensor:
        """See :class:`.Keeper`. On the device, because callers get no view of the host memory."""
        return self.keep(self.fetch(self)) if self.real is None else self.real


class RecordedShard(GatedShard):
    """Stands for a gradient in host memory, of the shape, strides and device of ``shard``."""

    keeper: Record

    @property
    def _version(self) -> int:  # type: ignore[override]
        record = self.keeper
        return record.version if record.real is None else record.version + record.real._version

    @staticmethod
    def _use(func: Any, args: Any, kwargs: Any) -> Any:
        answer = _ANSWERS.get(name_of(func)) if args else None  # not for tensors named by keyword
        found = NotImplemented if answer is None else answer(func, *args, **(kwargs or {}))
        return GatedShard._use(func, args, kwargs) if found is NotImplemented else found


def record_of(tensor: object) -> Record | None:
    """Return the record of a stand-in for a gradient in host memory."""
    return tensor.keeper if type(tensor) is RecordedShard else None


# --------------------------------------------------------------------------- answers


def _split(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Record]]:
    here, away = list[Tensor](), list[Record]()
    for tensor in tensors:
        record = record_of(tensor)
        if record is not None and record.real is None:
            away.append(record)
        else:
            here.append(tensor if record is None or record.real is None else record.real)
    return here, away


def _are_alike(tensors: Sequence[Tensor], dtype: object = None) -> bool:
    return dtype is None and len({tensor.dtype for tensor in tensors}) == 1


def _norms(func: Any, tensors: list[Tensor], ord: Any = 2, dtype: Any = None) -> Any:
    if not _are_alike(tensors, dtype):
        return NotImplemented
    here, away = _split(tensors)
    recorded = [norm for norm in _recorded(away, float(ord)) if norm is not None]
    if len(recorded) < len(away):  # after GradScaler, or a second clipping
        return NotImplemented
    copies = iter(torch.stack(recorded).unbind() if away else ())
    of_here = iter(func(here, ord) if here else ())
    # In the caller's order: the bits of their sum depend on it.
    return [next(copies if _split([tensor])[1] else of_here) for tensor in tensors]


def _recorded(away: Sequence[Record], order: float) -> list[Tensor | None]:
    for event, record in {record.place.normed: record for record in away}.items():
        record.wait(event)
    return [record.norm(order) for record in away]


def _is_scalar(factor: object) -> bool:
    return type(factor) in (int, float) or (type(factor) is Tensor and factor.dim() == 0)


def _note(away: Sequence[Record], apply: Callable[..., object], operand: Any) -> None:
    # A clone: the caller may change its factor before the values are fetched.
    noted = apply, operand.clone() if isinstance(operand, Tensor) else operand
    for record in away:
        record.note(*record.operations, noted)


def _scale_all(func: Any, tensors: list[Tensor], factor: Any = None, **options: Any) -> Any:
    if options or not _is_scalar(factor) or not _are_alike(tensors):
        return NotImplemented
    here, away = _split(tensors)
    if here:
        func(here, factor)
    return _note(away, func, factor)


def _scale(func: Any, tensor: Tensor, factor: Any = None, **options: Any) -> Any:
    _, away = _split([tensor])
    if options or not _is_scalar(factor) or not away:
        return NotImplemented
    _note(away, functools.partial(_each, func), factor)
    return tensor


def _check_and_unscale(func: Any, tensors: list[Tensor], found: Tensor, inverse: Tensor) -> Any:
    """Check the largest element, because a norm of order 2 may overflow."""
    _, away = _split(tensors)
    known = [norm for norm in _recorded(away, torch.inf) if norm is not None]
    if len(known) < len(tensors):
        return NotImplemented
    found.copy_(torch.maximum(found, (~torch.stack(known).isfinite()).any().to(found)))
    return _note(away, functools.partial(_unscale, func), inverse)


def _zero_all(func: Any, tensors: list[Tensor]) -> None:
    here, away = _split(tensors)
    if here:
        func(here)
    for record in away:
        record.note(_ZERO)


def _zero(func: Any, tensor: Tensor) -> Any:
    if not _split([tensor])[1]:
        return NotImplemented
    _zero_all(func, [tensor])
    return tensor


def _like(func: Any, tensor: Tensor, **options: Any) -> Tensor:
    looks = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    device = options.pop("device", None) or tensor.device
    return func(looks, device=device, **options)  # type: ignore[no-any-return]


_ANSWERS: Final[dict[str, Callable[..., Any]]] = {
    "_foreach_norm": _norms,
    "_amp_foreach_non_finite_check_and_unscale_": _check_and_unscale,
    **dict.fromkeys(("_foreach_mul_", "_foreach_div_"), _scale_all),
    **dict.fromkeys(("mul_", "div_", "__imul__", "__itruediv__"), _scale),
    "zero_": _zero,
    "_foreach_zero_": _zero_all,
    **dict.fromkeys(("zeros_like", "empty_like", "ones_like"), _like),
}
"""Handlers by name of the operation."""
