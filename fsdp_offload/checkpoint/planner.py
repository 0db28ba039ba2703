"""Planners for ``dcp.save`` and ``dcp.load``: what is written, and what a load writes where.

[Note: order of a load]
1. The coordinator compares files with the manifest and chunks with tensors.
2. Every rank finds its keys, compares names and shapes, and reads options and ``extra``. Until
   here nothing was written, and an error leaves everything as it was, on all ranks.
3. Every rank reads its tensors: what is kept as it is stored in place, masters that are kept in
   another form into host memory. Module and optimizer take over what was read. An error or an
   interrupt now leaves the optimizer *failed*.

1 and 2 are the local step of DCP's plan, 3 is its reading: DCP raises their errors on all ranks.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.futures import Future
from torch.optim import Optimizer

from ..core import dtensor
from ..core.errors import CheckpointError, ConfigError, OffloadError, StateDictError
from ..core.interrupts import held_back
from ..core.offloadable import check_present
from ..core.progress import warn
from ..optimizer.hybrid import HybridDeviceOptimizer
from ..optimizer.masters import tell_loaded
from ..update import codec
from ..update.state import check_remainder
from .files import typed
from .reader import Reader
from .state import (
    EXTRA,
    GROUPS,
    REMAINDER,
    STATE,
    WHOLE,
    Layout,
    class_name,
    decode,
    encode,
    find_layout,
    names_of,
    parameters_of,
    unpack,
    weights_of,
)


class FlatSavePlanner(DefaultSavePlanner):
    """torch's planner, for a dict that is flat already.

    Args:
        collect: gives the dict; called in DCP's local step, so that an error of it is raised on all
            ranks.
    """

    def __init__(self, collect: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__()
        self.mappings: dict[str, tuple[str | int, ...]] = {}
        self._collect = collect
        # By id: options of a group are the same objects for all of its parameters, and pickled
        # once. Holds the object, so that the id stays its own.
        self._encoded: dict[int, tuple[Any, bytes]] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the dict as it is: an option may be a dict, which stays one value."""
        with typed():
            state = dict(self._collect())
        if not is_coordinator:
            state.pop(EXTRA, None)
        # For readers of nested dicts: "model.a.b" is "a.b" of "model".
        self.mappings = {key: tuple(filter(None, key.partition(".")[::2])) for key in state}
        self.state_dict, self.is_coordinator = state, is_coordinator

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """torch's.

        Raises:
            ConfigError: ranks call different tensors by the same name.
        """
        check_same(all_plans)
        with typed():
            return super().create_global_plan(all_plans)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Pickle what is no tensor."""
        if write_item.type is not WriteItemType.BYTE_IO:
            return object
        if id(object) not in self._encoded:
            self._encoded[id(object)] = (object, encode(object, write_item.index.fqn))
        return io.BytesIO(self._encoded[id(object)][1])


def check_same(plans: Sequence[SavePlan]) -> None:
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


class FlatLoadPlanner(DefaultLoadPlanner):
    """torch's planner for a flat dict; no code of their own is run for values."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take ``state_dict`` as it is."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle a value; classes other than torch's own are refused."""
        key = read_item.dest_index.fqn
        try:
            self.state_dict[key] = decode(value)
        except Exception as error:
            raise CheckpointError(
                f"{key}",
                reason=f"it cannot be loaded without running code of its own: {error}",
                remedy="save it with plain values only",
            ) from error


def read_values(reader: Reader, keys: Sequence[str]) -> dict[str, Any]:
    """Values that are no tensors, and small tensors, by key. No collective."""
    values: dict[str, Any] = {}
    for key in keys:
        entry = reader.metadata.state_dict_metadata[key]
        values[key] = None
        if isinstance(entry, TensorStorageMetadata):
            values[key] = torch.zeros(entry.size, dtype=entry.properties.dtype)
    planner = FlatLoadPlanner()
    planner.set_up_planner(values, reader.metadata)
    reader.read_data(planner.create_local_plan(), planner)
    return values


# --------------------------------------------------------------------------- a model and its state


class JobLoadPlanner(FlatLoadPlanner):
    """Plans a load into a model and its optimizer, on one rank.

    Args:
        models: the model, or the parts of a pipeline.
        optimizer: ``None``: weights only.
        reader: of the checkpoint.
        strict: refuse weights that only one side has, and another class of optimizer.
        model_prefix: see :func:`.state.find_layout`.
        optimizer_prefix: see there.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizer: Optimizer | None,
        reader: JobReader,
        *,
        strict: bool,
        model_prefix: str | None,
        optimizer_prefix: str | None,
    ) -> None:
        super().__init__()
        self._models, self._optimizer, self._reader = models, optimizer, reader
        self._strict = strict
        self._prefixes = {"model_prefix": model_prefix, "optimizer_prefix": optimizer_prefix}
        self.extra: dict[str, Any] = {}
        self._stored: Mapping[str, Any] = {}  # what the checkpoint says of each of its keys
        self._weights: dict[str, Any] = {}  # by FQN
        self._read: dict[str, Any] = {}  # what each key is read into
        self._keys: dict[str, str] = {}  # of the checkpoint, by key of what the optimizer takes
        self._options: dict[str, Any] = {}  # that the optimizer takes
        self._masters: list[tuple[Tensor, str]] = []  # weight and key: read beside it, replaces it

    def create_local_plan(self) -> LoadPlan:
        """Find keys, compare them, and read what is not kept in place.

        Raises:
            CheckpointError, CheckpointCorruptError, StateDictError, ConfigError, LaneError,
            ClosedError: see ``load``.
        """
        with typed():
            plain = self._optimizer
            if isinstance(plain, HybridDeviceOptimizer):
                plain._for_checkpoints.check_loadable("checkpoint.load()")
                plain = None
            check_present("checkpoint.load()", self._models, plain)
            self._stored = stored = self._reader.metadata.state_dict_metadata
            self._weights = weights_of(self._models)
            layout = find_layout(stored, self._weights, **self._prefixes)
            unknown = self._plan_weights(layout)
            if self._optimizer is not None:
                self._plan_state(self._optimizer, layout)
            if isinstance(stored.get(EXTRA), BytesStorageMetadata):
                data = read_values(self._reader, [EXTRA])[EXTRA]
                if isinstance(data, bytes):  # of another program, it is none of ours
                    self.extra = decode(io.BytesIO(data))
            self.set_up_planner(self._read, self._reader.metadata)
            return replace(super().create_local_plan(), planner_data=unknown)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """As they are.

        Raises:
            CheckpointError: no rank has some weights; in a pipeline each rank has some of them.
        """
        unknown = [set(plan.planner_data) for plan in global_plan]
        if lost := sorted(set.intersection(*unknown)) if self._strict else []:
            raise CheckpointError(
                f"weights of {self._reader.path}",
                reason=f"unknown to this model: {_some(lost)}",
                remedy="build the model that was saved, or pass strict=False",
            )
        return [replace(plan, planner_data=None) for plan in global_plan]

    @torch.no_grad()
    def take_over(self) -> None:
        """Let module and optimizer know what was read."""
        for parameter, key in self._masters:
            weight, master = dtensor.local(parameter), dtensor.local(self.state_dict[key])
            if key.endswith(REMAINDER):
                rounded, bits = weight.cpu().to(torch.bfloat16).reshape(-1), master.reshape(-1)
                master = torch.empty(weight.shape, dtype=torch.float32)
                codec.decode(rounded, bits, master.view(-1))
            weight.copy_(master)
        options = StateDictOptions(strict=False)
        for model in self._models:
            mine = weights_of([model])
            set_model_state_dict(model, {f: self._weights[f] for f in mine}, options=options)
            if self._optimizer is None:
                # The weights were read in place before, so the optimizer saw no change just now.
                tell_loaded(model)
        if self._optimizer is not None:
            found = {taken: self.state_dict[key] for taken, key in self._keys.items()}
            unpack(self._models, self._optimizer, {**self._options, **found})

    # ------------------------------------------------------------------ weights

    def _plan_weights(self, layout: Layout) -> list[str]:
        """Returns keys that look like weights and are none of this rank's."""
        stored = self._stored
        if layout.model is None:
            raise CheckpointError(
                f"{self._reader.path}",
                reason="it has no weight of this model under the usual prefixes, or the given one",
                remedy="build the model that was saved, or give model_prefix=",
            )
        missing = sorted(f for f in self._weights if layout.weight(f) not in stored)
        if missing and (self._strict or len(missing) == len(self._weights)):
            raise CheckpointError(
                f"weights of {self._reader.path}",
                reason=f"missing there: {_some(missing)}",
                remedy="build the model that was saved, or pass strict=False",
            )
        known = {layout.weight(fqn): fqn for fqn in self._weights}
        # What get_extra_state() gave.
        values = [key for key in known if isinstance(stored.get(key), BytesStorageMetadata)]
        for key, value in read_values(self._reader, values).items():
            self._weights[known[key]] = value
        for key in known.keys() & stored.keys() - set(values):
            self._read_into(key, self._weights[known[key]])
        # Without a prefix, everything else that was saved looks like a weight.
        return [k for k in stored if layout.model and layout.is_weight(k) and k not in known]

    # ------------------------------------------------------------------ optimizer state

    def _plan_state(self, optimizer: Optimizer, layout: Layout) -> None:
        if layout.optimizer is None:
            raise CheckpointError(
                f"{self._reader.path}",
                reason="it has no optimizer state for the parameters of this model",
                remedy="pass optimizer=None to load weights alone, or give optimizer_prefix=",
            )
        manifest = self._reader.manifest
        saved_class = "" if manifest is None else manifest.optimizer
        if self._strict and saved_class not in ("", class_name(optimizer)):
            raise CheckpointError(
                f"{self._reader.path} of {saved_class}",
                reason=f"this optimizer is {class_name(optimizer)}",
                remedy="build the optimizer that was saved, or pass strict=False",
            )
        names = names_of(self._models, optimizer)
        saved = layout.entries(STATE, self._stored)
        is_wrapped = isinstance(optimizer, HybridDeviceOptimizer)
        lost = [found & {WHOLE, REMAINDER} for found in saved.values()]
        if not is_wrapped and any(lost):
            warn(
                "the checkpoint has fp32 masters of %d parameters (%s): %s ignores them and goes "
                "on from the weights",
                sum(map(bool, lost)), ", ".join(sorted(set().union(*lost))),
                type(optimizer).__name__,
            )  # fmt: skip
        live: Mapping[Tensor, Mapping[str, Any]]
        if isinstance(optimizer, HybridDeviceOptimizer):
            live = optimizer._for_checkpoints.read_at_once()
            optimizer._for_checkpoints.check_names({p: saved.get(n, ()) for p, n in names.items()})
        else:
            live = optimizer.state
        for parameter, _ in parameters_of(optimizer):
            fqn = names[parameter]
            found, state = saved.get(fqn, set()), live.get(parameter, {})
            is_offloaded = is_wrapped and bool(state)
            if is_offloaded and found:  # without any, it never had a gradient: its state is reset
                self._plan_master(parameter, fqn, found, state, layout)
            for name in sorted(found - {WHOLE, REMAINDER}):
                if name in state or not is_offloaded:
                    self._plan_entry(parameter, fqn, name, state.get(name), layout)
        self._plan_options(optimizer, names, layout)

    def _plan_options(
        self, optimizer: Optimizer, names: Mapping[Tensor, str], layout: Layout
    ) -> None:
        groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
        firsts = [fqns[0] for fqns in groups if fqns]
        values = read_values(self._reader, layout.option_keys(self._stored, firsts))
        found = layout.options(values)
        options = [found.get(fqns[0], {}) if fqns else {} for fqns in groups]
        if isinstance(optimizer, HybridDeviceOptimizer):
            optimizer._for_checkpoints.check_options(options)
        for fqns, of_group in zip(groups, options, strict=True):
            for fqn in fqns:
                self._options.update({f"{GROUPS}{fqn}.{o}": v for o, v in of_group.items()})

    def _plan_entry(
        self, parameter: Tensor, fqn: str, name: str, live: Any, layout: Layout
    ) -> None:
        """Read an entry of a parameter's state into ``live``, or into a new tensor."""
        key = layout.state(fqn) + name
        entry = self._stored[key]
        if isinstance(entry, TensorStorageMetadata) and not isinstance(live, Tensor):
            if entry.size == parameter.shape and name != "step":
                device = dtensor.local(parameter).device
                live = _shard_like(parameter, entry.properties.dtype, device)
            else:
                live = torch.zeros(entry.size, dtype=entry.properties.dtype)
        self._read_into(key, live)
        self._keys[f"{STATE}{fqn}.{name}"] = key

    def _plan_master(
        self, parameter: Tensor, fqn: str, saved: set[str], live: Mapping[str, Any], layout: Layout
    ) -> None:
        """Read the master in place, or what says it into host memory; without any of it, the master
        becomes the weight."""
        weight, start = layout.weight(fqn), layout.state(fqn)
        kept = next((name for name in (WHOLE, REMAINDER) if name in live), None)
        if REMAINDER in saved and isinstance(
            self._stored[start + REMAINDER], TensorStorageMetadata
        ):
            check_remainder(start + REMAINDER, self._stored[start + REMAINDER].properties.dtype)
        if kept in saved:
            self._plan_entry(parameter, fqn, kept, live[kept], layout)
            return
        others: tuple[str, ...] = ()
        if kept is None:  # the weight is the master, or there is none
            others = (WHOLE, REMAINDER) if parameter.dtype == torch.float32 else (WHOLE,)
        elif parameter.dtype == torch.bfloat16 and live[kept].dtype != torch.float64:
            others = (WHOLE, REMAINDER)
        other = next((name for name in others if name in saved), None)
        cpu = torch.device("cpu")
        if other is not None:
            key = start + other
            dtype = torch.float32 if other == WHOLE else torch.bfloat16
            self._read_into(key, _shard_like(parameter, dtype, cpu))
            if kept is None:
                self._masters.append((parameter, key))
            else:
                self._keys[f"{STATE}{fqn}.{other}"] = key
        elif kept is not None and _is_fp32(self._stored.get(weight)):
            # Read as a master: taking it over writes the weight, too.
            self._read_into(weight, _shard_like(parameter, torch.float32, cpu))
            self._keys[f"{STATE}{fqn}.{WHOLE}"] = weight

    def _read_into(self, key: str, value: Any) -> None:
        """Plan to read a key into a tensor, or a value that is none."""
        entry = self._stored[key]
        _check_shape(key, entry, value)
        self._read[key] = value if isinstance(entry, TensorStorageMetadata) else None


