"""The weights in a checkpoint, for an export: one process, no model, no process group."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..chunks import Box
from ..errors import CheckpointError
from .blocks import as_bytes
from .export_files import Source, split
from .export_plan import Found, file_dtype, some
from .folder import check_files, resolve
from .naming import Stored, find_stored
from .reader import PIECE_BYTES, CheckpointReader, check_chunks, read_metadata

_log = logging.getLogger("fsdp_offload")


def open_checkpoint(
    path: Path,
    wanted: torch.dtype | None,
    model_prefix: str | None,
    optimizer_prefix: str | None,
) -> Source:
    """The weights and their masters.

    Host memory while they are read: of files of this package ``PIECE_BYTES`` of each per thread; of
    files that torch wrote the largest chunk of each twice, on one thread.

    Raises:
        CheckpointError: there is no checkpoint, weights are missing, several models fit, or it is
            not told whose masters they are.
        CheckpointCorruptError: a file is not as it was written.
    """
    folder = resolve(path.absolute())
    manifest = check_files(folder)
    metadata = read_metadata(folder)
    check_chunks(folder, metadata)
    tensors = {
        key: each
        for key, each in metadata.state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }
    others = metadata.state_dict_metadata.keys() - tensors.keys()
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    stored = find_stored(tensors, others, paths, model_prefix, optimizer_prefix)
    if wanted == torch.float32:
        _check_masters(folder, stored, tensors)
    reader = CheckpointReader(folder, threads=1)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    # torch loads a chunk as a whole, however little of it is wanted.
    part_numel = sys.maxsize if manifest is None else PIECE_BYTES // 4
    boxes = {fqn: _boxes_in(tensors[key]) for fqn, key in stored.weights.items()}
    tied = _tied_in(reader, stored, tensors, boxes, part_numel)
    found, masters = [], {}
    for fqn, key in stored.weights.items():
        dtype = tensors[key].properties.dtype
        is_weight = not stored.trained or fqn in stored.trained or fqn in tied
        written = file_dtype(fqn, dtype, wanted, is_weight=is_weight)
        master = stored.masters.get(tied.get(fqn, fqn))
        if master is not None and written != dtype:
            masters[fqn] = master
        found.append(Found(fqn, tuple(tensors[key].size), written, tied.get(fqn), boxes[fqn]))

    def read(fqn: str, _: Box, part: Box) -> tuple[Tensor, Tensor | None]:
        master = masters.get(fqn)
        weight = reader.read_box(stored.weights[fqn], part)
        return weight, None if master is None else reader.read_box(master, part)

    return Source(found, read, part_numel, threads=1 if manifest is None else None)


def _check_masters(
    folder: Path, stored: Stored, tensors: Mapping[str, TensorStorageMetadata]
) -> None:
    if stored.orphans:
        raise CheckpointError(
            f"masters {some(sorted(stored.orphans))} in {folder}",
            reason="it is not told whose they are, so fp32 weights would not be exact",
            remedy="name theirs with optimizer_prefix=, save optimizer state by FQN "
            '(get_optimizer_state_dict), or export with dtype="bf16" or None',
        )
    for fqn, key in stored.masters.items():
        weight, master = tensors[stored.weights[fqn]], tensors[key]
        if master.size != weight.size:
            raise CheckpointError(
                f"master of {fqn} with shape {tuple(master.size)} in {folder}",
                reason=f"the weight has shape {tuple(weight.size)}: they are of different models",
                remedy='export with dtype="bf16" or None, which need no masters',
            )


def _boxes_in(tensor: TensorStorageMetadata) -> tuple[Box, ...]:
    """Boxes of the chunks that hold something, each once."""
    boxes = (Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks)
    return tuple(dict.fromkeys(box for box in boxes if box.numel))


def _tied_in(
    reader: CheckpointReader,
    stored: Stored,
    tensors: Mapping[str, TensorStorageMetadata],
    boxes: Mapping[str, Sequence[Box]],
    part_numel: int,
) -> dict[str, str]:
    """Names of tied weights: a checkpoint has their elements under every name.

    The optimizer has state under the first name only; so a matrix without state that equals one
    with state, in every bit, is taken for the same weight.
    """

    def form(fqn: str) -> tuple[torch.Size, torch.dtype]:
        tensor = tensors[stored.weights[fqn]]
        return tensor.size, tensor.properties.dtype

    def equal(a: str, b: str) -> bool:
        parts = (part for box in boxes[a] for part in split(box, part_numel))
        keys = stored.weights[a], stored.weights[b]
        return all(
            torch.equal(*(as_bytes(reader.read_box(key, part)) for key in keys)) for part in parts
        )

    tied: dict[str, str] = {}
    for fqn in stored.weights.keys() - stored.trained if stored.trained else ():
        if len(form(fqn)[0]) < 2:
            continue
        for first in stored.weights:
            if first in stored.trained and form(first) == form(fqn) and equal(fqn, first):
                _log.info("%s equals %s and is taken for the same weight", fqn, first)
                tied[fqn] = first
                break
    return tied
