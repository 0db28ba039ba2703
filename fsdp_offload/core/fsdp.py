"""The only file that touches private API of FSDP2: its names, and groups that are watched.

FSDP2 has no public way to its parameter groups (torch/distributed/fsdp/_fully_shard). What this
package reads, replaces or writes there is listed in :data:`NAMES` and used in this file alone.
:func:`check_torch` tries every one of them where an optimizer or an offloader is built: a version
of torch without one of them is refused there, not in the middle of a backward.

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
(compute, reduction, updates; docs/internals/overlap.md). With one rank a reduction waits for no
other rank, so it needs no stream of its own; unless the caller has hung something behind it, which
runs on another stream and reads memory of FSDP2's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy

from .backend import Backend, Event, Stream
from .comm_buffers import copies_without_tables
from .errors import UnsupportedTorchError
from .progress import warn
from .storage import move

TORCH_RUN: Final = ("2.11", "2.13", "2.14", "2.15")
"""Versions that all tests were run with (docs/compatibility.md)."""


@dataclass(frozen=True)
class Name:
    """One attribute of one of FSDP2's objects."""

    owner: str  # "module", "state", "context", "group", "mesh", "streams" or "parameter"
    attribute: str
    use: str  # "read", "called", "replaced" (a method, on the instance) or "written"
    purpose: str
    before: str = ""  # what older versions call it
    arguments: tuple[object, ...] = ()  # of a method, as FSDP2 or this package calls it


NAMES: Final = (
    Name("module", "_get_fsdp_state", "called", "from a module to its state"),
    Name("state", "_fsdp_param_groups", "read", "from a state to its groups", "_fsdp_param_group"),
    Name("state", "_state_ctx", "read", "the backward that all modules of a root share"),
    Name("context", "is_last_backward", "read", "whether gradients are final"),
    Name("group", "fsdp_params", "read", "its parameters, in the order of its flat buffers"),
    Name("group", "offload_policy", "written", "CPUOffloadPolicy is taken off"),
    Name("group", "device", "read", "where it computes"),
    Name("group", "mesh_info", "read", "ranks that it is sharded and replicated over"),
    Name("group", "comm_ctx", "read", "its streams"),
    Name("group", "is_unsharded", "read", "whether a gather has anything to do"),
    Name("group", "_training_state", "read", "which streams the next gather takes"),
    Name("group", "_all_gather_result", "read", "a gather that was not waited for"),
    Name("group", "_to_sharded", "called", "frees what a forward that raised has gathered"),
    Name("group", "_all_gather_comm", "written", "its buffer is copied from without tables"),
    Name("group", "_reduce_scatter_comm", "written", "its buffer is copied into without tables"),
    Name("group", "_all_reduce_hook", "read", "whether the reduction needs a stream of its own"),
    Name("group", "_post_reduce_event", "read", "when the gradients are there"),
    Name("group", "_partial_reduce_output", "written", "gradients that wait for an all-reduce"),
    Name("group", "reduce_grads", "read", "accumulation without synchronisation"),
    Name("group", "all_reduce_grads", "read", "accumulation without the all-reduce of HSDP"),
    Name("group", "lazy_init", "replaced", "refused while shards are away"),
    Name("group", "unshard", "replaced", "waits for updates of the shards", arguments=(False,)),
    Name("group", "wait_for_unshard", "replaced", "what updates read may be dropped"),
    Name("group", "post_backward", "replaced", "gradients are final", arguments=(None, None)),
    Name("mesh", "shard_mesh_dim", "read", "None: every rank has the whole parameters"),
    Name("mesh", "replicate_mesh_dim", "read", "None: shards are not replicated"),
    Name("sharded mesh", "shard_mesh_size", "read", "with one rank nothing is gathered"),
    Name(
        "streams",
        "get_all_gather_streams",
        "called",
        "the stream that reads the shards",
        arguments=(False, None),
    ),
    Name("streams", "reduce_scatter_stream", "written", "one rank reduces on the compute stream"),
    Name("streams", "all_reduce_stream", "read", "where gradients of HSDP are reduced"),
    Name("streams", "device_handle", "read", "the compute stream"),
    Name("parameter", "sharded_param", "read", "the parameter that the optimizer has"),
    Name("parameter", "_unsharded_param", "read", "holds gradients that were not reduced"),
    Name("parameter", "unsharded_accumulated_grad", "read", "the same, in another dtype"),
    Name("parameter", "reset_sharded_param", "replaced", "compares addresses: not while away"),
    Name("parameter", "offload_to_cpu", "written", "CPUOffloadPolicy is taken off"),
    Name("parameter", "pin_memory", "written", "the same"),
    Name("parameter", "device", "read", "where it is gathered"),
)
"""See the module's docstring."""


