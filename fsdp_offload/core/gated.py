"""Stands for a shard while an update works on it: code that uses it waits first.

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

What ``torch.compile`` makes of a function takes its inputs apart (``__tensor_flatten__``) in each
run, and works on plain tensors, whose addresses it takes without asking any method. So the part of
a gated shard is the shard, and reading that waits. The part is called ``data`` because torch's
cache of compiled code tells DTensors apart by their placements alone: code made for a gated shard
may get a plain one, whose ``data`` are itself. In the other direction C++ code is given an object
without memory. It raises "Cannot access data pointer", as all C++ does that asks for the address.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Self

import torch
from torch import Tensor

from .storage import refuse_addresses

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
)
"""What the shard's values and addresses play no part in."""


def _do_nothing() -> None:
    """What a copy that ``torch.compile`` traces with waits for."""


class GatedShard(Tensor):
    """Stands for ``shard``; holds no memory. ``wait`` is called before each use."""

    _shard: Tensor
    _wait: Callable[[], None]
    _looks: tuple[torch.Size, torch.dtype] | None
    """What :meth:`takes` a shard by; None: it takes none."""
    _is_free = False

    @staticmethod
    def __new__(cls, shard: Tensor, wait: Callable[[], None]) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, shard.shape, strides=shard.stride(), dtype=shard.dtype, device=shard.device
        )
        made._shard, made._wait = shard, wait
        made._looks = (shard.shape, shard.dtype) if shard.is_contiguous() else None
        refuse_addresses(made)  # for C++ that asks for one
        return made

    def takes(self, shard: Tensor) -> bool:
        """Stand for another shard, after :meth:`release`; False: not for one that looks like it."""
        looks = (shard.shape, shard.dtype)
        if not self._is_free or self._looks != looks or not shard.is_contiguous():
            return False
        self._shard, self._is_free = shard, False
        return True

    def release(self) -> None:
        """Stand for none, and keep none alive."""
        self._is_free = True
        del self._shard

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The shard with final values."""
        self._wait()
        return self._shard

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """See the module's docstring."""
        return ["data"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: object) -> Tensor:
        """For tracing, something that waits for nothing; results are the shards themselves."""
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
        return cls._use(func, args, kwargs)

    @staticmethod
    def _use(func: Any, args: Any, kwargs: Any) -> Any:
        waits: dict[Callable[[], None], None] = {}  # each once: a list may have all of a model
        opened, named = _opened(args, waits), _opened(kwargs or {}, waits)
        for wait in waits:
            wait()
        return func(*opened, **named)


def _opened(value: Any, waits: dict[Callable[[], None], None]) -> Any:
    """``value`` with shards in place of what stands for them; ``waits`` is added to."""
    if type(value) is GatedShard:
        waits[value._wait] = None
        return value._shard
    if type(value) in (list, tuple):
        return type(value)(_opened(each, waits) for each in value)
    if type(value) is dict:
        return {name: _opened(each, waits) for name, each in value.items()}
    return value


def ungated(tensor: Tensor) -> Tensor:
    """The shard, where ``tensor`` stands for one. Does not wait: for code that knows its events,
    or needs no values."""
    return tensor._shard if type(tensor) is GatedShard else tensor
