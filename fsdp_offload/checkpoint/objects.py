"""Objects between ranks, pickled into tensors of bytes on the CPU.

torch has the same (``gather_object`` and others), but makes objects of what it receives by way of
numpy, which neither torch nor this package requires. What follows the end of a pickle is ignored
when it is read, so shorter ones are filled up and sent at one length.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather(value: object, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks, on all of them."""
    mine, sizes = _packed_for_all(value, group)
    buffers = [bytearray(len(mine)) for _ in sizes]
    dist.all_gather([_bytes_of(buffer) for buffer in buffers], _bytes_of(mine), group=group)
    return [pickle.loads(buffer) for buffer in buffers]


def gather(value: object, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks, on the group's first one; nothing elsewhere."""
    mine, sizes = _packed_for_all(value, group)
    is_first = dist.get_rank(group) == 0
    buffers = [bytearray(len(mine)) for _ in sizes] if is_first else []
    received = [_bytes_of(buffer) for buffer in buffers] if is_first else None
    dist.gather(_bytes_of(mine), received, group=group, group_dst=0)
    return [pickle.loads(buffer) for buffer in buffers]


def broadcast(value: object, group: dist.ProcessGroup | None) -> Any:
    """The value of the group's first rank, on all of them."""
    mine = _packed(value) if dist.get_rank(group) == 0 else bytearray()
    buffer = mine + bytearray(_size_of_first(len(mine), group) - len(mine))
    dist.broadcast(_bytes_of(buffer), group=group, group_src=0)
    return pickle.loads(buffer)


def scatter(values: Sequence[object] | None, group: dist.ProcessGroup | None) -> Any:
    """This rank's of ``values``, one for each rank, which the group's first one has."""
    packed = [_packed(value) for value in values or ()]
    size = _size_of_first(max(map(len, packed), default=0), group)
    parts = [_bytes_of(each.ljust(size, b"\0")) for each in packed] or None
    buffer = bytearray(size)
    dist.scatter(_bytes_of(buffer), parts, group=group, group_src=0)
    return pickle.loads(buffer)


def _packed(value: object) -> bytearray:
    return bytearray(pickle.dumps(value))


def _packed_for_all(
    value: object, group: dist.ProcessGroup | None
) -> tuple[bytearray, Sequence[int]]:
    """The value, as long as the longest one of all ranks; and the size of each."""
    mine = _packed(value)
    found = torch.empty(dist.get_world_size(group), 1, dtype=torch.int64)
    dist.all_gather([*found], torch.tensor([len(mine)]), group=group)
    sizes = found.flatten().tolist()
    return mine.ljust(max(sizes), b"\0"), sizes


def _size_of_first(size: int, group: dist.ProcessGroup | None) -> int:
    told = torch.tensor([size])
    dist.broadcast(told, group=group, group_src=0)
    return int(told)


def _bytes_of(buffer: bytearray) -> Tensor:
    """Shares the memory."""
    return torch.frombuffer(buffer, dtype=torch.uint8)
