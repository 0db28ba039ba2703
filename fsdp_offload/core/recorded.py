"""Stands for the local shard of a gradient that is in host memory.

What clipping, ``GradScaler`` and ``zero_grad()`` do to gradients is answered without moving them.
Norms were computed when the gradients were reduced, from the memory and by the kernel that torch
would have used. A multiplication is noted, and done by the same operation when the values are
fetched: the bits are the same. The factor is copied, because it is the caller's.

All other code gets a copy, as of a weight in host memory (:mod:`.gated`). If the use has written
into the copy, or its result may share its memory, the copy is the gradient from then on. It stays
on the device, and an update reads it there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from .backend import Event
from .gated import GatedShard


class Operation(NamedTuple):
    """What was done to a gradient in place, and is still to be done to its values."""

    apply: Callable[..., object]  # (tensors, *operands)
    operands: tuple[Any, ...] = ()


Operations = tuple[Operation, ...]


@torch.no_grad()
def apply_all(pending: Sequence[tuple[Sequence[Tensor], Operations]]) -> None:
    """Do to lists of tensors, each of one dtype, what was done to gradients."""
    for tensors, operations in pending:
        for operation in operations:
            operation.apply(list(tensors), *operation.operands)


def _each(func: Callable[..., object], tensors: list[Tensor], factor: Any) -> None:
    for tensor in tensors:
        func(tensor, factor)


def _unscale(func: Callable[..., object], tensors: list[Tensor], inverse: Tensor) -> None:
    func(tensors, torch.zeros_like(inverse), inverse)


def _fill_with_zeros(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()


_ZERO: Final = Operation(_fill_with_zeros)


@dataclass
class Place:
    """A gradient's values in host memory."""

    host: Tensor  # of the shard's shape and dtype
    start: int  # byte, in the memory that gradients share which leave together
    stored: Event  # after it, they are there
    read: Event | None = None  # after it, the memory may be written into


@dataclass(frozen=True)
class Norms:
    """Of several gradients, computed when they were reduced."""

    values: Tensor  # a row per order, a column per gradient; the next reduction writes into it
    rows: dict[float, int]  # by order
    ready: Event


class Taken(NamedTuple):
    """A gradient as an update reads it, whatever the caller does to it later."""

    place: Place
    operations: Operations


class Home(Protocol):
    """What moves the values."""

    def fetch(self, record: Record) -> Tensor:
        """A copy of the stored values, like the shard, for uses on the current stream."""
        ...

    def wait(self, event: Event) -> None:
        """Let the current stream wait."""
        ...


class Record:
    """One gradient in host memory; the :class:`.Keeper` of what stands for it."""

    def __init__(self, home: Home, place: Place, norms: Norms, column: int) -> None:
        self._home, self._copied_version = home, 0
        self.version = 0  # of writes that were noted
        self.store(place, norms, column)

    def store(self, place: Place, norms: Norms, column: int) -> None:
        """The values are there from now on."""
        self.place, self.operations = place, Operations()
        self._norms: tuple[Norms, int] | None = (norms, column)
        self.real: Tensor | None = None  # the values, while they are on the device
        self.version += 1

    def note(self, *operations: Operation) -> None:
        """Something was done to the gradient in place, while its values are away."""
        self.operations, self._norms = operations, None
        self.version += 1

    def keep(self, values: Tensor) -> None:
        """Have these stored values, and what was noted since, on the device."""
        apply_all([([values], self.operations)])
        self._pin(values)

    def _pin(self, values: Tensor) -> None:
        self.real, self.operations, self._norms = values, (), None

    @property
    def is_zero(self) -> bool:
        """Whether the stored values are of no use any more."""
        return self.operations[:1] == (_ZERO,)

    def norm(self, order: float, copies: dict[int, Tensor]) -> Tensor | None:
        """As it was recorded; ``copies``: of :attr:`Norms.values`, by identity."""
        if self._norms is None or order not in self._norms[0].rows:
            return None
        norms, column = self._norms
        if id(norms) not in copies:
            self._home.wait(norms.ready)
            copies[id(norms)] = norms.values.clone()
        return copies[id(norms)][norms.rows[order], column]

    # ------------------------------------------------------------------ Keeper

    def take(self) -> Tensor:
        """See :class:`.Keeper`."""
        if self.real is not None:
            return self.real
        values = self._home.fetch(self)
        apply_all([([values], self.operations)])
        self._copied_version = values._version
        return values

    def used(self, shard: Tensor, *, is_shared: bool) -> None:
        """See :class:`.Keeper`."""
        if shard is not self.real and (is_shared or shard._version != self._copied_version):
            self._pin(shard)

    def local(self) -> Tensor:
        """See :class:`.Keeper`. On the device: there is no view of host memory to write to."""
        self.bring_back()
        assert self.real is not None
        return self.real

    def bring_back(self) -> None:
        """See :class:`.Keeper`."""
        if self.real is None:
            self.keep(self._home.fetch(self))


