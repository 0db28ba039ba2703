"""What a save or a load cannot do is refused in words, before anything is written."""

from __future__ import annotations

import copy
import errno
import gc
import json
import os
import pickle
import re
import select
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_offload import checkpoint
from fsdp_offload.checkpoint import manifest
from fsdp_offload.cli import inspection
from fsdp_offload.core.errors import (
    CheckpointCorruptError,
    CheckpointError,
    ClosedError,
    ConfigError,
    OffloadError,
    StateDictError,
)
from tests.checkpoint.jobs import Ranks
from tests.checkpoint.test_async import gate
from tests.checkpoint.test_saving import Pair, layers, pair_of, values_of
from tests.helpers.compare import assert_same


@pytest.fixture
def pair() -> Pair:
    return pair_of(layers(6, 6))


@pytest.mark.parametrize(
    "options",
    [{"keep_last": 1.5}, {"keep_last": True}, {"threads": -1}, {"threads": 0}, {"threads": 2.0}],
    ids=str,
)
def test_what_is_no_count_is_refused_first(
    tmp_path: Path, pair: Pair, options: dict[str, Any]
) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        checkpoint.save(tmp_path / "one", *pair, **options)
    assert not list(tmp_path.iterdir())


CURRENT = (CheckpointError, "current folder")
NO_PATH = (ConfigError, "not a path of a mounted file system")
LONG = (ConfigError, "choose a shorter name")
REFUSED: dict[str, tuple[type[OffloadError], str]] = {
    **dict.fromkeys((".", "..", "../here", "/", ""), CURRENT),
    **dict.fromkeys(("s3://bucket/one", "hdfs:/one", "file:///one", "a\0b"), NO_PATH),
    **dict.fromkeys(("x" * 256, "\u5b57" * 86, "x" * 256 + "/one", "x/" * 2000 + "one"), LONG),
    "../full": (CheckpointError, r"it exists.*overwrite=True"),
    "../file": (CheckpointError, "file is not a folder"),
    "../file/below": (CheckpointError, "file is not a folder"),
    "../link": (CheckpointError, "link is not a folder"),
    "../mine": (CheckpointError, "files that do not belong to a checkpoint"),
}


@pytest.mark.parametrize("path", REFUSED, ids=lambda path: ascii(path)[:20])
@pytest.mark.parametrize("overwrite", [False, True], ids=["", "overwrite"])
def test_a_path_that_cannot_be_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, overwrite: bool
) -> None:
    """By all calls that write, and nothing on disk has changed."""
    model = layers(2)
    checkpoint.save(tmp_path / "full", model)
    (tmp_path / "link").symlink_to("full")
    (tmp_path / "file").write_text("mine")
    for name in ("here", "mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine" / "manifest.json").write_text("mine")
    monkeypatch.chdir(tmp_path / "here")
    before = sorted(tmp_path.rglob("*"))
    kind, words = REFUSED[path]
    calls = [lambda: checkpoint.save(path, model, overwrite=overwrite)]
    calls += [lambda: checkpoint.async_save(path, model, overwrite=overwrite).result(60)]
    if kind is ConfigError:  # at once
        calls += [lambda: checkpoint.load(path, model), lambda: checkpoint.latest(path)]
        calls += [lambda: checkpoint.async_save(path, model)]
        calls += [lambda: checkpoint.export_safetensors(model, path)]
    for call in calls if not (overwrite and path == "../full") else ():
        with pytest.raises(kind, match=words):
            call()
    assert sorted(tmp_path.rglob("*")) == before


def test_the_longest_names_are_no_worse(tmp_path: Path) -> None:
    for name in ("x" * 255, "\u5b57" * 85):
        for _ in range(2):
            checkpoint.save(tmp_path / name[0] / name, layers(2), overwrite=True, keep_last=1)
        assert [p.name for p in (tmp_path / name[0]).iterdir()] == [name]


def test_a_path_is_that_of_the_folder_in_which_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with gate():
        future = checkpoint.async_save("one", layers(2))
        monkeypatch.chdir("/")
    future.result(60)
    assert checkpoint.latest(tmp_path) == tmp_path / "one"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_failed_save_leaves_no_folder_above_it(tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(os, "pwrite", side_effect=full), pytest.raises(CheckpointError):
        checkpoint.save(tmp_path / "run" / "deep" / "one", layers(2))
    writer = checkpoint.Writer(tmp_path / "run" / "one")  # in the caller's own dcp.save
    with mock.patch.object(os, "pwrite", side_effect=full), pytest.raises(CheckpointException):
        dcp.save({"a": torch.ones(3)}, storage_writer=writer, no_dist=True)
    del writer
    gc.collect()
    assert not list(tmp_path.iterdir())


FILES = {".metadata": [10, 3], "__0_0.distcp": [10, 3]}
GOOD = {
    "format": manifest.FORMAT,
    "version": manifest.VERSION,
    "time_ns": 1,
    "world_size": 1,
    "optimizer": "AdamW",
    "files": FILES,
}
WRONG: list[Any] = [None, {**GOOD, "time_ns": []}, {**GOOD, "files": None}]
WRONG += [{**GOOD, "files": {".metadata": entry}} for entry in ([1], [None, 2])]


@pytest.mark.parametrize("values", WRONG, ids=lambda values: json.dumps(values)[-60:])
def test_a_manifest_of_another_form_is_corrupt(tmp_path: Path, values: Any) -> None:
    """With a right checksum, as an attacker would make it."""
    path = tmp_path / "one"
    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps(3))
    text = json.dumps(values)
    data = json.dumps({"crc32": zlib.crc32(text.encode()), "manifest": text})
    (path / "manifest.json").write_text(data)
    assert checkpoint.latest(tmp_path) is None
    with pytest.raises(CheckpointCorruptError):
        checkpoint.load(path, layers(6, 6))


