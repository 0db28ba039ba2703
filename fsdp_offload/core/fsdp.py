"""The only file that uses private API of FSDP2: it watches groups, and lends them shards.

FSDP2 has no public access to its parameter groups (torch/distributed/fsdp/_fully_shard).
``core/fsdp_names.py`` lists the names that this file reads, replaces or writes, and tries them at
construction.

An FSDP2 *group* holds the parameters of one ``fully_shard`` call (if that has several meshes, of
one of them). FSDP2 gathers them together before use, and reduces them together after their
backward. Every path through torch calls three methods of the group, which this file replaces on the
instance (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, the same in 2.11, 2.13, 2.15):

* ``unshard`` starts the all-gather: from forward, both kinds of prefetch, backward, and by hand.
  The stream that copies the shards must wait for their updates first.
* ``wait_for_unshard`` makes the compute stream wait for the all-gather. The gradients that the
  updates read may then be dropped: FSDP2's reduce stream reuses its memory only after it has waited
  for the compute stream, at the start of the next reduction. With one rank nothing is gathered, and
  this method copies the shards, on the compute stream.
* ``post_backward`` reduces the gradients. After it returns, the group has all of them. Hooks per
  parameter cannot tell that: they fire before later parameters of the group have their gradients,
  and never for unused ones. With one rank the reduction is a copy on the compute stream: see
  [Note: streams with kernels].

[Note: streams with kernels]
On an H200 every copy to the host is 8 % slower while three streams have kernels, however small
(compute, reduction, updates; docs/internals/overlap.md). With one rank a reduction waits for no
other rank, so it needs no stream of its own, unless the caller registered an all-reduce hook, which
runs on another stream and reads FSDP2's memory.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy

from .backend import Backend, Event, Stream
from .comm_buffers import copies_without_tables
from .storage import move

# --------------------------------------------------------------------------- groups of a model


def fsdp_groups(models: Iterable[nn.Module]) -> list[tuple[Any, Any]]:
    """List FSDP2's own parameter groups, each once, with the state of its modules.

    ``fully_shard`` of several modules gives all of them one state.
    """
    return list(dict.fromkeys(pair for m in fsdp_modules(models) for pair in groups_of(m)))


def fsdp_modules(models: Iterable[nn.Module]) -> Iterator[FSDPModule]:
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                yield module


def groups_of(module: FSDPModule) -> list[tuple[Any, Any]]:
    # torch 2.11 keeps one group per state; later versions keep a list, and raise if the old name is
    # read while there are several.
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [(group, state) for group in groups if group is not None]


def fsdp_parameters(models: Iterable[nn.Module]) -> set[Tensor]:
    """Return the parameters that an FSDP2 module of ``models`` all-gathers."""
    return {each.sharded_param for group, _ in fsdp_groups(models) for each in group.fsdp_params}


def gathered_parameters(models: Iterable[nn.Module]) -> dict[Tensor, Tensor]:
    """Map the gathered parameters that FSDP2 modules show for a time to their sharded
    parameters."""
    found = (fsdp_param for group, _ in fsdp_groups(models) for fsdp_param in group.fsdp_params)
    return {
        whole: each.sharded_param
        for each in found
        if (whole := getattr(each, "_unsharded_param", None)) is not None
    }


def device_of(models: Iterable[nn.Module]) -> torch.device | None:
    """Return the device that FSDP2 computes on; None: no module is sharded."""
    return next((group.device for group, _ in fsdp_groups(models)), None)


# --------------------------------------------------------------------------- groups


class Watcher(Protocol):
    """Receives callbacks of a group; ``index``: its position in :func:`find_groups`."""

    @property
    def uses_link(self) -> bool:
        """Whether bulk copies run beside forward and backward: see :mod:`.comm_buffers`."""

    def before_gather(self, index: int, stream: Stream) -> None:
        """Called before ``stream`` reads the group's shards."""

    def after_gather(self, index: int) -> None:
        """Called after the compute stream has waited for the gather."""

    def before_reduce(self, index: int) -> None:
        """Called before FSDP2 reduces the group's new gradients into ``.grad``."""

    def after_reduce(
        self, index: int, reduced: Event, stream: Stream, *, is_last: bool = True
    ) -> None:
        """Called after a reduction: ``.grad`` is valid after ``reduced``, on ``stream``.

        ``is_last``: it is final for this iteration, if the caller told FSDP2 the last backward.
        """


