"""Planners for ``dcp.save`` and ``dcp.load``: flat keys, and no code of their own in values."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem, WriteItemType

from ..core import dtensor
from ..core.errors import CheckpointError, ConfigError
from ..update import codec
from .files import typed
from .reader import Reader
from .state import EXTRA, decode, encode


class FlatSavePlanner(DefaultSavePlanner):
    """torch's planner, for sections of which each is flat already.

    Args:
        collect: gives the sections, and ``extra`` as bytes; called in DCP's local step, so that an
            error of it is raised on all ranks.
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
        """Flatten the sections, but nothing in them: an option may be a dict."""
        with typed():
            sections = dict(self._collect())
        if not is_coordinator:
            sections.pop(EXTRA, None)
        flat: dict[str, Any] = {}
        for section, values in sections.items():
            for key, value in values.items() if section != EXTRA else (("", values),):
                name = f"{section}.{key}" if key else section
                flat[name] = value
                self.mappings[name] = (section, key) if key else (section,)
        self.state_dict, self.is_coordinator = flat, is_coordinator

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
    """torch's planner for a flat dict; no code is run for values, and some are converted."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.sliced: frozenset[str] = frozenset()  # what Reader asks for

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take ``state_dict`` as it is."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator
        self.sliced = frozenset(k for k, v in state_dict.items() if isinstance(v, Conversion))

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

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where the elements go: the live tensor, or memory for a slice to be converted."""
        target = self.state_dict[read_item.dest_index.fqn]
        if isinstance(target, Conversion):
            return target.scratch(read_item)
        found: Tensor = super().resolve_tensor(read_item)
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Convert what has been read."""
        target = self.state_dict[read_item.dest_index.fqn]
        if isinstance(target, Conversion):
            target.apply(read_item, tensor)


def read_values(reader: Reader, keys: Sequence[str]) -> dict[str, Any]:
    """Values that are no tensors, and small tensors, by key. No collective."""
    stored = reader.metadata.state_dict_metadata
    values: dict[str, Any] = {}
    for key in keys:
        entry = stored[key]
        values[key] = None
        if isinstance(entry, TensorStorageMetadata):
            values[key] = torch.zeros(entry.size, dtype=entry.properties.dtype)
    planner = FlatLoadPlanner()
    planner.set_up_planner(values, reader.metadata)
    reader.read_data(planner.create_local_plan(), planner)
    return values


@dataclass(frozen=True)
class Conversion:
    """Stands for a tensor while a checkpoint is read: a master that is kept in another form.

    Args:
        weight: the parameter's shard, as a tensor placed like the parameter.
        kept: what the optimizer keeps, placed likewise: the remainder (bf16), the whole master
            (fp32), or the weight itself (fp32 shards).
        dtype: of what the checkpoint holds: bf16, a remainder, or fp32, a whole master.

    A whole master (or a weight that was saved in fp32) becomes weight and remainder, or weight and
    whole master; a remainder and the weight become a whole master, or, rounded to bf16 first, the
    fp32 weight.
    """

    weight: Tensor
    kept: Tensor
    dtype: torch.dtype

    def size(self) -> torch.Size:
        """Global shape."""
        return self.kept.size()

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What this rank needs (protocol of DCP's planner)."""
        return dtensor.chunk_list(self.kept)

    def scratch(self, item: ReadItem) -> Tensor:
        """Memory for the elements of one read: as stored, on the CPU."""
        return torch.empty(item.lengths, dtype=self.dtype)

    def apply(self, item: ReadItem, read: Tensor) -> None:
        """Convert ``read`` and write it where it belongs."""
        weight, kept = self._slice(self.weight, item), self._slice(self.kept, item)
        flat = read.reshape(-1)
        if self.dtype == torch.bfloat16:
            rounded = weight.cpu().to(torch.bfloat16).reshape(-1)
            master = torch.empty(flat.numel(), dtype=torch.float32)
            codec.decode(rounded, flat, master)
            kept.copy_(master.view(read.shape))
            return
        if weight.dtype != torch.bfloat16:  # fp16 shards have a whole master
            weight.copy_(read)
            kept.copy_(read)
            return
        value = torch.empty(flat.numel(), dtype=torch.bfloat16)
        remainder = torch.empty_like(value)
        codec.encode(flat, value, remainder)
        weight.copy_(value.view(read.shape))
        kept.copy_(remainder.view(read.shape) if kept.dtype == torch.bfloat16 else read)

    @staticmethod
    def _slice(tensor: Tensor, item: ReadItem) -> Tensor:
        found: Any = dtensor.chunk(tensor, item.dest_index)
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            found = found.narrow(dim, start, length)
        return found  # type: ignore[no-any-return]
