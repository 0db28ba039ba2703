"""What a save or a load cannot do is refused in words, before anything is written."""

from __future__ import annotations

import copy
import json
import os
import pickle
import select
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_offload import checkpoint
from fsdp_offload.checkpoint import folder
from fsdp_offload.core.errors import (
    CheckpointCorruptError,
    CheckpointError,
    ClosedError,
    ConfigError,
    StateDictError,
)
from tests.checkpoint.jobs import Ranks
from tests.checkpoint.test_saving import Pair, layers, pair_of, values_of
from tests.helpers.compare import assert_same

pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.mark.parametrize("path", [".", "..", "../here", "/"])
def test_the_current_folder_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: Pair, path: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(CheckpointError, match="current folder"):
        checkpoint.save(path, *pair)
    assert Path.cwd() == tmp_path / "here"
    assert [p.name for p in tmp_path.iterdir()] == ["here"]


def test_a_file_of_another_job_is_named_as_such(tmp_path: Path, pair: Pair) -> None:
    prepare = folder.prepare

    def beside(path: Path, **options: Any) -> Path:
        made = prepare(path, **options)
        (made / "__0_0.distcp").touch()
        return made

    with (
        mock.patch.object(folder, "prepare", beside),
        pytest.raises(CheckpointError, match="another job saves to the same path") as caught,
    ):
        checkpoint.save(tmp_path / "one", *pair)
    assert "path of its own" in caught.value.remedy


FILES = {".metadata": [10, 3], "__0_0.distcp": [10, 3]}
GOOD = {
    "format": folder.FORMAT,
    "version": folder.VERSION,
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


def test_what_cannot_be_removed_fails_no_save(
    tmp_path: Path, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save(tmp_path / "a", *pair)
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name == "a":
            raise PermissionError(13, "Permission denied")
        return real(self, target)

    with mock.patch.object(Path, "rename", rename):
        checkpoint.save(tmp_path / "b", *pair, keep_last=1)
    assert "Permission denied" in caplog.text
    assert checkpoint.latest(tmp_path) == tmp_path / "b"


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
