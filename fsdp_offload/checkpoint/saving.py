"""``save`` and ``async_save``: plan, write, publish.

[Note: collectives of a save]
Packing and chunk metadata need none. A save issues four, of small objects, over a gloo group of
its own: the plans are gathered and the deduplicated ones scattered; where items were written is
gathered and the outcome broadcast. Errors of any rank travel with them and are raised on all.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .. import shards
from ..config import parse_bytes
from ..device import Gateway, gateway_for
from ..errors import ConfigError
from ..interrupts import held_back
from ..optimizer import HybridDeviceOptimizer
from ..wrapping import gateway_of
from .folder import aside, destination, prepare, prune, publish
from .packer import (
    GROUPS,
    STATE,
    Models,
    models_of,
    names_of,
    pack_optimizer_state,
)
from .staging import Staging, aligned
from .team import Background, Team
from .writer import Large, RankFile, write_metadata

_log = logging.getLogger("fsdp_offload")

Folder = str | os.PathLike[str]

EXTRA = "extra"


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

    Written aside and renamed when complete, so that whatever happens ``path`` is a complete
    checkpoint or does not exist. ``torch.distributed.checkpoint.load`` reads it too.

    Args:
        path: the folder to make, on a file system that all ranks share.
        model: the model, or the parts of a pipeline.
        optimizer: a :class:`HybridDeviceOptimizer` or a plain optimizer; ``None``: weights only.
        extra: anything else (step count, scheduler and data loader states): plain Python values
            and CPU tensors. That of rank 0 is kept.
        overwrite: replace a checkpoint at ``path``.
        keep_last: remove older complete checkpoints of this package beside ``path``, so that so
            many stay.
        threads: that write; ``None``: this rank's share of the cores, at most 16.

    Raises:
        CheckpointError: ``path`` exists, or the file system refused. Raised on all ranks.
        ConfigError: an argument is wrong, or ``extra`` holds what cannot be loaded safely.
        LaneError: the optimizer has failed.
    """
    refuse_inherited(optimizer)
    job = _Job(path, overwrite=overwrite, keep_last=keep_last, threads=threads)
    plan = job.plan(model, optimizer, extra)

    def write() -> list[WriteResult]:
        file = job.begin(plan)
        file.write(file.large)
        return file.finish()

    job.complete(write)


def async_save(
    path: Folder,
    model: Models,
    optimizer: Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    keep_last: int | None = None,
    threads: int | None = None,
    staging_bytes: int | str | None = None,
) -> Future[None]:
    """As :func:`save`, but training goes on while a thread writes.

    State and weights are copied into a host arena (pinned where a device is used) that is reserved
    at the first call and kept until the optimizer, or the model without one, goes. What does
    not fit into it is written before the call returns. Another save or a load waits for this one.

    Args:
        path: this argument and those up to ``threads`` as of :func:`save`.
        model: see there.
        optimizer: see there.
        extra: see there.
        overwrite: see there.
        keep_last: see there.
        threads: see there.
        staging_bytes: size of the arena; ``None``: as much as the first call needs. Later calls
            use what the first one reserved.

    Returns:
        A future that is done when the checkpoint is complete on all ranks. Call ``result()``
        before the process group is destroyed: it raises what :func:`save` would.

    Raises:
        HostMemoryError: the arena does not fit.
        ConfigError, LaneError: as of :func:`save`.
    """
    refuse_inherited(optimizer)
    job = _Job(path, overwrite=overwrite, keep_last=keep_last, threads=threads)
    plan = job.plan(model, optimizer, extra)
    files: list[RankFile] = []
    background: list[Background] = []

    def stage() -> tuple[Large, ...]:
        background.append(Background())
        size = None if staging_bytes is None else parse_bytes(staging_bytes, "staging_bytes")
        files.append(job.begin(plan))
        return _stage(files[0], _staging_of(model, optimizer, files[0], size))

    try:
        staged = job.team.together(stage)
    except BaseException:
        for file in files:
            file.close()
        for thread in background:
            thread.dismiss()
        job.abandon()
        raise

    def write() -> list[WriteResult]:
        files[0].write(staged)
        return files[0].finish()

    return background[0].run(lambda: job.complete(write))


def _staging_of(
    model: Models, optimizer: Optimizer | None, file: RankFile, size: int | None
) -> Staging:
    """The arena of this optimizer (or model), reserved at the first call."""
    owner = models_of(model)[0] if optimizer is None else optimizer
    if owner not in _stagings:
        wanted = sum(aligned(entry.source.nbytes) for entry in file.large) if size is None else size
        _stagings[owner] = Staging(wanted, _gateway(models_of(model)))
        weakref.finalize(owner, _stagings[owner].close)
        _log.info("async_save reserved %d bytes of host memory", wanted)
    return _stagings[owner]


