"""Folders of checkpoints: written aside, published by one rename, recognised by their content.

[Note: a complete checkpoint]
A checkpoint is a folder with ``manifest.json``, which is written last and names every other file
with its size and a CRC-32: of ``.metadata`` that of its bytes, of others that of their table. A
folder is complete if its manifest is intact and all files have the sizes that it says; names and
times of folders mean nothing. Until then the files stand in ``.{name}.writing`` beside the final
place, and a killed process leaves only that.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from ..errors import CheckpointError
from .blocks import contested, corrupt, write_whole
from .items import table_crc

_log = logging.getLogger("fsdp_offload")

MANIFEST: Final = "manifest.json"
METADATA: Final = ".metadata"
_REMOVED: Final = ".removed"
FORMAT: Final = "fsdp_offload.checkpoint"
VERSION: Final = 2


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint consists of.

    Args:
        sequence: greater than that of every complete checkpoint that was beside it.
        world_size: ranks that wrote it.
        optimizer: class of the (wrapped) optimizer.
        files: bytes of every file but the manifest, and what :func:`_crc_of` says of it.
    """

    sequence: int
    world_size: int
    optimizer: str
    files: Mapping[str, tuple[int, int | None]]
    format: str = field(default=FORMAT)
    version: int = field(default=VERSION)

    def encode(self) -> bytes:
        """As the file's bytes: JSON with its own CRC-32."""
        text = json.dumps(asdict(self), sort_keys=True)
        return json.dumps({"crc32": zlib.crc32(text.encode()), "manifest": text}).encode()

    @classmethod
    def decode(cls, data: bytes, path: Path) -> Manifest:
        """From a file's bytes.

        Raises:
            CheckpointCorruptError: they are not as they were written.
            CheckpointError: of a later version of this package.
        """
        try:
            outer = json.loads(data)
            text = outer["manifest"]
            values = json.loads(text) if zlib.crc32(text.encode()) == outer["crc32"] else None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise corrupt(path, "it is not as it was written")
        version = values.get("version")
        if _is_count(version) and version != VERSION:
            raise CheckpointError(
                f"{path} of version {version}",
                reason=f"this package reads version {VERSION}",
                remedy="load it with the version of fsdp_offload that wrote it",
            )
        if wrong := [name for name, fits in _FIELDS.items() if not fits(values.get(name))]:
            raise corrupt(path, f"these fields are not what a save writes: {', '.join(wrong)}")
        files = {name: (entry[0], entry[1]) for name, entry in values["files"].items()}
        # A later release may add fields.
        return cls(values["sequence"], values["world_size"], values["optimizer"], files)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_files(value: object) -> bool:
    """Names in the folder itself, with bytes and perhaps a checksum."""
    return isinstance(value, dict) and all(
        name not in ("", ".", "..")
        and not {"/", "\0"} & set(name)
        and isinstance(entry, list)
        and len(entry) >= 2
        and _is_count(entry[0])
        and (entry[1] is None or _is_count(entry[1]))
        for name, entry in value.items()
    )


_FIELDS: Final[Mapping[str, Callable[[object], bool]]] = {
    "format": lambda value: value == FORMAT,
    "version": _is_count,
    "sequence": _is_count,
    "world_size": _is_count,
    "optimizer": lambda value: isinstance(value, str),
    "files": _are_files,
}
"""What a manifest must have, and of what form."""


def absolute(path: Path) -> Path:
    """``path``, whatever becomes the current folder.

    Raises:
        CheckpointError: it is relative to a folder that is gone.
    """
    try:
        return path.absolute()
    except OSError as error:
        raise CheckpointError(
            f"{path}",
            reason=f"the current folder, which it is relative to, is gone: {error.strerror}",
            remedy="give an absolute path, or change to a folder that exists",
        ) from error


def destination(path: Path) -> Path:
    """The absolute path of a save.

    Raises:
        CheckpointError: it is relative to a folder that is gone, or the save would move the current
            folder away.
    """
    path = absolute(path)
    if path.name in ("", ".."):
        path = path.resolve()
    with contextlib.suppress(OSError):  # of a current folder that is gone
        current = Path.cwd()
        if path.resolve() in (current, *current.parents):
            raise CheckpointError(
                f"{path}",
                reason="it is, or holds, the current folder, which a save would replace",
                remedy="name a folder that does not exist yet",
            )
    return path


