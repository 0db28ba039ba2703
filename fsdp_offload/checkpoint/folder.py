"""Folders of checkpoints: saves publish them by one rename, readers identify them by content.

Each save writes into its own folder beside the final place,
``.fsdp_offload.HOST@PID@START@RANDOM.writing`` of rank 0's process, so it needs no lock. When the
folder holds the files that the ranks report, it gets its name in one call: a rename if the name is
free, else an exchange of both folders (Linux ``renameat2``), after which the save removes the old
one. At any moment the path is the old checkpoint or the new one. File systems without the exchange
(NFS) get two renames: the old one moves to ``.fsdp_offload.replaced`` in the new folder, which then
gets its name. Between the two, :func:`latest` waits for a living save, and finds the old one in
that place after a dead save. The next save puts it back, as does the same save if its second rename
fails.

A save renames a folder to ``.fsdp_offload.RANDOM.removed`` before it removes it. So a name that a
reader has listed may be gone, or belong to another folder; :func:`_complete_in` lists again.

Before it writes, a save removes the working folders of dead saves beside its path. On this host
(boot and namespace of process ids) a save is dead if the process of that id has another start time
or none; on another host if no file in its folder was modified for ``SILENT_S``: rank 0 of a living
save renews the folder's time.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import os
import re
import shutil
import socket
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ..core.errors import CheckpointError, ConfigError
from ..core.progress import warn
from .files import fsync_folder, write_whole
from .manifest import MANIFEST, METADATA, Manifest, crc_of, names_in, read_manifest

_log = logging.getLogger("fsdp_offload")

SILENT_S: Final = 600.0
"""A save on another host that shows no sign of life for this time is dead."""

_RENAME_S: Final = 5.0
"""How long a reader waits for another process between its two renames."""

_OURS, _NEW, _REMOVED = ".fsdp_offload.", ".writing", ".removed"
_REPLACED: Final = ".fsdp_offload.replaced"


# --------------------------------------------------------------------------- paths


def checked(path: object) -> Path:
    """Return ``path`` made absolute, from the current folder.

    Raises:
        ConfigError: no checkpoint can be there, such as a URL or too long a name.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(
            f"path of type {type(path).__name__}",
            reason="not a path",
            remedy="give the path first, then the model, then the optimizer",
        )
    text = os.fsdecode(path)
    if re.match(r"[A-Za-z][\w+.-]*:/", text) or "\0" in text:
        raise ConfigError(
            f"path {text!r}",
            reason="it is not a path of a mounted file system",
            remedy="save to a folder that all ranks share, and copy it from there",
        )
    found = Path(text).absolute()
    if found.name in ("", ".."):
        found = found.resolve()
    there = next(each for each in (*found.parents, Path("/")) if os.path.isdir(each))
    name_bytes = max(len(os.fsencode(name)) for name in found.parts)
    # Paths of the files in the working folder are the longest.
    path_bytes = len(os.fsencode(found)) + len(_working(found).name) + 32
    limits = os.pathconf(there, "PC_NAME_MAX"), os.pathconf(there, "PC_PATH_MAX")
    if name_bytes > limits[0] or path_bytes > limits[1]:
        raise ConfigError(
            f"path {text[:40]}...{text[-40:]}",
            reason=f"its names take {name_bytes} bytes and its paths {path_bytes}; the "
            f"file system allows {limits[0]} and {limits[1]}",
            remedy="choose a shorter name",
        )
    return found


def _check_replaceable(path: Path, *, overwrite: bool) -> None:
    files = [p for p in (path, *path.parents) if p.exists() and not p.is_dir()]
    files += [path] if path.is_symlink() else []
    names = os.listdir(path) if not files and path.exists() else []
    current = Path.cwd()
    if path.resolve() in (current, *current.parents):
        reason = "it is the current folder, or contains it"
        remedy = "name a folder that does not exist yet"
    elif files:
        reason, remedy = f"{files[0]} is not a folder", "choose another path"
    elif names and not any(n == METADATA or n.endswith(".distcp") for n in names):
        reason = "it contains files that do not belong to a checkpoint"
        remedy = "choose a folder that does not exist yet"
        if any(name.endswith(".safetensors") for name in names):
            reason = "it contains an export, perhaps of another process"
            remedy += "; export a checkpoint in one process only"
    elif names and not overwrite:
        reason, remedy = "it exists", "choose another folder; save(..., overwrite=True) replaces it"
    else:
        return
    raise CheckpointError(f"{path}", reason=reason, remedy=remedy)


