"""``inspect`` of checkpoints that are whole, broken, of others, or code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from fsdp_offload import CheckpointError, checkpoint
from fsdp_offload.checkpoint.files import read_table
from fsdp_offload.cli import inspection
from fsdp_offload.cli.main import main
from tests.cli.checkpoints import save

GOLDEN = Path(__file__).parents[2] / "checkpoints" / "golden"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "one"
    save(path)
    return path


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copied"))


def inspect(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    code = main(["inspect", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_what_it_holds(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = inspect(capsys, saved)
    assert (code, report["faults"], report["checksums"]) == (0, [], "elements")
    rows = {row["name"]: row for row in report["tensors"]}
    assert rows["model.weight"] == {
        "name": "model.weight", "dtype": "bfloat16", "shape": [3, 4], "tensor_bytes": 24,
    }  # fmt: skip
    assert rows["optim.state.weight.exp_avg"]["dtype"] == "float32"
    assert rows["optim.state.bias.master_remainder"]["shape"] == [3]
    assert report["tensor_bytes"] == sum(row["tensor_bytes"] for row in rows.values())
    assert "optim.param_groups.weight.lr" in report["other_values"]
    assert report["extra"] == {
        "step": 7, "rates": [0.5, None], "seen": "float32 [2]", "name": "a",
    }  # fmt: skip
    assert (report["optimizer_steps"], report["ranks"]) == ([1.0, 1.0], 1)
    assert report["optimizer"] == "AdamW"


def test_as_text(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [str(saved), "complete; all checksums match"]
    assert "extra step = 7" in lines
    assert "             24  bfloat16  model.weight  [3, 4]" in lines


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_an_element_that_changed(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = copied / "__0_0.distcp"
    metadata = pickle.loads((copied / ".metadata").read_bytes())
    (info,) = (i for index, i in metadata.storage_data.items() if index.fqn == "model.weight")
    table = read_table(file)
    assert table is not None
    items = [(i.offset, i.length) for i in metadata.storage_data.values()]
    flip(file, info.offset + table.of(items, file)[info.offset].data_start)
    code, report = inspect(capsys, copied)
    assert (code, report["checksums"]) == (1, "tables")
    assert "__0_0.distcp" in report["faults"][0]
    assert "was written" in report["faults"][0]
    assert len(report["tensors"]) == 10  # what it should hold is told all the same
    assert inspect(capsys, copied, "--skip-elements")[0] == 0  # as the option says


def test_a_file_that_is_missing_or_short(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = copied / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 1)
    code, report = inspect(capsys, copied, "--skip-elements")
    assert (code, report["checksums"]) == (1, "none")
    assert "bytes, but" in report["faults"][0]
    file.unlink()
    assert main(["inspect", str(copied)]) == 1
    assert f"fault: {file}: it is missing" in capsys.readouterr().out


@pytest.mark.parametrize("name", [".metadata", "manifest.json"])
def test_metadata_that_changed(name: str, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(copied / name, (copied / name).stat().st_size // 2)
    assert main(["inspect", str(copied), "--json"]) == 1
    found = capsys.readouterr()
    assert (found.out, found.err.count("\n")) == ("", 1)
    # The byte is in a checksum, in what it covers, or a bracket of the JSON text.
    text = f"fsdp-offload: {copied / name}: it "
    assert found.err.startswith((f"{text}is not ", f"{text}changed after"))


def test_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "none")]) == 1
    assert "none: it does not exist" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path)]) == 1
    assert "it has no .metadata" in capsys.readouterr().err
    for step in (10, 5, 100, 15):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / ".metadata").touch()
    assert main(["inspect", str(tmp_path)]) == 1
    text = "not a checkpoint itself; it holds step-10, step-15, step-100. Remedy: pass one of them"
    assert capsys.readouterr().err == f"fsdp-offload: {tmp_path}: {text}\n"


def named(module: str, name: str) -> bytes:
    """What stands in a pickle for a class or a function."""
    return b"".join(b"\x8c%c%s" % (len(text), text.encode()) for text in (module, name)) + b"\x93"


LAYOUT = named("torch.serialization", "_get_layout")
STRIDED = b"\x8c\x0dtorch.strided"
CODE = named("posix", "mkdir") + b"\x8c\x04made\x85R."
EXTRA = b"N}\x8c\x05extraK\x01s\x86b."  # sets extra = 1, as of an object with slots
HARMFUL = {
    "code": b"\x80\x04" + CODE,
    # TypeError unless the second line, which changes a function, has been read once before.
    "code for who reads twice": b"\x80\x04" + LAYOUT + b"\x94" + STRIDED + b"\x85R\x94"
    b"h\0}\x8c\x05cache}" + STRIDED + b"K\x03ssb0"
    b"0" + named("torch", "Size") + b"h\1\x85\x85R0" + CODE,
    "a class changed": b"\x80\x04" + named(Metadata.__module__, "Metadata") + EXTRA,
    "a function changed": b"\x80\x04" + LAYOUT + EXTRA,
}  # fmt: skip
READS: dict[str, Callable[[Path], object]] = {
    "inspect": lambda path: inspection.look(path, elements=True),
    "export": lambda path: checkpoint.export_safetensors(path, path / "out"),
    "load": lambda path: checkpoint.load(path, torch.nn.Linear(2, 2)),
}


@pytest.mark.parametrize("how", HARMFUL)
@pytest.mark.parametrize("read", READS)
def test_metadata_neither_run_code_nor_change_torch(
    read: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(HARMFUL[how])
    with pytest.raises(CheckpointError) as caught:
        READS[read](tmp_path)
    assert how != "code" or "posix.mkdir: it is not a description of tensors" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [".metadata"]
    assert not hasattr(Metadata, "extra")
    assert vars(torch.serialization._get_layout).keys() == {"cache"}
    if how == "code":
        pickle.loads(HARMFUL[how])
        assert (tmp_path / "made").exists()  # it was code


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_checkpoints_of_all_kinds(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = inspect(capsys, GOLDEN / name / "checkpoint")
    assert (code, report["faults"]) == (0, [])
    assert report["checksums"] == ("none" if name.startswith("torch") else "elements")
    assert report["optimizer_steps"] == [3.0, 3.0]


def test_a_line_for_each_tensor_so_that_diff_tells_what_differs(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines(path: Path) -> list[str]:
        assert main(["inspect", str(path), "--skip-elements"]) == 0
        found = [line.split() for line in capsys.readouterr().out.splitlines() if "[" in line]
        return [" ".join(words[1:]) for words in found if words[0].isdecimal()]

    save(tmp_path / "wide", width=5, dtype=torch.float32)
    here, there = lines(saved), lines(tmp_path / "wide")
    assert [line.split()[1] for line in here] == sorted(line.split()[1] for line in here)
    assert "bfloat16 model.weight [3, 4]" in set(here) - set(there)
    assert "float32 model.weight [5, 4]" in set(there) - set(here)
    assert "float32 optim.state.weight.step []" in set(here) & set(there)
