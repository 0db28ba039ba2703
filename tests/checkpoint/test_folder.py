"""Folders: complete or not there, whatever file operation is the last one."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import pickle
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from fsdp_offload import CheckpointCorruptError, CheckpointError
from fsdp_offload.checkpoint import folder
from fsdp_offload.checkpoint.files import TAIL, Checksums, encode_table
from fsdp_offload.checkpoint.manifest import (
    VERSION,
    Manifest,
    check_files,
    open_checkpoint,
    read_manifest,
)


def fill(where: Path, content: str) -> dict[str, tuple[int, int]]:
    """Two data files and ``.metadata``, as ranks leave them; what was written."""
    metadata = pickle.dumps(Metadata({}, planner_data=content, storage_data={}))
    (where / ".metadata").write_bytes(metadata)
    written = {".metadata": (len(metadata), zlib.crc32(metadata))}
    for rank in range(2):
        data, checksums = f"{content} of rank {rank}".encode(), table(rank)
        (where / f"__{rank}_0.distcp").write_bytes(data + checksums)
        crc = zlib.crc32(checksums[: -TAIL.size])
        written[f"__{rank}_0.distcp"] = len(data + checksums), crc
    return written


def table(crc: int) -> bytes:
    return encode_table([Checksums(0, [crc])], 64)


def check(path: Path) -> str:
    """Raises what a load would; what the checkpoint says."""
    found, metadata = open_checkpoint(path)
    check_files(path, found, metadata)
    return str(metadata.planner_data)


def save(
    path: Path, content: str, *, overwrite: bool = False, keep_last: int | None = None
) -> None:
    """The file operations of a save, in their order."""
    made = folder.prepare(path, overwrite=overwrite)
    written = fill(made, content)
    folder.publish(made, path, written, overwrite=overwrite, world_size=2, optimizer="AdamW")
    if keep_last is not None:
        folder.prune(path, keep_last)


def content_of(path: Path | None) -> str | None:
    """What a complete checkpoint says; fails if it is not complete."""
    if path is None:
        return None
    assert read_manifest(path) is not None
    content = check(path)
    for rank in range(2):
        assert (path / f"__{rank}_0.distcp").read_bytes().startswith(f"{content} of".encode())
    return content


def names(where: Path) -> list[str]:
    return sorted(path.name for path in where.iterdir())


def test_latest_names_checkpoints_of_other_programs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / ".metadata").write_bytes(b"torch's")
    assert folder.latest(tmp_path) is None
    assert "those of other programs: step-5." in caplog.text
    caplog.clear()
    save(tmp_path / "mine", "mine")
    assert folder.latest(tmp_path) == tmp_path / "mine"
    assert not caplog.text


def test_the_latest_is_the_last_one_whatever_name_clock_and_times_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, now in (("b", 3000), ("c", 1000), ("a", 2000)):
        monkeypatch.setattr(time, "time_ns", lambda now=now: now)
        save(tmp_path / name, name)
        assert folder.latest(tmp_path) == tmp_path / name
        os.utime(tmp_path / name, (0, 0))
    os.utime(tmp_path / "b")
    (tmp_path / "z").mkdir()
    (tmp_path / "file").write_text("")
    assert folder.latest(tmp_path) == tmp_path / "a"
    (tmp_path / "a").rename(tmp_path / "moved")
    assert folder.latest(tmp_path) == tmp_path / "moved"
    for nothing in ("z", "absent", "z/absent"):
        assert folder.latest(tmp_path / nothing) is None


def test_a_manifest_with_any_bit_changed_is_refused(tmp_path: Path) -> None:
    data = Manifest(3, 2, "AdamW", {"__0_0.distcp": (5, 7)}).encode()
    expected = Manifest.decode(data, tmp_path)
    for at in range(8 * len(data)):
        changed = bytearray(data)
        changed[at // 8] ^= 1 << at % 8
        try:
            found = Manifest.decode(bytes(changed), tmp_path)
        except CheckpointCorruptError:
            continue
        assert found == expected, "changed, and not noticed"


def test_a_manifest_of_another_program_is_no_damage(tmp_path: Path) -> None:
    save(tmp_path / "a", "one")
    (tmp_path / "a" / "manifest.json").write_text('{"name": "app", "manifest": {"version": 2}}')
    assert check(tmp_path / "a") == "one"
    assert folder.latest(tmp_path) is None


def test_a_later_version_is_refused_with_words(tmp_path: Path) -> None:
    save(tmp_path / "a", "one")
    later = Manifest(1, 2, "AdamW", {}, version=VERSION + 1)
    (tmp_path / "a" / "manifest.json").write_bytes(later.encode())
    with pytest.raises(CheckpointError, match="version 4") as caught:
        check(tmp_path / "a")
    assert not isinstance(caught.value, CheckpointCorruptError)
    assert folder.latest(tmp_path) is None


def test_fields_of_a_later_release_are_left_alone(tmp_path: Path) -> None:
    expected = Manifest(3, 2, "AdamW", {"__0_0.distcp": (5, 7)})
    text = json.dumps({**asdict(expected), "later": 1})
    data = json.dumps({"crc32": zlib.crc32(text.encode()), "manifest": text, "later": 2})
    assert Manifest.decode(data.encode(), tmp_path) == expected


@pytest.mark.parametrize(
    ("name", "reason"),
    [("empty", r"no \.metadata"), ("absent", "does not exist"), ("file", "is no folder")],
)
def test_a_folder_without_metadata_is_no_checkpoint(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=reason):
        check(tmp_path / name)


def test_an_empty_folder_is_no_checkpoint_to_lose(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", "two")
    assert content_of(tmp_path / "empty") == "two"


def test_pruning_removes_the_oldest_complete_ones(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "x").write_text("mine")
    for index in range(5):
        save(tmp_path / f"s{index}", str(index), keep_last=2)
    assert names(tmp_path) == ["notes", "s3", "s4"]
    shutil.copytree(tmp_path / "s3", tmp_path / "broken")
    (tmp_path / "broken" / "__0_0.distcp").unlink()
    save(tmp_path / "s5", "5", keep_last=1)
    assert names(tmp_path) == ["broken", "notes", "s5"]


def test_pruning_leaves_folders_of_others_alone(tmp_path: Path) -> None:
    (tmp_path / ".photos.removed").mkdir()
    (tmp_path / ".photos.removed" / "x").write_text("mine")
    (tmp_path / ".photos.writing").mkdir()
    (tmp_path / ".photos.writing" / "x").write_text("mine")
    for name in ("1", "2"):
        save(tmp_path / name, name, keep_last=1)
    assert names(tmp_path) == [".photos.removed", ".photos.writing", "2"]
    assert names(tmp_path / ".photos.removed") == ["x"]


def test_a_rewritten_one_is_the_newest(tmp_path: Path) -> None:
    save(tmp_path / "1", "one")
    save(tmp_path / "2", "two")
    save(tmp_path / "1", "three", overwrite=True, keep_last=1)
    assert names(tmp_path) == ["1"]
    assert content_of(tmp_path / "1") == "three"


def test_keep_last_counts_names_that_differ_in_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for name in ("step-8", "best", "step-9", "final-10"):
        save(tmp_path / name, name)
    save(tmp_path / "step-10", "new", keep_last=2)
    assert names(tmp_path) == ["best", "final-10", "step-10", "step-9"]
    assert [str(tmp_path / "step-8") in record.message for record in caplog.records] == [True]


# --------------------------------------------------------------------------- two saves


@pytest.fixture(params=[True, False], ids=["exchange", "renames"])
def swaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the file system can swap two folders; not all can."""
    if not request.param:
        monkeypatch.setattr(folder, "_exchange", lambda *_: False)
    return bool(request.param)


