"""Folders of checkpoints: written aside, published by one rename, recognised by their content.

[Note: a complete checkpoint]
A checkpoint is a folder with ``manifest.json``, which is written last and names every other file
with its size and a CRC-32: of ``.metadata`` that of its bytes, of data files that of their table. A
folder is complete if its manifest is intact and all files have the sizes that it says; its name
means nothing. Until then the files stand in ``.{name}.writing`` beside the final place.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import json
import logging
import os
import pickle
import shutil
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
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
from .files import corrupt, fsync_folder, read_table, write_whole

_log = logging.getLogger("fsdp_offload")

MANIFEST: Final = "manifest.json"
METADATA: Final = ".metadata"
FORMAT: Final = "fsdp_offload.checkpoint"
VERSION: Final = 3
_REMOVED: Final = ".fsdp_offload.removed"


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint consists of.

    Args:
        time_ns: when it was completed, in nanoseconds since 1970; greater than that of every
            complete checkpoint that lay beside it.
        world_size: ranks that wrote it.
        optimizer: class of the (wrapped) optimizer; empty: unknown.
        files: bytes of every file but the manifest, and its CRC-32 (of ``.metadata``: of all bytes;
            of a data file: of its table).
    """

    time_ns: int
    world_size: int
    optimizer: str
    files: Mapping[str, tuple[int, int]]
    format: str = FORMAT
    version: int = VERSION

    def encode(self) -> bytes:
        """As the file's bytes: JSON with its own CRC-32."""
        text = json.dumps(asdict(self), sort_keys=True)
        return json.dumps({"crc32": zlib.crc32(text.encode()), "manifest": text}).encode()

    @classmethod
    def decode(cls, data: bytes, path: Path) -> Manifest | None:
        """From a file's bytes; ``None``: another program wrote them.

        Raises:
            CheckpointCorruptError: they are not as they were written.
            CheckpointError: of another version of this package.
        """
        try:
            outer = json.loads(data)
            if "crc32" not in outer and FORMAT not in str(outer):  # a changed bit leaves one
                return None
            text = outer["manifest"]
            if zlib.crc32(text.encode()) != outer["crc32"]:
                raise corrupt(path, "it is not as it was written")
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
            return cls(int(values["time_ns"]), values["world_size"], values["optimizer"], files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise corrupt(path, f"it is not what a save writes: {error!r}") from error


# --------------------------------------------------------------------------- writing


def aside(path: Path) -> Path:
    """Where the files of ``path`` stand until they are complete."""
    return path.with_name(f".{path.name}.writing")


def destination(path: Path) -> Path:
    """The absolute path of a save.

    Raises:
        CheckpointError: the save would replace the current folder.
    """
    path = path.absolute()
    if path.name in ("", ".."):
        path = path.resolve()
    current = Path.cwd()
    if path.resolve() in (current, *current.parents):
        raise CheckpointError(
            f"{path}",
            reason="it is, or holds, the current folder, which a save would replace",
            remedy="name a folder that does not exist yet",
        )
    return path


def prepare(path: Path, *, overwrite: bool) -> Path:
    """An empty folder to write into, once per job.

    Raises:
        CheckpointError: ``path`` exists and must not be replaced.
    """
    files = [p for p in (path, *path.parents) if p.exists() and not p.is_dir()]
    if path.is_symlink() or files:
        raise CheckpointError(
            f"{path}",
            reason=f"{files[0] if files else path} is no folder",
            remedy="choose another path",
        )
    made = aside(path)
    if path.parent.is_dir() and made in _complete_in(path.parent):
        install(path)  # a process was killed just before: nothing complete is dropped unasked
    names = [entry.name for entry in path.iterdir()] if path.exists() else []
    if names and not overwrite:
        raise CheckpointError(
            f"{path}",
            reason="it exists",
            remedy="choose another folder, or pass overwrite=True",
        )
    if names and not any(n == METADATA or n.endswith(".distcp") for n in names):
        raise CheckpointError(
            f"{path}",
            reason="it holds other files than a checkpoint, which overwrite=True would remove",
            remedy="choose another folder",
        )
    remove(made)
    made.parent.mkdir(parents=True, exist_ok=True)
    made.mkdir()
    return made


class _MetadataPickler(pickle.Pickler):
    """torch 2.15 writes strides of tensors, which earlier versions do not read, and may lack."""

    def reducer_override(self, value: Any) -> Any:
        """The first five fields of a tensor's properties, as of torch 2.11."""
        if type(value) is not TensorProperties:
            return NotImplemented
        return copyreg.__newobj__, (TensorProperties,), value.__getstate__()[:5]  # type: ignore[attr-defined]


def encode_metadata(metadata: Metadata) -> bytes:
    """As the bytes of ``.metadata``, which torch 2.11 and later read."""
    buffer = io.BytesIO()
    _MetadataPickler(buffer).dump(metadata)
    return buffer.getvalue()


_DESCRIBING: Final = (
    "builtins.set", "collections.OrderedDict", "torch.Size",
    "pathlib.PosixPath", "pathlib._local.PosixPath",  # the second of Python 3.13
)  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    """Reads ``.metadata`` of any origin: it runs no code that the file names."""

    def find_class(self, module: str, name: str) -> Any:
        """What makes an object of a class that describes tensors.

        Raises:
            CheckpointError: the file names anything else.
        """
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda layout: {"torch.strided": torch.strided}[layout]
        # Neither functions nor classes themselves: a pickle may set attributes of what it gets.
        if f"{module}.{name}" in _DESCRIBING:
            plain = super().find_class(module, name)
            return lambda *values: plain(*values)
        of_dcp = {_StorageInfo.__name__: _StorageInfo, **vars(dcp_metadata)}.get(name)
        if not isinstance(of_dcp, type) or of_dcp.__module__ != module:
            raise CheckpointError(
                f"{METADATA} with {module}.{name}",
                reason="it describes no tensor, and may run code",
                remedy="load another checkpoint; torch.distributed.checkpoint.load() reads this "
                "one, if you trust who wrote it",
            )
        return type(name, (), {"__new__": lambda _, *values: of_dcp.__new__(of_dcp, *values)})


def decode_metadata(data: bytes, path: Path) -> Metadata:
    """What the bytes of ``.metadata`` describe; no code that they name is run.

    Raises:
        CheckpointError: they name a class that describes no tensor.
        CheckpointCorruptError: they are no pickle of a ``Metadata``.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as error:  # changed bytes of a pickle may raise anything
        raise corrupt(path, f"it cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise corrupt(path, f"it holds a {type(metadata).__name__}")
    return metadata


def publish(path: Path, *, world_size: int, optimizer: str) -> None:
    """Write the manifest of what stands aside, and make it the checkpoint at ``path``."""
    made = aside(path)
    files = {p.name: (p.stat().st_size, _crc_of(p)) for p in sorted(made.iterdir())}
    # A clock that was set back must not make an older checkpoint the latest one.
    newest = max((m.time_ns for m in _complete_in(path.parent).values()), default=0)
    manifest = Manifest(max(time.time_ns(), newest + 1), world_size, optimizer, files)
    write_whole(made / MANIFEST, manifest.encode())
    fsync_folder(made)
    install(path)


def install(path: Path) -> None:
    """Put what stands aside, complete, in the place of ``path``."""
    # Killed between the renames, the process leaves both, complete, for latest() to find.
    old = path.with_name(f".{path.name}{_REMOVED}")
    if path.exists():
        remove(old)
        path.rename(old)
    aside(path).rename(path)
    fsync_folder(path.parent)
    remove(old)


def prune(path: Path, keep_last: int) -> None:
    """Remove the oldest complete checkpoints beside ``path``, so that ``keep_last`` stay.

    What is not complete, or not of this package, is left alone. Nothing is raised, because the
    checkpoint at ``path`` is complete: what cannot be removed stays until the next save.
    """
    found = _complete_in(path.parent)
    # Renamed first: what a killed process leaves half removed is known by a name of our own.
    removed = [*path.parent.glob(f".*{_REMOVED}")]
    for old in sorted(found, key=lambda each: found[each].time_ns)[:-keep_last]:
        if old not in removed:
            removed.append(old.with_name(f".{old.name}{_REMOVED}"))
            try:
                old.rename(removed[-1])
            except FileNotFoundError:
                pass  # another process removes it
            except OSError as error:
                _log.warning("%s is not removed: %s", old, error.strerror)
    for old in removed:
        remove(old)


def remove(path: Path) -> None:
    """Remove a folder, as far as the file system lets it."""
    shutil.rmtree(path, ignore_errors=True)


def _crc_of(path: Path) -> int:
    """What tells a file from another of its size: of ``.metadata`` all bytes, else the table."""
    if path.name == METADATA:
        return zlib.crc32(path.read_bytes())
    table = read_table(path)
    if table is None:
        raise corrupt(path, "it has no table of checksums")
    return table.crc


# --------------------------------------------------------------------------- reading


def open_checkpoint(path: Path) -> tuple[Manifest | None, Metadata]:
    """Manifest (``None``: another program wrote the checkpoint) and metadata, verified.

    Raises:
        CheckpointCorruptError: one of them is not as it was written.
        CheckpointError: there is no checkpoint.
    """
    manifest = read_manifest(path)
    try:
        data = (path / METADATA).read_bytes()
    except OSError as error:
        if manifest is not None:
            raise corrupt(path / METADATA, "it is missing") from error
        raise CheckpointError(
            f"{path}",
            reason=f"it has no {METADATA}: this is no checkpoint, or its saving was interrupted",
            remedy="name the folder of a checkpoint; fsdp_offload.checkpoint.latest() finds one",
        ) from error
    if manifest is not None and manifest.files.get(METADATA) != (len(data), zlib.crc32(data)):
        raise corrupt(path / METADATA, "it is not as it was written")
    return manifest, decode_metadata(data, path / METADATA)


def read_manifest(path: Path) -> Manifest | None:
    """The manifest of a checkpoint; ``None`` if another program wrote it.

    Raises:
        CheckpointCorruptError: it is not as it was written.
    """
    try:
        data = (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Manifest.decode(data, path / MANIFEST)


def check_files(path: Path, manifest: Manifest | None, metadata: Metadata) -> None:
    """Compare sizes and tables with the manifest, and chunks with tensors, before a load.

    Raises:
        CheckpointCorruptError: a file is missing, or not as it was written.
        CheckpointError: elements are in no chunk.
    """
    for name, (nbytes, crc) in manifest.files.items() if manifest is not None else ():
        file = path / name
        try:
            found = file.stat().st_size
        except OSError:
            raise corrupt(file, "it is missing") from None
        if found != nbytes:
            raise corrupt(file, f"it has {found} bytes, but {nbytes} were written")
        if name != METADATA and _crc_of(file) != crc:
            raise corrupt(file, "it is not as it was written, or of another save")
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
            # torch refuses to save chunks that overlap or stick out.
            chunks = {tuple(c.offsets): c.sizes for c in value.chunks if 0 not in c.sizes}
            for offsets in chunks:
                if MetadataIndex(key, offsets) not in metadata.storage_data:
                    raise corrupt(path / METADATA, f"it names no file that has {key} at {offsets}")
            if sum(box.numel() for box in chunks.values()) != value.size.numel():
                raise CheckpointError(
                    f"{path}: {key} of shape {tuple(value.size)}",
                    reason=f"its {len(chunks)} chunks leave elements out",
                    remedy="save it again with all ranks taking part",
                )


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint of this package in ``folder``, or ``None``.

    Found by content: names mean nothing. Ask on one rank and tell the others, or ask on all before
    any of them saves.
    """
    found = _complete_in(Path(folder))
    return max(found, key=lambda path: found[path].time_ns, default=None)


def _complete_in(folder: Path) -> dict[Path, Manifest]:
    """Complete checkpoints of this package in ``folder``, also under names of a killed save."""
    found: dict[Path, Manifest] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(CheckpointError, OSError):  # another process may remove it
                manifest = read_manifest(path)
                if manifest is not None and _is_complete(path, manifest):
                    found[path] = manifest
    return found


def _is_complete(path: Path, manifest: Manifest) -> bool:
    return all(
        (path / name).stat().st_size == nbytes for name, (nbytes, _) in manifest.files.items()
    )
