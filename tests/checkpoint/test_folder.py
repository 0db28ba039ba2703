"""Folders: complete or not there, whatever file operation is the last one."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import shutil
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
from fsdp_offload.checkpoint.files import Checksums, encode_table
from fsdp_offload.checkpoint.folder import Manifest


def fill(where: Path, content: str) -> None:
    """Two data files and ``.metadata``, as ranks leave them."""
    for rank in range(2):
        data = f"{content} of rank {rank}".encode()
        (where / f"__{rank}_0.distcp").write_bytes(data + table(rank))
    metadata = Metadata({}, planner_data=content, storage_data={})
    (where / ".metadata").write_bytes(pickle.dumps(metadata))


def table(crc: int) -> bytes:
    return encode_table([Checksums(0, [crc])], 64)


def check(path: Path) -> str:
    """Raises what a load would; what the checkpoint says."""
    manifest, metadata = folder.open_checkpoint(path)
    folder.check_files(path, manifest, metadata)
    return str(metadata.planner_data)


def save(
    path: Path, content: str, *, overwrite: bool = False, keep_last: int | None = None
) -> None:
    """The file operations of a save, in their order."""
    fill(folder.prepare(path, overwrite=overwrite), content)
    folder.publish(path, world_size=2, optimizer="AdamW")
    if keep_last is not None:
        folder.prune(path, keep_last)


def content_of(path: Path | None) -> str | None:
    """What a complete checkpoint says; fails if it is not complete."""
    if path is None:
        return None
    assert folder.read_manifest(path) is not None
    content = check(path)
    for rank in range(2):
        assert (path / f"__{rank}_0.distcp").read_bytes().startswith(f"{content} of".encode())
    return content


def names(where: Path) -> list[str]:
    return sorted(path.name for path in where.iterdir())


def test_a_published_folder_is_complete_and_alone(tmp_path: Path) -> None:
    save(tmp_path / "a", "one")
    assert names(tmp_path) == ["a"]
    assert names(tmp_path / "a") == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
    manifest = folder.read_manifest(tmp_path / "a")
    assert manifest is not None
    assert (manifest.world_size, manifest.optimizer) == (2, "AdamW")
    assert set(manifest.files) == {".metadata", "__0_0.distcp", "__1_0.distcp"}


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
    later = Manifest(1, 2, "AdamW", {}, version=folder.VERSION + 1)
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


@pytest.mark.parametrize("name", ["empty", "absent", "file"])
def test_a_folder_without_metadata_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"no \.metadata"):
        check(tmp_path / name)


def test_a_folder_that_exists_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", "one")
    with pytest.raises(CheckpointError, match=r"it exists.*overwrite=True"):
        folder.prepare(tmp_path / "a", overwrite=False)
    assert content_of(tmp_path / "a") == "one"
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", "two")
    assert content_of(tmp_path / "empty") == "two"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("path", "words"), [("file", "file: "), ("file/below", "file"), ("link", "link: ")]
)
def test_what_is_no_folder_is_never_replaced(
    tmp_path: Path, overwrite: bool, path: str, words: str
) -> None:
    (tmp_path / "file").write_text("mine")
    save(tmp_path / "a", "one")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(CheckpointError, match=words):
        folder.prepare(tmp_path / path, overwrite=overwrite)
    assert (tmp_path / "file").read_text() == "mine"
    assert content_of(tmp_path / "link") == "one"
    assert names(tmp_path) == ["a", "file", "link"]


@pytest.mark.parametrize("name", ["thesis.txt", "__init__.py", "manifest.json"])
def test_a_folder_of_other_things_is_never_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_text("mine")
    with pytest.raises(CheckpointError, match="other files than a checkpoint"):
        folder.prepare(tmp_path / "a", overwrite=True)
    assert (tmp_path / "a" / name).read_text() == "mine"


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
    for name in ("a", "b"):
        save(tmp_path / name, name, keep_last=1)
    assert names(tmp_path) == [".photos.removed", "b"]
    assert names(tmp_path / ".photos.removed") == ["x"]


def test_a_rewritten_one_is_the_newest(tmp_path: Path) -> None:
    save(tmp_path / "a", "one")
    save(tmp_path / "b", "two")
    save(tmp_path / "a", "three", overwrite=True, keep_last=1)
    assert names(tmp_path) == ["a"]
    assert content_of(tmp_path / "a") == "three"


class Killed(BaseException):
    """The process is gone: nothing is done any more."""


OPERATIONS = ("rename", "unlink", "rmdir", "mkdir", "fsync")


@contextlib.contextmanager
def life(left: int) -> Iterator[None]:
    """File operations succeed ``left`` times; then the process is dead."""
    done = itertools.count()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def one_more(*args: Any, **kwargs: Any) -> Any:
            if next(done) >= left:
                raise Killed
            return call(*args, **kwargs)

        return one_more

    with mock.patch.multiple(os, **{name: counted(getattr(os, name)) for name in OPERATIONS}):
        yield


def lives(run: Callable[[], None], restore: Callable[[], None]) -> Iterator[None]:
    """After each prefix of the file operations of ``run``; the last time, all of them are done."""
    for left in range(1000):
        restore()
        try:
            with life(left):
                run()
        except Killed:
            yield
        else:
            yield
            return
    raise AssertionError("it never ended")


def start(where: Path, contents: list[str]) -> None:
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir()
    for content in contents:
        save(where / content, content)


def test_killed_anywhere_in_a_first_save(tmp_path: Path) -> None:
    path = tmp_path / "run" / "a"
    seen = set()
    for _ in lives(lambda: save(path, "new"), lambda: start(path.parent, [])):
        found = content_of(folder.latest(path.parent))
        assert found in (None, "new")
        assert not path.exists() or content_of(path) == "new"
        seen.add(found)
        save(path, "next", overwrite=True)
        assert names(path.parent) == ["a"]
        assert content_of(path) == "next"
    assert seen == {None, "new"}


def test_killed_anywhere_in_an_overwrite(tmp_path: Path) -> None:
    """The latest is complete at any time."""
    path = tmp_path / "run" / "old"
    seen, between = set(), 0
    for _ in lives(lambda: save(path, "new", overwrite=True), lambda: start(path.parent, ["old"])):
        latest = content_of(folder.latest(path.parent))
        assert latest in ("old", "new")
        if path.exists():
            assert (content_of(path), latest) != ("new", "old"), "the latest is the older one"
        between += not path.exists()
        seen.add(latest)
        save(path, "next", overwrite=True)
        assert names(path.parent) == ["old"]
        assert content_of(path) == "next"
    assert seen == {"old", "new"}
    assert between >= 1, "never killed between the two renames"


def test_killed_twice_in_an_overwrite(tmp_path: Path) -> None:
    """The second process finds any leftover of the first, and is killed anywhere as well."""
    path = tmp_path / "run" / "old"
    leftovers = tmp_path / "leftovers"
    first = lives(lambda: save(path, "new", overwrite=True), lambda: start(path.parent, ["old"]))
    for _ in itertools.islice(first, 0, None, 3):
        shutil.rmtree(leftovers, ignore_errors=True)
        shutil.copytree(path.parent, leftovers)
        before = content_of(folder.latest(path.parent))

        def restore() -> None:
            shutil.rmtree(path.parent)
            shutil.copytree(leftovers, path.parent)

        for _ in lives(lambda: save(path, "third", overwrite=True), restore):
            assert content_of(folder.latest(path.parent)) in (before, "third")
            assert content_of(folder.latest(path.parent)) in (before, "third")
        restore()


def test_killed_anywhere_while_old_ones_are_removed(tmp_path: Path) -> None:
    where = tmp_path / "run"
    for _ in lives(
        lambda: save(where / "new", "new", keep_last=2),
        lambda: start(where, ["one", "two", "three"]),
    ):
        assert content_of(folder.latest(where)) in ("three", "new")
        assert len(folder._complete_in(where)) >= 2
        save(where / "next", "next", keep_last=1)
        assert content_of(folder.latest(where)) == "next"
        assert names(where) == ["next"], "what was half removed stays"


def test_killed_between_renames_and_saved_elsewhere(tmp_path: Path) -> None:
    """A complete checkpoint that stands aside is listed, counted and pruned like any other."""
    where = tmp_path / "run"
    path = where / "old"
    for _ in lives(lambda: save(path, "new", overwrite=True), lambda: start(where, ["old"])):
        before = content_of(folder.latest(where))
        save(where / "b", "b")
        assert content_of(folder.latest(where)) == "b"
        assert before in [content_of(found) for found in folder._complete_in(where)]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rename_that_fails_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The process lives on and clears what stands aside: what was there is still found."""
    path = tmp_path / "run" / "old"
    start(path.parent, ["old"])
    calls: list[object] = []
    rename = os.rename

    def refuse(*args: Any) -> None:
        calls.append(args)
        if len(calls) == failing + 1:
            raise OSError(5, "Input/output error")
        rename(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises((OSError, CheckpointError)):
            save(path, "new", overwrite=True)
    shutil.rmtree(folder.aside(path), ignore_errors=True)  # as Writer.discard() does
    assert content_of(folder.latest(path.parent)) == "old"
    save(path, "next", overwrite=True)
    assert content_of(path) == "next"
    assert names(path.parent) == ["old"]