def aside(path: Path) -> Path:
    """Where the files of ``path`` stand until they are complete."""
    return path.with_name(f".{path.name}.writing")


def _replaced(path: Path) -> Path:
    """Where the earlier checkpoint of the same name stands while it is replaced."""
    return path.with_name(f".{path.name}.replaced")


def resolve(path: Path) -> Path:
    """``path``, or what stands beside it if a process was killed just before the last rename."""
    if not path.exists():
        for other in (aside(path), _replaced(path)):  # the newer one first
            if is_complete(other):
                return other
    return path


def prepare(path: Path, *, overwrite: bool) -> Path:
    """An empty folder to write into, once per job.

    Raises:
        CheckpointError: ``path`` exists and must not be replaced, or cannot be written to.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise CheckpointError(f"{path}", reason="it is no folder", remedy="choose another path")
    _check_free(path, overwrite=overwrite)
    if path.exists() and any(path.iterdir()) and not _is_checkpoint(path):
        raise CheckpointError(
            f"{path}",
            reason="it holds other files than a checkpoint, which overwrite=True would remove",
            remedy="choose another folder",
        )
    folder = aside(path)
    if is_complete(folder):
        _install(path)  # a process was killed just before: nothing complete is ever dropped
        _check_free(path, overwrite=overwrite)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
    except FileExistsError as error:
        raise contested(folder, error) from error
    except OSError as error:
        raise CheckpointError(
            f"{folder}",
            reason=f"it cannot be created: {error.strerror}",
            remedy="choose a folder that this process may write to",
        ) from error
    return folder


def _check_free(path: Path, *, overwrite: bool) -> None:
    if path.exists() and not overwrite and any(path.iterdir()):
        raise CheckpointError(
            f"{path}",
            reason="it exists",
            remedy="choose another folder, or pass overwrite=True",
        )


def _is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, whoever wrote it, complete or not."""
    return any(
        entry.name in (MANIFEST, METADATA) or entry.name.startswith("__")
        for entry in path.iterdir()
    )


def publish(path: Path, *, world_size: int, optimizer: str) -> None:
    """Write the manifest of what stands aside, and make it the checkpoint at ``path``.

    Raises:
        CheckpointError: the file system refused, or another job saves to the same path.
    """
    try:
        _publish(path, world_size, optimizer)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY):
            raise contested(path, error) from error
        raise CheckpointError(
            f"{path}",
            reason=f"it cannot be put in place: {error.strerror}",
            remedy="choose a folder that this process may write to",
        ) from error


def _publish(path: Path, world_size: int, optimizer: str) -> None:
    folder = aside(path)
    files = {p.name: (p.stat().st_size, _crc_of(p)) for p in sorted(folder.iterdir())}
    known = [m.sequence for m in _complete_in(path.parent).values()]
    manifest = Manifest(1 + max(known, default=0), world_size, optimizer, files)
    write_whole(folder / MANIFEST, manifest.encode())
    fsync_folder(folder)
    _install(path)


def _install(path: Path) -> None:
    """Put the complete checkpoint that stands aside in the place of ``path``."""
    old = _replaced(path)
    if path.exists():
        if old.exists():
            shutil.rmtree(old)
        path.rename(old)
    aside(path).rename(path)
    fsync_folder(path.parent)
    if old.exists():
        shutil.rmtree(old)


def _crc_of(path: Path) -> int | None:
    """What tells a file from another of its size: of ``.metadata`` all bytes, else the table."""
    return zlib.crc32(path.read_bytes()) if path.name == METADATA else table_crc(path)


