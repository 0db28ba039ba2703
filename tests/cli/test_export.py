"""``export`` writes what ``safetensors`` reads: the weights, or the masters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from fsdp_offload.cli.main import main
from tests.cli.checkpoints import save


def test_options_are_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = save(tmp_path / "one").state_dict()
    options = ["--dtype", "fp32", "--model-prefix", "model.", "--optimizer-prefix", "optim."]
    assert main(["export", str(tmp_path / "one"), str(tmp_path / "out"), *options]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    path = tmp_path / "out" / "model.safetensors"
    assert line.split() == [str(path.stat().st_size), str(path)]
    found = safetensors.torch.load_file(path)
    assert found.keys() == weights.keys()
    for name, master in found.items():
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), weights[name])
    assert not torch.equal(found["weight"], weights["weight"].float())  # the remainder counts


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "one")
    assert main(["export", str(tmp_path / "one"), str(tmp_path / "out"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["files"]
    path = tmp_path / "out" / "model.safetensors"
    assert row == {"path": str(path), "file_bytes": path.stat().st_size}


@pytest.mark.parametrize(
    ("options", "code", "error"),
    [
        (["--max-shard-bytes", "much"], 2, "max_shard_bytes='much': not a size"),
        (["--model-prefix", "ema."], 1, "weights are missing"),
    ],
)
def test_what_cannot_be_exported(
    options: list[str], code: int, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "one")
    assert main(["export", str(tmp_path / "one"), str(tmp_path / "out"), *options]) == code
    found = capsys.readouterr()
    assert (found.out, found.err.count("\n")) == ("", 1)
    assert error in found.err
    assert "Remedy: " in found.err
    assert not list(tmp_path.glob("out/*.safetensors"))