def check_torch(models: Iterable[nn.Module]) -> None:
    """Try all of :data:`NAMES` that ``models`` have; one warning if torch is newer than tried.

    Raises:
        UnsupportedTorchError: one is missing.
    """
    _warn_if_newer(str(torch.__version__))
    tried: set[object] = set()

    def once(kind: object, owner: str, instance: Any) -> None:
        if kind not in tried:
            _try(owner, instance)
            tried.add(kind)

    for module in _modules(models):
        once(type(module), "module", module)
        state: Any = module._get_fsdp_state()
        once(type(state), "state", state)
        for group, _ in _groups_of(module):
            kind = (type(group), type(getattr(group, "mesh_info", None)))
            if kind not in tried:
                _try_group(group, state)
                tried.add(kind)


def _try_group(group: Any, state: Any) -> None:
    _try("group", group)
    _try("context", state._state_ctx)
    _try("mesh", group.mesh_info)
    if group.mesh_info.shard_mesh_dim is not None:
        _try("sharded mesh", group.mesh_info)
    # FSDP2 makes streams in the first forward: these are of the CPU, and none of the group's.
    streams = type(group.comm_ctx)()
    streams.lazy_init(torch.device("cpu"))
    _try("streams", streams)
    for parameter in group.fsdp_params[:1]:
        _try("parameter", parameter)


def _try(owner: str, instance: Any) -> None:
    for name in NAMES:
        if name.owner == owner and (problem := _problem(name, instance)):
            raise UnsupportedTorchError(
                f"torch {torch.__version__}, {type(instance).__name__}.{name.attribute}",
                reason=f"this private name of FSDP2 {problem}; it is {name.use}: {name.purpose}",
                remedy=f"install a version that was tried: torch {', '.join(TORCH_RUN)}",
            )


def _problem(name: Name, instance: Any) -> str:
    """What is wrong with it, or nothing."""
    kind = type(instance)
    in_class = inspect.getattr_static(kind, name.attribute, None)
    if not (hasattr(instance, name.attribute) or (name.before and hasattr(instance, name.before))):
        # _unsharded_param is declared, and there from the first gather on.
        return "" if name.attribute in inspect.get_annotations(kind) else "does not exist"
    if name.use in ("called", "replaced") and not _takes(in_class, name.arguments):
        return f"does not take {len(name.arguments)} arguments"
    if name.use == "written" and isinstance(in_class, property):
        return "cannot be written"
    return ""


def _takes(method: Any, arguments: tuple[object, ...]) -> bool:
    """Of the class: on the instance another optimizer or offloader may have replaced it."""
    try:
        inspect.signature(method).bind(None, *arguments)
    except TypeError:
        return False
    return True


@functools.cache
def _warn_if_newer(version: str) -> None:
    """Once per process and version."""
    newest = TORCH_RUN[-1]
    if _minor(version) > _minor(newest):
        warn(
            "torch %s is newer than the versions that fsdp_offload was tried with (%s); "
            "FSDP2's private names are tried at construction, results are not",
            version,
            ", ".join(TORCH_RUN),
        )


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])


# --------------------------------------------------------------------------- groups of a model


def fsdp_groups(models: Iterable[nn.Module]) -> list[tuple[Any, Any]]:
    """FSDP2's own parameter groups, each once, with the state of its modules.

    ``fully_shard`` of several modules gives all of them one state.
    """
    return list(dict.fromkeys(pair for m in _modules(models) for pair in _groups_of(m)))


def _modules(models: Iterable[nn.Module]) -> Iterator[FSDPModule]:
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                yield module