def fsync_folder(folder: Path) -> None:
    """Make the names in ``folder`` permanent."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(path: Path) -> Manifest | None:
    """The manifest of a checkpoint; ``None`` if it has none: another program wrote it.

    Raises:
        CheckpointCorruptError: it is not as it was written.
    """
    try:
        data = (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Manifest.decode(data, path / MANIFEST)


def check_files(path: Path) -> Manifest | None:
    """Compare every file with the manifest, sizes and tables, before anything is read.

    Returns:
        The manifest, or ``None`` if another program wrote the checkpoint.

    Raises:
        CheckpointCorruptError: a file is missing, or not as it was written.
        CheckpointError: there is no checkpoint.
    """
    manifest = read_manifest(path)
    if manifest is None:
        _check_foreign(path)
        return None
    for name, (nbytes, crc) in manifest.files.items():
        file = path / name
        try:
            found = file.stat().st_size
        except OSError:
            raise corrupt(file, "it is missing") from None
        if found != nbytes:
            raise corrupt(file, f"it has {found} bytes, but {nbytes} were written")
        if crc is not None and _crc_of(file) != crc:
            raise corrupt(file, "it is not as it was written, or of another save")
    return manifest


def _check_foreign(path: Path) -> None:
    if (path / METADATA).is_file():
        if list(path.glob("__*.distcp")) and _of_this_package(path):
            raise corrupt(path / MANIFEST, "it is missing")
        return
    if list(path.glob(f"__*{METADATA}")):
        raise CheckpointError(
            f"{path}",
            reason="every rank wrote metadata of its own (use_collectives=False), which cannot "
            "be read by another number of ranks",
            remedy="load it with torch.distributed.checkpoint.load on as many ranks as wrote it, "
            "and save it again with this package",
        )
    raise CheckpointError(
        f"{path}",
        reason=f"it has no {METADATA}: this is no checkpoint, or its saving was interrupted",
        remedy="name the folder of a checkpoint; fsdp_offload.checkpoint.latest() finds one",
    )


def _of_this_package(path: Path) -> bool:
    """Whether a data file ends with a table of ours: then the manifest has been lost."""
    return any(table_crc(file) is not None for file in sorted(path.glob("__*.distcp"))[:1])


def is_complete(path: Path) -> bool:
    """Whether ``path`` is a complete checkpoint of this package."""
    try:
        manifest = read_manifest(path)
        return manifest is not None and all(
            (path / name).stat().st_size == nbytes for name, (nbytes, _) in manifest.files.items()
        )
    except (CheckpointError, OSError):
        return False


def _complete_in(folder: Path) -> dict[Path, Manifest]:
    found: dict[Path, Manifest] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink() and is_complete(path):
            with contextlib.suppress(CheckpointError, OSError):  # another process removes it
                if (manifest := read_manifest(path)) is not None:
                    found[path] = manifest
    return found


def given(path: str | os.PathLike[str] | None) -> Path:
    """The path that a load was given.

    Raises:
        CheckpointError: it is None, which :func:`latest` says where there is nothing.
    """
    if path is None:
        raise CheckpointError(
            "a checkpoint at None",
            reason="latest() says None where there is no complete checkpoint",
            remedy="load only if there is one, and begin anew otherwise",
        )
    return Path(path)


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint of this package in ``folder``, or ``None``.

    Found by content: names and times mean nothing. Ask on one rank and tell the others, or ask on
    all before any of them saves.
    """
    found = complete_checkpoints(folder)
    return found[-1] if found else None


def complete_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Complete checkpoints of this package in ``folder``, oldest first."""
    found = _complete_in(Path(folder))
    return sorted(found, key=lambda path: (found[path].sequence, path.name))


def prune(path: Path, keep_last: int) -> None:
    """Remove the oldest complete checkpoints beside ``path``, so that ``keep_last`` stay.

    What is not complete, or not of this package, is left alone. Nothing is raised, because the
    checkpoint at ``path`` is complete: what cannot be removed stays until the next save.
    """
    # Renamed first: what a killed process leaves half removed is known by its name.
    removed = [*path.parent.glob(f".*{_REMOVED}")]
    for old in complete_checkpoints(path.parent)[:-keep_last]:
        if old not in removed:
            removed.append(old.with_name(f".{old.name}{_REMOVED}"))
            try:
                old.rename(removed[-1])
            except FileNotFoundError:
                pass  # another process removes it
            except OSError as error:
                _log.warning("%s is not removed: %s", old, error.strerror)
    for old in removed:
        shutil.rmtree(old, ignore_errors=True)
