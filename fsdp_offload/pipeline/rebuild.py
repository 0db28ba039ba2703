"""Shards made again from whole masters: nobody has to keep them while a model is away.

[Note: which shards]
A shard is the rounding of its whole master (host lane, fp16 shards), unless somebody wrote into it
since the last update. In the host lane its checksum says so; there, and for all other shards, which
are compared by value, the master follows the write, as it would at the next update. What does not
round to the shard even then (a NaN with bits of its own) is not listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from .. import shards
from ..moving.whereabouts import here, twin
from . import codec
from .host import HostBucket
from .records import MasterForm, Record
from .state import follow_shard

CHUNK_NUMEL: Final = 4 << 20
"""Masters that are on the device at a time while they are rounded: 16 MiB of fp32."""


def rebuildable(
    records: Sequence[Record], buckets: Iterable[HostBucket], *, trusted: bool
) -> list[Record]:
    """Records whose shards :func:`write_shard` gives again, bit for bit.

    Masters follow what was written into shards. No update is under way.

    Args:
        records: all.
        buckets: of the host lane.
        trusted: masters have not been written by others than updates and loads.
    """
    doubtful: set[int] = set()
    for bucket in buckets:
        if int(bucket.observe()) != int(bucket.expected):
            bucket.reseed()
            bucket.trust_shards()
            doubtful.update(bucket.indices)
    found = []
    for record in records:
        if record.form is not MasterForm.WHOLE:
            continue
        if record.lane != "host":
            follow_shard(record)
        is_sure = record.lane == "host" and trusted and record.index not in doubtful
        if is_sure or _is_rounding(record):
            found.append(record)
    return found


def _is_rounding(record: Record) -> bool:
    """Whether the master rounds to the shard as it is."""
    values = rounded(record)
    shard = here(shards.local(record.parameter)).to(values.device)
    return torch.equal(_bits(values), _bits(shard))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def rounded(record: Record) -> Tensor:
    """The shard's values from the master, in the shard's shape: the master itself where the dtypes
    are equal, else a copy. Where the master is, in host memory unless it is resident."""
    master = record.tensors[MasterForm.WHOLE.value]
    values = master
    if record.info.dtype != master.dtype:
        values = torch.empty_like(master, dtype=record.info.dtype)
        _round(master, values)
    return values.view(record.info.local_shape)


def _round(master: Tensor, value: Tensor) -> None:
    """``value[:] = master``, as updates round. 1-D, on one device."""
    if value.dtype == torch.bfloat16 and master.dtype == torch.float32:
        codec.round_to_value(master, value)
    else:
        value.copy_(master)


def write_shard(record: Record) -> None:
    """Write a shard from its master, on the current stream; the master stays as it is until then.

    A shard that is away is written in host memory.
    """
    master = record.tensors[MasterForm.WHOLE.value]
    shard = here(shards.local(record.parameter)).view(-1)
    if shard.dtype == master.dtype:
        shard.copy_(master, non_blocking=True)
        return
    for value, part in zip(shard.split(CHUNK_NUMEL), master.split(CHUNK_NUMEL), strict=True):
        _round(part.to(shard.device, non_blocking=True), value)


def place_of(record: Record) -> Callable[[], Tensor]:
    """What :func:`.moving.whereabouts.left` is given for a shard that nobody keeps: makes the
    bytes of its storage, zeros around the shard."""
    shard = shards.local(record.parameter)
    n_bytes = shard.untyped_storage().nbytes()

    def make() -> Tensor:
        made = torch.zeros(n_bytes, dtype=torch.uint8, device="cpu")
        twin(shard, made).copy_(rounded(record))
        return made

    return make