class JobReader(Reader):
    """Reads for a :class:`JobLoadPlanner`; model and optimizer take over what was read.

    Taking over is part of the reading, so that DCP raises an error of it on all ranks.

    Args:
        path: as of :class:`Reader`.
        threads: see there.
        optimizer: that has *failed* when ``until_all_have`` is left by an error.
    """

    def __init__(self, path: Any, *, threads: int | None, optimizer: Optimizer | None) -> None:
        super().__init__(path, threads=threads)
        self._optimizer = optimizer
        self.until_all_have = contextlib.ExitStack()
        """Entered when everything was found to fit; the caller leaves it when all ranks are done,
        and after it the other one."""
        self.uninterrupted = contextlib.ExitStack()
        """Entered when everything was read."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read in place, then take over."""
        if not isinstance(planner, JobLoadPlanner):  # of single values, before anything is written
            return super().read_data(plan, planner)
        with contextlib.ExitStack() as reading:
            if isinstance(self._optimizer, HybridDeviceOptimizer):
                what, view = "checkpoint.load()", self._optimizer._for_checkpoints
                self.until_all_have.enter_context(view.failing(what, keep=OffloadError))
                reading.enter_context(view.replacing_all(what, keep=CheckpointError))
            done = super().read_data(plan, planner)
            # From here on half of a load would be a success: Ctrl-C waits.
            self.uninterrupted.enter_context(held_back())
        with typed():
            planner.take_over()
        return done


def _shard_like(parameter: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    shard = dtensor.local(parameter)
    return dtensor.like(parameter, torch.empty(shard.shape, dtype=dtype, device=device))


def _is_fp32(stored: object) -> bool:
    """Whether a weight was saved with all that an fp32 master would say."""
    return isinstance(stored, TensorStorageMetadata) and stored.properties.dtype == torch.float32


def _check_shape(key: str, stored: Any, value: Any) -> None:
    """Refuse a tensor of another shape.

    Raises:
        StateDictError: the shapes differ, or only one of the two is a tensor.
    """
    if not isinstance(stored, TensorStorageMetadata):
        if isinstance(value, Tensor) and value.dim() > 0:
            raise StateDictError(
                f"{key}", reason="it is no tensor in the checkpoint", remedy="build what was saved"
            )
        return
    expected = tuple(value.size()) if hasattr(value, "size") else ()
    if expected != tuple(stored.size):
        raise StateDictError(
            f"{key} of shape {tuple(stored.size)}",
            reason=f"here it has shape {expected}",
            remedy="build the model and the optimizer that were saved",
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5]) or "none"
    return f"{shown}, ... ({len(names)} in all)" if len(names) > 5 else shown
