"""Planners for ``dcp.save`` and ``dcp.load``: items to write, and targets to read into.

1. The coordinator compares files with the manifest and chunks with tensors.
2. Every rank finds its keys, compares names and shapes, and reads options and ``extra``. Up to here
nothing was written, and an error changes nothing on any rank.
3. Every rank reads its tensors in place, or into host memory for masters stored in another form.
Then module and optimizer adopt the values. An error or an interrupt now leaves the optimizer
*failed*.

1 and 2 are the local step of DCP's plan, 3 is its reading: DCP raises their errors on all ranks.
"""

from __future__ import annotations

import functools
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
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim import Optimizer

from ..core import dtensor
from ..core.errors import CheckpointError, ConfigError, StateDictError
from ..core.interrupts import let_through
from ..core.offloadable import check_present
from ..core.progress import warn
from ..optimizer.hybrid import HybridDeviceOptimizer
from ..optimizer.masters import tell_loaded
from ..update import codec
from ..update.state import check_remainder
from .files import typed
from .meta import give_memory, make_buffers
from .reader import Reader
from .rule import STATE, Match, Names, find_layout, match, or_give
from .state import (
    EXTRA,
    REMAINDER,
    WHOLE,
    check_complete,
    class_name,
    decode,
    encode,
    groups_of,
    load_state,
    names_of,
    some,
    weights_of,
)