class Lender(Protocol):
    """Owns the memory of shards that FSDP2 gathers; ``index`` as in :class:`Watcher`."""

    def lending(self, index: int, stream: Stream) -> AbstractContextManager[None]:
        """Provide the shards, :attr:`GroupShard.padded`, while ``stream`` reads them inside."""


_Find = Callable[[], Any]
"""Returns a watcher or lender, or None once it is gone."""
_Original = Callable[..., None]


class GroupShard:
    """FSDP2's record of one sharded parameter. Does not keep the module alive: what stands for the
    shard has this object, and memory that is freed with an optimizer has the parameter."""

    def __init__(self, raw: Any) -> None:
        self._find: Callable[[], Any] = weakref.ref(raw)
        self._parameter: Tensor = raw.sharded_param

    @property
    def parameter(self) -> Tensor:
        """The parameter that the optimizer has."""
        if (raw := self._find()) is not None:
            self._parameter = raw.sharded_param
        return self._parameter

    @property
    def padded(self) -> Tensor:
        """The memory that a gather reads, 1-D: the elements of the shard, then padding."""
        return self._find()._sharded_param_data  # type: ignore[no-any-return]

    @padded.setter
    def padded(self, memory: Tensor) -> None:
        if (raw := self._find()) is not None:
            raw._sharded_param_data = memory

    def lend(self, adopts: Callable[[Tensor], bool]) -> Callable[[], None]:
        """Pass each parameter that may have new values (after construction, a conversion or a load)
        to ``adopts``; if that returns False, FSDP2 keeps them.

        ``adopts`` is a method; its object is not kept alive. Returns a function that ends this.
        """
        find, raw = weakref.WeakMethod(adopts), self._find()
        original = raw.reset_sharded_param
        vars(raw)["reset_sharded_param"] = functools.partial(self._reset, find, original)
        return functools.partial(_unwatch, self._find, find, ("reset_sharded_param",))

    def _reset(
        self, find: Callable[[], Callable[[Tensor], bool] | None], original: Callable[[], None]
    ) -> None:
        raw, adopts = self._find(), find()
        # Some loads assign another one.
        parameter = getattr(raw._module_info.module, raw._module_info.param_name)
        if adopts is not None and adopts(parameter):
            raw.sharded_param = parameter
        else:
            original()


