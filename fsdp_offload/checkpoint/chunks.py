"""Chunk metadata by local arithmetic, as the checkpoint floor uses it.

The arithmetic itself lies two floors down, because :func:`fsdp_offload.shards.like` needs it.
"""

from __future__ import annotations

from ..chunks import Box, covers, flat_boxes
from ..ragged import attach_boxes, attach_ragged

__all__ = ["Box", "attach_boxes", "attach_ragged", "covers", "flat_boxes"]