# --------------------------------------------------------------------------- working folders


def _working(path: Path) -> Path:
    """Return a name for this process's working folder beside ``path``; see the top of this file."""
    pid = os.getpid()
    owner = f"{_OURS}{_host()}@{pid}@{_start_of(pid)}"
    return path.parent / f"{owner}@{os.urandom(8).hex()}{_NEW}"


@functools.cache
def _host() -> str:
    """Return a name for the host, its boot, and the namespace in which process ids are unique."""
    found = socket.gethostname()[:40]
    with contextlib.suppress(OSError):  # no /proc
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        found += f"-{zlib.crc32((boot + os.readlink('/proc/self/ns/pid')).encode()):08x}"
    return found


def _start_of(pid: int | str) -> str:
    with contextlib.suppress(OSError):
        state, *values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else values[18]
    return ""


def _is_dead(made: Path, now: float) -> bool:
    """Whether the save that made a folder has died; ``now``: the file system's time."""
    owner = made.name.split("@")
    if owner[0] == _OURS + _host():
        return _start_of(owner[1]) != owner[2]
    with contextlib.suppress(OSError):  # it was removed
        return max(p.stat().st_mtime for p in (made, *made.iterdir())) + SILENT_S < now
    return False


def prepare(path: Path, *, overwrite: bool) -> Path:
    """Make an empty working folder, once per job, and remove those of dead saves beside it.

    Raises:
        CheckpointError: ``path`` exists and must not be replaced.
    """
    _check_replaceable(path, overwrite=overwrite)
    _clear(path.parent, 0.0)  # those of this host, without comparing times
    made = _working(path)
    with contextlib.suppress(OSError):  # leftovers of other hosts may have filled the disk
        made.mkdir(parents=True)
    _clear(path.parent, made.stat().st_mtime if made.exists() else time.time())
    made.mkdir(parents=True, exist_ok=True)
    return made


def show_life(made: Path, ended: threading.Event) -> None:
    """Renew the time of ``made`` until ``ended``, to show other hosts that the save lives."""
    while not ended.wait(SILENT_S / 10):
        with contextlib.suppress(OSError):
            os.utime(made)


def _clear(folder: Path, now: float) -> None:
    for each in folder.iterdir() if folder.is_dir() else ():
        name = each.name
        with contextlib.suppress(OSError):  # another save removes it
            if not name.startswith("."):
                discard(each / _REPLACED, folder)
            elif name.startswith(_OURS) and name.endswith(_REMOVED):
                shutil.rmtree(each, ignore_errors=True)
            elif name.startswith(_OURS) and name.endswith(_NEW) and _is_dead(each, now):
                discard(each)


def discard(made: Path, beside: Path | None = None) -> bool:
    """Remove a folder; before that, put back a checkpoint that a save has moved into it.

    Renames the folder into ``beside`` first, so that the next save removes leftovers; returns
    whether that worked.
    """
    beside = made.parent if beside is None else beside
    try:
        for old in made.glob(f"{_REPLACED}/*"):
            with contextlib.suppress(OSError):  # another folder is in its place
                old.rename(beside / old.name)
        gone = beside / f"{_OURS}{os.urandom(8).hex()}{_REMOVED}"
        made.rename(gone)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):  # another process is removing it
            return False
        if made.name.endswith(_NEW) and not any(made.glob(f"{_REPLACED}/*")):
            gone = made  # no reader takes it for a checkpoint
        else:
            _log.warning("cannot remove %s: %s", made, error.strerror)
            return False
    shutil.rmtree(gone, ignore_errors=True)
    return True


# --------------------------------------------------------------------------- writing


def publish(
    made: Path,
    path: Path,
    written: Mapping[str, tuple[int, int]],
    *,
    overwrite: bool,
    world_size: int,
    optimizer: str,
) -> None:
    """Write the manifest of a working folder, and make it the checkpoint at ``path``.

    Args:
        written: bytes and CRC-32 of its files, from the ranks that wrote them.

    Raises:
        CheckpointError: the folder holds other files, or ``path`` must not be replaced.
    """
    found = {p.name: (p.stat().st_size, crc_of(p)) for p in sorted(made.iterdir())}
    if wrong := sorted(dict(found.items() ^ written.items())):
        raise CheckpointError(
            f"{path}: {wrong[0]} has (bytes, CRC-32) {found.get(wrong[0], 'missing')}",
            reason=f"{written.get(wrong[0], 'nothing')} was written: another program "
            "changed it, or the ranks do not share the folder",
            remedy="choose a folder that all ranks share and no other program writes to",
        )
    # If a clock was set back, an older checkpoint must not become the latest. Reads manifests only:
    # looking at all files of all neighbours takes minutes on a busy file system.
    neighbours = map(_manifest_of, path.parent.iterdir())
    newest = max((manifest.time_ns for manifest in neighbours if manifest is not None), default=0)
    manifest = Manifest(max(time.time_ns(), newest + 1), world_size, optimizer, found)
    write_whole(made / MANIFEST, manifest.encode())
    install(made, path, overwrite=overwrite)