class Group:
    """One FSDP2 parameter group of a model."""

    def __init__(self, raw: Any, state: Any) -> None:
        self._raw, self._state = raw, state

    @property
    def parameters(self) -> list[Tensor]:
        """Its sharded parameters, in FSDP2's order."""
        return [fsdp_param.sharded_param for fsdp_param in self._raw.fsdp_params]

    @property
    def padded_numels(self) -> list[int]:
        """The most elements of each reduced gradient on this rank."""
        return [each.padded_sharded_param_size.numel() for each in self._raw.fsdp_params]

    @property
    def homes(self) -> dict[Tensor, torch.device]:
        """Parameters that ``CPUOffloadPolicy`` keeps on the CPU, each with its compute device."""
        kept = [each for each in self._raw.fsdp_params if each.offload_to_cpu]
        return {each.sharded_param: each.device for each in kept}

    def leave_cpu(self) -> int:
        """Take ``CPUOffloadPolicy`` off: move parameters to the device. They stay the same objects,
        which optimizers hold. Returns their bytes on all ranks."""
        if not isinstance(self._raw.offload_policy, CPUOffloadPolicy):
            return 0
        self.reshard()
        moved = 0
        for fsdp_param in self._raw.fsdp_params:
            parameter: Tensor = fsdp_param.sharded_param
            moves = parameter.device != fsdp_param.device and not parameter.is_meta
            if moves:
                move(parameter, fsdp_param.device)
                moved += parameter.numel() * parameter.itemsize
            # One by one, and only now: if the device is full, a second call moves the rest.
            fsdp_param.offload_to_cpu = fsdp_param.pin_memory = False
            if moves:
                fsdp_param.reset_sharded_param()
        self._raw.offload_policy = OffloadPolicy()
        return moved

    def give_memory(self) -> None:
        """Allocate uninitialised memory for parameters on the meta device, where FSDP2 keeps
        them."""
        for fsdp_param in self._raw.fsdp_params:
            if fsdp_param.sharded_param.is_meta:
                stays = fsdp_param.offload_to_cpu
                home = torch.device("cpu") if stays else fsdp_param.device
                move(fsdp_param.sharded_param, home)
                fsdp_param.reset_sharded_param()

    def watch(self, index: int, watcher: Watcher, backend: Backend) -> Callable[[], None]:
        """Call ``watcher``, which is not kept alive; returns a function that ends this."""
        return self._replace(
            (weakref.ref(watcher), index, backend),
            unshard=self._unshard,
            wait_for_unshard=self._wait_for_unshard,
            post_backward=self._post_backward,
        )

    def _replace(
        self, args: tuple[_Find, int, Backend], **methods: Callable[..., None]
    ) -> Callable[[], None]:
        for name, method in methods.items():
            original = getattr(self._raw, name)
            self._raw.__dict__[name] = functools.partial(method, *args, original)
        return functools.partial(_unwatch, weakref.ref(self._raw), args[0], tuple(methods))

    @property
    def shards(self) -> list[GroupShard]:
        """FSDP2's record of each parameter."""
        return [GroupShard(fsdp_param) for fsdp_param in self._raw.fsdp_params]

    def lend(self, index: int, lender: Lender, backend: Backend) -> Callable[[], None]:
        """Gather from memory of ``lender``, which is not kept alive; returns a function that ends
        this."""
        args = weakref.ref(lender), index, backend
        unshard, wait = self._lend_to_unshard, self._lend_to_wait
        return self._replace(args, unshard=unshard, wait_for_unshard=wait)

    # ------------------------------------------------------------------ while shards are away

    def reshard(self) -> None:
        """Free gathered parameters, also after a forward that raised, and of an all-gather that the
        caller started. ``FSDPModule.reshard`` keeps them until the forward has ended."""
        if self._raw._all_gather_result is not None:
            self._raw.wait_for_unshard()
        self._raw._to_sharded()

    @property
    def waiting_gradients(self) -> list[Tensor]:
        """Whole gradients that wait for a reduction (accumulation without synchronisation)."""
        return [g for fsdp_param in self._raw.fsdp_params for g in _unreduced(fsdp_param)]

    def drop_waiting_gradients(self) -> None:
        """Drop :attr:`waiting_gradients`, so that the next backward does not add to them."""
        self._raw._partial_reduce_output = None
        for fsdp_param in self._raw.fsdp_params:
            if "unsharded_accumulated_grad" in vars(fsdp_param):
                fsdp_param.unsharded_accumulated_grad = None
            if (unsharded := getattr(fsdp_param, "_unsharded_param", None)) is not None:
                unsharded.grad = None

    # ------------------------------------------------------------------ the replaced methods

    def _unshard(
        self, find: _Find, index: int, backend: Backend, original: _Original, async_op: bool = False
    ) -> None:
        watcher, raw = find(), self._raw
        starts = raw._all_gather_result is None and not raw.is_unsharded
        if watcher is not None and starts and self._world_size > 1:
            streams = raw.comm_ctx.get_all_gather_streams(async_op, raw._training_state)
            watcher.before_gather(index, backend.adopt_stream(streams[0]))
        with self._copies(watcher, "_all_gather_comm"):
            original(async_op)

    def _wait_for_unshard(
        self, find: _Find, index: int, backend: Backend, original: _Original
    ) -> None:
        watcher: Watcher | None = find()
        gathers = watcher is not None and self._raw._all_gather_result is not None
        if gathers and self._world_size == 1:
            watcher.before_gather(index, backend.current_stream())  # type: ignore[union-attr]
        original()
        if gathers:
            watcher.after_gather(index)  # type: ignore[union-attr]

    def _post_backward(
        self, find: _Find, index: int, backend: Backend, original: _Original, *unused: Any
    ) -> None:
        watcher: Watcher | None = find()
        if watcher is None:
            original(*unused)
            return
        has_new = any(map(_unreduced, self._raw.fsdp_params))
        if has_new:
            try:
                watcher.before_reduce(index)
            except Exception as error:
                # FSDP2 ends this backward as any other, without these gradients, and stays usable.
                self.drop_waiting_gradients()
                original(*unused)
                _raise_after_backward(error)
                return
        copies = self._copies(watcher, "_reduce_scatter_comm")
        with copies, self._reducing() as reduce_stream:
            original(*unused)
        if has_new and self.reduces:
            event = self._raw._post_reduce_event  # None on the CPU, where nothing is late
            stream = backend.adopt_stream(reduce_stream)
            is_last = bool(self._state._state_ctx.is_last_backward)
            watcher.after_reduce(index, backend.adopt_event(event), stream, is_last=is_last)

    def _lend_to_unshard(
        self, find: _Find, index: int, backend: Backend, original: _Original, async_op: bool = False
    ) -> None:
        lender, raw = find(), self._raw
        reads = raw._all_gather_result is None and raw.is_sharded and self._world_size > 1
        if lender is None or not reads:
            original(async_op)
            return
        streams = raw.comm_ctx.get_all_gather_streams(async_op, raw._training_state)
        with lender.lending(index, backend.adopt_stream(streams[0])):
            original(async_op)

    def _lend_to_wait(self, find: _Find, index: int, backend: Backend, original: _Original) -> None:
        lender, raw = find(), self._raw
        reads = raw._all_gather_result is not None and raw.is_sharded and self._world_size == 1
        with (
            lender.lending(index, backend.current_stream())
            if lender is not None and reads
            else contextlib.nullcontext()
        ):
            original()

    def _copies(self, watcher: Watcher | None, name: str) -> AbstractContextManager[None]:
        if watcher is None or not watcher.uses_link:
            return contextlib.nullcontext()
        return copies_without_tables(self._raw, name)

    # ------------------------------------------------------------------ FSDP2's next steps

    @property
    def _world_size(self) -> int:
        """Ranks that the group is sharded over."""
        mesh_info = self._raw.mesh_info
        return 1 if mesh_info.shard_mesh_dim is None else int(mesh_info.shard_mesh_size)

    @contextlib.contextmanager
    def _reducing(self) -> Iterator[Any]:
        """Choose the streams of a reduction inside; yields the stream of its last step."""
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

    @property
    def reduces(self) -> bool:
        """Whether a backward now leaves gradients in ``.grad``."""
        return bool(self._raw.reduce_grads and self._raw.all_reduce_grads)