def _groups_of(module: FSDPModule) -> list[tuple[Any, Any]]:
    """torch 2.11 keeps one per state, later versions a list (and raise for "the" one where there
    are several)."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [(group, state) for group in groups if group is not None]


def fsdp_parameters(models: Iterable[nn.Module]) -> set[Tensor]:
    """Parameters that an FSDP2 module of ``models`` all-gathers."""
    return {each.sharded_param for group, _ in fsdp_groups(models) for each in group.fsdp_params}


def gathered_parameters(models: Iterable[nn.Module]) -> dict[Tensor, Tensor]:
    """What FSDP2 modules show as parameters while they are gathered, and the sharded parameter that
    each of them is gathered from."""
    found = (fsdp_param for group, _ in fsdp_groups(models) for fsdp_param in group.fsdp_params)
    return {
        whole: each.sharded_param
        for each in found
        if (whole := getattr(each, "_unsharded_param", None)) is not None
    }


def device_of(models: Iterable[nn.Module]) -> torch.device | None:
    """The device that FSDP2 computes on; None: no module is sharded."""
    return next((group.device for group, _ in fsdp_groups(models)), None)


# --------------------------------------------------------------------------- groups


class Watcher(Protocol):
    """Who is told; ``index`` is the group's position in :func:`find_groups`."""

    @property
    def uses_link(self) -> bool:
        """Whether bulk copies run beside forward and backward: see :mod:`.comm_buffers`."""
        ...

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

    @property
    def parameters(self) -> list[Tensor]:
        """Its sharded parameters, in FSDP2's order."""
        return [fsdp_param.sharded_param for fsdp_param in self._raw.fsdp_params]

    def leave_cpu(self) -> int:
        """Take ``CPUOffloadPolicy`` off; returns the bytes of parameters that moved."""
        if not isinstance(self._raw.offload_policy, CPUOffloadPolicy):
            return 0
        self.reshard()
        self._raw.offload_policy = OffloadPolicy()
        for fsdp_param in self._raw.fsdp_params:
            fsdp_param.offload_to_cpu = fsdp_param.pin_memory = False
        return self.place(meta=False)

    def place(self, *, meta: bool) -> int:
        """Move parameters, those on the meta device or the others, to where FSDP2 keeps them.

        They stay the same objects, which optimizers hold. Returns their bytes on all ranks.
        """
        moved = 0
        for fsdp_param in self._raw.fsdp_params:
            parameter: Tensor = fsdp_param.sharded_param
            home = torch.device("cpu") if fsdp_param.offload_to_cpu else fsdp_param.device
            if parameter.device != home and parameter.is_meta == meta:
                move(parameter, home)
                fsdp_param.reset_sharded_param()
                moved += parameter.numel() * parameter.itemsize
        return moved

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

    def reshard(self) -> None:
        """Free gathered parameters, also those of a forward that raised, and of an all-gather that
        was started by hand; ``FSDPModule.reshard`` keeps them until the forward has ended."""
        if self._raw._all_gather_result is not None:
            self._raw.wait_for_unshard()
        self._raw._to_sharded()

    @property
    def waiting_gradients(self) -> list[Tensor]:
        """Whole gradients that wait for a reduction (accumulation without synchronisation)."""
        return [g for fsdp_param in self._raw.fsdp_params for g in _unreduced(fsdp_param)]

    def drop_waiting_gradients(self) -> None:
        """Forget :attr:`waiting_gradients`: the next backward must not add to them."""
        self._raw._partial_reduce_output = None
        for fsdp_param in self._raw.fsdp_params:
            if "unsharded_accumulated_grad" in vars(fsdp_param):
                fsdp_param.unsharded_accumulated_grad = None
            if (unsharded := getattr(fsdp_param, "_unsharded_param", None)) is not None:
                unsharded.grad = None

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
        with self._copies(watcher, "_all_gather_comm"):
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
        if has_new and self._reduces():
            event = self._raw._post_reduce_event  # None on the CPU, where nothing is late
            stream = backend.adopt_stream(reduce_stream)
            watcher.after_reduce(index, backend.adopt_event(event), stream)

    def _copies(self, watcher: Watcher | None, name: str) -> AbstractContextManager[None]:
        if watcher is None or not watcher.uses_link:
            return contextlib.nullcontext()
        return copies_without_tables(self._raw, name)

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
    """Put the methods back, unless other code has replaced ours since: then it just passes on.

    What is to call this must not keep the group alive, nor what its modules refer to.
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
