"""Which parameters there are: their names, order, schemas and lanes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import shards
from ..config import OffloadConfig
from ..errors import StateSchemaError
from ..plan import Candidate, choose_lanes
from .moments import moments_of
from .records import Record, bytes_per_element, master_form, state_kinds
from .schema import Schema, host_flags, probe, signature

_log = logging.getLogger("fsdp_offload")

Member = tuple[Tensor, int]
"""A parameter and the index of its param_group."""


@dataclass
class Draft:
    """A parameter before its lane is known."""

    parameter: Tensor
    group: int
    info: shards.ShardInfo
    compute_dtype: torch.dtype
    native: bool
    candidate: Candidate


class Inventory:
    """Names and schemas of the parameters of one optimizer.

    Args:
        optimizer: the wrapped optimizer; its groups are the wrapper's groups.
        models: gives names and the update order; may be empty.
        config: the user's choices.
        device: where shards live.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        models: Sequence[nn.Module],
        config: OffloadConfig,
        device: torch.device,
    ) -> None:
        self._optimizer, self._models = optimizer, models
        self._config, self._device = config, device
        self._schemas: dict[Any, Schema] = {}
        self._max_local_bytes: dict[Tensor, int] = {}
        self._resident_bytes = 0  # of the largest shards, over all ranks
        self.names = shards.parameter_names(models)
        self._name_missing()

    def _name_missing(self) -> None:
        """Names from ``param_names``, else from the position, for what the models do not hold."""
        for index, group in enumerate(self._optimizer.param_groups):
            given = group.get("param_names") or []
            for position, parameter in enumerate(group["params"]):
                name = given[position] if position < len(given) else f"group{index}.{position}"
                self.names.setdefault(parameter, name)

    def trainable(self) -> list[Member]:
        """Parameters that may get gradients, in the order of the groups."""
        return [
            (parameter, index)
            for index, group in enumerate(self._optimizer.param_groups)
            for parameter in group["params"]
            if parameter.requires_grad
        ]

    def schema(self, group: int, dtype: torch.dtype, *, on_host: bool) -> Schema:
        """The schema of parameters of ``dtype`` in ``group``, probed once per set of flags."""
        values = self._optimizer.param_groups[group]
        key = (signature(values), dtype, on_host)
        if key not in self._schemas:
            self._schemas[key] = self._probe(values, dtype, on_host=on_host)
        return self._schemas[key]

    def _probe(self, group: dict[str, Any], dtype: torch.dtype, *, on_host: bool) -> Schema:
        if not on_host:
            return probe(self._optimizer, group, dtype, self._device)
        values = {**group, **host_flags(group)}
        return probe(self._optimizer, values, dtype, torch.device("cpu"))

    def plan(self, added: list[Member], *, first: bool) -> tuple[list[Record], list[Member]]:
        """Records with their lanes, in update order, and the members that stay native.

        Args:
            added: new members, in the order of the groups.
            first: whether they are the ones given at construction; an explicit list of lanes
                speaks of those only.
        """
        self._name_missing()
        drafts = [self._draft(*member) for member in added]
        config = self._config
        if not first and not isinstance(config.update_on, str):
            config = replace(config, update_on="auto")
        if isinstance(config.update_on, str):  # a list of lanes is in the order of the groups
            drafts = self._in_update_order(drafts)
        candidates = [draft.candidate for draft in drafts]
        chosen = choose_lanes(candidates, config, used_bytes=self._resident_bytes)
        lanes = {id(draft): lane for draft, lane in zip(drafts, chosen, strict=True)}
        drafts = self._in_update_order(drafts)
        natives = [draft for draft in drafts if draft.native]
        if natives and config.offload_fraction > 0:
            _log.info(
                "%d parameters keep their state on the device, as %s makes it (%s, ...)",
                len(natives),
                type(self._optimizer).__name__,
                natives[0].candidate.fqn,
            )
        records = [self._record(d, lanes[id(d)]) for d in drafts if not d.native]
        return records, [(d.parameter, d.group) for d in natives]

    def commit(self, records: Sequence[Record], natives: Sequence[Member]) -> None:
        """Count what stays on the device against a budget, once its memory is reserved."""
        stay = [r.parameter for r in records if r.lane == "resident"] + [p for p, _ in natives]
        self._resident_bytes += sum(self._max_local_bytes[parameter] for parameter in stay)

    def _in_update_order(self, drafts: list[Draft]) -> list[Draft]:
        """Outside FSDP first, then the models' order, then the rest as given."""
        order = {parameter: i for i, parameter in enumerate(self.names)}
        managed = shards.fsdp_parameters(self._models)
        return sorted(drafts, key=lambda d: (d.parameter in managed, order[d.parameter]))

    def _draft(self, parameter: Tensor, group: int) -> Draft:
        fqn = self.names[parameter]
        info = shards.shard_info(parameter, fqn)
        compute = self._config.precision.compute_dtype(info.dtype)
        if info.is_plain:
            schema = self.schema(group, compute, on_host=False)
            # Shapes unknown, or all parameters in one call: kept as the class makes them.
            native = bool(schema.role("other")) or schema.coupled
        else:  # not even probed: the class may treat the subclass in its own way
            schema, native = Schema((), elementwise=False, eager=False), True
        form = master_form("resident", info.dtype, compute)
        per_numel = bytes_per_element(schema, form, compute, self._config.precision)
        candidate = Candidate(
            fqn=fqn,
            global_bytes=int(info.global_numel * per_numel),
            max_local_bytes=int(info.max_local_numel * per_numel),
            must_stay=native,
            whole=not schema.elementwise,
        )
        self._max_local_bytes[parameter] = candidate.max_local_bytes
        return Draft(parameter, group, info, compute, native, candidate)

    def _record(self, draft: Draft, lane: Any) -> Record:
        info, compute = draft.info, draft.compute_dtype
        schema = self.schema(draft.group, compute, on_host=lane == "host")
        form = master_form(lane, info.dtype, compute)
        moments = moments_of(schema, compute, self._config.precision)
        return Record(
            index=-1,  # set when the record is added
            parameter=draft.parameter,
            fqn=self.names[draft.parameter],
            group=draft.group,
            info=info,
            schema=schema,
            compute_dtype=compute,
            lane=lane,
            form=form,
            kinds=state_kinds(info, schema, form, compute, moments),
            address=shards.address(draft.parameter),
            moments=moments,
        )

    def check_schemas(self, records: Sequence[Record]) -> None:
        """Refuse hyper-parameters that need other state than was reserved.

        Raises:
            StateSchemaError: an option such as ``amsgrad`` or ``momentum`` was switched on.
        """
        seen = set()
        for record in records:
            key = (record.group, record.compute_dtype, record.lane == "host")
            if key in seen:
                continue
            seen.add(key)
            schema = self.schema(record.group, record.compute_dtype, on_host=key[2])
            if schema is not record.schema and state_names(schema) != state_names(record.schema):
                raise StateSchemaError(
                    f"param_groups[{record.group}]",
                    reason=f"its options now need state {state_names(schema)}, "
                    f"but {state_names(record.schema)} was reserved",
                    remedy="set options such as amsgrad or momentum before wrapping",
                )

    def probe_group(self, record: Record, group: dict[str, Any]) -> Schema:
        """The schema that ``record`` would have under other group values."""
        return self._probe(group, record.compute_dtype, on_host=record.lane == "host")


def state_names(schema: Schema) -> list[str]:
    """Names of the state entries, sorted."""
    return sorted(kind.name for kind in schema.kinds)
