"""Tensors that answer ``torch.distributed.checkpoint`` (DCP) for a ragged shard.

DCP asks a tensor three things: what to write (``__create_write_items__``), what it holds
(``__create_chunk_list__``) and for the data of one of these chunks (``__get_tensor_shard__``). A
DTensor answers from its mesh and placements, which know torch's even cuts only. For a shard cut
elsewhere the answers are given by instance attributes, which DCP's lookup finds first.

They hold the shard and plain numbers, so they follow it through pickle, ``copy.deepcopy``,
``torch.save`` and the staging of ``dcp.async_save``. They do *not* follow ``detach()``, ``clone()``
or ``to()``, which make other tensors: attach last. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .chunks import Box, flat_boxes

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["attach_boxes", "attach_ragged", "boxes_of", "is_ours"]

_CHUNK_LIST = "__create_chunk_list__"


@dataclass(frozen=True)
class _Holding:
    """``shard`` is the concatenation of ``boxes`` of a tensor of ``shape``."""

    shard: Tensor
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    writes: bool


@dataclass(frozen=True)
class WriteItems:
    """``__create_write_items__``: one item per box, on the rank that writes them."""

    held: _Holding

    def __call__(self, fqn: str, _: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import (
            TensorWriteData,
            WriteItem,
            WriteItemType,
        )

        if not self.held.writes:
            return []
        properties = TensorProperties.create_from_tensor(self.held.shard)
        size = torch.Size(self.held.shape)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in _chunks(self.held.boxes)
        ]


@dataclass(frozen=True)
class ChunkList:
    """``__create_chunk_list__``: the boxes, on every replica."""

    held: _Holding

    def __call__(self) -> list[ChunkStorageMetadata]:
        return _chunks(self.held.boxes)


@dataclass(frozen=True)
class TensorShard:
    """``__get_tensor_shard__``: a view of the shard in the shape of the box asked for."""

    held: _Holding

    def __call__(self, index: MetadataIndex) -> Tensor:
        offset = index.offset
        flat = self.held.shard.detach().view(-1)
        start = 0
        for box in self.held.boxes:
            if offset is None or tuple(offset) == box.offsets:
                return flat[start : start + box.numel].view(box.sizes)
            start += box.numel
        raise ValueError(f"{index.fqn}: no chunk of this rank starts at {offset}")


def _chunks(boxes: Sequence[Box]) -> list[ChunkStorageMetadata]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in boxes]


# The answers travel with the tensors of a state dict, which is loaded with weights_only=True.
torch.serialization.add_safe_globals([Box, _Holding, WriteItems, ChunkList, TensorShard])


def attach_boxes(
    tensor: Tensor, shard: Tensor, shape: Sequence[int], boxes: Sequence[Box], *, writes: bool
) -> Tensor:
    """Make ``tensor`` answer DCP that this rank holds ``boxes`` of a tensor of ``shape``.

    Args:
        tensor: what stands in the state dict, changed in place and returned. DCP loads only into a
            tensor whose ``size()`` is ``shape``, such as a DTensor; a plain one can be saved.
        shard: contiguous, any dtype and device; the boxes one after the other, each row-major.
        shape: of the global tensor.
        boxes: disjoint, none empty, as many elements as ``shard``; may be none.
        writes: whether this rank saves them; exactly one of several replicas does.
    """
    assert shard.is_contiguous(), shard.stride()
    assert shard.numel() == sum(box.numel for box in boxes), (shard.shape, boxes)
    if 0 in shape:  # nobody holds an element, and yet loads ask for the entry
        boxes = [Box(tuple(0 for _ in shape), tuple(shape))]
    held = _Holding(shard, tuple(shape), tuple(boxes), writes)
    answers: dict[str, Any] = {
        "__create_write_items__": WriteItems(held),
        _CHUNK_LIST: ChunkList(held),
        "__get_tensor_shard__": TensorShard(held),
    }
    for name, answer in answers.items():
        setattr(tensor, name, answer)
    return tensor


def attach_ragged(
    tensor: Tensor,
    shard: Tensor,
    shape: Sequence[int],
    start: int,
    stop: int,
    *,
    writes: bool = True,
) -> Tensor:
    """:func:`attach_boxes` for elements ``[start, stop)`` of the whole tensor, row-major."""
    return attach_boxes(tensor, shard, shape, flat_boxes(shape, start, stop), writes=writes)


def boxes_of(tensor: Tensor) -> tuple[Box, ...] | None:
    """The boxes that an attached answer tells, ours or another library's; None without one.

    Empty boxes are left out.
    """
    answer = getattr(tensor, "__dict__", {}).get(_CHUNK_LIST)
    if answer is None:
        return None
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in answer()]
    return tuple(box for box in boxes if box.numel)


def is_ours(tensor: Tensor) -> bool:
    """Whether the answer was attached here, so that the boxes are in the order of the shard."""
    return isinstance(getattr(tensor, "__dict__", {}).get(_CHUNK_LIST), ChunkList)
