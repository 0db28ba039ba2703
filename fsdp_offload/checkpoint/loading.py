"""What a load writes where: the plan of one rank, and what model and optimizer take over.

[Note: order of a load]
1. The coordinator compares files with the manifest and chunks with tensors.
2. Every rank finds its keys, compares names and shapes, and reads options and ``extra``. Until
   here nothing was written, and an error leaves everything as it was, on all ranks.
3. Every rank reads its tensors in place: first what is stored as it is kept, then masters that
   are kept in another form, which need the weights. Module and optimizer take over what was read.
   An error or an interrupt now leaves the optimizer *failed*.

1 and 2 are the local step of DCP's plan, 3 is its reading: DCP raises their errors on all ranks.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.futures import Future
from torch.optim import Optimizer

from ..core import dtensor
from ..core.errors import CheckpointError, OffloadError, StateDictError
from ..core.interrupts import held_back
from ..core.offloadable import check_loadable
from ..optimizer.hybrid import HybridDeviceOptimizer
from ..optimizer.loading import tell_loaded
from ..update import state as state_io
from ..update.params import ParamState
from .files import typed
from .layout import Layout, find_layout
from .planner import Conversion, FlatLoadPlanner, read_values
from .reader import Reader
from .state import (
    EXTRA,
    GROUPS,
    REMAINDER,
    STATE,
    WHOLE,
    class_name,
    decode,
    names_of,
    parameters_of,
    unpack,
    weights_of,
)

_log = logging.getLogger("fsdp_offload")


class JobLoadPlanner(FlatLoadPlanner):
    """Plans a load into a model and its optimizer, on one rank.

    Args:
        models: the model, or the parts of a pipeline.
        optimizer: ``None``: weights only.
        reader: of the checkpoint.
        strict: refuse weights that only one side has, and another class of optimizer.
        model_prefix: see :func:`.layout.find_layout`.
        optimizer_prefix: see there.
    """

    def __init__(
        self,
        models: tuple[nn.Module, ...],
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
        self._weights: dict[str, Any] = {}  # by FQN
        self._direct: dict[str, Any] = {}  # what is read as it is stored, by key
        self._converted: dict[str, Any] = {}  # masters in another form, read when weights are there
        self._sources: dict[str, str] = {}  # key by packed key, of what the optimizer takes over
        self._packed: dict[str, Any] = {}  # what it takes over that is not read under its own key

    def create_local_plan(self) -> LoadPlan:
        """Find keys, compare them, and read what is not kept in place.

        Raises:
            CheckpointError, CheckpointCorruptError, StateDictError, ConfigError, LaneError,
            ClosedError: see ``load``.
        """
        with typed():
            check_loadable("checkpoint.load()", self._models, self._optimizer)
            stored = self._reader.metadata.state_dict_metadata
            if isinstance(self._optimizer, HybridDeviceOptimizer):
                self._optimizer.check_usable(failed_ok=True)
                self._optimizer.check_loadable("checkpoint.load()")
            self._weights = weights_of(self._models)
            layout = find_layout(stored, self._weights, **self._prefixes)
            unknown = self._plan_weights(layout)
            if self._optimizer is not None:
                self._plan_state(self._optimizer, layout)
            if isinstance(stored.get(EXTRA), BytesStorageMetadata):
                data = read_values(self._reader, [EXTRA])[EXTRA]
                if isinstance(data, bytes):  # of another program, it is none of ours
                    self.extra = decode(io.BytesIO(data))
            self.set_up_planner({**self._direct, **self._converted}, self._reader.metadata)
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

    def split(self, plan: LoadPlan) -> tuple[LoadPlan, LoadPlan]:
        """What is read first, and what is read when the weights are there."""
        late = [item for item in plan.items if item.dest_index.fqn in self._converted]
        first = [item for item in plan.items if item.dest_index.fqn not in self._converted]
        return replace(plan, items=first), replace(plan, items=late)

    def take_over(self) -> None:
        """Let module and optimizer know what was read."""
        options = StateDictOptions(strict=False)
        for model in self._models:
            mine = weights_of([model])
            set_model_state_dict(model, {f: self._weights[f] for f in mine}, options=options)
            if self._optimizer is None:
                # The weights were read in place before, so the optimizer saw no change just now.
                tell_loaded(model)
        if self._optimizer is not None:
            found = {key: self.state_dict[source] for key, source in self._sources.items()}
            unpack(self._models, self._optimizer, {**self._packed, **found})

    # ------------------------------------------------------------------ weights

    def _plan_weights(self, layout: Layout) -> list[str]:
        """Returns keys that look like weights and are none of this rank's."""
        stored = self._reader.metadata.state_dict_metadata
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
        known = {layout.weight(fqn) for fqn in self._weights}
        values = [
            key for key in known if isinstance(stored.get(key), BytesStorageMetadata)
        ]  # what get_extra_state() gave
        read = read_values(self._reader, values)
        for fqn, value in self._weights.items():
            key = layout.weight(fqn)
            if key in read:
                self._weights[fqn] = read[key]
            elif key in stored:
                _check_shape(key, stored[key], value)
                self._direct[key] = value
        # Without a prefix, everything else that was saved looks like a weight.
        return [k for k in stored if layout.model and layout.is_weight(k) and k not in known]

    # ------------------------------------------------------------------ optimizer state

    def _plan_state(self, optimizer: Optimizer, layout: Layout) -> None:
        stored = self._reader.metadata.state_dict_metadata
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
        if isinstance(optimizer, HybridDeviceOptimizer):
            self._plan_offloaded(optimizer, names, layout)
        else:
            self._plan_plain(optimizer, names, layout)
        groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
        firsts = [fqns[0] for fqns in groups if fqns]
        values = read_values(self._reader, layout.option_keys(stored, firsts))
        found = layout.options(values)
        options = [found.get(fqns[0], {}) if fqns else {} for fqns in groups]
        if isinstance(optimizer, HybridDeviceOptimizer):
            optimizer.check_options(options)
        for fqns, of_group in zip(groups, options, strict=True):
            for fqn in fqns:
                self._packed.update({f"{GROUPS}{fqn}.{o}": v for o, v in of_group.items()})

    def _plan_plain(
        self, optimizer: Optimizer, names: Mapping[Tensor, str], layout: Layout
    ) -> None:
        """For an optimizer of another package: live state is read in place, other state is made."""
        saved = layout.state_names(self._reader.metadata.state_dict_metadata)
        lost = [found & {WHOLE, REMAINDER} for found in saved.values()]
        if count := sum(map(bool, lost)):
            _log.warning(
                "the checkpoint has fp32 masters of %d parameters (%s): %s ignores them and goes "
                "on from the weights",
                count, ", ".join(sorted(set().union(*lost))), type(optimizer).__name__,
            )  # fmt: skip
        for parameter, _ in parameters_of(optimizer):
            fqn, live = names[parameter], optimizer.state.get(parameter, {})
            device = dtensor.local(parameter).device
            self._plan_unmanaged(parameter, fqn, saved.get(fqn, set()), layout, device, live)

    def _plan_offloaded(
        self, optimizer: HybridDeviceOptimizer, names: Mapping[Tensor, str], layout: Layout
    ) -> None:
        """For the offloaded state, which is read in place, and what the class keeps itself."""
        saved = layout.state_names(self._reader.metadata.state_dict_metadata)
        params = {param.parameter: param for param in optimizer.params}
        for parameter, _ in parameters_of(optimizer):
            fqn = names[parameter]
            found = saved.get(fqn, set())
            if parameter not in params:
                device = optimizer.device
                self._plan_unmanaged(parameter, fqn, found, layout, device)
            elif found:  # else it never had a gradient: its state is reset
                self._plan_record(params[parameter], fqn, found, layout)

    def _plan_record(self, param: ParamState, fqn: str, saved: set[str], layout: Layout) -> None:
        stored = self._reader.metadata.state_dict_metadata
        live = state_io.expose(param)
        state_io.show(param, live)
        state_io.check_names(param, saved)
        start = layout.state(fqn)
        if REMAINDER in saved:
            entry = stored[start + REMAINDER]
            _check_shape(start + REMAINDER, entry, param.parameter)
            if isinstance(entry, TensorStorageMetadata):
                state_io.check_remainder(start + REMAINDER, entry.properties.dtype)
        for kind in state_io.kinds_in(param, saved):
            self._add(f"{STATE}{fqn}.{kind.name}", start + kind.name, live[kind.name])
        form = param.form.value
        if param.emits_master and form in saved:
            self._add(f"{STATE}{fqn}.{form}", start + form, live[form])
            return
        weight = dtensor.like(param.parameter, dtensor.local(param.parameter))
        kept = live[form] if param.emits_master else weight
        for name, dtype in ((WHOLE, torch.float32), (REMAINDER, torch.bfloat16)):
            if name in saved and _can_convert(param, dtype):
                _check_shape(start + name, stored[start + name], kept)
                same = kept.dtype == dtype
                self._converted[start + name] = kept if same else Conversion(weight, kept, dtype)
                break
        else:
            source = layout.weight(fqn)
            if not (param.emits_master and _is_fp32(stored.get(source))):
                return  # the master becomes the weight
            # Read as a master, not as the weight, which the conversion writes.
            self._direct.pop(source, None)
            self._converted[source] = Conversion(weight, kept, torch.float32)
        if param.emits_master:
            self._packed[f"{STATE}{fqn}.{form}"] = kept

    def _plan_unmanaged(
        self,
        parameter: Tensor,
        fqn: str,
        saved: set[str],
        layout: Layout,
        device: torch.device,
        live: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """State that the class makes at its first step: ``live``, or room for what was saved."""
        for name in sorted(saved - {WHOLE, REMAINDER}):
            source = layout.state(fqn) + name
            entry = self._reader.metadata.state_dict_metadata[source]
            value: Any = live.get(name)
            if isinstance(entry, TensorStorageMetadata) and not isinstance(value, Tensor):
                dtype = entry.properties.dtype
                if entry.size == parameter.shape and name != "step":
                    shard = dtensor.local(parameter)
                    value = torch.zeros_like(shard, dtype=dtype, device=device)
                    value = dtensor.like(parameter, value)
                else:
                    value = torch.zeros(entry.size, dtype=dtype)
            self._add(f"{STATE}{fqn}.{name}", source, value)

    def _add(self, key: str, source: str, value: Any) -> None:
        """Read ``source`` into ``value``, for the optimizer to take over as ``key``."""
        entry = self._reader.metadata.state_dict_metadata[source]
        _check_shape(source, entry, value)
        self._direct[source] = value if isinstance(entry, TensorStorageMetadata) else None
        self._sources[key] = source


class JobReader(Reader):
    """Reads for a :class:`JobLoadPlanner`; model and optimizer take over what was read.

    Taking over is part of the reading, so that DCP raises an error of it on all ranks.

    Args:
        path: as of :class:`Reader`.
        threads: see there.
        optimizer: that has *failed* when ``until_all_have`` is left by an error.
        until_all_have: entered when everything was found to fit; the caller leaves it when all
            ranks are done.
        uninterrupted: entered when everything was read; left after the other.
    """

    def __init__(
        self,
        path: Any,
        *,
        threads: int | None,
        optimizer: Optimizer | None,
        until_all_have: contextlib.ExitStack,
        uninterrupted: contextlib.ExitStack,
    ) -> None:
        super().__init__(path, threads=threads)
        self._optimizer, self._until_all_have = optimizer, until_all_have
        self._uninterrupted = uninterrupted

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read in place, then take over."""
        if not isinstance(planner, JobLoadPlanner):  # of single values, before anything is written
            return super().read_data(plan, planner)
        first, late = planner.split(plan)
        with contextlib.ExitStack() as reading:
            if isinstance(self._optimizer, HybridDeviceOptimizer):
                what = "checkpoint.load()"
                failing = self._optimizer._failing(what, keep=OffloadError)
                self._until_all_have.enter_context(failing)
                replacing = self._optimizer._replacing_all(what, keep=CheckpointError)
                reading.enter_context(replacing)
            super().read_data(first, planner)
            done = super().read_data(late, planner)
            # From here on half of a load would be a success: Ctrl-C waits.
            self._uninterrupted.enter_context(held_back())
        with typed():
            planner.take_over()
        return done


def _is_fp32(stored: object) -> bool:
    """Whether a weight was saved with all that an fp32 master would say."""
    return isinstance(stored, TensorStorageMetadata) and stored.properties.dtype == torch.float32


def _can_convert(param: ParamState, stored: torch.dtype) -> bool:
    """Whether a master stored as ``stored`` says something of this parameter."""
    if param.emits_master:
        return param.info.dtype == torch.bfloat16 and param.compute_dtype == torch.float32
    return param.info.dtype == torch.float32 or stored != torch.bfloat16


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
