"""``save``, ``async_save`` and ``load``: DCP's own steps with this package's plugins.

Collectives are DCP's, of small objects: a save gathers the plans, scatters the deduplicated ones,
gathers the items' places and broadcasts the outcome; a load gathers and scatters plans and gathers
the outcome. They run over a separate gloo group, apart from the collectives of the training.
Packing and chunk metadata need none.

Before they create that group and before the first collective, all ranks meet at the store of the
process group, which shows waiting ranks which others are absent. There they also agree whether they
need a new gloo group: a rank whose collectives failed midway drops its group. Its connections end
with the error's last frame, so the other ranks fail, too.

Until all ranks have met, Ctrl-C ends a rank's wait for the others. After that, Ctrl-C takes effect
only inside DCP's local steps, which report it to all ranks, or at the end. So no rank waits for one
that never comes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ..core.arguments import listed
from ..core.errors import CheckpointError, OffloadError
from ..core.interrupts import Note, defer_sigint, let_through
from ..core.progress import report
from ..core.storage import span
from ..optimizer.hybrid import HybridDeviceOptimizer
from .files import memory_of, typed, typed_error
from .folder import checked
from .planner import FlatSavePlanner, JobLoadPlanner
from .reader import Reader
from .stager import Stager
from .state import Models, checked_optimizer, class_name, collect, held, wait_for
from .writer import Writer, without_group

_log = logging.getLogger("fsdp_offload")

Folder = str | os.PathLike[str]

# The gloo group and its number, per default process group: creating one is a collective. torch
# keeps it alive until destroy_process_group(). A strong reference here would keep it longer; then a
# gloo thread may still free a tensor when the interpreter ends, which aborts the process.
_groups: weakref.WeakKeyDictionary[object, tuple[weakref.ref[dist.ProcessGroup], int]]
_groups = weakref.WeakKeyDictionary()
# Per optimizer or model: page-locking memory for each save would take longer than the copy.
_stagers: weakref.WeakKeyDictionary[Any, Stager] = weakref.WeakKeyDictionary()

_LEFT: Final = b"left"
_SAVES: Final = "fsdp-offload-save"
"""Name of the threads that run background saves."""
_ABSENT_S: Final = 30.0
"""A rank that has waited this long logs which ranks are absent."""


def save(
    path: Folder,
    model: Models,
    optimizer: Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    keep_last: int | None = None,
    threads: int | None = None,
) -> None:
    """Save weights, optimizer state and ``extra`` as one checkpoint. All ranks call it.

    The files appear at ``path`` in one step when all are complete, so ``path`` is a complete
    checkpoint or does not exist. ``torch.distributed.checkpoint.load`` reads it, too.

    Args:
        path: the new folder, on a file system that all ranks share.
        model: the model, or the parts of a pipeline.
        optimizer: a :class:`HybridDeviceOptimizer` or a plain optimizer; ``None``: weights only.
        extra: other plain Python values and CPU tensors, such as step count, scheduler and data
            loader states. The checkpoint stores rank 0's.
        overwrite: replace a checkpoint at ``path``.
        keep_last: number of complete checkpoints to keep, among ``path`` and its neighbours whose
            names differ only in numbers; removes older ones.
        threads: number of writing threads; ``None``: this rank's share of the cores, at most 16.

    Raises:
        CheckpointError: ``path`` exists, or the file system refused. Raised on all ranks.
        ConfigError: an argument is wrong, or ``extra`` holds shards or what loads refuse as unsafe.
        LaneError: the optimizer has failed.
    """
    optimizer = checked_optimizer(optimizer)

    def state() -> dict[str, Any]:
        found = collect(listed(model), optimizer, extra)
        wait_for(listed(model))
        return found

    kind = class_name(optimizer)
    writer = Writer(
        path, overwrite=overwrite, keep_last=keep_last, threads=threads, optimizer_class=kind
    )
    with defer_sigint() as interrupt:
        group = coordination_group("save", interrupt)
        run_save(writer, FlatSavePlanner(state), group, held(optimizer))


def async_save(
    path: Folder,
    model: Models,
    optimizer: Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    keep_last: int | None = None,
    threads: int | None = None,
) -> Future[None]:
    """Save like :func:`save`, but on a thread, beside the training.

    Blocks the caller until the Stager has copied state and weights into host memory (page-locked
    for a device). It reserves the memory at the first call and keeps it until the optimizer, or the
    model without one, is freed. Another save or a load waits for this one.

    Arguments are those of :func:`save`.

    Returns:
        A future that is done when the checkpoint is complete on all ranks. With several ranks, call
            ``result()`` before you destroy the process group. It raises the errors of
            :func:`save`, and HostMemoryError if the copies do not fit.

    Raises:
        ConfigError: ``path`` is not a path.
        ClosedError: this process is a fork of the one that built the optimizer.
    """
    optimizer = checked_optimizer(optimizer)
    kind = class_name(optimizer)
    writer = Writer(
        path, overwrite=overwrite, keep_last=keep_last, threads=threads, optimizer_class=kind
    )
    staged: Future[dict[str, Any]] = Future()
    with defer_sigint() as interrupt:
        group = coordination_group("async_save", interrupt)
        try:
            with typed():
                staged.set_result(_staged(listed(model), optimizer, extra))
        except BaseException as error:
            # DCP's first step raises it on all ranks, so that no rank waits for this one.
            staged.set_exception(error)
        future = _in_background(writer, FlatSavePlanner(staged.result), group)
    failed = staged.exception()
    if isinstance(failed, KeyboardInterrupt):
        raise failed
    return future


def _staged(models: list[nn.Module], optimizer: Optimizer | None, extra: Any) -> dict[str, Any]:
    # A rank of a pipeline may hold nothing, and then copies nothing.
    owner = next((each for each in (optimizer, *models) if each is not None), Stager)
    if owner not in _stagers:
        _stagers[owner] = Stager()
        weakref.finalize(owner, _stagers[owner].close)
    with held(optimizer), let_through():
        return _stagers[owner].stage(collect(models, optimizer, extra))


def load(
    path: Folder | None,
    model: Models,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    model_prefix: str | None = None,
    optimizer_prefix: str | None = None,
    threads: int | None = None,
) -> dict[str, Any]:
    """Load a checkpoint in place, at any world size, mesh and setting. All ranks call it.

    Reads checkpoints of :func:`save`, those of ``torch.distributed.checkpoint`` with plain
    optimizers (flat or nested), with the prefixes that :mod:`.rule` lists, and safetensors.

    Args:
        path: folder of the checkpoint, or with a model's safetensors.
        model: the model, or the parts of a pipeline. Tensors on the meta device get memory for this
            rank's shards only; buffers that no file contains are initialised.
        optimizer: a :class:`HybridDeviceOptimizer` or a plain optimizer; ``None``: weights only,
            which also set the masters of a :class:`HybridDeviceOptimizer` of ``model``.
        strict: refuse weights that only one side has, trained parameters with neither state nor
            options in the checkpoint, and another class of optimizer. False: missing weights keep
            their values, and missing state starts fresh.
        model_prefix: prefix of the FQNs of weights, if not ``"model."``.
        optimizer_prefix: prefix of ``state.{fqn}``, if neither ``"optim."`` nor ``"optimizer."``.
        threads: number of reading threads; ``None``: this rank's share of the cores, at most 16.

    Returns:
        The saved ``extra``; empty if the checkpoint has none.

    Raises:
        CheckpointError: no checkpoint is at ``path``, or it does not fit model or optimizer;
            nothing was written.
        CheckpointCorruptError: a file changed after it was written. If the load finds that while it
            reads tensors, the optimizer has failed until a load succeeds, and weights are
            undefined. StateDictError, UnsupportedParameterError: state does not fit, or a buffer
            has no values; nothing was written.
        ConfigError: ``optimizer`` is not one optimizer, or two models have equal names.
    """
    optimizer = checked_optimizer(optimizer)
    started = time.perf_counter()
    path = None if path is None else checked(path)
    reader = JobReader(path, threads=threads, optimizer=optimizer)
    planner = JobLoadPlanner(
        listed(model),
        optimizer,
        reader,
        strict=strict,
        model_prefix=model_prefix,
        optimizer_prefix=optimizer_prefix,
    )
    with span("load"), defer_sigint() as interrupt:
        group = coordination_group("load", interrupt)
        with raised_on_all(group), reader.until_all_have:
            reader.until_all_have.enter_context(held(optimizer, saves=False))
            _load(reader, planner, group)
    n_bytes = sum(info.length for info in reader.metadata.storage_data.values())
    report(f"loaded {path}", n_bytes, time.perf_counter() - started)
    return planner.extra


def _in_background(
    writer: Writer, planner: SavePlanner, group: dist.ProcessGroup | None
) -> Future[None]:
    """Save on a thread that the interpreter waits for when it ends."""
    future: Future[None] = Future()
    world = None if group is None else dist.group.WORLD
    writer._ranks = 1 if group is None else dist.get_world_size()

    def run() -> None:
        try:
            run_save(writer, planner, group)
        except BaseException as error:
            failed = error
            if world is not None and world is not dist.group.WORLD:
                failed = without_group(writer.path)
                failed.__cause__ = error
            said = str(failed) or repr(failed)  # KeyboardInterrupt has no text
            _log.error("the save of %s in the background failed: %s", writer.path, said)
            future.set_exception(failed)
        else:
            future.set_result(None)

    with raised_on_all(group):
        threading.Thread(target=run, name=_SAVES).start()
    return future


# --------------------------------------------------------------------------- DCP


class JobReader(Reader):
    """Reads for a :class:`JobLoadPlanner`; then model and optimizer adopt the values.

    Adopting is part of the reading, so that DCP raises its errors on all ranks.

    Args:
        path: see :class:`Reader`, also for ``threads``.
        optimizer: becomes *failed* if an error leaves ``until_all_have``.
    """

    def __init__(self, path: Any, *, threads: int | None, optimizer: Optimizer | None) -> None:
        super().__init__(path, threads=threads)
        self._optimizer = optimizer
        self.until_all_have = contextlib.ExitStack()
        """Entered when everything fits; the caller leaves it after all ranks are done, under
        ``defer_sigint()``."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read in place, then adopt the values."""
        if not isinstance(planner, JobLoadPlanner):  # single values, before anything is written
            return super().read_data(plan, planner)
        with contextlib.ExitStack() as reading:
            if isinstance(self._optimizer, HybridDeviceOptimizer):
                what, view = "checkpoint.load()", self._optimizer._for_checkpoints
                self.until_all_have.enter_context(view.failing(what, keep=OffloadError))
                reading.enter_context(view.replacing_all(what, keep=CheckpointError))
            with let_through():  # not around apply(): half a load would look like a whole one
                done = super().read_data(plan, planner)
        with typed():
            planner.apply()
        return done