def install(made: Path, path: Path, *, overwrite: bool) -> None:
    """Rename a working folder to ``path``; see the top of this file."""
    fsync_folder(made)
    is_exchanged = False
    while True:
        _check_replaceable(path, overwrite=overwrite)
        try:
            made.rename(path)
            break
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        if is_exchanged := _exchange(made, path):
            break
        old = made / _REPLACED / path.name
        discard(old.parent)
        old.parent.mkdir()
        with contextlib.suppress(FileNotFoundError):  # another save has just moved the folder
            path.rename(old)
    try:
        fsync_folder(path.parent)
    except OSError:  # the name may not survive a crash: fail, and put the old checkpoint back
        if not (is_exchanged and _exchange(made, path)):
            path.rename(made)
        raise
    discard(path / _REPLACED, path.parent)
    discard(made)  # the old checkpoint, after an exchange


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; False: kernel or file system cannot."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return call is not None and not call(here, os.fsencode(one), here, os.fsencode(other), swap)


def prune(path: Path, keep_last: int) -> None:
    """Remove the oldest complete checkpoints beside ``path`` whose names differ only in numbers, so
    that ``keep_last`` stay; the log names them.

    Never raises, because the checkpoint at ``path`` is complete.
    """

    def series(of: Path) -> str:
        return re.sub(r"\d+", "", of.name)

    found = {p: m for p, m in _complete_in(path.parent).items() if series(p) == series(path)}
    for old in sorted(found, key=lambda each: found[each].time_ns)[:-keep_last]:
        if discard(old, path.parent):
            _log.info("keep_last=%d removed %s", keep_last, old)


# --------------------------------------------------------------------------- reading


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Find the newest complete checkpoint of this package in ``folder``; ``None`` without one.
    Warns if there are only those of other programs.

    Content counts, not names. During a save the answer is the old checkpoint or the new one. Call
    it on one rank and broadcast the answer, or on all ranks before any of them saves.

    Raises:
        ConfigError: ``folder`` is a URL, or not a path.
    """
    checked(folder)
    found = _complete_in(Path(folder))
    if not found:
        if names := [n for n in names_in(Path(folder)) if _manifest_of(Path(folder, n)) is None]:
            warn(
                "latest(%r) finds no checkpoint of this package. It does not look at those of "
                "other programs: %s. To resume from one, pass it to checkpoint.load()",
                os.fspath(folder),
                ", ".join(names[:4]),
            )
    return max(found, key=lambda path: found[path].time_ns, default=None)


def _complete_in(folder: Path) -> dict[Path, Manifest]:
    until = time.monotonic() + _RENAME_S
    while True:
        found: dict[Path, Manifest] = {}
        is_still = True
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name.startswith(_OURS):
                moved = [*path.glob(f"{_REPLACED}/*")]
                if moved and not _is_dead(path, time.time()) and time.monotonic() < until:
                    is_still = False  # between two renames
                    time.sleep(0.001)
            else:
                moved = [path]
            for each in moved:
                manifest, is_complete = _look(each)
                if manifest is not None and is_complete:
                    found[each] = manifest
                is_still &= os.path.lexists(each) and _look(each) == (manifest, is_complete)
        if is_still:
            return found


def _look(path: Path) -> tuple[Manifest | None, bool]:
    """Read a folder's manifest; also return whether all files are there, with their sizes."""
    if (manifest := _manifest_of(path)) is not None:
        with contextlib.suppress(OSError):
            sizes = ((path / name, n_bytes) for name, (n_bytes, _) in manifest.files.items())
            return manifest, all(file.stat().st_size == n_bytes for file, n_bytes in sizes)
    return manifest, False


def _manifest_of(path: Path) -> Manifest | None:
    with contextlib.suppress(CheckpointError, OSError):
        if path.is_dir() and not path.is_symlink():
            return read_manifest(path)
    return None
