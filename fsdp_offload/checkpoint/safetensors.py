"""Read and write safetensors files, in folders like those of Hugging Face's libraries.

A file is a header (JSON: dtype, shape and bytes of each tensor), then elements without gaps. A
model is one file, or several with an index. DCP's metadata describe them as well as a checkpoint:
each tensor is one chunk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ..core.errors import CheckpointError
from .files import corrupt
from .rule import MODEL_PREFIX

SUFFIX: Final = ".safetensors"
INDEX: Final = "model.safetensors.index.json"
CODES: Final = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.uint16: "U16", torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64",
    torch.uint64: "U64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


class File:
    """One file: a header, then tensors (given on the meta device, by FQN) without gaps."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.name = name
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
        at = 0
        for fqn, t in tensors.items():
            span = [at, at := at + t.nbytes]
            table[fqn] = {"dtype": CODES[t.dtype], "shape": t.shape, "data_offsets": span}
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self.header) + at
        starts = {fqn: len(self.header) + table[fqn]["data_offsets"][0] for fqn in tensors}
        self.places = {fqn: (starts[fqn], tensor) for fqn, tensor in tensors.items()}


def plan_files(tensors: Mapping[str, Tensor], max_bytes: int) -> list[File]:
    """Cut tensors, in their order, into files of at most ``max_bytes`` of elements.

    A larger tensor gets a file of its own. In a file the widest dtypes come first, so that every
    tensor begins at a multiple of its element's size.
    """
    batches: list[dict[str, Tensor]] = [{}]
    filled = 0
    for fqn, tensor in tensors.items():
        if batches[-1] and filled + tensor.nbytes > max_bytes:
            batches.append({})
            filled = 0
        batches[-1][fqn] = tensor
        filled += tensor.nbytes
    count, files = len(batches), []
    for index, batch in enumerate(batches, 1):
        stem = f"model-{index:05d}-of-{count:05d}" if count > 1 else "model"
        ordered = dict(sorted(batch.items(), key=lambda item: -item[1].itemsize))
        files.append(File(f"{stem}.safetensors", ordered))
    return files


def read_folder(path: Path) -> Metadata | None:
    """Describe the tensors of a folder, under the prefix of a checkpoint's weights.

    Returns:
        ``None`` if the folder has no such file.

    Raises:
        CheckpointError: the folder has several models, or a tensor of a dtype unknown to torch.
        CheckpointCorruptError: a file is missing, or not what its header says.
    """
    files = _files_of(path)
    metadata = Metadata({}, storage_data={})
    for file in files:
        for name, (tensor, at) in _tensors_of(file).items():
            key, begin = MODEL_PREFIX + name, torch.Size([0] * tensor.dim())
            if key in metadata.state_dict_metadata:
                raise corrupt(file, f"another file contains {name}, too")
            chunks = [ChunkStorageMetadata(begin, tensor.shape)]
            metadata.state_dict_metadata[key] = TensorStorageMetadata(
                TensorProperties(tensor.dtype), tensor.shape, chunks
            )
            info = _StorageInfo(file.name, at, tensor.nbytes)
            metadata.storage_data[MetadataIndex(key, begin)] = info
    return metadata if files else None


def _files_of(path: Path) -> list[Path]:
    for pattern in (INDEX, f"model{SUFFIX}", f"*{SUFFIX}.index.json", f"*{SUFFIX}"):
        found = sorted(path.glob(pattern))
        if len(found) > 1:
            raise CheckpointError(
                f"{path} with {', '.join(file.name for file in found[:4])}",
                reason="no index lists the files of the model",
                remedy=f"keep one model per folder, and {INDEX} beside several files",
            )
        if found and found[0].suffix == SUFFIX:
            return found
        if found:
            try:
                table = json.loads(found[0].read_bytes())
                names = {str(name) for name in table["weight_map"].values()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise corrupt(found[0], f"it is not a valid index: {error!r}") from error
            if any(Path(name).name != name for name in names):
                raise corrupt(found[0], "it names files outside its folder")
            return [path / name for name in sorted(names)]
    return []


def _tensors_of(file: Path) -> dict[str, tuple[Tensor, int]]:
    """Read a header; returns each tensor, on the meta device, and the offset of its elements."""
    dtypes = {code: dtype for dtype, code in CODES.items()}
    tensors: dict[str, tuple[Tensor, int]] = {}
    try:
        with file.open("rb") as opened:
            nbytes = int.from_bytes(opened.read(8), "little")
            table = json.loads(opened.read(min(nbytes, file.stat().st_size)))
        table.pop("__metadata__", None)
        for name, entry in table.items():
            first, last = entry["data_offsets"]
            code = str(entry["dtype"])
            if code not in dtypes:
                raise CheckpointError(
                    f"{name} of dtype {code} in {file}",
                    reason="no dtype of torch is known for it",
                    remedy="convert it to BF16 with the program that wrote it",
                )
            tensor = torch.empty(entry["shape"], dtype=dtypes[code], device="meta")
            if first < 0 or last - first != tensor.nbytes:
                raise ValueError(f"{name} has {last - first} bytes from {first} on")
            tensors[name] = tensor, 8 + nbytes + first
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise corrupt(file, "it is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise corrupt(file, f"its safetensors header is invalid: {error!r}") from error
    return tensors
