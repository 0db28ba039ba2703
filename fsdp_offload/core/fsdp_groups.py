"""Where FSDP2's parameter groups are watched. The private names are listed in :mod:`.fsdp`.

[Note: what is watched]
An FSDP2 *group* holds the parameters of one ``fully_shard`` call (of one mesh of it, where it has
several): gathered together before they are used, reduced together after their backward. Three of
its methods are on every path that torch takes, and are replaced on the instance
(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, the same in 2.11, 2.13, 2.15):

* ``unshard`` starts the all-gather, from forward, both kinds of prefetch, backward and by hand. The
  stream that copies the shards must wait for their updates first;
* ``wait_for_unshard`` makes the compute stream wait for the all-gather. What the updates read, the
  gradients, may then be dropped: memory of FSDP2's reduce stream is reused only after that stream
  has waited for the compute stream, at the start of the next reduction. With one rank nothing is
  gathered, and it is here that the shards are copied, on the compute stream;
* ``post_backward`` reduces the gradients. When it has returned, every gradient of the group is
  there, which per-parameter hooks cannot tell: they fire before later parameters of the group have
  theirs, and never for unused ones. With one rank the reduction is a copy, and is made on the
  compute stream: see [Note: streams with kernels].

[Note: streams with kernels]
On an H200 every copy to the host is 8 % slower while three streams have kernels, however small
(compute, reduction, updates; docs/how-it-works.md). With one rank a reduction has nobody to wait
for, so it needs no stream of its own; unless the user has hung something behind it, which runs on
another stream and reads memory of FSDP2's.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .backend import Backend, Event, Stream
from .fsdp import fsdp_groups
from .fsdp_copies import CopyWithoutTables


class Watcher(Protocol):
    """Who is told; ``index`` is the group's position in :func:`find_groups`."""

    def before_gather(self, index: int, stream: Stream) -> None:
        """``stream`` is about to read the group's shards."""
        ...

    def after_gather(self, index: int) -> None:
        """The compute stream has waited for what the gather waited for."""
        ...

    def before_reduce(self, index: int) -> None:
        """The group has new gradients, which are about to be reduced into ``.grad``."""
        ...

    def after_reduce(self, index: int, reduced: Event, stream: Stream) -> None:
        """After ``reduced``, on ``stream``, the group's gradients are final for this backward."""
        ...