class RecordedShard(GatedShard):
    """Stands for a gradient in host memory, of the shape, strides and device of ``shard``."""

    keeper: Record

    @property
    def _version(self) -> int:  # type: ignore[override]
        """Changes with each write."""
        record = self.keeper
        return record.version if record.real is None else record.version + record.real._version

    @staticmethod
    def _use(func: Any, args: Any, kwargs: Any) -> Any:
        name = str(getattr(func, "__name__", "")).partition(".")[0]  # without the overload
        found: Any = NotImplemented
        if (answer := _ANSWERS.get(name)) is not None:
            found = answer(func, *args, **(kwargs or {}))
        return GatedShard._use(func, args, kwargs) if found is NotImplemented else found


def record_of(tensor: object) -> Record | None:
    """Of what stands for a gradient in host memory."""
    return tensor.keeper if type(tensor) is RecordedShard else None


# --------------------------------------------------------------------------- answers


def _here(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those that are on the device."""
    found = ((tensor, record_of(tensor)) for tensor in tensors)
    here = (tensor if record is None else record.real for tensor, record in found)
    return [each for each in here if each is not None]


def _away(tensors: Sequence[Tensor]) -> list[Record]:
    """The others."""
    found = (record_of(tensor) for tensor in tensors)
    return [record for record in found if record is not None and record.real is None]


def _norms(func: Any, tensors: list[Tensor], ord: Any = 2, dtype: Any = None) -> Any:
    if dtype is not None:
        return NotImplemented
    here, copies = _here(tensors), dict[int, Tensor]()
    computed = iter(func(here, ord) if here else ())
    norms = []
    for tensor in tensors:
        if not (records := _away([tensor])):
            norms.append(next(computed))
        elif (recorded := records[0].norm(float(ord), copies)) is not None:
            norms.append(recorded)
        else:  # after GradScaler, or a second clipping: one copy at a time, and none is kept
            norms += func([records[0].take()], ord)
    return norms


def _is_scalar(factor: object) -> bool:
    return type(factor) in (int, float) or (type(factor) is Tensor and factor.dim() == 0)


def _note(tensors: Sequence[Tensor], operation: Operation) -> None:
    copied = (each.clone() if isinstance(each, Tensor) else each for each in operation.operands)
    noted = operation._replace(operands=tuple(copied))
    for record in _away(tensors):
        record.note(*record.operations, noted)


def _scale_all(func: Any, tensors: list[Tensor], factor: Any) -> Any:
    # Of several dtypes torch takes another kernel for all.
    if not _is_scalar(factor) or len({tensor.dtype for tensor in tensors}) > 1:
        return NotImplemented
    if here := _here(tensors):
        func(here, factor)
    return _note(tensors, Operation(func, (factor,)))


def _scale(func: Any, tensor: Tensor, factor: Any, **options: Any) -> Any:
    if options or not _is_scalar(factor) or not _away([tensor]):
        return NotImplemented
    _note([tensor], Operation(functools.partial(_each, func), (factor,)))
    return tensor


def _check_and_unscale(func: Any, tensors: list[Tensor], found: Tensor, inverse: Tensor) -> Any:
    """The largest element tells of all that are not finite; a norm of order 2 may overflow."""
    copies = dict[int, Tensor]()
    largest = [record.norm(torch.inf, copies) for record in _away(tensors)]
    known = [each for each in largest if each is not None]
    if len(known) < len(tensors):
        return NotImplemented
    found.copy_(torch.maximum(found, (~torch.stack(known).isfinite()).any().to(found)))
    return _note(tensors, Operation(functools.partial(_unscale, func), (inverse,)))


def _zero(func: Any, tensor: Tensor) -> Any:
    if not (records := _away([tensor])):
        return NotImplemented
    records[0].note(_ZERO)
    return tensor


def _zero_all(func: Any, tensors: list[Tensor]) -> None:
    if here := _here(tensors):
        func(here)
    for record in _away(tensors):
        record.note(_ZERO)


def _like(func: Any, tensor: Tensor, **options: Any) -> Tensor:
    looks = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    made: Tensor = func(looks, **{**options, "device": options.get("device") or tensor.device})
    return made


_ANSWERS: Final[dict[str, Callable[..., Any]]] = {
    "_foreach_norm": _norms,
    "_amp_foreach_non_finite_check_and_unscale_": _check_and_unscale,
    **dict.fromkeys(("_foreach_mul_", "_foreach_div_"), _scale_all),
    **dict.fromkeys(("mul_", "div_", "__imul__", "__itruediv__"), _scale),
    "zero_": _zero,
    "_foreach_zero_": _zero_all,
    **dict.fromkeys(("zeros_like", "empty_like", "ones_like"), _like),
}
"""By the operation's name, of torch's functions and below them."""
