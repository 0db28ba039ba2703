"""The manifest of a checkpoint, and the checks of a folder against it.

A checkpoint is a folder with ``manifest.json``. A save writes it last; it names every other file
with its size and a CRC-32: that of all bytes of ``.metadata``, and that of a data file's table. A
folder is complete if its manifest is intact and all files have the sizes there; its name means
nothing.
"""

from __future__ import annotations

import copyreg
import io
import json
import pickle
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any, Final

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ..core.errors import CheckpointError
from .files import corrupt, read_table
from .safetensors import read_folder

MANIFEST: Final = "manifest.json"
METADATA: Final = ".metadata"
FORMAT: Final = "fsdp_offload.checkpoint"
VERSION: Final = 3


@dataclass(frozen=True)
class Manifest:
    """The content of a complete checkpoint."""

    time_ns: int  # completion time, since 1970; later than that of all earlier neighbours
    world_size: int  # number of ranks that wrote it
    optimizer: str  # class of the (wrapped) optimizer; empty: unknown
    files: Mapping[str, tuple[int, int]]  # bytes and CRC-32 of every file but the manifest
    format: str = FORMAT
    version: int = VERSION

    def encode(self) -> bytes:
        """Encode it as JSON with its own CRC-32."""
        text = json.dumps(asdict(self), sort_keys=True)
        return json.dumps({"crc32": zlib.crc32(text.encode()), "manifest": text}).encode()

    @classmethod
    def decode(cls, data: bytes, path: Path) -> Manifest | None:
        """Decode a file's bytes; ``None``: another program wrote them.

        Raises:
            CheckpointCorruptError: they changed after they were written.
            CheckpointError: another version wrote them, or they name files elsewhere.
        """
        try:
            outer = json.loads(data)
            # A flipped bit changes one of the two, so one still tells that a save wrote it.
            if "crc32" not in outer and FORMAT not in str(outer):
                return None
            text = outer["manifest"]
            if zlib.crc32(text.encode()) != outer["crc32"]:
                raise corrupt(path, "it changed after it was written")
            values = json.loads(text)
            if values["version"] != VERSION:
                raise CheckpointError(
                    f"{path} of version {values['version']}",
                    reason=f"this package reads version {VERSION}",
                    remedy="load it with the version of fsdp_offload that wrote it",
                )
            # A later release may add fields.
            files = {name: (int(nbytes), int(crc)) for name, (nbytes, crc, *_) in
                     values["files"].items()}  # fmt: skip
            _check_inside(path, files)
            return cls(int(values["time_ns"]), values["world_size"], values["optimizer"], files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise corrupt(path, f"it is not what a save writes: {error!r}") from error


class _MetadataPickler(pickle.Pickler):
    """Leaves out strides of tensors, which torch 2.15 writes and earlier versions do not read."""

    def reducer_override(self, value: Any) -> Any:
        """Pickle the first five fields of a tensor's properties, as torch 2.11 does."""
        if type(value) is not TensorProperties:
            return NotImplemented
        return copyreg.__newobj__, (TensorProperties,), value.__getstate__()[:5]  # type: ignore[attr-defined]


def encode_metadata(metadata: Metadata) -> bytes:
    """Encode ``.metadata``, for torch 2.11 and later."""
    buffer = io.BytesIO()
    _MetadataPickler(buffer).dump(metadata)
    return buffer.getvalue()


_DESCRIBING: Final = (
    "builtins.set", "collections.OrderedDict", "torch.Size",
    "pathlib.PosixPath", "pathlib._local.PosixPath",  # the second of Python 3.13
)  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    """Reads ``.metadata`` of any origin, and runs no code that the file names."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a constructor of a class that describes tensors.

        Raises:
            CheckpointError: the file names anything else.
        """
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda layout: {"torch.strided": torch.strided}[layout]
        # Neither functions nor classes themselves, because a pickle may set attributes on them.
        if f"{module}.{name}" in _DESCRIBING:
            plain = super().find_class(module, name)
            return lambda *values: plain(*values)
        of_dcp = {_StorageInfo.__name__: _StorageInfo, **vars(dcp_metadata)}.get(name)
        if not isinstance(of_dcp, type) or of_dcp.__module__ != module:
            what = f"{METADATA} with {module}.{name}"
            raise _suspect(what, "it is not a description of tensors, and may run code")
        return type(name, (), {"__new__": lambda _, *values: of_dcp.__new__(of_dcp, *values)})


def decode_metadata(data: bytes, path: Path) -> Metadata:
    """Decode the bytes of ``.metadata``, and run no code that they name.

    Raises:
        CheckpointError: they name a class that does not describe tensors, or a file elsewhere.
        CheckpointCorruptError: they are not a pickle of a ``Metadata``.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as error:  # changed bytes of a pickle may raise anything
        raise corrupt(path, f"it cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise corrupt(path, f"it contains a {type(metadata).__name__} instead of metadata")
    try:
        names = {info.relative_path for info in metadata.storage_data.values()}
        _check_inside(path, names)
    except (AttributeError, TypeError) as error:
        raise corrupt(path, f"it is not what a save writes: {error}") from error
    return metadata


def _check_inside(path: Path, names: Iterable[str]) -> None:
    for name in names:
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise _suspect(
                f"{path} with a file {name!r}",
                "its name leads outside the checkpoint's folder",
            )


def _suspect(what: str, reason: str) -> CheckpointError:
    """Build the error for a checkpoint that may harm its reader."""
    return CheckpointError(
        what,
        reason=reason,
        remedy="load another checkpoint; if you trust its writer, "
        "torch.distributed.checkpoint.load() reads this one",
    )


def crc_of(path: Path) -> int:
    """Return the CRC-32 for the manifest: of all bytes of ``.metadata``, else of the table."""
    if path.name == METADATA:
        return zlib.crc32(path.read_bytes())
    table = read_table(path)
    if table is None:
        raise corrupt(path, "it has no checksum table")
    return table.crc


def open_checkpoint(path: Path) -> tuple[Manifest | None, Metadata]:
    """Read and verify the manifest (``None``: another program wrote it) and the metadata, which
    headers of safetensors may be.

    Raises:
        CheckpointCorruptError: one of them changed after it was written.
        CheckpointError: there is no checkpoint.
    """
    manifest = read_manifest(path)
    try:
        data = (path / METADATA).read_bytes()
    except OSError as error:
        if manifest is not None:
            raise corrupt(path / METADATA, "it is missing") from error
        if (weights := read_folder(path)) is not None:
            return None, weights
        if names := names_in(path):
            raise CheckpointError(
                f"{path}",
                reason=f"not a checkpoint itself; it holds {', '.join(names[-3:])}",
                remedy="pass one of them",
            ) from error
        why = f"it has no {METADATA} and no safetensors: not a checkpoint, or an interrupted save"
        raise CheckpointError(
            f"{path}",
            reason=why if path.is_dir() else "it does not exist, or is no folder",
            remedy="pass the folder of a checkpoint, which checkpoint.latest() finds; load a .pt "
            "file by model.load_state_dict(torch.load(path)), also after shard()",
        ) from error
    if manifest is not None and manifest.files.get(METADATA) != (len(data), zlib.crc32(data)):
        raise corrupt(path / METADATA, "it changed after it was written")
    return manifest, decode_metadata(data, path / METADATA)


def names_in(folder: Path) -> list[str]:
    """Name the checkpoints in a folder, step-5 before step-10."""
    names = (file.parent.name for file in folder.glob(f"[!.]*/{METADATA}"))
    return sorted(names, key=lambda name: (len(name), name))


def read_manifest(path: Path) -> Manifest | None:
    """Read the manifest of a checkpoint; ``None``: another program wrote it.

    Raises:
        CheckpointCorruptError: it changed after it was written.
    """
    try:
        data = (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Manifest.decode(data, path / MANIFEST)


def check_files(path: Path, manifest: Manifest | None, metadata: Metadata) -> None:
    """Compare sizes and tables with the manifest, and chunks with tensors, before a load.

    Raises:
        CheckpointCorruptError: a file is missing, or changed after it was written.
        CheckpointError: chunks do not cover all elements.
    """
    for name, (nbytes, crc) in manifest.files.items() if manifest is not None else ():
        file = path / name
        try:
            found = file.stat().st_size
        except OSError:
            raise corrupt(file, "it is missing") from None
        if found != nbytes:
            raise corrupt(file, f"it has {found} bytes, but {nbytes} were written")
        if name != METADATA and crc_of(file) != crc:
            raise corrupt(file, "it changed after it was written, or belongs to another save")
    try:
        _check_chunks(path, metadata)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise corrupt(path / METADATA, f"it is not what a save writes: {error}") from error


def _check_chunks(path: Path, metadata: Metadata) -> None:
    sizes: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        name = info.relative_path
        if name not in sizes:
            if not (path / name).is_file():
                raise corrupt(path / name, "it is missing")
            sizes[name] = (path / name).stat().st_size
        if info.offset + info.length > sizes[name]:
            raise corrupt(path / name, f"it ends within {index.fqn}")
    for key, value in metadata.state_dict_metadata.items():
        if isinstance(value, TensorStorageMetadata):
            # torch refuses to save chunks that overlap or exceed the tensor.
            chunks = {tuple(c.offsets): c.sizes for c in value.chunks if 0 not in c.sizes}
            for offsets in chunks:
                if MetadataIndex(key, offsets) not in metadata.storage_data:
                    raise corrupt(path / METADATA, f"no file of it contains {key} at {offsets}")
            if sum(box.numel() for box in chunks.values()) != value.size.numel():
                raise CheckpointError(
                    f"{path}: {key} of shape {tuple(value.size)}",
                    reason=f"its {len(chunks)} chunks do not cover all elements",
                    remedy="save it again on all ranks",
                )
