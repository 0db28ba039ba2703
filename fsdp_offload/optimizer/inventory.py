"""List parameters with their names, order, schemas and lanes."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core import dtensor
from ..core.config import Lane, OffloadConfig
from ..core.errors import StateSchemaError, UnsupportedParameterError
from ..core.fsdp import fsdp_parameters
from ..plan import ParamSpec, choose_lanes
from ..update.moments import moments_of
from ..update.params import ParamState, bytes_per_element, cut_at, master_form, state_kinds
from ..update.schema import (
    Schema,
    has_schema,
    host_flags,
    schema_of,
    signature,
    torch_class,
)

_log = logging.getLogger("fsdp_offload")

Placed = tuple[Tensor, int]
"""A parameter and the index of its param_group."""


class Inventory:
    """Names and schemas of the parameters of one optimizer.

    Args:
        optimizer: the wrapped optimizer; its groups are the wrapper's groups.
        models: gives names and the update order; may be empty.
        config: the user's choices.
        device: device of the shards.
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
        self.names = dtensor.parameter_names(models)
        self._name_missing()

    def _name_missing(self) -> None:
        for index, group in enumerate(self._optimizer.param_groups):
            given = group.get("param_names") or []
            for position, parameter in enumerate(group["params"]):
                name = given[position] if position < len(given) else f"group{index}.{position}"
                self.names.setdefault(parameter, name)

    def parameters(self) -> list[Placed]:
        """Return all parameters, in the order of the groups."""
        return [
            (parameter, index)
            for index, group in enumerate(self._optimizer.param_groups)
            for parameter in group["params"]
        ]

    def trainable(self) -> list[Placed]:
        """Return the parameters that may get gradients."""
        return [placed for placed in self.parameters() if placed[0].requires_grad]

    def _schema(self, values: dict[str, Any], dtype: torch.dtype, *, on_host: bool) -> Schema:
        key = (signature(values), dtype, on_host)
        if key not in self._schemas:
            device = self._device
            if on_host:
                values, device = {**values, **host_flags(values)}, torch.device("cpu")
            self._schemas[key] = schema_of(self._optimizer, values, dtype, device)
        return self._schemas[key]

    def plan(
        self, added: list[Placed], *, lanes: Mapping[Tensor, Lane] | None = None
    ) -> tuple[list[ParamState], list[Placed]]:
        """Return parameters with their lanes, in update order, and the native parameters.

        Args:
            added: new parameters, in the order of the groups.
            lanes: their earlier lanes, if any; parameters without one are native.
        """
        self._name_missing()
        shared = _sharing_memory(parameter for parameter, _ in self.parameters())
        specs = {p: self._measured(p, group, is_shared=p in shared) for p, group in added}
        ordered = self._in_update_order(added)
        if lanes is None:
            chosen = choose_lanes([specs[parameter] for parameter, _ in ordered], self._config)
            lanes = {parameter: lane for (parameter, _), lane in zip(ordered, chosen, strict=True)}
        natives = [placed for placed in ordered if specs[placed[0]].must_stay]
        if natives and self._config.offload_fraction > 0:
            _log.info(
                "%d parameters keep their state on the device: %s updates them itself (%s, ...)",
                len(natives),
                type(self._optimizer).__name__,
                self.names[natives[0][0]],
            )
        params = [
            self._state(parameter, group, specs[parameter], lanes.get(parameter, "resident"))
            for parameter, group in ordered
            if not specs[parameter].must_stay
        ]
        return params, natives

    def _in_update_order(self, added: list[Placed]) -> list[Placed]:
        """Sort parameters outside FSDP first, then by the models' order, then the rest as given."""
        order = {parameter: i for i, parameter in enumerate(self.names)}
        managed = fsdp_parameters(self._models)
        return sorted(added, key=lambda placed: (placed[0] in managed, order[placed[0]]))

    def _measured(self, parameter: Tensor, group: int, *, is_shared: bool) -> ParamSpec:
        fqn = self.names[parameter]
        info = dtensor.shard_info(parameter, fqn)
        compute = self._config.compute_dtype(info.dtype)
        # The class may treat tensor subclasses specially, and Adafactor's state has shapes that
        # depend on the parameter's. Both keep the class's own state. Parameters that share memory
        # need the class's own order.
        native = is_shared or not info.is_plain or not has_schema(self._optimizer)
        if native and torch_class(self._optimizer) is None:
            raise UnsupportedParameterError(
                f"{fqn} of type {type(parameter.data).__name__} with elementwise=True",
                reason=f"how {type(self._optimizer).__name__} updates it is unknown",
                remedy="leave out elementwise=True: the class then runs its own step on the device",
            )
        values, schema = self._optimizer.param_groups[group], Schema((), elementwise=False)
        if not native:
            schema = self._schema(values, compute, on_host=False)
        form = master_form(info.dtype, compute)
        per_numel = bytes_per_element(schema, form, compute, self._config)
        return ParamSpec(
            fqn=fqn,
            global_bytes=int(math.prod(info.global_shape) * per_numel),
            must_stay=native,
            whole=not schema.elementwise,
        )

    def _state(self, parameter: Tensor, group: int, spec: ParamSpec, lane: Lane) -> ParamState:
        info = dtensor.shard_info(parameter, spec.fqn)
        compute = self._config.compute_dtype(info.dtype)
        values = self._optimizer.param_groups[group]
        schema = self._schema(values, compute, on_host=lane == "host").in_group(values)
        form = master_form(info.dtype, compute)
        moments = moments_of(schema, compute, self._config.moments)
        cuttable, cut_numel = cut_at(info, lane, elementwise=schema.elementwise)
        return ParamState(
            parameter=parameter,
            spec=replace(
                spec,
                numel=info.local_numel,
                kinds=state_kinds(info, schema, form, compute, moments),
                cuttable=cuttable,
                cut_numel=cut_numel,
            ),
            group=group,
            info=info,
            schema=schema,
            compute_dtype=compute,
            lane=lane,
            form=form,
            memory=dtensor.memory_of(parameter),
            moments=moments,
        )

    def have_outgrown(self, params: Sequence[ParamState]) -> bool:
        """Whether options need state that is not reserved, as after a scheduler set SGD's momentum.

        Raises:
            StateSchemaError: state in use lacks it, where the plain optimizer raises a KeyError.
        """
        checked: dict[Any, Schema] = {}
        outgrown = False
        for param in params:
            key = (param.group, param.compute_dtype, param.lane == "host")
            if key not in checked:
                checked[key] = self.schema(param, self._optimizer.param_groups[param.group])
            if not (missing := missing_kinds(param, checked[key])):
                continue
            outgrown = True
            if param.schema.kinds and param.slices[0].stepped:
                raise StateSchemaError(
                    f"param_groups[{param.group}]",
                    reason=f"its options now need {missing}, but {param.fqn} was already updated "
                    "without",
                    remedy="set options such as amsgrad or momentum before the first step",
                )
        return outgrown

    def schema(self, param: ParamState, values: dict[str, Any]) -> Schema:
        """Return the schema of ``param`` in a group of these values."""
        return self._schema(values, param.compute_dtype, on_host=param.lane == "host")


def missing_kinds(param: ParamState, schema: Schema) -> list[str]:
    """List entries of ``schema`` that are not reserved for ``param``, sorted."""
    if schema is param.schema:
        return []
    reserved = {kind.name for kind in param.schema.kinds}
    return sorted(kind.name for kind in schema.kinds if kind.name not in reserved)


def _sharing_memory(parameters: Iterable[Tensor]) -> set[Tensor]:
    spans = []
    for parameter in parameters:
        shard = dtensor.with_history(parameter)
        if type(shard) in (Tensor, nn.Parameter) and shard.layout is torch.strided:
            storage, offset = dtensor.memory_of(parameter)
            start = offset * shard.itemsize
            spans.append((storage, start, start + shard.nbytes, parameter))
    found: set[Tensor] = set()
    before, reached, last = 0, 0, None
    for storage, start, stop, parameter in sorted(spans, key=lambda span: span[:2]):
        if last is not None and storage == before and start < min(stop, reached):
            found |= {last, parameter}
        if storage != before or stop > reached:
            before, reached, last = storage, stop, parameter
    return found
