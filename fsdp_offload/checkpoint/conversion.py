"""Masters that a checkpoint holds in another form than the optimizer keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from .. import shards
from ..pipeline import codec


@dataclass(frozen=True)
class Conversion:
    """Stands for a tensor while a checkpoint is read; converts piece by piece.

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
        return shards.chunk_list(self.kept)

    def scratch(self, item: ReadItem) -> Tensor:
        """Memory for the elements of one read: as stored, on the CPU."""
        return torch.empty(item.lengths, dtype=self.dtype)

    def apply(self, item: ReadItem, read: Tensor) -> None:
        """Convert ``read`` and write it where it belongs."""
        weight, kept = self._piece(self.weight, item), self._piece(self.kept, item)
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
    def _piece(tensor: Tensor, item: ReadItem) -> Tensor:
        found: Any = shards.chunk(tensor, item.dest_index)
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            found = found.narrow(dim, start, length)
        return found  # type: ignore[no-any-return]