def coordination_group(call: str, interrupt: Note) -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks, made at its first use; ``None`` for a rank alone.

    Waits for running saves first, because collectives of two saves would mix, then for all ranks;
    see the top of this file.

    Args:
        call: the caller's function, for the log.
        interrupt: the note of the :func:`defer_sigint` around this and the collectives.
    """
    for thread in threading.enumerate():
        is_me = thread is threading.current_thread()  # if a future's callback saves
        if thread.name == _SAVES and thread.is_alive() and not is_me:
            with let_through():
                thread.join()
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    world: Any = dist.group.WORLD
    known, number = _groups.get(world, (lambda: None, 0))
    with typed(call):
        store = dist.PrefixStore("fsdp_offload", world.get_group_store())  # type: ignore[attr-defined]
        if known() is None:
            store.add("groups", 1)
        needed = _meet(store, call, interrupt)
        group: Any = known() if number == needed else dist.new_group(backend="gloo")
    _groups[world] = weakref.ref(group), needed
    return group  # type: ignore[no-any-return]


def _meet(store: Any, call: str, interrupt: Note) -> int:
    """Wait for all ranks; return the number of the group that they need.

    Every rank joins every turn. The last one ends the turn with that number. A rank that leaves
    after Ctrl-C ends the turn with ``_LEFT`` instead, and the other ranks join the next turn.
    """
    while True:
        turn = store.add(f"rank {dist.get_rank()}", 1)
        key = f"turn {turn}"
        if store.add(f"ranks at {turn}", 1) == dist.get_world_size():
            store.compare_set(key, "", str(store.add("groups", 0)))
        try:
            _wait(store, turn, call, interrupt)
        except BaseException:  # from another signal's handler, for instance
            store.compare_set(key, "", _LEFT)
            raise
        if (number := store.get(key)) != _LEFT:
            return int(number)
        with let_through():
            pass  # a handler may return: then this rank joins the next turn, like all others


def _wait(store: Any, turn: int, call: str, interrupt: Note) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    start, pause_s, is_logged = time.monotonic(), 1e-4, False
    while not store.check([f"turn {turn}"]):
        if interrupt.has_come:
            store.compare_set(f"turn {turn}", "", _LEFT)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)
        if not is_logged and time.monotonic() - start > _ABSENT_S:
            is_logged = True
            here = [r for r in range(size) if store.add(f"rank {r}", 0) >= turn]
            absent = sorted({*range(size)} - {*here})
            if absent and rank == here[0]:
                _log.warning(
                    "checkpoint.%s has waited %.0f s for %d of %d ranks that have not "
"called it: %s%s. Remedy: call it on all ranks, not only inside `if "
"rank == 0:`", call, _ABSENT_S, len(absent), size,
                    ", ".join(map(str, absent[:8])), ", ..." if absent[8:] else "",
                )  # fmt: skip


def run_save(
    writer: Writer,
    planner: SavePlanner,
    group: dist.ProcessGroup | None,
    within: contextlib.AbstractContextManager[Any] | None = None,
) -> None:
    """Save the planner's items; after an error no file is left.

    Raises:
        OffloadError: (on all ranks) the save failed on one.
    """
    try:
        with span("save"), raised_on_all(group), within or contextlib.nullcontext():
            _save(writer, planner, group)
    except BaseException:
        writer.discard()
        raise


def _save(writer: StorageWriter, planner: SavePlanner, group: dist.ProcessGroup | None) -> None:
    """Call ``dcp.save``; without a group call its steps, because it would warn."""
    if group is not None:
        dcp_save({}, storage_writer=writer, planner=planner, process_group=group)
        return
    planner.set_up_planner({}, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


def _load(reader: StorageReader, planner: LoadPlanner, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dcp_load({}, storage_reader=reader, planner=planner, process_group=group)
        return
    metadata = reader.read_metadata()
    planner.set_up_planner({}, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    plan = reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
    reader.read_data(planner.finish_plan(plan), planner).wait()


@contextlib.contextmanager
def raised_on_all(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Raise one typed error in place of DCP's exception, which holds the errors of all ranks.

    Raises:
        OffloadError: this rank's error, else the error of the first rank that has one.
    """
    try:
        with typed(), _without_numpy():
            yield
    except CheckpointException as error:
        rank = 0 if group is None else dist.get_rank(group)
        failed = rank if rank in error.failures else min(error.failures)
        cause = error.failures[failed][0]
        if failed == rank and not isinstance(cause, Exception):
            raise cause from error  # KeyboardInterrupt
        found = typed_error(cause)
        if failed != rank:
            what = f"rank {failed}: {found.what}"
            found = type(found)(what, reason=found.reason, remedy=found.remedy)
        raise found from error
    except BaseException:  # other ranks may wait in a collective: closed connections end it
        if group is not None:
            for world, (known, _) in list(_groups.items()):
                if known() is group:
                    del _groups[world]
                    with contextlib.suppress(Exception):
                        dist.destroy_process_group(group)
        raise


class _NumpyBytes(TorchFunctionMode):
    """Replaces ``Tensor.numpy()`` for torch's object collectives, inside, on this thread."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not Tensor.numpy:
            return func(*args, **(kwargs or {}))
        return SimpleNamespace(tobytes=lambda: bytes(memory_of(args[0].contiguous())))


def _without_numpy() -> contextlib.AbstractContextManager[Any]:
    """Make torch's object collectives, which use NumPy, work without it."""
    try:
        torch.empty(0).numpy()
    except RuntimeError:
        return _NumpyBytes()
    return contextlib.nullcontext()
