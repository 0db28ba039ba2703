"""``export`` writes what ``safetensors`` reads: the weights, or the masters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from fsdp_offload.cli.main import main
from tests.cli.checkpoints import save


def test_weights_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save(tmp_path / "one")
    assert main(["export", str(tmp_path / "one"), str(tmp_path / "out"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["files"]
    path = Path(row["path"])
    assert row == {"path": f"{tmp_path}/out/model.safetensors", "file_bytes": path.stat().st_size}
    found = safetensors.torch.load_file(path)
    assert found.keys() == {"weight", "bias"}
    assert torch.equal(found["weight"], model.state_dict()["weight"])
    assert torch.equal(found["bias"], model.state_dict()["bias"])


def test_options_are_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save(tmp_path / "one")
    options = ["--dtype", "fp32", "--model-prefix", "model.", "--optimizer-prefix", "optim."]
    assert main(["export", str(tmp_path / "one"), str(tmp_path / "out"), *options]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = safetensors.torch.load_file(line.split()[1])
    master, weight = found["weight"], model.state_dict()["weight"]
    assert master.dtype == torch.float32
    assert torch.equal(master.bfloat16(), weight)
    assert not torch.equal(master, weight.float())  # the remainder counts


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
