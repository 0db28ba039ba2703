"""What a local snapshot holds of one rank's job: live memory, numbers, and a table of topology."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .. import shards
from ..core.storage import present
from ..device_state import unrecorded
from ..errors import ConfigError, UnsupportedParameterError
from ..optimizer import HybridDeviceOptimizer
from ..pipeline.records import Record
from ..plan.layout import align
from ..wrapping import modules_of
from .local_file import PAGE_BYTES, Entry
from .team import Team

Table = dict[str, Any]


class Job:
    """Model and optimizer as a snapshot sees them: memory, and a table that must be equal."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: HybridDeviceOptimizer,
        team: Team,
    ) -> None:
        self.optimizer, self.team = optimizer, team
        self.models = modules_of(model)
        self.names = optimizer._inventory.names
        for module in (m for each in self.models for m in each.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()  # else an evaluation leaves whole parameters in the root
        pairs = list(self._model_tensors())
        _check_unique([name for name, _ in pairs])
        _check_unique([self.names[p] for g in optimizer.param_groups for p in g["params"]])
        tensors = dict(pairs)
        self.entries = [*self._arenas(), *self._resident()]
        for name, tensor in tensors.items():
            self.entries += _dense(f"model.{name}", tensor)
        self.topology: Table = {
            "world_size": team.size,
            "rank": team.rank,
            "optimizer": _class_name(optimizer._inner),
            "groups": [[self.names[p] for p in g["params"]] for g in optimizer.param_groups],
            "model": {name: _tensor_table(tensor) for name, tensor in tensors.items()},
            "state": {record.fqn: _record_table(record) for record in optimizer._records},
            "arenas": self._places(),
            "modules_with_extra_state": sorted(self._stateful_modules()),
        }

    def _arenas(self) -> Iterator[Entry]:
        """One tensor each, at whole pages of the file."""
        for index, segment in enumerate(self.optimizer._segments):
            if n_bytes := segment.host_bytes:
                yield Entry(f"arena.{index}", segment.arenas[0].tensor(0, n_bytes, torch.uint8))
                gap = torch.zeros(align(n_bytes, PAGE_BYTES) - n_bytes, dtype=torch.uint8)
                yield Entry(f"arena.{index}.gap", gap)

    def _places(self) -> list[Table]:
        """Per arena its bytes, and where each state tensor lies in it."""
        places: list[Table] = []
        for segment in self.optimizer._segments:
            n_bytes, offsets = segment.host_bytes, {}
            start = segment.arenas[0].tensor(0, 1, torch.uint8).data_ptr() if n_bytes else 0
            for record in self.optimizer._records:
                for name, tensor in record.tensors.items():
                    if 0 <= (offset := tensor.data_ptr() - start) < n_bytes:
                        offsets[f"{record.fqn}.{name}"] = offset
            places.append({"n_bytes": n_bytes, "offsets": offsets})
        return places

    def _resident(self) -> Iterator[Entry]:
        for record in self.optimizer._records:
            if record.lane == "resident":
                for name, tensor in record.tensors.items():
                    # Scales of blocks have no shape of their own.
                    is_like = tensor.numel() == record.info.local_numel
                    shaped = tensor.view(record.info.local_shape) if is_like else tensor
                    yield Entry(f"state.{record.fqn}.{name}", shaped)

    def _model_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, buffers that a state dict has, and parameters that no module holds."""
        seen: set[Tensor] = set()
        for index, module in enumerate(self.models):
            prefix = f"{index}." if len(self.models) > 1 else ""
            unsaved = set(_unsaved_buffers(module))
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if tensor not in seen and name not in unsaved:
                    seen.add(tensor)
                    yield prefix + name, tensor
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in seen:
                    yield f"optimizer's.{self.names[parameter]}", parameter

    def _stateful_modules(self) -> dict[str, nn.Module]:
        return {
            f"{index}.{name}": module
            for index, each in enumerate(self.models)
            for name, module in each.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def values(self) -> Table:
        """What is no tensor of a record: small, JSON alone."""
        return {
            record.fqn: {
                "stepped": record.pieces[0].stepped,
                "updates": record.pieces[0].updates,
                "scalars": {
                    kind.name: encode_number(record.pieces[0].state[kind.name])
                    for kind in record.schema.kinds
                    if kind.role in ("scalar", "number")
                },
            }
            for record in self.optimizer._records
        }

    def set_values(self, values: Table) -> None:
        """The opposite of :meth:`values`, once shards and arenas are filled."""
        for record in self.optimizer._records:
            saved = values[record.fqn]
            for piece in record.pieces:
                piece.stepped, piece.updates = saved["stepped"], saved.get("updates", 0)
                for name, number in saved["scalars"].items():
                    if isinstance(target := piece.state[name], Tensor):
                        target.fill_(decode_number(number))
                    else:
                        piece.state[name] = decode_number(number)

    def objects(self, extra: Any) -> dict[str, Any]:
        """What needs pickle: group values, native state that is no tensor, the caller's own."""
        return {
            "param_groups": [
                {n: v for n, v in group.items() if n not in ("params", "param_names")}
                for group in self.optimizer.param_groups
            ],
            "native": {
                self.names[p]: {n: v for n, v in state.items() if not isinstance(v, Tensor)}
                for p, state in self.unrecorded()
            },
            "modules": {n: m.get_extra_state() for n, m in self._stateful_modules().items()},
            "extra": extra,
        }

    def set_module_states(self, saved: Mapping[str, Any]) -> None:
        """Of modules with state of their own kind, such as fp8 scales."""
        for name, module in self._stateful_modules().items():
            module.set_extra_state(saved[name])

    def unrecorded(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """Native parameters, and frozen ones, that have state."""
        found = unrecorded(self.optimizer._records, self.optimizer._shown)
        return [(p, state) for p, state in found if state]

    def native_entries(self) -> tuple[list[Entry], list[Table]]:
        """Tensors of :meth:`unrecorded`, and how to make them again."""
        entries: list[Entry] = []
        made: list[Table] = []
        for parameter, state in self.unrecorded():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    fqn = self.names[parameter]
                    entry = f"state.{fqn}.{name}"
                    entries += _dense(entry, _plain_local(value, entry))
                    made.append(
                        {
                            "entry": entry,
                            "fqn": fqn,
                            "name": name,
                            "on_host": value.device.type == "cpu",
                            **_tensor_table(value),
                        }
                    )
        return entries, made


def _check_unique(names: list[str]) -> None:
    """Refuse names that stand for two tensors.

    Raises:
        ConfigError: one does.
    """
    for name, count in Counter(names).most_common(1):
        if count > 1:
            raise ConfigError(
                f"{count} tensors of the name {name}",
                reason="a snapshot finds tensors by their names",
                remedy="give every parameter and module a name of its own",
            )


def _class_name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _record_table(record: Record) -> Table:
    return {
        "lane": record.lane,
        "master": record.form.value,
        "dtype": str(record.info.dtype),
        "compute_dtype": str(record.compute_dtype),
        "kinds": {kind.name: f"{kind.role}, {kind.dtype}" for kind in record.schema.kinds},
        **({"moments": {m.name: str(m.dtype) for m in record.moments}} if record.moments else {}),
    }


def _tensor_table(tensor: Tensor) -> Table:
    """Shapes, dtype and placement, as JSON gives them back."""
    table: Table = {"global_shape": list(tensor.shape), "dtype": str(tensor.dtype), "mesh": None}
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        table["mesh"] = list(mesh.shape)
        table["coordinate"] = list(mesh.get_coordinate() or ())
        table["placements"] = [placement_text(placement) for placement in tensor.placements]
        table["stride"] = list(tensor.stride())
    return {**table, "local_shape": list(shards.local(tensor).shape)}


def placement_text(placement: Any) -> str:
    """The same in every version of torch, unlike ``repr``."""
    names = ("dim", "split_factor", "reduce_op")
    found = [str(value) for n in names if (value := getattr(placement, n, None)) is not None]
    return " ".join([type(placement).__name__, *found])


def placement(text: str) -> Shard | Replicate | Partial:
    """The placement that :func:`placement_text` tells of; strided ones are not made by hand."""
    name, *values = text.split()
    if name == "Shard":
        return Shard(int(values[0]))
    return Partial(values[0]) if name == "Partial" else Replicate()


def _unsaved_buffers(module: nn.Module) -> Iterator[str]:
    """Buffers with ``persistent=False``: the model makes them anew."""
    for prefix, each in module.named_modules():
        for name in each._non_persistent_buffers_set:
            yield f"{prefix}.{name}" if prefix else name


def _dense(name: str, tensor: Tensor) -> Iterator[Entry]:
    """The memory behind a tensor: its shard, or the dense tensors that a subclass is made of.

    Raises:
        UnsupportedParameterError: it has no such memory.
    """
    shard = shards.local(tensor)
    if type(shard) in (Tensor, nn.Parameter) and shard.layout is torch.strided:
        shard = present(shard)
        if shard.device.type == "meta":
            raise _unreadable(name, shard, "it is on the meta device")
        contiguous = shard.is_contiguous()
        yield Entry(name, shard.contiguous(), None if contiguous else shard)
    elif hasattr(shard, "__tensor_flatten__"):
        for inner in shard.__tensor_flatten__()[0]:
            yield from _dense(f"{name}.{inner}", getattr(shard, inner))
    else:
        raise _unreadable(name, shard, "it is no dense tensor, nor made of dense tensors")


def _plain_local(value: Tensor, name: str) -> Tensor:
    """A shard that a load can make again from its table."""
    shard = shards.local(value)
    if type(shard) not in (Tensor, nn.Parameter):
        raise _unreadable(name, shard, "state of a tensor subclass cannot be made again")
    if isinstance(value, DTensor) and any(type(p).__name__[0] == "_" for p in value.placements):
        raise _unreadable(name, shard, f"its placements are {value.placements}")
    return shard


def _unreadable(name: str, tensor: Tensor, reason: str) -> UnsupportedParameterError:
    return UnsupportedParameterError(
        f"{name} of type {type(tensor).__name__}",
        reason=reason,
        remedy="save this job with torch.distributed.checkpoint",
    )


def encode_number(value: Any) -> Any:
    """A state number, or a 0-dim tensor, as JSON that gives every bit back."""
    number = value.item() if isinstance(value, Tensor) else value
    if isinstance(number, complex):
        return {"complex": [encode_number(number.real), encode_number(number.imag)]}
    if isinstance(number, float) and not math.isfinite(number):
        return {"float": str(number)}
    return number


def decode_number(value: Any) -> Any:
    """The opposite of :func:`encode_number`."""
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return float(value["float"])
    return complex(*(decode_number(part) for part in value["complex"]))


def first_difference(saved: Any, here: Any, where: str = "") -> tuple[str, Any, Any] | None:
    """The first place where two tables differ: (where, saved, here)."""
    if isinstance(saved, dict) and isinstance(here, dict):
        for name in [*here, *(n for n in saved if n not in here)]:
            absent = "nothing"
            below = f"{where}, {name}" if where else name
            found = first_difference(saved.get(name, absent), here.get(name, absent), below)
            if found:
                return found
        return None
    return None if saved == here else (where, saved, here)
