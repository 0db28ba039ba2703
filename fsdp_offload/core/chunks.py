"""Answers to DCP for shards that are cut elsewhere than their placements say.

``torch.distributed.checkpoint`` asks a tensor three things: what to write
(``__create_write_items__``), what it holds (``__create_chunk_list__``) and for the data of one
chunk (``__get_tensor_shard__``). A DTensor answers from its mesh and placements, which know torch's
even cuts only. A shard cut elsewhere gets the answers as attributes, which DCP finds first.

The answers hold the shard and plain numbers, so they follow it through pickle, ``copy.deepcopy``,
``torch.save`` and the staging of ``dcp.async_save``. They do *not* follow ``detach()``, ``clone()``
or ``to()``, which make other tensors: attach last. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

CHUNK_LIST: Final = "__create_chunk_list__"
TENSOR_SHARD: Final = "__get_tensor_shard__"
WRITE_ITEMS: Final = "__create_write_items__"


@dataclass(frozen=True)
class ChunkAnswer:
    """Answers one of DCP's questions: ``shard`` is the box at ``offsets`` of a tensor of ``shape``.

    Args:
        question: name of DCP's attribute.
        shard: contiguous, any dtype and device.
        shape: shape of the global tensor.
        offsets: index of the first element, per dim.
        writes: whether this rank saves it; exactly one of several replicas does.
    """

    question: str
    shard: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    writes: bool

    def __call__(self, *args: Any) -> Any:
        if self.question == CHUNK_LIST:
            return self._chunks()
        if self.question == WRITE_ITEMS:
            return self._write_items(args[0])
        offset = args[0].offset
        if offset is not None and tuple(offset) != self.offsets:
            raise ValueError(f"{args[0].fqn}: no chunk of this rank starts at {offset}")
        return self.shard.detach()

    def _chunks(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        # For a tensor without elements, every rank has the one chunk that loads ask for.
        sizes = self.shape if 0 in self.shape else tuple(self.shard.shape)
        if 0 in sizes and 0 not in self.shape:
            return []  # an empty shard of a tensor that has elements
        return [ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(sizes))]

    def _write_items(self, fqn: str) -> list[Any]:
        from torch.distributed.checkpoint import planner
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

        properties = TensorProperties.create_from_tensor(self.shard)
        return [
            planner.WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, properties, torch.Size(self.shape)),
            )
            for chunk in (self._chunks() if self.writes else ())
        ]


# The answers travel with the tensors of a state dict, which is loaded with weights_only=True.
torch.serialization.add_safe_globals([ChunkAnswer])


def attach_chunk(
    tensor: Tensor,
    shard: Tensor,
    shape: Sequence[int],
    offsets: Sequence[int],
    *,
    writes: bool = True,
) -> Tensor:
    """Make ``tensor`` answer DCP that this rank holds ``shard``, the box at ``offsets`` of a tensor
    of ``shape``; changed in place and returned. See :class:`ChunkAnswer`.

    DCP loads only into a tensor whose ``size()`` is ``shape``, such as a DTensor.
    """
    for question in (CHUNK_LIST, TENSOR_SHARD, WRITE_ITEMS):
        answer = ChunkAnswer(question, shard, tuple(shape), tuple(offsets), writes)
        setattr(tensor, question, answer)
    return tensor


def chunks_of(tensor: Tensor) -> list[ChunkStorageMetadata] | None:
    """Read the chunks of an attached answer, ours or another library's, without empty ones;
    ``None`` without an answer."""
    answer = getattr(tensor, "__dict__", {}).get(CHUNK_LIST)
    return None if answer is None else [chunk for chunk in answer() if 0 not in chunk.sizes]