class Group:
    """One FSDP2 parameter group of a model."""

    def __init__(self, raw: Any, state: Any) -> None:
        self._raw, self._state = raw, state
        self._copies = CopyWithoutTables()

    @property
    def parameters(self) -> list[Tensor]:
        """Its sharded parameters, in FSDP2's order."""
        return [fsdp_param.sharded_param for fsdp_param in self._raw.fsdp_params]

    def watch(self, index: int, watcher: Watcher, backend: Backend) -> Callable[[], None]:
        """Tell ``watcher``, which is not kept alive; returns what ends it."""
        find = weakref.ref(watcher)
        methods: dict[str, Callable[..., None]] = {
            "unshard": self._unshard,
            "wait_for_unshard": self._wait_for_unshard,
            "post_backward": self._post_backward,
        }
        for name, method in methods.items():
            original = getattr(self._raw, name)
            self._raw.__dict__[name] = functools.partial(method, find, index, backend, original)
        return functools.partial(_unwatch, weakref.ref(self._raw), find, tuple(methods))

    # ------------------------------------------------------------------ while shards are away

    def finish_gather(self) -> None:
        """Finish an all-gather that was started by hand: afterwards ``reshard()`` frees it."""
        if self._raw._all_gather_result is not None:
            self._raw.wait_for_unshard()

    @property
    def waiting_gradients(self) -> list[Tensor]:
        """Whole gradients that wait for a reduction (accumulation without synchronisation)."""
        return [g for fsdp_param in self._raw.fsdp_params for g in _unreduced(fsdp_param)]

    def drop_waiting_gradients(self) -> None:
        """Forget :attr:`waiting_gradients`."""
        self._drop_new_gradients()

    # ------------------------------------------------------------------ the replaced methods

    def _unshard(
        self,
        find: Callable[[], Watcher | None],
        index: int,
        backend: Backend,
        original: Callable[[bool], None],
        async_op: bool = False,
    ) -> None:
        watcher, raw = find(), self._raw
        starts = raw._all_gather_result is None and not raw.is_unsharded
        if watcher is not None and starts and self._world_size > 1:
            streams = raw.comm_ctx.get_all_gather_streams(async_op, raw._training_state)
            watcher.before_gather(index, backend.adopt_stream(streams[0]))
        with self._copies:
            original(async_op)

    def _wait_for_unshard(
        self,
        find: Callable[[], Watcher | None],
        index: int,
        backend: Backend,
        original: Callable[[], None],
    ) -> None:
        watcher = find()
        gathers = watcher is not None and self._raw._all_gather_result is not None
        if gathers and self._world_size == 1:
            watcher.before_gather(index, backend.current_stream())  # type: ignore[union-attr]
        with self._copies:
            original()
        if gathers:
            watcher.after_gather(index)  # type: ignore[union-attr]

    def _post_backward(
        self,
        find: Callable[[], Watcher | None],
        index: int,
        backend: Backend,
        original: Callable[..., None],
        *unused: Any,
    ) -> None:
        watcher = find()
        if watcher is None:
            original(*unused)
            return
        has_new = self._has_new_gradients()
        if has_new:
            try:
                watcher.before_reduce(index)
            except Exception as error:
                # FSDP2 ends this backward as any other, without these gradients, and stays usable.
                self._drop_new_gradients()
                original(*unused)
                _raise_after_backward(error)
                return
        with self._copies, self._reducing() as reduce_stream:
            original(*unused)
        if has_new and self._reduces():
            event = self._raw._post_reduce_event  # None on the CPU, where nothing is late
            stream = backend.adopt_stream(reduce_stream)
            watcher.after_reduce(index, backend.adopt_event(event), stream)

    # ------------------------------------------------------------------ what FSDP2 is about to do

    @property
    def _world_size(self) -> int:
        """Ranks that the group is sharded over."""
        mesh_info = self._raw.mesh_info
        return 1 if mesh_info.shard_mesh_dim is None else int(mesh_info.shard_mesh_size)

    @contextlib.contextmanager
    def _reducing(self) -> Iterator[Any]:
        """Inside, gradients are reduced; gives the stream of the last step of it."""
        context = self._raw.comm_ctx
        if self._raw.mesh_info.replicate_mesh_dim is not None:
            yield context.all_reduce_stream
        elif self._world_size > 1 or self._raw._all_reduce_hook is not None:
            yield context.reduce_scatter_stream
        else:  # see [Note: streams with kernels]
            own = context.reduce_scatter_stream
            context.reduce_scatter_stream = context.device_handle.current_stream()
            try:
                yield context.reduce_scatter_stream
            finally:
                context.reduce_scatter_stream = own

    def _has_new_gradients(self) -> bool:
        return any(_unreduced(fsdp_param) for fsdp_param in self._raw.fsdp_params)

    def _drop_new_gradients(self) -> None:
        """This backward is given up: the next one must not add to what it has left."""
        self._raw._partial_reduce_output = None
        for fsdp_param in self._raw.fsdp_params:
            if "unsharded_accumulated_grad" in vars(fsdp_param):
                fsdp_param.unsharded_accumulated_grad = None
            if (unsharded := getattr(fsdp_param, "_unsharded_param", None)) is not None:
                unsharded.grad = None

    def _reduces(self) -> bool:
        """Whether this backward is the one after which nothing is added any more."""
        raw = self._raw
        reduces = raw.reduce_grads and raw.all_reduce_grads
        return bool(reduces and self._state._state_ctx.is_last_backward)


def _raise_after_backward(error: Exception) -> None:
    """Raise from the running ``backward()``, when FSDP2's own last callbacks have run."""
    engine: Any = torch.autograd.Variable._execution_engine

    def fail() -> None:
        raise error

    # Those of other roots may be queued behind the first: the second is the last one.
    engine.queue_callback(lambda: engine.queue_callback(fail))


def _unreduced(fsdp_param: Any) -> list[Tensor]:
    """Whole gradients of one parameter: one, or while they accumulate in another dtype, two.

    From torch 2.15 on autograd accumulates in that dtype, and the second name is the first one's.
    """
    unsharded = getattr(fsdp_param, "_unsharded_param", None)
    held = None if unsharded is None else unsharded.grad
    accumulated = fsdp_param.unsharded_accumulated_grad
    return [g for g in (accumulated, None if held is accumulated else held) if g is not None]


def _unwatch(
    find_raw: Callable[[], Any], find_watcher: Callable[[], Any], names: Iterable[str]
) -> None:
    """Put the methods back, unless somebody has replaced ours since: then it just passes on.

    Whoever is to call this must not keep the group alive, nor what its modules refer to.
    """
    raw = find_raw()
    if raw is None:
        return
    for name in names:
        method = raw.__dict__.get(name)
        if not isinstance(method, functools.partial) or find_watcher not in method.args[:1]:
            continue
        original = method.args[-1]
        if getattr(original, "__self__", None) is raw:
            del raw.__dict__[name]
        else:  # of another watcher
            raw.__dict__[name] = original


def find_groups(models: Iterable[nn.Module]) -> list[Group]:
    """The FSDP2 groups of ``models``, in order of their modules."""
    return [Group(raw, state) for raw, state in fsdp_groups(models)]