def _stage(file: RankFile, staging: Staging) -> tuple[Large, ...]:
    """Copy what fits, write the rest now; returns what is to be written from the arena."""
    fits = staging.choose([entry.source.nbytes for entry in file.large])
    file.write(entry for entry, fit in zip(file.large, fits, strict=True) if not fit)
    chosen = [entry for entry, fit in zip(file.large, fits, strict=True) if fit]
    copies = staging.copy([entry.source for entry in chosen])
    return tuple(replace(e, source=copy) for e, copy in zip(chosen, copies, strict=True))


_stagings: weakref.WeakKeyDictionary[Any, Staging] = weakref.WeakKeyDictionary()


class _Job:
    """One save, on one rank."""

    def __init__(
        self, path: Folder, *, overwrite: bool, keep_last: int | None, threads: int | None
    ) -> None:
        self._path = Path(path)
        self._overwrite, self._keep_last, self._threads = overwrite, keep_last, threads
        self._planner = _Planner()
        self._metadata = Metadata({})
        self._optimizer_name = ""
        self._has_folder = False
        self.team = Team.of_world()

    def plan(
        self,
        model: Models,
        optimizer: Optimizer | None,
        extra: Mapping[str, Any] | None,
    ) -> SavePlan:
        """Agree on who writes what."""
        self._optimizer_name = optimizer_name(optimizer)

        def local() -> SavePlan:
            check_count("keep_last", self._keep_last, "to keep all")
            check_count("threads", self._threads, "for this rank's share of the cores")
            self._path = destination(self._path)
            models = models_of(model)
            state = _collect(models, optimizer, extra)
            if not self.team.is_lead:
                state.pop(EXTRA, None)
            self._planner.left_to_others = _written_elsewhere(models, optimizer, state)
            self._planner.set_up_planner(state, is_coordinator=self.team.is_lead)
            return self._planner.create_local_plan()

        def whole(plans: list[SavePlan]) -> list[SavePlan]:
            _check_same(plans)
            prepare(self._path, overwrite=self._overwrite)
            self._has_folder = True
            plans, self._metadata = self._planner.create_global_plan(plans)
            return plans

        try:
            return self._planner.finish_plan(self.team.reduce_scatter(local, whole))
        except BaseException:
            self.abandon()
            raise

    def begin(self, plan: SavePlan) -> RankFile:
        """This rank's file, with all small items."""
        path = aside(self._path) / f"__{self.team.rank}_0.distcp"
        return RankFile(path, plan, self._planner, threads=self._threads)

    def complete(self, write: Callable[[], list[WriteResult]]) -> None:
        """Write this rank's file, and publish when all ranks have."""

        @held_back()
        def finish(results: list[list[WriteResult]]) -> None:
            write_metadata(aside(self._path), self._metadata, results)
            publish(self._path, world_size=self.team.size, optimizer=self._optimizer_name)
            if self._keep_last is not None:
                prune(self._path, self._keep_last)

        try:
            self.team.all_reduce(write, finish)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Give the space back: nothing of this save will be used."""
        if self._has_folder:  # the lead's
            shutil.rmtree(aside(self._path), ignore_errors=True)


class _Planner(DefaultSavePlanner):
    """torch's planner, for values that are flat already.

    Options of a group are the same objects for all of its parameters: they are pickled once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mappings: dict[str, tuple[str | int, ...]] = {}
        self._pickled: dict[int, tuple[Any, bytes]] = {}  # by id; holds the object, so it stays
        self.left_to_others: frozenset[str] = frozenset()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the sections, but nothing in them: an option may be a dict."""
        flat: dict[str, Any] = {}
        for section, values in state_dict.items():
            for key, value in values.items() if section != EXTRA else (("", values),):
                name = f"{section}.{key}" if key else section
                flat[name] = value
                self.mappings[name] = (section, key) if key else (section,)
        self.state_dict, self.is_coordinator = flat, is_coordinator

    def create_local_plan(self) -> SavePlan:
        """torch's, without what another rank surely writes: plans travel to the lead."""
        plan = super().create_local_plan()
        left = self.left_to_others
        self.plan = replace(plan, items=[i for i in plan.items if i.index.fqn not in left])
        return self.plan

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Pickle what is no tensor."""
        if write_item.type is not WriteItemType.BYTE_IO:
            return object
        if id(object) not in self._pickled:
            data = encode(object, write_item.index.fqn)
            self._pickled[id(object)] = (object, data)
        return io.BytesIO(self._pickled[id(object)][1])


def refuse_inherited(optimizer: Optimizer | None) -> None:
    """Refuse an optimizer of the parent process before any collective: no rank answers a child.

    Raises:
        ClosedError: this process is a fork of the one that built it.
    """
    if isinstance(optimizer, HybridDeviceOptimizer) and not optimizer._health.is_ours:
        optimizer.check_usable()


def check_count(name: str, value: object, otherwise: str) -> None:
    """Refuse what is no number of things; ``otherwise``: what None stands for.

    Raises:
        ConfigError: it is not.
    """
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value is not None and not is_count:
        raise ConfigError(
            f"{name}={value!r}",
            reason="a whole number of at least 1 is expected",
            remedy=f"use 1 or more, or None {otherwise}",
        )


def optimizer_name(optimizer: Optimizer | None) -> str:
    """What a checkpoint calls the (wrapped) class; empty without an optimizer."""
    if isinstance(optimizer, HybridDeviceOptimizer):
        return optimizer.inner_class.__qualname__
    return "" if optimizer is None else type(optimizer).__qualname__


def _collect(
    models: Sequence[nn.Module],
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Everything that is saved, final and readable by any thread."""
    state: dict[str, Any] = {"model": weights_of(models)}
    if optimizer is not None:
        state["optim"] = pack_optimizer_state(models, optimizer)
    if extra is not None:
        state[EXTRA] = encode(dict(extra), EXTRA)
    _gateway(models).current_stream().synchronize()
    return state


