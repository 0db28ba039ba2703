"""Stands for a shard that an update works on, or that is in host memory: its users wait first.

[Note: gated shards]
After ``step()`` a parameter's update may still run on another stream. FSDP2's all-gathers wait for
it (``optimizer/overlap.py``) and read memory of their own, never the local tensor of the parameter.
All other code comes by that local tensor, so until the next all-gather a :class:`GatedShard` is in
its place. Shape, dtype, device and the like are its own. Anything else, an operation, an address, a
copy, makes the current stream wait for the update, and then gets the shard itself.

It stays in place when it was used: another stream may be the next to use it, and has not waited.
What it cannot see is an older tensor that shares the shard's memory, such as ``p.data``.

Gradients of ``overlap="forward"`` are guarded likewise: the update reads them, so code that writes
into one waits. So does code that reads one: there is one rule for all uses.

A weight that lives in host memory (``optimizer/weights.py``) has the same stand-in. FSDP2's gathers
read a slot of the link; all other code gets a copy, which is dropped after the use. What that use
wrote goes back to host memory at once. The copy is kept if its result may share its memory, and
goes back before the next gather. ``detach()`` and views of the same shape stand for the same
weight, so a state dict moves nothing before its values are used.

Gradients in host memory have a class of their own: :mod:`.recorded`.

What ``torch.compile`` makes of a function takes its inputs apart (``__tensor_flatten__``) in each
run, and works on plain tensors, whose addresses it takes without asking any method. So the part of
a gated shard is the shard, and reading that waits. The part is called ``data`` because torch's
cache of compiled code tells DTensors apart by their placements alone: code made for a gated shard
may get a plain one, whose ``data`` are itself. In the other direction C++ code is given an object
without memory. It raises "Cannot access data pointer", as all C++ does that asks for the address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol, Self

import torch
from torch import Tensor

from .storage import identity, refuse_addresses

_METADATA: Final[frozenset[Any]] = frozenset(
    [
        getattr(Tensor, name).__get__
        for name in (
            *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes"),
            *("requires_grad", "is_leaf", "grad_fn", "is_cpu", "is_cuda", "is_meta"),
            *("is_sparse", "is_quantized", "is_mkldnn", "is_nested"),
        )
    ]
    + [Tensor.size, Tensor.stride, Tensor.dim, Tensor.numel, Tensor.nelement]
    + [Tensor.element_size, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous]
    + [Tensor.is_inference]
)
"""Metadata accessors: answered without waiting."""

_ALIASES: Final[frozenset[Any]] = frozenset(
    (
        *(Tensor.detach, Tensor.view_as, torch.ops.aten.detach.default),
        *(torch.ops.aten.alias.default, torch.ops.aten.view.default),
    )
)
"""Operations whose result stands for the same shard, if its shape is the same."""


class Keeper(Protocol):
    """Owns the values of a shard that is in host memory."""

    def take(self) -> Tensor:
        """Return a copy on the device, for uses on the current stream."""

    def used(self, shard: Tensor, *, is_shared: bool, is_written: bool = False) -> None:
        """A use of what :meth:`take` gave has ended; ``is_shared``: the caller may write into its
        memory later; ``is_written``: the use has, whether or not its version says so."""

    def local(self) -> Tensor:
        """Return the values themselves, not a copy: in host memory, or in the copy that the caller
        holds a view of."""

    def bring_back(self) -> None:
        """Give the parameter its device memory back, for good."""


def _do_nothing() -> None:
    """Wait of stand-ins that wait for nothing: in traces, and for shards in host memory."""


class GatedShard(Tensor):
    """Stands for ``shard``; holds no memory. ``wait`` is called before each use.

    With a ``keeper`` the shard is in host memory, and ``shard`` is what it looks like.
    """

    _shard: Tensor
    _wait: Callable[[], None]
    keeper: Keeper | None
    _looks: tuple[torch.Size, torch.dtype] | None
    """Looks of the shards that :meth:`takes` accepts; None: it accepts none."""
    _is_free = False

    @staticmethod
    def __new__(
        cls, shard: Tensor, wait: Callable[[], None] = _do_nothing, keeper: Keeper | None = None
    ) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, shard.shape, strides=shard.stride(), dtype=shard.dtype, device=shard.device
        )
        made._wait, made.keeper = wait, keeper
        if keeper is None:
            made._shard = shard
        made._looks = (shard.shape, shard.dtype) if shard.is_contiguous() else None
        refuse_addresses(made)  # for C++ that asks for one
        return made

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """The shard's attributes: none. Code that copies tensors also copies their attributes, such
        as DCP's stager."""
        return {}

    def takes(self, shard: Tensor) -> bool:
        """Stand for another shard after :meth:`release`; False: its looks differ."""
        looks = (shard.shape, shard.dtype)
        if not self._is_free or self._looks != looks or not shard.is_contiguous():
            return False
        self._shard, self._is_free = shard, False
        return True

    def release(self) -> None:
        """Let go of the shard."""
        self._is_free = True
        del self._shard

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The shard with final values."""
        self._wait()
        if self.keeper is None:
            return self._shard
        shard = self.keeper.take()
        self.keeper.used(shard, is_shared=True)
        return shard

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """See the module's docstring."""
        return ["data"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: object) -> Tensor:
        """Build a stand-in for tracing, which waits for nothing; results are the shards."""
        shard = inner["data"]
        return shard if type(shard) is Tensor else GatedShard(shard, _do_nothing)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA or torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls._use(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch.no_grad():  # autograd has recorded it
            return cls._use(func, args, kwargs)

    @staticmethod
    def _use(func: Any, args: Any, kwargs: Any) -> Any:
        kwargs = kwargs or {}
        if (answer := _answered(func, args, kwargs)) is not NotImplemented:
            return answer
        waits: dict[Callable[[], None], None] = {}  # each once: a list may have all of a model
        taken: dict[Keeper, tuple[GatedShard, Tensor]] = {}
        opened, named = _opened(args, waits, taken), _opened(kwargs, waits, taken)
        for wait in waits:
            wait()
        result, written = None, _written(func, args, kwargs)
        try:
            result = func(*opened, **named)
        finally:
            # Other functions without a result may be collectives in place, still running.
            is_told = result is None and name_of(func).startswith("_foreach_")
            for keeper, (stand_in, shard) in taken.items():
                result = stand_in if result is shard else result
                is_shared = not is_told and _may_share(result, shard.untyped_storage())
                keeper.used(shard, is_shared=is_shared, is_written=keeper in written)
        return result


def name_of(func: Any) -> str:
    """Return the name of a function or operator of torch, without its overload."""
    return str(getattr(func, "__name__", "")).partition(".")[0]


def _answered(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Answer without a copy on the device, or with one at a time; else ``NotImplemented``."""
    first, name = args[0] if args else None, name_of(func)
    if name.startswith("_foreach_") and type(first) in (list, tuple):
        return _one_by_one(func, args, kwargs)
    if not isinstance(first, GatedShard) or first.keeper is None:
        return NotImplemented
    other = args[1] if len(args) > 1 else first
    is_alias = func in _ALIASES and (func is Tensor.detach or not _is_recorded(first))
    if is_alias and tuple(getattr(other, "shape", other)) == first.shape:
        return type(first)(first, keeper=first.keeper)
    if name == "is_pinned":  # DCP asks each tensor
        return False
    if name == "copy_" and isinstance(other, GatedShard) and other.keeper is first.keeper:
        return first
    if name == "copy_" and type(other) is Tensor and not other.requires_grad:
        first.keeper.local().copy_(other)
        return first
    return NotImplemented


def _one_by_one(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Apply an operation to the tensors of a list in turn, with one copy on the device at a
    time."""
    lists = [value for value in args if type(value) in (list, tuple)]
    kept = [e for each in lists for e in each if isinstance(e, GatedShard) and e.keeper is not None]
    has_vector = any(isinstance(value, Tensor) and value.dim() for value in args)
    has_named = any(type(value) in (list, tuple) for value in kwargs.values())
    if len(kept) < 2 or len(args[0]) < 2 or has_vector or has_named:
        return NotImplemented
    if len({each.dtype for each in args[0]}) > 1:  # torch takes another kernel
        return NotImplemented
    results = [
        func(*(v[i : i + 1] if type(v) in (list, tuple) else v for v in args), **kwargs)
        for i in range(len(args[0]))
    ]
    return None if results[0] is None else [each for result in results for each in result]


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> set[Keeper | None]:
    """Find the keepers whose shards an ATen operation writes. Above autograd, functions have no
    schema, and versions count their writes."""
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    values = [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return {
        shard.keeper
        for value in values
        for shard in (value if isinstance(value, list | tuple) else [value])
        if isinstance(shard, GatedShard)
    }


def _is_recorded(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


class _Opened(torch.autograd.Function):
    """Lets derivatives pass from a copy of a shard to what stands for it (``to_local()``)."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, shard: Tensor) -> Tensor:
        return shard.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def _opened(value: Any, waits: dict[Any, None], taken: dict[Any, Any]) -> Any:
    """Replace stand-ins in ``value`` by their shards; adds to ``waits`` and ``taken``."""
    if isinstance(value, GatedShard):
        waits[value._wait] = None
        if value.keeper is None:
            return value._shard
        if value.keeper not in taken:
            taken[value.keeper] = value, value.keeper.take()
        shard = taken[value.keeper][1]
        if _is_recorded(value):
            return _Opened.apply(value, shard)  # type: ignore[no-untyped-call]
        return shard
    if type(value) in (list, tuple):
        return type(value)(_opened(each, waits, taken) for each in value)
    if type(value) is dict:
        return {name: _opened(each, waits, taken) for name, each in value.items()}
    return value


def _may_share(result: object, storage: torch.UntypedStorage) -> bool:
    """Whether the caller may read or write this memory through ``result``."""
    if isinstance(result, GatedShard | bool | float | str):
        return False
    if isinstance(result, list | tuple):
        return any(_may_share(each, storage) for each in result)
    if not isinstance(result, Tensor):
        return True  # an address, an array, or None of a collective in place
    try:
        return identity(result.untyped_storage()) == identity(storage)
    except (NotImplementedError, RuntimeError):  # of a layout, or a subclass, without a storage
        return True


def ungated(tensor: Tensor) -> Tensor:
    """Return the shard if ``tensor`` stands for one on the device, else ``tensor``. Does not wait:
    the caller knows the events, or needs no values."""
    return tensor._shard if type(tensor) is GatedShard and tensor.keeper is None else tensor


def keeper_of(tensor: Tensor) -> Keeper | None:
    """Return the keeper if ``tensor`` stands for a shard in host memory, else None."""
    return tensor.keeper if type(tensor) is GatedShard else None


def bring_back(shards: Iterable[Tensor]) -> None:
    """Give shards in host memory their device memory back, for good.

    Raises:
        DeviceMemoryError: there is no room.
    """
    for shard in shards:
        if (keeper := keeper_of(shard)) is not None:
            keeper.bring_back()