class FlatSavePlanner(DefaultSavePlanner):
    """torch's planner for a dict that is already flat.

    Args:
        collect: returns the dict. DCP's local step calls it, which raises its errors on all ranks.
    """

    def __init__(self, collect: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__()
        self.mappings: dict[str, tuple[str | int, ...]] = {}
        self._collect = collect
        # By id: parameters of a group share the objects of their options, which are pickled once.
        # The entry keeps the object alive, so that the id stays unique.
        self._encoded: dict[int, tuple[Any, bytes]] = {}

    @let_through()
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Use the dict unflattened; an option that is a dict stays one value."""
        with typed():
            state = dict(self._collect())
        if not is_coordinator:
            state.pop(EXTRA, None)
        # For readers of nested dicts: "model.a.b" is "a.b" of "model".
        self.mappings = {key: tuple(filter(None, key.partition(".")[::2])) for key in state}
        self.state_dict, self.is_coordinator = state, is_coordinator

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plan like torch, after a check that ranks agree about each tensor.

        Raises:
            ConfigError: two ranks have different tensors under one name.
        """
        _check_same(all_plans)
        with typed():
            return super().create_global_plan(all_plans)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Pickle a value other than a tensor."""
        if write_item.type is not WriteItemType.BYTE_IO:
            return object
        if id(object) not in self._encoded:
            self._encoded[id(object)] = (object, encode(object, write_item.index.fqn))
        return io.BytesIO(self._encoded[id(object)][1])


def _check_same(plans: Sequence[SavePlan]) -> None:
    known: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for item in (item for plan in plans for item in plan.items):
        if (data := item.tensor_data) is not None:
            form = tuple(data.size), data.properties.dtype
            if (first := known.setdefault(item.index.fqn, form)) != form:
                raise ConfigError(
                    f"{item.index.fqn} of {first[0]} {first[1]} and {form[0]} {form[1]}",
                    reason="two ranks have different tensors under this name, and one would be "
                    "lost",
                    remedy="give modules on different ranks different names",
                )


class FlatLoadPlanner(DefaultLoadPlanner):
    """torch's planner for a flat dict; runs no code that a value names."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Use ``state_dict`` unflattened."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle a value, and refuse classes other than torch's own."""
        key = read_item.dest_index.fqn
        try:
            self.state_dict[key] = decode(value)
        except Exception as error:
            raise CheckpointError(
                f"{key}",
                reason=f"torch cannot load it without running its code: {error}",
                remedy="save it as plain values",
            ) from error


def read_values(reader: Reader, keys: Sequence[str]) -> dict[str, Any]:
    """Read small tensors and other values, by key. No collective."""
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
    """Plans a load into a model and its optimizer, on one rank; for arguments see ``load``."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizer: Optimizer | None,
        reader: Reader,
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
        self._stored: Mapping[str, Any] = {}  # DCP's entry of each key of the checkpoint
        self._weights: dict[str, Any] = {}  # by FQN
        self._names: Mapping[Tensor, Names] = {}  # names of the optimizer's parameters
        self._found: Match
        self._read: dict[str, Any] = {}  # the target of each key
        # Keys of the state that the optimizer loads, by FQN and entry.
        self._keys: dict[str, dict[str, str]] = {}
        self._masters: list[tuple[Tensor, str]] = []  # weight, and the key of its new value

    def create_local_plan(self) -> LoadPlan:
        """Find keys, compare them, and read options and ``extra``.

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
            self._match()
            self._plan_weights()
            if self._optimizer is not None:
                self._plan_state(self._optimizer)
            if isinstance(stored.get(EXTRA), BytesStorageMetadata):
                data = read_values(self._reader, [EXTRA])[EXTRA]
                if isinstance(data, bytes):  # another program may have written anything
                    self.extra = decode(io.BytesIO(data))
            make_buffers(self._models, self._weights)
            self.set_up_planner(self._read, self._reader.metadata)
            plan = super().create_local_plan()
            self._reader._compare_aliases(plan, self)
            return replace(plan, planner_data=self._found.unknown)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse a checkpoint with weights that no rank has; each pipeline rank has some.

        Raises:
            CheckpointError: the checkpoint has such weights.
        """
        unknown = [set(plan.planner_data) for plan in global_plan]
        if lost := sorted(set.intersection(*unknown)) if self._strict else []:
            raise CheckpointError(
                f"weights of {self._reader.path}",
                reason=f"this model lacks {some(lost)}",
                remedy="build the model that was saved, or pass strict=False",
            )
        return [replace(plan, planner_data=None) for plan in global_plan]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Give weights on the meta device memory, now that everything fits on all ranks."""
        if any(map(_is_meta, self._weights.values())):
            give_memory(self._models)
            fresh = weights_of(self._models)
            for fqn in (fqn for fqn, weight in self._weights.items() if _is_meta(weight)):
                self._weights[fqn] = fresh[fqn]
                # The checkpoint may have another name of a tied weight.
                if (key := self._found.weights.get(fqn)) is not None:
                    self.state_dict[key] = fresh[fqn]
        return super().finish_plan(new_plan)

    @torch.no_grad()
    def apply(self) -> None:
        """Apply loaded values to the module and the optimizer."""
        for parameter, key in self._masters:
            weight, master = dtensor.local(parameter), dtensor.local(self.state_dict[key])
            if key.endswith(REMAINDER):
                master = codec.decoded(weight.cpu().to(torch.bfloat16).contiguous(), master)
            weight.copy_(master)
        options = StateDictOptions(strict=False)
        for model in self._models:
            if mine := {fqn: self._weights[fqn] for fqn in weights_of([model])}:
                set_model_state_dict(model, mine, options=options)
            if self._optimizer is None:
                # The weights were read in place before, so the optimizer has seen no change.
                tell_loaded(model)
        if self._optimizer is not None:
            state = {
                fqn: {entry: self.state_dict[key] for entry, key in keys.items()}
                for fqn, keys in self._keys.items()
            }
            load_state(self._optimizer, self._names, state, self._found.options)

    def _match(self) -> None:
        optimizer, stored, groups = self._optimizer, self._stored, list[list[Names]]()
        if optimizer is not None:
            self._names = names_of(self._models, optimizer)
            groups = groups_of(optimizer, self._names)
        layout = find_layout(stored, self._weights, **self._prefixes)
        tied = {f: names for names in dtensor.saved_names(self._models).values() for f in names}
        weights = {fqn: tied.get(fqn, [fqn]) for fqn in self._weights}
        read = functools.partial(read_values, self._reader)
        self._found = match(layout, stored, weights, groups, read)

    # ------------------------------------------------------------------ weights

    def _plan_weights(self) -> None:
        found, stored = self._found, self._stored
        if self._weights and not found.weights:
            raise CheckpointError(
                f"{self._reader.path}",
                reason="it has no weight of this model under the usual or the given prefix",
                remedy="build the model that was saved"
                + or_give("model_prefix", stored, self._weights),
            )
        empty = {fqn for fqn, weight in self._weights.items() if _is_meta(weight)}
        if lost := [fqn for fqn in found.missing if self._strict or fqn in empty]:
            other = "give them values first" if empty.intersection(lost) else "pass strict=False"
            raise CheckpointError(
                f"weights of {self._reader.path}",
                reason=f"the checkpoint lacks {some(lost)}",
                remedy=f"build the model that was saved, or {other}",
            )
        if found.missing:
            warn("the checkpoint lacks %s: they keep their values", some(found.missing))
        if empty and self._optimizer is not None:
            raise ConfigError(
                "an optimizer of a model on the meta device",
                reason="state is kept beside the weights, which have no memory yet",
                remedy="load the weights first, checkpoint.load(path, model); then build the "
                "optimizer, and load(path, model, optimizer)",
            )
        known = {key: fqn for fqn, key in found.weights.items()}
        # What get_extra_state() returns may have another type or shape in each call.
        values = [key for key in known if key.endswith("_extra_state")]
        for key, value in read_values(self._reader, values).items():
            live = self._weights[known[key]]
            if isinstance(value, Tensor) and isinstance(live, Tensor) and not live.is_meta:
                value = value.to(live.device)
            self._weights[known[key]] = value
        for key in known.keys() - set(values):
            _check_kind(key, stored[key], self._weights[known[key]])
            self._read_into([key], self._weights[known[key]])

    # ------------------------------------------------------------------ optimizer state

    def _plan_state(self, optimizer: Optimizer) -> None:
        found = self._found
        self._check_state(optimizer)
        if self._strict:
            check_complete(found, self._names, str(self._reader.path))
        live: Mapping[Tensor, Mapping[str, Any]]
        masters, has_masters = {WHOLE, REMAINDER}, False
        if isinstance(optimizer, HybridDeviceOptimizer):
            view = optimizer._for_checkpoints
            live, has_masters = view.read_at_once(), not view.steps_itself
            if not has_masters:  # an entry of such a class may have the name of a master
                masters = set()
            entries = {p: found.state[n[0]].keys() for p, n in self._names.items()}
            view.check_fits(entries, found.options)
        else:
            live = optimizer.state
            lost = [kept for keys in found.state.values() if (kept := keys.keys() & masters)]
            if lost:
                warn(
                    "the checkpoint has fp32 masters of %d parameters (%s): %s ignores "
"them and continues from the weights",
                    len(lost), ", ".join(sorted(set().union(*lost))), type(optimizer).__name__,
                )  # fmt: skip
        if found.left:
            warn("the load skips the state of %s: this optimizer does not have them",
                 some(found.left))  # fmt: skip
        for parameter, names in self._names.items():
            keys, state = found.state[names[0]], live.get(parameter)
            if has_masters and (keys or state is not None):
                self._plan_master(parameter, names, keys, state)
            for name in sorted(keys.keys() - masters):
                if not (has_masters and state) or name in state:
                    self._plan_entry(parameter, names[0], name, keys[name], (state or {}).get(name))

    def _check_state(self, optimizer: Optimizer) -> None:
        if self._found.absent == {names[0] for names in self._names.values()}:
            raise CheckpointError(
                f"{self._reader.path}",
                reason="it has no optimizer state for this model's parameters",
                remedy="pass optimizer=None to load weights alone"
                + or_give("optimizer_prefix", self._stored, self._weights, STATE),
            )
        manifest = self._reader.manifest
        saved_class = "" if manifest is None else manifest.optimizer
        if self._strict and saved_class not in ("", class_name(optimizer)):
            raise CheckpointError(
                f"{self._reader.path} of {saved_class}",
                reason=f"this optimizer is {class_name(optimizer)}",
                remedy="build the optimizer that was saved, or pass strict=False",
            )

    def _plan_entry(
        self, parameter: Tensor, fqn: str, name: str, keys: Sequence[str], live: Any
    ) -> None:
        entry = self._stored[keys[0]]
        if isinstance(entry, TensorStorageMetadata) and not isinstance(live, Tensor):
            if entry.size == parameter.shape and name != "step":
                device = dtensor.local(parameter).device
                live = _shard_like(parameter, entry.properties.dtype, device)
            else:
                live = torch.zeros(entry.size, dtype=entry.properties.dtype)
        elif isinstance(live, Tensor) and not isinstance(entry, TensorStorageMetadata):
            # Another program may store a step count as a plain number.
            value = read_values(self._reader, keys[:1])[keys[0]]
            if not isinstance(value, int | float):
                raise _not_fitting(f"{keys[0]} of {type(value)}", "this job has a tensor there")
        self._plan_read(fqn, name, keys, live)

    def _plan_master(
        self,
        parameter: Tensor,
        names: Names,
        saved: Mapping[str, Sequence[str]],
        live: Mapping[str, Any] | None,
    ) -> None:
        """Plan to read a master in place, or to convert another form of it in host memory.

        A master that the checkpoint lacks takes the weight's value. ``live`` is ``None`` for a
        frozen parameter, which keeps the saved master until it is trained.
        """
        for key in saved.get(REMAINDER, ()):
            if isinstance(entry := self._stored[key], TensorStorageMetadata):
                check_remainder(key, entry.properties.dtype)
        kept = next((name for name in (WHOLE, REMAINDER) if name in (live or ())), None)
        if live is not None and kept is not None and kept in saved:
            self._plan_read(names[0], kept, saved[kept], live[kept])
            return
        # A remainder holds the lower bits of a bf16 weight; an fp16 weight is no upper half.
        forms = (WHOLE,) if parameter.dtype == torch.float16 else (WHOLE, REMAINDER)
        form = next((name for name in forms if name in saved), None)
        dtype = torch.bfloat16 if form == REMAINDER else torch.float32
        master = _shard_like(parameter, dtype, torch.device("cpu"))
        weights = [self._found.weights[name] for name in names if name in self._found.weights]
        if parameter.dtype == torch.float32 or (live is not None and kept is None):
            if form is not None:  # the weight is the master
                self._read_into(saved[form], master)
                self._masters.append((parameter, saved[form][0]))
        elif form is not None:
            self._plan_read(names[0], form, saved[form], master)
        elif weights and all(_is_fp32(self._stored[key]) for key in weights):
            # Read as a master: apply() writes the weight, too.
            self._plan_read(names[0], WHOLE, weights, master)
            if live is None:
                self._masters.append((parameter, weights[0]))
        elif live is None and REMAINDER in saved:
            warn("the load skips %s of %s: it needs a bf16 weight", REMAINDER, names[0])

    def _plan_read(self, fqn: str, entry: str, keys: Sequence[str], value: Any) -> None:
        self._read_into(keys, value)
        self._keys.setdefault(fqn, {})[entry] = keys[0]

    def _read_into(self, keys: Sequence[str], value: Any) -> None:
        for key in keys:
            entry = self._stored[key]
            _check_shape(key, entry, value)
            self._read[key] = value if isinstance(entry, TensorStorageMetadata) else None


def _shard_like(parameter: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    shard = dtensor.local(parameter)
    return dtensor.like(parameter, torch.empty(shard.shape, dtype=dtype, device=device))


def _is_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _is_fp32(stored: object) -> bool:
    return isinstance(stored, TensorStorageMetadata) and stored.properties.dtype == torch.float32


def _check_kind(key: str, stored: Any, weight: Tensor) -> None:
    """Refuse what ``copy_`` would truncate silently: fractions to integers, complex to real."""
    dtype = stored.properties.dtype if isinstance(stored, TensorStorageMetadata) else None
    is_mask = weight.dtype == torch.bool  # which older versions of a model may store as numbers
    if dtype is None or not (is_mask or torch.can_cast(dtype, weight.dtype)):
        raise _not_fitting(
            f"{key} of {dtype or 'a plain Python type'}",
            f"this model's tensor has {weight.dtype}, and a conversion would lose values",
        )


def _check_shape(key: str, stored: Any, value: Any) -> None:
    if not isinstance(stored, TensorStorageMetadata):
        if isinstance(value, Tensor) and value.dim() > 0:
            raise _not_fitting(key, "the checkpoint has no tensor under this key")
        return
    expected = tuple(value.size()) if hasattr(value, "size") else ()
    if expected != tuple(stored.size):
        raise _not_fitting(
            f"{key} of shape {tuple(stored.size)} in the checkpoint",
            f"its shape is {expected} in this job",
        )


def _not_fitting(what: str, reason: str) -> StateDictError:
    return StateDictError(what, reason=reason, remedy="build the job that was saved")