@pytest.mark.usefixtures("swaps")
def test_a_reader_beside_a_save_sees_one_of_both(tmp_path: Path) -> None:
    """At each file operation, between which another process may look."""
    save(tmp_path / "1", "old")
    seen: list[str | None] = []

    def look(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if len(seen) < 1000:
            with mock.patch.object(folder, "_RENAME_S", 0.0):  # the writer stands still
                seen.append(content_of(folder.latest(tmp_path)))
        return call(*args, **kwargs)

    operations = {name: functools.partial(look, getattr(os, name)) for name in OPERATIONS}
    with mock.patch.multiple(os, **operations):
        save(tmp_path / "1", "new", overwrite=True)
        save(tmp_path / "2", "next", keep_last=1)
    turns = [turn for turn, _ in itertools.groupby(seen)]
    assert turns == ["old", "new", "next"]


def test_a_listing_that_is_outdated_is_made_again(tmp_path: Path) -> None:
    """The folder goes, or is replaced, between the listing and the look at it."""
    save(tmp_path / "1", "old")
    save(tmp_path / "2", "older")
    look, turns = folder._look, iter(range(100))

    def beside(path: Path) -> Any:
        if (turn := next(turns)) == 0:
            save(tmp_path / "3", "new", keep_last=1)
        elif turn == 8:
            save(tmp_path / "3", "newer", overwrite=True)
        return look(path)

    with mock.patch.object(folder, "_look", beside):
        assert content_of(folder.latest(tmp_path)) == "newer"


@pytest.mark.usefixtures("swaps")
@pytest.mark.parametrize("overwrite", [False, True])
def test_the_later_of_two_saves_replaces_or_is_refused(tmp_path: Path, overwrite: bool) -> None:
    path = tmp_path / "a"
    first, second = (folder.prepare(path, overwrite=overwrite) for _ in range(2))
    options: Any = {"overwrite": overwrite, "world_size": 2, "optimizer": ""}
    folder.publish(first, path, fill(first, "one"), **options)
    with contextlib.nullcontext() if overwrite else pytest.raises(CheckpointError, match="exists"):
        folder.publish(second, path, fill(second, "two"), **options)
    assert content_of(path) == ("two" if overwrite else "one")
    folder.discard(second)
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("what", ["another size", "another table", "missing", "more"])
def test_what_ranks_did_not_write_is_not_published(tmp_path: Path, what: str) -> None:
    save(tmp_path / "a", "old")
    made = folder.prepare(tmp_path / "a", overwrite=True)
    written = fill(made, "new")
    name = "__1_0.distcp"
    if what in ("missing", "more"):
        (made / name).rename(made / "__2_0.distcp") if what == "more" else (made / name).unlink()
    else:
        (made / name).write_bytes(b"new of rank 1" + b"x" * (what[-1] == "e") + table(7))
    with pytest.raises(CheckpointError, match=r"distcp.*another program"):
        folder.publish(made, tmp_path / "a", written, overwrite=True, world_size=2, optimizer="")
    folder.discard(made)
    assert content_of(tmp_path / "a") == "old"
    assert names(tmp_path) == ["a"]


# --------------------------------------------------------------------------- dead ones


class Killed(BaseException):
    """The process is gone: nothing is done any more."""


OPERATIONS = ("rename", "unlink", "rmdir", "mkdir", "fsync")
BORN = itertools.count()


@contextlib.contextmanager
def life(left: int) -> Iterator[None]:
    """A process whose file operations succeed ``left`` times; then it is dead."""
    done = itertools.count()

    def counted(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if next(done) >= left:
            raise Killed
        return call(*args, **kwargs)

    operations = {name: functools.partial(counted, getattr(os, name)) for name in OPERATIONS}
    swap = functools.partial(counted, folder._exchange)
    with mock.patch.multiple(os, **operations), mock.patch.object(folder, "_exchange", swap):
        yield


def lives(run: Callable[[], None], restore: Callable[[], None]) -> Iterator[None]:
    """After each prefix of the file operations of ``run``; the last time, all of them are done."""
    for left in range(1000):
        restore()
        born = str(next(BORN))
        with mock.patch.object(folder, "_start_of", lambda _, born=born: born):
            try:
                with life(left):
                    run()
            except Killed:
                pass
            else:
                left = 1000
        yield
        if left == 1000:
            return


def start(where: Path, contents: list[str]) -> None:
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir()
    for content in contents:
        save(where / content, content)


@pytest.mark.usefixtures("swaps")
@pytest.mark.parametrize("before", [[], ["3"], ["1", "2", "3"]], ids=len)
def test_killed_anywhere_in_a_save(tmp_path: Path, before: list[str]) -> None:
    """The latest is complete at any time, nothing is lost, and the next save leaves nothing."""
    where, seen, keep_last = tmp_path / "run", set(), 2 if len(before) > 1 else None

    def overwrite() -> None:
        save(where / "3", "new", overwrite=True, keep_last=keep_last)

    for _ in lives(overwrite, lambda: start(where, before)):
        found = content_of(folder.latest(where))
        assert found == "new" or found == (before or [None])[-1]
        assert len(folder._complete_in(where)) >= min(len(before), 2)
        seen.add(found)
        save(where / "4", "next", keep_last=keep_last)
        hidden = [name for name in names(where) if name.startswith(".")]
        assert not hidden, "what is dead stays"
        if before and keep_last is None:
            assert content_of(where / "3") in ("3", "new"), "it is not in its place again"
        assert content_of(folder.latest(where)) == "next"
    assert seen == {"new", (before or [None])[-1]}


@pytest.mark.parametrize("target", ["old", ".fsdp_offload.replaced"])
def test_a_rename_that_fails_leaves_the_old_one(tmp_path: Path, target: str) -> None:
    """The process lives on, and puts back what it had moved."""
    path = tmp_path / "old"
    save(path, "old")
    made = folder.prepare(path, overwrite=True)
    written, rename, failed = fill(made, "new"), os.rename, []

    def refuse(one: Path, other: Path) -> None:
        is_second = target == ".fsdp_offload.replaced" or not path.exists()
        if target in (other.name, other.parent.name) and is_second and not failed:
            failed.append(other)
            raise OSError(errno.EIO, "Input/output error")
        rename(one, other)

    no_swap = mock.patch.object(folder, "_exchange", return_value=False)
    with no_swap, mock.patch.object(os, "rename", refuse), pytest.raises(OSError, match="Input"):
        folder.publish(made, path, written, overwrite=True, world_size=2, optimizer="")
    folder.discard(made)
    assert content_of(path) == "old"
    assert names(tmp_path) == ["old"]


@pytest.mark.parametrize(
    ("host", "age_s", "stays"),
    [("here", 1e6, True), ("there", 0, True), ("there", 700, False)],
    ids=["a living one of this host", "another host's", "a silent one of another host"],
)
def test_only_dead_saves_are_cleared(tmp_path: Path, host: str, age_s: int, stays: bool) -> None:
    with mock.patch.object(folder, "_host", return_value=host):
        made = folder.prepare(tmp_path / "a", overwrite=False)
        fill(made, "half")
    for path in (*made.iterdir(), made):
        os.utime(path, (time.time() - age_s,) * 2)
    with mock.patch.object(folder, "_host", return_value="here"):
        save(tmp_path / "a", "one")
    assert names(tmp_path) == ([made.name] if stays else []) + ["a"]


def test_a_save_shows_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "SILENT_S", 0.5)
    made, ended = folder.prepare(tmp_path / "a", overwrite=False), threading.Event()
    thread = threading.Thread(target=folder.show_life, args=(made, ended))
    thread.start()
    time.sleep(1.0)
    with mock.patch.object(folder, "_host", return_value="elsewhere"):
        save(tmp_path / "b", "one")
        assert made.exists()
        ended.set()
        thread.join()
        time.sleep(0.8)
        save(tmp_path / "c", "one")
    assert names(tmp_path) == ["b", "c"]