def _raise_after_backward(error: Exception) -> None:
    """Raise from the running ``backward()`` after FSDP2's own last callbacks."""
    engine: Any = torch.autograd.Variable._execution_engine

    def fail() -> None:
        raise error

    # Callbacks of other roots may be queued behind the first one, not behind the second.
    engine.queue_callback(lambda: engine.queue_callback(fail))


def _unreduced(fsdp_param: Any) -> list[Tensor]:
    """List the unreduced gradients of one parameter: two while they accumulate in another dtype.

    From torch 2.15 on autograd accumulates in that dtype, and the second name is the first one's.
    """
    unsharded = getattr(fsdp_param, "_unsharded_param", None)
    held = None if unsharded is None else unsharded.grad
    accumulated = fsdp_param.unsharded_accumulated_grad
    return [g for g in (accumulated, None if held is accumulated else held) if g is not None]


def _unwatch(find_raw: _Find, find_watcher: _Find, names: Iterable[str]) -> None:
    """Restore the methods. If other code has replaced ours since, ours stays and passes calls on.

    The caller holds this function, which must keep neither the group nor its modules alive.
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
        else:  # another watcher's method
            raw.__dict__[name] = original


def find_groups(models: Iterable[nn.Module]) -> list[Group]:
    """List the FSDP2 groups of ``models``, in order of their modules."""
    return [Group(raw, state) for raw, state in fsdp_groups(models)]