@pytest.mark.parametrize("name", ["storage_data", "state_dict_metadata"])
@pytest.mark.parametrize("value", [None, {"a": None}], ids=str)
def test_metadata_of_another_form_is_corrupt(
    tmp_path: Path, pair: Pair, name: str, value: Any
) -> None:
    checkpoint.save(tmp_path / "one", *pair)
    (tmp_path / "one" / "manifest.json").unlink()
    for file in (tmp_path / "one").glob("__*"):
        file.rename(file.with_name("data"))
    path = tmp_path / "one" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    setattr(metadata, name, value)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path / "one", *pair)


@pytest.mark.parametrize("kind", ["above", "below and above", "absolute", "of the manifest"])
def test_files_outside_of_the_folder_are_refused(tmp_path: Path, pair: Pair, kind: str) -> None:
    """By all that read; the file is there, and has what the checkpoint says."""
    path = tmp_path / "one"
    checkpoint.save(path, *pair)
    (path / "__0_0.distcp").rename(tmp_path / "data")
    name = {"below and above": "x/../../data", "absolute": str(tmp_path / "data")}.get(
        kind, "../data"
    )
    if kind == "of the manifest":
        file = path / "manifest.json"
        values = json.loads(json.loads(file.read_text())["manifest"])
        values["files"][name] = values["files"].pop("__0_0.distcp")
        text = json.dumps(values)
        file.write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "manifest": text}))
    else:
        (path / "manifest.json").unlink()
        metadata = pickle.loads((path / ".metadata").read_bytes())
        for info in metadata.storage_data.values():
            info.relative_path = name
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
    calls: list[Callable[[], Any]] = [
        lambda: checkpoint.load(path, *pair),
        lambda: checkpoint.export_safetensors(path, tmp_path / "out"),
        lambda: inspection.look(path, elements=True),
    ]
    for call in calls:
        with pytest.raises(
            CheckpointError, match=re.escape(f"a file {name!r}: its name leads outside")
        ):
            call()


def test_what_cannot_be_removed_fails_no_save(
    tmp_path: Path, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save(tmp_path / "1", *pair)
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if source.name == "1":
            raise PermissionError(13, "Permission denied")
        real(source, target)

    with mock.patch.object(os, "rename", rename):
        checkpoint.save(tmp_path / "2", *pair, keep_last=1)
    assert "Permission denied" in caplog.text
    assert checkpoint.latest(tmp_path) == tmp_path / "2"


def save_in_a_fork(path: Path) -> list[str]:
    """Saves and loads by a child of each rank, which has no part in the process group."""
    torch.manual_seed(0)
    pair = pair_of(layers(6, 6))
    checkpoint.save(path / "good", *pair)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        told = []
        for call in (
            lambda: checkpoint.save(path / "new", *pair),
            lambda: checkpoint.async_save(path / "new", *pair),
            lambda: checkpoint.load(path / "good", *pair),
        ):
            try:
                call()
            except BaseException as error:
                told.append(type(error).__name__)
        os.write(writing, " ".join(told).encode())
        os._exit(0)
    answered, _, _ = select.select([reading], [], [], 20)
    if not answered:
        os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(writing)
    told = os.read(reading, 1000).decode().split()
    dist.barrier()
    checkpoint.load(path / "good", *pair)
    return told


def test_a_forked_child_is_refused_at_once(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks(2).run(save_in_a_fork, tmp_path):
        assert told == [ClosedError.__name__] * 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("exp_avg", torch.empty(6, 6, device="meta")),
        ("step", torch.empty((), device="meta")),
        ("step", torch.tensor(3 + 1j)),
        ("step", 3 + 1j),
    ],
    ids=["meta moment", "meta step", "complex step", "complex number"],
)
def test_state_without_values_is_refused(pair: Pair, name: str, value: Any) -> None:
    saved = copy.deepcopy(pair[1].state_dict())
    saved["state"][0][name] = value
    before = values_of(pair)
    with pytest.raises(StateDictError, match=name):
        pair[1].load_state_dict(saved)
    assert_same(values_of(pair), before)
    pair[1].step()


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ({"step": 1, "a": object()}, "extra['a'] of type object"),
        ({"a": {"b": [object()]}}, "extra['a']['b'] of type list"),
        ({"a": select.poll()}, "extra['a'] of type poll"),
        ({"a": sys.version_info}, "extra['a'] of type version_info"),
        ({object: 1}, "extra of type dict"),
    ],
    ids=["an entry", "inside an entry", "no pickle", "a tuple of one instance", "a key"],
)
def test_extra_that_would_run_code_is_named(
    extra: Any, what: str, pair: Pair, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        checkpoint.save(tmp_path / "one", *pair, extra=extra)
    assert caught.value.what == what
    assert caught.value.reason == "a load would have to run its code"
    assert os.listdir(tmp_path) == []