def _gateway(models: Sequence[nn.Module]) -> Gateway:
    """Of the device that holds what is saved; a rank of a pipeline may hold nothing."""
    tensors: list[Tensor] = [parameter for model in models for parameter in model.parameters()]
    tensors = tensors or [buffer for model in models for buffer in model.buffers()]
    return gateway_of(tensors) if tensors else gateway_for(torch.device("cpu"))


def _written_elsewhere(
    models: Sequence[nn.Module], optimizer: Optimizer | None, state: Mapping[str, Any]
) -> frozenset[str]:
    """Keys of options and step counts that the first rank of the parameter's mesh writes."""
    if optimizer is None:
        return frozenset()
    names = names_of(models, optimizer)
    others = {name for parameter, name in names.items() if not shards.is_first(parameter)}
    found = set()
    for key, value in state["optim"].items():
        owner = key.removeprefix(GROUPS).removeprefix(STATE).rpartition(".")[0]
        if owner in others and not isinstance(value, DTensor):
            found.add(f"optim.{key}")
    return frozenset(found)


def weights_of(models: Sequence[nn.Module]) -> dict[str, Any]:
    """Parameters and buffers of all models by FQN: the live ones.

    Raises:
        ConfigError: two models have the same name.
    """
    weights: dict[str, Any] = {}
    for model in models:
        part = get_model_state_dict(model)
        if twice := sorted(weights.keys() & part.keys()):
            raise ConfigError(
                f"weights {twice[:5]} of two of the models",
                reason="they have the same names, and one set would be lost",
                remedy="give the models different names, as parts of one module have",
            )
        weights.update(part)
    return weights


def encode(value: Any, what: str) -> bytes:
    """``value`` as ``torch.save`` writes it.

    Raises:
        ConfigError: ``torch.load(weights_only=True)``, which is all that a load uses, refuses it.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        decode(buffer)
    except Exception as error:
        raise ConfigError(
            f"{what} of type {type(value).__name__}",
            reason=f"it cannot be loaded without running code of its own: {error}",
            remedy="keep numbers, strings, lists, dicts and tensors in it, such as state_dict()s",
        ) from error
    return buffer.getvalue()


def decode(data: io.BytesIO) -> Any:
    """What :func:`encode` was given; no code of its own is run.

    Raises:
        Exception: whatever torch raises of other data.
    """
    with torch.serialization.safe_globals([io.BytesIO]):  # some modules' extra state is one
        return torch.load(data, weights_only=True, map_location="cpu")


def _check_same(plans: Sequence[SavePlan]) -> None:
    """Refuse tensors that ranks call by the same name but that cannot be the same.

    Raises:
        ConfigError: their shapes differ.
    """
    sizes: dict[str, torch.Size] = {}
    for item in (item for plan in plans for item in plan.items):
        if item.tensor_data is not None:
            size = sizes.setdefault(item.index.fqn, item.tensor_data.size)
            if size != item.tensor_data.size:
                raise ConfigError(
                    f"{item.index.fqn} of shapes {tuple(size)} and {tuple(item.tensor_data.size)}",
                    reason="two ranks have different tensors of that name, and one would be lost",
                    remedy="give modules of different ranks different names",
                )
